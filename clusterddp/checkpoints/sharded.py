"""Saves and restores states in separate files: shards, and the files of a framework.

Each rank copies its shards, and a thread writes them with torch.distributed.checkpoint; they can be
read on another number of ranks. A framework's object writes its own files (`FileState`).
When all files are complete, they are moved next to the checkpoint file, and their SHA-256 is in its
list (`catalog`).
"""

import os
import shutil
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from clusterddp import log
from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.catalog import stored_sha256
from clusterddp.distributed import agreement
from clusterddp.files import sync_folder

Objects = Mapping[str, Any]
"""Modules, their optimizers, and `FileState`s, by name."""
_CONNECT_SECONDS = 60.0
_WRITE_SECONDS = 1800.0
"""Time for which a rank that has written waits for the others; torch's default for gloo."""


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
    files = files_of(objects)
    if not any(map(is_sharded, objects.values())):
        return files
    found = {
        name: each for name, each in objects.items() if isinstance(each, (Optimizer, nn.Module))
    }
    for each in found.values():
        if isinstance(each, Optimizer):
            find_owner(each, found)
    return found | files


def connect(seconds: float = _WRITE_SECONDS) -> dist.ProcessGroup | None:
    """Return a group for the threads that write a checkpoint together; collective.

    seconds: for which a rank waits for another.

    Threads must not share the training's group: their collectives would interleave. None if gloo
    cannot connect the ranks, which is logged, or if there is no group at all.
    """
    from torch.distributed import distributed_c10d

    if not agreement.has_group():
        return None
    group, problem = None, ""
    try:
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=_CONNECT_SECONDS))
        group = cast(dist.ProcessGroup, made)
        set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=seconds), group)
    except RuntimeError as error:
        problem = _first_words(error)
    problem = next(filter(None, agreement.gather(problem)), "")
    if problem and dist.get_rank() == 0:
        log.info(
            f"gloo cannot connect the ranks: {problem}. Training will wait while its shards are "
            "written. Set GLOO_SOCKET_IFNAME to the network interface between the nodes"
        )
    return None if problem else group


class Save:
    """Save of the files of all ranks; the checkpoint itself is written afterwards.

    The constructor copies the shards to the CPU, and a thread writes them. `FileState`s write their
    files in the constructor.
    """

    def __init__(self, path: Path, objects: Objects, group: dist.ProcessGroup | None) -> None:
        """path: the checkpoint. group: see `connect`; without it the constructor does everything.

        Collective over the default process group. An earlier save must have ended.
        """
        self._final, (self._rank, _) = catalog.shards_of(path), agreement.rank_and_world_size()
        self._fresh = self._final.with_name(f".{self._final.name}")
        self._written: tuple[dict[str, str], str] = {}, ""
        problem, states = self._prepare(), {}
        if not problem:
            with torch.no_grad():
                states = tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), states_of(objects))
            problem = self._write_own(files_of(objects))
        self._thread = threading.Thread(
            target=self._run,
            args=(states, problem, group, agreement.device()),
            name="shards",
            daemon=True,
        )
        self._thread.start()
        if group is None and agreement.has_group():
            self._thread.join()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the thread, forever or for some seconds; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> tuple[dict[str, str], str]:
        """Wait; return the SHA-256 of each file by its path relative to the checkpoint's directory.

        Also returns, at least on rank 0, the error of a rank that could not write.
        """
        self._thread.join()
        return self._written

    def _prepare(self) -> str:
        """Make an empty directory; return rank 0's error on all ranks."""
        problem = ""
        if self._rank == 0:
            for left in (self._fresh, self._final):
                shutil.rmtree(left, ignore_errors=True)
            try:
                self._fresh.mkdir()
            except OSError as error:
                problem = str(error)
        return next(filter(None, agreement.gather(problem)), "")

    def _write_own(self, files: Mapping[str, FileState]) -> str:
        """Have the `FileState`s write their files; return this rank's error."""
        try:
            for name, each in files.items():
                each.save_state(str(self._fresh / name))
        except Exception as error:
            return _first_words(error)
        return ""

    def _run(
        self,
        states: dict[str, Any],
        problem: str,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        digests: dict[str, str] = {}
        try:
            if device.type == "cuda":  # a setting of each thread
                torch.cuda.set_device(device)
            digests, problem = self._write(states, problem, group)
            if self._rank == 0 and not problem:
                self._fresh.replace(self._final)
                sync_folder(self._final.parent)
        except Exception as error:  # the disk's, or gloo's if a rank is lost
            problem = _first_words(error)
        if problem and self._rank == 0:
            shutil.rmtree(self._fresh, ignore_errors=True)
        named = {f"{self._final.name}/{name}": each for name, each in digests.items()}
        self._written = ({}, problem) if problem else (named, "")

    def _write(
        self, states: dict[str, Any], problem: str, group: dist.ProcessGroup | None
    ) -> tuple[dict[str, str], str]:
        """Write the shards; return all files' digests, and an error of any rank."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save as save_shards

        if states:
            try:
                save_shards(states, checkpoint_id=self._fresh, process_group=group)
            except (CheckpointException, Exception) as error:  # torch's is a BaseException
                problem = problem or _first_words(error)
            states.clear()
        problem = next(filter(None, agreement.gather(problem, group=group)), "")
        return ({}, problem) if problem else _digests(self._fresh, group)


def check(path: Path, objects: Objects) -> None:
    """Compare the shapes of a module's parameters with the saved ones; torch 2.4 does not.

    Collective over the default group. Raises ValueError if they differ.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    states = states_of({n: each for n, each in objects.items() if isinstance(each, nn.Module)})
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
    """Restore the result of `Save`, at any number of ranks. Collective over the default group.

    Raises ValueError if it does not fit.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import (
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load as load_shards

    states = states_of(objects)
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


def states_of(objects: Objects) -> dict[str, Any]:
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


def files_of(objects: Objects) -> dict[str, FileState]:
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


def _digests(folder: Path, group: dist.ProcessGroup | None) -> tuple[dict[str, str], str]:
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
        for part, problems in agreement.gather((digests, problem), group=group):
            known |= part
            problem = problem or problems
        if problem:
            break
        mine = [name for name in names if name not in known]
    return known, problem


def _first_words(error: BaseException) -> str:
    """Return a rank's own error from torch's report of all ranks."""
    cause = next(iter((getattr(error, "failures", None) or {0: (error,)}).values()))[0]
    words = (str(cause).splitlines() or [type(cause).__name__])[0]
    # How torch's zip writer reports a write(2) that failed or was cut short.
    return f"the disk may be full ({words})" if "unexpected pos" in words else words
