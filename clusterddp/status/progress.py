"""Progress of a run: its steps of all, and the time that is left by its pace of late."""

from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.run.attempt import Attempt
from clusterddp.run.records import AttemptRecord, MetricsLine

_LINES_OF_LATE = 20
"""Lines of metrics of the attempt by which its pace is measured, evaluations between them too."""


@dataclass(frozen=True)
class Progress:
    """Progress of an attempt; None where nothing is known."""

    step: int | None = None
    planned: int | None = None
    """Step at which the training will be done."""
    seconds_left: float | None = None
    """Seconds until then, at the pace of late."""

    @property
    def percent(self) -> float | None:
        """Return the share of its steps that is done, from 0 to 100."""
        if self.step is None or not self.planned:
            return None
        return round(min(100 * self.step / self.planned, 100.0), 1)


def progress(attempt: Attempt | None, lines: Sequence[MetricsLine]) -> Progress:
    """Return how far an attempt has come, by rank 0's sign of life and its lines of metrics.

    lines: the latest, in the order in which they were written; those of earlier attempts, which
    stand there too, have no part in the pace.
    """
    latest = max((line.step for line in lines), default=-1)
    if attempt is None:
        return Progress(latest if latest >= 0 else None)
    sign, record = attempt.read_sign_of_life(), attempt.read_record() or AttemptRecord()
    step = max(latest, sign.step or 0)
    if step <= 0 and latest < 0 and not sign.planned:
        return Progress()
    if not sign.planned or sign.planned < step:
        return Progress(step)
    pace = _pace(lines, record)
    spent, trained = sign.spent, (sign.step or 0) - (record.step or 0)
    if pace is None and spent and trained > 0:  # no two lines yet
        pace = spent.training / trained
    left = None if pace is None else round((sign.planned - step) * pace, 1)
    return Progress(step, sign.planned, left)


def _pace(lines: Sequence[MetricsLine], record: AttemptRecord) -> float | None:
    """Return the seconds that a step takes of late, all that lies between the steps included."""
    began = record.began or 0.0
    own = [line for line in lines if line.step >= 0 and (line.time or 0.0) >= began]
    if len(own) < 2:
        return None
    first, last = own[-_LINES_OF_LATE:][0], own[-1]
    steps, seconds = last.step - first.step, (last.time or 0.0) - (first.time or 0.0)
    return seconds / steps if steps > 0 and seconds > 0 else None
