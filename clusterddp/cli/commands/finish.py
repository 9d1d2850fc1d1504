"""`clusterddp finish`: records the verdict on an attempt; the batch script's last call."""

import signal
from pathlib import Path

import click

from clusterddp import log
from clusterddp.run import batch_script
from clusterddp.run.attempt import Attempt
from clusterddp.run.logs import print_to_job_log
from clusterddp.run.restart_policy import Policy
from clusterddp.run.run_dir import RunDir


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--exit-code", type=int, required=True, help="srun's exit code.")
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--restart", type=int, default=0, help="SLURM_RESTART_COUNT.")
@click.option("--attempt", "number", type=int, required=True, help="Number that 'begin' printed.")
@click.option("--requeue/--no-requeue", "requeues", default=False, help="Whether one may follow.")
@click.option("--max-requeues", type=int, default=0, help="Attempts after the first.")
@click.option("--restart-on-failure", type=int, default=0, help="Of these, after a crash.")
def command(
    run_dir: Path,
    exit_code: int,
    job_id: str,
    restart: int,
    number: int,
    requeues: bool,
    max_requeues: int,
    restart_on_failure: int,
) -> int:
    """Print and record how an attempt ended, start the next where one is due; the job's code."""
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # the signal that ends the job must not end this
    batch_script.go_to_submission_folder()
    policy = Policy(requeues, max_requeues, restart_on_failure)
    attempt = Attempt(RunDir(run_dir), number)
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        return batch_script.finish(attempt, exit_code, job_id, restart, policy)
