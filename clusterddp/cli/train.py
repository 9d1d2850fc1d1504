"""`clusterddp train`: what every task of a run executes; also by hand and under torchrun."""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import click

from clusterddp.cli.train_options import config_from, train_options
from clusterddp.dist_env import DistEnv
from clusterddp.errors import TrainingError
from clusterddp.run_dir import RunDir


@click.command()
@functools.partial(train_options, settings=False)
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    show_default="jobs/train-<time>",
    help="Where metrics, checkpoints, the report and each rank's outcome go.",
)
@click.option("--redirect-output", is_flag=True, hidden=True)
def command(run_dir: Path | None, redirect_output: bool, **options: Any) -> int:
    """Train as one rank, which this process learns from its environment.

    \b
    srun clusterddp train                                      ranks from Slurm's variables
    torchrun --nproc-per-node 2 --no-python clusterddp train   ranks from torchrun's
    clusterddp train                                           a single process

    A run directory that holds checkpoints is gone on with, from its newest.
    """
    config = config_from(options)
    env = DistEnv.from_environ(os.environ)

    def child() -> int:
        from clusterddp.worker import run_task

        return run_task(config, run_dir, env)

    if run_dir is None:
        return child()
    run_dir = run_dir.absolute()
    if redirect_output:
        _redirect(RunDir(run_dir), env.rank)

    from clusterddp.supervise import supervise

    return supervise(run_dir, env, child)


def _redirect(run: RunDir, rank: int) -> None:
    """Send what this rank prints to its own log, as srun does; a torchrun agent cannot."""
    try:
        run.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = os.open(run.rank_log(rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise TrainingError(
            f"rank {rank} on {os.uname().nodename} cannot write its log {run.rank_log(rank)}: "
            f"{error.strerror}. Choose a run directory that every host can write."
        ) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
