"""Gathers the records of a run for `clusterddp report`.

Covers the training curve, each rank's throughput, stragglers, the errors of the last evaluation and
the attempts. A missing or damaged record removes only its own figures.
"""

import base64
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from clusterddp import files
from clusterddp.files import read_lines
from clusterddp.reporting.usage import measure_usage
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import records
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.events import Cause, Ended
from clusterddp.run.history import History
from clusterddp.run.outcome import first_failure, read_outcomes
from clusterddp.run.run_dir import RunDir
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, coalesce, latest_report

_MAX_SIDE = 512
_MAX_CONFUSIONS = 20
_STATUS = (
    *("name", "state", "detail", "first_failure", "directory", "job_id", "launcher", "preflight"),
    "switches",
)
_NOT_PRINTED = ("steps", "epochs", "resumed_from", "attempt", "saving", "restart")
"""Fields of report.json that have another name here, or describe only the latest attempt."""


@dataclass(frozen=True)
class Straggler:
    """Rank that is clearly slower than the others."""

    rank: int
    host: str
    images_per_second: float
    median_of_others: float

    def describe(self) -> str:
        """Return `rank 3 on h02: 812 images/s, 61% of the other ranks' median, 1,330`."""
        host = f" on {self.host}" if self.host else ""
        part = self.images_per_second / self.median_of_others
        return (
            f"rank {self.rank}{host}: {self.images_per_second:,.0f} images/s, {part:.0%} of the "
            f"other ranks' median, {self.median_of_others:,.0f}"
        )


@dataclass(frozen=True)
class Confusion:
    """Pair of a true and a predicted class, with its count."""

    label: int
    predicted: int
    count: int

    def describe(self) -> str:
        """Return `4 predicted as 9: 12 times`."""
        times = "once" if self.count == 1 else f"{self.count:,} times"
        return f"{self.label} predicted as {self.predicted}: {times}"


@dataclass(frozen=True)
class Evaluation:
    """Valid content of evaluation.json."""

    matrix: list[list[int]]
    """Counts: one row per true class, one column per predicted class; empty if not recorded."""
    worst: list[tuple[records.WorstImage, bytes]]
    """Images with the highest loss and their grey values, row by row."""

    def confusions(self) -> list[Confusion]:
        """List the misclassifications, most frequent first."""
        pairs = [
            Confusion(label, predicted, count)
            for label, row in enumerate(self.matrix)
            for predicted, count in enumerate(row)
            if label != predicted and count > 0
        ]
        return sorted(pairs, key=lambda each: (-each.count, each.label, each.predicted))


@dataclass(frozen=True)
class RunReport:
    """One run, as `clusterddp report --json` prints it; unknown values are None."""

    status: RunStatus
    figures: records.Report
    """Content of report.json. If a run has none (it is running, or failed), the latest figures in
    metrics.jsonl; `complete` is false then."""
    complete: bool
    command: list[str] = field(default_factory=list)
    """COMMAND of a run without the built-in training."""
    train_loss: float | None = None
    """Latest value in metrics.jsonl."""
    where: list[str] = field(default_factory=list)
    """Devices of the ranks: `ranks 0-1 on h01: cpu`."""
    stragglers: list[Straggler] = field(default_factory=list)
    """Slow ranks, slowest first."""
    attempts: list[records.AttemptSummary] = field(default_factory=list)
    confusions: list[Confusion] = field(default_factory=list)
    """Most frequent misclassifications on the test set, most frequent first."""
    settings: dict[str, object] = field(default_factory=dict)
    """Training options that differ from the defaults."""

    def as_dict(self) -> dict[str, object]:
        """Return the content of --json, flattened to one level."""
        own = asdict(self)
        status, figures = own.pop("status"), own.pop("figures")
        figures |= {"step": figures["steps"], "epoch": figures["epochs"]}
        of_status = {name: status[name] for name in _STATUS}
        left = {name: figures[name] for name in figures if name not in (*_STATUS, *_NOT_PRINTED)}
        return {**of_status, **left, **own}


@dataclass(frozen=True)
class Gathered:
    """Report of a run, and the other records that the page shows."""

    run: RunDir
    report: RunReport
    points: list[records.MetricsLine]
    evaluation: Evaluation
    spec: JobSpec | None
    """None if the record is damaged."""


def gather(run: RunDir, status: RunStatus) -> Gathered:
    """Gather the report of a run, whose state is `status`, from all its records."""
    spec = run.read_spec()
    known: list[Attempt] = []
    history = History(run, ())
    with contextlib.suppress(OSError):
        known, history = attempts(run), History.read(run)
    final = latest_report(run, known[-1].number if known else None)
    points = read_points(run.metrics)
    resolved = files.read(records.Agreement, run.resolved) or records.Agreement(precision="")
    report = final or records.Report()
    ranks = _ranks(report, points, known)
    past = _summaries(report.attempts or (history.summaries() if known else ()), known, history)
    if past and not past[-1].cause:
        past[-1] = replace(past[-1], cause=status.state)
    figures = _figures(report, points, resolved, status, spec.train if spec else None)
    figures = replace(
        figures,
        ranks=tuple(ranks),
        num_attempts=report.num_attempts
        or len(past)
        or (status.restarts + 1 if status.started_time else 0),
        repeated_steps=sum(each.repeated_steps for each in past),
        lost_seconds=round(sum(each.lost_seconds for each in past), 3),
        usage=_usage(history, spec, status),
    )
    evaluation = _evaluation(run, figures.steps)
    gathered = RunReport(
        replace(status, directory=str(run.path.absolute())),
        figures,
        complete=final is not None,
        command=list(spec.command) if spec else [],
        train_loss=_latest(points, tested=False).loss,
        where=list(resolved.where),
        stragglers=stragglers(ranks, None if report.ranks else usual_of_many(points)),
        attempts=past,
        confusions=evaluation.confusions()[:_MAX_CONFUSIONS],
        settings=changed_settings(spec.program.options) if spec else {},
    )
    return Gathered(run, gathered, points, evaluation, spec)


def _figures(
    report: records.Report,
    points: list[records.MetricsLine],
    resolved: records.Agreement,
    status: RunStatus,
    train: TrainConfig | None,
) -> records.Report:
    """Fill gaps in report.json from the metrics, the ranks' agreement and the request."""
    settled = report if report != records.Report() else resolved
    last = points[-1] if points else records.MetricsLine()
    trained, tested = _latest(points, tested=False), _latest(points, tested=True)
    return replace(
        report,
        model=report.model or (train.model if train else ""),
        dataset=report.dataset or (train.dataset if train else ""),
        strategy=report.strategy or (train.strategy if train else ""),
        accuracy=coalesce(report.accuracy, tested.accuracy),
        loss=coalesce(report.loss, tested.loss),
        steps=coalesce(report.steps, last.step if points else None),
        epochs=coalesce(report.epochs, last.epoch),
        train_seconds=coalesce(report.train_seconds, last.seconds),
        images_per_second=coalesce(report.images_per_second, trained.images_per_second),
        world_size=settled.world_size or status.world_size,
        num_nodes=report.num_nodes or status.nodes,
        hosts=tuple(dict.fromkeys(settled.hosts)) or tuple(status.hosts),
        device=report.device or resolved.kind,
        precision=settled.precision,
        backend=settled.backend,
        threads=settled.threads or None,
        cuda_graph=settled.cuda_graph,
        versions={name: text for name, text in (report.versions or {}).items() if text},
        warnings=settled.warnings,
    )


def _latest(points: Sequence[records.MetricsLine], *, tested: bool) -> records.MetricsLine:
    """Return the latest training line, or with `tested` the latest evaluation line."""
    of_kind = (point for point in reversed(points) if point.tested == tested)
    return next(of_kind, records.MetricsLine())


def _usage(history: History, spec: JobSpec | None, status: RunStatus) -> records.Usage | None:
    until = time.time() if status.state == RunState.RUNNING else None
    with contextlib.suppress(OSError):
        return measure_usage(history, spec, until=until)
    return None


def changed_settings(options: Mapping[str, object]) -> dict[str, object]:
    """Return the training options that differ from the defaults."""
    return {name: value for name, value in options.items() if value != getattr(TrainConfig, name)}


def differences(configs: Sequence[TrainConfig]) -> list[tuple[str, list[object]]]:
    """List the fields in which configurations differ, with the value in each configuration."""
    rows = [(name, [getattr(config, name) for config in configs]) for name in vars(TrainConfig())]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]


def _evaluation(run: RunDir, step: int | None) -> Evaluation:
    """Read evaluation.json, unless the run has resumed since then."""
    record = files.read(records.EvaluationRecord, run.evaluation) or records.EvaluationRecord()
    return read_evaluation(record if record.step in (None, step) else records.EvaluationRecord())


def _ranks(
    report: records.Report, points: list[records.MetricsLine], known: Sequence[Attempt]
) -> list[records.RankReport]:
    """Return each rank's throughput from the report, or else from metrics and outcomes."""
    if report.ranks:
        return sorted(report.ranks, key=lambda rank: rank.rank)
    rates = rank_rates(points)
    outcomes = read_outcomes(known[-1].outcomes) if rates and known else []
    hosts = {outcome.rank: str(outcome.host) for outcome in outcomes}
    return [records.RankReport(rank, rate, hosts.get(rank, "")) for rank, rate in rates.items()]


def read_points(path: Path) -> list[records.MetricsLine]:
    """Read the lines of metrics in step order; an unreadable file has none."""
    try:
        lines = list(read_lines(records.MetricsLine, path))
    except OSError:
        return []
    known = [line for line in lines if line.step >= 0 and line.kind in ("train", "eval")]
    return sorted(known, key=lambda line: line.step)


def rank_rates(points: list[records.MetricsLine]) -> dict[int, float | None]:
    """Return the ranks' median images/s over the training; None if not measured.

    With many ranks, it returns the ranks that are among the slowest in at least half of the lines.
    """
    rows = [point for point in points if not point.tested and point.ranks]
    rows = [row for row in rows if row.ranks == rows[-1].ranks]  # attempts may differ in world size
    columns: dict[int, list[float | None]] = {}
    for row in rows:
        for rank, rate in row.rates.items():
            columns.setdefault(rank, []).append(rate)
    often = {rank: column for rank, column in columns.items() if 2 * len(column) >= len(rows)}
    known = {rank: [each for each in often[rank] if each is not None] for rank in sorted(often)}
    return {rank: median(column) if column else None for rank, column in known.items()}


def usual_of_many(points: list[records.MetricsLine]) -> float | None:
    """Return the median rank's images/s over the training, if the lines name only the slowest."""
    spreads = [point.rank_spread.median for point in points if point.rank_spread]
    return median(spreads) if spreads else None


def stragglers(
    ranks: Sequence[records.RankReport], usual_of_many: float | None = None
) -> list[Straggler]:
    """List the ranks below SLOW times the other ranks' median images/s, slowest first.

    usual_of_many: the median of all ranks, if `ranks` are only the slowest.
    """
    known = sorted(
        (rank.images_per_second, rank.rank, rank.host)
        for rank in ranks
        if rank.images_per_second is not None
    )
    rates = [rate for rate, _, _ in known]
    slow = []
    for index, (rate, number, host) in enumerate(known):
        others = [usual_of_many] if usual_of_many else rates[:index] + rates[index + 1 :]
        if not others or rate >= records.SLOW * (usual := median(others)):
            break  # the list is sorted: all further ranks are faster
        slow.append(Straggler(number, host, rate, usual))
    return slow


def read_evaluation(record: records.EvaluationRecord) -> Evaluation:
    """Return the valid part of the record."""
    matrix = [[count for count in row if count is not None] for row in record.confusion]
    is_square = all(len(row) == len(matrix) for row in matrix)
    images = [(image, grey) for image in record.worst if (grey := _grey_values(image))]
    return Evaluation(matrix if is_square else [], images)


def _grey_values(record: records.WorstImage) -> bytes | None:
    """Decode an image; None if its record is damaged."""
    try:
        pixels = base64.b64decode(record.pixels, validate=True)
        height, width = record.shape
    except ValueError:  # binascii.Error is one
        return None
    sound = 0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE
    return pixels if sound and len(pixels) == height * width else None


def _summaries(
    recorded: Sequence[records.AttemptSummary], known: Sequence[Attempt], history: History
) -> list[records.AttemptSummary]:
    """List the attempts of a run, latest last; `known` are the attempts with a directory."""
    summaries = {each.attempt: each for each in recorded}
    ends = {event.attempt: event for event in history.every(Ended)}
    for attempt in known:
        summary = summaries.get(attempt.number) or records.AttemptSummary(attempt.number)
        end = ends.get(attempt.number) or Ended()
        summaries[attempt.number] = _add_cause(summary, attempt, end)
    return [summaries[number] for number in sorted(summaries)]


def _add_cause(
    summary: records.AttemptSummary, attempt: Attempt, end: Ended
) -> records.AttemptSummary:
    """Add the cause that the attempt itself recorded, if it explains more.

    end: event of its end; without one the ranks' records say which failed first.
    """
    if summary.cause not in ("", "killed", "failed", "stopped"):
        return summary
    final_record = attempt.read_final_record()
    if final_record and final_record.cause not in ("", "failed"):
        return replace(summary, cause=final_record.cause, why=final_record.reason)
    failure = end.first_failure
    if not (failure or end.cause):
        failure = first_failure(read_outcomes(attempt.outcomes))
    cause = end.cause or (Cause.FAILED if failure else summary.cause)
    why = failure.describe() if failure and cause == Cause.FAILED else end.how
    return replace(summary, cause=cause, why=why or summary.why)
