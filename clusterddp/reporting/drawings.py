"""What the page draws of its runs: which lines in which colours, and the words beside them."""

import colorsys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from clusterddp.reporting import plots
from clusterddp.reporting.curve import Point
from clusterddp.reporting.gather import Gathered
from clusterddp.reporting.plots import ALARM, MUTED, PALETTE, Line, Picture

_MOST_LINES = 16
"""Of ranks in one picture; more than that are a band."""
_MOST_POINTS = 1500
"""Of a line: more would make the page large, and nobody sees them."""


@dataclass(frozen=True)
class Drawing:
    """A picture with what stands above and below it."""

    title: str
    svg: Markup
    legend: list[tuple[str, str]]
    """(colour, what has it)"""
    note: str = ""


def colours(number: int) -> list[str]:
    """One for each of so many runs."""
    if number <= len(PALETTE):
        return list(PALETTE[:number])
    wheel = (colorsys.hls_to_rgb(index / number, 0.52, 0.6) for index in range(number))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in each) for each in wheel]


def markup(svg: str) -> Markup:
    """A picture as part of the page: it holds nothing but numbers and our own words."""
    return Markup(svg)


def overall(gathered: Sequence[Gathered]) -> list[Drawing]:
    """Loss, accuracy and images/s over steps, all runs in one picture each."""
    drawn = [
        _of_runs(gathered, "Loss", "loss", lambda point: point.loss, logarithmic=True),
        _of_runs(gathered, "Accuracy", "accuracy", lambda point: point.accuracy, percent=True),
        _of_runs(
            gathered,
            "Images per second",
            "images/s of all ranks",
            lambda point: None if point.tested else point.images_per_second,
            from_zero=True,
        ),
    ]
    return [one for one in drawn if one]


def pace(one: Gathered) -> Drawing | None:
    """Images/s of each rank over steps; None where they were not measured, or it has one rank."""
    points = [point for point in one.points if point.ranks]
    size = len(points[-1].ranks) if points else 0
    if size < 2:
        return None
    points = _thinned([point for point in points if len(point.ranks) == size])
    slow = [straggler.rank for straggler in one.report.stragglers if straggler.rank < size]
    hosts = {rank.rank: rank.host for rank in one.report.ranks}

    def line(rank: int, colour: str, **more: bool) -> Line:
        rates = [point.ranks[rank] for point in points]
        return Line([point.step for point in points], rates, colour, **more)

    def named(rank: int) -> str:
        return f"rank {rank} on {hosts[rank]}" if hosts.get(rank) else f"rank {rank}"

    band = None
    if size > _MOST_LINES:
        band, middle = _band(points)
        lines = [middle]
        legend = [(PALETTE[0], f"{size} ranks: median, and from the slowest to the fastest")]
        slow = slow or _slowest(one, size)
    elif slow:
        lines = [line(rank, MUTED) for rank in range(size) if rank not in slow]
        legend = [(MUTED, "the other ranks")]
    else:
        shades = colours(size)
        lines = [line(rank, shades[rank]) for rank in range(size)]
        legend = [(shades[rank], named(rank)) for rank in range(size)]
    if slow:
        lines += [line(rank, ALARM, faint=True) for rank in slow[1:]]
        lines.append(line(slow[0], ALARM, strong=True))
        legend.append((ALARM, f"{named(slow[0])}, the slowest"))
    picture = Picture("images/s", lines, _marks(one, MUTED), band, from_zero=True)
    return Drawing(
        "Images per second of each rank", markup(plots.over_steps(picture)), legend,
        "Over the time in which a rank did not wait for the others.",
    )  # fmt: skip


def _band(points: Sequence[Point]) -> tuple[tuple[list[int], list[float], list[float]], Line]:
    """Steps with the lowest and the highest rate of any rank, and the line of their medians."""
    known = [(point.step, [rate for rate in point.ranks if rate is not None]) for point in points]
    known = [(step, rates) for step, rates in known if rates]
    steps = [step for step, _ in known]
    lowest = [min(rates) for _, rates in known]
    highest = [max(rates) for _, rates in known]
    return (steps, lowest, highest), Line(steps, [median(rates) for _, rates in known], PALETTE[0])


def _slowest(one: Gathered, size: int) -> list[int]:
    rates = [(rank.images_per_second, rank.rank) for rank in one.report.ranks if rank.rank < size]
    known = [(rate, rank) for rate, rank in rates if rate is not None]
    return [min(known)[1]] if known else []


def _of_runs(
    gathered: Sequence[Gathered],
    title: str,
    label: str,
    value: Callable[[Point], float | None],
    *,
    logarithmic: bool = False,
    percent: bool = False,
    from_zero: bool = False,
) -> Drawing | None:
    """A picture of one value of all runs: training thin, the test set with marks."""
    alone = len(gathered) == 1
    lines: list[Line] = []
    marks: list[tuple[int, str]] = []
    legend: list[tuple[str, str]] = []
    for one, colour in zip(gathered, colours(len(gathered)), strict=True):
        known = [point for point in one.points if value(point) is not None]
        trained = _thinned([point for point in known if not point.tested])
        tested = _thinned([point for point in known if point.tested])
        tests = PALETTE[1] if alone else colour
        if trained:
            thin = bool(tested) and not alone
            lines.append(_line(trained, value, colour, faint=thin))
        if tested:
            lines.append(_line(tested, value, tests, strong=True))
        if alone and tested:
            legend = [(colour, "training"), (tests, "test set")]
        elif not alone and (trained or tested):
            legend.append((colour, one.report.name))
        marks += _marks(one, MUTED if alone else colour)
    if not lines:
        return None
    notes = [] if alone or from_zero else ["Thin: training; with marks: the test set."]
    if marks:
        notes.append("Dotted: started again from there.")
    picture = Picture(
        label, lines, marks, logarithmic=logarithmic, percent=percent, from_zero=from_zero
    )
    return Drawing(title, markup(plots.over_steps(picture)), legend, " ".join(notes))


def _line(
    points: Sequence[Point],
    value: Callable[[Point], float | None],
    colour: str,
    *,
    strong: bool = False,
    faint: bool = False,
) -> Line:
    return Line(
        [point.step for point in points], [value(point) for point in points], colour, strong, faint
    )


def _marks(one: Gathered, colour: str) -> list[tuple[int, str]]:
    again = one.report.attempts[1:]
    return [(start.first_step, colour) for start in again if start.first_step is not None]


def _thinned(points: list[Point]) -> list[Point]:
    """As many as a picture can show, the last one among them."""
    stride = -(-len(points) // _MOST_POINTS)
    return points if stride < 2 else points[::-1][::stride][::-1]
