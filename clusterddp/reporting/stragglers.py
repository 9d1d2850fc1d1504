"""How fast each rank is by itself, and which of them keeps the others waiting."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

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
