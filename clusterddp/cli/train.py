"""`clusterddp train`: what every task of a run executes; also by hand and under torchrun."""

import functools
import os
from pathlib import Path
from typing import Any

import click

from clusterddp import stop
from clusterddp.cli import short_lived
from clusterddp.cli.train_options import config_from, train_options
from clusterddp.dist_env import DistEnv


@click.command()
@functools.partial(train_options, settings=False)
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    show_default="jobs/train-<time>",
    help="Where metrics, checkpoints, the report and each rank's outcome go.",
)
@click.option("--own-log", is_flag=True, hidden=True)
@click.option("--attempt", type=int, hidden=True)
@click.option("--signal-lead", type=int, default=0, hidden=True)
def command(
    run_dir: Path | None, own_log: bool, attempt: int | None, signal_lead: int, **options: Any
) -> int:
    """Train as one rank, which this process learns from its environment.

    \b
    srun clusterddp train                                      ranks from Slurm's variables
    torchrun --nproc-per-node 2 --no-python clusterddp train   ranks from torchrun's
    clusterddp train                                           a single process

    A run directory that holds checkpoints is gone on with, from its newest.
    """
    config = config_from(options, click.get_current_context())
    env = DistEnv.from_environ(os.environ)

    def child() -> int:
        from clusterddp.worker import run_task

        return run_task(config, run_dir, env, attempt=attempt, signal_lead=signal_lead)

    if run_dir is None:
        code = child()
        short_lived.done()  # the process group is gone, and torch is slow to take apart
        return code
    run_dir = run_dir.absolute()

    from clusterddp.supervise import redirect_output, supervise

    if own_log:
        redirect_output(run_dir, env)
    return supervise(run_dir, env, child, attempt=attempt, listen=stop.requested.listen)
