"""How often something happens in a training: every so many epochs, steps or minutes."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """How often something happens: every `count` epochs, steps or minutes."""

    count: int
    unit: str
    """`epoch`, `step` or `minute`."""

    @classmethod
    def parse(cls, value: str) -> "Interval":
        """Return the interval that a valid text names, such as `2`, `500steps` or `10minutes`."""
        unit = value.lstrip("0123456789")
        return cls(int(value.removesuffix(unit)), unit.removesuffix("s") or "epoch")

    def due(self, unit: str, count: int) -> bool:
        """Whether it is time after so many epochs or steps of the run."""
        return unit == self.unit and count % self.count == 0

    @property
    def seconds(self) -> float:
        """The interval in seconds; infinite where it is none of time."""
        return self.count * 60.0 if self.unit == "minute" else math.inf
