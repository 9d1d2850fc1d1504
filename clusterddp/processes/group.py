"""Group of task processes on this machine that start and end together, without orphans.

Waits on events only: pidfds (Linux 5.3) for process ends, pipes for output. `start_methods` starts
the processes.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp.processes.signals import die_with_parent

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


class TaskGroup:
    """Processes of one job. A context manager: its exit ends the tasks that still run.

    Each task leads its own session, so a Ctrl-C in the terminal reaches only this process, and a
    signal to a task reaches its children. Tasks die with this process.
    """

    def __init__(
        self,
        *,
        kill_on_bad_exit: bool = True,
        kill_wait_seconds: float = 5.0,
        on_exit: Callable[[int, int], None] | None = None,
    ) -> None:
        """Create an empty group.

        on_exit: called with the index and status (-N for signal N) of each task when it ends.
        """
        self._on_exit = on_exit
        self._show = _shown()
        self.kill_on_bad_exit = kill_on_bad_exit
        """End the others when a task fails."""
        self.kill_wait_seconds = kill_wait_seconds
        """Time from SIGTERM to SIGKILL."""
        self.first_failed: int | None = None
        """Index of the first task that ended with a nonzero exit code or a signal."""
        self._tasks: list[_Task] = []
        self._selector = selectors.DefaultSelector()
        self._kill_at: float | None = None

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: Path | None = None,
        *,
        tee: bool = False,
    ) -> None:
        """Start a task with empty stdin; raises OSError if it cannot start.

        Its stdout and stderr are appended to `output`, or inherited without one. With `tee` they go
        to both, here through sys.stdout.
        """
        parent = os.getpid()
        with _output(output, tee=tee) as (stdout, log, reader):
            process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=None if stdout is None else subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _begin(parent),  # noqa: PLW1509 -- only calls of the system
            )
        self._add(_Task(process, reader, log))

    def call(
        self,
        method: str,
        function: Callable[..., None],
        arguments: tuple[object, ...],
        env: Mapping[str, str],
        output: Path | None = None,
        *,
        tee: bool = False,
    ) -> None:
        """Start a task that calls a function, with a start method of multiprocessing.

        The output is handled as in `start`. Call `start_methods.get_ready` once before. Raises
        whatever pickling the arguments raises.
        """
        from multiprocessing.connection import Connection

        from clusterddp.processes import start_methods

        with _output(output, tee=tee) as (stdout, log, reader):
            copy = None if stdout is None else Connection(os.dup(stdout), readable=False)
            with copy or contextlib.nullcontext():
                process = start_methods.begin(method, function, arguments, env, copy)
        # Only the fork server knows its child's exit code. For other methods the sentinel is
        # useless: descendants that outlive the process keep it open.
        self._add(_Task(process, reader, log, process.sentinel if method == "forkserver" else None))

    def _add(self, task: _Task) -> None:
        if task.reader is not None:
            self._selector.register(task.reader, selectors.EVENT_READ, task)
        self._selector.register(task.events, selectors.EVENT_READ, task)
        self._tasks.append(task)

    @property
    def pids(self) -> list[int]:
        """Process ids of the tasks; each is also the id of its process group."""
        return [task.pid for task in self._tasks]

    def wait(self) -> list[int]:
        """Wait for all tasks; return their exit codes, or -N for signal N (as subprocess).

        With `kill_on_bad_exit` the first failure ends the others: SIGTERM, then SIGKILL after
        `kill_wait_seconds`. Processes that remain in the tasks' sessions are killed.
        """
        while any(task.status is None for task in self._tasks):
            left = None if self._kill_at is None else max(self._kill_at - time.monotonic(), 0.0)
            self._take_events(left)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self.signal_all(signal.SIGKILL)
                self._kill_at = None
        self._clean_up()
        return [task.status or 0 for task in self._tasks]

    def signal_all(self, number: int) -> None:
        """Send a signal to every process of every task that still runs."""
        for task in self._tasks:
            if task.status is None:
                task.signal(number)

    def terminate(self) -> None:
        """Send SIGTERM to all tasks; `wait` kills the remaining ones after `kill_wait_seconds`."""
        if self._kill_at is None:
            self.signal_all(signal.SIGTERM)
            self._kill_at = time.monotonic() + self.kill_wait_seconds

    def __enter__(self) -> TaskGroup:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if any(task.status is None for task in self._tasks):
                self.terminate()
                self.wait()
        finally:  # a second Ctrl-C arrives here while the tasks have time to end
            self.signal_all(signal.SIGKILL)
            self._clean_up()
            self._selector.close()

    def _take_events(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            task: _Task = key.data
            if key.fd == task.events:
                # Set the status first, so that `wait` is correct after a Ctrl-C at this point.
                task.status = status = task.exit_status()
                self._selector.unregister(key.fd)
                index = self._tasks.index(task)
                if self._on_exit:
                    self._on_exit(index, status)
                if status and self.first_failed is None and self._kill_at is None:
                    self.first_failed = index
                    if self.kill_on_bad_exit:
                        self.terminate()
            elif not task.copy_output(self._show):
                self._selector.unregister(key.fd)

    def _clean_up(self) -> None:
        """Kill the remaining processes of the sessions, then reap the leaders.

        Not the other way round: a reaped leader's id may be reused.
        """
        for task in self._tasks:
            if not task.closed:
                task.signal(signal.SIGKILL)
                task.close(self._show)


class _Task:
    """Process of the group, whatever started it, with its output."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | BaseProcess,
        reader: int | None,
        log: int | None,
        sentinel: int | None = None,
    ) -> None:
        """Take a started process; `sentinel` only if it is not a child of this process."""
        assert process.pid is not None, "it has been started"
        self._process, self._sentinel = process, sentinel
        self.pid = process.pid
        self.events = os.pidfd_open(self.pid) if sentinel is None else sentinel
        """Descriptor that becomes readable when the process has ended."""
        self.status: int | None = None
        self.reader = reader
        """Pipe with the output to tee."""
        self.log = log
        self.closed = False

    def exit_status(self) -> int:
        """Return the exit code, or -N for signal N, of a process that has ended.

        Does not reap a child, so that its process id is not reused yet.
        """
        if self._sentinel is None:
            with contextlib.suppress(ChildProcessError):  # multiprocessing has reaped it already
                end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
                assert end is not None, "its pidfd said that it has ended"
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self._exit_code()

    def close(self, show: Callable[[bytes], None]) -> None:
        """Wait for its end, reap it and copy its last output."""
        code = self._exit_code()
        if self.status is None:
            self.status = code
        if self._sentinel is None:
            os.close(self.events)
        if not isinstance(self._process, subprocess.Popen):
            self._process.close()
        if self.reader is not None:  # a process outside the session may still hold the pipe
            os.set_blocking(self.reader, False)
            with contextlib.suppress(BlockingIOError):
                while self.copy_output(show):
                    pass
        _close(self.reader, self.log)
        self.closed = True

    def _exit_code(self) -> int:
        if isinstance(self._process, subprocess.Popen):
            return self._process.wait()
        self._process.join()
        assert self._process.exitcode is not None, "it has ended"
        return self._process.exitcode

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                if self.status is not None:
                    raise
                os.kill(self.pid, number)  # it has not called setsid yet

    def copy_output(self, show: Callable[[bytes], None]) -> bool:
        """Copy new output to the log and to `show`; return False at the end of the output."""
        assert self.reader is not None, "only a tee has output to copy"
        content = os.read(self.reader, 1 << 16)
        if content:
            if self.log is not None:
                _write_all(self.log, content)
            with contextlib.suppress(OSError):  # stdout may be closed: the log has the output
                show(content)
        return bool(content)


@contextlib.contextmanager
def _output(path: Path | None, *, tee: bool) -> Iterator[tuple[int | None, int | None, int | None]]:
    """Open the log and a tee's pipe; yield (stdout, log, reader), then close the write end."""
    log = reader = writer = None
    try:
        if path is not None:
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if tee:
            reader, writer = os.pipe()
        yield writer if tee else log, log, reader
    except BaseException:
        _close(log, reader)
        raise
    finally:
        _close(writer)


def _begin(parent: int) -> None:
    """Unblock all signals in the new process, and have it die with its parent."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent(parent)


def _close(*descriptors: int | None) -> None:
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _shown() -> Callable[[bytes], None]:
    """Return a function that writes to sys.stdout, which is not descriptor 1 in a notebook."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.fileno() == 1:
            return lambda content: _write_all(1, content)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # chunks may split a character

    def show(content: bytes) -> None:
        sys.stdout.write(decoder.decode(content))
        sys.stdout.flush()

    return show
