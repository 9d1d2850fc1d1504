"""Writes rank 0's report.json: what a run achieved, where, and with what."""

import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch

from clusterddp.checkpoints.state import weights_sha256
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.attempt import summaries
from clusterddp.run.files import write_record
from clusterddp.run.records import AttemptSummary, Report, SavingReport
from clusterddp.run.run_dir import RunDir
from clusterddp.training.loop import Training
from clusterddp.version import __version__


def write(training: Training, env: DistEnv, began: float, environ: Mapping[str, str]) -> str:
    """Write the report of a training that has ended, whole or not at all; returns it as a line.

    began: the start of this task, in seconds of the epoch.
    """
    finished = time.time()
    run, position = training.inputs.attempt.run, training.position
    assert training.result is not None, "a training that has ended was evaluated"
    evaluation = training.result.record(position.step, training.test_set)
    report = _report(training, env, environ, began, finished)
    write_record(run.evaluation, evaluation)
    write_record(run.report, report, indent=2)
    if position.step == training.start_step and position.step:
        return (
            f"done: nothing was left to train, the run has its {position.step} steps; test "
            f"accuracy {training.accuracy:.2%}. Raise --epochs or --max-steps, or name another "
            "--run-dir"
        )
    return (
        f"done: test accuracy {training.accuracy:.2%}, test loss {training.loss:.4f}, "
        f"{position.seconds:.1f} s of training ({finished - began:.1f} s in all), "
        f"{report.images_per_second:,.0f} images/s, "
        f"{env.world_size} {'rank' if env.world_size == 1 else 'ranks'}"
    )


def _report(
    training: Training, env: DistEnv, environ: Mapping[str, str], began: float, finished: float
) -> Report:
    config, agreed, position = training.config, training.agreed, training.position
    summaries = _attempts(training.inputs.attempt.run, position.step)
    return Report(
        accuracy=training.accuracy,
        loss=training.loss,
        train_seconds=round(position.seconds, 3),
        total_seconds=round(finished - began, 3),
        images_per_second=round(position.images / max(position.seconds, 1e-9), 1),
        world_size=env.world_size,
        num_nodes=env.num_nodes,
        hosts=agreed.hosts,
        backend=agreed.backend,
        device=agreed.kind,
        strategy=config.strategy,
        threads=agreed.threads,
        precision=agreed.precision,
        cuda_graph=agreed.cuda_graph,
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
        starts=len(summaries),
        steps_done_twice=sum(each.steps_done_twice for each in summaries),
        seconds_lost=round(sum(each.seconds_lost for each in summaries), 3),
        attempts=tuple(summaries),
        saving=_saving(training),
        job_id=environ.get("SLURM_JOB_ID", ""),
        restart=int(environ.get("SLURM_RESTART_COUNT") or 0),
        finished=round(finished, 3),
    )


def _version(name: str) -> str | None:
    """Return a package's version, if it is installed; importing it would take longer."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _attempts(run: RunDir, step: int) -> list[AttemptSummary]:
    """Sum up the attempts of the run; the latest, this one, is done at `step`."""
    *earlier, last = summaries(run)
    return [*earlier, replace(last, cause="done", last_step=step)]


def _saving(training: Training) -> SavingReport:
    """Return what checkpoints cost this attempt: only copying and waiting stop the training."""
    assert training.checkpoints.saver is not None, "rank 0 writes the report"
    costs = training.checkpoints.saver.costs
    return SavingReport(
        saves=costs.saves,
        failed=costs.failed,
        copy_seconds=round(costs.copy_seconds, 4),
        blocked_seconds=round(costs.blocked_seconds, 4),
        write_seconds=round(costs.write_seconds, 4),
        bytes=costs.bytes,
    )
