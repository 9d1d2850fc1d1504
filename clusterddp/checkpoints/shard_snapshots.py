"""Snapshots of a sharded training in the memory of its nodes.

Each rank keeps its shards, and the next node keeps a copy of them, so that a lost node costs no
more than a killed rank. The shards are copied to the CPU between two steps; a thread then writes
them as torch.distributed.checkpoint does and sends them to the next node.
"""

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from clusterddp.checkpoints import sharded, state
from clusterddp.checkpoints.sharded import Objects
from clusterddp.checkpoints.snapshots import (
    SHARE_OF_MEMORY,
    Copy,
    Snapshots,
    first_line,
    free_bytes,
)
from clusterddp.checkpoints.state import Content
from clusterddp.distributed import agreement
from clusterddp.formatting import memory
from clusterddp.ranks.variables import host_name
from clusterddp.run import node_memory
from clusterddp.run.attempt import Attempt
from clusterddp.run.node_memory import HEADER_BYTES, Index, Record

_OF_OWN, _OF_KEPT = 4, 3
"""Copies of a rank's shards (on the CPU, in a file, in two halves) and of another's (received)."""
_THREAD_SHARE = 0.1
"""Largest part of the time in which the thread works."""
_WAIT_SECONDS = 300.0
"""Time for which a thread waits for another rank's, which may have failed."""
_METADATA = ".metadata"


class ShardSnapshots(Snapshots):
    """Snapshots of one attempt whose model is sharded. `take` is collective."""

    def __init__(self, attempt: Attempt, every: float, shards: Objects) -> None:
        """shards: modules and their optimizers, as for `sharded.Save`.

        With FSDP1, whose state takes collectives, there are no snapshots.
        """
        super().__init__(attempt, 0.0 if any(map(_is_fsdp1, shards.values())) else every)
        self._shards = shards
        self._group: dist.ProcessGroup | None = None
        self._keepers: list[int] = []
        """For each rank, the rank on another node that keeps a copy of its shards, or itself."""
        self._copies: list[Any] = []
        """The state's leaves on the CPU, in the order of its tree."""
        self._halves: tuple[int, ...] = ()
        self._which = 0
        self._thread: threading.Thread | None = None
        self._not_before = 0.0

    def close(self, seconds: float = 300.0) -> None:
        if self._thread:
            self._thread.join(seconds)

    def is_due(self) -> bool:
        # torch would have an optimizer without a state make a step.
        optimizers = [each for each in self._shards.values() if isinstance(each, Optimizer)]
        return super().is_due() and self._is_ready() and all(map(_has_stepped, optimizers))

    def _is_ready(self) -> bool:
        is_busy = self._thread is not None and self._thread.is_alive()
        return not is_busy and time.monotonic() >= self._not_before

    def _turn_off(self, why: str) -> None:
        super()._turn_off(why)
        self._copies = []
        for half in self._halves:
            node_memory.write_steps(half, 0, 0, 0)
            os.ftruncate(half, HEADER_BYTES)

    def _prepare(self, tensors: Sequence[Tensor], shape: str, of_files: int) -> None:
        """Connect the threads of all ranks, and choose who keeps a copy of whose shards."""
        self._shape = shape
        hosts, sizes, room, problem = self._survey()
        if problem:
            self._turn_off(problem)
            return
        self._keepers = keepers(hosts)
        needed = dict.fromkeys(hosts, 0)
        for rank, (size, keeper) in enumerate(zip(sizes, self._keepers, strict=True)):
            needed[hosts[rank]] += _OF_OWN * size
            needed[hosts[keeper]] += _OF_KEPT * size * (keeper != rank)
        self._size = max(needed.values())
        if self._size > min(room):
            free = memory(min(room))
            self._turn_off(
                f"the shards need {memory(self._size)} of a node, which has {free} for it"
            )
            return
        self._group = sharded.connect(_WAIT_SECONDS)
        if self._group is None:
            self._turn_off("gloo cannot connect the ranks")

    def _survey(self) -> tuple[list[str], list[int], list[int], str]:
        """Return each rank's host, the bytes of its shards and those it may use, and a problem."""
        size, room = 0, 0
        try:
            leaves = tree_leaves(sharded.states_of(self._shards))
            size = sum(_local(each).nbytes for each in leaves if isinstance(each, Tensor))
            self._halves = self._address.open() if self._address else ()
            for half in self._halves:
                node_memory.write_header(half, self._attempt.path, [self._address])  # type: ignore[list-item]
            # A quarter or less of that is a file of the shards.
            shm = 2 * shutil.disk_usage(self._address.scratch.parent).free if self._address else 0
            room = min(int(SHARE_OF_MEMORY * free_bytes()), shm)
        except Exception as error:  # a state's own, or of the memory
            self._problem = first_line(error)
        rows = agreement.gather((host_name(os.environ), size, room, self._problem))
        hosts, sizes, rooms, problems = map(list, zip(*rows, strict=True))
        return hosts, sizes, rooms, next(filter(None, problems), "")

    def _copy(
        self,
        step: int,
        tensors: Sequence[Tensor],
        files: Mapping[str, Any],
        random_state: object,
        collect: Callable[[list[Any], Copy], Content],
    ) -> None:
        """Copy this rank's shards to the CPU, and start the thread."""
        random_states = agreement.gather(random_state, on_first=True)
        states, content = dict[str, Any](), b""
        try:
            with torch.no_grad():
                leaves, form = tree_flatten(sharded.states_of(self._shards))
                earlier = self._copies if len(self._copies) == len(leaves) else leaves
                self._copies = [*map(_copied, leaves, earlier)]
            states = tree_unflatten(self._copies, form)
            if self._rank == 0:
                content = state.to_bytes(collect(random_states, _on_cpu))
        except Exception as error:  # a state's own; the training continues
            self._problem = first_line(error)
        arguments = step, states, content, agreement.device()
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def _run(self, step: int, states: dict[str, Any], content: bytes, device: torch.device) -> None:
        assert self._address
        began, folder = time.monotonic(), self._address.scratch / "shards"
        try:
            if device.type == "cuda":  # a setting of each thread
                torch.cuda.set_device(device)
            problem = next(filter(None, agreement.gather(self._problem, group=self._group)), "")
            if not problem:
                self._keep(step, states, content, folder)
        except BaseException as error:  # as torch's CheckpointException is
            self._problem = first_line(error)
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)
            self._not_before = began + (time.monotonic() - began) / _THREAD_SHARE

    def _keep(self, step: int, states: dict[str, Any], content: bytes, folder: Path) -> None:
        """Write this rank's shards into memory, and the copies of others' that it keeps."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save as save_shards

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without reading ahead, which would wait for the training's work on the GPU.
        writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
        save_shards(states, storage_writer=writer, process_group=self._group)
        names = [path.name for path in folder.iterdir() if path.name != _METADATA]
        own = _mapped(folder / names[0]) if names else torch.empty(0, dtype=torch.uint8)
        metadata = (folder / _METADATA).read_bytes() if self._rank == 0 else b""
        sent = "".join(names), own.numel(), len(content), len(metadata)
        rows = agreement.gather(sent, group=self._group)
        _, _, of_content, of_metadata = rows[0]
        both = state.broadcast(content + metadata, of_content + of_metadata, self._group)
        parts: list[tuple[str, bool, Any]] = [
            ("", False, both[:of_content]),
            (_METADATA, True, both[of_content:]),
            *((rows[rank][0], True, data) for rank, data in self._exchange(own, rows)),
        ]
        records, place = [], 0
        for name, is_file, data in parts:
            if name or not is_file:
                records.append(Record(name, False, place, len(data), is_file))
                place += len(data)
        shards, kept = tuple(name for name, *_ in rows), self._kept
        index = Index(step, time.time(), 0, tuple(records), self._rank, shards, kept)
        half = self._halves[self._which]
        node_memory.write_steps(half, 0, step + 1, 0)
        tail = [node_memory.make_tail(index, []), *(data for *_, data in parts)]
        node_memory.write_tail(half, HEADER_BYTES, tail)
        node_memory.write_steps(half, 0, step + 1, step + 1)
        self._which = 1 - self._which

    @property
    def _kept(self) -> tuple[int, ...]:
        """Ranks whose shards this rank keeps: itself, and ranks of another node."""
        of_others = (r for r, keeper in enumerate(self._keepers) if keeper == self._rank != r)
        return self._rank, *of_others

    def _exchange(self, own: Tensor, rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, Any]]:
        """Send this rank's shards to their keeper; return those that it keeps, by rank."""
        work, keeper = None, self._keepers[self._rank]
        if keeper != self._rank and own.numel():
            work = dist.isend(own, dst=keeper, group=self._group)
        kept = [(self._rank, own)]
        for rank in self._kept[1:]:
            received = torch.empty(rows[rank][1], dtype=torch.uint8)
            if received.numel():
                dist.recv(received, src=rank, group=self._group)
            kept.append((rank, received))
        if work:
            work.wait()
        return [(rank, memoryview(cast(Any, data.numpy()))) for rank, data in kept]


def keepers(hosts: Sequence[str]) -> list[int]:
    """Return the rank on the next host that keeps a copy of each rank's shards.

    hosts: each rank's. With a single host each rank has only itself.
    """
    ranks = {host: [r for r, each in enumerate(hosts) if each == host] for host in hosts}
    names = list(ranks)
    following = {name: ranks[names[(i + 1) % len(names)]] for i, name in enumerate(names)}
    places = [(following[host], ranks[host].index(rank)) for rank, host in enumerate(hosts)]
    return [there[place % len(there)] for there, place in places]


def _is_fsdp1(module: object) -> bool:
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return any(type(part).__name__ == "FullyShardedDataParallel" for part in parts)


def _has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has its state, or needs none."""
    has_none = isinstance(optimizer, torch.optim.SGD) and not optimizer.defaults["momentum"]
    return bool(optimizer.state) or has_none


def _copied(value: Any, earlier: Any) -> Any:
    """Return a copy of a leaf on the CPU, if possible in the memory of its earlier copy."""
    if not isinstance(value, Tensor):
        return value
    if earlier is value or (earlier.shape, earlier.dtype) != (value.shape, value.dtype):
        return _on_cpu(value)
    _local(earlier).copy_(_local(value))
    return earlier


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _mapped(path: Path) -> Tensor:
    """Map a file into memory."""
    with path.open("r+b") as file, suppress(ValueError):  # an empty file
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8)
