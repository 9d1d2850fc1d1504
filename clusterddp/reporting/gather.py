"""Gathers the records of a run into one account, which `clusterddp report` shows.

A missing or damaged record costs only its own figures.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import TypeVar

from clusterddp.errors import ClusterDDPError
from clusterddp.reporting.figures import (
    Confusion,
    Evaluation,
    Start,
    Straggler,
    rank_rates,
    read_evaluation,
    read_points,
    read_starts,
    stragglers,
)
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import files
from clusterddp.run.attempt import Attempt, latest
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.progress import latest_report
from clusterddp.run.records import EvaluationRecord, MetricsLine, RankReport, Report, Resolved
from clusterddp.run.run_dir import RunDir
from clusterddp.run.status import RunStatus

_MOST_CONFUSIONS = 20
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RunReport:
    """One run, as `clusterddp report --json` prints it; None where nothing is known.

    Figures are those of report.json. Without one, as of a run that is still running or has failed,
    they are the latest in metrics.jsonl, and `complete` is false.
    """

    name: str
    state: str
    """State in `clusterddp status`: queued, running, done, failed, and so on."""
    detail: str
    first_failure: str
    directory: str
    job_id: str
    launcher: str
    complete: bool
    command: list[str] = field(default_factory=list)
    """Command of a run that has no training of clusterddp."""
    model: str = ""
    dataset: str = ""
    strategy: str = ""
    parameters: int | None = None
    train_images: int | None = None
    test_images: int | None = None
    accuracy: float | None = None
    """Share on the test set, from 0 to 1."""
    loss: float | None = None
    train_loss: float | None = None
    """Latest value in metrics.jsonl."""
    step: int | None = None
    epoch: int | None = None
    train_seconds: float | None = None
    """Time of the training steps of all attempts."""
    total_seconds: float | None = None
    """Time of the latest attempt from its start to its end."""
    images_per_second: float | None = None
    """Speed of all ranks together."""
    world_size: int | None = None
    num_nodes: int | None = None
    hosts: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    """Devices of the ranks: `ranks 0-1 on h01: cpu`."""
    device: str = ""
    precision: str = ""
    backend: str = ""
    threads: int | None = None
    """Compute threads of each rank."""
    cuda_graph: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    """Largest of any rank: allocated by torch on a GPU, resident on a CPU."""
    ranks: list[RankReport] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    """Slow ranks, the slowest first."""
    starts: int = 0
    steps_done_twice: int = 0
    seconds_lost: float = 0.0
    attempts: list[Start] = field(default_factory=list)
    confusions: list[Confusion] = field(default_factory=list)
    """Most common mistakes on the test set, the most common first."""
    settings: dict[str, object] = field(default_factory=dict)
    """Fields of the training's configuration that differ from the defaults."""
    warnings: list[str] = field(default_factory=list)
    weights_sha256: str = ""
    finished: float | None = None
    """Time of the end, in seconds since the epoch."""


@dataclass(frozen=True)
class Gathered:
    """Report of a run, and the rest that the page draws."""

    run: RunDir
    report: RunReport
    points: list[MetricsLine]
    evaluation: Evaluation
    spec: JobSpec | None
    """None where the record is damaged."""


def gather(run: RunDir, status: RunStatus) -> Gathered:
    """Gather the account of a run, whose state is `status`, from all its records."""
    spec = _spec(run)
    attempt = _latest_attempt(run)
    final = latest_report(run, attempt.number if attempt else None)
    report = final or Report()
    resolved = files.read(Resolved, run.resolved) or Resolved(precision="")
    settled = report if report != Report() else resolved
    train = spec.train if spec else None
    points = read_points(run.metrics)
    last = points[-1] if points else MetricsLine()
    trained = next((point for point in reversed(points) if not point.tested), MetricsLine())
    tested = next((point for point in reversed(points) if point.tested), MetricsLine())
    step = _first(report.steps, last.step if points else None)
    evaluation = _evaluation(run, step)
    ranks = _ranks(report, points, attempt)
    starts = read_starts(run, final)
    if starts and not starts[-1].cause:
        starts[-1] = dataclasses.replace(starts[-1], cause=status.state)
    account = RunReport(
        name=status.name,
        state=status.state,
        detail=status.detail,
        first_failure=status.first_failure,
        directory=str(run.path.absolute()),
        job_id=status.job_id,
        launcher=status.launcher,
        complete=final is not None,
        command=list(spec.command) if spec else [],
        model=report.model or (train.model if train else ""),
        dataset=report.dataset or (train.dataset if train else ""),
        strategy=report.strategy or (train.strategy if train else ""),
        parameters=report.parameters,
        train_images=report.train_images,
        test_images=report.test_images,
        accuracy=_first(report.accuracy, tested.accuracy),
        loss=_first(report.loss, tested.loss),
        train_loss=trained.loss,
        step=step,
        epoch=_first(report.epochs, last.epoch),
        train_seconds=_first(report.train_seconds, last.seconds),
        total_seconds=report.total_seconds,
        images_per_second=_first(report.images_per_second, trained.images_per_second),
        world_size=settled.world_size or status.world_size,
        num_nodes=report.num_nodes or status.nodes,
        hosts=list(dict.fromkeys(settled.hosts)) or status.hosts,
        where=list(resolved.where),
        device=report.device or resolved.kind,
        precision=settled.precision,
        backend=settled.backend,
        threads=settled.threads or None,
        cuda_graph=settled.cuda_graph,
        versions={name: text for name, text in (report.versions or {}).items() if text},
        peak_memory_bytes=report.peak_memory_bytes,
        ranks=ranks,
        stragglers=stragglers(ranks),
        starts=report.starts or len(starts) or _started(status),
        steps_done_twice=sum(start.steps_done_twice for start in starts),
        seconds_lost=round(sum(start.seconds_lost for start in starts), 3),
        attempts=starts,
        confusions=evaluation.confusions()[:_MOST_CONFUSIONS],
        settings=changed_settings(train) if train else {},
        warnings=list(settled.warnings),
        weights_sha256=report.weights_sha256,
        finished=report.finished,
    )
    return Gathered(run, account, points, evaluation, spec)


def changed_settings(config: TrainConfig) -> dict[str, object]:
    """Return the fields of a configuration that differ from the defaults."""
    defaults = vars(TrainConfig())
    return {name: value for name, value in vars(config).items() if value != defaults[name]}


def _spec(run: RunDir) -> JobSpec | None:
    try:
        return run.load_spec()
    except ClusterDDPError:
        return None


def _latest_attempt(run: RunDir) -> Attempt | None:
    try:
        return latest(run)
    except OSError:
        return None


def _first(final: _Value | None, latest: _Value | None) -> _Value | None:
    """Prefer a figure of the report to the latest in the metrics."""
    return latest if final is None else final


def _started(status: RunStatus) -> int:
    """Count the starts of a run that left no attempt from its events."""
    return status.restarts + 1 if status.started_time else 0


def _evaluation(run: RunDir, step: int | None) -> Evaluation:
    """Read evaluation.json, unless the run has been resumed since."""
    record = files.read(EvaluationRecord, run.evaluation) or EvaluationRecord()
    return read_evaluation(record if record.step in (None, step) else EvaluationRecord())


def _ranks(report: Report, points: list[MetricsLine], attempt: Attempt | None) -> list[RankReport]:
    """Return each rank's speed from the report, or as far as metrics and outcomes have it."""
    if report.ranks:
        return sorted(report.ranks, key=lambda rank: rank.rank)
    rates = rank_rates(points)
    outcomes = read_outcomes(attempt.outcomes) if rates and attempt else []
    hosts = {outcome.rank: str(outcome.host) for outcome in outcomes}
    return [RankReport(rank, rate, hosts.get(rank, "")) for rank, rate in enumerate(rates)]
