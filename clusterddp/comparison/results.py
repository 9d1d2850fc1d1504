"""Computes the results of a comparison: rows, runs, medians, speed-up and efficiency."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from clusterddp import files, formatting, log
from clusterddp.errors import EXIT_INTERRUPTED, RequestError
from clusterddp.formatting import count
from clusterddp.reporting.gather import differences
from clusterddp.reporting.plots import Scaling, Size
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import STRATEGIES, TrainConfig
from clusterddp.run.records import Report
from clusterddp.run.run_dir import RunDir, find_runs
from clusterddp.status.find import find_run
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, latest_report, statuses

NOT_RUN = "not run"
INTERRUPTED = "interrupted"
_LAST_BYTES = 4096
_NAMES = "STRATEGY RANKS NODES TRAIN-TIME TOTAL-TIME IMAGES/S SPEEDUP EFFICIENCY TEST-ACCURACY"
_HEADER = f"{_NAMES} PEAK-MEMORY".split()
_IN_WORDS: dict[object, str] = {True: "CUDA graphs", False: "no CUDA graphs"}
_PLAIN_COLUMNS = 3  # columns of a row without figures
_MEDIANS = ("train_seconds", "total_seconds", "images_per_second", "accuracy")
_COUNTS = ("peak_memory_bytes", "steps", "threads", "train_images")
# The settings in which the rows of one comparison differ on purpose.
_ROW_FIELDS = {"strategy", "batch_size", "lr", "lr_scaling", "sync_batchnorm"}


@dataclass(frozen=True)
class Row:
    """One line of the table, before anything has run."""

    strategy: str
    devices: int
    """Ranks of ddp, GPUs that dp's one process drives; 1 of single."""
    train: TrainConfig
    nodes: int = 1
    missing: str = ""
    """Why it does not run: `needs 2 GPUs`."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Row":
        """Build the row of a run from its request. Raises RequestError for a command's."""
        if spec.train is None:
            raise RequestError(
                f"{spec.run_name} runs a COMMAND. Only runs of the built-in training can be "
                "compared. [CD0111]"
            )
        ranks, gpus = spec.world_size, spec.resources.gpus_per_node
        devices = max(gpus, 1) if spec.train.strategy == "dp" else ranks
        return cls(spec.train.strategy, devices, spec.train, spec.resources.nodes)

    @property
    def ranks(self) -> int:
        return self.devices if self.strategy == "ddp" else 1

    @property
    def name(self) -> str:
        """Name of its runs, after that of the comparison."""
        return self.strategy if self.strategy == "single" else f"{self.strategy}-{self.devices}"

    def images_of_a_device(self, train_images: int | None) -> int:
        """Count the images of a device in one optimizer step: its batch, or a smaller share.

        train_images: size of the training set; None where it is not known.
        """
        most = self.train.step_size
        if train_images:
            most = min(most, math.ceil(train_images / self.ranks))  # as training_order deals them
        return math.ceil(most / (self.devices if self.strategy == "dp" else 1))


@dataclass(frozen=True)
class RowRun:
    """One run of a row and its result, or the cause for which it was not run."""

    row: Row
    run: str = ""
    state: str = NOT_RUN
    """State of the run, NOT_RUN or INTERRUPTED."""
    why: str = ""
    report: Report | None = None


@dataclass(frozen=True, kw_only=True)
class RowSummary:
    """One line of the table, as --json prints it.

    Values are medians over the runs that are done, None where nothing is known.
    """

    strategy: str
    ranks: int
    devices: int
    """Ranks of ddp, GPUs of dp's one process; 1 of single."""
    nodes: int
    state: str
    """`done` when all of its runs are; else the state of the first that is not."""
    why: str
    runs: tuple[str, ...]
    train_seconds: float | None = None
    """Time of the training steps only."""
    total_seconds: float | None = None
    """Time from a task's start to its end."""
    images_per_second: float | None = None
    """Speed of all devices together."""
    images_per_second_by_run: tuple[float, ...]
    """Speed of every run."""
    accuracy: float | None = None
    """Accuracy on the test set."""
    peak_memory_bytes: int | None = None
    """Largest of any rank: torch's on a GPU, the resident set on a CPU."""
    steps: int | None = None
    images_per_device: int
    """Images of a device in one optimizer step: its batch, or its share of a smaller dataset."""
    threads: int | None = None
    """Compute threads of each rank."""
    speedup: float | None = None
    """Images per second relative to the baseline."""
    efficiency: float | None = None
    """Speed-up divided by the ideal speed-up; 1.0 is perfect scaling."""
    baseline: bool = False
    """True for the line against which the others are measured."""


def label(row: Row | RowSummary) -> str:
    """Name a row: `ddp, 2 ranks`."""
    if row.strategy == "single":
        return row.strategy
    return f"{row.strategy}, {count(row.devices, 'GPU' if row.strategy == 'dp' else 'rank')}"


def results(trials: Sequence[RowRun]) -> list[RowSummary]:
    """Summarize the trials of each row: single first, then dp, then ddp.

    The baseline is single, or if it has no figures the row with the fewest devices.
    """
    by_row: dict[Row, list[RowRun]] = {}
    for trial in trials:
        by_row.setdefault(trial.row, []).append(trial)
    order = sorted(by_row, key=lambda row: (-STRATEGIES.index(row.strategy), row.devices))
    lines = [_medians(row, by_row[row]) for row in order]
    measured = [line for line in lines if line.images_per_second]
    if not measured:
        return lines
    base = min(measured, key=lambda line: line.devices)  # of equals the first, which is single
    rate = base.images_per_second or 0.0
    return [
        replace(
            line,
            speedup=line.images_per_second / rate,
            efficiency=line.images_per_second / line.devices / (rate / base.devices),
            baseline=line is base,
        )
        if line.images_per_second
        else line
        for line in lines
    ]


def scaling(lines: Sequence[RowSummary], title: str) -> Scaling:
    """Return the runs of the lines with figures, for `reporting.plots` to draw."""
    measured = [line for line in lines if line.images_per_second]
    base = next(line for line in measured if line.baseline)
    sizes = [
        Size(label(line), line.devices, rate, line.strategy)
        for line in measured
        for rate in line.images_per_second_by_run
    ]
    return Scaling(title, sizes, (base.images_per_second or 0.0) / base.devices, unit="devices")


def _medians(row: Row, trials: Sequence[RowRun]) -> RowSummary:
    done = [trial for trial in trials if trial.state == RunState.DONE]
    short = next((trial for trial in trials if trial.state != RunState.DONE), None)
    why = short.why if short else ""
    if short and done:
        why = f"{len(trials) - len(done)} of {len(trials)}{': ' if why else ''}{why}"

    reports = [trial.report for trial in done if trial.report]
    known = {
        name: [value for report in reports if (value := getattr(report, name)) is not None]
        for name in (*_MEDIANS, *_COUNTS)
    }
    counts = {name: round(median(known[name])) for name in _COUNTS if known[name]}
    train_images = counts.pop("train_images", None)
    return RowSummary(
        strategy=row.strategy,
        ranks=row.ranks,
        devices=row.devices,
        nodes=row.nodes,
        state=short.state if short else RunState.DONE,
        why=why,
        runs=tuple(trial.run for trial in trials if trial.run),
        images_per_second_by_run=tuple(known["images_per_second"]),
        images_per_device=row.images_of_a_device(train_images),
        **{name: median(known[name]) for name in _MEDIANS if known[name]},
        **counts,
    )


def trials_of(root: Path, texts: Sequence[str]) -> list[RowRun]:
    """Read the results of runs; each text names a comparison, or a run as `find_run` takes it.

    A run of a comparison with a damaged request is left out, which is logged. Raises RequestError
    where there is no run, or one that trains nothing.
    """
    known = find_runs(root)
    rows: dict[Path, tuple[Row, RunDir]] = {}
    for text in texts:
        of_it = re.compile(re.escape(text) + r"-(single|d?dp-\d+)(-r\d+)?")
        named = [run for run in known if of_it.fullmatch(run.name)]
        named = named or [find_run(root, text)]
        damaged: list[RequestError] = []
        for run in named:
            try:
                rows[run.path] = Row.of(run.load_spec()), run
            except RequestError as error:
                damaged.append(error)
        if len(damaged) == len(named):
            raise damaged[0]
        for why in damaged:
            log.info(f"left out: {why}")
    current = statuses([run for _, run in rows.values()])
    return [
        trial(row, run, status) for (row, run), status in zip(rows.values(), current, strict=True)
    ]


def trial(row: Row, run: RunDir, status: RunStatus) -> RowRun:
    """Read the result of a run."""
    if status.state == RunState.DONE:
        report = latest_report(run, status.attempt)
        if row.strategy == "dp" and report and report.device == "cpu":
            return RowRun(
                row, run.name, RunState.FAILED, "it saw no GPU, and the CPU has no DataParallel"
            )
        return RowRun(row, run.name, RunState.DONE, report=report)
    if status.exit_code == EXIT_INTERRUPTED:
        return RowRun(row, run.name, INTERRUPTED)
    return RowRun(row, run.name, status.state, _why(run, status))


def last_words(run: RunDir) -> str:
    """Return the last line printed by a run's only or controlling process."""
    contents = (files.read_tail(path, _LAST_BYTES) for path in (run.job_log, run.rank_log(0)))
    lines = [content.decode(errors="replace").strip().splitlines() for content in contents]
    return next((printed[-1] for printed in lines if printed), "")


def _why(run: RunDir, status: RunStatus) -> str:
    cause = status.first_failure
    # The only rank of a process leaves no other record of its error.
    if not cause and status.launcher == "local" and re.fullmatch(r"exit code \d+", status.detail):
        cause = last_words(run)
    return (cause or status.detail).partition("\n")[0]


def table(lines: Sequence[RowSummary]) -> str:
    """Format the table; a row without figures shows the cause instead."""
    rows = [_HEADER, *(_cells(line) for line in lines)]
    full = [row for row in rows if len(row) >= len(_HEADER)]
    widths = [
        max(len(row[column]) for row in (rows if column < _PLAIN_COLUMNS else full))
        for column in range(len(_HEADER))
    ]
    return "\n".join(_line(row, widths) for row in rows)


def notes(trials: Sequence[RowRun], lines: Sequence[RowSummary], hardware: str) -> list[str]:
    """List the conditions of the figures, one or two sentences per note.

    hardware: CPU or GPU models if known; the runs do not report them.
    """
    reports = [trial.report for trial in trials if trial.state == RunState.DONE and trial.report]
    measured = [line for line in lines if line.images_per_second is not None]
    base = next((line for line in measured if line.baseline), None)
    if not reports or base is None:
        return []
    hosts = list(dict.fromkeys(host for report in reports for host in report.hosts))
    first = trials[0].row.train
    where = formatting.join_limited(hosts, 8, ", ") + (f" ({hardware})" if hardware else "")
    lines_of_text = [
        f"on {where}: {_each(reports, 'device')}, "
        f"{_each(reports, 'precision')}{_graphs(reports)}, "
        f"threads per rank {_each(reports, 'threads')}, "
        f"torch {', '.join(_once((report.versions or {}).get('torch') for report in reports))}",
        f"{first.model} on {first.dataset}, {_batch(measured)}; steps {_each(reports, 'steps')}",
        f"speedup: images/s relative to {label(base)}; efficiency: speedup per device",
        f"train time: the training steps{_capture(reports)}; total time: a task from start to end; "
        "peak memory: the largest of any rank",
    ]
    if any(len(line.images_per_second_by_run) > 1 for line in lines):
        lines_of_text.append("several runs per row: medians, for images/s with minimum and maximum")
    shares = {line.threads for line in lines if line.threads}
    if len(shares) > 1 and not first.threads and "cuda" not in _each(reports, "device"):
        lines_of_text.append(
            "the ranks had unequal shares of the CPUs, all of them when there was one rank: "
            "--threads 1 compares device with device"
        )
    lines_of_text += _describe_differences(trials)
    settings = [name for name, _ in differences([trial.row.train for trial in trials])]
    different = [f"--{name.replace('_', '-')}" for name in settings if name not in _ROW_FIELDS]
    if different:
        lines_of_text.append(f"the runs differ in {', '.join(different)}")
    return [formatting.line(note) for note in lines_of_text]


def _graphs(reports: Sequence[Report]) -> str:
    """Describe whether GPU steps are CUDA graphs; empty if rows differ or ran on CPUs."""
    used = {report.cuda_graph for report in reports if report.device == "cuda"}
    if len(used) != 1:
        return ""
    return ", every step a CUDA graph" if True in used else ", no CUDA graphs"


def _capture(reports: Sequence[Report]) -> str:
    """Describe the time that GPUs need to prepare the first step, which no row includes."""
    known = [each.capture_seconds for each in reports if each.device == "cuda"]
    seconds = [each for each in known if each is not None]
    if not seconds:
        return ""
    spread = "" if max(seconds) == min(seconds) else f"{min(seconds):.2f} to "
    return f", without the preparation of the first ({spread}{max(seconds):.2f} s)"


def _describe_differences(trials: Sequence[RowRun]) -> list[str]:
    """Report rows in which `auto` resolved differently: the comparison is not fair then."""
    told = []
    for name, remedy in (("precision", "one --precision"), ("cuda_graph", "--cuda-graph off")):
        of_rows: dict[object, list[str]] = {}
        for trial in trials:
            value = getattr(trial.report, name, "") if trial.state == RunState.DONE else ""
            if value not in ("", None):
                of_rows.setdefault(_IN_WORDS.get(value, value), []).append(label(trial.row))
        if len(of_rows) > 1:
            parts = (f"{value} in {', '.join(_once(rows))}" for value, rows in of_rows.items())
            told.append(f"the rows are not alike: {'; '.join(parts)}. Compare with {remedy}")
    return told


def figures(trial: RowRun) -> str:
    """Format speed and accuracy of a run in one line."""
    [line] = results([trial])
    if line.images_per_second is None:
        return _state(line)
    accuracy = f", test accuracy {line.accuracy:.2%}" if line.accuracy is not None else ""
    return f"{line.images_per_second:,.0f} images/s{accuracy}"


def _state(line: RowSummary) -> str:
    return formatting.line(f"{line.state}: {line.why}" if line.why else line.state)


def _cells(line: RowSummary) -> list[str]:
    ranks = f"1 ({line.devices} GPUs)" if line.strategy == "dp" else str(line.ranks)
    begin = [line.strategy, ranks, str(line.nodes)]
    if line.images_per_second is None:
        return [*begin, _state(line)]
    rate = f"{line.images_per_second:,.0f}"
    if len(line.images_per_second_by_run) > 1:
        least, greatest = min(line.images_per_second_by_run), max(line.images_per_second_by_run)
        rate += f" ({least:,.0f} to {greatest:,.0f})"
    cells = [
        *begin,
        _text(line.train_seconds, "{:,.2f} s"),
        _text(line.total_seconds, "{:,.1f} s"),
        rate,
        _text(line.speedup, "{:.2f}"),
        _text(line.efficiency, "{:.0%}"),
        formatting.percent(line.accuracy),
        formatting.memory(line.peak_memory_bytes),
    ]
    return cells if line.state == RunState.DONE else [*cells, _state(line)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Align words left and figures right; a cell beyond the columns stays unaligned."""
    padded = widths if len(cells) >= len(widths) else widths[:_PLAIN_COLUMNS]
    shown = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, padded, strict=False))
    ]
    return "  ".join([*shown, *cells[len(padded) :]])


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _batch(lines: Sequence[RowSummary]) -> str:
    each = {line.images_per_device for line in lines}
    together = {line.images_per_device * line.devices for line in lines}
    if len(each) == 1:
        return f"{count(each.pop(), 'image')} per device and step: N devices take N times as many"
    if len(together) == 1:
        return f"{count(together.pop(), 'image')} per step, divided among the devices"
    return f"{', '.join(map(str, sorted(each)))} images per device and step"


def _each(reports: Sequence[Report], name: str) -> str:
    return ", ".join(_once(getattr(report, name) for report in reports))


def _once(values: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value not in (None, "")))
