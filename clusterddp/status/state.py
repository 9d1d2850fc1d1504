"""State of a run and its reason, from the run's own events first and from Slurm second.

`judge` is pure: it works without accounting, and after Slurm has forgotten the job. The events are
first reduced to the run's latest submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from clusterddp.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from clusterddp.formatting import moment, signal_name
from clusterddp.processes.table import process_alive
from clusterddp.request.spec import IN_ALLOCATION
from clusterddp.run.events import (
    CancelFailed,
    CancelRequested,
    Cause,
    Ended,
    Event,
    Requeued,
    RequeueFailed,
    ResumedInJob,
    Started,
    StopFailed,
    StopRequested,
    Submitted,
)
from clusterddp.run.history import NO_RESTART, OWN_CLOCK, causes_by_attempt, requeue_is_off
from clusterddp.run.records import Report
from clusterddp.slurm.states import HELD, JobState, State


class RunState(str, Enum):
    """State of a run; its value is printed and recorded."""

    CREATED = "created"
    """Its directory exists, but nothing was submitted."""
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """Resumable from its last checkpoint with a manual resumption."""
    UNKNOWN = "unknown"
    """No end is recorded, and Slurm does not answer or no longer knows the job."""

    __str__ = str.__str__


CREATED, QUEUED, RUNNING, DONE, FAILED, CANCELLED, STOPPED, UNKNOWN = RunState
ACTIVE = frozenset({QUEUED, RUNNING})
ENDED = frozenset({DONE, FAILED, CANCELLED, STOPPED})

SETTLE_SECONDS = 60.0
"""Time for which Slurm may still show a requeued job's previous end."""

# Reason for a restart: a cause of `history`, worded for a sentence.
_AFTER: dict[str, str] = {
    Cause.TIME_LIMIT: "the time limit",
    Cause.SIGNAL: "a signal",
    Cause.PREEMPTED: "preemption",
    Cause.SUSPENDED: "a suspension",
    Cause.FAILED: "a failure",
    Cause.REQUEUED: "a requeue by Slurm",
    Cause.NOT_LAUNCHED: "a failed launch of its tasks",
}
# For these causes Slurm ends an attempt whether or not it has saved.
_SLURMS_CAUSES = (Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.NODE_LOST)
_WHY_FAILED = {
    State.FAILED: "the job failed",
    State.TIMEOUT: "the job reached its time limit",
    State.PREEMPTED: "the job was preempted and not requeued",
    State.NODE_FAIL: "a node of the job failed",
    State.OUT_OF_MEMORY: "the job ran out of memory",
    State.DEADLINE: "the job's deadline passed",
    State.BOOT_FAIL: "a node of the job did not boot",
}
_REQUEUED_FOR = (State.NODE_FAIL, State.PREEMPTED, State.BOOT_FAIL)
# Slurm's reasons that need an explanation: for the others, waiting helps.
_WHY_PENDING = {
    "PartitionNodeLimit": "PartitionNodeLimit: the job requests more nodes than the partition has",
    "PartitionTimeLimit": "PartitionTimeLimit: --time exceeds the partition's limit",
    "PartitionConfig": "PartitionConfig: the partition cannot satisfy the request",
    "PartitionDown": "PartitionDown: the partition is down",
    "BadConstraints": "BadConstraints: no node satisfies the request",
    "DependencyNeverSatisfied": "DependencyNeverSatisfied: a job that it waits for has failed",
    "JobHeldUser": "JobHeldUser: held; release it with 'scontrol release JOB'",
    "JobHeldAdmin": "JobHeldAdmin: held by an administrator",
    "ReqNodeNotAvail": "ReqNodeNotAvail: a requested node is not available",
}
NEVER_STARTS = {
    *("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints"),
    "DependencyNeverSatisfied",
}
"""Reasons of a job that waits until the job, its dependency or the cluster is changed."""
NOT_LAUNCHED = "JobLaunchFailure"
"""Reason of a job whose script never ran: Slurm's exit code for it is meaningless."""
BEGIN_TIME = "BeginTime"
"""Reason of a job that may not start yet: the start that Slurm shows is the earliest possible."""
WAITING_REASONS = {"", "Dependency", BEGIN_TIME, HELD}
"""Reasons of a job that waits for other runs (BeginTime after a requeue)."""
NO_START = {*NEVER_STARTS, "Dependency", "JobHeldUser", "JobHeldAdmin", HELD, BEGIN_TIME}
"""Reasons for which Slurm's expected start is not a useful estimate."""
_NOT_ASKED = JobState(State.UNKNOWN, problem="Slurm was not queried")

# Phrases for a list of reasons; "" is an attempt without a recorded end.
_REASONS: dict[str, str] = {
    Cause.REQUEUED: "requeued by Slurm",
    "": "killed by a requeue or node failure",
}


@dataclass(frozen=True)
class Submission:
    """Latest submission of a run."""

    job_id: str
    launcher: str
    pid: int | None = None
    """Process that controls a local run, on `host`."""
    host: str | None = None
    submitted: float | None = None
    """Time of the latest manual submission, in seconds since the epoch."""
    start: Started = field(default_factory=Started)
    """Latest start: a requeued job starts several times."""
    end: Ended | None = None
    """End since then."""
    cancelled: bool = False
    """True after `clusterddp cancel`, or if Slurm was seen to have cancelled it."""
    attempt: int | None = None
    """Number of the run's latest attempt; None if attempts are not numbered."""
    restarts: int = 0
    """Starts after the first one since the latest manual submission."""
    reasons: tuple[str, ...] = ()
    """Short reason for each restart."""
    requeue_reason: str = ""
    """Reason for a requeue, until the job has started again."""
    requeue_time: float | None = None
    requeue_error: str = ""
    """Reason for a failed requeue."""
    stop_requested: bool = False
    """True if `clusterddp stop` asked the latest attempt to save a checkpoint and exit."""
    stop_requested_time: float | None = None
    resumes: bool = True
    """False for a COMMAND without a Loop: its next start may begin from scratch."""

    @property
    def is_local(self) -> bool:
        return self.launcher == "local"

    @property
    def is_held(self) -> bool:
        """True if it runs inside an allocation: the job's state is not the run's."""
        return self.launcher == IN_ALLOCATION

    @property
    def is_alive(self) -> bool | None:
        """True while the controlling process of a local run runs; None on another machine."""
        return process_alive(self.pid, self.host, self.submitted)

    @property
    def restart(self) -> int:
        """SLURM_RESTART_COUNT of the latest start."""
        return (self.end or self.start).restart


def latest_submission(history: Sequence[Event]) -> Submission | None:
    """Return the latest submission in a run's events; None if nothing was submitted.

    For a run that was resumed in a new job, this is the new job with the time of the manual
    submission. A script that the user gave to sbatch has `started` as its first event.
    """
    job_id = launcher = ""
    position = -1
    persons: float | None = None
    for index, event in enumerate(history):
        known = ("", job_id)
        if isinstance(event, Submitted) and event.job_id:
            job_id, launcher, position = event.job_id, event.launcher or "sbatch", index
            if not event.in_place_of:
                persons = event.time
        elif isinstance(event, Started) and launcher != "local" and event.job_id not in known:
            job_id, launcher, position, persons = event.job_id, "sbatch", index, None
    if not job_id:
        return None
    submission = Submission(job_id, launcher)
    for index, event in enumerate(history):
        # A job can start before its submission is recorded, so the job id decides. Tasks of a local
        # run may record another id, so there the order decides.
        # Several runs, and several starts of one, share a held job.
        of_job = event.job_id == job_id and (launcher != IN_ALLOCATION or index >= position)
        if of_job or (launcher == "local" and index > position):
            submission = _apply_event(submission, event)
    causes = causes_by_attempt(history)
    ends = [event for event in history if isinstance(event, Ended)]
    by_clock = {end.attempt for end in ends if end.how == OWN_CLOCK}
    return replace(
        submission,
        submitted=submission.submitted if persons is None else persons,
        attempt=max(causes, default=submission.start.attempt),
        restarts=len(causes) - 1 if causes else submission.restart,
        reasons=tuple(
            "time limit" if number in by_clock else reason(cause)
            for number, cause in list(causes.items())[:-1]
        ),
    )


def jobs_to_query(submissions: Sequence[Submission | None]) -> list[str]:
    """Return the job ids whose state must be queried from Slurm.

    A recorded end with exit code 0 is final. Another end may be followed by a requeue, or may be a
    cancellation by another user.
    """
    in_slurm = [each for each in submissions if each and not each.is_local]
    return [
        each.job_id
        for each in in_slurm
        if not (each.end and (each.end.exit_code == 0 or each.cancelled or each.is_held))
    ]


def reason(cause: str) -> str:
    """Return a short reason for a restart, from the cause of the previous attempt's end."""
    return _REASONS.get(cause, cause)


def _apply_event(before: Submission, event: Event) -> Submission:
    """Return the submission updated with one event."""
    if isinstance(event, Submitted):
        after = replace(before, submitted=event.time, pid=event.pid, host=event.host)
        if event.in_place_of and before.start.time is None:
            after = replace(after, requeue_reason=event.why or "?", requeue_time=event.time)
        return after
    if isinstance(event, Started):
        before = replace(before, start=event, end=None, stop_requested=False)
        return replace(before, requeue_reason="", requeue_time=None, requeue_error="")
    if isinstance(event, StopRequested | StopFailed):
        return replace(
            before, stop_requested=isinstance(event, StopRequested), stop_requested_time=event.time
        )
    if isinstance(event, CancelRequested | CancelFailed):
        return replace(before, cancelled=isinstance(event, CancelRequested))
    if _is_outdated(event, before):
        return before
    if isinstance(event, Ended):
        after = replace(before, end=event)
        if event.cause == Cause.REQUEUED:
            after = replace(after, requeue_reason=event.cause, requeue_time=event.time)
        return after
    if isinstance(event, ResumedInJob):
        return replace(before, end=None)  # the next attempt begins
    if isinstance(event, Requeued):
        return replace(before, requeue_reason=event.why or "?", requeue_time=event.time)
    if isinstance(event, RequeueFailed):
        return replace(before, requeue_error=event.error or "?")
    return before


def _is_outdated(event: Event, submission: Submission) -> bool:
    """Return whether an event belongs to an attempt before the latest one."""
    if event.attempt is not None and submission.start.attempt is not None:
        return event.attempt != submission.start.attempt
    return isinstance(event, Ended) and event.restart < submission.restart


def judge(
    submission: Submission | None,
    report: Report | None,
    job: JobState | None,
    alive: bool | None,
    now: float,
) -> tuple[RunState, str]:
    """Determine the state of a run and the reason for it, including disk errors at its end.

    report: None without one.
    job: Slurm's answer; None if Slurm was not queried.
    alive: whether the process of a local run is running; None if that is unknown here.
    now: seconds since the epoch.
    """
    if submission is None and report:
        return DONE, "its ranks were started by hand"
    if submission is None:
        return CREATED, "no submission is recorded"
    job = job or _NOT_ASKED
    if submission.end:
        state, detail = _judge_ended(submission, submission.end, job, alive, now)
        return state, "; ".join(filter(None, (detail, submission.end.write_error)))
    started = submission.start.time
    if submission.requeue_reason and not submission.cancelled:
        return _judge_requeued(submission, job, now)
    if submission.is_local or (submission.is_held and alive is False):
        return _judge_local(submission, alive)
    if submission.is_held and job.state.is_final:
        ended = f"its allocation, job {submission.job_id}, has ended: {job.state.value}"
        return (CANCELLED, "") if submission.cancelled else (FAILED, ended)
    if job.state is State.UNKNOWN:
        return _judge_forgotten(submission, report, job)
    if job.state is State.PENDING:
        again = "requeued by Slurm" if started else ""
        return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))
    if job.state is State.OTHER:
        state = RUNNING if started else QUEUED
        return state, ", ".join(filter(None, (_other(job), _asked(submission))))
    if not job.state.is_final:
        shown = "" if job.state is State.RUNNING else job.state.value
        return RUNNING, ", ".join(filter(None, (shown, _asked(submission))))
    if job.state is State.DONE:
        return DONE, "Slurm reports COMPLETED; the run itself recorded no end"
    if job.state is State.CANCELLED:
        return CANCELLED, "" if started else "before it started"
    why = _WHY_FAILED[job.state]
    if job.state is State.FAILED and job.reason == NOT_LAUNCHED and not started:
        why = "Slurm could not start its script on the node"
    return FAILED, f"{why} ({job.reason})" if job.reason and job.state is State.FAILED else why


def _judge_ended(
    submission: Submission, end: Ended, job: JobState, alive: bool | None, now: float
) -> tuple[RunState, str]:
    cause, why = end.cause, end.why
    if cause == Cause.DONE or (not cause and end.exit_code == 0):
        return DONE, ""
    if submission.cancelled:
        return CANCELLED, "before it started again" if submission.requeue_reason else ""
    if submission.requeue_reason:
        return _judge_requeued(submission, job, now)
    held = ""
    if job.state is State.PENDING and job.reason == HELD and why:
        held = f"; Slurm holds it: remove it with 'scancel {submission.job_id}'"
    elif job.state is State.PENDING:
        return QUEUED, ": ".join(filter(None, ("requeued", _why_pending(job))))
    at = "" if end.step is None else f" at step {end.step}"
    how = end.how or (f"exit code {end.exit_code}" if cause == Cause.FAILED else cause)
    if submission.requeue_error:
        return STOPPED, f"{how}{at}; requeue failed: {submission.requeue_error}"
    if cause == Cause.CANCELLED:
        return CANCELLED, f"by {end.how or 'scancel'}"
    if cause == Cause.NOT_DUE:
        return CANCELLED, why
    if not cause:
        return _judge_code(end.exit_code, job)
    if not why:
        return _judge_undecided(submission, cause, f"{how}{at}", job, alive)
    if cause == Cause.FAILED:
        more = "" if why == NO_RESTART else f"; {why}"
        return FAILED, f"{how}{more}{held}"
    if cause == Cause.STOPPED:
        by = end.how or "'clusterddp stop'"
        return STOPPED, f"by {by}{at}"
    says_how = why in (how, requeue_is_off(how))
    text = f"{why}{at}" if says_how else f"{how}{at}; {why}"
    if cause in _SLURMS_CAUSES and not end.saved:
        return FAILED, f"{text}; it ended without saving"
    return STOPPED, text


def _judge_requeued(submission: Submission, job: JobState, now: float) -> tuple[RunState, str]:
    """Judge a job that was requeued, or that replaces an earlier job."""
    verb = "resumes" if submission.resumes else "starts again"
    cause, end = submission.requeue_reason, submission.end
    if cause == Cause.SIGNAL and end and end.how == OWN_CLOCK:
        cause = Cause.TIME_LIMIT
    again = f"{verb} after {_AFTER.get(cause, cause)}"
    if job.problem:
        return UNKNOWN, f"{again}; Slurm cannot be queried: {job.problem}"
    if job.state is State.UNKNOWN:
        return UNKNOWN, f"requeued, but Slurm no longer knows job {submission.job_id}"
    if job.state is State.CANCELLED:
        return CANCELLED, "by scancel, before it started again"
    if job.state is State.RUNNING:
        return RUNNING, "starting"
    since = submission.requeue_time or 0.0
    # Slurm shows the end of a later start than the recorded one, unless it may requeue it again.
    has_restarted = (job.restarts or 0) > submission.restart and job.state not in _REQUEUED_FOR
    if job.state.is_final and (has_restarted or now - since > SETTLE_SECONDS):
        what = _WHY_FAILED.get(job.state, f"Slurm reports {job.state.value}")
        where = f"see slurm-{submission.job_id}.out in the directory of the submission"
        return FAILED, f"requeued, but no start is recorded since: {what}; {where}"
    return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))


def _judge_undecided(
    submission: Submission, cause: str, end: str, job: JobState, alive: bool | None
) -> tuple[RunState, str]:
    """Judge a job with a recorded end that is to resume, but without a recorded requeue."""
    after = f"after {_AFTER.get(cause, cause)}"
    if submission.is_local and alive:
        return RUNNING, "its batch script is finishing"
    state = FAILED if cause == Cause.FAILED else STOPPED
    if submission.is_local:
        return state, f"{end}; a rehearsal is not requeued"
    again = f"{'resume' if submission.resumes else 'start again'} {after}"
    if job.problem:
        return UNKNOWN, f"about to {again}; Slurm cannot be queried: {job.problem}"
    if job.state is not State.UNKNOWN and not job.state.is_final:
        return RUNNING, f"about to {again}"
    return state, f"{end}; its batch script ended before it requeued the job"


def _judge_code(code: int | None, job: JobState) -> tuple[RunState, str]:
    """Judge from the exit code only, for a script that recorded no cause."""
    if job.state is State.CANCELLED:
        return CANCELLED, "by scancel"
    if job.state in _WHY_FAILED and job.state is not State.FAILED:
        return FAILED, _WHY_FAILED[job.state]
    if code is None:
        return FAILED, "the run recorded its end without an exit code"
    if code == EXIT_STOPPED:
        return STOPPED, "stopped on request"
    if code == EXIT_INTERRUPTED:
        return STOPPED, "interrupted (Ctrl-C, or q in a debugger)"
    if code == 143:
        return FAILED, "exit code 143: ended by SIGTERM (scancel, the time limit or preemption)"
    if code > 128:
        return FAILED, f"exit code {code}: {signal_name(code - 128)}"
    return FAILED, f"exit code {code}"


def _judge_local(submission: Submission, alive: bool | None) -> tuple[RunState, str]:
    if alive:
        if not submission.start.time:
            return QUEUED, "its processes are starting"
        return RUNNING, _asked(submission)
    if alive is None:
        where = f"on {submission.host}" if submission.host else "without a process id"
        return UNKNOWN, f"it was started {where} and cannot be checked from here"
    if submission.cancelled:
        return CANCELLED, ""
    gone = f"process {submission.pid} ended without a record"
    return FAILED, f"{gone}: killed, or the machine restarted"


def _judge_forgotten(
    submission: Submission, report: Report | None, job: JobState
) -> tuple[RunState, str]:
    finished = "; report.json exists, so the training finished" if report else ""
    if submission.cancelled and not submission.start.time:
        return CANCELLED, "before it started"  # whether Slurm answers or not
    if job.problem:
        return UNKNOWN, f"Slurm cannot be queried: {job.problem}{finished}"
    if submission.cancelled:
        return CANCELLED, ""
    lost = "Slurm no longer knows the job, and no "
    if submission.start.time:
        return UNKNOWN, f"{lost}end is recorded: killed, or its node was lost{finished}"
    return UNKNOWN, f"{lost}start is recorded: cancelled, or failed before its first line"


def _why_pending(job: JobState) -> str:
    if job.state is State.OTHER:
        return _other(job)
    if job.reason == BEGIN_TIME and job.start:
        return f"{BEGIN_TIME}: not before {moment(job.start)}"
    return _WHY_PENDING.get(job.reason, job.reason) if job.state is State.PENDING else ""


def _other(job: JobState) -> str:
    return f"Slurm reports {job.word}, a state that clusterddp does not know"


def _asked(submission: Submission) -> str:
    return "asked to save a checkpoint and exit" if submission.stop_requested else ""
