"""Ends what a child has started, also in sessions of its own, where Linux tells.

A process that loses its parent becomes a child of the nearest one above it that asked for that
(prctl(2), PR_SET_CHILD_SUBREAPER): so this process finds again what left its parent's group.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from clusterddp.processes.table import children

try:
    import ctypes
except ImportError:  # a Python that was built without libffi
    ctypes = None  # type: ignore[assignment]

_PR_SET_CHILD_SUBREAPER = 36


def adopt(*, on: bool = True) -> None:
    """Let what loses its parent below this process become its child. Linux only, with ctypes."""
    with contextlib.suppress(OSError, AttributeError):  # the latter of None, too
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on))


@contextlib.contextmanager
def adopted() -> Iterator[Callable[[float], None]]:
    """Adopt in the block; yields what kills all that began below this process in it.

    That takes so many seconds at most: the kernel can hold back the end of a process.
    """
    before = set(children(os.getpid()))

    def end_all(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (new := set(children(os.getpid())) - before) and time.monotonic() < deadline:
            for pid in new:
                _kill(pid)
                with contextlib.suppress(ChildProcessError):  # reaped by who has started it
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)

    adopt()
    try:
        yield end_all
    finally:
        adopt(on=False)


def _kill(pid: int) -> None:
    """Kill a process and all below it; what one of them starts meanwhile is adopted."""
    for child in children(pid):
        _kill(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
