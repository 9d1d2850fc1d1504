"""Exchanges of the default process group that leave nothing behind in gloo's threads.

A thread of gloo drops the tensors of an exchange a moment after who waits for it goes on. Where
Python made a tensor that takes Python's lock, and ends the process by SIGABRT once the interpreter
is ending. So these return when gloo has dropped theirs. Without a process group they are of a rank
alone.
"""

import pickle
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_PATIENCE_SECONDS = 5.0


def has_group() -> bool:
    """Return whether this process has a default process group."""
    return dist.is_available() and dist.is_initialized()


def world() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if has_group() else (0, 1)


def device() -> torch.device:
    """Return where the default process group exchanges small values: NCCL on GPUs alone."""
    if has_group() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def largest(values: torch.Tensor) -> None:
    """Set each value to the largest over all ranks."""
    if has_group():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        _await_dropped([values])


def rows(values: list[float]) -> list[list[float]]:
    """Return the numbers of all ranks, a row a rank."""
    if world()[1] == 1:
        return [values]
    sent = torch.tensor(values, dtype=torch.float64, device=device())
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(received, sent)
    _await_dropped([sent, *received])
    return [each.tolist() for each in received]


def gather(value: T, *, on_first: bool = False) -> list[T]:
    """Return the values of all ranks, which are pickled; empty on others than rank 0 if `on_first`.

    Collective over the default process group.
    """
    rank, world_size = world()
    if world_size == 1:
        return [value]
    data = bytearray(pickle.dumps(value))
    lengths = [int(row[0]) for row in rows([len(data)])]
    padded = bytearray(max(lengths))
    padded[: len(data)] = data
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(device())
    receives = rank == 0 or not on_first
    received = [torch.empty_like(sent) for _ in lengths] if receives else []
    if on_first:
        dist.gather(sent, received or None, dst=0)
    else:
        dist.all_gather(received, sent)
    _await_dropped([sent, *received])
    return [
        pickle.loads(each.cpu().numpy().tobytes()[:length])
        for each, length in zip(received, lengths if receives else [], strict=True)
    ]


def _await_dropped(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until nobody but Python has the tensors; those of NCCL are dropped otherwise."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for each in tensors:
        users: Callable[[], int] = getattr(each, "_use_count")  # noqa: B009 -- torch's stubs lack it
        while each.device.type == "cpu" and users() > 1 and time.monotonic() < deadline:
            time.sleep(0.0001)
