"""Records of a hold: a run whose job only keeps nodes, in which other runs start at once.

A request to start a run is a file with a new name in the hold's directory; a signal to its batch
process says that there is one. The hold answers in its own events. The reader opens this file for
each look, so no cached directory of a network file system delays the answer.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp import files, formatting
from clusterddp.errors import EXIT_FAILED, RequestError, SlurmError
from clusterddp.run import events
from clusterddp.run.attempt import latest
from clusterddp.run.events import Cause, Event, LostInHold, RunInHold, Started
from clusterddp.run.history import NO_RESTART, History
from clusterddp.run.outcome import step_name
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client
from clusterddp.slurm.forms import hosts_of

_FOLDER = "requests"


@dataclass(frozen=True)
class Request:
    """Request to start a run in a hold."""

    run: str
    """Its directory."""
    nodes: int = 1
    nodelist: str = ""
    """Nodes that it names, in Slurm's form."""
    usable: tuple[str, ...] = ()
    """Nodes that can serve it, those that it names first."""
    folder: str = ""
    """Directory in which the user typed the command."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The user's variables, as sbatch would pass them."""


@dataclass(frozen=True)
class Room:
    """Nodes of a hold, and the runs on them."""

    nodes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    runs: dict[str, RunInHold] = field(default_factory=dict)
    """Active runs, by the names of their requests."""
    idle_since: float | None = None
    """When the last run ended, or the hold began; None while a run is active."""

    @classmethod
    def of(cls, history: Sequence[Event]) -> "Room":
        """Return the room since the latest start of the hold's job."""
        nodes: tuple[str, ...] = ()
        lost: tuple[str, ...] = ()
        runs: dict[str, RunInHold] = {}
        since: float | None = None
        for event in history:
            if isinstance(event, Started):
                nodes, lost, runs, since = tuple(hosts_of(event.nodelist)), (), {}, event.time
            elif isinstance(event, LostInHold):
                lost = (*lost, *event.nodes)
            elif isinstance(event, RunInHold) and event.nodelist:
                runs[event.request] = event
            elif isinstance(event, RunInHold) and event.request in runs:
                del runs[event.request]
                since = event.time
        return cls(nodes, lost, runs, None if runs else since)

    @property
    def free(self) -> list[str]:
        """Nodes without a run."""
        busy = {node for event in self.runs.values() for node in hosts_of(event.nodelist)}
        return [node for node in self.nodes if node not in busy and node not in self.lost]

    def choose(self, request: Request) -> list[str]:
        """Return nodes for a run. Raises RequestError if too few are free."""
        free = self.free
        chosen = [node for node in request.usable if node in free][: request.nodes]
        if len(chosen) == request.nodes and {*hosts_of(request.nodelist)} <= {*chosen}:
            return chosen
        wanted = request.nodelist or formatting.count(request.nodes, "node")
        if not request.nodelist and len(request.usable) < len(self.nodes):
            wanted += f" of {', '.join(request.usable)}"
        raise RequestError(f"{wanted} requested; {self.describe()} [CD0419]")

    def describe(self) -> str:
        """Say which nodes are free, and where which run is."""
        free = self.free
        words = [f"{Path(event.run).name} on {event.nodelist}" for event in self.runs.values()]
        words.append(f"free: {', '.join(free)}" if free else "no node is free")
        words += [f"lost: {', '.join(self.lost)}"] if self.lost else []
        return "; ".join(words)


def is_hold(run: RunDir) -> bool:
    """Return whether a run's directory is that of a hold."""
    return (run.path / _FOLDER).is_dir()


def prepare(run: RunDir) -> None:
    """Make the directory of a hold's requests. Raises OSError."""
    run.make(run.path / _FOLDER)


def ask(hold: RunDir, request: Request) -> str:
    """Write a request, and return its name. Raises OSError."""
    name = f"{Path(request.run).name}-{os.urandom(4).hex()}.json"
    files.write_record(hold.path / _FOLDER / name, vars(request))
    return name


def take(hold: RunDir) -> Iterator[tuple[str, Request]]:
    """Yield the requests and their names, in the order of the names, and remove them."""
    for path in sorted((hold.path / _FOLDER).glob("*.json")):
        request = files.read(Request, path)
        if request and withdraw(hold, path.name):
            yield path.name, request


def withdraw(hold: RunDir, name: str) -> bool:
    """Remove a request; return False if another process did, which then decides about it."""
    with contextlib.suppress(OSError):
        (hold.path / _FOLDER / name).unlink()
        return True
    return False


def keeper_command(run: RunDir, nodes: Sequence[str]) -> list[str]:
    """Return the command that runs a run's script on these nodes of the job."""
    return [sys.executable, str(run.bundle), "held", str(run.path), ",".join(nodes)]


def record_end(run: RunDir, job_id: str, code: int) -> None:
    """Record the end of a run whose controller, or keeper, ended without a result.

    Also end a failed run's step: it outlives an srun that was killed.

    code: its exit code; negative for a signal.
    """
    with contextlib.suppress(OSError):  # a full disk costs only the record
        known = History.read(run).latest
        began = [event.attempt for event in known if isinstance(event, Started)]
        attempt = latest(run) if began and code else None
        if attempt and (step := step_name(attempt.outcomes, job_id)):
            with contextlib.suppress(SlurmError):  # it has ended
                client.signal_step(step, "KILL")  # it would keep the nodes until its own end
        if any(isinstance(event, events.Ended) for event in known):
            return
        ended = events.Ended(
            job_id=job_id,
            attempt=began[-1] if began else None,
            cause=Cause.FAILED,
            exit_code=(128 - code if code < 0 else code) or EXIT_FAILED,
            how="its controller ended without a result",
            why=NO_RESTART,
        )
        events.add(run.events, ended)
