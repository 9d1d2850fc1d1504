"""`clusterddp watch-step`: runs beside srun and ends a step whose end srun cannot see."""

import os
from pathlib import Path

import click

from clusterddp import log
from clusterddp.processes.signals import die_with_parent
from clusterddp.ranks.variables import own_name
from clusterddp.run import logs, step_watch
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--job-id", required=True, help="Slurm's job id.")
@click.option("--attempt", "number", type=int, required=True, help="What 'begin' printed.")
@click.option("--script", type=int, required=True, help="The script's process, which starts srun.")
@click.option("--ranks", type=int, required=True, help="How many tasks record their end.")
@click.option("--grace", type=float, default=step_watch.GRACE_SECONDS, help="Seconds after them.")
def command(run_dir: Path, job_id: str, number: int, script: int, ranks: int, grace: float) -> None:
    """Watch the records of an attempt's tasks; ends together with the batch script."""
    die_with_parent(script)
    attempt = Attempt(RunDir(run_dir), number)
    with log.to(lambda line: logs.print_to_job_log(f"clusterddp: {line}")):
        step_watch.watch(attempt, own_name(os.environ, job_id), ranks, script, grace)
