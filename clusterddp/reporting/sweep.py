"""Results of a sweep: one row per setting, averaged over seeds, best first.

Reads the events, report.json and metrics.jsonl of each trial once; queries Slurm once for all.
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
"""Test-set metrics in every report."""
LARGEST = 1e100
"""Upper bound of plotted values, so that an axis can add its margin."""
_TRAINING = "train_"
_REPORT_FIELDS = (*USUAL, "train_seconds", "images_per_second", "peak_memory_bytes")
_OWN_NAMES = {"seconds": "train_seconds", "images_per_second": "images_per_second"}
_NO_METRICS = frozenset({"kind", "step", "epoch", "time", "rank_images_per_second", "rank_spread"})
_TRAINING_FIELDS = ("images_per_second", "lr")  # also in evaluation lines, but not test metrics
_LATEST_LINES = 50  # training lines searched for the latest value of each metric
_MAX_STEPS = 200  # per curve: more make no visible difference
_WORDS = (
    "loss|error|err|perplexity|ppl|nll|mse|rmse|mae|wer|cer|fid|bpb|bpc|seconds|time|latency|memory"
    "|bytes"
)
_LOWER_IS_BETTER = re.compile(rf"(?<![a-z])({_WORDS})(?![a-z])", re.IGNORECASE)
_PER_TIME = re.compile(r"per_(second|sec|s)$")

Curve = list[tuple[int, float, float, float]]
"""(step, mean over seeds, lowest value, highest value)."""


@dataclass(frozen=True)
class TrialResult:
    """Result of one trial."""

    run: str
    """Name of its run, SWEEP-INDEX."""
    state: RunState
    params: Mapping[str, str]
    """Swept values by name."""
    metrics: Mapping[str, float]
    """Latest value of each metric; `accuracy` is on the test set, `train_accuracy` in training."""


@dataclass(frozen=True)
class Summary:
    """Summary of a metric over the trials of a row that recorded it."""

    mean: float
    std: float | None
    """Sample standard deviation; None for a single value, or if any value is not finite."""
    n: int
    """Number of trials that recorded the metric."""


@dataclass(frozen=True)
class Row:
    """Trials that differ only in the names averaged over, such as the seed."""

    params: Mapping[str, str]
    """Values of the names that are not averaged over."""
    metrics: Mapping[str, Summary]
    states: Mapping[str, int]
    """Number of trials in each state."""
    best_trial: str
    """Run with the best value; the first run if no value is known."""
    trials: tuple[TrialResult, ...]

    @property
    def state(self) -> str:
        """States in words: `3 done, 1 failed`; for a single trial `done`."""
        if len(self.trials) == 1:
            return self.trials[0].state
        return ", ".join(f"{count} {state}" for state, count in self.states.items())

    def mean(self, metric: str) -> float | None:
        """Return the mean of a metric; None if no trial recorded it."""
        known = self.metrics.get(metric)
        return known.mean if known else None


@dataclass(frozen=True)
class SweepReport:
    """Results of a sweep: the fields of `clusterddp report --json`."""

    sweep: str
    state: str
    counts: Mapping[RunState, int]
    """Number of trials in each state."""
    names: tuple[str, ...]
    """Swept names that distinguish the rows."""
    over: tuple[str, ...]
    """Names averaged over."""
    by: str
    """Metric that orders the rows; empty if no trial recorded one."""
    lowest_first: bool
    metrics: tuple[str, ...]
    """Names of the metrics that any trial recorded, `by` first."""
    rows: tuple[Row, ...]
    """Best first; rows without the metric come last, in the order of the sweep."""
    directory: str

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON types."""
        return asdict(self)


def gather_sweep(sweep: SweepDir, by: str = "", over: Sequence[str] = ()) -> SweepReport:
    """Gather the results of a sweep's trials.

    by: metric that orders the rows; a leading `-` or `+` puts the lowest or highest value first;
    otherwise the metric's name decides. over: swept names to average over; empty: `seed`.

    Raises OptionError for a metric that no trial recorded or a name that is not swept, and
    RequestError if the sweep's request cannot be read.
    """
    runs = sweep.trials
    judged = judge_all(runs)
    status = sweep_status(sweep, [state for state, _ in judged])
    _check_over(over, status.names)
    results = [
        TrialResult(run.name, state, dict(zip(status.names, trial, strict=True)), metrics)
        for run, (state, report), trial in zip(runs, judged, status.trials, strict=True)
        for metrics in [_without(status.names, _metrics(run, report))]
    ]
    known = {name for result in results for name in result.metrics}
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
    results: Sequence[TrialResult], over: Sequence[str], metric: str, *, lowest_first: bool
) -> tuple[Row, ...]:
    """Group the trials that differ only in `over`, and sort the groups, best first."""
    groups: dict[tuple[tuple[str, str], ...], list[TrialResult]] = {}
    for result in results:
        key = tuple((name, text) for name, text in result.params.items() if name not in over)
        groups.setdefault(key, []).append(result)

    def place(value: float | None) -> tuple[int, float]:
        """Return a sort key: finite values in the requested order, then NaN and inf, then None."""
        if value is None:
            return 2, 0.0
        if not math.isfinite(value):
            return 1, 0.0
        return 0, value if lowest_first else -value

    rows = [
        Row(
            dict(key),
            _summaries(group),
            dict(Counter(result.state for result in group)),
            min(group, key=lambda result: place(result.metrics.get(metric))).run,
            tuple(group),
        )
        for key, group in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: place(row.mean(metric))))


def lower_is_better(metric: str) -> bool:
    """Return whether a metric's name implies that lower is better: `val_loss`, `mse`."""
    return bool(_LOWER_IS_BETTER.search(metric)) and not _PER_TIME.search(metric)


def label(metric: str) -> str:
    """Return the display name of a metric: `test accuracy`, `training loss`, `train seconds`."""
    if metric in _REPORT_FIELDS and metric not in USUAL:
        return metric.replace("_", " ")
    name = metric.removeprefix(_TRAINING)
    return f"test {name}" if name == metric else f"training {name}"


def format_value(metric: str, value: float | None) -> str:
    """Format a value of a metric; accuracies in percent."""
    if metric.removeprefix(_TRAINING) == "accuracy":
        return formatting.percent(value)
    return "-" if value is None else f"{value:.5g}"


def order_of(report: SweepReport) -> str:
    """Return the order of the rows in words: `test accuracy, highest first; mean over seed`."""
    if not report.by and not ENDED.issuperset(report.counts):
        return "no trial has recorded a metric yet"
    if not report.by:
        way = ". Record one in your script with a Loop (docs/resumable.md)"
        return f"no trial has recorded a metric{way if RunState.DONE in report.counts else ''}"
    order = f"{label(report.by)}, {'lowest' if report.lowest_first else 'highest'} first"
    if not report.over:
        return order
    return f"{order}; mean and sample standard deviation of N trials over {', '.join(report.over)}"


def table_of(report: SweepReport) -> list[tuple[str, ...]]:
    """Return header and rows of the printed table, without line breaks in cells."""
    others = [
        name for name in (*USUAL, "train_seconds") if name in report.metrics and name != report.by
    ]
    stats = ("STD", "N") if report.over and report.by else ()
    heads = [_heading(name) for name in ([report.by] if report.by else [])]
    heads += [*stats, *map(_heading, others), "STATE"]
    if report.by or not report.over:  # no trial of several is the best without a metric
        heads.append("BEST-TRIAL" if report.over else "TRIAL")
    table = [(*report.names, *heads)]
    for row in report.rows:
        cells = [*row.params.values()]
        if report.by:
            cells.append(format_value(report.by, row.mean(report.by)))
        if stats:
            best = row.metrics.get(report.by, Summary(math.nan, None, 0))
            cells += [format_value(report.by, best.std), str(best.n)]
        cells += [format_value(name, row.mean(name)) for name in others]
        cells.append(row.state)
        if report.by or not report.over:
            is_known = not report.over or report.by in row.metrics
            cells.append(row.best_trial if is_known else "-")
        table.append(tuple(cells))
    return [tuple(map(formatting.line, cells)) for cells in table]


def as_csv(report: SweepReport) -> str:
    """Return the rows as CSV: swept names, then columns that contain a dot, unlike swept names."""
    columns = [f"{name}.{part}" for name in report.metrics for part in ("mean", "std", "n")]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    ours = ("trial.best", "trial.count", "trial.states")
    lines.writerow([*report.names, *map(formatting.line, columns), *ours])
    for row in report.rows:
        cells: list[object] = [*row.params.values()]
        for name in report.metrics:
            known = row.metrics.get(name)
            cells += (known.mean, known.std, known.n) if known else (None, None, 0)
        lines.writerow([*cells, row.best_trial, len(row.trials), row.state])
    return text.getvalue()


def curve(runs: Sequence[Sequence[Mapping[str, object]]], kind: str, metric: str) -> Curve:
    """Return a metric over steps, averaged over runs that differ in their seed.

    runs: lines of metrics in step order. Each run counts from its first to its last step; at the
    other runs' steps its value is interpolated.
    """
    each = [
        [*{step: value for line in lines for step, value in _values(line, kind, metric)}.items()]
        for lines in runs
    ]
    steps = sorted({step for points in each for step, _ in points})
    stride = -(-len(steps) // _MAX_STEPS) or 1
    drawn: Curve = []
    for step in steps[::-1][::stride][::-1]:
        values = [value for points in each if (value := _between(points, step)) is not None]
        drawn.append((step, statistics.fmean(values), min(values), max(values)))
    return drawn


def read_lines(path: Path, *, all_over: bool = False) -> list[dict[str, object]]:
    """Read the lines of metrics.jsonl in step order; an unreadable file has none.

    Returns all evaluation lines, and the latest training lines or, with `all_over`, a sample from
    the whole training.
    """
    try:
        lines = files.read_file(path).splitlines()
    except OSError:
        return []
    trained = [line for line in lines if b'"eval"' not in line]
    stride = -(-len(trained) // (2 * _MAX_STEPS)) or 1
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


def _metrics(run: RunDir, report: Report | None) -> dict[str, float]:
    """Return the latest value of each metric; report.json takes precedence."""
    metrics: dict[str, float] = {}
    for line in read_lines(run.metrics):
        prefix = "" if line["kind"] == "eval" else _TRAINING
        for name, content in line.items():
            value = None if name in _NO_METRICS else _number(content)
            if value is None or (not prefix and name in _TRAINING_FIELDS):
                continue
            metrics[_OWN_NAMES.get(name) or f"{prefix}{name}"] = value
    for name in _REPORT_FIELDS if report else ():
        value = _number(getattr(report, name))
        if value is not None:
            metrics[name] = value
    return metrics


def _without(swept: Sequence[str], metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop recorded values that have a swept name, such as the decayed `lr`.

    Accuracy, loss and the values of report.json stay: they are metrics whatever is swept.
    """
    names = {*swept, *(f"{_TRAINING}{name}" for name in swept if name not in USUAL)}
    return {n: v for n, v in metrics.items() if n not in names or n in _REPORT_FIELDS}


def _number(value: object) -> float | None:
    """Return a number, finite or not, as float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON integers are unbounded
        return None


def _summaries(group: Sequence[TrialResult]) -> dict[str, Summary]:
    names = dict.fromkeys(name for result in group for name in result.metrics)
    return {
        name: _summary([result.metrics[name] for result in group if name in result.metrics])
        for name in names
    }


def _summary(values: Sequence[float]) -> Summary:
    """Return mean and sample standard deviation; a diverged run makes the mean NaN."""
    if len(values) == 1:
        return Summary(values[0], None, 1)
    if not all(map(math.isfinite, values)):
        return Summary(math.nan, None, len(values))
    try:
        return Summary(statistics.fmean(values), statistics.stdev(values), len(values))
    except OverflowError:  # near the largest float
        return Summary(math.nan, None, len(values))


def _metric(asked: str, known: set[str], swept: Sequence[str]) -> str:
    """Return the metric that orders the rows: the requested or the most informative one."""
    if asked:
        found = next((name for name in (asked, f"{_TRAINING}{asked}") if name in known), "")
        if found or asked.removeprefix(_TRAINING) in USUAL:
            return found or asked
        names = formatting.join_limited(sorted(known), 20, ", ")
        choice = f"Recorded metrics: {names}" if known else "No metric is recorded yet"
        why = "is a swept option" if asked in swept else "is not recorded by any trial"
        raise OptionError("--by", f" {asked} {why}. {choice}.")
    usual = [*USUAL, *(f"{_TRAINING}{name}" for name in USUAL)]
    own = sorted(known - {*usual, *_REPORT_FIELDS})
    tested = [name for name in own if not name.startswith(_TRAINING)]
    order = [*USUAL, *tested, *usual, *own, *_REPORT_FIELDS]
    return next((name for name in order if name in known), "")


def _check_over(over: Sequence[str], names: Sequence[str]) -> None:
    for name in over:
        if name not in names:
            raise OptionError("--over", f" {name} is not swept. Swept: {', '.join(names)}.")


def _values(line: Mapping[str, object], kind: str, metric: str) -> list[tuple[int, float]]:
    """Return step and value if the line has a value that can be drawn; else an empty list."""
    value = files.number(line.get(metric)) if line.get("kind") == kind else None
    if value is None or not abs(value) < LARGEST:
        return []
    return [(int(files.number(line["step"]) or 0), value)]


def _between(points: Sequence[tuple[int, float]], step: int) -> float | None:
    """Return the value at a step by linear interpolation; None outside the run's steps."""
    index = bisect_left(points, step, key=lambda point: point[0])
    if index == len(points) or (index == 0 and points[0][0] > step):
        return None
    right, value = points[index]
    if right == step:
        return value
    left, before = points[index - 1]
    return before + (value - before) * (step - left) / (right - left)
