"""Points of a sweep: the values that a person types, as a grid, as a file, or drawn at random.

Pure, but for the file that `read_points` reads. `JobSpec.element` puts a point into a request.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clusterddp.errors import OptionError
from clusterddp.request.options import Record
from clusterddp.slurm import forms

if TYPE_CHECKING:
    import random

Point = tuple[tuple[str, str], ...]
"""Names with their values, as texts."""
Meaning = Callable[[Sequence[str], Sequence[str]], tuple[object, ...]]
"""What makes of names and texts the values that they mean to who reads them."""

MOST_POINTS = 100_000
"""A mistyped range is refused ahead of what Slurm would say of it."""
NAME = r"[A-Za-z][A-Za-z0-9_-]{0,39}"
_RANGE = r"(-?\d{1,18})\.\.(-?\d{1,18})"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LIKE_RANGE = rf"{_NUMBER}\.\.{_NUMBER}"
_ARRAY = r"(?m)^#SBATCH --array="
_DRAWN = r"(log|lin):(.+)\.\.(.+)"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(Record):
    """Points of a sweep, in the order of their indices; empty for a request of one run.

    Points are only ever appended: an index stands for one point for good.
    """

    names: tuple[str, ...] = ()
    points: tuple[tuple[str, ...], ...] = ()
    max_concurrent: int = 0
    """Most points that run at once; 0 leaves it to Slurm."""
    sample_seed: int | None = None
    """Seed with which the points were drawn; None where they were given."""

    def __post_init__(self) -> None:
        for name in self.names:
            if not re.fullmatch(NAME, name):
                raise OptionError(
                    "--sweep",
                    f": {name!r} is no name: a letter, then letters, digits, '-' and '_', 40 at "
                    "most.",
                )
        variables = [variable(name) for name in self.names]
        same = [n for n, v in zip(self.names, variables, strict=True) if variables.count(v) > 1]
        if len({*same}) > 1:
            raise OptionError(
                "--sweep",
                f": {' and '.join(same)} are one name to the script's variables, in which '-' is "
                "'_'. Choose another name.",
            )
        if same:
            twice = same[0]
            raise OptionError("--sweep", f" {twice}: is named twice; give it all its values once.")
        if bool(self.names) != bool(self.points):
            raise OptionError("--sweep", ": there are no points.")
        for point in self.points:
            if len(point) != len(self.names):
                raise OptionError(
                    "--sweep",
                    f": a point has {len(point)} values for {len(self.names)} names "
                    f"({', '.join(self.names)}).",
                )
            for name, text in zip(self.names, point, strict=True):
                forms.text(f"--sweep {name}", text)
        if len({*self.points}) < len(self.points):
            again = next(point for point in self.points if self.points.count(point) > 1)
            raise OptionError(
                "--sweep",
                f": the point {shown(tuple(zip(self.names, again, strict=True)))} is "
                "there twice; it would be trained twice to the same end.",
            )

    def __bool__(self) -> bool:
        return bool(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def point(self, index: int) -> Point:
        """Return the values of a point by name. Raises IndexError."""
        return tuple(zip(self.names, self.points[index], strict=True))

    def with_points(self, more: "Sweep", meant: Meaning) -> "Sweep":
        """Return this sweep with those points of another one appended that it does not have.

        meant: what decides whether two points are one. Raises OptionError where the other one has
        other names.
        """
        if {*more.names} != {*self.names}:
            raise OptionError(
                "--sweep",
                f": the sweep varies {', '.join(self.names)}, and the new points "
                f"{', '.join(more.names)}. Give a value for each, or submit a new sweep.",
            )
        order = [more.names.index(name) for name in self.names]
        have = {meant(self.names, point) for point in self.points}
        all_points = (tuple(point[i] for i in order) for point in more.points)
        fresh = [point for point in all_points if meant(self.names, point) not in have]
        return dataclasses.replace(self, points=(*self.points, *fresh))

    def refuse_equal(self, meant: Meaning) -> None:
        """Refuse points that are one; raises OptionError, as `meant` does for a value not valid."""
        earlier: dict[tuple[object, ...], tuple[str, ...]] = {}
        for point in self.points:
            first = earlier.setdefault(meant(self.names, point), point)
            if first is not point:
                one, other = (shown(tuple(zip(self.names, p, strict=True))) for p in (first, point))
                raise OptionError(
                    "--sweep",
                    f": {one} and {other} are one point; it would be trained twice to the same "
                    "end.",
                )


NO_SWEEP = Sweep()


def variable(name: str) -> str:
    """Return the variable of the batch script that holds a point's value, `point_lr`."""
    return f"point_{name.replace('-', '_')}"


def is_array(script: str) -> bool:
    """Return whether a script starts points of a sweep by their indices, and not one run alone."""
    return bool(re.search(_ARRAY, script))


def shown(point: Point) -> str:
    """Return a point as a person reads it, `lr=0.1 seed=3`."""
    return " ".join(f"{name}={text}" for name, text in point)


def parse(
    items: Sequence[str],
    rows: Sequence[Mapping[str, str]] = (),
    *,
    sample: int | None = None,
    seed: int = 0,
    max_concurrent: int = 0,
) -> Sweep:
    """Return the sweep of what was typed: every combination of the values, or draws from them.

    items: `lr=0.1,0.3`, `seed=0..4`, and `lr=log:1e-4..1e-1` or `lin:` with a sample. rows: points
    of a file, each of which is combined with the values of `items`. sample: number of draws.
    seed: of the draws. Raises OptionError with what was seen and expected.
    """
    values: dict[str, str] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not text:
            raise OptionError(
                "--sweep", f" {item}: give NAME=VALUES, such as lr=0.1,0.3 or seed=0..4."
            )
        if name in values or any(name in row for row in rows):
            raise OptionError("--sweep", f" {name}: is named twice; give it all its values once.")
        values[name] = text
    names = (*(rows[0] if rows else ()), *values)
    if sample is not None:
        if rows:
            raise OptionError("--sample", " draws from the values of --sweep, not from a file.")
        if not values:
            raise OptionError("--sample", ": name what to draw with --sweep NAME=VALUES.")
        import random  # not needed where nothing is drawn

        points = _draws(values, sample, random.Random(seed))
        return Sweep(names, points, max_concurrent, seed)
    lists = [_list(name, text) for name, text in values.items()]
    count = math.prod(map(len, lists)) * max(len(rows), 1)
    if count > MOST_POINTS:
        raise OptionError("--sweep", f": {count} points; {MOST_POINTS} is the most.")
    firsts = [tuple(row.values()) for row in rows] or [()]
    points = tuple((*first, *rest) for first in firsts for rest in itertools.product(*lists))
    return Sweep(names, points, max_concurrent)


def read_points(path: Path) -> list[dict[str, str]]:
    """Read the points of a CSV file with a header, or of a JSON-lines file of objects.

    Values keep the form in which they are written there. Raises OptionError with the line.
    """

    def wrong(line: int, problem: str) -> OptionError:
        return OptionError("--sweep-file", f" {path}, line {line}: {problem}")

    if path.suffix not in (".csv", ".jsonl"):
        raise OptionError("--sweep-file", f" {path}: expected a file named *.csv or *.jsonl.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OptionError("--sweep-file", f" {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise OptionError("--sweep-file", f" {path} is not UTF-8 text.") from None
    rows: list[dict[str, str]] = []
    if path.suffix == ".csv":
        import csv  # not needed where no such file is

        lines = csv.reader(text.splitlines(keepends=True), strict=True)
        try:
            header = [name.strip() for name in next(lines, [])]
            for cells in lines:
                if cells and len(cells) != len(header):
                    words = f"{len(cells)} values for the {len(header)} names of the first line."
                    raise wrong(lines.line_num, words)
                if cells:
                    rows.append(_carried(zip(header, cells, strict=True), wrong, lines.line_num))
        except csv.Error as error:
            raise wrong(lines.line_num, f"{error}.") from None
        if len({*header}) < len(header):
            raise wrong(1, "a name stands there twice.")
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                row = _object(line, partial(wrong, number))
                rows.append(_carried(row.items(), wrong, number))
                if rows[-1].keys() != rows[0].keys():
                    raise wrong(number, f"expected the names {', '.join(rows[0])}.")
    if not rows or not rows[0]:
        raise OptionError("--sweep-file", f" {path} has no points.")
    return [{name: row[name] for name in rows[0]} for row in rows]


def _list(name: str, text: str) -> list[str]:
    """Return the values of a list with commas; `0..4` in it is a range with both its ends."""
    if re.fullmatch(_DRAWN, text):
        raise OptionError(
            "--sweep", f" {name}={text} is drawn at random: say how often with --sample N."
        )
    values: list[str] = []
    for item in text.split(","):
        ends = re.fullmatch(_RANGE, item)
        if not item:
            raise OptionError(
                "--sweep",
                f" {name}={text}: a value is empty. Values with commas, and empty ones, stand in a "
                "--sweep-file.",
            )
        if not ends and not re.fullmatch(_LIKE_RANGE, item):
            values.append(item)
            continue
        first, last = (int(ends[1]), int(ends[2])) if ends else (1, 0)
        if last < first:
            raise OptionError(
                "--sweep",
                f" {name}={text}: {item} is no range such as 0..4, of whole numbers with the "
                "smaller one first. List other values with commas, or draw them: "
                f"{name}=lin:0.0..2.5 with --sample N.",
            )
        if last - first >= MOST_POINTS:
            raise OptionError(
                "--sweep",
                f" {name}={text}: {item} is too long, {last - first + 1} values; {MOST_POINTS} is "
                "the most.",
            )
        values += map(str, range(first, last + 1))
    if len({*values}) < len(values):
        again = next(value for value in values if values.count(value) > 1)
        raise OptionError("--sweep", f" {name}={text}: {again} stands there twice.")
    return values


def _draws(
    values: Mapping[str, str], count: int, source: "random.Random"
) -> tuple[tuple[str, ...], ...]:
    """Draw different points; raises OptionError where the values do not give so many."""
    if not 1 <= count <= MOST_POINTS:
        raise OptionError("--sample", f" {count}: is not within 1 and {MOST_POINTS}.")
    draw = [_drawn(name, text) for name, text in values.items()]
    points: dict[tuple[str, ...], None] = {}
    for _ in range(100 * count):
        # `random` alone gives the same numbers in every version of Python.
        points[tuple(at(source.random()) for at in draw)] = None
        if len(points) == count:
            return tuple(points)
    raise OptionError(
        "--sample", f" {count}: the values give hardly more than {len(points)} different points."
    )


def _drawn(name: str, text: str) -> Callable[[float], str]:
    """Return the function that takes a number from 0 to below 1 to a value."""
    form = re.fullmatch(_DRAWN, text)
    if not form:
        choices = _list(name, text)
        return lambda number: choices[int(number * len(choices))]
    kind, low, high = form.groups()
    try:
        first, last = float(low), float(high)
    except ValueError:
        first = last = math.nan
    if not (math.isfinite(last - first) and first < last and (kind == "lin" or first > 0)):
        raise OptionError(
            "--sweep",
            f" {name}={text}: expected two numbers, the smaller one first"
            f"{' and above 0' if kind == 'log' else ''}, such as {kind}:1e-4..1e-1.",
        )
    is_whole = low.isdigit() and high.isdigit()

    def at(number: float) -> str:
        if is_whole and kind == "lin":
            return str(int(first + number * (last - first + 1)))
        if kind == "lin":
            return f"{first + number * (last - first):.6g}"
        value = math.exp(math.log(first) + number * (math.log(last) - math.log(first)))
        return str(round(value)) if is_whole else f"{value:.6g}"

    return at


def _carried(
    row: Iterable[tuple[str, str]], wrong: Callable[[int, str], OptionError], line: int
) -> dict[str, str]:
    """Return a row of values that a line of script can carry. Raises OptionError with the line."""
    values = dict(row)
    for name, value in values.items():
        try:
            forms.text(name, value)
        except OptionError as error:
            raise wrong(line, str(error)) from None
    return values


def _object(line: str, wrong: Callable[[str], OptionError]) -> dict[str, str]:
    """Read an object of plain values; numbers keep the form in which they are written."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        if len({*names}) < len(names):
            raise wrong("a name stands there twice.")
        return dict(pairs)

    def no_json(word: str) -> NoReturn:
        raise wrong(f"{word} is no value of JSON; a text is written {json.dumps(word)}.")

    try:
        content = json.loads(
            line, parse_float=str, parse_int=str, parse_constant=no_json, object_pairs_hook=once
        )
    except OptionError:
        raise
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not content:
        raise wrong('expected an object such as {"lr": 0.1, "seed": 0}.')
    words = {True: "true", False: "false"}
    row = {name: words[v] if isinstance(v, bool) else v for name, v in content.items()}
    odd = next((name for name, value in row.items() if not isinstance(value, str)), None)
    if odd is not None:
        raise wrong(f"{odd} is neither a text, a number, true nor false.")
    return row
