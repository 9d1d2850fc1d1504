"""The figures of a run, as far as its records can be read.

Points of the training curve, each rank's speed and the stragglers among them, what the last
evaluation confused, and the starts of the run.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from clusterddp.run import fields
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.files import read_json, read_json_lines
from clusterddp.run.history import Chapter, chapters
from clusterddp.run.outcome import first_failure, read_outcomes
from clusterddp.run.run_dir import RunDir


@dataclass(frozen=True)
class Point:
    """One line of metrics."""

    step: int
    tested: bool
    """Whether it is of an evaluation on the test set, not of training."""
    epoch: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    images_per_second: float | None = None
    """Of all ranks together."""
    seconds: float | None = None
    """Of training until then, over all attempts."""
    ranks: tuple[float | None, ...] = ()
    """Images per second of each rank over the time in which it did not wait for others."""


def read_points(path: Path) -> list[Point]:
    """The points of a run in the order of their steps; none where the file cannot be read."""
    try:
        points = [_point(line) for line in read_json_lines(path)]
    except OSError:
        return []
    return sorted((point for point in points if point), key=lambda point: point.step)


def rank_rates(points: list[Point]) -> list[float | None]:
    """Each rank's median images/s over the training, as far as it was measured."""
    rows = [point.ranks for point in points if point.ranks and not point.tested]
    if not rows:
        return []
    rows = [row for row in rows if len(row) == len(rows[-1])]  # a start may have had other ranks
    columns = [[rate for rate in column if rate is not None] for column in zip(*rows, strict=True)]
    return [median(column) if column else None for column in columns]


def _point(line: dict[str, Any]) -> Point | None:
    step, kind = fields.whole(line, "step"), line.get("kind")
    if step is None or kind not in ("train", "eval"):
        return None
    return Point(
        step=step,
        tested=kind == "eval",
        epoch=fields.whole(line, "epoch"),
        loss=fields.loss(line, "loss"),
        accuracy=fields.number(line, "accuracy"),
        images_per_second=fields.number(line, "images_per_second"),
        seconds=fields.number(line, "seconds"),
        ranks=tuple(fields.numbers(line, "rank_images_per_second")),
    )


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


def read_evaluation(record: Mapping[str, Any]) -> Evaluation:
    """The record as far as it can be read."""
    worst = [_worst(one) for one in fields.objects(record, "worst")]
    return Evaluation(_matrix(record.get("confusion")), [one for one in worst if one])


def _matrix(value: object) -> list[list[int]]:
    if not isinstance(value, list):
        return []
    matrix = []
    for row in value:
        counts = [fields.as_whole(item) for item in row] if isinstance(row, list) else []
        known = [count for count in counts if count is not None]
        if len(known) != len(value):
            return []
        matrix.append(known)
    return matrix


def _worst(record: Mapping[str, Any]) -> Worst | None:
    index, label, predicted = (fields.whole(record, n) for n in ("index", "label", "predicted"))
    shape = [int(side) for side in fields.numbers(record, "shape") if side is not None]
    try:
        pixels = base64.b64decode(fields.text(record, "pixels"), validate=True)
    except (binascii.Error, ValueError):
        return None
    if index is None or label is None or predicted is None or len(shape) != 2:
        return None
    height, width = shape
    if not (0 < height <= _LARGEST_SIDE and 0 < width <= _LARGEST_SIDE):
        return None
    if len(pixels) != height * width:
        return None
    loss = fields.loss(record, "loss")
    return Worst(index, label, predicted, loss, height, width, pixels)


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


def read_starts(run: RunDir, report: Mapping[str, Any]) -> list[Start]:
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
