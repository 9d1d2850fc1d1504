"""Sweeps of an output root, and how their points are doing."""

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from clusterddp import log
from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir, SweepDir, directories, elsewhere, find_runs
from clusterddp.status.state import (
    CANCELLED,
    CREATED,
    DONE,
    FAILED,
    QUEUED,
    RUNNING,
    STOPPED,
    UNKNOWN,
)
from clusterddp.status.status import RunStatus, find_run, is_run_of, states_of, statuses

_MOST_TELLING = (RUNNING, QUEUED, CREATED, FAILED, UNKNOWN, STOPPED, CANCELLED, DONE)
"""States of points, the one first that tells most about their sweep."""
_PATTERN = frozenset("*?[")


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
    states: tuple[str, ...]
    """State of each point, as of a run."""
    max_parallel: int
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
    def counts(self) -> Mapping[str, int]:
        """Return how many points are in each state; no state with none."""
        return _counts(self.states)

    @property
    def state(self) -> str:
        """Return the state that tells most: running while a point runs, done once all are."""
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
            "max_parallel": self.max_parallel,
            "job_ids": self.job_ids,
            "submitted_time": self.submitted_time,
            "directory": self.directory,
        }

    @property
    def next_command(self) -> str:
        """Return what to type next."""
        shown = SweepDir(Path(self.directory)).shown
        if {QUEUED, RUNNING} & {*self.states}:
            return f"clusterddp jobs {shown}"
        if {FAILED, STOPPED, CANCELLED} & {*self.states}:
            return f"clusterddp resubmit {shown}"
        return f"clusterddp report {shown}"

    @property
    def summary(self) -> str:
        """Return the counts in words, `3 queued, 4 running, 5 done`."""
        return summary(self.states)


def most_telling(states: Collection[str]) -> str:
    """Return the state of a sweep whose points are in these states."""
    return next((state for state in _MOST_TELLING if state in states), CREATED)


def summary(states: Iterable[str]) -> str:
    """Return how many points are in each state, in words: `3 queued, 4 running, 5 done`."""
    return ", ".join(f"{count} {state}" for state, count in _counts(states).items())


def _counts(states: Iterable[str]) -> dict[str, int]:
    counted = Counter(states)
    order = (QUEUED, RUNNING, DONE, FAILED, STOPPED, CANCELLED, UNKNOWN, CREATED)
    return {state: counted[state] for state in order if counted[state]}


def find_sweeps(output_root: Path) -> list[SweepDir]:
    """List the sweeps below an output root that this user can read, the latest last.

    Raises RequestError where it cannot be read.
    """
    return directories(SweepDir, output_root)


def find_sweep(output_root: Path, text: str) -> SweepDir | None:
    """Find the sweep of a name, directory or array's job id; None where there is none.

    One that is not below the root is looked for in the person's other output roots. Raises
    RequestError where the output root cannot be read.
    """
    for path in (output_root / text, Path(text)):
        if (path.parent == output_root or "/" in text) and SweepDir(path).is_sweep:
            return SweepDir(path)
    if text.isdecimal():
        sweeps = reversed(find_sweeps(output_root))
        if found := next((sweep for sweep in sweeps if text in job_ids(sweep)), None):
            return found
    others = elsewhere(SweepDir, output_root, text, lambda sweep: text in job_ids(sweep))
    if len(others) != 1 or is_run_of(output_root, text):
        return None
    log.info(f"{text} is {others[0].path}")
    return others[0]


def select(root: Path, text: str) -> list[RunDir]:
    """Return the runs that a text means: one, the points of a sweep, or those that a pattern fits.

    A sweep is named as a run is; the id of one of its arrays means the points of that. Raises
    RequestError where there is none.
    """
    sweep = find_sweep(root, text)
    if sweep and text.isdecimal() and sweep.name != text:
        history = events.read(sweep.events)
        arrays = (e for e in history if isinstance(e, events.Submitted) and e.job_id == text)
        return [sweep.element(index) for array in arrays for index in array.indices]
    if sweep:
        return sweep.elements
    if not is_pattern(text):
        return [find_run(root, text)]
    found = [run for run in find_runs(root) if fnmatch.fnmatchcase(run.name, text)]
    if not found:
        raise RequestError(f"no run below {root} has a name that fits {text!r}. [CD0501]")
    return found


def means_several(root: Path, text: str) -> bool:
    """Return whether a text may mean several runs: a sweep, or a pattern."""
    return is_pattern(text) or find_sweep(root, text) is not None


def select_each(root: Path, texts: Sequence[str]) -> tuple[list[RunDir], list[ClusterDDPError]]:
    """Return the runs that the texts mean, each once, and the errors for the other texts."""
    runs: dict[Path, RunDir] = {}
    wrong: list[ClusterDDPError] = []
    for text in texts:
        try:
            runs |= {run.path: run for run in select(root, text)}
        except RequestError as error:
            wrong.append(error)
    return list(runs.values()), wrong


def has_failed(status: RunStatus) -> bool:
    """Return whether a run has not ended well, or has never begun, and nothing of it is queued."""
    return status.state in (FAILED, STOPPED, CANCELLED, CREATED) or status.is_forgotten


def grouped(root: Path, runs: Sequence[RunDir]) -> list[RunDir]:
    """Return the runs of an output root with each sweep in the place of its points.

    One whose request is damaged hides none of them.
    """
    sweeps = [sweep for sweep in find_sweeps(root) if sweep.read_spec()]
    points = {run.path for sweep in sweeps for run in sweep.elements}
    others = [*(run for run in runs if run.path not in points), *sweeps]
    return sorted(others, key=lambda run: (run.spec.stat().st_mtime, run.name))


def latest_sweep(root: Path) -> SweepDir | None:
    """Return the sweep of which the latest run is a point; None where that is a run of its own."""
    runs = find_runs(root)
    return runs[-1].sweep if runs else None


def job_ids(sweep: SweepDir) -> list[str]:
    """Return the job arrays that were submitted for a sweep, the latest last."""
    history = events.read(sweep.events)
    return [e.job_id for e in history if isinstance(e, events.Submitted) and e.job_id]


def sweep_status(
    sweep: SweepDir,
    states: Sequence[str] | None = None,
    reasons: Mapping[int, str] = MappingProxyType({}),
) -> SweepStatus:
    """Return how a sweep is doing; asks Slurm where the points' own records do not tell.

    states, reasons: of the points, where they are known already. Raises RequestError where the
    request cannot be read.
    """
    spec, history = sweep.load_spec(), events.read(sweep.events)
    if states is None:
        states, reasons = _states_and_reasons(sweep)
    submitted = [e for e in history if isinstance(e, events.Submitted)]
    return SweepStatus(
        name=sweep.name,
        names=spec.sweep.names,
        points=spec.sweep.points,
        states=tuple(states),
        max_parallel=spec.sweep.max_parallel,
        job_ids=tuple(event.job_id for event in submitted if event.job_id),
        submitted_time=submitted[0].time if submitted else None,
        directory=str(sweep.path),
        layout=f"{spec.resources.nodes}x{spec.resources.tasks_per_node}",
        reasons=reasons,
    )


def _states_and_reasons(sweep: SweepDir) -> tuple[list[str], dict[int, str]]:
    """Return the states of a sweep's points, and why those are as they are that did not end well.

    The many that wait, run or are done are looked at no closer.
    """
    points = sweep.elements
    states = states_of(points)
    ended = [n for n, state in enumerate(states) if state in (FAILED, STOPPED, CANCELLED, UNKNOWN)]
    found = statuses([points[index] for index in ended])
    return states, {n: each.why(in_short=True) for n, each in zip(ended, found, strict=True)}


def is_pattern(text: str) -> bool:
    """Return whether a text means several runs, as `lr-*` does."""
    return not _PATTERN.isdisjoint(text)
