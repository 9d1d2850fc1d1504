"""Saves and restores states that are files of their own: shards, and those of a framework.

Each rank writes its shards with torch.distributed.checkpoint; they can be read on another number of
ranks. A framework's object writes its files by itself (`FileState`). When all files are complete,
they are moved next to the checkpoint file, and their SHA-256 is in its list (`catalog`).
"""

import os
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.writer import stored_sha256
from clusterddp.distributed import agreement
from clusterddp.files import sync_folder

Objects = Mapping[str, Any]
"""Modules, their optimizers, and `FileState`s, by name."""


class FileState(Protocol):
    """State that writes and reads its own files, on all ranks together; Accelerate's Accelerator.

    `save_state` may raise any exception if it cannot write.
    """

    def save_state(self, directory: str) -> object: ...
    def load_state(self, directory: str) -> object: ...


def has_files(state: object) -> bool:
    """Return whether a state is a `FileState`."""
    return hasattr(state, "save_state") and hasattr(state, "load_state")


def is_sharded(module: object) -> bool:
    """Return whether a module's parameters are spread over ranks: FSDP's, or any DTensor."""
    if not isinstance(module, nn.Module):
        return False
    names = {type(part).__name__ for part in module.modules()}
    return "FullyShardedDataParallel" in names or any(
        hasattr(parameter, "device_mesh") for parameter in module.parameters()
    )


def select_sharded(objects: Objects) -> dict[str, Any]:
    """Return the `FileState`s, and with a sharded module the modules and the optimizers."""
    files = {name: each for name, each in objects.items() if has_files(each)}
    if not any(map(is_sharded, objects.values())):
        return files
    found = {
        name: each for name, each in objects.items() if isinstance(each, (Optimizer, nn.Module))
    }
    for each in found.values():
        if isinstance(each, Optimizer):
            find_owner(each, found)
    return found | files


def save(path: Path, objects: Objects) -> tuple[dict[str, str], str]:
    """Save the files of all ranks; the checkpoint `path` itself is written afterwards.

    Collective over the default process group. Returns the SHA-256 of each file by its path relative
    to the directory of `path`, and (at least on rank 0) the error of a rank that could not write.
    """
    final, (rank, _) = catalog.shards_of(path), agreement.rank_and_world_size()
    fresh = final.with_name(f".{final.name}")
    digests: dict[str, str] = {}
    try:
        problem = ""
        if rank == 0:
            for left in (fresh, final):
                shutil.rmtree(left, ignore_errors=True)
            fresh.mkdir()
    except OSError as error:
        problem = str(error)
    problem = next(filter(None, agreement.gather(problem)), "")
    if not problem:
        problem = next(filter(None, agreement.gather(_write(fresh, objects))), "")
    if not problem:
        digests, problem = _digests(fresh)
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
    return {f"{final.name}/{name}": each for name, each in digests.items()}, ""


def _write(folder: Path, objects: Objects) -> str:
    """Write the files of this rank; collective. Returns the error, empty if there is none."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    try:
        if states := _states(objects):
            save_shards(states, checkpoint_id=folder)
        for name, each in _files_of(objects).items():
            each.save_state(str(folder / name))
    except (CheckpointException, Exception) as error:  # torch's is a BaseException
        return _first_words(error)
    return ""


def check(path: Path, objects: Objects) -> None:
    """Compare the shapes of a module's parameters with the saved ones; torch 2.4 does not.

    Collective over the default group. Raises ValueError if they differ.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    states = _states({n: each for n, each in objects.items() if isinstance(each, nn.Module)})
    if not states:
        return
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
        if states:
            load_shards(states, checkpoint_id=catalog.shards_of(path))
    except CheckpointException as error:  # a BaseException
        raise ValueError(_first_words(error)) from None
    for name, each in objects.items():
        if has_files(each):
            each.load_state(str(catalog.shards_of(path) / name))
        elif isinstance(each, Optimizer):
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
        if not has_files(each)
    }


def _files_of(objects: Objects) -> dict[str, FileState]:
    return {name: each for name, each in objects.items() if has_files(each)}


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


def _digests(folder: Path) -> tuple[dict[str, str], str]:
    """Return the SHA-256 of all files as read back from disk, and the error; collective.

    The ranks share the files. Over NFS a rank may not see another host's at once: who sees a file
    that is left reads it in the second round.
    """
    rank, world_size = agreement.rank_and_world_size()
    names = [str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir()]
    mine = [name for name in names if zlib.crc32(name.encode()) % world_size == rank]
    known: dict[str, str] = {}
    for _ in range(2):
        digests, problem = {}, ""
        try:
            for name in mine:
                with suppress(OSError), (folder / name).open("rb") as opened:
                    os.fsync(opened.fileno())
                digests[name] = stored_sha256(folder / name)
        except OSError as error:
            problem = _first_words(error)
        for part, problems in agreement.gather((digests, problem)):
            known |= part
            problem = problem or problems
        if problem:
            break
        mine = [name for name in names if name not in known]
    return known, problem


def _first_words(error: BaseException) -> str:
    """Return a rank's own error from torch's report of all ranks."""
    failures = getattr(error, "failures", None) or {0: (error,)}
    cause = next(iter(failures.values()))[0]
    return (str(cause).splitlines() or [type(cause).__name__])[0]
