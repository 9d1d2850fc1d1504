"""Snapshots of a training's state in the memory of its nodes, which outlive the ranks.

Each rank of a node copies a part of the tensors that all ranks have alike: the parameters of models
in DDP's wrapper and the state of their optimizers; with a single rank, of all models. Everything
else is rank 0's, as in a checkpoint, and is sent to the other nodes. A copy begins at a step at
which all ranks agree, and only when all have the one before; on a GPU it is queued before the next
step's work, so the training does not wait for it in Python.
"""

import hashlib
import io
import mmap
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clusterddp import log
from clusterddp.checkpoints import state
from clusterddp.checkpoints.sharded import FileState
from clusterddp.checkpoints.state import Content
from clusterddp.distributed import agreement
from clusterddp.formatting import memory, setting
from clusterddp.formatting import size as size_of
from clusterddp.processes import hardware
from clusterddp.ranks.variables import host_name
from clusterddp.run import node_memory
from clusterddp.run.attempt import Attempt
from clusterddp.run.node_memory import HEADER_BYTES, MAX_MEMBERS, Address, Index, Record, owner_of

Copy = Callable[[Tensor], Tensor]
"""Replaces a tensor of a state by its place in the snapshot."""
_SHARE_OF_TIME = 0.005
"""Largest part of the time that snapshots may take; else they are less frequent."""
SHARE_OF_MEMORY = 0.5
"""Largest part of a node's free memory for both halves."""
_SENT_BYTES = 64 << 20
"""Largest state besides the tensors that is sent to the other nodes at each snapshot."""
_RETRY_SECONDS = 1.0
_STATES_OF_PARAMETER = 3
"""Values per parameter in a framework's files: its own, and two of Adam."""
_ALIGNMENT = 64


class Snapshots:
    """Snapshots of one attempt. `take` is collective."""

    def __init__(self, attempt: Attempt, every: float) -> None:
        """every: seconds from one snapshot to the next, or longer if they take long; 0: never."""
        self._attempt, self._every = attempt, every
        self._rank, self._world_size = agreement.rank_and_world_size()
        self._address = Address.here(os.environ)
        self._is_off = not every or self._address is None
        self._step: mmap.mmap | None = None
        with suppress(OSError):
            if self._address:
                self._step = node_memory.open_step(self._address)
        self._layout: _Layout | None = None
        self._problem = ""
        """Why this rank can take no snapshot."""
        self._shape = ""
        """Digest of the tensors that the layout is for."""
        self._has_others = self._is_far = False
        """True if other nodes keep snapshots too; whether this is one of them, without rank 0."""
        self._size = 0
        """Bytes of both snapshots in this rank's node."""
        self._due = time.monotonic() + every / 2  # then the memory is prepared
        self._first_due = time.monotonic() + every
        self._said_every = 0.0

    @property
    def is_used(self) -> bool:
        """True if this rank has memory for snapshots."""
        return not self._is_off and self._size > 0

    def is_due(self) -> bool:
        """Return whether a snapshot is due, on rank 0."""
        return not self._is_off and time.monotonic() >= self._due

    def postpone(self) -> None:
        """Note that the state has been saved."""
        self._due = max(self._due, time.monotonic() + self._every)

    def close(self, seconds: float = 300.0) -> None:
        """Wait, at most some seconds, for a thread that exchanges data with other ranks."""

    def note_step(self, step: int) -> None:
        """Note that a step is done, and perhaps a GPU's copy."""
        if self._step:
            node_memory.write_step(self._step, step)
        if self._layout:
            self._layout.poll()

    def take(
        self,
        step: int,
        states: Mapping[str, Any],
        wrappers: Sequence[nn.Module],
        files: Mapping[str, FileState],
        random_state: object,
        collect: Callable[[list[Any], Copy], Content],
    ) -> None:
        """Copy the state after a step, or prepare the memory for it.

        states: the states of the checkpoint. wrappers: DDP wrappers of the models among them.
        files: states that write files. random_state: this rank's. collect: returns rank 0's
        checkpoint for all ranks' random states, and with `Copy` for its tensors.
        """
        tensors, shape = list[Tensor](), ""
        try:
            tensors = _alike(states, wrappers, alone=self._world_size == 1)
            shape = _digest(tensors)
        except Exception as error:  # a tensor of a class of its own; the training continues
            self._problem = first_line(error)
        if self._layout:
            self._layout.finish()
        # Agreed on below, since the ranks' clocks and threads differ.
        is_ready = self._is_ready() and time.monotonic() >= self._first_due
        # Every rank of the node has the last snapshot whole when this returns, so that the half
        # before it may be overwritten.
        problem = self._problem or (self._layout.problem if self._layout else "")
        seen = agreement.gather((shape, is_ready, problem))
        began = time.perf_counter()  # the wait for the slowest rank is not the snapshot's
        self._due = time.monotonic() + _RETRY_SECONDS
        if problem := next(filter(None, (problem for *_, problem in seen)), ""):
            self._turn_off(problem)
        elif len({shape for shape, *_ in seen}) > 1:
            self._turn_off("the ranks have different parameters")
        elif shape != self._shape:
            of_files = sum(p.nbytes for each in wrappers for p in each.parameters()) if files else 0
            self._prepare(tensors, shape, of_files * _STATES_OF_PARAMETER)
        elif all(is_ready for _, is_ready, _ in seen):
            self._copy(step, tensors, files, random_state, collect)
            if self._layout and not self._said_every:
                self._layout.finish()  # a GPU's first copy shows how long one takes
            seconds = (
                time.perf_counter() - began + (self._layout.copy_seconds if self._layout else 0)
            )
            every = max(self._every, seconds / _SHARE_OF_TIME)
            self._due = time.monotonic() + every
            self._say(every, seconds)

    def _is_ready(self) -> bool:
        """Return whether this rank has the last snapshot whole, and memory for another."""
        return self._layout is None or self._layout.is_ready

    def _prepare(self, tensors: Sequence[Tensor], shape: str, of_files: int) -> None:
        """Lay out the memory of each node; a thread then allocates it.

        of_files: bytes that a framework's files will take at most, 0 without any.
        """
        if self._layout:
            self._layout.close()
        self._shape, self._layout, self._size = shape, None, 0
        address, halves, namespace = self._address, None, ""
        with suppress(OSError):
            # Tasks in separate containers cannot open each other's memory.
            namespace = str(Path("/proc/self/ns/pid").readlink())
            halves = address.open() if address else None
        where = host_name(os.environ), namespace
        hellos = agreement.gather((where, address if halves else None, free_bytes()))
        places = dict.fromkeys(where for where, *_ in hellos)
        groups = {place: [each for each in hellos if each[0] == place] for place in places}
        size = _places(tensors)[1] + of_files
        keeping = [
            place
            for place, members in groups.items()
            if all(address for _, address, _ in members)
            and len(members) <= MAX_MEMBERS
            and 2 * size <= SHARE_OF_MEMORY * members[0][-1]
        ]
        self._has_others, self._is_far = len(keeping) > 1, where != hellos[0][0]
        if of_files and len(keeping) < len(groups):
            self._turn_off("a framework's ranks write together, and a task has no memory for it")
        elif hellos[0][0] not in keeping:
            free = min(free for *_, free in hellos)
            self._turn_off(f"they need {memory(2 * size)}, and {memory(free)} are free on a node")
        elif where in keeping and halves:
            members = [member for _, member, _ in groups[where] if member]
            number = sum(place == where for place, *_ in hellos[: self._rank])
            try:
                self._layout = _Layout(self._attempt, halves, members, number, tensors)
                self._size = 2 * self._layout.size
            except (OSError, RuntimeError) as error:
                self._problem = first_line(error)

    def _copy(
        self,
        step: int,
        tensors: Sequence[Tensor],
        files: Mapping[str, FileState],
        random_state: object,
        collect: Callable[[list[Any], Copy], Content],
    ) -> None:
        own, problem = _written(files, self._address, self._rank)
        of_ranks = agreement.gather(
            (random_state, {} if self._rank == 0 else own, problem), on_first=True
        )
        tail = b""
        if self._rank == 0 and self._layout:
            for _, of_rank, failed in reversed(of_ranks):
                own, problem = {**of_rank, **own}, failed or problem
            try:
                content = collect([state for state, *_ in of_ranks], self._layout.copy_of(tensors))
                tail = _tail(step, content, own, self._layout)
            except Exception as error:  # a state's own; the training continues
                problem = first_line(error)
            if 2 * len(tail) > SHARE_OF_MEMORY * free_bytes():
                problem = problem or f"they need {memory(2 * len(tail))} for files"
            if problem:
                self._turn_off(problem)
                tail = b""
        if self._has_others:
            sent = agreement.gather(len(tail))[0]
            if 0 < sent <= _SENT_BYTES:
                tail = state.broadcast(tail, sent)
        if self._layout and (tail or (self._rank and not self._is_far)):
            try:
                self._layout.copy(step, tensors, tail)
            except Exception as error:  # no memory, for example; the training continues
                self._problem = first_line(error)

    def _turn_off(self, why: str) -> None:
        self._is_off = True
        if self._rank == 0:
            log.info(
                f"no snapshots in memory: {why}. A failed rank costs the steps since the last "
                "checkpoint"
            )

    def _say(self, every: float, seconds: float) -> None:
        """Say how often snapshots are taken, at first and when it has changed much."""
        if not self._is_off and not 0.5 < every / (self._said_every or 1e-9) < 2:
            self._said_every = every
            if self._rank:
                return
            rare = ", at most 0.5% of the time" if every > self._every else ""
            log.info(
                f"a snapshot in the memory of each node every {setting(round(every))}: "
                f"{size_of(self._size)}, {1000 * seconds:.0f} ms each{rare}"
            )


class _Layout:
    """Memory of this rank, with a place for each tensor in both halves."""

    def __init__(
        self,
        attempt: Attempt,
        halves: tuple[int, int],
        members: Sequence[Address],
        member: int,
        tensors: Sequence[Tensor],
    ) -> None:
        """halves: descriptors. members: tasks of this node. member: this rank's among them."""
        self._halves, self._member = halves, member
        self.offsets, self.size = _places(tensors)
        sizes = [tensor.nbytes for tensor in tensors]
        owners = [
            owner_of(offset, size, self.size, len(members))
            for offset, size in zip(self.offsets, sizes, strict=True)
        ]
        self._own = [number for number, owner in enumerate(owners) if owner == member]
        self._which = 0
        """The half that the next snapshot overwrites."""
        self._pending: tuple[Any, Any, int] | None = None
        """Events around a GPU's copy, and its step."""
        self.copy_seconds = 0.0
        """Seconds of the latest copy on a GPU."""
        self._places: list[list[Tensor]] = []
        """For each half, the tensors' places in it."""
        self.is_ready, self.problem = False, ""
        """True once the memory is allocated; why it cannot be."""
        for half in halves:
            os.ftruncate(half, HEADER_BYTES + self.size)
            node_memory.write_header(half, attempt.path, members)
            mapped = mmap.mmap(half, HEADER_BYTES + self.size)
            self._places.append(
                [
                    _place(mapped, HEADER_BYTES + offset, tensor)
                    for offset, tensor in zip(self.offsets, tensors, strict=True)
                ]
            )
        self._numbers = [
            {place.untyped_storage().data_ptr(): number for number, place in enumerate(places)}
            for places in self._places
        ]
        gpus = {tensors[number].device for number in self._own if tensors[number].is_cuda}
        self._pinned: list[int] = []
        self._allocation = threading.Thread(target=self._allocate, args=(gpus,), daemon=True)
        self._allocation.start()

    def _allocate(self, gpus: Collection[torch.device]) -> None:
        """Allocate this rank's part of the memory during the training; pin it for its GPU."""
        if self._own:
            first, last = self._own[0], self._own[-1]
            begin, end = self.offsets[first], self.offsets[last] + self._places[0][last].nbytes
            for half, places in zip(self._halves, self._places, strict=True):
                try:
                    os.posix_fallocate(half, HEADER_BYTES + begin, end - begin)
                except OSError as error:
                    self.problem = str(error.strerror)
                    return
                for gpu in gpus:
                    torch.cuda.set_device(gpu)
                    place = places[first].data_ptr()
                    # If it fails, the copy is slower and Python waits for it.
                    if not int(_cuda().cudaHostRegister(place, end - begin, 0)):
                        self._pinned.append(place)
        self.is_ready = True

    def close(self) -> None:
        """Unpin the memory, before anything else can be mapped there."""
        self.finish()
        self._allocation.join()
        for place in self._pinned:
            _cuda().cudaHostUnregister(place)
        for half in self._halves:
            os.close(half)

    def copy_of(self, tensors: Sequence[Tensor]) -> Copy:
        """Return a function from a tensor to its place in the next snapshot, or to a copy."""
        known = {_key(each): place for each, place in zip(tensors, self._next, strict=True)}

        def copy(tensor: Tensor) -> Tensor:
            place = known.get(_key(tensor))
            return tensor.detach().to("cpu", copy=True) if place is None else place

        return copy

    @property
    def _next(self) -> list[Tensor]:
        return self._places[self._which]

    def number_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return the number of the tensor whose place in the next snapshot has this storage."""
        return self._numbers[self._which].get(storage.data_ptr())

    def copy(self, step: int, tensors: Sequence[Tensor], tail: bytes) -> None:
        """Copy this rank's part of the tensors; the first member also writes the tail."""
        half = self._halves[self._which]
        node_memory.write_steps(half, self._member, step + 1, 0)
        if self._member == 0:
            node_memory.write_tail(half, HEADER_BYTES + self.size, [tail])
        is_cuda = any(tensors[number].is_cuda for number in self._own)
        events: list[Any] = [_event() for _ in range(2)] if is_cuda else []
        for event in events[:1]:
            event.record()
        with torch.no_grad():
            for number in self._own:
                self._next[number].copy_(tensors[number], non_blocking=True)
        self._which = 1 - self._which
        if is_cuda:
            events[1].record()
            self._pending = events[0], events[1], step
        else:
            node_memory.write_steps(half, self._member, step + 1, step + 1)

    def poll(self) -> None:
        """Finish the snapshot if a GPU's copy is done."""
        if self._pending and self._pending[1].query():
            self.finish()

    def finish(self) -> None:
        """Wait for a GPU's copy, and mark this rank's part as whole."""
        if self._pending:
            began, ended, step = self._pending
            ended.synchronize()
            self.copy_seconds, self._pending = began.elapsed_time(ended) / 1000, None
            node_memory.write_steps(self._halves[1 - self._which], self._member, step + 1, step + 1)


def _alike(
    states: Mapping[str, Any], wrappers: Sequence[nn.Module], *, alone: bool
) -> list[Tensor]:
    """Return the tensors that all ranks have alike, in the same order.

    alone: whether there is a single rank, whose models need no wrapper.
    """
    exchanged = {parameter for wrapper in wrappers for parameter in wrapper.parameters()}
    modules = [each for each in states.values() if isinstance(each, nn.Module)]
    parameters = {
        parameter: parameter.detach()
        for module in modules
        for parameter in module.parameters()
        if alone or parameter in exchanged
    }
    found = [*parameters.values()]
    for each in states.values():
        if isinstance(each, Optimizer):
            of_each = [parameter for group in each.param_groups for parameter in group["params"]]
            if all(parameter in parameters for parameter in of_each):
                values = (value for p in of_each for value in each.state.get(p, {}).values())
                found += [value for value in values if isinstance(value, Tensor)]
    return [tensor for tensor in found if tensor.numel() and tensor.layout == torch.strided]


def _digest(tensors: Sequence[Tensor]) -> str:
    """Return a digest of the tensors' types and shapes."""
    rows = [(str(tensor.dtype), *tensor.shape, *tensor.stride()) for tensor in tensors]
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def _key(tensor: Tensor) -> tuple[object, ...]:
    """Return what identifies a tensor among those that share no memory by chance."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the tensors' offsets in a half, from the end of its header, and their total size."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _place(mapped: mmap.mmap, offset: int, like: Tensor) -> Tensor:
    """Return a tensor of the same type, shape and strides in the memory, with its own storage."""
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=like.nbytes, offset=offset)
    stride = torch.empty_like(like, device="meta").stride()
    return raw.view(like.dtype).as_strided(like.shape, stride)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def free_bytes() -> int:
    """Return the free bytes of this node, at most the job's --mem; 0 if unknown."""
    free, limit = hardware.free_bytes() or 0, os.environ.get("SLURM_MEM_PER_NODE", "")
    return min(free, int(limit) << 20) if limit.isdigit() and int(limit) else free


def _written(
    files: Mapping[str, FileState], address: Address | None, rank: int
) -> tuple[dict[str, bytes], str]:
    """Have states write files; return this rank's files by path, or why it could not write."""
    if not files or address is None:
        return {}, ""
    folder = address.scratch / str(rank)
    try:
        for name, each in files.items():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            each.save_state(str(folder / name))
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        size = sum(path.stat().st_size for path in paths)
        if 4 * size > free_bytes():  # read, sent, put into the tail, and a tail before
            return {}, f"their files take {memory(size)}"
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}, ""
    except Exception as error:  # a framework's own
        return {}, first_line(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tail(step: int, content: Content, files: Mapping[str, bytes], layout: _Layout) -> bytes:
    """Return the tail: the index of the checkpoint's records, and all but the tensors.

    files: files next to the checkpoint, by path.
    """
    records: list[Record] = []
    contents: list[bytes] = []

    def add(name: str, data: bytes) -> None:
        records.append(Record(f"archive/{name}", False, sum(map(len, contents)), len(data)))
        contents.append(data)

    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    add("data.pkl", buffer.getvalue())
    add("byteorder", sys.byteorder.encode())
    for name, storage in pickler.storages.values():
        number = layout.number_of(storage)
        if number is None:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            add(f"data/{name}", bytes(agreement.bytes_of(whole)))
        else:
            place = layout.offsets[number]
            records.append(Record(f"archive/data/{name}", True, place, storage.nbytes()))
    add("version", b"3\n")
    for path, data in files.items():
        records.append(Record(path, False, sum(map(len, contents)), len(data), is_file=True))
        contents.append(data)
    return node_memory.make_tail(Index(step, time.time(), layout.size, tuple(records)), contents)


class _Pickler(pickle.Pickler):
    """Pickles a checkpoint as torch.save does, whose records hold the storages of the tensors.

    Source: `_save` in torch/serialization.py (torch 2.4 to 2.15).
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, tuple[str, torch.UntypedStorage]] = {}
        """Name and storage of each record."""

    def persistent_id(self, value: Any) -> tuple[object, ...] | None:
        """Return what torch.load looks for in place of a storage."""
        if isinstance(value, torch.storage.TypedStorage):
            typed: Any = value
            kind = getattr(torch, typed._pickle_storage_type())
            storage, count = typed._untyped_storage, typed._size()
        elif isinstance(value, torch.UntypedStorage):
            kind, storage, count = torch.UntypedStorage, value, value.nbytes()
        else:
            return None
        name, _ = self.storages.setdefault(storage._cdata, (str(len(self.storages)), storage))
        return "storage", kind, name, "cpu", count
