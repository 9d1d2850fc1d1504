"""The pictures of the page, as SVG that takes the page's colours of light and dark.

They carry no names of runs or hosts: what a line is stands beside the picture, as text.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeGuard

from clusterddp.reporting.scaling import Scaling

# On white and on near-black alike, and told apart by those who see red and green as one.
PALETTE = (
    "#3b7dd8", "#e07b28", "#2e9e6b", "#a563c9", "#b3a125", "#1fa8b8", "#d672b0", "#a0714f",
    "#6f7fa8", "#7a9a3a",
)  # fmt: skip
ALARM = "#d1344b"
"""Of what stands out."""
MUTED = "#8a94a6"

# Stands for the colour of the page's text, which is black or white by the reader's choice.
_TEXT = "#010203"
_MOST_STEPS_MARKED = 100
# What HTML knows or the page's own style says: namespaces, the groups' ids, fonts.
_NEEDLESS = (
    r' xmlns(:xlink)?="[^"]*"', r' version="[^"]*"', r"<defs>\s*<style.*?</style>\s*</defs>",
    r'(?<=<g) id="[^"]*"', r" font-family: [^;]*;",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of a picture; None breaks it."""

    steps: Sequence[int]
    values: Sequence[float | None]
    colour: str
    strong: bool = False
    """Thicker, with a mark at each point."""
    faint: bool = False


@dataclass(frozen=True)
class Picture:
    """What is drawn over the steps of runs."""

    label: str
    """Of the values."""
    lines: list[Line]
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Steps at which a run was started again, each with the colour of its run."""
    band: tuple[Sequence[int], Sequence[float], Sequence[float]] | None = None
    """Steps, lowest and highest values."""
    logarithmic: bool = False
    from_zero: bool = False
    percent: bool = False


def over_steps(picture: Picture) -> str:
    """The picture as an SVG element. Raises ImportError without matplotlib, as all here do."""
    figure = _figure(5.6, 3.2)
    axes = figure.subplots()
    for line in picture.lines:
        axes.plot(
            line.steps,
            [value if _drawable(value) else float("nan") for value in line.values],
            color=line.colour,
            linewidth=1.8 if line.strong else 1.1,
            alpha=0.45 if line.faint else 1.0,
            marker="o",
            markevery=marked(line),
            markersize=4,
        )
    if picture.band:
        steps, lowest, highest = picture.band
        if len(steps) == 1:  # an area needs two
            axes.vlines(steps, lowest, highest, color=PALETTE[0], alpha=0.2, linewidth=6)
        axes.fill_between(steps, lowest, highest, color=PALETTE[0], alpha=0.2, linewidth=0)
    for step, colour in picture.marks:
        axes.axvline(step, color=colour, linestyle=":", linewidth=1.2)
    values = [value for line in picture.lines for value in line.values if _drawable(value)]
    values += picture.band[2] if picture.band else []
    if picture.logarithmic and values and min(values) > 0:
        _logarithmic(axes)
    elif picture.from_zero:
        axes.set_ylim(bottom=0, top=max(values, default=1.0) * 1.08 or 1.0)
    axes.yaxis.set_major_formatter(_percent if picture.percent else _plain)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(_plain)
    axes.set_xlabel("step")
    axes.set_ylabel(picture.label)
    return _svg(figure)


def marked(line: Line) -> list[int]:
    """Points that get a mark: those of a strong line, and those that no stroke leads to."""
    drawn = [False, *map(_drawable, line.values), False]
    if line.strong and len(line.steps) <= _MOST_STEPS_MARKED:
        return [index for index in range(len(line.steps)) if drawn[index + 1]]
    around = zip(drawn, drawn[1:], drawn[2:], strict=False)
    return [index for index, shown in enumerate(around) if shown == (False, True, False)]


def of_scaling(scaling: Scaling) -> str:
    """Images/s and efficiency against ranks, each run a point, with the line of perfect scaling."""
    sizes = sorted({one.world_size for one in scaling.sizes})
    rates = {
        size: median(one.images_per_second for one in scaling.sizes if one.world_size == size)
        for size in sizes
    }
    parts = {
        size: median(one.efficiency for one in scaling.sizes if one.world_size == size)
        for size in sizes
    }
    figure = _figure(9.6, 3.4)
    left, right = figure.subplots(1, 2)
    every = [one.world_size for one in scaling.sizes]
    perfect = [rates[sizes[0]] * size / sizes[0] for size in sizes]
    left.plot(sizes, perfect, color=MUTED, linestyle="--", linewidth=1.1)
    left.plot(sizes, list(rates.values()), color=PALETTE[0], linewidth=1.6)
    left.plot(every, [one.images_per_second for one in scaling.sizes], "o", color=PALETTE[0])
    left.set_ylabel("images/s of all ranks")
    right.axhline(1.0, color=MUTED, linestyle="--", linewidth=1.1)
    right.plot(sizes, list(parts.values()), color=PALETTE[1], linewidth=1.6)
    right.plot(every, [one.efficiency for one in scaling.sizes], "o", color=PALETTE[1])
    right.set_ylabel("efficiency")
    for axes in (left, right):
        if sizes[-1] > 8 * sizes[0]:
            axes.set_xscale("log", base=2)
            if axes is left:
                _logarithmic(axes)
        axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(_percent if axes is right else _plain)
        axes.set_xlabel("ranks")
    right.set_ylim(bottom=0)
    if left.get_yscale() != "log":
        left.set_ylim(bottom=0)
    return _svg(figure)


def png(height: int, width: int, pixels: bytes) -> bytes:
    """Grey values, row by row, as a PNG. Pillow comes with matplotlib."""
    from PIL import Image

    content = io.BytesIO()
    Image.frombytes("L", (width, height), pixels).save(content, "PNG")
    return content.getvalue()


def _drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())


def _plain(value: float, _position: int) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:g}"


def _percent(value: float, _position: int) -> str:
    return f"{100 * value:g}%"


def _svg(figure: Any) -> str:
    """The figure as an element of an HTML page."""
    import matplotlib as mpl

    for axes in figure.axes:
        axes.grid(alpha=0.15, color=_TEXT, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color=_TEXT, alpha=0.4)
        axes.tick_params(colors=_TEXT, labelsize=9, width=0.8)
        axes.xaxis.label.set_color(_TEXT)
        axes.yaxis.label.set_color(_TEXT)
    drawn = io.StringIO()
    # With a salt ids follow from what they name: two pictures that share one mean the same.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "clusterddp", "font.family": "sans-serif"}
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # each would name an address
    with mpl.rc_context(style):
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor")
    for needless in _NEEDLESS:
        svg = re.sub(needless, "", svg, flags=re.DOTALL)
    return svg.replace("<svg ", '<svg role="img" ', 1)
