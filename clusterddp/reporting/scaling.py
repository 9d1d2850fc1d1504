"""How runs that differ in their number of ranks alone compare: images/s and efficiency."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from clusterddp.reporting.gather import RunReport

# Settings that change neither what a step computes nor how fast it is.
_WITHOUT_EFFECT = {
    "recipe", "data_dir", "epochs", "max_steps", "seed", "resume", "save_every", "keep_last",
    "eval_every", "log_every", "profile", "tensorboard", "allow_changed", "rendezvous_timeout",
    "process_group_timeout", "watchdog", "lr", "lr_scaling", "warmup_steps",
}  # fmt: skip


@dataclass(frozen=True)
class Size:
    """One run of a comparison."""

    name: str
    world_size: int
    images_per_second: float
    efficiency: float
    """Images/s of a rank, against the median of those of the runs with the fewest ranks."""


@dataclass(frozen=True)
class Scaling:
    """Runs of one configuration at several world sizes, the smallest first."""

    title: str
    """`convnet on cpu, bf16`."""
    sizes: list[Size]


def scalings(reports: Sequence[RunReport]) -> list[Scaling]:
    """The comparisons that the runs allow: those that are done, of two world sizes or more."""
    groups: dict[object, list[RunReport]] = {}
    for one in reports:
        if one.complete and one.world_size and one.images_per_second:
            groups.setdefault(_same(one), []).append(one)
    return [
        _compared(group) for group in groups.values() if len({one.world_size for one in group}) > 1
    ]


def _same(report: RunReport) -> object:
    """What has to be equal; the strategy is not, as one rank needs none."""
    settings = {
        name: value
        for name, value in report.settings.items()
        if name not in _WITHOUT_EFFECT and name != "strategy"
    }
    threads = report.threads if report.device == "cpu" else None
    machine = (report.device, report.precision, threads)
    return report.model, report.dataset, machine, repr(sorted(settings.items()))


def _compared(group: Sequence[RunReport]) -> Scaling:
    def pace(one: RunReport) -> float:
        return (one.images_per_second or 0.0) / (one.world_size or 1)

    fewest = min(one.world_size or 1 for one in group)
    usual = median(pace(one) for one in group if one.world_size == fewest)
    sizes = [
        Size(one.name, one.world_size or 1, one.images_per_second or 0.0, pace(one) / usual)
        for one in group
    ]
    first = group[0]
    machine = ", ".join(filter(None, (first.device, first.precision)))
    title = f"{first.model} on {machine}" if machine else first.model
    return Scaling(title, sorted(sizes, key=lambda one: one.world_size))
