"""Points of a sweep: values from a grid, a file or random draws.

Only `read_points` reads a file. `JobSpec.element` applies a point to a request.
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
"""Names with their values as text."""
Meaning = Callable[[Sequence[str], Sequence[str]], tuple[object, ...]]
"""Function that parses the texts for names to values, as the program does."""

MOST_POINTS = 100_000
"""Maximum number of points, to reject a mistyped range before Slurm does."""
NAME = r"[A-Za-z][A-Za-z0-9_-]{0,39}"
_RANGE = r"(-?\d{1,18})\.\.(-?\d{1,18})"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LIKE_RANGE = rf"{_NUMBER}\.\.{_NUMBER}"
_ARRAY = r"(?m)^#SBATCH --array="
_DRAWN = r"(log|lin):(.+)\.\.(.+)"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(Record):
    """Points of a sweep, in index order; empty for a single run.

    Points are only appended, so an index always means the same point.
    """

    names: tuple[str, ...] = ()
    points: tuple[tuple[str, ...], ...] = ()
    max_concurrent: int = 0
    """Maximum number of points that run at once; 0: no limit."""
    sample_seed: int | None = None
    """Seed of the draws; None if the points were given."""

    def __post_init__(self) -> None:
        for name in self.names:
            if not re.fullmatch(NAME, name):
                raise OptionError(
                    "--sweep",
                    f": {name!r} is not a valid name. Use a letter, then letters, digits, '-' and "
                    "'_', at most 40 characters.",
                )
        variables = [variable(name) for name in self.names]
        same = [n for n, v in zip(self.names, variables, strict=True) if variables.count(v) > 1]
        if len({*same}) > 1:
            raise OptionError(
                "--sweep",
                f": {' and '.join(same)} give the same script variable, in which '-' becomes '_'. "
                "Choose another name.",
            )
        if same:
            twice = same[0]
            raise OptionError("--sweep", f" {twice} is given twice. List all its values once.")
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
                f": the point {shown(tuple(zip(self.names, again, strict=True)))} is given twice. "
                "Remove the duplicate, which would only repeat its result.",
            )

    def __bool__(self) -> bool:
        return bool(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def point(self, index: int) -> Point:
        """Return the values of a point by name. Raises IndexError."""
        return tuple(zip(self.names, self.points[index], strict=True))

    def with_points(self, more: "Sweep", meant: Meaning) -> "Sweep":
        """Return this sweep with the new points of another sweep appended.

        meant: parses a point, to find equal ones. Raises OptionError if the names differ.
        """
        if {*more.names} != {*self.names}:
            raise OptionError(
                "--sweep",
                f": the sweep varies {', '.join(self.names)}, but the new points vary "
                f"{', '.join(more.names)}. Give values for the same names, or submit a new sweep.",
            )
        order = [more.names.index(name) for name in self.names]
        have = {meant(self.names, point) for point in self.points}
        all_points = (tuple(point[i] for i in order) for point in more.points)
        fresh = [point for point in all_points if meant(self.names, point) not in have]
        return dataclasses.replace(self, points=(*self.points, *fresh))

    def refuse_equal(self, meant: Meaning) -> None:
        """Raise OptionError for equal points; `meant` raises it for an invalid value."""
        earlier: dict[tuple[object, ...], tuple[str, ...]] = {}
        for point in self.points:
            first = earlier.setdefault(meant(self.names, point), point)
            if first is not point:
                one, other = (shown(tuple(zip(self.names, p, strict=True))) for p in (first, point))
                raise OptionError(
                    "--sweep",
                    f": {one} and {other} are the same point. Remove one of them, which would only "
                    "repeat the result of the other.",
                )


NO_SWEEP = Sweep()


def variable(name: str) -> str:
    """Return the batch script's variable for a point's value, `point_lr`."""
    return f"point_{name.replace('-', '_')}"


def is_array(script: str) -> bool:
    """Return whether a script starts points of a sweep by index, rather than a single run."""
    return bool(re.search(_ARRAY, script))


def shown(point: Point) -> str:
    """Format a point, `lr=0.1 seed=3`."""
    return " ".join(f"{name}={text}" for name, text in point)


def parse(
    items: Sequence[str],
    rows: Sequence[Mapping[str, str]] = (),
    *,
    sample: int | None = None,
    seed: int = 0,
    max_concurrent: int = 0,
) -> Sweep:
    """Return the sweep over every combination of the values, or over random draws from them.

    items: `lr=0.1,0.3`, `seed=0..4`, or, with `sample`, `lr=log:1e-4..1e-1` or `lin:`.
    rows: points of a file, each combined with the values of `items`.
    sample: number of draws. seed: of the draws. Raises OptionError.
    """
    values: dict[str, str] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not text:
            raise OptionError(
                "--sweep", f" {item}: expected NAME=VALUES, such as lr=0.1,0.3 or seed=0..4."
            )
        if name in values or any(name in row for row in rows):
            raise OptionError("--sweep", f" {name} is given twice. List all its values once.")
        values[name] = text
    names = (*(rows[0] if rows else ()), *values)
    if sample is not None:
        if rows:
            raise OptionError("--sample", " draws from the values of --sweep, not from a file.")
        if not values:
            raise OptionError("--sample", " needs values to draw from. Add --sweep NAME=VALUES.")
        import random  # not needed without a sample

        points = _draws(values, sample, random.Random(seed))
        return Sweep(names, points, max_concurrent, seed)
    lists = [_list(name, text) for name, text in values.items()]
    count = math.prod(map(len, lists)) * max(len(rows), 1)
    if count > MOST_POINTS:
        raise OptionError("--sweep", f": {count} points exceed the maximum of {MOST_POINTS}.")
    firsts = [tuple(row.values()) for row in rows] or [()]
    points = tuple((*first, *rest) for first in firsts for rest in itertools.product(*lists))
    return Sweep(names, points, max_concurrent)


def read_points(path: Path) -> list[dict[str, str]]:
    """Read points from a CSV file with a header, or a JSON-lines file of objects.

    Values keep their written form. Raises OptionError with the line.
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
        import csv  # not needed without a CSV file

        lines = csv.reader(text.splitlines(keepends=True), strict=True)
        try:
            header = [name.strip() for name in next(lines, [])]
            for cells in lines:
                if cells and len(cells) != len(header):
                    words = f"{len(cells)} values for the {len(header)} names in the first line."
                    raise wrong(lines.line_num, words)
                if cells:
                    rows.append(_carried(zip(header, cells, strict=True), wrong, lines.line_num))
        except csv.Error as error:
            raise wrong(lines.line_num, f"{error}.") from None
        if len({*header}) < len(header):
            raise wrong(1, "a name is given twice.")
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
    """Return the values of a comma-separated list; `0..4` is a range including both ends."""
    if re.fullmatch(_DRAWN, text):
        raise OptionError(
            "--sweep", f" {name}={text} is a random range. Add --sample N for N draws."
        )
    values: list[str] = []
    for item in text.split(","):
        ends = re.fullmatch(_RANGE, item)
        if not item:
            raise OptionError(
                "--sweep",
                f" {name}={text}: a value is empty. To use empty values or values with commas, "
                "put them in a --sweep-file.",
            )
        if not ends and not re.fullmatch(_LIKE_RANGE, item):
            values.append(item)
            continue
        first, last = (int(ends[1]), int(ends[2])) if ends else (1, 0)
        if last < first:
            raise OptionError(
                "--sweep",
                f" {name}={text}: {item} is not a valid range. Use whole numbers, the smaller one "
                "first (0..4), list other values with commas, or draw them: "
                f"{name}=lin:0.0..2.5 with --sample N.",
            )
        if last - first >= MOST_POINTS:
            raise OptionError(
                "--sweep",
                f" {name}={text}: {item} has {last - first + 1} values; the maximum is "
                f"{MOST_POINTS}.",
            )
        values += map(str, range(first, last + 1))
    if len({*values}) < len(values):
        again = next(value for value in values if values.count(value) > 1)
        raise OptionError("--sweep", f" {name}={text}: {again} is given twice. List it once.")
    return values


def _draws(
    values: Mapping[str, str], count: int, source: "random.Random"
) -> tuple[tuple[str, ...], ...]:
    """Draw different points; raises OptionError if the values give too few."""
    if not 1 <= count <= MOST_POINTS:
        raise OptionError("--sample", f" {count} is out of range. Use 1 to {MOST_POINTS}.")
    draw = [_drawn(name, text) for name, text in values.items()]
    points: dict[tuple[str, ...], None] = {}
    for _ in range(100 * count):
        # Only `random()` gives the same numbers in every version of Python.
        points[tuple(at(source.random()) for at in draw)] = None
        if len(points) == count:
            return tuple(points)
    raise OptionError(
        "--sample",
        f" {count}: the values give only about {len(points)} different points. Use a smaller N.",
    )


def _drawn(name: str, text: str) -> Callable[[float], str]:
    """Return the function that maps a number from 0 to below 1 to a value."""
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
            f" {name}={text} is not a valid range. Use two numbers, the smaller one first"
            f"{' and above 0' if kind == 'log' else ''}: {kind}:1e-4..1e-1.",
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
    """Return a row if a script can contain its values. Raises OptionError with the line."""
    values = dict(row)
    for name, value in values.items():
        try:
            forms.text(name, value)
        except OptionError as error:
            raise wrong(line, str(error)) from None
    return values


def _object(line: str, wrong: Callable[[str], OptionError]) -> dict[str, str]:
    """Read an object of plain values; numbers keep their written form."""

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        if len({*names}) < len(names):
            raise wrong("a name is given twice.")
        return dict(pairs)

    def no_json(word: str) -> NoReturn:
        raise wrong(f"{word} is not a valid JSON value. For text, use {json.dumps(word)}.")

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
        raise wrong(f"{odd} is neither a string, a number, true nor false.")
    return row
