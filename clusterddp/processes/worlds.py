"""Worlds of their own that a task's descendants form, as where each task starts torchrun.

What starts ranks tells them who they are in their environment, which Linux shows as it was when the
program began (/proc/PID/environ). Nothing is changed or sent; a rank that lives for less than a
moment may be missed, and so is one that its launcher tells in another way.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterddp.processes.table import Process, read_process, start_ticks

_SIZES = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
"""Variables with the size of a world, and the rank in it: torch's, Open MPI's, MPICH's."""
_PLACES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PMI_PORT")
"""Variables that tell one world from another of its size."""
_FIRST_LOOK_SECONDS, _LAST_PAUSE_SECONDS, _LONGER = 0.25, 60.0, 1.5
_MOST_PROCESSES = 4096


@dataclass(frozen=True)
class World:
    """World whose ranks are all descendants of one task."""

    size: int
    launcher: tuple[str, ...] = ()
    """Command line of the process that started its ranks."""


def watch(pid: int, own: Mapping[str, str], found: Callable[[World], None]) -> None:
    """Look at a process's descendants until it has ended, or a world of their own is found.

    own: the environment that the process was given. found: is called from another thread, once.
    """
    began = start_ticks(pid)

    def look() -> None:
        pause = _FIRST_LOOK_SECONDS
        # Not another process that has its number by now.
        while began is not None and start_ticks(pid) == began:
            if world := find(pid, own):
                found(world)
                return
            time.sleep(pause)
            pause = min(pause * _LONGER, _LAST_PAUSE_SECONDS)

    threading.Thread(target=look, daemon=True, name="worlds").start()


def find(pid: int, own: Mapping[str, str]) -> World | None:
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


def descendants(pid: int) -> Iterator[Process]:
    """Yield the processes below one, those near it first."""
    waiting, count = [pid], 0
    while waiting and count < _MOST_PROCESSES:
        parent = waiting.pop(0)
        for task in _listed(f"/proc/{parent}/task"):
            with suppress(OSError):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text()
                for child in filter(None, map(read_process, map(int, children.split()))):
                    count += 1
                    waiting.append(child.pid)
                    yield child


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 -- names alone
    except OSError:
        return []  # it has ended
