"""How a step scales with the ranks: measured on as many as the processors carry, and modelled.

The model is that of a ring all-reduce: of N ranks, each of 2 (N - 1) rounds costs a latency and
carries 1/N of the gradients (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009). Latency and bandwidth are those measured between two ranks here;
a cluster's own put its curve elsewhere, and the table says what they would have to be.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders.serving import Request
from benchmarks.hardware import NO_BF16, precisions
from benchmarks.pairs import Row, note
from benchmarks.step import _images
from benchmarks.turns import Contender, measured

_BATCH, _STEPS, _ROUNDS = 100, 100, 5
_SIZES = (4, 1 << 12, 1 << 16, 1 << 20, 1 << 23)
_PARAMETERS = 28_938
_WORLDS = (2, 4, 8, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Exchange:
    """What an all-reduce between neighbours costs."""

    latency: float
    """Seconds of a round that carries nothing."""
    bandwidth: float
    """Bytes per second."""

    @classmethod
    def fitted(cls, sizes: list[int], seconds: list[float]) -> "Exchange":
        """From all-reduces between two ranks: two rounds, each with half of the bytes.

        The latency is the least size's time; the bandwidth that which the largest adds to it.
        """
        latency = seconds[0] / 2
        added = max(seconds[-1] - seconds[0], 1e-9)
        return cls(latency, sizes[-1] / added)

    def seconds(self, size: int, ranks: int) -> float:
        """Of an all-reduce of `size` bytes over so many ranks."""
        rounds = 2 * (ranks - 1)
        return rounds * (self.latency + size / ranks / self.bandwidth)

    def efficiency(self, step: float, size: int, ranks: int) -> float:
        """Of the computing in a step of `step` seconds, were none of the exchange hidden."""
        return step / (step + self.seconds(size, ranks))


def measure() -> list[Row]:
    """Images/s of N ranks against N times those of one; the model goes to the notes."""
    cores = len(os.sched_getaffinity(0))
    worlds = [ranks for ranks in (1, 2, 4, 8) if ranks <= cores]
    note(f"scaling: measured on up to {worlds[-1]} ranks, because there are {cores} CPUs")
    if "bf16" not in precisions():
        note(f"scaling: {NO_BF16}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = _images(folder)
        rows: list[Row] = []
        for precision in precisions():
            trainings = [
                Contender(
                    f"{ranks}", "ours", Request(root, precision, "cpu", _STEPS, _BATCH), ranks
                )
                for ranks in worlds
            ]
            with measured(trainings, _ROUNDS, folder / "log"):
                one = trainings[0]
                for many in trainings[1:]:
                    rows.append(
                        Row(
                            f"training on {many.ranks} ranks, {precision}",
                            f"{many.ranks} times one rank",
                            tuple(one.seconds),
                            tuple(many.seconds),
                            images=many.images,
                        )
                    )
                _tell_model(precision, statistics.median(one.seconds) / _STEPS, _exchange(folder))
        return rows


def _exchange(folder: Path) -> Exchange:
    """Measured between two ranks of this machine."""
    asked = [
        Contender(f"{size}", "exchange", Request("", "fp32", "cpu", 0, size), 2) for size in _SIZES
    ]
    with measured(asked, 3, folder / "exchange.log"):
        return Exchange.fitted(list(_SIZES), [statistics.median(each.seconds) for each in asked])


def _tell_model(precision: str, step: float, exchange: Exchange) -> None:
    size = 4 * _PARAMETERS
    shown = ", ".join(f"{ranks}: {exchange.efficiency(step, size, ranks):.0%}" for ranks in _WORLDS)
    note(
        f"scaling, {precision}: a step of {1e3 * step:.1f} ms, an all-reduce round of "
        f"{1e6 * exchange.latency:.0f} us and {exchange.bandwidth / 1e9:.2f} GB/s by gloo between "
        f"two processes here; a ring would keep {shown} of the efficiency; half is lost at "
        f"{bend(step, size, exchange):,} ranks"
    )


def bend(step: float, size: int, exchange: Exchange) -> int:
    """The least number of ranks at which half of a step is exchange."""
    ranks = 2
    while exchange.efficiency(step, size, ranks) > 0.5 and ranks < 1 << 20:
        ranks += max(ranks // 20, 1)
    return ranks
