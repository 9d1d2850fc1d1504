"""Ends a process together with the one that started it (Linux, prctl(2))."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when `parent`, which has just forked it, is gone.

    Linux only (prctl(2), PR_SET_PDEATHSIG); elsewhere it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(128 + signal.SIGKILL)
