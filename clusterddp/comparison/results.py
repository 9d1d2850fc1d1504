"""Results of a comparison: its runs as they stand, their medians, speed-up and efficiency."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from clusterddp import log
from clusterddp.comparison.plan import Row, label
from clusterddp.errors import EXIT_INTERRUPTED, RequestError
from clusterddp.reporting.plots import Scaling, Size, efficiency
from clusterddp.request.train_config import STRATEGIES
from clusterddp.run.progress import latest_report
from clusterddp.run.records import Report
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import FAILED
from clusterddp.run.status import RunStatus, all_runs, find_run, statuses

DONE = "done"
NOT_RUN = "not run"
INTERRUPTED = "interrupted"
_LAST_BYTES = 4096


@dataclass(frozen=True)
class Trial:
    """One run of a row and its result, or the cause for which it was not run."""

    row: Row
    run: str = ""
    state: str = NOT_RUN
    """State of the run, NOT_RUN or INTERRUPTED."""
    why: str = ""
    report: Report | None = None


@dataclass(frozen=True)
class Result:
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
    train_seconds: float | None
    """Time of the training steps alone."""
    total_seconds: float | None
    """Time from a task's start to its end."""
    images_per_second: float | None
    """Speed of all devices together."""
    images_per_second_each: tuple[float, ...]
    """Speed of every run."""
    accuracy: float | None
    """Accuracy on the test set."""
    peak_memory_bytes: int | None
    """Largest of any rank: torch's on a GPU, the resident set on a CPU."""
    steps: int | None
    images_per_device: int
    """Images of a device in one optimizer step: its batch, or its share of a smaller dataset."""
    threads: int | None
    """Compute threads of each rank."""
    speed_up: float | None = None
    """Images per second over those of the baseline."""
    efficiency: float | None = None
    """Speed-up over that of perfect scaling."""
    baseline: bool = False
    """True for the line against which the others are measured."""

    @property
    def label(self) -> str:
        return label(self.strategy, self.devices)


def results(trials: Sequence[Trial]) -> list[Result]:
    """Sum up the trials of each row in a line: single first, then dp, then ddp.

    The baseline is single, or where it has no figures the row on the fewest devices.
    """
    by_row: dict[Row, list[Trial]] = {}
    for trial in trials:
        by_row.setdefault(trial.row, []).append(trial)
    order = sorted(by_row, key=lambda row: (-STRATEGIES.index(row.strategy), row.devices))
    lines = [_medians(row, by_row[row]) for row in order]
    measured = [line for line in lines if line.images_per_second]
    if not measured:
        return lines
    base = min(measured, key=lambda line: line.devices)  # of equals the first, which is single
    return [_against(base, line) for line in lines]


def scaling(lines: Sequence[Result], title: str) -> Scaling:
    """Return the runs of the lines with figures, for `reporting.plots` to draw."""
    measured = [line for line in lines if line.images_per_second]
    base = next(line for line in measured if line.baseline)
    of_one = (base.images_per_second or 0.0) / base.devices
    sizes = [
        Size(line.label, line.devices, rate, efficiency(rate, line.devices, of_one), line.strategy)
        for line in measured
        for rate in line.images_per_second_each
    ]
    return Scaling(title, sizes, unit="devices")


def _medians(row: Row, trials: Sequence[Trial]) -> Result:
    done = [trial for trial in trials if trial.state == DONE]
    short = next((trial for trial in trials if trial.state != DONE), None)
    why = short.why if short else ""
    if short and done:
        why = f"{len(trials) - len(done)} of {len(trials)}{': ' if why else ''}{why}"

    def values(name: str) -> list[float]:
        known = (getattr(trial.report, name) for trial in done if trial.report)
        return [value for value in known if value is not None]

    def middle(name: str) -> float | None:
        known = values(name)
        return median(known) if known else None

    def whole(name: str) -> int | None:
        value = middle(name)
        return None if value is None else round(value)

    return Result(
        strategy=row.strategy,
        ranks=row.ranks,
        devices=row.devices,
        nodes=row.nodes,
        state=short.state if short else DONE,
        why=why,
        runs=tuple(trial.run for trial in trials if trial.run),
        train_seconds=middle("train_seconds"),
        total_seconds=middle("total_seconds"),
        images_per_second=middle("images_per_second"),
        images_per_second_each=tuple(values("images_per_second")),
        accuracy=middle("accuracy"),
        peak_memory_bytes=whole("peak_memory_bytes"),
        steps=whole("steps"),
        images_per_device=row.images_of_a_device(whole("train_images")),
        threads=whole("threads"),
    )


def _against(base: Result, line: Result) -> Result:
    if not line.images_per_second or not base.images_per_second:
        return line
    of_one = base.images_per_second / base.devices
    return replace(
        line,
        speed_up=line.images_per_second / base.images_per_second,
        efficiency=efficiency(line.images_per_second, line.devices, of_one),
        baseline=line is base,
    )


def trials_of(root: Path, texts: Sequence[str]) -> list[Trial]:
    """Read the results of runs; each text names a comparison, or a run as `find_run` takes it.

    A run of a comparison with a damaged request is left out, which is logged. Raises RequestError
    where there is no run, or one that trains nothing.
    """
    known = all_runs(root)
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


def trial(row: Row, run: RunDir, status: RunStatus) -> Trial:
    """Read the result of a run."""
    if status.state == DONE:
        report = latest_report(run, status.attempt)
        if row.strategy == "dp" and report and report.device == "cpu":
            return Trial(row, run.name, FAILED, "it saw no GPU, and the CPU has no DataParallel")
        return Trial(row, run.name, DONE, report=report)
    if status.exit_code == EXIT_INTERRUPTED:
        return Trial(row, run.name, INTERRUPTED)
    return Trial(row, run.name, status.state, _why(run, status))


def last_words(run: RunDir) -> str:
    """Return the last line printed by a run's only or controlling process."""
    return _last_line(run.job_log) or _last_line(run.rank_log(0))


def _why(run: RunDir, status: RunStatus) -> str:
    cause = status.first_failure
    # The only rank of a process leaves no other record of its error.
    if not cause and status.launcher == "local" and re.fullmatch(r"exit code \d+", status.detail):
        cause = last_words(run)
    return (cause or status.detail).partition("\n")[0]


def _last_line(path: Path) -> str:
    try:
        content = path.read_bytes()[-_LAST_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
    return content.splitlines()[-1] if content else ""
