"""What the test set showed at the end: which classes are taken for which, and the worst images."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.run import fields

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


def read(record: Mapping[str, Any]) -> Evaluation:
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
