"""History of a run: its events, the attempts of which these and the records tell, what follows.

It is read once and passed on. Whoever needs what has been written since reads it `again`. Whether
another attempt follows the one that has ended is decided purely, from it and Slurm's word;
`batch.finish` carries it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from clusterddp import files
from clusterddp.request.spec import JobSpec
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.events import Cause, Ended, Event, Failure, NodesMarkedBad, Started
from clusterddp.run.records import AttemptRecord, AttemptSummary, FinalRecord, SlowRank, SlowRanks
from clusterddp.run.run_dir import RunDir, newest_checkpoint
from clusterddp.slurm.forms import hosts_of

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class PastAttempt:
    """Attempt of a run, as its events and records tell."""

    number: int
    cause: str = ""
    """Cause of its end; empty where nobody recorded it: killed together with its script."""
    steps_gained: int | None = None
    """Steps by which its last checkpoint is beyond the one from which it started; None for a
    command, whose steps nobody counts."""
    stopped_by_signal: bool = False
    """True where its ranks left with exit code 0 because a signal told them to."""
    nodes: Sequence[str] = ()
    """Nodes of its tasks."""
    failure: Failure | None = None
    """Rank that failed first."""
    first_step: int = 0
    """Step from which it started."""
    slow: Sequence[SlowRank] = ()
    """Ranks that were named for being slow."""

    @property
    def reached(self) -> int | None:
        """Step of its newest checkpoint; None where nobody counts steps."""
        return None if self.steps_gained is None else self.first_step + self.steps_gained


@dataclass(frozen=True)
class History:
    """Events of a run so far, in their order."""

    run: RunDir
    events: Sequence[Event]

    @classmethod
    def read(cls, run: RunDir) -> "History":
        """Read a run's events. Raises OSError."""
        return cls(run, events.read(run.events))

    def again(self) -> "History":
        """Read what the run has been through by now. Raises OSError."""
        return History.read(self.run)

    @cached_property
    def spec(self) -> JobSpec | None:
        """The run's request; None where its record is damaged."""
        return self.run.read_spec()

    @property
    def folder(self) -> str:
        """Folder of the run's first submission; empty where none is recorded."""
        return next((each.folder for each in self.every(events.Submitted) if each.folder), "")

    def every(self, kind: type[E], attempt: int | None = None) -> list[E]:
        """List the events of a kind, of one attempt where that is given."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if attempt in (None, event.attempt)]

    def bad_marks(self, attempt: int, by: str = "") -> list[NodesMarkedBad]:
        """List what was blamed in an attempt. by: a word of `bad_nodes`; empty for all."""
        marked_bad = self.every(NodesMarkedBad, attempt)
        return [event for event in marked_bad if by in ("", event.by)]

    def marked_bad(self, attempt: int) -> set[str]:
        """Return the nodes that were blamed in an attempt, whatever for."""
        return {node for event in self.bad_marks(attempt) for node in event.nodes}

    def done_by(self, job_id: str) -> bool:
        """Return whether a start of this job has finished the run since it was last submitted."""
        causes = causes_by_attempt(self.events)
        ends = [event for event in self.every(Ended) if event.job_id == job_id]
        return any(causes.get(event.attempt or 0) == Cause.DONE for event in ends)

    @cached_property
    def starts(self) -> list[PastAttempt]:
        """Attempts since a person last submitted the run, the latest last."""
        return [
            self._past(number, cause) for number, cause in causes_by_attempt(self.events).items()
        ]

    def starts_with(self, number: int, **end: Any) -> list[PastAttempt]:
        """Return `starts` with the latest attempt at last, whose end nobody has recorded yet.

        end: fields of PastAttempt.
        """
        latest = next((s for s in self.starts if s.number == number), None)
        earlier = [start for start in self.starts if start.number != number]
        return [*earlier, replace(latest or self._past(number, ""), **end)]

    def _past(self, number: int, cause: str) -> PastAttempt:
        attempt, record = Attempt(self.run, number), Attempt(self.run, number).read_record()
        started = next(iter(self.every(Started, number)), Started())
        ended = next(reversed(self.every(Ended, number)), Ended())
        return PastAttempt(
            number,
            cause,
            steps_gained(attempt, self.spec),
            stopped_by_signal=bool(ended.stop_signal),
            nodes=hosts_of(started.nodelist),
            failure=ended.first_failure,
            first_step=(record.step or 0) if record else 0,
            slow=(files.read(SlowRanks, attempt.stragglers) or SlowRanks()).stragglers,
        )

    def summaries(self) -> list[AttemptSummary]:
        """Sum up the attempts in which ranks met, the latest last. Raises OSError."""
        causes = {event.attempt: event.cause for event in self.every(Ended)}
        met = [(each, record) for each in attempts(self.run) if (record := each.read_record())]
        following: list[AttemptRecord | None] = [*(record for _, record in met[1:]), None]
        return [
            _summary(attempt, record, after, causes.get(attempt.number, ""))
            for (attempt, record), after in zip(met, following, strict=False)
        ]


def _summary(
    attempt: Attempt, record: AttemptRecord, after: AttemptRecord | None, cause: str
) -> AttemptSummary:
    began, first_step = record.began or 0.0, record.step or 0
    final_record = attempt.read_final_record() or FinalRecord()
    left_at = final_record.step
    if left_at is None:
        left_at = attempt.read_liveness().step or 0
    resumed_step = (after.step or 0) if after else 0
    reached = max(first_step, left_at, resumed_step)
    seconds_lost = (after.began or 0.0) - (after.saved or began) if after else 0.0
    return AttemptSummary(
        attempt=attempt.number,
        job_id=record.job_id,
        hosts=record.hosts,
        began=began,
        first_step=first_step,
        last_step=reached,
        cause=cause or final_record.cause or ("killed" if after else ""),
        steps_done_twice=reached - resumed_step if after else 0,
        seconds_lost=round(seconds_lost, 3),
        stragglers=(files.read(SlowRanks, attempt.stragglers) or SlowRanks()).stragglers,
    )


def steps_gained(attempt: Attempt, spec: JobSpec | None) -> int | None:
    """Steps that an attempt has brought onto the disk. spec: the run's request, if it is known."""
    record = attempt.read_record()
    if not record:
        has_records = spec is None or spec.program.keeps_records or attempt.run.resolved.exists()
        return 0 if has_records else None
    # The next attempt takes the files over, and says from which of them it started.
    after = Attempt(attempt.run, attempt.number + 1).read_record()
    newest = newest_checkpoint(attempt.checkpoints)
    reached = max(newest[0] if newest else 0, (after.step or 0) if after else 0)
    return max(reached - (record.step or 0), 0)


def causes_by_attempt(history: Sequence[Event]) -> dict[int, str]:
    """Each attempt since a person last submitted the run, with the cause of its end."""
    causes: dict[int, str] = {}
    jobs: dict[int, str] = {}
    for event in history:
        number, job_id = event.attempt, event.job_id
        if _is_a_persons(event):
            # A job can start before the submitting side has written its own line.
            causes = {n: cause for n, cause in causes.items() if job_id and jobs[n] == job_id}
        elif isinstance(event, events.Started) and number is not None:
            causes[number], jobs[number] = "", job_id
        elif isinstance(event, events.Ended) and number in causes:
            causes[number] = event.cause
    return causes


def withdrawal_cause(history: Sequence[Event], job_id: str) -> str:
    """CANCELLED or STOPPED where a person has asked that this job start nothing more, else empty.

    A stop that was asked for since the run last started counts for the jobs that the run knows
    of, as it can come while one of them waits to start again; a job that a person has submitted
    since, or gives to sbatch by hand, is another matter.
    """
    withdrawal, known = "", False
    for event in history:
        of_job = event.job_id == job_id
        known = known or of_job
        if _is_a_persons(event) or (
            isinstance(event, events.Started) and withdrawal == Cause.STOPPED
        ):
            withdrawal = ""
        elif isinstance(event, events.StopAsked):
            withdrawal = withdrawal or Cause.STOPPED
        elif isinstance(event, events.StopFailed) and withdrawal == Cause.STOPPED:
            withdrawal = ""
        elif isinstance(event, events.CancelAsked) and of_job:
            withdrawal = Cause.CANCELLED
        elif isinstance(event, events.CancelFailed) and of_job and withdrawal == Cause.CANCELLED:
            withdrawal = ""
    return withdrawal if known else ""


def _is_a_persons(event: Event) -> bool:
    """Return whether it is a submission of a person, with which the counting of starts begins anew.

    `resubmit` stands before the submission proper, which the job's start can overtake.
    """
    submitted = isinstance(event, events.Submitted) and not event.in_place_of
    return submitted or isinstance(event, events.Resubmitted)


OWN_CLOCK = "its own clock, ahead of the time limit"
"""What took place where the cause is SIGNAL and there was none."""
STOP_ASKED = "'clusterddp stop' asked for it"
NO_RESTART = "a failed run starts again only with --retries"

_FRUITLESS_STARTS = 2
_TOLD_AGAIN = (
    f"{_FRUITLESS_STARTS} starts in a row have left with exit code 0 at a signal, and nobody knows "
    "whether they saved"
)

_GOES_ON = (
    Cause.SIGNAL,
    Cause.TIME_LIMIT,
    Cause.PREEMPTED,
    Cause.NODE_LOST,
    Cause.SUSPENDED,
    Cause.PREFLIGHT,
)
_NOT_COUNTED = (
    Cause.PREEMPTED,
    Cause.REQUEUED,
    Cause.NODE_LOST,
    Cause.SUSPENDED,
    Cause.PREFLIGHT,
    Cause.SUPERSEDED,
)


@dataclass(frozen=True)
class Policy:
    """Further starts that the request allows."""

    requeue: bool
    max_requeues: int
    """Most starts after the first, whatever the cause."""
    retries: int
    """Most of these that may follow a crash."""
    requeues_loops: bool = False
    """True where nobody has decided on a COMMAND: one that has begun a Loop is requeued."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Policy":
        """Return what a request allows."""
        undecided = spec.requeue is None
        return cls(bool(spec.requeue), spec.max_requeues, spec.retries, undecided)


@dataclass(frozen=True)
class Decision:
    """Decision on another attempt, and the reason as a person reads it."""

    go_on: bool
    why: str
    code: str = ""
    """Code of what holds the next attempt back, where it is more than the end itself."""


def decide(
    policy: Policy,
    cause: str,
    starts: Sequence[PastAttempt],
    *,
    stop_asked: bool = False,
    how: str = "",
) -> Decision:
    """Decide whether another attempt follows.

    starts: those since a person last submitted the run, the one that has just ended last.
    stop_asked: whether a person has asked the run to stop.
    how: what took place, where the cause's own word would say another thing.
    """
    if cause in (Cause.DONE, Cause.CANCELLED, Cause.STOPPED, Cause.SUPERSEDED):
        return Decision(False, cause)
    if stop_asked:
        return Decision(False, STOP_ASKED)
    if cause == Cause.REQUEUED:
        return Decision(False, "Slurm has put the job back into the queue")
    has_loop = policy.requeues_loops and starts[-1].steps_gained is not None
    if not (policy.requeue or has_loop) and (cause in _GOES_ON or policy.retries):
        return Decision(False, requeue_is_off(how or cause), "CD1221")
    if cause == Cause.FAILED:
        crashes = sum(start.cause == Cause.FAILED for start in starts)
        if not policy.retries:
            return Decision(False, NO_RESTART, "CD1223")
        if crashes > policy.retries:
            limit = f"--retries {policy.retries}"
            return Decision(False, f"it has failed {crashes} times ({limit})", "CD1223")
    if len(starts) > policy.max_requeues:
        return Decision(False, requeue_limit_reached(policy.max_requeues), "CD1222")
    last = starts[-_FRUITLESS_STARTS:]
    # One that has requeued its job by itself, as Lightning at USR1, has saved before.
    signalled = [
        start for start in last if start.stopped_by_signal and start.cause != Cause.REQUEUED
    ]
    if len(signalled) == _FRUITLESS_STARTS and all(
        start.steps_gained is None for start in signalled
    ):
        return Decision(False, _TOLD_AGAIN, "CD1229")
    counted = [s for s in starts if s.cause and s.cause not in _NOT_COUNTED]
    last = counted[-_FRUITLESS_STARTS:]
    if len(last) == _FRUITLESS_STARTS and all(start.steps_gained == 0 for start in last):
        why = f"{_FRUITLESS_STARTS} starts in a row have not gained a step"
        return Decision(False, why, "CD1224")
    return Decision(True, cause)


def requeue_is_off(how: str) -> str:
    """Say why a run is not started again that may not be; how: what took place."""
    return f"{how}, and requeue is off"


def requeue_limit_reached(max_requeues: int) -> str:
    """Say why a run is not started once more."""
    times = f"{max_requeues + 1} times" if max_requeues else "once"
    return f"it has been started {times} (--max-requeues {max_requeues})"
