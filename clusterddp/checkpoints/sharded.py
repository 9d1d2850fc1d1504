"""Saves and restores sharded states with torch.distributed.checkpoint.

Each rank writes its shards. When all files are complete, they are moved next to the checkpoint
file, and their SHA-256 is in its list (`catalog`). They can be read on another number of ranks.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.writer import stored_sha256
from clusterddp.files import sync_folder

Objects = Mapping[str, Any]
"""Modules, and their optimizers, by name."""


def is_sharded(module: object) -> bool:
    """Return whether a module's parameters are spread over ranks: FSDP's, or any DTensor."""
    if not isinstance(module, nn.Module):
        return False
    names = {type(part).__name__ for part in module.modules()}
    return "FullyShardedDataParallel" in names or any(
        hasattr(parameter, "device_mesh") for parameter in module.parameters()
    )


def select_sharded(objects: Objects) -> dict[str, Any]:
    """Return the sharded modules and the optimizers; empty without a sharded module."""
    if not any(map(is_sharded, objects.values())):
        return {}
    found = {
        name: each for name, each in objects.items() if isinstance(each, (Optimizer, nn.Module))
    }
    for each in found.values():
        if isinstance(each, Optimizer):
            find_owner(each, found)
    return found


def save(path: Path, objects: Objects) -> tuple[dict[str, str], str]:
    """Save the shards of all ranks; the checkpoint `path` itself is written afterwards.

    Collective over the default process group. Returns the SHA-256 of each file by its path relative
    to the directory of `path`, and (at least on rank 0) the error of a rank that could not write.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    final, rank = catalog.shards_of(path), dist.get_rank()
    fresh = final.with_name(f".{final.name}")
    try:
        if rank == 0:
            for left in (fresh, final):
                shutil.rmtree(left, ignore_errors=True)
        dist.barrier()
        save_shards(_states(objects), checkpoint_id=fresh)
        dist.barrier()
        digests, problem = _digests(fresh, rank), ""
    except (CheckpointException, OSError) as error:
        digests, problem = {}, _first_words(error)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (digests, problem))
    problem = next((words for _, words in gathered if words), "")
    if rank == 0 and not problem:
        try:
            fresh.replace(final)
            sync_folder(final.parent)
        except OSError as error:
            problem = str(error)
    if problem:
        if rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)
        return {}, problem
    named = {f"{final.name}/{name}": each for part, _ in gathered for name, each in part.items()}
    return named, ""


def check(path: Path, objects: Objects) -> None:
    """Compare the shapes of a module's parameters with the saved ones; torch 2.4 does not.

    Collective over the default group. Raises ValueError if they differ.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    states = _states({n: each for n, each in objects.items() if isinstance(each, nn.Module)})
    stored = FileSystemReader(catalog.shards_of(path)).read_metadata().state_dict_metadata
    for name, state in states.items():
        for key, value in state.items():
            there = getattr(stored.get(f"{name}.{key}"), "size", None)
            if there is not None and isinstance(value, Tensor) and value.size() != there:
                sizes = f"saved {tuple(there)}, now {tuple(value.size())}"
                raise ValueError(f"size mismatch for {name}.{key}: {sizes}")


def restore(path: Path, objects: Objects) -> None:
    """Restore the result of `save`, at any number of ranks. Collective over the default group.

    Raises ValueError if it does not fit.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import (
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    states = _states(objects)
    try:
        load_shards(states, checkpoint_id=catalog.shards_of(path))
    except CheckpointException as error:  # a BaseException
        raise ValueError(_first_words(error)) from None
    for name, each in objects.items():
        if isinstance(each, Optimizer):
            set_optimizer_state_dict(find_owner(each, objects), each, states[name])
        else:
            set_model_state_dict(each, states[name])


def _states(objects: Objects) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    return {
        name: get_optimizer_state_dict(find_owner(each, objects), each)
        if isinstance(each, Optimizer)
        else get_model_state_dict(each)
        for name, each in objects.items()
    }


def find_owner(optimizer: Optimizer, objects: Objects) -> nn.Module:
    """Return the module that has all parameters of an optimizer. Raises TypeError if none has."""
    ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for each in objects.values():
        if isinstance(each, nn.Module) and ids <= {id(known) for known in each.parameters()}:
            return each
    raise TypeError(
        f"the {type(optimizer).__name__} does not belong to a module passed to Loop. Pass both: "
        "Loop(model=…, optimizer=…)"
    )


def _digests(folder: Path, rank: int) -> dict[str, str]:
    """Return the SHA-256 of the files that this rank wrote, read back from disk."""
    written = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    for file in written:
        with suppress(OSError), file.open("rb") as opened:
            os.fsync(opened.fileno())
    return {file.name: stored_sha256(file) for file in written}


def _first_words(error: BaseException) -> str:
    """Return a rank's own error from torch's report of all ranks."""
    failures = getattr(error, "failures", None) or {0: (error,)}
    cause = next(iter(failures.values()))[0]
    return (str(cause).splitlines() or [type(cause).__name__])[0]
