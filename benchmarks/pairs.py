"""Paired measurement: a baseline and the thing measured take turns, so that a machine which slows
down slows both, and their ratio holds where their times do not."""

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Sample = Callable[[], float]
"""Does the work once and returns the seconds that it took."""


@dataclass(frozen=True)
class Row:
    """One line of the table: something measured against its baseline."""

    name: str
    baseline: str
    baseline_seconds: tuple[float, ...]
    seconds: tuple[float, ...]
    """Of the n-th pair at index n, as in `baseline_seconds`."""
    images: int = 0
    """Processed in each sample; when set, the row speaks of images/s instead of milliseconds."""
    of_memory: bool = False
    """The samples are MiB, not seconds."""
    peak_mib: float | None = None
    """Peak resident memory of a process that does only this."""
    baseline_peak_mib: float | None = None

    @property
    def unit(self) -> str:
        """`images/s`, of which more is better, or `ms` or `MiB`, of which less is."""
        return "MiB" if self.of_memory else "images/s" if self.images else "ms"

    @property
    def ratios(self) -> list[float]:
        """Measured over baseline in `unit`, a pair each."""
        pairs = zip(self.baseline_seconds, self.seconds, strict=True)
        return [b / s if self.images else s / b for b, s in pairs]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def best_ratio(self) -> float:
        """The ratio of the fastest sample of each side, a pair or not: the least disturbed ones."""
        baseline, measured = min(self.baseline_seconds), min(self.seconds)
        return baseline / measured if self.images else measured / baseline

    @property
    def figure(self) -> float:
        """The median of what was measured, in `unit`."""
        return self._in_unit(statistics.median(self.seconds))

    @property
    def baseline_figure(self) -> float:
        """The median of the baseline, in `unit`."""
        return self._in_unit(statistics.median(self.baseline_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Everything, every sample included, for scripts."""
        return {
            **vars(self),
            "unit": self.unit,
            "ratio": self.ratio,
            "least_ratio": min(self.ratios),
            "greatest_ratio": max(self.ratios),
            "best_ratio": self.best_ratio,
        }

    def _in_unit(self, seconds: float) -> float:
        if self.of_memory:
            return seconds
        return self.images / seconds if self.images else 1000 * seconds


NOTES: list[str] = []
"""What is to be told below the table: what was not measured and why, and what is no ratio."""


def note(line: str) -> None:
    """Add a line to NOTES."""
    NOTES.append(line)


def alternate(
    baseline: Sample, measured: Sample, pairs: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of the baseline and of the thing measured, in turn (A B A B) after one pair unseen.

    The first pair fills caches: the kernel's, Python's bytecode, torch's choice of algorithms.
    """
    baseline(), measured()
    seen = [(baseline(), measured()) for _ in range(pairs)]
    return tuple(a for a, _ in seen), tuple(b for _, b in seen)


def timed(work: Callable[[], object]) -> Sample:
    """The work as a sample, timed from outside."""

    def sample() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return sample


def processor_timed(work: Callable[[], object]) -> Sample:
    """The work as a sample of the processor seconds that its child processes take."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def sample() -> float:
        before = spent()
        work()
        return spent() - before

    return sample
