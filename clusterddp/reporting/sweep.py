"""Gathers the results of a sweep: a row for each point, taken together over seeds, the best first.

Of each point its events, report.json and metrics.jsonl are read, once; Slurm is asked once for all.
"""

import csv
import io
import math
import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from clusterddp import files, formatting
from clusterddp.errors import OptionError
from clusterddp.run.records import Report
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.status.state import ENDED, RunState
from clusterddp.status.status import judge_all
from clusterddp.status.sweeps import sweep_status

USUAL = ("accuracy", "loss")
"""Metrics that every report knows; of the test set."""
LARGEST = 1e100
"""Values that are drawn are smaller: an axis adds a margin to them."""
_TRAINING = "train_"
_OF_REPORT = (*USUAL, "train_seconds", "images_per_second", "peak_memory_bytes")
_OWN_NAMES = {"seconds": "train_seconds", "images_per_second": "images_per_second"}
_NO_METRICS = frozenset({"kind", "step", "epoch", "time", "rank_images_per_second"})
_OF_TRAINING = ("images_per_second", "lr")  # of an evaluation's line too, and no measure of a test
_LATEST_LINES = 50  # of the training, among which the latest value of each metric is looked for
_MOST_STEPS = 200  # of a curve: nobody sees more
_WORDS = (
    "loss|error|err|perplexity|ppl|nll|mse|rmse|mae|wer|cer|fid|bpb|bpc|seconds|time|latency|memory"
    "|bytes"
)
_LOWER_IS_BETTER = re.compile(rf"(?<![a-z])({_WORDS})(?![a-z])", re.IGNORECASE)
_PER_TIME = re.compile(r"per_(second|sec|s)$")

Curve = list[tuple[int, float, float, float]]
"""Steps, each with the mean over seeds, the lowest and the highest value."""


@dataclass(frozen=True)
class PointResult:
    """Result of one point's run."""

    run: str
    state: RunState
    point: Mapping[str, str]
    figures: Mapping[str, float]
    """Latest value of each metric. `accuracy` is of the test set, `train_accuracy` of training."""


@dataclass(frozen=True)
class Spread:
    """Mean of a metric over the runs of a row that have recorded it."""

    mean: float
    spread: float | None
    """Sample standard deviation; None for a single value, or where one is not finite."""
    n: int


@dataclass(frozen=True)
class Row:
    """Points that differ in nothing but what the report is taken over, such as their seed."""

    point: Mapping[str, str]
    figures: Mapping[str, Spread]
    states: Mapping[str, int]
    best_run: str
    """Run with the best value; the first one where none is known."""
    runs: tuple[PointResult, ...]

    @property
    def state(self) -> str:
        """Return the states in words: `3 done, 1 failed`, of a single run `done`."""
        if len(self.runs) == 1:
            return self.runs[0].state
        return ", ".join(f"{count} {state}" for state, count in self.states.items())

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric; None where no run has recorded it."""
        known = self.figures.get(metric)
        return known.mean if known else None


@dataclass(frozen=True)
class SweepReport:
    """Results of a sweep, as `clusterddp report --json` prints them."""

    sweep: str
    state: str
    counts: Mapping[RunState, int]
    """Points in each state."""
    names: tuple[str, ...]
    """Names in which the rows differ."""
    over: tuple[str, ...]
    """Names over which means are taken."""
    by: str
    """Metric by which the rows are ordered; empty where no point has recorded any."""
    lowest_first: bool
    metrics: tuple[str, ...]
    """Metrics that a point has recorded, `by` first."""
    rows: tuple[Row, ...]
    """The best first; those without the metric last, in the order of the sweep."""
    directory: str

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON's own types."""
        return asdict(self)


def gather_sweep(sweep: SweepDir, by: str = "", over: Sequence[str] = ()) -> SweepReport:
    """Gather the results of a sweep's points.

    by: metric that orders the rows; `-` or `+` ahead of it puts the lowest or the highest first,
    where its name does not tell. over: swept names to take means over, `seed` when empty.

    Raises OptionError for a metric that no point has recorded, or a name that is not swept;
    RequestError where the sweep's request cannot be read.
    """
    runs = sweep.elements
    judged = judge_all(runs)
    status = sweep_status(sweep, [state for state, _ in judged])
    _check_over(over, status.names)
    results = [
        PointResult(run.name, state, dict(zip(status.names, point, strict=True)), figures)
        for run, (state, report), point in zip(runs, judged, status.points, strict=True)
        for figures in [_without(status.names, _figures(run, report))]
    ]
    known = {name for result in results for name in result.figures}
    sign, asked = (by[:1], by[1:]) if by[:1] in ("-", "+") else ("", by)
    metric = _metric(asked, known, status.names)
    lowest_first = sign == "-" or (not sign and lower_is_better(metric))
    folded = tuple(over) or tuple(name for name in status.names if name == "seed")
    rows = rows_of(results, folded, metric, lowest_first=lowest_first)
    first = [name for name in (metric, *USUAL) if name in known]
    return SweepReport(
        sweep=sweep.name,
        state=status.state,
        counts=status.counts,
        names=tuple(name for name in status.names if name not in folded),
        over=folded,
        by=metric,
        lowest_first=lowest_first,
        metrics=tuple(dict.fromkeys([*first, *sorted(known)])),
        rows=rows,
        directory=str(sweep.path.absolute()),
    )


def rows_of(
    results: Sequence[PointResult], over: Sequence[str], metric: str, *, lowest_first: bool
) -> tuple[Row, ...]:
    """Take together the points that differ in `over` alone, and order them, the best first."""
    groups: dict[tuple[tuple[str, str], ...], list[PointResult]] = {}
    for result in results:
        key = tuple((name, text) for name, text in result.point.items() if name not in over)
        groups.setdefault(key, []).append(result)

    def place(value: float | None) -> tuple[int, float]:
        """Sort numbers by the order that was asked for, then what is no number, then the rest."""
        if value is None:
            return 2, 0.0
        if not math.isfinite(value):
            return 1, 0.0
        return 0, value if lowest_first else -value

    rows = [
        Row(
            dict(key),
            _spreads(group),
            dict(Counter(result.state for result in group)),
            min(group, key=lambda result: place(result.figures.get(metric))).run,
            tuple(group),
        )
        for key, group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: place(row.mean(metric))))


def lower_is_better(metric: str) -> bool:
    """Judge by its name whether the lowest value of a metric is the best: `val_loss`, `mse`."""
    return bool(_LOWER_IS_BETTER.search(metric)) and not _PER_TIME.search(metric)


def label(metric: str) -> str:
    """Name a metric for a person: `test accuracy`, `training loss`, `train seconds`."""
    if metric in _OF_REPORT and metric not in USUAL:
        return metric.replace("_", " ")
    name = metric.removeprefix(_TRAINING)
    return f"test {name}" if name == metric else f"training {name}"


def shown(metric: str, value: float | None) -> str:
    """Format a value of a metric; accuracies in per cent, as everywhere."""
    if metric.removeprefix(_TRAINING) == "accuracy":
        return formatting.percent(value)
    return "-" if value is None else f"{value:.5g}"


def order_of(report: SweepReport) -> str:
    """Return the order of the rows in words: `test accuracy, highest first; mean over seed`."""
    if not report.by and not ENDED.issuperset(report.counts):
        return "no point has recorded a metric yet"
    if not report.by:
        way = ": a script of your own does with a Loop (docs/resumable.md)"
        return f"no point has recorded a metric{way if RunState.DONE in report.counts else ''}"
    order = f"{label(report.by)}, {'lowest' if report.lowest_first else 'highest'} first"
    if not report.over:
        return order
    return f"{order}; mean and sample standard deviation of N runs, over {', '.join(report.over)}"


def table_of(report: SweepReport) -> list[tuple[str, ...]]:
    """Return the header and the rows as a person reads them, each cell on a line of its own."""
    others = [
        name for name in (*USUAL, "train_seconds") if name in report.metrics and name != report.by
    ]
    spread = ("SPREAD", "N") if report.over and report.by else ()
    heads = [_heading(name) for name in ([report.by] if report.by else [])]
    heads += [*spread, *map(_heading, others), "STATE"]
    if report.by or not report.over:  # of several runs without a metric none is the best
        heads.append("BEST-RUN" if report.over else "RUN")
    table = [(*report.names, *heads)]
    for row in report.rows:
        cells = [*row.point.values()]
        if report.by:
            cells.append(shown(report.by, row.mean(report.by)))
        if spread:
            best = row.figures.get(report.by, Spread(math.nan, None, 0))
            cells += [shown(report.by, best.spread), str(best.n)]
        cells += [shown(name, row.mean(name)) for name in others]
        cells.append(row.state)
        if report.by or not report.over:
            is_known = not report.over or report.by in row.figures
            cells.append(row.best_run if is_known else "-")
        table.append(tuple(cells))
    return [tuple(map(formatting.line, cells)) for cells in table]


def as_csv(report: SweepReport) -> str:
    """Return the rows as CSV: swept names, then columns with a dot, which no swept name has."""
    figures = [f"{name}.{part}" for name in report.metrics for part in ("mean", "spread", "n")]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    ours = ("run.best", "run.count", "run.states")
    lines.writerow([*report.names, *map(formatting.line, figures), *ours])
    for row in report.rows:
        cells: list[object] = [*row.point.values()]
        for name in report.metrics:
            known = row.figures.get(name)
            cells += (known.mean, known.spread, known.n) if known else (None, None, 0)
        lines.writerow([*cells, row.best_run, len(row.runs), row.state])
    return text.getvalue()


def curve(runs: Sequence[Sequence[Mapping[str, object]]], kind: str, metric: str) -> Curve:
    """Return a metric over steps of the runs that differ in their seed.

    runs: lines of metrics, in the order of steps. Each run counts from its first to its last step,
    and with a value between two where others have a step.
    """
    each = [
        [*{step: value for line in lines for step, value in _values(line, kind, metric)}.items()]
        for lines in runs
    ]
    steps = sorted({step for points in each for step, _ in points})
    stride = -(-len(steps) // _MOST_STEPS) or 1
    drawn: Curve = []
    for step in steps[::-1][::stride][::-1]:
        values = [value for points in each if (value := _between(points, step)) is not None]
        drawn.append((step, statistics.fmean(values), min(values), max(values)))
    return drawn


def read_lines(path: Path, *, all_over: bool = False) -> list[dict[str, object]]:
    """Read the lines of metrics.jsonl in the order of steps; none where it cannot be read.

    Of the training the latest lines are read, or `all_over` some from its beginning to its end;
    evaluations are all read.
    """
    try:
        lines = files.read_file(path).splitlines()
    except OSError:
        return []
    trained = [line for line in lines if b'"eval"' not in line]
    stride = -(-len(trained) // (2 * _MOST_STEPS)) or 1
    kept = trained[::-1][::stride][::-1] if all_over else trained[-_LATEST_LINES:]
    kept += [line for line in lines if b'"eval"' in line]
    known = [
        (step, line)
        for line in files.parse_json_lines(b"\n".join(kept))
        if line.get("kind") in ("train", "eval")
        and (step := files.number(line.get("step"))) is not None
        and step >= 0
    ]
    return [line for _, line in sorted(known, key=lambda each: each[0])]


def _heading(metric: str) -> str:
    return label(metric).upper().replace(" ", "-")


def _figures(run: RunDir, report: Report | None) -> dict[str, float]:
    """Return the latest value of each metric; those of report.json hold for the whole run."""
    figures: dict[str, float] = {}
    for line in read_lines(run.metrics):
        prefix = "" if line["kind"] == "eval" else _TRAINING
        for name, content in line.items():
            value = None if name in _NO_METRICS else _number(content)
            if value is None or (not prefix and name in _OF_TRAINING):
                continue
            figures[_OWN_NAMES.get(name) or f"{prefix}{name}"] = value
    for name in _OF_REPORT if report else ():
        value = _number(getattr(report, name))
        if value is not None:
            figures[name] = value
    return figures


def _without(swept: Sequence[str], figures: Mapping[str, float]) -> dict[str, float]:
    """Leave out what a run has recorded of a swept name, such as the rate by which lr is decayed.

    Accuracy, loss and what each report holds stay: those are metrics, whatever is swept.
    """
    names = {*swept, *(f"{_TRAINING}{name}" for name in swept if name not in USUAL)}
    return {n: v for n, v in figures.items() if n not in names or n in _OF_REPORT}


def _number(value: object) -> float | None:
    """Take a number, be it finite or not; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON's integers have no bound
        return None


def _spreads(group: Sequence[PointResult]) -> dict[str, Spread]:
    names = dict.fromkeys(name for result in group for name in result.figures)
    return {
        name: _spread([result.figures[name] for result in group if name in result.figures])
        for name in names
    }


def _spread(values: Sequence[float]) -> Spread:
    """Return mean and sample standard deviation; a run that has diverged makes the mean NaN."""
    if len(values) == 1:
        return Spread(values[0], None, 1)
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, None, len(values))
    try:
        return Spread(statistics.fmean(values), statistics.stdev(values), len(values))
    except OverflowError:  # near the largest number that there is
        return Spread(math.nan, None, len(values))


def _metric(asked: str, known: set[str], swept: Sequence[str]) -> str:
    """Return the metric that orders the rows: the one that was asked for, or the most telling."""
    if asked:
        found = next((name for name in (asked, f"{_TRAINING}{asked}") if name in known), "")
        if found or asked.removeprefix(_TRAINING) in USUAL:
            return found or asked
        names = formatting.join_limited(sorted(known), 20, ", ")
        there = f"recorded are {names}" if known else "no metric is recorded yet"
        why = "the sweep varies it" if asked in swept else "no point has recorded it"
        raise OptionError("--by", f" {asked}: {why}; {there}.")
    usual = [*USUAL, *(f"{_TRAINING}{name}" for name in USUAL)]
    own = sorted(known - {*usual, *_OF_REPORT})
    tested = [name for name in own if not name.startswith(_TRAINING)]
    order = [*USUAL, *tested, *usual, *own, *_OF_REPORT]
    return next((name for name in order if name in known), "")


def _check_over(over: Sequence[str], names: Sequence[str]) -> None:
    for name in over:
        if name not in names:
            raise OptionError("--over", f" {name}: the sweep varies {', '.join(names)}.")


def _values(line: Mapping[str, object], kind: str, metric: str) -> list[tuple[int, float]]:
    """Return step and value where the line has one that can be drawn; none where it has not."""
    value = files.number(line.get(metric)) if line.get("kind") == kind else None
    if value is None or not abs(value) < LARGEST:
        return []
    return [(int(files.number(line["step"]) or 0), value)]


def _between(points: Sequence[tuple[int, float]], step: int) -> float | None:
    """Return the value at a step, on a straight line between its neighbours; None outside."""
    index = bisect_left(points, step, key=lambda point: point[0])
    if index == len(points) or (index == 0 and points[0][0] > step):
        return None
    right, value = points[index]
    if right == step:
        return value
    left, before = points[index - 1]
    return before + (value - before) * (step - left) / (right - left)
