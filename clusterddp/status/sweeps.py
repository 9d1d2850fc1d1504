"""Status of sweeps and their trials."""

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

_PRECEDENCE = (
    RunState.RUNNING,
    RunState.QUEUED,
    RunState.CREATED,
    RunState.FAILED,
    RunState.UNKNOWN,
    RunState.STOPPED,
    RunState.CANCELLED,
    RunState.DONE,
)
"""States of trials in order of precedence: the first one present is the sweep's state."""


@dataclass(frozen=True)
class SweepStatus:
    """Status of a sweep and the states of its trials, by index.

    In --json, `trials` is a list of objects with `run`, `state`, `reason` and `params` (the
    values by name); `counts` is the number of trials in each state; `sweep` repeats the name.
    """

    name: str
    """Name of the sweep; its trials are the runs NAME-0, NAME-1, …"""
    names: tuple[str, ...]
    """Names that the sweep varies."""
    trials: tuple[tuple[str, ...], ...]
    """Values of each trial, as text, in the order of `names`."""
    states: tuple[RunState, ...]
    """State of each trial's run."""
    max_concurrent: int
    """Maximum number of trials that run at once; 0: no limit."""
    job_ids: tuple[str, ...]
    """Ids of the job arrays submitted for it, latest last."""
    submitted_time: float | None
    """Time of the first submission, in seconds since the epoch."""
    directory: str
    """Directory of the sweep."""
    layout: str = ""
    """Nodes and tasks per node of each trial, `2x4`."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Reasons for the states of the trials that did not end well, by index; empty if unknown."""

    @property
    def counts(self) -> Mapping[RunState, int]:
        """Number of trials in each state, without states that have none."""
        return _counts(self.states)

    @property
    def state(self) -> str:
        """Overall state: the first of `_PRECEDENCE` that a trial has."""
        return overall_state(self.states)

    def as_dict(self) -> dict[str, object]:
        """Return the fields of --json."""
        trials = [
            {
                "run": f"{self.name}-{index}",
                "state": state,
                "reason": self.reasons.get(index, ""),
                "params": dict(zip(self.names, values, strict=True)),
            }
            for index, (state, values) in enumerate(zip(self.states, self.trials, strict=True))
        ]
        return {
            "name": self.name,
            "sweep": self.name,
            "state": self.state,
            "counts": self.counts,
            "trials": trials,
            "max_concurrent": self.max_concurrent,
            "job_ids": self.job_ids,
            "submitted_time": self.submitted_time,
            "directory": self.directory,
        }

    @property
    def next_command(self) -> str:
        """Command to type next."""
        shown = SweepDir(Path(self.directory)).cli_name
        if ACTIVE & {*self.states}:
            return f"clusterddp runs {shown}"
        ended = {RunState.FAILED, RunState.STOPPED, RunState.CANCELLED, RunState.CREATED}
        if ended & {*self.states}:
            return f"clusterddp resume {shown}"
        return f"clusterddp report {shown}"

    @property
    def summary(self) -> str:
        """Counts in words, `3 queued, 4 running, 5 done`."""
        return summary(self.states)


def overall_state(states: Collection[RunState]) -> RunState:
    """Return the overall state of a sweep whose trials have these states."""
    return next((state for state in _PRECEDENCE if state in states), RunState.CREATED)


def summary(states: Iterable[RunState]) -> str:
    """Return the number of trials in each state in words: `3 queued, 4 running, 5 done`."""
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


def ended_without_success(status: RunStatus) -> bool:
    """Return whether a run failed, was stopped or cancelled, never began, or is lost to Slurm."""
    return (
        status.state in (RunState.FAILED, RunState.STOPPED, RunState.CANCELLED, RunState.CREATED)
        or status.is_forgotten
    )


def sweep_status(
    sweep: SweepDir,
    states: Sequence[RunState] | None = None,
    reasons: Mapping[int, str] = MappingProxyType({}),
) -> SweepStatus:
    """Return the status of a sweep; query Slurm if the records do not determine every state.

    states, reasons: known ones of the trials. Raises RequestError if the
    request cannot be read.
    """
    spec, submitted = sweep.load_spec(), History.read(sweep).every(events.Submitted)
    if states is None:
        states, reasons = _states_and_reasons(sweep)
    return SweepStatus(
        name=sweep.name,
        names=spec.sweep.names,
        trials=spec.sweep.trials,
        states=tuple(states),
        max_concurrent=spec.sweep.max_concurrent,
        job_ids=tuple(event.job_id for event in submitted if event.job_id),
        submitted_time=submitted[0].time if submitted else None,
        directory=str(sweep.path),
        layout=f"{spec.resources.nodes}x{spec.resources.tasks_per_node}",
        reasons=reasons,
    )


def _states_and_reasons(sweep: SweepDir) -> tuple[list[RunState], dict[int, str]]:
    """Return the states of a sweep's trials, and the reasons of those that did not end well.

    Only the latter are examined in detail: a sweep can have many trials.
    """
    trials = sweep.trials
    states = states_of(trials)
    ended = [
        n
        for n, state in enumerate(states)
        if state in (RunState.FAILED, RunState.STOPPED, RunState.CANCELLED, RunState.UNKNOWN)
    ]
    found = statuses([trials[index] for index in ended])
    return states, {n: each.why(in_short=True) for n, each in zip(ended, found, strict=True)}
