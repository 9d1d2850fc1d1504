"""Trials of a sweep, from a grid, a file or random draws.

Only `read_trials` reads a file. `JobSpec.trial_spec` applies a trial to a request.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clusterddp import formatting
from clusterddp.errors import OptionError, no_file
from clusterddp.request.options import Record
from clusterddp.slurm import forms

if TYPE_CHECKING:
    import random

Trial = tuple[tuple[str, str], ...]
"""Swept names with their values as text."""
ValueParser = Callable[[Sequence[str], Sequence[str]], tuple[object, ...]]
"""Function that takes names and texts, and parses the texts like the program."""

MAX_TRIALS = 100_000
"""Maximum number of trials, to reject a mistyped range before Slurm does."""
NAME = r"[A-Za-z][A-Za-z0-9_-]{0,39}"
_RANGE = r"(-?\d{1,18})\.\.(-?\d{1,18})"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_LIKE_RANGE = rf"{_NUMBER}\.\.(?:{_NUMBER})?|\.\.{_NUMBER}"
_ARRAY = r"(?m)^#SBATCH --array="
_DRAWN = r"(log|lin):(.+)\.\.(.+)"


@dataclass(frozen=True, eq=False, repr=False)
class Sweep(Record):
    """Trials of a sweep, in index order; empty for a single run.

    Trials are only appended, so an index always means the same trial.
    """

    names: tuple[str, ...] = ()
    trials: tuple[tuple[str, ...], ...] = ()
    max_concurrent: int = 0
    """Maximum number of trials that run at once; 0: no limit."""
    sample_seed: int | None = None
    """Seed of the draws; None if the trials were given."""

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
                f": {' and '.join(same)} share a variable in the script, where '-' becomes '_'. "
                "Rename one of them.",
            )
        if same:
            raise OptionError(
                "--sweep", f" {same[0]} is given twice. List all its values in one place."
            )
        if bool(self.names) != bool(self.trials):
            raise OptionError("--sweep", ": there are no trials. Use NAME=VALUES.")
        for trial in self.trials:
            if len(trial) != len(self.names):
                raise OptionError(
                    "--sweep",
                    f": a trial has {len(trial)} values for {len(self.names)} names "
                    f"({', '.join(self.names)}).",
                )
            for name, text in zip(self.names, trial, strict=True):
                forms.text(f"--sweep {name}", text)
        if len({*self.trials}) < len(self.trials):
            again = next(i for i, trial in enumerate(self.trials) if trial in self.trials[:i])
            raise OptionError(
                "--sweep",
                f": the trial {format_trial(self.trial(again))} is given twice. "
                "Remove one: both give the same result.",
            )

    def __bool__(self) -> bool:
        return bool(self.trials)

    def __len__(self) -> int:
        return len(self.trials)

    def trial(self, index: int) -> Trial:
        """Return the values of a trial by name. Raises IndexError."""
        return tuple(zip(self.names, self.trials[index], strict=True))

    def with_trials(self, more: "Sweep", parse_values: ValueParser) -> "Sweep":
        """Append the trials of another sweep that this one does not have yet.

        parse_values: makes trials comparable. Raises OptionError if the names differ.
        """
        if {*more.names} != {*self.names}:
            raise OptionError(
                "--sweep",
                f": the sweep varies {', '.join(self.names)}, but the new trials vary "
                f"{', '.join(more.names)}. Give values for the same names, or submit a new sweep.",
            )
        order = [more.names.index(name) for name in self.names]
        have = {parse_values(self.names, trial) for trial in self.trials}
        all_trials = (tuple(trial[i] for i in order) for trial in more.trials)
        fresh = [trial for trial in all_trials if parse_values(self.names, trial) not in have]
        return dataclasses.replace(self, trials=(*self.trials, *fresh))

    def reject_duplicates(self, parse_values: ValueParser) -> None:
        """Raise OptionError for equal trials or, from `parse_values`, for an invalid value."""
        earlier: dict[tuple[object, ...], int] = {}
        for index, trial in enumerate(self.trials):
            first = earlier.setdefault(parse_values(self.names, trial), index)
            if first != index:
                one, other = (format_trial(self.trial(i)) for i in (first, index))
                raise OptionError(
                    "--sweep",
                    f": {one} and {other} are the same trial. Remove one: both give the same "
                    "result.",
                )


NO_SWEEP = Sweep()


def variable(name: str) -> str:
    """Return the name of the batch script's variable for a swept value, `trial_lr`."""
    return f"trial_{name.replace('-', '_')}"


def is_array(script: str) -> bool:
    """Return whether a script starts the trials of a sweep as one array, not a single run."""
    return bool(re.search(_ARRAY, script))


def format_trial(trial: Trial) -> str:
    """Format a trial, `lr=0.1 seed=3`."""
    return " ".join(f"{name}={text}" for name, text in trial)


def parse(
    items: Sequence[str],
    rows: Sequence[Mapping[str, str]] = (),
    *,
    num_samples: int | None = None,
    seed: int = 0,
    max_concurrent: int = 0,
) -> Sweep:
    """Return the sweep over all combinations of the values, or over random draws from them.

    items: `lr=0.1,0.3`, `seed=0..4`, or, with `num_samples`, `lr=log:1e-4..1e-1` or `lin:`.
    rows: trials from a file, each combined with all values of `items`.
    num_samples: number of random draws. seed: seed for the draws. Raises OptionError.
    """
    values: dict[str, str] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not text:
            raise OptionError(
                "--sweep", f" {item}: expected NAME=VALUES, such as lr=0.1,0.3 or seed=0..4."
            )
        if name in values or any(name in row for row in rows):
            twice = "given twice" if name in values else "also a name in --sweep-file"
            raise OptionError("--sweep", f" {name} is {twice}. List all its values in one place.")
        values[name] = text
    names = (*(rows[0] if rows else ()), *values)
    if num_samples is not None:
        if rows:
            raise OptionError("--num-samples", " conflicts with --sweep-file. Remove one of them.")
        if not values:
            raise OptionError("--num-samples", " needs --sweep NAME=VALUES.")
        import random  # not needed without draws

        trials = _draw_trials(values, num_samples, random.Random(seed))
        return Sweep(names, trials, max_concurrent, seed)
    lists = [_list(name, text) for name, text in values.items()]
    count = math.prod(map(len, lists)) * max(len(rows), 1)
    if count > MAX_TRIALS:
        raise OptionError(
            "--sweep",
            f": {count} trials exceed the maximum of {MAX_TRIALS}. Use fewer values, or draw some "
            "with --num-samples N.",
        )
    firsts = [tuple(row.values()) for row in rows] or [()]
    trials = tuple((*first, *rest) for first in firsts for rest in itertools.product(*lists))
    return Sweep(names, trials, max_concurrent)


def read_trials(path: Path) -> list[dict[str, str]]:
    """Read trials from a CSV file with a header, or a JSON-lines file of objects.

    Values keep their spelling. Raises OptionError with the line number.
    """

    def wrong(line: int, problem: str) -> OptionError:
        return OptionError("--sweep-file", f" {path}, line {line}: {problem}")

    if path.suffix not in (".csv", ".jsonl"):
        raise OptionError("--sweep-file", f" {path}: expected a file named *.csv or *.jsonl.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise no_file("--sweep-file", path, error) from None
    except UnicodeDecodeError:
        raise OptionError("--sweep-file", f" {path} is not UTF-8 text. Convert it.") from None
    rows: list[dict[str, str]] = []
    if path.suffix == ".csv":
        import csv  # not needed without a CSV file

        lines = csv.reader(text.splitlines(keepends=True), strict=True)
        try:
            header = [name.strip() for name in next(lines, [])]
            for cells in lines:
                if cells and len(cells) != len(header):
                    words = f"expected {len(header)} values, found {len(cells)}."
                    raise wrong(lines.line_num, words)
                if cells:
                    row = dict(zip(header, cells, strict=True))
                    rows.append(_checked_row(row, wrong, lines.line_num))
        except csv.Error as error:
            raise wrong(lines.line_num, f"{error}.") from None
        if len({*header}) < len(header):
            raise wrong(1, "a name is given twice.")
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                row = _object(line, partial(wrong, number))
                rows.append(_checked_row(row, wrong, number))
                if rows[-1].keys() != rows[0].keys():
                    names = ", ".join(rows[0])
                    raise wrong(number, f"expected the names {names}, as in the first line.")
    if not rows or not rows[0]:
        raise OptionError("--sweep-file", f" {path} has no trials. Add one per line.")
    return [{name: row[name] for name in rows[0]} for row in rows]


def _list(name: str, text: str) -> list[str]:
    """Return the values of a comma-separated list; the range `0..4` includes both ends."""
    if re.fullmatch(_DRAWN, text):
        raise OptionError(
            "--sweep", f" {name}={text} is a range to draw from. Add --num-samples N for N draws."
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
        if item.startswith(("log:", "lin:")):
            raise OptionError(
                "--sweep",
                f" {name}={text}: {item} is not a range to draw from. Write only "
                f"{name}={item[:4]}LOW..HIGH, and add --num-samples N.",
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
                f"{name}=lin:0.0..2.5 with --num-samples N.",
            )
        if last - first >= MAX_TRIALS:
            raise OptionError(
                "--sweep",
                f" {name}={text}: {item} has {last - first + 1} values; the maximum is "
                f"{MAX_TRIALS}.",
            )
        values += map(str, range(first, last + 1))
    if len({*values}) < len(values):
        again = next(value for value in values if values.count(value) > 1)
        raise OptionError("--sweep", f" {name}={text}: {again} is given twice. List it once.")
    return values


def _draw_trials(
    values: Mapping[str, str], count: int, source: "random.Random"
) -> tuple[tuple[str, ...], ...]:
    """Draw distinct trials; raises OptionError if there are not enough."""
    if not 1 <= count <= MAX_TRIALS:
        raise OptionError("--num-samples", f" {count} is out of range. Use 1 to {MAX_TRIALS}.")
    draw = [_sampler(name, text) for name, text in values.items()]
    trials: dict[tuple[str, ...], None] = {}
    for _ in range(100 * count):
        # Only `random()` returns the same numbers in every version of Python.
        trials[tuple(at(source.random()) for at in draw)] = None
        if len(trials) == count:
            return tuple(trials)
    found = formatting.count(len(trials), "trial")
    raise OptionError(
        "--num-samples", f" {count}: the values give only about {found}. Use a smaller N."
    )


def _sampler(name: str, text: str) -> Callable[[float], str]:
    """Return the function that maps a number in [0, 1) to a value."""
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


def _checked_row(
    row: dict[str, str], wrong: Callable[[int, str], OptionError], line: int
) -> dict[str, str]:
    """Return a row whose values a script can contain. Raises OptionError with the line number."""
    for name, value in row.items():
        try:
            forms.text(name, value)
        except OptionError as error:
            raise wrong(line, str(error)) from None
    return row


def _object(line: str, wrong: Callable[[str], OptionError]) -> dict[str, str]:
    """Parse a JSON object of plain values; numbers keep their spelling."""

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
        raise wrong(f"{odd} is not a string, a number, true or false.")
    return row
