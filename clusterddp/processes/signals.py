"""Signals between processes: held back, passed on, sent for a parent that dies and to orphans."""

import contextlib
import faulthandler
import os
import select
import signal
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType

from clusterddp import patience
from clusterddp.processes.table import children, read_process

try:
    import ctypes
except ImportError:  # a Python that was built without libffi
    ctypes = None  # type: ignore[assignment]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STDERR = 2
_BEAT = struct.Struct("d")


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


def ignore_requests() -> None:
    """Ignore what asks for an end, in a process that ends with the one that it works for.

    Slurm signals every process of a step.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


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

    Linux only (prctl(2), PR_SET_PDEATHSIG); elsewhere, and without ctypes, it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):  # the latter of None, too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(128 + signal.SIGKILL)


def adopt(*, on: bool = True) -> None:
    """Let what loses its parent below this process become its child.

    So it finds again what left its parent's group. Linux only, with ctypes (prctl(2),
    PR_SET_CHILD_SUBREAPER).
    """
    with contextlib.suppress(OSError, AttributeError):  # the latter of None, too
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on))


@contextlib.contextmanager
def adopted() -> Iterator[Callable[[float], None]]:
    """Adopt in the block; yields what kills all that began below this process in it.

    That takes so many seconds at most: the kernel can hold back the end of a process.
    """
    before = set(children(os.getpid()))

    def end_all(seconds: float) -> None:
        for _ in patience.looks(seconds, every=patience.CHILD_PAUSE):
            new = set(children(os.getpid())) - before
            if not new:
                return
            for pid in new:
                _kill(pid)
                with contextlib.suppress(ChildProcessError):  # reaped by who has started it
                    os.waitpid(pid, os.WNOHANG)

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


class Pulse:
    """Has a child's stacks printed by its parent's signal where Python does not run in it for long.

    Native code that keeps Python's lock keeps every thread of the child from printing them.
    faulthandler's own timer needs no lock, but fires as well when a stopped process continues, and
    then reads the frames of threads that run: it may crash what was sound.

    Made ahead of the fork; the child calls `beat`, and the parent `watch`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # a parent that is stopped reads nothing

    def beat(self, limit: float) -> None:
        """Show that Python runs; the stacks are printed after `limit` seconds without, 0 for never.

        Where the system has no signal to spare (Linux has) nothing is printed.
        """
        if number := _stacks_signal():
            faulthandler.register(number, file=_STDERR)
            with contextlib.suppress(OSError):
                os.write(self._writer, _BEAT.pack(limit))

    def watch(self, child: int) -> None:
        """Ask for the stacks from a thread of this process, until the child has ended."""
        os.close(self._writer)
        threading.Thread(target=self._watch, args=(child,), daemon=True, name="pulse").start()

    def _watch(self, child: int) -> None:
        limit = silent = 0.0
        while True:
            if select.select([self._reader], [], [], 1.0)[0]:
                beats = os.read(self._reader, 512 * _BEAT.size)
                if not beats:
                    return
                (limit,), silent = _BEAT.unpack(beats[-_BEAT.size :]), 0.0
                continue
            # Seconds in which this process ran too: a job that was suspended owes no beat.
            process = read_process(child)
            silent = 0.0 if process is None or process.state in "tT" else silent + 1.0
            if limit and silent >= limit:
                send(_stacks_signal(), [child])
                limit = 0.0


def _stacks_signal() -> int:
    return getattr(signal, "SIGRTMIN", 0)
