"""What a task group holds of one of its processes, by how that began."""

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


class Handle(Protocol):
    """What the group needs of a process, however it began."""

    pid: int
    events: int
    """A descriptor that can be read from once the process has ended."""

    def status(self) -> int:
        """How it ended: its exit code, or -N for signal N.

        It is not reaped if that can be: its process id must not be given away yet.
        """

    def reap(self) -> int:
        """Wait for its end, and let go of it; how it ended."""


class Program:
    """A process that runs a program."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid
        self.events = os.pidfd_open(process.pid)

    def status(self) -> int:
        return _look_at(self.pid)

    def reap(self) -> int:
        os.close(self.events)
        return self._process.wait()


class Call:
    """A process that multiprocessing has started."""

    def __init__(self, process: "BaseProcess", method: str) -> None:
        assert process.pid is not None, "it has been started"
        self._process = process
        self.pid = process.pid
        # Of a fork server's child only the server knows how it ended. Of others the sentinel is
        # of no use: what they leave running holds it open.
        self._owns = method != "forkserver"
        self.events = os.pidfd_open(self.pid) if self._owns else process.sentinel

    def status(self) -> int:
        if self._owns:
            with contextlib.suppress(ChildProcessError):  # multiprocessing has reaped it already
                return _look_at(self.pid)
        return self._exit_code()

    def reap(self) -> int:
        code = self._exit_code()
        if self._owns:
            os.close(self.events)
        self._process.close()
        return code

    def _exit_code(self) -> int:
        self._process.join()
        code = self._process.exitcode
        assert code is not None, "it has ended"
        return code


def _look_at(pid: int) -> int:
    """How a child ended, without reaping it."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None, "its pidfd said that it has ended"
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
