"""One account of a run from all its records: what `clusterddp report` shows of it.

A record that is absent or damaged takes nothing from what the others tell.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from clusterddp.errors import ClusterDDPError
from clusterddp.reporting.figures import (
    Confusion,
    Evaluation,
    Rank,
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
from clusterddp.run.records import EvaluationRecord, MetricsLine, Report, Resolved
from clusterddp.run.run_dir import RunDir
from clusterddp.run.status import RunStatus

_MOST_CONFUSIONS = 20


@dataclass(frozen=True)
class RunReport:
    """One run, as `clusterddp report --json` prints it; None where nothing is known.

    Figures are those of report.json. Without one, as of a run that is still running or has failed,
    they are the latest in metrics.jsonl, and `complete` is false.
    """

    name: str
    state: str
    """As `clusterddp status` tells it: queued, running, done, failed, and so on."""
    detail: str
    first_failure: str
    directory: str
    job_id: str
    launcher: str
    complete: bool
    command: list[str] = field(default_factory=list)
    """Of a run that does not train here but runs a person's own command."""
    model: str = ""
    dataset: str = ""
    strategy: str = ""
    parameters: int | None = None
    train_images: int | None = None
    test_images: int | None = None
    accuracy: float | None = None
    """On the test set, from 0 to 1; so is the loss."""
    loss: float | None = None
    train_loss: float | None = None
    """The latest in metrics.jsonl."""
    step: int | None = None
    epoch: int | None = None
    train_seconds: float | None = None
    """Training steps of all attempts."""
    total_seconds: float | None = None
    """The latest attempt from its start to its end."""
    images_per_second: float | None = None
    """Of all ranks together."""
    world_size: int | None = None
    num_nodes: int | None = None
    hosts: list[str] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    """What each rank ran on: `ranks 0-1 on h01: cpu`."""
    device: str = ""
    precision: str = ""
    backend: str = ""
    threads: int | None = None
    """Compute threads of each rank."""
    cuda_graph: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    """The largest of any rank: allocated by torch on a GPU, resident on a CPU."""
    ranks: list[Rank] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    """The slowest first."""
    starts: int = 0
    steps_done_twice: int = 0
    seconds_lost: float = 0.0
    attempts: list[Start] = field(default_factory=list)
    confusions: list[Confusion] = field(default_factory=list)
    """The most common mistakes on the test set, the most common first."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What of the training's configuration is not as by default."""
    warnings: list[str] = field(default_factory=list)
    weights_sha256: str = ""
    finished: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Gathered:
    """A run's report and what the page draws beside it."""

    run: RunDir
    report: RunReport
    points: list[MetricsLine]
    evaluation: Evaluation
    spec: JobSpec | None
    """None where the record is damaged."""


def gather(run: RunDir, status: RunStatus) -> Gathered:
    """All that the records of a run tell. `status` is how it is doing."""
    spec = _spec(run)
    attempt = _latest_attempt(run)
    final = latest_report(run, attempt.number if attempt else None)
    report = final or Report()
    points = read_points(run.metrics)
    figures = _figures(report, points)
    tested = _tested(run, figures["step"])
    ranks = _ranks(report, points, attempt)
    made = read_starts(run, final)
    if made and not made[-1].cause:
        made[-1] = dataclasses.replace(made[-1], cause=status.state)
    account = RunReport(
        name=status.name,
        state=status.state,
        detail=status.detail,
        first_failure=status.first_failure,
        directory=str(run.path.absolute()),
        job_id=status.job_id,
        launcher=status.launcher,
        complete=final is not None,
        **_request(spec, report),
        **figures,
        **_machines(report, files.read(Resolved, run.resolved) or Resolved(precision=""), status),
        ranks=ranks,
        stragglers=stragglers(ranks),
        starts=report.starts or len(made) or _begun(status),
        steps_done_twice=sum(one.steps_done_twice for one in made),
        seconds_lost=round(sum(one.seconds_lost for one in made), 3),
        attempts=made,
        confusions=tested.confusions()[:_MOST_CONFUSIONS],
        weights_sha256=report.weights_sha256,
        finished=report.finished,
    )
    return Gathered(run, account, points, tested, spec)


def _begun(status: RunStatus) -> int:
    """The starts of a run that left no attempt, as far as its events tell."""
    return status.restarts + 1 if status.started_time else 0


def changed_settings(config: TrainConfig) -> dict[str, Any]:
    """The fields of a configuration that are not as by default."""
    usual = TrainConfig()
    return {
        one.name: getattr(config, one.name)
        for one in dataclasses.fields(config)
        if getattr(config, one.name) != getattr(usual, one.name)
    }


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


def _request(spec: JobSpec | None, report: Report) -> dict[str, Any]:
    train = spec.train if spec else None
    return {
        "command": list(spec.command) if spec else [],
        "model": report.model or (train.model if train else ""),
        "dataset": report.dataset or (train.dataset if train else ""),
        "strategy": report.strategy or (train.strategy if train else ""),
        "settings": changed_settings(train) if train else {},
    }


def _figures(report: Report, points: list[MetricsLine]) -> dict[str, Any]:
    last = points[-1] if points else None
    trained = next((one for one in reversed(points) if not one.tested), None)
    tested = next((one for one in reversed(points) if one.tested), None)
    figures: dict[str, Any] = {
        "accuracy": tested.accuracy if tested else None,
        "loss": tested.loss if tested else None,
        "step": last.step if last else None,
        "epoch": last.epoch if last else None,
        "train_seconds": last.seconds if last else None,
        "images_per_second": trained.images_per_second if trained else None,
    }
    told = {
        "accuracy": report.accuracy,
        "loss": report.loss,
        "step": report.steps,
        "epoch": report.epochs,
        "train_seconds": report.train_seconds,
        "images_per_second": report.images_per_second,
    }
    figures |= {name: value for name, value in told.items() if value is not None}
    return {
        **figures,
        "train_loss": trained.loss if trained else None,
        "total_seconds": report.total_seconds,
        "parameters": report.parameters,
        "train_images": report.train_images,
        "test_images": report.test_images,
        "peak_memory_bytes": report.peak_memory_bytes,
    }


def _tested(run: RunDir, step: int | None) -> Evaluation:
    """evaluation.json, unless the run has gone on since."""
    record = files.read(EvaluationRecord, run.evaluation) or EvaluationRecord()
    return read_evaluation(record if record.step in (None, step) else EvaluationRecord())


def _machines(report: Report, resolved: Resolved, status: RunStatus) -> dict[str, Any]:
    """Where it ran, by its report, else by what the ranks agreed on, else by what was asked."""
    known = report if report != Report() else resolved
    return {
        "world_size": known.world_size or status.world_size,
        "num_nodes": report.num_nodes or status.nodes,
        "hosts": list(dict.fromkeys(known.hosts)) or status.hosts,
        "where": list(resolved.where),
        "device": report.device or resolved.kind,
        "precision": known.precision,
        "backend": known.backend,
        "threads": known.threads or None,
        "cuda_graph": known.cuda_graph,
        "versions": {name: text for name, text in (report.versions or {}).items() if text},
        "warnings": list(known.warnings),
    }


def _ranks(report: Report, points: list[MetricsLine], attempt: Attempt | None) -> list[Rank]:
    """Each rank's pace: from the report, or as far as metrics and outcomes tell it."""
    told = [
        Rank(one.rank, one.host, one.images_per_second, one.peak_memory_bytes)
        for one in report.ranks
    ]
    if told:
        return sorted(told, key=lambda one: one.rank)
    rates = rank_rates(points)
    outcomes = read_outcomes(attempt.outcomes) if rates and attempt else []
    hosts = {one.rank: str(one.host) for one in outcomes}
    return [Rank(rank, hosts.get(rank, ""), rate) for rank, rate in enumerate(rates)]
