"""History of a run: its events, its past attempts, and the decision on another attempt.

A history is read once and passed on; `again` reads the events written since. The decision depends
only on the history and Slurm's state. `batch.finish` carries it out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from clusterddp import files
from clusterddp.request.spec import JobSpec
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.events import Cause, Ended, Event, Failure, NodesMarkedBad, Started
from clusterddp.run.outcome import read_outcome
from clusterddp.run.records import (
    AttemptRecord,
    AttemptSummary,
    FinalRecord,
    SlowRank,
    SlowRanks,
    SlowRuns,
)
from clusterddp.run.run_dir import RunDir, newest_checkpoint
from clusterddp.slurm.forms import hosts_of

E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class PastAttempt:
    """Past attempt of a run, from its events and records."""

    number: int
    cause: str = ""
    """Cause of its end; empty if not recorded, because its script was killed too."""
    steps_gained: int | None = None
    """Steps from the checkpoint that it started from to its newest one; None for a command, whose
    steps are not counted."""
    stopped_by_signal: bool = False
    """True if its ranks exited with code 0 because of a signal."""
    nodes: Sequence[str] = ()
    """Nodes of its tasks."""
    failure: Failure | None = None
    """Rank that failed first."""
    code: str = ""
    """Error code of its end."""
    hardware: str = ""
    """Hardware error that the first failure names; empty without one."""
    died_at: int | None = None
    """Steps that were complete when that rank failed; None if unknown."""
    first_step: int = 0
    """Step from which it started."""
    slow: Sequence[SlowRank] = ()
    """Ranks that were recorded as slow."""

    @property
    def reached(self) -> int | None:
        """Step of its newest checkpoint; None if steps are not counted."""
        return None if self.steps_gained is None else self.first_step + self.steps_gained

    @property
    def error_kind(self) -> tuple[str, int | None]:
        """Kind of the first failure: its reason without numbers, and its exit code."""
        if self.failure is None or self.code in _OUT_OF_MEMORY:
            return "out of memory" if self.failure else "", None
        return re.sub(r"\d+", "", self.failure.reason), self.failure.exit_code

    def fails_like(self, other: "PastAttempt") -> bool:
        """Return whether both failed with the same error at the same known step."""
        same_step = self.died_at is not None and self.died_at == other.died_at
        return same_step and self.error_kind == other.error_kind


@dataclass(frozen=True)
class History:
    """Events of a run, in the order in which they were written."""

    run: RunDir
    events: Sequence[Event]

    @classmethod
    def read(cls, run: RunDir) -> "History":
        """Read a run's events. Raises OSError."""
        return cls(run, events.read(run.events))

    def reread(self) -> "History":
        """Read the events again. Raises OSError."""
        return History.read(self.run)

    @cached_property
    def spec(self) -> JobSpec | None:
        """Request of the run; None if its record is damaged."""
        return self.run.read_spec()

    @property
    def folder(self) -> str:
        """Directory of the run's first submission; empty if not recorded."""
        return next((each.folder for each in self.every(events.Submitted) if each.folder), "")

    def every(self, kind: type[E], attempt: int | None = None) -> list[E]:
        """List the events of a kind, optionally of one attempt."""
        found = [event for event in self.events if isinstance(event, kind)]
        return [event for event in found if attempt in (None, event.attempt)]

    @property
    def latest(self) -> Sequence[Event]:
        """Events since the user last submitted the run."""
        last = max((i for i, event in enumerate(self.events) if _is_by_user(event)), default=0)
        return self.events[last:]

    def bad_marks(self, attempt: int, by: str = "") -> list[NodesMarkedBad]:
        """List the events that marked nodes bad in an attempt. by: a `bad_nodes.BY_…`, or any."""
        return [event for event in self.every(NodesMarkedBad, attempt) if by in ("", event.by)]

    def marked_bad(self, attempt: int) -> set[str]:
        """Return the nodes that were marked bad in an attempt."""
        return {node for event in self.bad_marks(attempt) for node in event.nodes}

    def done_by(self, job_id: str) -> bool:
        """Return whether this job finished the run since the run was last submitted."""
        causes = causes_by_attempt(self.events)
        ends = [event for event in self.every(Ended) if event.job_id == job_id]
        return any(causes.get(event.attempt or 0) == Cause.DONE for event in ends)

    @cached_property
    def past_attempts(self) -> list[PastAttempt]:
        """Attempts since the user last submitted the run, in order."""
        return [
            self._past(number, cause) for number, cause in causes_by_attempt(self.events).items()
        ]

    def past_attempts_with(self, number: int, **end: Any) -> list[PastAttempt]:
        """Return `past_attempts` with the ending attempt last, whose end is not recorded yet.

        end: fields of PastAttempt.
        """
        latest = next((s for s in self.past_attempts if s.number == number), None)
        earlier = [start for start in self.past_attempts if start.number != number]
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
            code=ended.code,
            hardware=ended.hardware,
            died_at=step_of_death(attempt, ended.first_failure),
            first_step=(record.step or 0) if record else 0,
            slow=(files.read(SlowRanks, attempt.stragglers) or SlowRanks()).stragglers,
        )

    def summaries(self) -> list[AttemptSummary]:
        """Summarize the attempts in which ranks met, in order. Raises OSError."""
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
    lost_seconds = (after.began or 0.0) - (after.saved or began) if after else 0.0
    return AttemptSummary(
        attempt=attempt.number,
        job_id=record.job_id,
        hosts=record.hosts,
        began=began,
        first_step=first_step,
        last_step=reached,
        cause=cause or final_record.cause or ("killed" if after else ""),
        repeated_steps=reached - resumed_step if after else 0,
        lost_seconds=round(lost_seconds, 3),
        stragglers=(files.read(SlowRanks, attempt.stragglers) or SlowRanks()).stragglers,
        slowdowns=(files.read(SlowRuns, attempt.slow_run) or SlowRuns()).periods,
    )


def steps_gained(attempt: Attempt, spec: JobSpec | None) -> int | None:
    """Return the steps that an attempt added to the checkpoints; None if they are not counted.

    spec: the run's request, if known.
    """
    record = attempt.read_record()
    if not record:
        has_records = spec is None or spec.program.keeps_records or attempt.run.resolved.exists()
        return 0 if has_records else None
    # The next attempt takes the files over and records the one that it started from.
    after = Attempt(attempt.run, attempt.number + 1).read_record()
    newest = newest_checkpoint(attempt.checkpoints)
    reached = max(newest[0] if newest else 0, (after.step or 0) if after else 0)
    return max(reached - (record.step or 0), 0)


def step_of_death(attempt: Attempt, failure: Failure | None) -> int | None:
    """Return how many steps were complete when a rank failed; None if unknown.

    The rank's parent knows it. Otherwise rank 0 records its step when it loses a peer or raises,
    but only every two seconds before it is killed: the first record of an attempt then says
    nothing.
    """
    record = attempt.read_record()
    if failure is None or record is None:
        return None
    outcome = read_outcome(attempt.outcomes, failure.rank)
    if outcome and outcome.step is not None:
        return outcome.step
    step, is_killed = attempt.read_liveness().step, (failure.exit_code or 0) > _SIGNALLED
    return None if is_killed and step == record.step else step


def restart_delay(history: Sequence[Event], now: float) -> float:
    """Return the seconds to wait before the next automatic start.

    The fourth automatic start within ten minutes waits for 30 s, and each further one for twice as
    long, up to ten minutes. Earlier waits do not count as time. The user's own starts do not count.
    """
    automatic = list(causes_by_attempt(history))[1:]
    waited, starts = 0.0, []
    for event in history:
        if isinstance(event, events.Requeued | events.ResumedInJob | events.Submitted):
            waited += event.wait
        elif isinstance(event, Started) and event.attempt in automatic:
            starts.append((event.time or 0.0) + _STARTS_SECONDS - waited)
    recent = sum(end > now - waited for end in starts)
    wait = _FIRST_WAIT_SECONDS * 2.0 ** (recent - _MAX_STARTS)
    return min(wait, _STARTS_SECONDS) if recent >= _MAX_STARTS else 0.0


def causes_by_attempt(history: Sequence[Event]) -> dict[int, str]:
    """Return the attempts since the user last submitted the run, with the causes of their ends."""
    causes: dict[int, str] = {}
    jobs: dict[int, str] = {}
    for event in history:
        number, job_id = event.attempt, event.job_id
        if _is_by_user(event):
            # A job can start before `submit` has recorded it.
            causes = {n: cause for n, cause in causes.items() if job_id and jobs[n] == job_id}
        elif isinstance(event, events.Started) and number is not None:
            causes[number], jobs[number] = "", job_id
        elif isinstance(event, events.Ended) and number in causes:
            causes[number] = event.cause
    return causes


def withdrawal_cause(history: Sequence[Event], job_id: str) -> str:
    """Return CANCELLED or STOPPED if the user asked that this job start nothing more, else empty.

    A stop since the run's last start applies to the jobs that the run knows of, because one of them
    may be waiting to restart. It does not apply to jobs that the user has submitted since, or with
    plain sbatch.
    """
    withdrawal, known = "", False
    for event in history:
        of_job = event.job_id == job_id
        known = known or of_job
        if _is_by_user(event) or (
            isinstance(event, events.Started) and withdrawal == Cause.STOPPED
        ):
            withdrawal = ""
        elif isinstance(event, events.StopRequested):
            withdrawal = withdrawal or Cause.STOPPED
        elif isinstance(event, events.StopFailed) and withdrawal == Cause.STOPPED:
            withdrawal = ""
        elif isinstance(event, events.CancelRequested) and of_job:
            withdrawal = Cause.CANCELLED
        elif isinstance(event, events.CancelFailed) and of_job and withdrawal == Cause.CANCELLED:
            withdrawal = ""
    return withdrawal if known else ""


def _is_by_user(event: Event) -> bool:
    """Return whether the user submitted the run, which resets the count of attempts.

    `ResumeRequested` precedes `Submitted`; the start of the job can come between them.
    """
    submitted = isinstance(event, events.Submitted) and not event.in_place_of
    return submitted or isinstance(event, events.ResumeRequested)


OWN_CLOCK = "the run's own clock, before the time limit"
"""Replaces the word `signal` for a stop without a signal."""
STOP_ASKED = "stopped by 'clusterddp stop'"
SAME_FAILURE = "CD1232"
"""Code of a run that has failed with the same error at the same step twice."""
NO_RESTART = "a failed program restarts only with --retries"
_SAVED_NOTHING = "CD1220"
"""Code of an attempt that a signal ended outside of its Loop."""
_OUT_OF_MEMORY = ("CD1211", "CD1212")
"""Codes of failures for want of memory, which are one kind of error."""
_SIGNALLED = 128
"""Exit code above which a signal has ended a rank."""
_MAX_STARTS, _STARTS_SECONDS = 3, 600.0
"""Automatic starts within this time, without waits, after which further ones wait."""
_FIRST_WAIT_SECONDS = 30.0

_FRUITLESS_ATTEMPTS = 2
_SIGNALLED_AGAIN = (
    f"{_FRUITLESS_ATTEMPTS} attempts in a row exited with code 0 on a signal, and it is not known "
    "whether they saved"
)

_RESTARTABLE = (
    Cause.SIGNAL,
    Cause.TIME_LIMIT,
    Cause.PREEMPTED,
    Cause.NODE_LOST,
    Cause.SUSPENDED,
    Cause.PREFLIGHT,
    Cause.NOT_LAUNCHED,
)
_WITHOUT_PROGRESS = (
    Cause.PREEMPTED,
    Cause.REQUEUED,
    Cause.NODE_LOST,
    Cause.SUSPENDED,
    Cause.PREFLIGHT,
    Cause.NOT_LAUNCHED,
    Cause.SUPERSEDED,
)


@dataclass(frozen=True)
class Policy:
    """Further attempts that the request allows."""

    requeue: bool
    max_requeues: int
    """Maximum number of attempts after the first, whatever the cause."""
    retries: int
    """Maximum number of those that may follow a failure of the program."""
    requeues_loops: bool = False
    """True if a COMMAND has no setting for it: the job is requeued once it has begun a Loop."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Policy":
        """Return the policy of a request."""
        return cls(bool(spec.requeue), spec.max_requeues, spec.retries, spec.requeue is None)


@dataclass(frozen=True)
class Decision:
    """Decision on another attempt, with the reason for the user."""

    restarts: bool
    why: str
    code: str = ""
    """Error code of what prevents the next attempt; empty if the end itself does."""


def decide(
    policy: Policy,
    cause: str,
    starts: Sequence[PastAttempt],
    *,
    stop_requested: bool = False,
    how: str = "",
) -> Decision:
    """Decide whether another attempt follows.

    starts: the attempts since the user last submitted the run, the latest last.
    stop_requested: whether the user has asked the run to stop.
    how: description of the end, if the cause's word does not fit.
    """
    if cause in (Cause.DONE, Cause.CANCELLED, Cause.STOPPED, Cause.SUPERSEDED):
        return Decision(False, cause)
    if stop_requested:
        return Decision(False, STOP_ASKED)
    if cause == Cause.REQUEUED:
        return Decision(False, "Slurm requeued the job")
    has_loop = policy.requeues_loops and starts[-1].steps_gained is not None
    by_hardware = bool(starts[-1].hardware) and starts[-1].steps_gained is not None
    may_restart = cause in _RESTARTABLE or by_hardware or policy.retries
    if not (policy.requeue or has_loop) and may_restart:
        return Decision(False, requeue_is_off(how or cause), "CD1221")
    if cause == Cause.FAILED and (prevented := _judge_failure(policy, starts, by_hardware)):
        return prevented
    if len(starts) > policy.max_requeues:
        return Decision(False, requeue_limit_reached(policy.max_requeues), "CD1222")
    last = starts[-_FRUITLESS_ATTEMPTS:]
    # An attempt that requeued its job itself, like Lightning on USR1, has saved before.
    signalled = [
        start for start in last if start.stopped_by_signal and start.cause != Cause.REQUEUED
    ]
    if len(signalled) == _FRUITLESS_ATTEMPTS and all(
        start.steps_gained is None for start in signalled
    ):
        return Decision(False, _SIGNALLED_AGAIN, "CD1229")
    counted = [s for s in starts if s.cause and s.cause not in _WITHOUT_PROGRESS]
    last = counted[-_FRUITLESS_ATTEMPTS:]
    if len(last) == _FRUITLESS_ATTEMPTS and all(
        start.steps_gained == 0 or (start.steps_gained is None and start.code == _SAVED_NOTHING)
        for start in last
    ):
        why = f"{_FRUITLESS_ATTEMPTS} attempts in a row made no progress"
        return Decision(False, why, "CD1224")
    return Decision(True, cause)


def _judge_failure(
    policy: Policy, starts: Sequence[PastAttempt], by_hardware: bool
) -> Decision | None:
    """Return what prevents an attempt after a failure; None if nothing does."""
    *_, before, last = [PastAttempt(0), *(s for s in starts if s.cause == Cause.FAILED)]
    nodes = {each.failure.host for each in (before, last) if each.failure}
    if last.fails_like(before) and not (by_hardware and len(nodes) > 1):
        why = (
            f"attempts {before.number} and {last.number} failed with the same error after step "
            f"{last.died_at}, so the program or its data causes it"
        )
        return Decision(False, why, SAME_FAILURE)
    if by_hardware:
        return None
    if not policy.retries:
        return Decision(False, NO_RESTART, "CD1223")
    crashes = sum(start.cause == Cause.FAILED and not start.hardware for start in starts)
    if crashes > policy.retries:
        limit = f"--retries {policy.retries}"
        return Decision(False, f"it has failed {crashes} times ({limit})", "CD1223")
    return None


def requeue_is_off(how: str) -> str:
    """Return why a run without requeue does not restart. how: description of the end."""
    return f"{how}, and requeue is off"


def requeue_limit_reached(max_requeues: int) -> str:
    """Return why a run at its limit of requeues does not restart."""
    times = f"{max_requeues + 1} times" if max_requeues else "once"
    return f"it has been started {times} (--max-requeues {max_requeues})"
