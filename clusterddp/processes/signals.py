"""Signals between processes: held back, passed on, and sent by the kernel when a parent dies."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType

_PR_SET_PDEATHSIG = 1


class Relay:
    """Calls a function for each signal, which passes it on to other processes. A context.

    Signals are held back until `listen`, so that no process that starts meanwhile misses one; the
    former handlers come back at the end. An ignored SIGHUP stays so: nohup's doing, and meant.
    Outside the main thread, where Python has no handlers, the function is never called.
    """

    def __init__(self, numbers: Collection[int], pass_on: Callable[[int, int], None]) -> None:
        """`pass_on` takes the signal, and what `number` was before it."""
        self.number = 0
        """Signal that came; SIGINT counts above the others."""
        self._numbers, self._pass_on = numbers, pass_on
        self._before = {}
        self._held = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in numbers}

    def __enter__(self) -> "Relay":
        self._held.enter_context(held_back(self._before))
        return self

    def listen(self) -> None:
        """Pass on what has come by now, and what comes."""
        for number, handler in self._before.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:
                signal.signal(number, self._take)
        self._held.close()

    def hand_over(self, child: int) -> None:
        """Send a forked child, which blocks them as well, the signals that came ahead of it.

        They reached this process alone. One that is pending twice is delivered once: so a signal
        that the child had by itself is not repeated.
        """
        for number in signal.sigpending() & set(self._numbers):
            signal.sigwait({number})
            os.kill(child, number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # one of C's own cannot be put back
                signal.signal(number, handler)
        self._held.close()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        earlier = self.number
        self.number = signal.SIGINT if signal.SIGINT in (number, earlier) else number
        self._pass_on(number, earlier)


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to processes, any of which may have gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def held_back(numbers: Iterable[int]) -> Iterator[None]:
    """Hold signals back until the end of the block, and then raise each that came, once.

    The mask does it for processes that begin meanwhile, until they have handlers of their own. For
    this one it is not enough: where other threads live, a notebook's say, the kernel hands the
    signal to one that does not block it, and Python runs the handler in the main thread all the
    same. So the handlers are replaced as well; one that the block installs stays.
    Outside the main thread, where Python has no handlers, there is the mask alone.
    """
    numbers = set(numbers)
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if number not in came:
            came.append(number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in before.items():
            # An ignored one is not waited for; one of C's own (None) could not be put back.
            if handler not in (signal.SIG_IGN, None):
                signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in came:
            signal.raise_signal(number)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when `parent`, which has just forked it, is gone.

    Linux only (prctl(2), PR_SET_PDEATHSIG); elsewhere it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(128 + signal.SIGKILL)
