"""The latest submission of a run, as the run's own events tell of it.

Whether what they tell is still so is judged elsewhere (`run_state`), with Slurm's word beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.run import restart_policy
from clusterddp.run.outcome import Failure
from clusterddp.run.run_dir import first_number

# The same for a list of reasons; of a start that left no end, nobody knows more.
_REASONS = {restart_policy.REQUEUED: "requeued by Slurm", "": "node lost or killed"}


@dataclass(frozen=True)
class Submission:
    """What the events say of the latest submission of a run."""

    job_id: str
    launcher: str
    array_element: str = ""
    """Name by which Slurm's commands take the job, 89_0, where it is an array's element."""
    pid: int | None = None
    """Of a local run: the process that controls it, on `host`."""
    host: str | None = None
    submitted: float | None = None
    """Times are seconds since the epoch."""
    first_started: float | None = None
    started: float | None = None
    """Of the latest start: a requeued job starts several times."""
    restart: int = 0
    nodelist: str = ""
    ended: float | None = None
    exit_code: int | None = None
    first_failure: str = ""
    """`Failure.describe()` of the rank that failed first."""
    cancelled: bool = False
    """Whether `clusterddp cancel` asked for its end."""
    attempt: int | None = None
    """The run's latest; None where the scripts number none."""
    restarts: int = 0
    """Starts after the first since a person last submitted the run."""
    reasons: tuple[str, ...] = ()
    """Why each of them followed, in a few words."""
    cause: str = ""
    """How it ended: a word of `requeue`; empty in the records of other scripts."""
    how: str = ""
    """What took place, where the word of the cause would say another thing."""
    why: str = ""
    """Why it does not go on after that."""
    saved: bool = True
    """True where its latest attempt has left something to resume from."""
    step: int | None = None
    """At which the ranks left."""
    trouble: str = ""
    """Why a checkpoint or a record could not be written at its end."""
    goes_on: str = ""
    """The reason for which it was put back into the queue, until it has started again."""
    goes_on_since: float | None = None
    requeue_error: str = ""
    """Why it could not be put back."""
    stop_asked: bool = False
    """Whether `clusterddp stop` asked the latest attempt to save and leave."""

    @property
    def is_local(self) -> bool:
        return self.launcher == "local"


def latest_submission(events: Sequence[Mapping[str, Any]]) -> Submission | None:
    """The latest submission in a run's events, or None when nothing was submitted.

    Of a run that went on in another job it is that job, with the time at which a person submitted
    the first. A script that was given to sbatch by hand has `started` as its first record.
    """
    job_id = launcher = ""
    position = -1
    persons: float | None = None
    for index, event in enumerate(events):
        kind, seen = event.get("event"), str(event.get("job_id") or "")
        if kind == "submitted" and seen:
            job_id, launcher, position = seen, str(event.get("launcher") or "sbatch"), index
            if not event.get("in_place_of"):
                persons = first_number(event.get("time"))
        elif kind == "started" and seen and seen != job_id and launcher != "local":
            job_id, launcher, position, persons = seen, "sbatch", index, None
    if not job_id:
        return None
    # A job can start before the submitting side has written its own line, so its id decides; the
    # tasks of a local run may know it by another number, so there the order does.
    own = [
        event
        for index, event in enumerate(events)
        if str(event.get("job_id") or "") == job_id or (launcher == "local" and index > position)
    ]
    found: dict[str, Any] = {"job_id": job_id, "launcher": launcher}
    for event in own:
        _take(event, found)
    if persons is not None:
        found["submitted"] = persons
    causes = restart_policy.causes_of(events)
    if causes:
        found["attempt"] = max(causes)
        found["restarts"] = len(causes) - 1
        found["reasons"] = tuple(reason(cause) for cause in list(causes.values())[:-1])
    else:
        found["restarts"] = found.get("restart", 0)
    return Submission(**found)


def jobs_to_ask(submissions: Sequence[Submission | None]) -> list[str]:
    """The job ids of which Slurm has something to say that the run's own records do not.

    An end with exit code 0 is final. Another may be followed by a requeue, or be a cancellation
    that somebody else asked for.
    """
    return [
        one.job_id
        for one in submissions
        if one and not one.is_local and not (one.ended is not None and _settled(one))
    ]


def reason(cause: str) -> str:
    """Why a start followed another one, in a few words, from how that one ended."""
    return _REASONS.get(cause, cause)


# What an end says, which the next start makes void.
_OF_THE_END = (
    "ended", "exit_code", "first_failure", "cause", "how", "why", "saved", "step", "trouble",
    "goes_on", "goes_on_since", "requeue_error", "stop_asked",
)  # fmt: skip


def _take(event: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Add what one of its events says of a submission."""
    restart = first_number(event.get("restart"), as_type=int) or 0
    when = first_number(event.get("time"))
    kind = event.get("event")
    if kind == "submitted":
        found["submitted"] = when
        found["pid"] = first_number(event.get("pid"), as_type=int)
        found["host"] = event.get("host")
        if event.get("in_place_of") and "started" not in found:
            found.update(goes_on=str(event.get("why") or "?"), goes_on_since=when)
    elif kind == "started":
        found.setdefault("first_started", when)
        found.update(started=when, restart=restart, nodelist=str(event.get("nodelist") or ""))
        found["attempt"] = first_number(event.get("attempt"), as_type=int)
        found["array_element"] = str(event.get("array_element") or "")
        for name in _OF_THE_END:
            found.pop(name, None)
    elif kind in ("stop_asked", "stop_failed"):
        found["stop_asked"] = kind == "stop_asked"
    elif kind in ("cancelled", "cancel_failed"):
        found["cancelled"] = kind == "cancelled"
    elif _is_late(event, restart, found):
        return
    elif kind == "ended":
        found.update(ended=when or 0.0, restart=restart)
        found["exit_code"] = first_number(event.get("exit_code"), as_type=int)
        found["first_failure"] = _described(event.get("first_failure"))
        found["cause"] = str(event.get("cause") or "")
        found["how"] = str(event.get("how") or "")
        found["why"] = str(event.get("why") or "")
        found["trouble"] = str(event.get("trouble") or "")
        found["saved"] = event.get("saved") is not False
        found["step"] = first_number(event.get("step"), as_type=int)
        if found["cause"] == restart_policy.REQUEUED:
            found.update(goes_on=restart_policy.REQUEUED, goes_on_since=when)
    elif kind == "requeued":
        found.update(goes_on=str(event.get("why") or "?"), goes_on_since=when)
    elif kind == "requeue_failed":
        found["requeue_error"] = str(event.get("error") or "?")


def _is_late(event: Mapping[str, Any], restart: int, found: Mapping[str, Any]) -> bool:
    """Whether it is a word of an attempt before the latest one."""
    number = event.get("attempt")
    if isinstance(number, int) and isinstance(found.get("attempt"), int):
        return bool(number != found["attempt"])
    return event.get("event") == "ended" and restart < found.get("restart", 0)


def _described(failure: object) -> str:
    """The failure that `clusterddp finish` recorded, as a line; empty for another form."""
    try:
        return Failure(**failure).describe() if isinstance(failure, dict) else ""
    except TypeError:
        return ""  # a record of another version


def _settled(submission: Submission) -> bool:
    return submission.exit_code == 0 or submission.cancelled
