"""Reads the figures of a run from its records, as far as these can be read.

They are the points of the training curve, each rank's speed and the stragglers, the mistakes of the
last evaluation, and the starts of the run.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from clusterddp.run.attempt import Attempt, attempts, summaries
from clusterddp.run.files import read_lines
from clusterddp.run.outcome import first_failure, read_outcomes
from clusterddp.run.records import (
    AttemptSummary,
    EvaluationRecord,
    MetricsLine,
    RankReport,
    Report,
    WorstImage,
)
from clusterddp.run.run_dir import RunDir

SLOW = 0.8
"""Share of the other ranks' median speed below which a rank is a straggler."""
_LARGEST_SIDE = 512


def read_points(path: Path) -> list[MetricsLine]:
    """Read the lines of metrics in the order of their steps; none where the file cannot be read."""
    try:
        lines = list(read_lines(MetricsLine, path))
    except OSError:
        return []
    known = [line for line in lines if line.step >= 0 and line.kind in ("train", "eval")]
    return sorted(known, key=lambda line: line.step)


def rank_rates(points: list[MetricsLine]) -> list[float | None]:
    """Return each rank's median images/s over the training, as far as it was measured."""
    rates = [point.rank_images_per_second for point in points if not point.tested]
    rows = [row for row in rates if row]
    if not rows:
        return []
    rows = [row for row in rows if len(row) == len(rows[-1])]  # attempts may differ in world size
    columns = [[rate for rate in column if rate is not None] for column in zip(*rows, strict=True)]
    return [median(column) if column else None for column in columns]


@dataclass(frozen=True)
class Straggler:
    """A rank that is clearly slower than the others."""

    rank: int
    host: str
    images_per_second: float
    median_of_others: float

    @property
    def part(self) -> float:
        """Share of the other ranks' median."""
        return self.images_per_second / self.median_of_others

    def describe(self) -> str:
        """`rank 3 on h02: 812 images/s, 61% of the other ranks' median, 1,330`."""
        host = f" on {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{host}: {self.images_per_second:,.0f} images/s, {self.part:.0%} of "
            f"the other ranks' median, {self.median_of_others:,.0f}"
        )


def stragglers(ranks: Sequence[RankReport]) -> list[Straggler]:
    """List the ranks whose images/s are below SLOW of the others' median, the slowest first."""
    known = sorted(
        (rank.images_per_second, rank.rank, rank.host)
        for rank in ranks
        if rank.images_per_second is not None
    )
    rates = [rate for rate, _, _ in known]
    slow = []
    for index, (rate, number, host) in enumerate(known):
        others = rates[:index] + rates[index + 1 :]
        if not others or rate >= SLOW * (usual := median(others)):
            break  # the next one is no slower
        slow.append(Straggler(number, host, rate, usual))
    return slow


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
class Evaluation:
    """Content of evaluation.json, as far as it can be shown."""

    matrix: list[list[int]]
    """Counts: a row a label, a column a prediction; empty where the record has none."""
    worst: list[tuple[WorstImage, bytes]]
    """Images of the highest loss with their grey values, row by row."""

    def confusions(self) -> list[Confusion]:
        """List the mistakes, the most common first."""
        mistakes = [
            Confusion(label, predicted, count)
            for label, row in enumerate(self.matrix)
            for predicted, count in enumerate(row)
            if label != predicted and count > 0
        ]
        return sorted(mistakes, key=lambda each: (-each.count, each.label, each.predicted))


def read_evaluation(record: EvaluationRecord) -> Evaluation:
    """Take from the record what can be shown."""
    pictures = [(image, _grey_values(image)) for image in record.worst]
    return Evaluation(_matrix(record), [(image, grey) for image, grey in pictures if grey])


def _matrix(record: EvaluationRecord) -> list[list[int]]:
    known = [[count for count in row if count is not None] for row in record.confusion]
    return known if all(len(row) == len(known) for row in known) else []


def _grey_values(record: WorstImage) -> bytes | None:
    """Decode an image; None where its record is damaged."""
    try:
        pixels = base64.b64decode(record.pixels, validate=True)
        height, width = record.shape
    except ValueError:  # binascii.Error is one
        return None
    sound = 0 < height <= _LARGEST_SIDE and 0 < width <= _LARGEST_SIDE
    return pixels if sound and len(pixels) == height * width else None


@dataclass(frozen=True)
class Start(AttemptSummary):
    """One attempt of a run; values are None where its ranks never met."""

    why: str = ""
    """Details of the cause: the rank that failed first, the signal."""

    @property
    def ended(self) -> str:
        """`stopped: interrupt`."""
        return ": ".join(filter(None, (self.cause, self.why)))


def read_starts(run: RunDir, report: Report | None) -> list[Start]:
    """List the starts of a run, the latest last, from its report or else from its records."""
    summaries = (report.attempts if report else ()) or _from_records(run)
    starts = {each.attempt: Start(**vars(each)) for each in summaries}
    try:
        known = attempts(run)
    except OSError:
        known = []
    for attempt in known:
        start = starts.get(attempt.number) or Start(attempt.number)
        starts[attempt.number] = _explained(start, attempt)
    return [starts[number] for number in sorted(starts)]


def _from_records(run: RunDir) -> Sequence[AttemptSummary]:
    try:
        return summaries(run)
    except OSError:
        return ()


def _explained(start: Start, attempt: Attempt) -> Start:
    """Add the cause that the attempt itself recorded, where it explains more."""
    if start.cause not in ("", "killed", "failed", "stopped"):
        return start
    last_word = attempt.read_last_word()
    if last_word and last_word.cause not in ("", "failed"):
        return replace(start, cause=last_word.cause, why=last_word.reason)
    failure = first_failure(read_outcomes(attempt.outcomes))
    return replace(start, cause="failed", why=failure.describe()) if failure else start
