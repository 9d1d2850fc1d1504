"""Status of sweeps and their points."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from clusterddp.run import events
from clusterddp.run.history import History
from clusterddp.run.run_dir import SweepDir
from clusterddp.status.state import ACTIVE, RunState
from clusterddp.status.status import RunStatus, states_of, statuses

_MOST_TELLING = (
    RunState.RUNNING,
    RunState.QUEUED,
    RunState.CREATED,
    RunState.FAILED,
    RunState.UNKNOWN,
    RunState.STOPPED,
    RunState.CANCELLED,
    RunState.DONE,
)
"""States of points, the most informative one for the sweep first."""


@dataclass(frozen=True)
class SweepStatus:
    """Status of a sweep: the states of its points, by index.

    --json prints `points` as objects with `run`, `state`, `why` and `point`, the values by name;
    `counts`, how many are in each state; and `sweep`, the name again.
    """

    name: str
    """Name of the sweep; its points are the runs NAME-0, NAME-1 and so on."""
    names: tuple[str, ...]
    """Names that the sweep varies."""
    points: tuple[tuple[str, ...], ...]
    """Values of each point, as text, in the order of `names`."""
    states: tuple[RunState, ...]
    """State of each point, as of a run."""
    max_concurrent: int
    """Most points that run at once; 0 where there is no limit."""
    job_ids: tuple[str, ...]
    """Job arrays that were submitted for it, the latest last."""
    submitted_time: float | None
    """Time of the first submission, in seconds since the epoch."""
    directory: str
    """Directory of the sweep."""
    layout: str = ""
    """Nodes and tasks of each point, `2x4`."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Reasons for the states of the points that have not ended well, by index, where asked for."""

    @property
    def counts(self) -> Mapping[RunState, int]:
        """Return how many points are in each state; no state with none."""
        return _counts(self.states)

    @property
    def state(self) -> str:
        """Return the overall state: running while a point runs, done when all are done."""
        return most_telling(self.states)

    def as_dict(self) -> dict[str, object]:
        """Return what --json prints: the points with their states, and the counts of these."""
        points = [
            {
                "run": f"{self.name}-{index}",
                "state": state,
                "why": self.reasons.get(index, ""),
                "point": dict(zip(self.names, values, strict=True)),
            }
            for index, (state, values) in enumerate(zip(self.states, self.points, strict=True))
        ]
        return {
            "name": self.name,
            "sweep": self.name,
            "state": self.state,
            "counts": self.counts,
            "points": points,
            "max_concurrent": self.max_concurrent,
            "job_ids": self.job_ids,
            "submitted_time": self.submitted_time,
            "directory": self.directory,
        }

    @property
    def next_command(self) -> str:
        """Return what to type next."""
        shown = SweepDir(Path(self.directory)).cli_name
        if ACTIVE & {*self.states}:
            return f"clusterddp runs {shown}"
        if {RunState.FAILED, RunState.STOPPED, RunState.CANCELLED} & {*self.states}:
            return f"clusterddp resume {shown}"
        return f"clusterddp report {shown}"

    @property
    def summary(self) -> str:
        """Return the counts in words, `3 queued, 4 running, 5 done`."""
        return summary(self.states)


def most_telling(states: Collection[RunState]) -> RunState:
    """Return the overall state of a sweep whose points have these states."""
    return next((state for state in _MOST_TELLING if state in states), RunState.CREATED)


def summary(states: Iterable[RunState]) -> str:
    """Return how many points are in each state, in words: `3 queued, 4 running, 5 done`."""
    return ", ".join(f"{count} {state}" for state, count in _counts(states).items())


def _counts(states: Iterable[RunState]) -> dict[RunState, int]:
    counted = Counter(states)
    order = (
        RunState.QUEUED,
        RunState.RUNNING,
        RunState.DONE,
        RunState.FAILED,
        RunState.STOPPED,
        RunState.CANCELLED,
        RunState.UNKNOWN,
        RunState.CREATED,
    )
    return {state: counted[state] for state in order if counted[state]}


def has_failed(status: RunStatus) -> bool:
    """Return whether a run has failed, was stopped or cancelled, or never started."""
    return (
        status.state in (RunState.FAILED, RunState.STOPPED, RunState.CANCELLED, RunState.CREATED)
        or status.is_forgotten
    )


def sweep_status(
    sweep: SweepDir,
    states: Sequence[RunState] | None = None,
    reasons: Mapping[int, str] = MappingProxyType({}),
) -> SweepStatus:
    """Return the status of a sweep; query Slurm if the points' records do not settle their states.

    states, reasons: states and reasons of the points, if already known. Raises RequestError if the
    request cannot be read.
    """
    spec, submitted = sweep.load_spec(), History.read(sweep).every(events.Submitted)
    if states is None:
        states, reasons = _states_and_reasons(sweep)
    return SweepStatus(
        name=sweep.name,
        names=spec.sweep.names,
        points=spec.sweep.points,
        states=tuple(states),
        max_concurrent=spec.sweep.max_concurrent,
        job_ids=tuple(event.job_id for event in submitted if event.job_id),
        submitted_time=submitted[0].time if submitted else None,
        directory=str(sweep.path),
        layout=f"{spec.resources.nodes}x{spec.resources.tasks_per_node}",
        reasons=reasons,
    )


def _states_and_reasons(sweep: SweepDir) -> tuple[list[RunState], dict[int, str]]:
    """Return the states of a sweep's points, and the reasons of those that did not end well.

    Only the latter are examined in detail: a sweep can have many points.
    """
    points = sweep.elements
    states = states_of(points)
    ended = [
        n
        for n, state in enumerate(states)
        if state in (RunState.FAILED, RunState.STOPPED, RunState.CANCELLED, RunState.UNKNOWN)
    ]
    found = statuses([points[index] for index in ended])
    return states, {n: each.why(in_short=True) for n, each in zip(ended, found, strict=True)}
