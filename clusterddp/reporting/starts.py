"""The starts of a run, each with why it ended: for a person who asks what it has been through."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from clusterddp.run import fields
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.files import read_json
from clusterddp.run.history import Chapter, chapters
from clusterddp.run.outcome import first_failure, read_outcomes
from clusterddp.run.run_dir import RunDir


@dataclass(frozen=True)
class Start:
    """One attempt of a run; None where its ranks never met."""

    attempt: int
    job_id: str = ""
    hosts: list[str] = field(default_factory=list)
    began: float | None = None
    """When its ranks had met, seconds since the epoch."""
    first_step: int | None = None
    """The step of the checkpoint from which it started."""
    last_step: int | None = None
    cause: str = ""
    """Why it ended, a word of `requeue`; `killed` where nobody recorded it; empty of the latest."""
    why: str = ""
    """More of it: the rank that failed first, the signal."""
    steps_done_twice: int = 0
    seconds_lost: float = 0.0
    """From the saving of what the next attempt went on from until that one's ranks had met."""

    @property
    def ended(self) -> str:
        """`stopped: interrupt`."""
        return ": ".join(filter(None, (self.cause, self.why)))


def read(run: RunDir, report: Mapping[str, Any]) -> list[Start]:
    """The starts of a run, the latest last, as its report tells them or else its records."""
    told = {one.attempt: one for one in _from_report(report) or _from_records(run)}
    try:
        made = attempts(run)
    except OSError:
        made = []
    for one in made:
        told[one.number] = _explained(told.get(one.number) or Start(one.number), one)
    return [told[number] for number in sorted(told)]


def _from_report(report: Mapping[str, Any]) -> list[Start]:
    return [
        Start(
            attempt=number,
            job_id=fields.text(one, "job_id"),
            hosts=fields.texts(one, "hosts"),
            began=fields.number(one, "began"),
            first_step=fields.whole(one, "first_step"),
            last_step=fields.whole(one, "last_step"),
            cause=fields.text(one, "cause"),
            steps_done_twice=fields.whole(one, "steps_done_twice") or 0,
            seconds_lost=fields.number(one, "seconds_lost") or 0.0,
        )
        for one in fields.objects(report, "attempts")
        if (number := fields.whole(one, "attempt")) is not None
    ]


def _from_records(run: RunDir) -> list[Start]:
    try:
        found = chapters(run)
    except (OSError, ValueError, TypeError, OverflowError):  # records that somebody has damaged
        return []
    return [_from_chapter(one) for one in found]


def _from_chapter(one: Chapter) -> Start:
    return Start(
        one.attempt, one.job_id, one.hosts, one.began, one.first_step, one.last_step, one.cause,
        "", one.steps_done_twice, one.seconds_lost,
    )  # fmt: skip


def _explained(start: Start, attempt: Attempt) -> Start:
    """With what the ranks themselves left of their end, where more can be known of it."""
    if start.cause not in ("", "killed", "failed", "stopped"):
        return start
    left = read_json(attempt.end) or {}
    cause = fields.text(left, "cause")
    if cause and cause != "failed":
        return replace(start, cause=cause, why=fields.text(left, "reason"))
    failure = first_failure(read_outcomes(attempt.outcomes))
    if failure is None:
        return start
    return replace(start, cause="failed", why=failure.describe())
