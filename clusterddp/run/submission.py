"""Latest submission of a run, as the run's own events tell of it.

Whether what they tell is still so is judged elsewhere (`run_state`), with Slurm's word beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

# The same for a list of reasons; of a start that left no end, nobody knows more.
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


def latest_submission(told: Sequence[Event]) -> Submission | None:
    """Find the latest submission in a run's events; None when nothing was submitted.

    Of a run that was resumed in another job it is that job, with the time at which a person
    submitted the first. A script that was given to sbatch by hand has `started` as its first event.
    """
    job_id = launcher = ""
    position = -1
    persons: float | None = None
    for index, event in enumerate(told):
        own = ("", job_id)
        if isinstance(event, Submitted) and event.job_id:
            job_id, launcher, position = event.job_id, event.launcher or "sbatch", index
            if not event.in_place_of:
                persons = event.time
        elif isinstance(event, Started) and launcher != "local" and event.job_id not in own:
            job_id, launcher, position, persons = event.job_id, "sbatch", index, None
    if not job_id:
        return None
    submission = Submission(job_id, launcher)
    for index, event in enumerate(told):
        # A job can start before the submitting side has written its own line, so its id decides;
        # the tasks of a local run may know it by another number, so there the order does.
        if event.job_id == job_id or (launcher == "local" and index > position):
            submission = _after(submission, event)
    if persons is not None:
        submission = replace(submission, submitted=persons)
    causes = restart_policy.causes_of(told)
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
        one.job_id
        for one in submissions
        if one and not one.is_local and not (one.ended is not None and _settled(one))
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
