"""Meeting of a program's ranks, as seen from outside of rank 0: where somebody listens for others.

torch's rank 0 listens on MASTER_PORT, and who meets in another way listens on another port. Linux
shows who listens, and what was connected a minute ago (proc(5), net/tcp), and what a process has
loaded. Nothing is changed or sent.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp.processes.table import start_ticks
from clusterddp.processes.worlds import descendants

_LISTENS = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1, where programs listen for their own children."""
_FIRST_SECONDS, _FIRST_PAUSE, _PAUSE = 60.0, 0.25, 2.0
"""Time in which looks are dense, as a short program's meeting is, and the pauses between them."""


class Meeting:
    """Looks, until rank 0's process has ended, whether its program's ranks meet."""

    def __init__(self, pid: int, port: int, found: Callable[[bool], None]) -> None:
        """Start to look, from another thread.

        found: is called with False once the program has loaded torch and nobody has listened, and
            at last with True once the program or its children listen for other hosts, or somebody
            on `port`.
        """
        self._pid, self._port, self._found = pid, port, found
        self._has_torch = self._has_met = False
        self._looking = threading.Lock()
        threading.Thread(target=self._watch, daemon=True, name="meeting").start()

    def look(self) -> None:
        """Look once; at the end, too: what was connected at `port` is seen for a minute more."""
        with self._looking:  # the watch and the end, one after the other
            self._look()

    def _look(self) -> None:
        if self._has_met:
            return
        sockets = list(_sockets())
        reachable = {s.inode for s in sockets if s.is_listening and s.address not in _LOOPBACK}
        processes = [self._pid, *(child.pid for child in descendants(self._pid))]
        if any(self._port in (s.port, s.remote_port) for s in sockets) or any(
            reachable & _inodes(each) for each in processes
        ):
            self._has_met = True
            self._found(True)
        elif not self._has_torch and any(map(_has_torch, processes)):
            self._has_torch = True
            self._found(False)

    def _watch(self) -> None:
        began, since = start_ticks(self._pid), time.monotonic()
        # Not another process that has its number by now.
        while began is not None and start_ticks(self._pid) == began and not self._has_met:
            self.look()
            is_young = time.monotonic() - since < _FIRST_SECONDS
            time.sleep(_FIRST_PAUSE if is_young else _PAUSE)


def listening_ports() -> set[int]:
    """Return the ports of TCP on which somebody listens on this host."""
    return {socket.port for socket in _sockets() if socket.is_listening}


@dataclass(frozen=True)
class _Socket:
    """Line of proc(5)'s net/tcp."""

    inode: str
    address: str
    """Local address, as the kernel writes it."""
    port: int
    remote_port: int
    is_listening: bool


def _sockets() -> Iterator[_Socket]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
                address, _, port = local.rpartition(":")
                remote_port = int(remote.rpartition(":")[2], 16)
                yield _Socket(inode, address, int(port, 16), remote_port, state == _LISTENS)


def _inodes(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(entry.path)  # noqa: PTH115 -- of a link that leads nowhere
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _has_torch(pid: int) -> bool:
    try:
        return b"/libtorch" in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
