"""Processes of this machine, as proc(5) shows them."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
