"""Draws the records of runs with matplotlib: curves, each rank's throughput, scaling.

On the page, plots are SVG in the page's light or dark colours. They contain no names of runs or
hosts: the legend is text below the plot. The scaling of a comparison can be saved as a file.
"""

import colorsys
import io
import math
import os
import re
import struct
import textwrap
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from markupsafe import Markup

from clusterddp.errors import RequestError
from clusterddp.files import write_atomically
from clusterddp.reporting import sweep
from clusterddp.reporting.gather import Gathered, RunReport
from clusterddp.reporting.sweep import USUAL, Curve, SweepReport, curve, label
from clusterddp.run.records import MetricsLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = "#3b7dd8 #e07b28 #2e9e6b #a563c9 #b3a125 #1fa8b8 #d672b0 #a0714f #6f7fa8 #7a9a3a"
PALETTE = tuple(_COLOURS.split())
"""Visible on white and near-black, and distinct under red-green colour blindness."""
ALARM = "#d1344b"
"""Colour of stragglers."""
MUTED = "#8a94a6"
FORMATS = (".png", ".svg", ".pdf")

# Placeholder for the page's text colour, which depends on the reader's theme.
_TEXT = "#010203"
_MAX_STEPS_MARKED = 100
_MAX_LINES = 16  # ranks in one plot; more are drawn as a band
_MAX_POINTS = 1500  # per line: more enlarge the page without a visible difference
_MAX_TICKS = 8  # values with one tick each
_HEADING_WIDTH = 130  # characters per line above a plot
# Redundant in HTML or set by the page's style: namespaces, group ids, fonts.
_NEEDLESS = re.compile(
    r"""\ xmlns(:xlink)?="[^"]*"|\ version="[^"]*"|<defs>\s*<style.*?</style>\s*</defs>
    |(?<=<g)\ id="[^"]*"|\ font-family:\ [^;]*;""",
    re.DOTALL | re.VERBOSE,
)
# Options that change neither the result of a step nor its speed.
_WITHOUT_EFFECT = re.compile(
    "recipe|data_dir|epochs|max_steps|seed|init_from|save_every|keep_last|eval_every|log_every|profile"
    "|tensorboard|allow_config_change|rendezvous_timeout|process_group_timeout|hang_timeout|lr|lr_scaling"
    "|warmup_steps|strategy"
)


Scale = Literal["logarithmic", "percent", "from zero", "linear"]
"""Scale of a plot's values."""
Band = Sequence[tuple[int, float, float]]
"""(step, lowest value, highest value)."""
Lines = Sequence[Mapping[str, object]]
"""Lines of one run's metrics.jsonl."""


@dataclass(frozen=True)
class Line:
    """Line of a plot; a value of None interrupts it."""

    points: Sequence[tuple[int, float | None]]
    """(step, value)."""
    colour: str
    strong: bool = False
    """Thicker, with a marker at each point."""
    faint: bool = False
    band: Band = ()
    """Area around it."""


@dataclass(frozen=True)
class Drawing:
    """Plot with its title, legend and note."""

    title: str
    svg: Markup
    legend: list[tuple[str, str]]
    """(colour, meaning)."""
    note: str = ""


@dataclass(frozen=True)
class Size:
    """Run of a comparison."""

    name: str
    world_size: int
    images_per_second: float
    series: str = ""
    """Group with one colour: the strategy, if several are compared."""


@dataclass(frozen=True)
class Scaling:
    """Runs of one configuration at several world sizes, smallest first."""

    title: str
    """`convnet on cpu, bf16`."""
    sizes: list[Size]
    of_one: float
    """Images/s of the baseline per device."""
    unit: str = "ranks"

    def efficiency(self, size: Size) -> float:
        """Return images/s per device relative to the baseline's."""
        return size.images_per_second / size.world_size / self.of_one


def overall(gathered: Sequence[Gathered]) -> list[Drawing]:
    """Draw loss, accuracy and images/s over steps, each with all runs in one plot.

    Raises ImportError without matplotlib, like every function here that draws.
    """
    drawn = [
        _of_runs(gathered, "Loss", "loss", "logarithmic", lambda point: point.loss),
        _of_runs(gathered, "Accuracy", "accuracy", "percent", lambda point: point.accuracy),
        _of_runs(
            gathered,
            "Throughput",
            "images/s, all ranks",
            "from zero",
            lambda point: None if point.tested else point.images_per_second,
        ),
    ]
    return [drawing for drawing in drawn if drawing]


def rank_rates(gathered: Gathered) -> Drawing | None:
    """Draw images/s of each rank over steps; None for one rank, or if not measured."""
    points = [point for point in gathered.points if point.ranks]
    size = points[-1].ranks if points else 0
    if size < 2:
        return None
    points = _thinned([point for point in points if point.ranks == size])
    slow = [straggler.rank for straggler in gathered.report.stragglers if straggler.rank < size]
    hosts = {rank.rank: rank.host for rank in gathered.report.figures.ranks}

    def line(rank: int, colour: str, *, strong: bool = False, faint: bool = False) -> Line:
        rates = [(point.step, point.rates.get(rank)) for point in points]
        return Line(rates, colour, strong, faint)

    def named(rank: int) -> str:
        return f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"

    if size > _MAX_LINES:
        lines = [_middle(points)]
        legend = [(PALETTE[0], f"{size} ranks: median, with a band from slowest to fastest")]
        slow = slow or _slowest(gathered, size)
    elif slow:
        lines = [line(rank, MUTED) for rank in range(size) if rank not in slow]
        legend = [(MUTED, "other ranks")]
    else:
        shades = colours(size)
        lines = [line(rank, shades[rank]) for rank in range(size)]
        legend = [(shades[rank], named(rank)) for rank in range(size)]
    if slow:
        lines += [line(rank, ALARM, faint=True) for rank in slow[1:]]
        lines.append(line(slow[0], ALARM, strong=True))
        legend.append((ALARM, f"{named(slow[0])} (slowest)"))
    svg = _over_steps("images/s", "from zero", lines, _marks(gathered, MUTED))
    note = "Excludes the time that a rank waits for other ranks."
    return Drawing("Throughput per rank", svg, legend, note)


def scalings(reports: Sequence[RunReport]) -> list[Scaling]:
    """Group finished runs by configuration; return the groups with several world sizes."""
    groups: dict[object, list[RunReport]] = {}
    for report in reports:
        figures = report.figures
        if report.complete and figures.world_size and figures.images_per_second:
            groups.setdefault(_same(report), []).append(report)
    several = [
        group for group in groups.values() if len({each.figures.world_size for each in group}) > 1
    ]
    return [_compared(group) for group in several]


def of_scaling(scaling: Scaling) -> Markup:
    """Draw images/s and efficiency over ranks as an SVG element.

    Each run is a marker, a line connects the medians, and perfect scaling is dashed.
    """
    return _svg(_scaling_figure(scaling, 3.4))


def of_sweep(report: SweepReport, lines: Sequence[Sequence[Lines]]) -> list[Drawing]:
    """Draw the metric over each swept parameter, and metrics over steps for the best rows.

    lines: metrics of each run of the first rows; each row has a colour of PALETTE.
    """
    names = dict.fromkeys([report.by.removeprefix("train_"), *USUAL])
    drawn = [over_parameter(report, name) for name in report.names]
    drawn += [
        _curves(report, lines, kind, metric)
        for metric in names
        for kind in ("eval", "train")
        if metric
    ]
    return [drawing for drawing in drawn if drawing]


def over_parameter(report: SweepReport, name: str) -> Drawing | None:
    """Draw the metric over a swept parameter: one marker per run, a line through the means.

    The axis is logarithmic if the values differ by factors. Values that are not numeric are
    numbered; the legend lists them. None if no value differs, or the legend would be too long.
    """
    runs = [run for row in report.rows for run in row.trials]
    texts = dict.fromkeys(run.params[name] for run in runs)
    numbers = [number for text in texts if (number := _number(text)) is not None]
    are_numbers = len(numbers) == len(texts)
    places = dict(zip(texts, numbers if are_numbers else range(1, len(texts) + 1), strict=True))
    values: dict[float, list[float]] = {}
    for run in runs:
        height = run.metrics.get(report.by)
        if height is not None and _fits(height):
            values.setdefault(places[run.params[name]], []).append(height)
    if len(values) < 2 or not (are_numbers or len(texts) <= len(PALETTE)):
        return None
    legend = [(PALETTE[0], "trial")]
    has_line = are_numbers and (len(report.names) == 1 or len(runs) > len(texts))
    if has_line:
        legend.append((PALETTE[1], "mean per value"))
    if not are_numbers:
        legend += [(MUTED, f"{place:g}: {text}") for text, place in places.items()]
    is_log = are_numbers and _by_factors(numbers)
    note = f"Logarithmic axis: {name}." if is_log else ""
    svg = _over_values(dict(sorted(values.items())), report, has_line=has_line, is_log=is_log)
    return Drawing(f"{label(report.by)} over {name}", svg, legend, note)


def check_file(option: str, name: str, formats: Sequence[str] = FORMATS) -> None:
    """Raise RequestError for a file that cannot be written, before anything is read or run.

    formats: permitted suffixes; empty permits any.
    """
    path = Path(name)
    if not name or path.is_dir():
        raise RequestError(f"{option}: {name!r} is not a file name. Give one. [CD0108]")
    if not path.parent.is_dir():
        raise RequestError(
            f"{option}: the directory {path.parent} does not exist. Create it, or use another. "
            "[CD0108]"
        )
    if formats and path.suffix not in formats:
        raise RequestError(f"{option}: {name!r} must end in {' or '.join(formats)}. [CD0108]")


def write_file(option: str, name: str, content: bytes) -> str:
    """Write a file that an option names; return a line for the user. Raises RequestError."""
    path = Path(os.path.realpath(name))  # keep a symbolic link
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)  # a device or a pipe cannot be replaced
        else:
            write_atomically(path, content)
    except OSError as error:
        raise RequestError(f"{option}: cannot write {name}: {error.strerror}. [CD0108]") from None
    return f"wrote {name}"


def save_scaling(scaling: Scaling, path: Path, subtitle: Sequence[str]) -> None:
    """Write the plot below its title and `subtitle`; the suffix selects the format.

    Raises OSError.
    """
    lines = (scaling.title, *subtitle)
    heading = [row for line in lines for row in textwrap.wrap(line, _HEADING_WIDTH)]
    figure = _scaling_figure(scaling, 3.6 + 0.17 * len(heading))
    above = figure.suptitle("\n".join(heading), x=0.01, ha="left", size=8.5)
    above.set_parse_math(False)  # a name may contain dollar signs
    figure.savefig(path)


def png(shape: Sequence[int], pixels: bytes) -> bytes:
    """Encode the grey values, row by row, of an image (height, width) as PNG (W3C, 3rd ed.)."""
    height, width = shape
    rows = (b"\0" + pixels[row * width : (row + 1) * width] for row in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    content = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in content
    )


def colours(number: int) -> list[str]:
    """Return `number` distinct colours."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    wheel = (colorsys.hls_to_rgb(index / number, 0.52, 0.6) for index in range(number))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in each) for each in wheel]


def _of_runs(
    gathered: Sequence[Gathered],
    title: str,
    label: str,
    scale: Scale,
    value: Callable[[MetricsLine], float | None],
) -> Drawing | None:
    """Draw one value of all runs: thin lines for training, markers for the test set."""
    is_single = len(gathered) == 1
    lines: list[Line] = []
    marks: list[tuple[int, str]] = []
    legend: list[tuple[str, str]] = []
    for each, colour in zip(gathered, colours(len(gathered)), strict=True):
        known = [point for point in each.points if value(point) is not None]
        trained, tested = (
            [(point.step, value(point)) for point in _thinned(points)]
            for points in ([p for p in known if not p.tested], [p for p in known if p.tested])
        )
        tests = PALETTE[1] if is_single else colour
        if trained:
            lines.append(Line(trained, colour, faint=bool(tested) and not is_single))
        if tested:
            lines.append(Line(tested, tests, strong=True))
        if is_single and scale != "from zero":
            shown = (bool(trained), colour, "training"), (bool(tested), tests, "test set")
            legend = [(colour, name) for is_drawn, colour, name in shown if is_drawn]
        elif known and not is_single:
            legend.append((colour, each.report.status.name))
        marks += _marks(each, MUTED if is_single else colour)
    if not lines:
        return None
    notes = []
    if not is_single and scale != "from zero":
        notes.append("Thin lines: training. Lines with markers: test set.")
    if marks:
        notes.append("Dotted lines: resumed from this step.")
    return Drawing(title, _over_steps(label, scale, lines, marks), legend, " ".join(notes))


def _curves(
    report: SweepReport, lines: Sequence[Sequence[Lines]], kind: str, metric: str
) -> Drawing | None:
    """Draw a metric over steps: one line per row, with a band from lowest to highest seed."""
    drawn: list[Line] = []
    legend: list[tuple[str, str]] = []
    for row, colour, runs in zip(report.rows, PALETTE, lines, strict=False):
        points: Curve = curve(runs, kind, metric)
        if not points:
            continue
        band = [(step, low, high) for step, _, low, high in points] if len(runs) > 1 else ()
        mean = [(step, value) for step, value, _, _ in points]
        drawn.append(Line(mean, colour, strong=kind == "eval", band=band))
        legend.append((colour, " ".join(f"{name}={text}" for name, text in row.params.items())))
    if not any(len(line.points) > 1 for line in drawn):
        return None
    lowers = sweep.lower_is_better(metric)
    scale: Scale = "logarithmic" if lowers else "percent" if metric == "accuracy" else "linear"
    notes = []
    if len(report.rows) > len(lines):
        notes.append(f"The best {len(lines)} of {len(report.rows):,} rows.")
    if report.over:
        notes.append(f"Lines: mean over {', '.join(report.over)}. Bands: lowest to highest.")
    title = label(metric if kind == "eval" else f"train_{metric}")
    return Drawing(title, _over_steps("", scale, drawn, []), legend, " ".join(notes))


def _by_factors(values: Sequence[float]) -> bool:
    """Return whether values differ by factors (1, 3, 10) rather than evenly (1, 2, 3)."""
    distinct = sorted({*values})
    low, high = distinct[0], distinct[-1]
    if low <= 0 or high < 4 * low or (len(distinct) == 2 and high < 10 * low):
        return False
    even_in_log, even = math.sqrt(low) * math.sqrt(high), (low + high) / 2
    return len(distinct) == 2 or median(distinct) < (even_in_log + even) / 2


def _number(text: str) -> float | None:
    """Parse a number that can be drawn; None for other text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if _fits(number) else None


def _fits(number: float) -> bool:
    """Return whether an axis of either scale can show a number."""
    return number == 0 or 1 / sweep.LARGEST < abs(number) < sweep.LARGEST


def _marks(gathered: Gathered, colour: str) -> list[tuple[int, str]]:
    """List the steps at which a run resumed, each with the run's colour."""
    resumed = gathered.report.attempts[1:]
    return [(each.first_step, colour) for each in resumed if each.first_step is not None]


def _thinned(points: list[MetricsLine]) -> list[MetricsLine]:
    """Keep as many points as a plot can show, including the last one."""
    stride = -(-len(points) // _MAX_POINTS)
    return points if stride < 2 else points[::-1][::stride][::-1]


def _middle(points: Sequence[MetricsLine]) -> Line:
    """Return the line of median rates over all ranks, with a band of all rates."""
    band: list[tuple[int, float, float]] = []
    middle: list[tuple[int, float]] = []
    for point in points:
        rates = [rate for rate in point.rank_images_per_second if rate is not None]
        if many := point.rank_spread:
            rates = [many.lowest, many.median, many.highest]
        if rates:
            band.append((point.step, min(rates), max(rates)))
            middle.append((point.step, median(rates)))
    return Line(middle, PALETTE[0], band=band)


def _slowest(gathered: Gathered, size: int) -> list[int]:
    known = [
        (rank.images_per_second, rank.rank)
        for rank in gathered.report.figures.ranks
        if rank.rank < size and rank.images_per_second is not None
    ]
    return [min(known)[1]] if known else []


def _same(report: RunReport) -> object:
    """Return the key of comparable runs; the strategy may differ, since one rank needs none."""
    names = [name for name in sorted(report.settings) if not _WITHOUT_EFFECT.fullmatch(name)]
    settings = [(name, report.settings[name]) for name in names]
    figures = report.figures
    threads = figures.threads if figures.device == "cpu" else None
    machine = (figures.device, figures.precision, threads)
    return figures.model, figures.dataset, machine, repr(settings)


def _compared(group: Sequence[RunReport]) -> Scaling:
    sizes = [
        Size(each.status.name, each.figures.world_size or 1, each.figures.images_per_second or 0.0)
        for each in group
    ]
    sizes.sort(key=lambda size: size.world_size)
    fewest = [size for size in sizes if size.world_size == sizes[0].world_size]
    of_one = median(size.images_per_second / size.world_size for size in fewest)
    first = group[0].figures
    machine = ", ".join(filter(None, (first.device, first.precision)))
    return Scaling(" on ".join(filter(None, (first.model, machine))), sizes, of_one)


def _scaling_figure(scaling: Scaling, height: float) -> "Figure":
    figure = _figure(9.6, height)
    left, right = figure.subplots(1, 2)
    counts = sorted({size.world_size for size in scaling.sizes})
    dashed = {"color": MUTED, "linestyle": "--", "linewidth": 1.1}
    left.plot(counts, [scaling.of_one * count for count in counts], **dashed)
    right.axhline(1.0, **dashed)
    for number, series in enumerate(dict.fromkeys(size.series for size in scaling.sizes)):
        sizes = [size for size in scaling.sizes if size.series == series]
        for axes, value in ((left, attrgetter("images_per_second")), (right, scaling.efficiency)):
            points = [(size.world_size, value(size)) for size in sizes]
            medians = {
                count: median(height for each, height in points if each == count)
                for count, _ in sorted(points)
            }
            colour = PALETTE[number]
            axes.plot([*medians], [*medians.values()], color=colour, linewidth=1.6)
            axes.plot(*zip(*points, strict=True), "o", color=colour, label=series or None)
    left.set_ylabel(f"images/s, all {scaling.unit}")
    right.set_ylabel("efficiency")
    for axes in (left, right):
        if counts[-1] > 8 * counts[0]:
            axes.set_xscale("log", base=2)
            if axes is left:
                _logarithmic(axes)
        axes.set_xticks(counts, labels=[f"{count:,}" for count in counts])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(_percent if axes is right else _plain)
        axes.set_xlabel(scaling.unit)
        axes.grid(alpha=0.15)
        if axes.get_yscale() != "log":
            axes.set_ylim(0, 1.05 * max(axes.dataLim.y1, axes.get_ylim()[1]))
    if scaling.sizes[0].series:
        left.legend()
    return figure


def _over_steps(
    label: str, scale: Scale, lines: list[Line], marks: list[tuple[int, str]]
) -> Markup:
    """Draw lines over steps, with vertical `marks`, as an SVG element."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure(5.6, 3.2)
    axes = figure.subplots()
    for line in lines:
        axes.plot(
            [step for step, _ in line.points],
            [value if _drawable(value) else float("nan") for _, value in line.points],
            color=line.colour,
            linewidth=1.8 if line.strong else 1.1,
            alpha=0.45 if line.faint else 1.0,
            marker="o",
            markevery=marked(line),
            markersize=4,
        )
        if line.band:
            steps, lowest, highest = zip(*line.band, strict=True)
            if len(line.band) == 1:  # an area needs two
                axes.vlines(steps, lowest, highest, color=line.colour, alpha=0.2, linewidth=6)
            axes.fill_between(steps, lowest, highest, color=line.colour, alpha=0.2, linewidth=0)
    for step, colour in marks:
        axes.axvline(step, color=colour, linestyle=":", linewidth=1.2)
    values = [value for line in lines for _, value in line.points if _drawable(value)]
    values += [value for line in lines for _, *ends in line.band for value in ends]
    if scale == "logarithmic" and values and min(values) > 0:
        _logarithmic(axes)
    elif scale == "from zero":
        axes.set_ylim(bottom=0, top=max(values, default=1.0) * 1.08 or 1.0)
    axes.yaxis.set_major_formatter(_percent if scale == "percent" else _plain)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(_plain)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    return _svg(figure)


def _over_values(
    values: Mapping[float, Sequence[float]], report: SweepReport, *, has_line: bool, is_log: bool
) -> Markup:
    """Draw markers over the values of a parameter as an SVG element."""
    from matplotlib.ticker import NullLocator

    figure = _figure(5.6, 3.2)
    axes = figure.subplots()
    marks = [(place, height) for place, heights in values.items() for height in heights]
    axes.plot(*zip(*marks, strict=True), "o", color=PALETTE[0], markersize=4, alpha=0.6)
    if has_line:
        means = [fmean(heights) for heights in values.values()]
        axes.plot([*values], means, color=PALETTE[1], linewidth=1.6)
    if is_log:
        _logarithmic(axes, "x")
    axes.xaxis.set_major_formatter(_plain)
    if len(values) <= _MAX_TICKS:
        axes.set_xticks([*values], labels=[f"{place:g}" for place in values])
        axes.xaxis.set_minor_locator(NullLocator())
    if report.lowest_first and _by_factors([height for _, height in marks]):
        _logarithmic(axes)
    is_accuracy = report.by.removeprefix("train_") == "accuracy"
    axes.yaxis.set_major_formatter(_percent if is_accuracy else _plain)
    return _svg(figure)


def marked(line: Line) -> list[int]:
    """Return the points with a marker: all of a strong line, else isolated points only."""
    drawn = [False, *(_drawable(value) for _, value in line.points), False]
    if line.strong and len(line.points) <= _MAX_STEPS_MARKED:
        return [index for index in range(len(line.points)) if drawn[index + 1]]
    around = zip(drawn, drawn[1:], drawn[2:], strict=False)
    return [index for index, shown in enumerate(around) if shown == (False, True, False)]


def _drawable(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _logarithmic(axes: "Axes", which: Literal["x", "y"] = "y") -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 3.0) if which == "x" else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())


def _plain(value: float, _position: float) -> str:
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:g}"


def _percent(value: float, _position: float) -> str:
    return f"{100 * value:g}%"


def _svg(figure: "Figure") -> Markup:
    """Export the figure as an SVG element."""
    import matplotlib as mpl

    for axes in figure.axes:
        axes.grid(alpha=0.15, color=_TEXT, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color=_TEXT, alpha=0.4)
        axes.tick_params(colors=_TEXT, labelsize=9, width=0.8)
        axes.xaxis.label.set_color(_TEXT)
        axes.yaxis.label.set_color(_TEXT)
    drawn = io.StringIO()
    # The salt makes ids deterministic: equal ids on one page have equal content.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "clusterddp", "font.family": "sans-serif"}
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # each adds a URL
    with mpl.rc_context(style):
        figure.savefig(drawn, format="svg", transparent=True, metadata=nothing)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :].replace(_TEXT, "currentColor")
    svg = _NEEDLESS.sub("", svg).replace("<svg ", '<svg role="img" ', 1)
    return Markup(svg)  # contains only numbers and constant text
