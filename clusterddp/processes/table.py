"""Processes of this machine, and ranks among them, as proc(5) shows them.

What starts ranks tells them who they are in their environment, which Linux shows as it was when the
program began: so descendants of a task are found that form a world, as where each task starts
torchrun. A rank that lives for less than a moment may be missed, and so is one that its launcher
tells in another way.

torch's rank 0 listens on MASTER_PORT, and who meets in another way listens on another port. Linux
shows who listens, and what was connected a minute ago (net/tcp), and what a process has loaded.
Nothing is changed or sent.
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

from clusterddp import patience

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a file system",
    "T": "stopped (SIGSTOP)",
    "t": "held by a debugger",
    "Z": "ended",
}
_MOST_PROCESSES = 4096


@dataclass(frozen=True)
class Process:
    """Process, as it was when it was looked at."""

    pid: int
    name: str
    state: str
    parent: int
    ticks: int
    """Time of its start."""
    uid: int

    @property
    def own_pid(self) -> int:
        """Number by which it knows itself, which in a container can be another one."""
        numbers = status(self.pid).get("NSpid", "").split()
        return int(numbers[-1]) if numbers else self.pid

    @property
    def argv(self) -> list[str]:
        """Words of its command line."""
        return read_text(self.pid, "cmdline").rstrip("\0").split("\0")

    @property
    def words(self) -> str:
        return " ".join(self.argv) or self.name

    @property
    def environ(self) -> dict[str, str]:
        """Environment with which its program was started."""
        pairs = (entry.partition("=") for entry in read_text(self.pid, "environ").split("\0"))
        return {name: value for name, _, value in pairs}

    @property
    def doing(self) -> str:
        """State in words, and the kernel's function in which it waits, less a compiler's suffix."""
        words = _STATES.get(self.state, self.state)
        place = read_text(self.pid, "wchan").strip().partition(".")[0]
        return f"{words} in {place}" if place not in ("", "0") else words


def processes() -> dict[int, Process]:
    """List the processes that are there, by their numbers."""
    names = (entry.name for entry in Path("/proc").iterdir())
    found = (read_process(int(name)) for name in names if name.isdigit())
    return {process.pid: process for process in found if process}


def descendants(pid: int) -> Iterator[Process]:
    """Yield the processes below one, those near it first."""
    waiting, count = [pid], 0
    while waiting and count < _MOST_PROCESSES:
        for child in filter(None, map(read_process, children(waiting.pop(0)))):
            count += 1
            waiting.append(child.pid)
            yield child


def children(pid: int) -> list[int]:
    """Return the numbers of a process's children; none where it has gone."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 -- names alone
    except OSError:
        return []
    return [int(each) for task in tasks for each in read_text(pid, f"task/{task}/children").split()]


def read_process(pid: int) -> Process | None:
    """Read a process's entry; None for one that has gone."""
    folder = Path(f"/proc/{pid}")
    try:
        text, uid = (folder / "stat").read_text(errors="replace"), folder.stat().st_uid
    except OSError:
        return None
    head, _, rest = text.rpartition(")")  # its name can hold anything
    state, parent, *fields = rest.split()
    return Process(pid, head.partition("(")[2], state, int(parent), int(fields[17]), uid)


def read_text(pid: int | str, name: str) -> str:
    """Read a file of a process's; empty where it has gone, or may not be looked at."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def status(pid: int | str) -> dict[str, str]:
    """Read the fields of a process's status; none where it has gone."""
    lines = read_text(pid, "status").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def hears(pid: int, number: int) -> bool:
    """Return whether a process does not ignore a signal, or did not when it ended.

    False of one that is reaped, of which nothing is known.
    """
    ignored = status(pid).get("SigIgn")
    return ignored is not None and not int(ignored, 16) >> (number - 1) & 1


def takes(pid: int, number: int) -> bool:
    """Return whether a process has come to take a signal, be it in a thread, or has gone."""
    fields = status(pid)
    masks = (fields.get(name, "0") for name in ("SigCgt", "SigBlk"))
    return not fields or any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def process_alive(pid: int | None, host: str | None, since: float | None) -> bool | None:
    """Return whether a process of this machine is there; None for another machine's.

    since: when it was there for certain, in seconds of the epoch; one that started later has only
    inherited the number.
    """
    if pid is None or host not in (None, os.uname().nodename):
        return None
    process = read_process(pid)
    if process is None or process.state in "ZX":
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - process.ticks / os.sysconf("SC_CLK_TCK")
    # The clock can have been set since; a number comes round again only after a long while.
    return since is None or time.time() - age <= since + 60


def start_ticks(pid: int) -> int | None:
    """Return when a process has begun, in the kernel's ticks; None for one that has gone.

    With its number it tells a process from all others since the machine was started, and is the
    same within a container.
    """
    process = read_process(pid)
    return process.ticks if process else None


_SIZES = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables with the size of a world, and the rank in it: torch's, Open MPI's, MPICH's."""
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PMI_PORT")
"""Variables that tell one world from another of its size."""
_LISTENS = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1, where programs listen for their own children."""


@dataclass(frozen=True)
class World:
    """World whose ranks are all descendants of one task."""

    size: int
    launcher: tuple[str, ...] = ()
    """Command line of the process that started its ranks."""


def watch_for_world(pid: int, own: Mapping[str, str], found: Callable[[World], None]) -> None:
    """Look at a process's descendants until it has ended, or a world of their own is found.

    own: the environment that the process was given. found: is called from another thread, once.
    """
    began = start_ticks(pid)

    def look() -> None:
        first, longest = patience.WORLD_PAUSES
        for _ in patience.looks(every=first, longest=longest):
            # Not another process that has its number by now.
            if began is None or start_ticks(pid) != began:
                return
            if world := find_world(pid, own):
                found(world)
                return

    threading.Thread(target=look, daemon=True, name="worlds").start()


def find_world(pid: int, own: Mapping[str, str]) -> World | None:
    """Return a world that is not the process's own and that its descendants make up, if any."""
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
            if self._has_met:
                return
            sockets = list(_sockets())
            reachable = {s.inode for s in sockets if s.is_listening and s.address not in _LOOPBACK}
            processes = [self._pid, *(child.pid for child in descendants(self._pid))]
            is_at_port = any(self._port in (s.port, s.remote_port) for s in sockets)
            if is_at_port or any(reachable & _inodes(each) for each in processes):
                self._has_met = True
                self._found(True)
            elif not self._has_torch and any(map(_has_torch, processes)):
                self._has_torch = True
                self._found(False)

    def _watch(self) -> None:
        began = start_ticks(self._pid)
        dense = patience.looks(patience.MEETING_DENSE, every=patience.MEETING_DENSE_PAUSE)
        for _ in itertools.chain(dense, patience.looks(every=patience.MEETING_PAUSE)):
            # Not another process that has its number by now.
            if began is None or start_ticks(self._pid) != began or self._has_met:
                return
            self.look()


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
    return "/libtorch" in read_text(pid, "maps")
