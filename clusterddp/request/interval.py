"""How often something happens in a training: every so many epochs, steps or minutes."""

import math
from dataclasses import dataclass

from clusterddp.errors import RequestError


@dataclass(frozen=True)
class Interval:
    """How often something happens: every `count` epochs, steps or minutes."""

    count: int
    unit: str
    """`epoch`, `step` or `minute`."""

    @classmethod
    def parse(cls, option: str, value: str, *, minutes: bool = False) -> "Interval":
        """`2`, `2epochs`, `500steps`, with `minutes` also `10minutes`.

        Raises RequestError for anything else.
        """
        digits = value[: len(value) - len(value.lstrip("0123456789"))]
        unit = value[len(digits) :].removesuffix("s") or "epoch"
        if not digits or int(digits) < 1 or value.endswith(f"{digits}s"):
            unit = ""
        if unit not in ("epoch", "step", *(["minute"] if minutes else [])):
            more = ", 500steps or 10minutes" if minutes else " or 500steps"
            raise RequestError(
                f"{option}: {value!r} is no interval; valid ones are 1epoch, 2epochs{more}."
            )
        return cls(int(digits), unit)

    def due(self, unit: str, count: int) -> bool:
        """Whether it is time after so many epochs or steps of the run."""
        return unit == self.unit and count % self.count == 0

    @property
    def seconds(self) -> float:
        """The interval in seconds; infinite where it is none of time."""
        return self.count * 60.0 if self.unit == "minute" else math.inf
