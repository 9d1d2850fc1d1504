"""State of a run, and why: from its own events first, from what Slurm says of its job second.

`judge` is pure, so that it works without accounting and after Slurm has forgotten the job. The
events are taken together to the run's latest submission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from clusterddp.errors import EXIT_INTERRUPTED, EXIT_PAUSED
from clusterddp.formatting import moment, signal_name
from clusterddp.processes.table import process_alive
from clusterddp.run.events import (
    CancelAsked,
    CancelFailed,
    Cause,
    Ended,
    Event,
    Requeued,
    RequeueFailed,
    ResumedInJob,
    Started,
    StopAsked,
    StopFailed,
    Submitted,
)
from clusterddp.run.history import NO_RESTART, OWN_CLOCK, causes_by_attempt, requeue_is_off
from clusterddp.run.records import Report
from clusterddp.slurm.states import HELD, JobState, State


class RunState(str, Enum):
    """State of a run, in the word that is printed and recorded."""

    CREATED = "created"
    """Its directory is there, and nothing was submitted."""
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """Resumable from its last checkpoint, but not by itself."""
    UNKNOWN = "unknown"
    """Its job has recorded no end, and Slurm cannot say or no longer knows it."""

    __str__ = str.__str__


CREATED, QUEUED, RUNNING, DONE, FAILED, CANCELLED, STOPPED, UNKNOWN = RunState
ACTIVE = frozenset({QUEUED, RUNNING})
ENDED = frozenset({DONE, FAILED, CANCELLED, STOPPED})

SETTLE_SECONDS = 60.0
"""Time for which a job that was put back into the queue may still show how it ended."""

# Why a run is resumed: a word of `history`, in a sentence.
_AFTER: dict[str, str] = {
    Cause.TIME_LIMIT: "the time limit",
    Cause.SIGNAL: "a signal",
    Cause.PREEMPTED: "preemption",
    Cause.SUSPENDED: "a suspension",
    Cause.FAILED: "a failure",
    Cause.REQUEUED: "a requeue by Slurm",
}
# Slurm ends an attempt for these, whether it has saved or not.
_SLURMS_CAUSES = (Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.NODE_LOST)
_WHY_FAILED = {
    State.FAILED: "the job failed",
    State.TIMEOUT: "the job reached its time limit",
    State.PREEMPTED: "the job was preempted and is not queued again",
    State.NODE_FAIL: "a node of the job failed",
    State.OUT_OF_MEMORY: "the job ran out of memory",
    State.DEADLINE: "the job's deadline passed",
    State.BOOT_FAIL: "a node of the job did not boot",
}
_REQUEUED_FOR = (State.NODE_FAIL, State.PREEMPTED, State.BOOT_FAIL)
# Slurm's reasons for which a job as it was asked for cannot start: the others pass by waiting.
_WHY_PENDING = {
    "PartitionNodeLimit": "PartitionNodeLimit: it asks for more nodes than the partition has",
    "PartitionTimeLimit": "PartitionTimeLimit: it asks for more time than the partition gives",
    "PartitionConfig": "PartitionConfig: the partition cannot give what it asks for",
    "PartitionDown": "PartitionDown: the partition is down",
    "BadConstraints": "BadConstraints: no node has what it asks for",
    "DependencyNeverSatisfied": "DependencyNeverSatisfied: what it waits for has failed",
    "JobHeldUser": "JobHeldUser: held; 'scontrol release' lets it go",
    "JobHeldAdmin": "JobHeldAdmin: held by an administrator",
    "ReqNodeNotAvail": "ReqNodeNotAvail: a node it asks for is not available",
}
NEVER_STARTS = {
    *("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig", "BadConstraints"),
    "DependencyNeverSatisfied",
}
"""Reasons for which a job waits until somebody changes it, its dependency or the cluster."""
NOT_LAUNCHED = "JobLaunchFailure"
"""Reason of a job whose script has not run at all: what Slurm gives as its exit code is none."""
BEGIN_TIME = "BeginTime"
"""Reason of a job that may not start yet: what Slurm shows as its start is the earliest one."""
HELD_BACK = {"", "Dependency", BEGIN_TIME, HELD}
"""Reasons for which a job waits that is to wait for other runs; a requeued one has BeginTime."""
NO_START = {*NEVER_STARTS, "Dependency", "JobHeldUser", "JobHeldAdmin", HELD, BEGIN_TIME}
"""Reasons for which the start that Slurm shows is no estimate, or one that means nothing."""
_NOT_ASKED = JobState(State.UNKNOWN, problem="Slurm was not asked")

# Words for a list of reasons; of an attempt that left no end, nobody knows more.
_REASONS: dict[str, str] = {Cause.REQUEUED: "requeued by Slurm", "": "node lost or killed"}


@dataclass(frozen=True)
class Submission:
    """Latest submission of a run."""

    job_id: str
    launcher: str
    pid: int | None = None
    """Process that controls a local run, on `host`."""
    host: str | None = None
    submitted: float | None = None
    """Time at which a person submitted the run, in seconds since the epoch."""
    start: Started = field(default_factory=Started)
    """Latest start: a requeued job starts several times."""
    end: Ended | None = None
    """End since then."""
    cancelled: bool = False
    """True where `clusterddp cancel` asked for its end, or Slurm was seen to have cancelled it."""
    attempt: int | None = None
    """Number of the run's latest; None where the scripts number none."""
    restarts: int = 0
    """Starts after the first since a person last submitted the run."""
    reasons: tuple[str, ...] = ()
    """Reason for each of them, in a few words."""
    put_back: str = ""
    """Reason for which it was put back into the queue, until it has started again."""
    put_back_time: float | None = None
    requeue_error: str = ""
    """Reason for which it could not be put back."""
    stop_asked: bool = False
    """True where `clusterddp stop` asked the latest attempt to save and leave."""
    stop_asked_time: float | None = None
    resumes: bool = True
    """False of a COMMAND without a Loop: nobody knows whether its next start begins anew."""

    @property
    def is_local(self) -> bool:
        return self.launcher == "local"

    @property
    def is_alive(self) -> bool | None:
        """True while the process that controls a local run is there; None for another machine's."""
        return process_alive(self.pid, self.host, self.submitted)

    @property
    def restart(self) -> int:
        """SLURM_RESTART_COUNT of the latest start."""
        return (self.end or self.start).restart


def latest_submission(history: Sequence[Event]) -> Submission | None:
    """Find the latest submission in a run's events; None when nothing was submitted.

    Of a run that was resumed in another job it is that job, with the time at which a person
    submitted the first. A script that was given to sbatch by hand has `started` as its first event.
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
        # A job can start before the submitting side has written its own line, so its id decides;
        # the tasks of a local run may know it by another number, so there the order does.
        if event.job_id == job_id or (launcher == "local" and index > position):
            submission = _after(submission, event)
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


def jobs_to_ask(submissions: Sequence[Submission | None]) -> list[str]:
    """List the job ids of which Slurm has something to say that the run's own records do not.

    An end with exit code 0 is final. Another may be followed by a requeue, or be a cancellation
    that somebody else asked for.
    """
    in_slurm = [each for each in submissions if each and not each.is_local]
    return [
        each.job_id
        for each in in_slurm
        if not (each.end and (each.end.exit_code == 0 or each.cancelled))
    ]


def reason(cause: str) -> str:
    """Say why an attempt followed another one, in a few words, from how that one ended."""
    return _REASONS.get(cause, cause)


def _after(before: Submission, event: Event) -> Submission:
    """Take in one of its events."""
    if isinstance(event, Submitted):
        after = replace(before, submitted=event.time, pid=event.pid, host=event.host)
        if event.in_place_of and before.start.time is None:
            after = replace(after, put_back=event.why or "?", put_back_time=event.time)
        return after
    if isinstance(event, Started):
        before = replace(before, start=event, end=None, stop_asked=False)
        return replace(before, put_back="", put_back_time=None, requeue_error="")
    if isinstance(event, StopAsked | StopFailed):
        return replace(before, stop_asked=isinstance(event, StopAsked), stop_asked_time=event.time)
    if isinstance(event, CancelAsked | CancelFailed):
        return replace(before, cancelled=isinstance(event, CancelAsked))
    if _is_late(event, before):
        return before
    if isinstance(event, Ended):
        after = replace(before, end=event)
        if event.cause == Cause.REQUEUED:
            after = replace(after, put_back=event.cause, put_back_time=event.time)
        return after
    if isinstance(event, ResumedInJob):
        return replace(before, end=None)  # the next attempt begins
    if isinstance(event, Requeued):
        return replace(before, put_back=event.why or "?", put_back_time=event.time)
    if isinstance(event, RequeueFailed):
        return replace(before, requeue_error=event.error or "?")
    return before


def _is_late(event: Event, submission: Submission) -> bool:
    """Return whether it tells of an attempt before the latest one."""
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
    """Judge the state of a run and the reason for it, with the trouble its end had with the disk.

    report: None without one.
    job: what Slurm says; None when it was not asked.
    alive: whether the process of a local run is there; None when that cannot be seen from here.
    now: seconds since the epoch.
    """
    if submission is None and report:
        return DONE, "its ranks were started by hand"
    if submission is None:
        return CREATED, "nothing was submitted, as far as the run's records tell"
    job = job or _NOT_ASKED
    if submission.end:
        state, detail = _judge_ended(submission, submission.end, job, alive, now)
        return state, "; ".join(filter(None, (detail, submission.end.write_error)))
    started = submission.start.time
    if submission.put_back and not submission.cancelled:
        return _judge_put_back(submission, job, now)
    if submission.is_local:
        return _judge_local(submission, alive)
    if job.state is State.UNKNOWN:
        return _judge_forgotten(submission, report, job)
    if job.state is State.PENDING:
        again = "put back into the queue by Slurm" if started else ""
        return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))
    if job.state is State.OTHER:
        state = RUNNING if started else QUEUED
        return state, ", ".join(filter(None, (_other(job), _asked(submission))))
    if not job.state.is_final:
        shown = "" if job.state is State.RUNNING else job.state.value
        return RUNNING, ", ".join(filter(None, (shown, _asked(submission))))
    if job.state is State.DONE:
        return DONE, "Slurm says COMPLETED; the run itself recorded no end"
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
        return CANCELLED, "before it started again" if submission.put_back else ""
    if submission.put_back:
        return _judge_put_back(submission, job, now)
    held = ""
    if job.state is State.PENDING and job.reason == HELD and why:
        held = f"; Slurm holds job {submission.job_id}: 'scancel {submission.job_id}' drops it"
    elif job.state is State.PENDING:
        return QUEUED, ": ".join(filter(None, ("requeued", _why_pending(job))))
    at = "" if end.step is None else f" at step {end.step}"
    how = end.how or (f"exit code {end.exit_code}" if cause == Cause.FAILED else cause)
    if submission.requeue_error:
        return STOPPED, f"{how}{at}; it could not be started again: {submission.requeue_error}"
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


def _judge_put_back(submission: Submission, job: JobState, now: float) -> tuple[RunState, str]:
    """Judge a job that was put back into the queue, or submitted in another one's place."""
    verb = "resumes" if submission.resumes else "starts again"
    cause, end = submission.put_back, submission.end
    if cause == Cause.SIGNAL and end and end.how == OWN_CLOCK:
        cause = Cause.TIME_LIMIT
    again = f"{verb} after {_AFTER.get(cause, cause)}"
    if job.problem:
        return UNKNOWN, f"it {again}, and Slurm could not be asked: {job.problem}"
    if job.state is State.UNKNOWN:
        job_id = submission.job_id
        return UNKNOWN, f"it was put back into the queue, but Slurm no longer knows job {job_id}"
    if job.state is State.CANCELLED:
        return CANCELLED, "by scancel, before it started again"
    if job.state is State.RUNNING:
        return RUNNING, "it is starting"
    since = submission.put_back_time or 0.0
    # The end of a later start than the one that it recorded. Slurm may requeue for some ends again.
    has_restarted = (job.restarts or 0) > submission.restart and job.state not in _REQUEUED_FOR
    if job.state.is_final and (has_restarted or now - since > SETTLE_SECONDS):
        what = _WHY_FAILED.get(job.state, f"Slurm says {job.state.value}")
        where = f"slurm-{submission.job_id}.out in the folder of the submission may say more"
        return (
            FAILED,
            f"it was put back into the queue, and recorded no start since: {what}; {where}",
        )
    return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))


def _judge_undecided(
    submission: Submission, cause: str, end: str, job: JobState, alive: bool | None
) -> tuple[RunState, str]:
    """Judge a job whose end is recorded, and that it is to resume, but not that it was put back."""
    after = f"after {_AFTER.get(cause, cause)}"
    if submission.is_local and alive:
        return RUNNING, "its script is ending"
    state = FAILED if cause == Cause.FAILED else STOPPED
    if submission.is_local:
        return state, f"{end}; a rehearsal is not put back into a queue"
    again = f"{'resume' if submission.resumes else 'start again'} {after}"
    if job.problem:
        return UNKNOWN, f"it is to {again}, and Slurm could not be asked: {job.problem}"
    if job.state is not State.UNKNOWN and not job.state.is_final:
        return RUNNING, f"about to {again}"
    return state, f"{end}; its script ended before it had put the job back"


def _judge_code(code: int | None, job: JobState) -> tuple[RunState, str]:
    """Judge from the exit code alone, as of a script that came to no verdict of its own."""
    if job.state is State.CANCELLED:
        return CANCELLED, "by scancel"
    if job.state in _WHY_FAILED and job.state is not State.FAILED:
        return FAILED, _WHY_FAILED[job.state]
    if code is None:
        return FAILED, "the run recorded its end without an exit code"
    if code == EXIT_PAUSED:
        return STOPPED, "it was asked to stop, and has left"
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
        return UNKNOWN, f"it was started {where}, which cannot be seen from here"
    if submission.cancelled:
        return CANCELLED, ""
    gone = f"its process {submission.pid} is gone and recorded no end"
    return FAILED, f"{gone}: it was killed, or the machine restarted"


def _judge_forgotten(
    submission: Submission, report: Report | None, job: JobState
) -> tuple[RunState, str]:
    finished = "; its report.json is there, so the training itself finished" if report else ""
    if submission.cancelled and not submission.start.time:
        return CANCELLED, "before it started"  # whether Slurm answers or not
    if job.problem:
        return UNKNOWN, f"Slurm could not be asked: {job.problem}{finished}"
    if submission.cancelled:
        return CANCELLED, ""
    lost = "Slurm no longer knows the job, and "
    if submission.start.time:
        return UNKNOWN, f"{lost}it recorded no end: killed, or its node was lost{finished}"
    return UNKNOWN, f"{lost}it never recorded a start: cancelled, or failed before its first line"


def _why_pending(job: JobState) -> str:
    if job.state is State.OTHER:
        return _other(job)
    if job.reason == BEGIN_TIME and job.start:
        return f"{BEGIN_TIME}: not before {moment(job.start)}"
    return _WHY_PENDING.get(job.reason, job.reason) if job.state is State.PENDING else ""


def _other(job: JobState) -> str:
    return f"Slurm says {job.word}, a state that clusterddp does not know"


def _asked(submission: Submission) -> str:
    return "asked to save and leave" if submission.stop_asked else ""
