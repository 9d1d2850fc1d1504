"""Signals held back while processes start: a handler must not run before it can reach them all."""

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back(numbers: Iterable[int]) -> Iterator[None]:
    """Let signals wait for the end of the block, and then raise each that came, once.

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
