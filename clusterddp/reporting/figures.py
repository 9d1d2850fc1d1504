"""The figures of a run, as far as its records can be read.

Points of the training curve, each rank's speed and the stragglers among them, what the last
evaluation confused, and the starts of the run.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from clusterddp.run import history
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.files import read_lines
from clusterddp.run.outcome import first_failure, read_outcomes
from clusterddp.run.records import AttemptSummary, EvaluationRecord, MetricsLine, Report, WorstImage
from clusterddp.run.run_dir import RunDir


def read_points(path: Path) -> list[MetricsLine]:
    """Read the lines of metrics in the order of their steps; none where the file cannot be read."""
    try:
        lines = list(read_lines(MetricsLine, path))
    except OSError:
        return []
    known = [line for line in lines if line.step >= 0 and line.kind in ("train", "eval")]
    return sorted(known, key=lambda line: line.step)


def rank_rates(points: list[MetricsLine]) -> list[float | None]:
    """Each rank's median images/s over the training, as far as it was measured."""
    rates = [point.rank_images_per_second for point in points if not point.tested]
    rows = [row for row in rates if row]
    if not rows:
        return []
    rows = [row for row in rows if len(row) == len(rows[-1])]  # a start may have had other ranks
    columns = [[rate for rate in column if rate is not None] for column in zip(*rows, strict=True)]
    return [median(column) if column else None for column in columns]


SLOW = 0.8
"""A rank below this part of what the others reach is a straggler."""


@dataclass(frozen=True)
class Rank:
    """One rank of a run, as far as it is known."""

    rank: int
    host: str = ""
    images_per_second: float | None = None
    """Over the time in which it did not wait for others."""
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Straggler:
    """A rank that is clearly slower than the others."""

    rank: int
    host: str
    images_per_second: float
    median_of_others: float

    @property
    def part(self) -> float:
        """Of what the others reach."""
        return self.images_per_second / self.median_of_others

    def describe(self) -> str:
        """`rank 3 on h02: 812 images/s, 61% of the other ranks' median, 1,330`."""
        host = f" on {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{host}: {self.images_per_second:,.0f} images/s, {self.part:.0%} of "
            f"the other ranks' median, {self.median_of_others:,.0f}"
        )


def stragglers(ranks: Sequence[Rank]) -> list[Straggler]:
    """The ranks whose images/s are below SLOW of the others' median, the slowest first."""
    known = sorted(
        (one.images_per_second, one.rank, one.host)
        for one in ranks
        if one.images_per_second is not None
    )
    rates = [rate for rate, _, _ in known]
    found = []
    for index, (rate, rank, host) in enumerate(known):
        others = rates[:index] + rates[index + 1 :]
        if not others or rate >= SLOW * (usual := median(others)):
            break  # the next one is no slower
        found.append(Straggler(rank, host, rate, usual))
    return found


_LARGEST_SIDE = 512


@dataclass(frozen=True)
class Confusion:
    """One kind of mistake and how often it was made."""

    label: int
    predicted: int
    count: int

    def describe(self) -> str:
        times = "once" if self.count == 1 else f"{self.count:,} times"
        return f"{self.label} taken for {self.predicted}: {times}"


@dataclass(frozen=True)
class Worst:
    """A test image of high loss."""

    index: int
    label: int
    predicted: int
    loss: float | None
    height: int
    width: int
    pixels: bytes
    """Grey values, row by row."""


@dataclass(frozen=True)
class Evaluation:
    """The content of evaluation.json."""

    matrix: list[list[int]]
    """Counts: a row a label, a column a prediction; empty where the record has none."""
    worst: list[Worst]

    def confusions(self) -> list[Confusion]:
        """The mistakes that were made, the most common first."""
        found = [
            Confusion(label, predicted, count)
            for label, row in enumerate(self.matrix)
            for predicted, count in enumerate(row)
            if label != predicted and count > 0
        ]
        return sorted(found, key=lambda one: (-one.count, one.label, one.predicted))


def read_evaluation(record: EvaluationRecord) -> Evaluation:
    """Take of the record what can be shown."""
    return Evaluation(_matrix(record), [one for each in record.worst if (one := _worst(each))])


def _matrix(record: EvaluationRecord) -> list[list[int]]:
    known = [[count for count in row if count is not None] for row in record.confusion]
    return known if all(len(row) == len(known) for row in known) else []


def _worst(record: WorstImage) -> Worst | None:
    try:
        pixels = base64.b64decode(record.pixels, validate=True)
    except (binascii.Error, ValueError):
        return None
    if len(record.shape) != 2:
        return None
    height, width = record.shape
    if not (0 < height <= _LARGEST_SIDE and 0 < width <= _LARGEST_SIDE):
        return None
    if len(pixels) != height * width:
        return None
    label, predicted = record.label, record.predicted
    return Worst(record.index, label, predicted, record.loss, height, width, pixels)


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


def read_starts(run: RunDir, report: Report | None) -> list[Start]:
    """The starts of a run, the latest last, as its report tells them or else its records."""
    summaries = (report.attempts if report else ()) or _from_records(run)
    told = {each.attempt: _start(each) for each in summaries}
    try:
        made = attempts(run)
    except OSError:
        made = []
    for one in made:
        told[one.number] = _explained(told.get(one.number) or Start(one.number), one)
    return [told[number] for number in sorted(told)]


def _from_records(run: RunDir) -> Sequence[AttemptSummary]:
    try:
        return history.summaries(run)
    except OSError:
        return ()


def _start(summary: AttemptSummary) -> Start:
    return Start(**{**vars(summary), "hosts": list(summary.hosts)})


def _explained(start: Start, attempt: Attempt) -> Start:
    """With what the ranks themselves left of their end, where more can be known of it."""
    if start.cause not in ("", "killed", "failed", "stopped"):
        return start
    last_word = attempt.read_last_word()
    if last_word and last_word.cause not in ("", "failed"):
        return replace(start, cause=last_word.cause, why=last_word.reason)
    failure = first_failure(read_outcomes(attempt.outcomes))
    if failure is None:
        return start
    return replace(start, cause="failed", why=failure.describe())
