"""State of a run, and why: from its own events first, from what Slurm says of its job second.

`judge` is pure, so that it works without accounting and after Slurm has forgotten the job. The
events are taken together to the run's latest submission.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp.errors import EXIT_INTERRUPTED, EXIT_PAUSED
from clusterddp.run import restart_policy
from clusterddp.run.events import (
    CancelAsked,
    CancelFailed,
    Ended,
    Event,
    Failure,
    Requeued,
    RequeueFailed,
    Started,
    StopAsked,
    StopFailed,
    Submitted,
)
from clusterddp.run.records import Report
from clusterddp.slurm.states import JobState, State

CREATED = "created"
"""Run directory without a submission."""
QUEUED = "queued"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
STOPPED = "stopped"
"""Resumable from its last checkpoint, but not by itself."""
UNKNOWN = "unknown"
"""Job without a recorded end, of which Slurm cannot say or no longer knows."""

STATES = (CREATED, QUEUED, RUNNING, DONE, FAILED, CANCELLED, STOPPED, UNKNOWN)
ENDED = frozenset({DONE, FAILED, CANCELLED, STOPPED})

SETTLE_SECONDS = 60.0
"""Time for which a job that was put back into the queue may still show how it ended."""

_HELD = "job requeued in held state"
"""Slurm's reason of a job with --requeue=expedite that failed on healthy nodes (seen on 26.05)."""

# Why a run goes on: a word of `restart_policy`, in a sentence.
_AFTER = {
    restart_policy.TIME_LIMIT: "the time limit",
    restart_policy.SIGNAL: "a signal",
    restart_policy.PREEMPTED: "preemption",
    restart_policy.FAILED: "a failure",
    restart_policy.REQUEUED: "a requeue by Slurm",
}
# Slurm ends an attempt for these, whether it has saved or not.
_SLURMS_CAUSES = (restart_policy.TIME_LIMIT, restart_policy.PREEMPTED, restart_policy.NODE_LOST)
_WHY_FAILED = {
    State.FAILED: "the job failed",
    State.TIMEOUT: "the job reached its time limit",
    State.PREEMPTED: "the job was preempted and is not queued again",
    State.NODE_FAIL: "a node of the job failed",
    State.OUT_OF_MEMORY: "the job ran out of memory",
    State.DEADLINE: "the job's deadline passed",
    State.BOOT_FAIL: "a node of the job did not boot",
}
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
_SIGNALS = {9: "KILL", 15: "TERM", 11: "SEGV", 6: "ABRT", 2: "INT", 7: "BUS"}


# Words for a list of reasons; of an attempt that left no end, nobody knows more.
_REASONS = {restart_policy.REQUEUED: "requeued by Slurm", "": "node lost or killed"}


@dataclass(frozen=True)
class Submission:
    """Latest submission of a run."""

    job_id: str
    launcher: str
    array_element: str = ""
    """Name by which Slurm's commands take the job, 89_0, where it is an array's element."""
    pid: int | None = None
    """Process that controls a local run, on `host`."""
    host: str | None = None
    submitted: float | None = None
    """Times are seconds since the epoch."""
    first_started: float | None = None
    started: float | None = None
    """Time of the latest start: a requeued job starts several times."""
    restart: int = 0
    nodelist: str = ""
    ended: float | None = None
    exit_code: int | None = None
    first_failure: Failure | None = None
    cancelled: bool = False
    """True where `clusterddp cancel` asked for its end."""
    attempt: int | None = None
    """Number of the run's latest; None where the scripts number none."""
    restarts: int = 0
    """Starts after the first since a person last submitted the run."""
    reasons: tuple[str, ...] = ()
    """Reason for each of them, in a few words."""
    cause: str = ""
    """Cause of its end: a word of `restart_policy`; empty in the records of other scripts."""
    how: str = ""
    """Event that ended it, where the word of the cause would say another thing."""
    why: str = ""
    """Reason for which it does not go on after that."""
    saved: bool = True
    """True where its latest attempt has left something to resume from."""
    step: int | None = None
    """Step at which the ranks left."""
    trouble: str = ""
    """Reason for which a checkpoint or a record could not be written at its end."""
    goes_on: str = ""
    """Reason for which it was put back into the queue, until it has started again."""
    goes_on_since: float | None = None
    requeue_error: str = ""
    """Reason for which it could not be put back."""
    stop_asked: bool = False
    """True where `clusterddp stop` asked the latest attempt to save and leave."""

    @property
    def is_local(self) -> bool:
        return self.launcher == "local"


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
    if persons is not None:
        submission = replace(submission, submitted=persons)
    causes = restart_policy.causes_of(history)
    if not causes:
        return replace(submission, restarts=submission.restart)
    return replace(
        submission,
        attempt=max(causes),
        restarts=len(causes) - 1,
        reasons=tuple(reason(cause) for cause in list(causes.values())[:-1]),
    )


def jobs_to_ask(submissions: Sequence[Submission | None]) -> list[str]:
    """List the job ids of which Slurm has something to say that the run's own records do not.

    An end with exit code 0 is final. Another may be followed by a requeue, or be a cancellation
    that somebody else asked for.
    """
    return [
        each.job_id
        for each in submissions
        if each and not each.is_local and not (each.ended is not None and _settled(each))
    ]


def reason(cause: str) -> str:
    """Say why an attempt followed another one, in a few words, from how that one ended."""
    return _REASONS.get(cause, cause)


# The fields that tell of an end, which the next start makes void.
_OF_THE_END = (
    *("ended", "exit_code", "first_failure", "cause", "how", "why", "saved", "step", "trouble"),
    *("goes_on", "goes_on_since", "requeue_error", "stop_asked"),
)
_NO_END = {name: getattr(Submission, name) for name in _OF_THE_END}


def _after(before: Submission, event: Event) -> Submission:
    """Take in one of its events."""
    if isinstance(event, Submitted):
        after = replace(before, submitted=event.time, pid=event.pid, host=event.host)
        if not event.in_place_of or before.started is not None:
            return after
        return replace(after, goes_on=event.why or "?", goes_on_since=event.time)
    if isinstance(event, Started):
        return replace(
            before,
            first_started=before.first_started or event.time,
            started=event.time,
            restart=event.restart,
            nodelist=event.nodelist,
            attempt=event.attempt,
            array_element=event.array_element,
            **_NO_END,
        )
    if isinstance(event, StopAsked | StopFailed):
        return replace(before, stop_asked=isinstance(event, StopAsked))
    if isinstance(event, CancelAsked | CancelFailed):
        return replace(before, cancelled=isinstance(event, CancelAsked))
    if _is_late(event, before):
        return before
    if isinstance(event, Ended):
        after = replace(
            before,
            ended=event.time or 0.0,
            restart=event.restart,
            exit_code=event.exit_code,
            first_failure=event.first_failure,
            cause=event.cause,
            how=event.how,
            why=event.why,
            trouble=event.trouble,
            saved=event.saved,
            step=event.step,
        )
        if event.cause != restart_policy.REQUEUED:
            return after
        return replace(after, goes_on=restart_policy.REQUEUED, goes_on_since=event.time)
    if isinstance(event, Requeued):
        return replace(before, goes_on=event.why or "?", goes_on_since=event.time)
    if isinstance(event, RequeueFailed):
        return replace(before, requeue_error=event.error or "?")
    return before


def _is_late(event: Event, submission: Submission) -> bool:
    """Return whether it tells of an attempt before the latest one."""
    if event.attempt is not None and submission.attempt is not None:
        return event.attempt != submission.attempt
    return isinstance(event, Ended) and event.restart < submission.restart


def _settled(submission: Submission) -> bool:
    return submission.exit_code == 0 or submission.cancelled


def judge(
    submission: Submission | None,
    report: Report | None,
    job: JobState | None,
    alive: bool | None,
    now: float | None = None,
) -> tuple[str, str]:
    """Judge the state of a run and the reason for it, with the trouble its end had with the disk.

    See `_judge`.
    """
    state, detail = _judge(submission, report, job, alive, now)
    trouble = submission.trouble if submission and submission.ended is not None else ""
    return state, "; ".join(filter(None, (detail, trouble)))


def _judge(
    submission: Submission | None,
    report: Report | None,
    job: JobState | None,
    alive: bool | None,
    now: float | None = None,
) -> tuple[str, str]:
    """Judge the state of a run and the reason for it.

    report: None without one.
    job: what Slurm says; None when it was not asked.
    alive: whether the process of a local run is there; None when that cannot be seen from here.
    now: seconds since the epoch.
    """
    if submission is None and report:
        return DONE, "its ranks were started by hand"
    if submission is None:
        return CREATED, "nothing was submitted, as far as the run's records tell"
    if submission.ended is not None:
        return _judge_ended(submission, job, alive, now)
    if submission.goes_on and not submission.cancelled:
        return _judge_going_on(submission, job, now)
    if submission.is_local:
        return _judge_local(submission, alive)
    if job is None:
        job = JobState(State.UNKNOWN, problem="Slurm was not asked")
    if job.state is State.UNKNOWN:
        return _judge_forgotten(submission, report, job)
    if job.state is State.PENDING:
        again = "put back into the queue by Slurm" if submission.started else ""
        return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))
    if job.state is State.OTHER:
        state = RUNNING if submission.started else QUEUED
        return state, ", ".join(filter(None, (_other(job), _asked(submission))))
    if not job.state.is_final:
        shown = "" if job.state is State.RUNNING else job.state.value
        return RUNNING, ", ".join(filter(None, (shown, _asked(submission))))
    if job.state is State.DONE:
        return DONE, "Slurm says COMPLETED; the run itself recorded no end"
    if job.state is State.CANCELLED:
        return CANCELLED, "" if submission.started else "before it started"
    why = _WHY_FAILED[job.state]
    return FAILED, f"{why} ({job.reason})" if job.reason and job.state is State.FAILED else why


def _judge_ended(
    submission: Submission, job: JobState | None, alive: bool | None, now: float | None
) -> tuple[str, str]:
    cause = submission.cause
    if cause == restart_policy.DONE or (not cause and submission.exit_code == 0):
        return DONE, ""
    if submission.cancelled:
        return CANCELLED, "before it started again" if submission.goes_on else ""
    if submission.goes_on:
        return _judge_going_on(submission, job, now)
    held = ""
    if job and job.state is State.PENDING and job.reason == _HELD and submission.why:
        held = f"; Slurm holds job {submission.job_id}: 'scancel {submission.job_id}' drops it"
    elif job and job.state is State.PENDING:
        return QUEUED, ": ".join(filter(None, ("requeued", _why_pending(job))))
    if submission.requeue_error:
        error = f"it could not be started again: {submission.requeue_error}"
        return STOPPED, f"{_how(submission)}; {error}"
    if cause == restart_policy.CANCELLED:
        return CANCELLED, "by scancel"
    if cause and not submission.why:
        return _judge_undecided(submission, job, alive)
    if not cause:
        return _judge_code(submission.exit_code, job)
    if cause == restart_policy.FAILED:
        why = "" if submission.why == restart_policy.NO_RESTART else f"; {submission.why}"
        return FAILED, f"exit code {submission.exit_code}{why}{held}"
    if cause == restart_policy.STOPPED:
        return STOPPED, f"by 'clusterddp stop'{_at(submission)}"
    how = submission.how or cause
    says_how = submission.why in (how, restart_policy.requeue_is_off(how))
    text = f"{submission.why}{_at(submission)}"
    text = text if says_how else f"{_how(submission)}; {submission.why}"
    if cause in _SLURMS_CAUSES and not submission.saved:
        return FAILED, f"{text}; it ended without saving"
    return STOPPED, text


def _judge_going_on(
    submission: Submission, job: JobState | None, now: float | None
) -> tuple[str, str]:
    """Judge a job that was put back into the queue, or submitted in another one's place."""
    again = f"goes on after {_AFTER.get(submission.goes_on, submission.goes_on)}"
    if job is None or job.problem:
        problem = job.problem if job else "Slurm was not asked"
        return UNKNOWN, f"it {again}, and Slurm could not be asked: {problem}"
    if job.state is State.UNKNOWN:
        job_id = submission.job_id
        return UNKNOWN, f"it was put back into the queue, but Slurm no longer knows job {job_id}"
    if job.state is State.CANCELLED:
        return CANCELLED, "by scancel, before it started again"
    if job.state is State.RUNNING:
        return RUNNING, "it is starting"
    since = submission.goes_on_since or 0.0
    if job.state.is_final and (time.time() if now is None else now) - since > SETTLE_SECONDS:
        what = _WHY_FAILED.get(job.state, f"Slurm says {job.state.value}")
        return FAILED, f"it was put back into the queue, and recorded no start since: {what}"
    return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))


def _judge_undecided(
    submission: Submission, job: JobState | None, alive: bool | None
) -> tuple[str, str]:
    """Judge a job whose end is recorded, and that it is to go on, but not that it was put back."""
    after = f"after {_AFTER.get(submission.cause, submission.cause)}"
    if submission.is_local:
        if alive:
            return RUNNING, "its script is ending"
        return STOPPED, f"{_how(submission)}; a rehearsal is not put back into a queue"
    if job is None or job.problem:
        problem = job.problem if job else "Slurm was not asked"
        return UNKNOWN, f"it is to go on {after}, and Slurm could not be asked: {problem}"
    if job.state is not State.UNKNOWN and not job.state.is_final:
        return RUNNING, f"about to go on {after}"
    state = FAILED if submission.cause == restart_policy.FAILED else STOPPED
    return state, f"{_how(submission)}; its script ended before it had put the job back"


def _judge_code(code: int | None, job: JobState | None) -> tuple[str, str]:
    """Judge from the exit code alone, as of a script that came to no verdict of its own."""
    if job and job.state is State.CANCELLED:
        return CANCELLED, "by scancel"
    if job and job.state in _WHY_FAILED and job.state is not State.FAILED:
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
        name = _SIGNALS.get(code - 128)
        return FAILED, f"exit code {code}: {f'SIG{name}' if name else f'signal {code - 128}'}"
    return FAILED, f"exit code {code}"


def _judge_local(submission: Submission, alive: bool | None) -> tuple[str, str]:
    if alive:
        if not submission.started:
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
) -> tuple[str, str]:
    finished = "; its report.json is there, so the training itself finished" if report else ""
    if job.problem:
        return UNKNOWN, f"Slurm could not be asked: {job.problem}{finished}"
    if submission.cancelled:
        return CANCELLED, "" if submission.started else "before it started"
    lost = "Slurm no longer knows the job, and "
    if submission.started:
        return UNKNOWN, f"{lost}it recorded no end: killed, or its node was lost{finished}"
    return UNKNOWN, f"{lost}it never recorded a start: cancelled, or failed before its first line"


def _why_pending(job: JobState) -> str:
    if job.state is State.OTHER:
        return _other(job)
    return _WHY_PENDING.get(job.reason, job.reason) if job.state is State.PENDING else ""


def _other(job: JobState) -> str:
    return f"Slurm says {job.word}, a state that clusterddp does not know"


def _asked(submission: Submission) -> str:
    return "asked to save and leave" if submission.stop_asked else ""


def _how(submission: Submission) -> str:
    return f"{submission.how or submission.cause}{_at(submission)}"


def _at(submission: Submission) -> str:
    return "" if submission.step is None else f" at step {submission.step}"


def process_alive(submission: Submission) -> bool | None:
    """Return whether the process that controls a local run is there; None for another machine's."""
    return is_alive(submission.pid, submission.host, submission.submitted)


def is_alive(pid: int | None, host: str | None, since: float | None) -> bool | None:
    """Return whether a process of this machine is there; None for another machine's.

    since: when it was there for certain, in seconds of the epoch; one that started later has only
    inherited the number.
    """
    import socket

    if pid is None or host not in (None, socket.gethostname()):
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
        return _answers_signal(pid)  # no /proc: macOS
    except OSError:
        return False  # it ended while being read
    if fields[0] in "ZX":
        return False
    started = _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # The clock can have been set since; a number comes round again only after a long while.
    return since is None or started <= since + 60


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def _answers_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody's process, at least
    return True
