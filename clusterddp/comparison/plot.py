"""A comparison as a picture: images per second and speed-up over the number of devices."""

import importlib.util
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterddp.comparison.results import Result
from clusterddp.errors import RequestError

FORMATS = (".png", ".svg", ".pdf")
INSTALL = "pip install 'clusterddp[plots]'"
_TITLE_WIDTH = 130
"""Characters of a line above the picture."""
_COLOURS = {"single": "#444444", "dp": "#c8783c", "ddp": "#4878a8"}


def can_draw() -> bool:
    """Whether matplotlib is installed; it is not imported for the answer."""
    return importlib.util.find_spec("matplotlib") is not None


def check(path: Path) -> None:
    """Refuse a picture that could not be drawn once the runs are done, with a RequestError."""
    if not can_draw():
        raise RequestError(f"--plot needs matplotlib, which is not installed. Get it: {INSTALL}")
    if path.suffix not in FORMATS:
        raise RequestError(f"--plot: {str(path)!r} ends with none of {', '.join(FORMATS)}.")
    if not path.parent.is_dir() or path.is_dir():
        raise RequestError(f"--plot: {str(path)!r} cannot be written: give a file in a folder.")


def draw(lines: Sequence[Result], path: Path, title: str, subtitle: Sequence[str]) -> None:
    """Write the picture, whose format its name says. Raises OSError.

    title: what is compared; subtitle: on which hosts, which model and data, a line each.
    """
    from matplotlib.figure import Figure

    measured = [line for line in lines if line.images_per_second]
    base = next(line for line in measured if line.baseline)
    assert base.images_per_second, "a baseline is measured"
    counts = sorted({line.devices for line in measured})
    heading = [row for line in (title, *subtitle) for row in textwrap.wrap(line, _TITLE_WIDTH)]
    figure = Figure(figsize=(9, 3.6 + 0.17 * len(heading)), layout="constrained")
    above = figure.suptitle("\n".join(heading), x=0.01, ha="left", size=8.5)
    above.set_parse_math(False)  # names are no formulas, whatever dollar signs they have
    left, right = figure.subplots(1, 2)
    for axes, unit, name in (
        (left, 1.0, "images/s"),
        (right, base.images_per_second, f"speed-up against {base.label}"),
    ):
        for strategy, colour in _COLOURS.items():
            own = [line for line in measured if line.strategy == strategy]
            if own:
                axes.errorbar(
                    [line.devices for line in own], *_middle_and_spread(own, unit), label=strategy,
                    color=colour, marker="o", capsize=2,
                )  # fmt: skip
        one = base.images_per_second / unit / base.devices
        axes.plot(counts, [one * count for count in counts], "--", color="#999999", label="ideal")
        axes.set_xticks(counts)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("devices")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(path)


def _middle_and_spread(lines: Sequence[Result], unit: float) -> tuple[list[float], Any]:
    """The medians, and as far as their runs lie below and above them (2 x the number of lines)."""
    middle = [(line.images_per_second or 0.0) / unit for line in lines]
    each = [[value / unit for value in line.images_per_second_each] for line in lines]
    below = [value - min(values) for value, values in zip(middle, each, strict=True)]
    above = [max(values) - value for value, values in zip(middle, each, strict=True)]
    return middle, [below, above]
