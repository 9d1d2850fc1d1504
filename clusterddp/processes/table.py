"""Processes of this machine, and ranks among them, read from proc(5).

Launchers pass rank and world size in the environment, and Linux shows each program's initial
environment. This reveals descendants of a task that form their own world, for example if each task
starts torchrun. Very short-lived ranks may be missed, and so are ranks that do not learn their rank
from the environment.

torch's rank 0 listens on MASTER_PORT; other rendezvous methods listen on other ports. Linux shows
listening sockets, connections of the last minute (net/tcp), and the libraries that a process has
loaded. Nothing is changed or sent.
"""

import contextlib
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp import polling

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a file system",
    "T": "stopped (SIGSTOP)",
    "t": "held by a debugger",
    "Z": "ended",
}
_MAX_PROCESSES = 4096


@dataclass(frozen=True)
class Process:
    """Snapshot of a process."""

    pid: int
    name: str
    state: str
    parent: int
    ticks: int
    """Time of its start, in clock ticks since boot."""
    uid: int

    @property
    def own_pid(self) -> int:
        """Process id in its own namespace, which differs in a container."""
        numbers = status(self.pid).get("NSpid", "").split()
        return int(numbers[-1]) if numbers else self.pid

    @property
    def argv(self) -> list[str]:
        """Arguments of its command line."""
        return read_text(self.pid, "cmdline").rstrip("\0").split("\0")

    @property
    def words(self) -> str:
        return " ".join(self.argv) or self.name

    @property
    def environ(self) -> dict[str, str]:
        """Initial environment of its program."""
        pairs = (entry.partition("=") for entry in read_text(self.pid, "environ").split("\0"))
        return {name: value for name, _, value in pairs}

    @property
    def doing(self) -> str:
        """State in words, and the kernel function in which it waits, without compiler suffixes."""
        words = _STATES.get(self.state, self.state)
        place = read_text(self.pid, "wchan").strip().partition(".")[0]
        return f"{words} in {place}" if place not in ("", "0") else words


def processes() -> dict[int, Process]:
    """Return the current processes by id."""
    names = (entry.name for entry in Path("/proc").iterdir())
    found = (read_process(int(name)) for name in names if name.isdigit())
    return {process.pid: process for process in found if process}


def descendants(pid: int) -> Iterator[Process]:
    """Yield the descendants of a process, nearest first."""
    waiting, count = [pid], 0
    while waiting and count < _MAX_PROCESSES:
        for child in filter(None, map(read_process, children(waiting.pop(0)))):
            count += 1
            waiting.append(child.pid)
            yield child


def children(pid: int) -> list[int]:
    """Return the ids of a process's children; empty if the process has ended."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 -- only names
    except OSError:
        return []
    return [int(each) for task in tasks for each in read_text(pid, f"task/{task}/children").split()]


def read_process(pid: int) -> Process | None:
    """Read a process's entry; None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        text, uid = (folder / "stat").read_text(errors="replace"), folder.stat().st_uid
    except OSError:
        return None
    head, _, rest = text.rpartition(")")  # the name may contain parentheses
    state, parent, *fields = rest.split()
    return Process(pid, head.partition("(")[2], state, int(parent), int(fields[17]), uid)


def read_text(pid: int | str, name: str) -> str:
    """Read a file below /proc/PID; empty if the process has ended or may not be read."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def status(pid: int | str) -> dict[str, str]:
    """Read the fields of a process's status; empty if it has ended."""
    lines = read_text(pid, "status").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def accepts_signal(pid: int, number: int) -> bool:
    """Return whether a process does not ignore a signal; works for a zombie too.

    False for a reaped process, because nothing is known about it.
    """
    ignored = status(pid).get("SigIgn")
    return ignored is not None and not int(ignored, 16) >> (number - 1) & 1


def handles_signal(pid: int, number: int) -> bool:
    """Return whether a process handles or blocks a signal, or has ended."""
    fields = status(pid)
    masks = (fields.get(name, "0") for name in ("SigCgt", "SigBlk"))
    return not fields or any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def process_alive(pid: int | None, host: str | None, since: float | None) -> bool | None:
    """Return whether a process of this machine is running; None for another machine's process.

    since: when it was certainly running, in seconds since the epoch; a process that started later
    has only reused the id.
    """
    if pid is None or host not in (None, os.uname().nodename):
        return None
    process = read_process(pid)
    if process is None or process.state in "ZX":
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.ticks / os.sysconf("SC_CLK_TCK")
    # 60 s because the clock may have been adjusted; an id is not reused that soon.
    return since is None or time.time() - age <= since + 60


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it has ended.

    Together with the id it identifies a process since boot, and it is the same in a container.
    """
    process = read_process(pid)
    return process.ticks if process else None


_SIZES = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables with the world size and the rank in it, for torch, Open MPI and MPICH."""
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PMI_PORT")
"""Variables that distinguish worlds of the same size."""
_LISTENS = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1, on which programs listen for their own children."""


@dataclass(frozen=True)
class World:
    """World whose ranks are all descendants of one task."""

    size: int
    launcher: tuple[str, ...] = ()
    """Command line of the process that started its ranks."""


def watch_for_world(pid: int, own: Mapping[str, str], found: Callable[[World], None]) -> None:
    """Search a process's descendants for their own world, until one is found or the process ends.

    own: the environment of the process. found: called once, from another thread.
    """
    began = start_ticks(pid)

    def watch() -> None:
        first, longest = polling.WORLD_POLL_SECONDS
        for _ in polling.poll(every=first, longest=longest):
            if began is None or start_ticks(pid) != began:  # the id may have been reused
                return
            if world := find_world(pid, own):
                found(world)
                return

    threading.Thread(target=watch, daemon=True, name="worlds").start()


def find_world(pid: int, own: Mapping[str, str]) -> World | None:
    """Return a world that a process's descendants form, other than its own; None without one."""
    ranks: dict[tuple[str, ...], set[str]] = defaultdict(set)
    parents: dict[tuple[str, ...], int] = {}
    for child in descendants(pid):
        environ = child.environ
        for size, rank in _SIZES.items():
            names = (size, rank, *_PLACES)
            values = tuple(environ.get(name, "") for name in names)
            is_own = values == tuple(own.get(name, "") for name in names)
            if is_own or not values[0].isdecimal():
                continue
            world = (size, values[0], *values[2:])
            ranks[world].add(values[1])
            parents.setdefault(world, child.parent)
    for world, members in ranks.items():
        if len(members) == int(world[1]):
            launcher = read_process(parents[world])
            return World(int(world[1]), tuple(launcher.argv) if launcher else ())
    return None


class RendezvousWatch:
    """Watch over rank 0's process: do the ranks of its program rendezvous?"""

    def __init__(self, pid: int, port: int, found: Callable[[bool], None]) -> None:
        """Start to watch from another thread, until the process ends.

        found: called with False when the program has loaded torch but no port is open yet, and with
            True when the program or its children listen for other hosts, or any process on `port`.
        """
        self._pid, self._port, self._found = pid, port, found
        self._has_torch = self._has_listened = False
        self._looking = threading.Lock()
        threading.Thread(target=self._watch, daemon=True, name="meeting").start()

    def check(self) -> None:
        """Check once; also useful at the end: a connection at `port` stays visible for a minute."""
        with self._looking:  # the thread and the caller, one at a time
            if self._has_listened:
                return
            sockets = list(_sockets())
            reachable = {s.inode for s in sockets if s.is_listening and s.address not in _LOOPBACK}
            processes = [self._pid, *(child.pid for child in descendants(self._pid))]
            is_at_port = any(self._port in (s.port, s.remote_port) for s in sockets)
            if is_at_port or any(reachable & _inodes(each) for each in processes):
                self._has_listened = True
                self._found(True)
            elif not self._has_torch and any(map(_has_torch, processes)):
                self._has_torch = True
                self._found(False)

    def _watch(self) -> None:
        began = start_ticks(self._pid)
        early = polling.poll(polling.EARLY_MEETING_SECONDS, every=polling.EARLY_POLL_SECONDS)
        for _ in itertools.chain(early, polling.poll(every=polling.MEETING_POLL_SECONDS)):
            # The id may have been reused.
            if began is None or start_ticks(self._pid) != began or self._has_listened:
                return
            self.check()


def listening_ports() -> set[int]:
    """Return the TCP ports with a listening socket on this host."""
    return {socket.port for socket in _sockets() if socket.is_listening}


@dataclass(frozen=True)
class _Socket:
    """Line of net/tcp (proc(5))."""

    inode: str
    address: str
    """Local address in the kernel's notation."""
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
                target = os.readlink(entry.path)  # noqa: PTH115 -- the target is not a path
                found.add(target.removeprefix("socket:[").removesuffix("]"))
    return found


def _has_torch(pid: int) -> bool:
    return "/libtorch" in read_text(pid, "maps")
