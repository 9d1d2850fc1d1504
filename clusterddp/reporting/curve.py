"""The lines of a run's metrics.jsonl, as they can be read."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from clusterddp.run import fields
from clusterddp.run.files import read_json_lines


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


def read(path: Path) -> list[Point]:
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
