"""Writes rank 0's report.json: results, hosts and versions of a run."""

import platform
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from clusterddp.checkpoints.state import weights_sha256
from clusterddp.files import write_record
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.reporting.usage import measure_usage
from clusterddp.run.history import History
from clusterddp.run.records import Report, SavingReport
from clusterddp.training.loop import Training
from clusterddp.version import __version__


def write(training: Training, env: DistEnv, began: float, environ: Mapping[str, str]) -> str:
    """Write the report of a finished training atomically; return its summary as a line.

    began: start of this task, in seconds since the epoch.
    """
    finished = time.time()
    run, position = training.attempt.run, training.position
    evaluation = training.result.record(position.step, training.test_set)
    report = _report(training, env, environ, began, finished)
    write_record(run.evaluation, evaluation)
    write_record(run.report, report, indent=2)
    if position.step and not training.has_trained:
        return (
            f"done: nothing left to train after {position.step} steps; test "
            f"accuracy {report.accuracy:.2%}. Raise --epochs or --max-steps, or use another "
            "--run-dir"
        )
    capture = f"{report.capture_seconds:.1f} s of capture, " if report.cuda_graph else ""
    return (
        f"done: test accuracy {report.accuracy:.2%}, test loss {report.loss:.4f}, {capture}"
        f"{position.seconds:.1f} s of training ({finished - began:.1f} s in total), "
        f"{report.images_per_second:,.0f} images/s, "
        f"{env.world_size} {'rank' if env.world_size == 1 else 'ranks'}"
    )


def _report(
    training: Training, env: DistEnv, environ: Mapping[str, str], began: float, finished: float
) -> Report:
    config, agreed, position = training.config, training.agreed, training.position
    history = History.read(training.attempt.run)
    *earlier, last = history.summaries()
    attempts = (*earlier, replace(last, cause="done", last_step=position.step))
    assert training.saver, "rank 0 writes it"
    costs = vars(training.saver.costs)
    saving = {field.name: round(costs[field.name], 4) for field in fields(SavingReport)}
    return Report(
        accuracy=training.result.accuracy,
        loss=training.result.loss,
        train_seconds=round(position.seconds, 3),
        total_seconds=round(finished - began, 3),
        capture_seconds=round(training.capture_seconds, 3),
        images_per_second=round(position.images / max(position.seconds, 1e-9), 1),
        world_size=env.world_size,
        num_nodes=env.num_nodes,
        hosts=agreed.hosts,
        backend=agreed.backend,
        device=agreed.kind,
        strategy=config.strategy,
        threads=agreed.threads,
        precision=agreed.precision,
        cuda_graph=training.learner.is_captured,
        model=config.model,
        dataset=config.dataset,
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        steps=position.step,
        epochs=position.epoch_shown,
        train_images=len(training.train_set),
        test_images=len(training.test_set),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchvision": _version("torchvision"),
            "clusterddp": __version__,
        },
        warnings=tuple(training.warnings),
        peak_memory_bytes=max(rank.peak_memory_bytes or 0 for rank in training.ranks),
        ranks=tuple(training.ranks),
        weights_sha256=weights_sha256(training.model),
        resumed_from=agreed.resume or None,
        attempt=agreed.attempt,
        num_attempts=len(attempts),
        repeated_steps=sum(each.repeated_steps for each in attempts),
        lost_seconds=round(sum(each.lost_seconds for each in attempts), 3),
        attempts=attempts,
        saving=SavingReport(**saving),
        usage=measure_usage(history, history.spec, until=finished, spent=training.spent()),
        job_id=environ.get("SLURM_JOB_ID", ""),
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        finished=round(finished, 3),
    )


def _version(name: str) -> str | None:
    """Return a package's version without importing it; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
