"""Exchanges of the default process group that leave nothing behind in gloo's threads.

A thread of gloo drops the tensors of an exchange a moment after who waits for it goes on. Where
Python made a tensor that takes Python's lock, and ends the process by SIGABRT once the interpreter
is ending. So these return when gloo has dropped theirs.
"""

import pickle
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_PATIENCE_SECONDS = 5.0


def largest(values: torch.Tensor) -> None:
    """Set each value to the largest over all ranks."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    _await_dropped([values])


def gather(value: T, device: torch.device) -> list[T]:
    """Return the values of all ranks; they are pickled."""
    data = bytearray(pickle.dumps(value))
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(each) for each in sizes]
    padded = bytearray(max(lengths))
    padded[: len(data)] = data
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in lengths]
    dist.all_gather(received, sent)
    _await_dropped([size, *sizes, sent, *received])
    texts = [
        each[:length].cpu().numpy().tobytes()
        for each, length in zip(received, lengths, strict=True)
    ]
    return [pickle.loads(text) for text in texts]


def _await_dropped(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until nobody but Python has the tensors; those of NCCL are dropped otherwise."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for each in tensors:
        users: Callable[[], int] = getattr(each, "_use_count")  # noqa: B009 -- torch's stubs lack it
        while each.device.type == "cpu" and users() > 1 and time.monotonic() < deadline:
            time.sleep(0.0001)
