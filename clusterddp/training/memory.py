"""How a task's memory is managed."""

import ctypes
import resource
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more on 64 bits (HEAP_MAX_SIZE / 2)


def keep_freed() -> None:
    """Have the C library keep what is freed rather than give it back to the kernel.

    A step frees and asks for the same megabytes again; by default they are unmapped and mapped
    anew, each page zeroed at its first touch: thousands of page faults a step, a fifth of its time.
    All threads share one heap: what is kept in a heap of its own for every thread that ever saved a
    checkpoint would add up. mallopt(3); where there is none (musl, macOS) nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_ARENA_MAX, 1)


def peak_bytes(device: "torch.device") -> int:
    """The most that this process has held: on a GPU what torch allocated there, on a CPU the
    resident set of the whole process, its libraries included (getrusage(2), in KiB on Linux).
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
