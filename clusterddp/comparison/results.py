"""What came out of a comparison: the runs of each row, their medians, speed-up and efficiency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from clusterddp.comparison.rows import Row, label
from clusterddp.reporting.plots import Scaling, Size, efficiency
from clusterddp.request.train_config import STRATEGIES
from clusterddp.run import fields

DONE = "done"
NOT_RUN = "not run"
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Trial:
    """One run of a row, or that it was not run, and what became of it."""

    row: Row
    run: str = ""
    state: str = NOT_RUN
    """A word of `run_state`, NOT_RUN or INTERRUPTED."""
    why: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)
    """The content of the run's report.json."""


@dataclass(frozen=True)
class Result:
    """One line of the table, as --json prints it; values are medians over the runs that are done,
    None where nothing is known."""

    strategy: str
    ranks: int
    devices: int
    """Ranks of ddp, GPUs of dp's one process; 1 of single."""
    nodes: int
    state: str
    """done, when all of its runs are; else how the first that is not stands."""
    why: str
    runs: tuple[str, ...]
    train_seconds: float | None
    """Of the training steps alone."""
    total_seconds: float | None
    """From a task's start to its end."""
    images_per_second: float | None
    """Of all devices together."""
    images_per_second_each: tuple[float, ...]
    """That of every run."""
    accuracy: float | None
    """On the test set."""
    peak_memory_bytes: int | None
    """Largest of any rank: torch's on a GPU, the resident set on a CPU."""
    steps: int | None
    images_per_device: int
    """Images of a device in one optimizer step: its batch, or its share of a smaller dataset."""
    threads: int | None
    """Compute threads of each rank."""
    speed_up: float | None = None
    """Images per second over those of the baseline."""
    efficiency: float | None = None
    """The speed-up over what as many times the devices would give at best."""
    baseline: bool = False
    """Whether the others are measured against it."""

    @property
    def label(self) -> str:
        return label(self.strategy, self.devices)


def results(trials: Sequence[Trial]) -> list[Result]:
    """A line for the trials of each row: single first, then dp, then ddp.

    The baseline is single, or where it has no figures the row on the fewest devices.
    """
    by_row: dict[Row, list[Trial]] = {}
    for trial in trials:
        by_row.setdefault(trial.row, []).append(trial)
    order = sorted(by_row, key=lambda row: (-STRATEGIES.index(row.strategy), row.devices))
    lines = [_medians(row, by_row[row]) for row in order]
    measured = [line for line in lines if line.images_per_second]
    if not measured:
        return lines
    base = min(measured, key=lambda line: line.devices)  # of equals the first, which is single
    return [_against(base, line) for line in lines]


def scaling(lines: Sequence[Result], title: str) -> Scaling:
    """Return the runs of the lines with figures, for `reporting.plots` to draw."""
    measured = [line for line in lines if line.images_per_second]
    base = next(line for line in measured if line.baseline)
    of_one = (base.images_per_second or 0.0) / base.devices
    sizes = [
        Size(line.label, line.devices, rate, efficiency(rate, line.devices, of_one), line.strategy)
        for line in measured
        for rate in line.images_per_second_each
    ]
    return Scaling(title, sizes, unit="devices")


def _medians(row: Row, trials: Sequence[Trial]) -> Result:
    done = [trial for trial in trials if trial.state == DONE]
    short = next((trial for trial in trials if trial.state != DONE), None)
    why = short.why if short else ""
    if short and done:
        why = f"{len(trials) - len(done)} of {len(trials)}{': ' if why else ''}{why}"

    def values(name: str) -> list[float]:
        found = (fields.number(trial.report, name) for trial in done)
        return [value for value in found if value is not None]

    def middle(name: str) -> float | None:
        found = values(name)
        return median(found) if found else None

    def whole(name: str) -> int | None:
        found = middle(name)
        return None if found is None else round(found)

    return Result(
        strategy=row.strategy,
        ranks=row.ranks,
        devices=row.devices,
        nodes=row.nodes,
        state=short.state if short else DONE,
        why=why,
        runs=tuple(trial.run for trial in trials if trial.run),
        train_seconds=middle("train_seconds"),
        total_seconds=middle("total_seconds"),
        images_per_second=middle("images_per_second"),
        images_per_second_each=tuple(values("images_per_second")),
        accuracy=middle("accuracy"),
        peak_memory_bytes=whole("peak_memory_bytes"),
        steps=whole("steps"),
        images_per_device=row.images_of_a_device(whole("train_images")),
        threads=whole("threads"),
    )


def _against(base: Result, line: Result) -> Result:
    if not line.images_per_second or not base.images_per_second:
        return line
    of_one = base.images_per_second / base.devices
    return replace(
        line,
        speed_up=line.images_per_second / base.images_per_second,
        efficiency=efficiency(line.images_per_second, line.devices, of_one),
        baseline=line is base,
    )
