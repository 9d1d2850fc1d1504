"""`clusterddp debug`: the training entrypoint on this workstation, in one process or several."""

import os
import shlex
import time
from pathlib import Path

import click

from clusterddp import log
from clusterddp.cli.options import SettingsCommand, config_from, options
from clusterddp.cli.runs import OUTPUT_ROOT_OPTION
from clusterddp.errors import EXIT_INTERRUPTED, EXIT_PAUSED, RequestError
from clusterddp.processes import START_METHODS
from clusterddp.ranks.dist_env import MOST_PROCS, DistEnv
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.run import attempt as attempts
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import forms
from clusterddp.submission.preflight import make_sure


@click.command(cls=SettingsCommand)
@options(TRAINING)
@click.option(
    "--procs",
    type=click.IntRange(1, MOST_PROCS),
    default=1,
    show_default=True,
    envvar="CLUSTERDDP_PROCS",
    help="Processes to train in; with 1 it is this very process, where breakpoints work.",
)
@click.option(
    "--start-method",
    type=click.Choice(START_METHODS),
    show_default="exec",
    envvar="CLUSTERDDP_START_METHOD",
    help="How the processes begin: exec runs the command anew for each, the others are those of "
    "torch.multiprocessing. With --procs 1 it makes that one a process of its own.",
)
@click.option(
    "--run-name", metavar="NAME", show_default="debug-<time>", help="Name of the run's directory."
)
@OUTPUT_ROOT_OPTION
@click.option(
    "--run-dir",
    metavar="DIR",
    show_default="OUTPUT_ROOT/RUN_NAME",
    help="The run's directory itself; one that holds checkpoints is resumed.",
)
def command(
    procs: int,
    start_method: str | None,
    run_name: str | None,
    output_root: Path,
    run_dir: str | None,
    **_values: object,
) -> int:
    """Train here and now, without Slurm.

    \b
    clusterddp debug                 in this process: a breakpoint in the model stops there
    clusterddp debug --procs 2       two ranks; rank 0 prints here, each has its log
    """
    from clusterddp.worker import workstation  # after --help, which needs no multiprocessing

    config = config_from(click.get_current_context())
    if run_dir is not None and run_name is not None:
        raise RequestError("--run-dir and --run-name both name the run's directory; give one.")
    if run_dir == "":
        raise RequestError("--run-dir is empty; leave it out to have a new directory made.")
    name = time.strftime("debug-%Y%m%d-%H%M%S") if run_name is None else run_name
    forms.run_name("--run-name", name)
    path = os.path.abspath(run_dir or f"{output_root}/{name}")
    make_sure(config)
    with workstation.recorded(path, config, procs, may_exist=bool(run_dir)) as (run, record):
        if procs > 1 or start_method:
            code, failure = workstation.train(config, run, procs, start_method or "exec")
        else:
            from clusterddp.worker.task import run_task

            code, failure = run_task(config, run.path, DistEnv.from_environ({})), None
        record(code, failure)
        made = attempts.latest(run)
        if code in (EXIT_PAUSED, EXIT_INTERRUPTED) and made and made.end.exists():
            log.info(f"resume with: {_again(config, run, procs, start_method)}")
        return code


def _again(config: TrainConfig, run: RunDir, procs: int, start_method: str | None) -> str:
    """Return the command that resumes a run from its newest checkpoint."""
    shown = os.path.relpath(run.path)
    path = shown if not shown.startswith("..") else str(run.path)
    ranks = [f"--procs={procs}"] if procs > 1 else []
    if start_method:
        ranks.append(f"--start-method={start_method}")
    return shlex.join(
        ["clusterddp", "debug", *ranks, *config.to_argv(defaults=False), f"--run-dir={path}"]
    )
