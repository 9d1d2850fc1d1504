"""Signals between processes: deferral, forwarding, parent death, orphans."""

import contextlib
import faulthandler
import os
import select
import signal
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType

from clusterddp import polling
from clusterddp.processes.table import children, handles_signal, read_process

try:
    import ctypes
except ImportError:  # a Python that was built without libffi
    ctypes = None  # type: ignore[assignment]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STDERR = 2
_STACKS_SIGNAL: int = getattr(signal, "SIGRTMIN", 0)  # real-time signals: not on macOS
_BEAT = struct.Struct("d")


class Relay:
    """Context manager that calls a function for each signal, to forward it to other processes.

    Signals are held back until `listen`, so that processes started in between miss none. The exit
    restores the former handlers. SIGHUP stays ignored if it was: nohup ignores it on purpose.
    Outside the main thread, where Python has no handlers, the function is never called.
    """

    def __init__(self, numbers: Collection[int], pass_on: Callable[[int, int], None]) -> None:
        """Prepare to relay `numbers`; `pass_on` gets the signal and the previous `number`."""
        self.number = 0
        """Latest signal; SIGINT takes precedence over the others."""
        self._numbers, self._pass_on = numbers, pass_on
        self._before = {}
        self._held = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in numbers}

    def __enter__(self) -> "Relay":
        self._held.enter_context(held_back(self._before))
        return self

    def listen(self) -> None:
        """Forward the signals that were held back, and all later ones."""
        for number, handler in self._before.items():
            if number != signal.SIGHUP or handler != signal.SIG_IGN:
                signal.signal(number, self._take)
        self._held.close()

    def hand_over(self, child: int) -> None:
        """Send a forked child the pending signals: those that came before it reached only us.

        The child must block them too. A signal that is pending twice is delivered once, so one that
        the child already received is not repeated.
        """
        for number in signal.sigpending() & set(self._numbers):
            signal.sigwait({number})
            os.kill(child, number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # a handler of C code cannot be restored
                signal.signal(number, handler)
        self._held.close()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        earlier = self.number
        self.number = signal.SIGINT if signal.SIGINT in (number, earlier) else number
        self._pass_on(number, earlier)


def ignore_requests(_worker: int = 0) -> None:
    """Ignore termination signals in a DataLoader's worker, which `end_workers_at_exit` ends.

    Slurm signals every process of a step, and the death of a worker would fail a rank that is about
    to save. Does nothing on macOS, which has no Slurm.
    """
    if not hasattr(signal, "SIGRTMIN"):
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def end_workers_at_exit() -> None:
    """Kill the daemon processes of this one at its exit, unless they handle SIGTERM.

    multiprocessing.util sends them SIGTERM and then waits, forever if they ignore it.
    """
    from multiprocessing import util

    util.Finalize(None, _kill_daemons, exitpriority=0)  # before it sends SIGTERM


def _kill_daemons() -> None:
    import multiprocessing

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler fails for a killed worker
    for child in multiprocessing.active_children():
        if child.pid and child.daemon and not handles_signal(child.pid, signal.SIGTERM):
            child.kill()


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to processes; skip those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def held_back(numbers: Iterable[int]) -> Iterator[None]:
    """Hold signals back until the end of the block, then raise each received signal once.

    Processes started in the block inherit the signal mask, until they install handlers. For this
    process the mask is not enough: the kernel delivers the signal to any other thread that does not
    block it (in a notebook, say), and Python still runs the handler in the main thread. So the
    handlers are replaced too; a handler that the block installs stays.
    Outside the main thread, where Python has no handlers, only the mask is set.
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
            # An ignored signal stays ignored; a handler of C code (None) could not be restored.
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
    """Have the kernel signal this process when `parent`, which has just forked it, ends.

    Linux only (prctl(2), PR_SET_PDEATHSIG); does nothing elsewhere or without ctypes.
    """
    with contextlib.suppress(OSError, AttributeError):  # AttributeError if ctypes is None
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the prctl call
        os._exit(128 + signal.SIGKILL)


def set_subreaper(*, on: bool = True) -> None:
    """Make this process the new parent of orphaned descendants.

    So it also finds processes that left their process group. Linux only, with ctypes (prctl(2),
    PR_SET_CHILD_SUBREAPER).
    """
    with contextlib.suppress(OSError, AttributeError):  # AttributeError if ctypes is None
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on))


@contextlib.contextmanager
def subreaper() -> Iterator[Callable[[float], None]]:
    """Be a subreaper in the block; yield a function that kills all descendants started in it.

    The function gives up after the given seconds: the kernel can delay the end of a process.
    """
    before = set(children(os.getpid()))

    def end_all(seconds: float) -> None:
        for _ in polling.poll(seconds, every=polling.CHILD_POLL_SECONDS):
            new = set(children(os.getpid())) - before
            if not new:
                return
            for pid in new:
                _kill(pid)
                with contextlib.suppress(ChildProcessError):  # its starter has reaped it
                    os.waitpid(pid, os.WNOHANG)

    set_subreaper()
    try:
        yield end_all
    finally:
        set_subreaper(on=False)


def _kill(pid: int) -> None:
    """Kill a process and its descendants; the caller finds those that start meanwhile."""
    for child in children(pid):
        _kill(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


class GilWatch:
    """Watch of a child's GIL: if it is held too long, the parent has the child print its stacks.

    While native code holds the GIL, no thread of the child can print them itself. faulthandler's
    timer needs no GIL, but it also fires when a stopped process continues, and then reads the
    frames of running threads, which may crash a healthy process.

    Create it before the fork; the child calls `beat`, the parent calls `watch`.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # a stopped parent reads nothing

    def beat(self, limit: float) -> None:
        """Signal that Python runs; the stacks are printed `limit` seconds after the last call.

        limit: 0 for never. Does nothing on systems without real-time signals (Linux has them).
        """
        if _STACKS_SIGNAL:
            faulthandler.register(_STACKS_SIGNAL, file=_STDERR)
            with contextlib.suppress(OSError):
                os.write(self._writer, _BEAT.pack(limit))

    def watch(self, child: int) -> None:
        """Watch the child from a thread of this process until the child ends."""
        os.close(self._writer)
        threading.Thread(target=self._watch, args=(child,), daemon=True, name="gil-watch").start()

    def _watch(self, child: int) -> None:
        limit = silent = 0.0
        while True:
            if select.select([self._reader], [], [], 1.0)[0]:
                beats = os.read(self._reader, 512 * _BEAT.size)
                if not beats:
                    return
                (limit,), silent = _BEAT.unpack(beats[-_BEAT.size :]), 0.0
                continue
            # Counts only seconds in which this process runs too: a suspended job does not count.
            process = read_process(child)
            silent = 0.0 if process is None or process.state in "tT" else silent + 1.0
            if limit and silent >= limit:
                send(_STACKS_SIGNAL, [child])
                limit = 0.0
