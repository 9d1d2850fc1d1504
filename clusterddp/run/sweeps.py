"""Sweeps of an output root, and how their points are doing."""

import fnmatch
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.run import events
from clusterddp.run.run_dir import RunDir, SweepDir, directories
from clusterddp.run.state import CANCELLED, CREATED, DONE, FAILED, QUEUED, RUNNING, STOPPED, UNKNOWN
from clusterddp.run.status import states_of

_MOST_TELLING = (RUNNING, QUEUED, CREATED, FAILED, UNKNOWN, STOPPED, CANCELLED, DONE)
"""States of points, the one first that tells most about their sweep."""
_PATTERN = frozenset("*?[")


@dataclass(frozen=True)
class SweepStatus:
    """Status of a sweep: the states of its points, by index."""

    name: str
    names: tuple[str, ...]
    """Names that the sweep varies."""
    points: tuple[tuple[str, ...], ...]
    states: tuple[str, ...]
    max_parallel: int
    job_ids: tuple[str, ...]
    """Job arrays that were submitted for it, the latest last."""
    submitted_time: float | None
    """Time of the first submission, in seconds since the epoch."""
    directory: str

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how many points are in each state; no state with none."""
        counted = Counter(self.states)
        order = (QUEUED, RUNNING, DONE, FAILED, STOPPED, CANCELLED, UNKNOWN, CREATED)
        return {state: counted[state] for state in order if counted[state]}

    @property
    def state(self) -> str:
        """Return the state that tells most: running while a point runs, done once all are."""
        return next((state for state in _MOST_TELLING if state in self.states), CREATED)

    @property
    def summary(self) -> str:
        """Return the counts in words, `3 queued, 4 running, 5 done`."""
        return ", ".join(f"{count} {state}" for state, count in self.counts.items())


def find_sweeps(output_root: Path) -> list[SweepDir]:
    """List the sweeps below an output root that this user can read, the latest last.

    Raises RequestError where it cannot be read.
    """
    return directories(SweepDir, output_root)


def find_sweep(output_root: Path, text: str) -> SweepDir | None:
    """Find the sweep of a name, directory or array's job id; None where there is none.

    Raises RequestError where the output root cannot be read.
    """
    for path in (output_root / text, Path(text)):
        if (path.parent == output_root or "/" in text) and SweepDir(path).is_sweep:
            return SweepDir(path)
    if not text.isdecimal():
        return None
    sweeps = reversed(find_sweeps(output_root))
    return next((sweep for sweep in sweeps if text in job_ids(sweep)), None)


def job_ids(sweep: SweepDir) -> list[str]:
    """Return the job arrays that were submitted for a sweep, the latest last."""
    history = events.read(sweep.events)
    return [e.job_id for e in history if isinstance(e, events.Submitted) and e.job_id]


def sweep_status(sweep: SweepDir, states: Sequence[str] | None = None) -> SweepStatus:
    """Return how a sweep is doing; asks Slurm where the points' own records do not tell.

    states: of the points, where they are known already. Raises RequestError where the request
    cannot be read.
    """
    spec, history = sweep.load_spec(), events.read(sweep.events)
    submitted = [e for e in history if isinstance(e, events.Submitted)]
    return SweepStatus(
        name=sweep.name,
        names=spec.sweep.names,
        points=spec.sweep.points,
        states=tuple(states_of(sweep.elements) if states is None else states),
        max_parallel=spec.sweep.max_parallel,
        job_ids=tuple(event.job_id for event in submitted if event.job_id),
        submitted_time=submitted[0].time if submitted else None,
        directory=str(sweep.path),
    )


def is_pattern(text: str) -> bool:
    """Return whether a text means several runs, as `lr-*` does."""
    return not _PATTERN.isdisjoint(text)


def matching(runs: Sequence[RunDir], pattern: str) -> list[RunDir]:
    """Return the runs whose names match a pattern of the shell, `lr-*`."""
    return [run for run in runs if fnmatch.fnmatchcase(run.name, pattern)]
