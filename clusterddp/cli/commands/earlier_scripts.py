"""`clusterddp begin`, `finish` and `watch-step`: what the batch scripts of 0.1.0 call.

Such a script can wait in the queue while clusterddp is upgraded. Later ones call `batch`.
"""

import os
import signal
from pathlib import Path

import click

from clusterddp import log
from clusterddp.batch import finish as ending
from clusterddp.batch import step_watch
from clusterddp.cli.commands.batch import code_changes
from clusterddp.errors import EXIT_DONE, ClusterDDPError, coded
from clusterddp.processes.signals import die_with_parent
from clusterddp.ranks.variables import own_name
from clusterddp.run import restart_policy
from clusterddp.run.attempt import Attempt, NotStarted
from clusterddp.run.logs import print_to_job_log
from clusterddp.run.restart_policy import Policy
from clusterddp.run.run_dir import RunDir


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--restart", default=0, help="SLURM_RESTART_COUNT.")
@click.option("--max-requeues", default=0, help="Attempts after the first.")
@click.option("--nodelist", default="", help="SLURM_JOB_NODELIST.")
@click.option(
    "--patience",
    default=ending.ANOTHER_ATTEMPT_SECONDS,
    help="Seconds to wait for another attempt.",
)
@click.option("--or-done", is_flag=True, help="Print 'done' instead, and exit with 0, if it is.")
def begin(
    run_dir: Path,
    job_id: str,
    restart: int,
    nodelist: str,
    max_requeues: int,
    patience: float,
    or_done: bool,
) -> int:
    """Make the run's next attempt and print its number alone: a script's first call."""
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}", err=True)):
        try:
            attempt = ending.begin(
                RunDir(run_dir), job_id, restart, nodelist, max_requeues, patience, code_changes
            )
        except ending.RunIsDone as error:
            if not or_done:
                # A script would go on after exit code 0.
                raise NotStarted(f"{error}.", code=error.code) from None
            log.info(str(error))
            click.echo(restart_policy.DONE)
            return EXIT_DONE
        except ClusterDDPError as error:
            log.info(coded(error))
            return error.exit_code
    click.echo(attempt.number)
    return EXIT_DONE


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--restart", default=0, help="SLURM_RESTART_COUNT.")
@click.option("--max-requeues", default=0, help="Attempts after the first.")
@click.option("--exit-code", type=int, required=True, help="srun's exit code.")
@click.option("--attempt", "number", type=int, required=True, help="Number that 'begin' printed.")
@click.option("--requeue/--no-requeue", "requeues", default=False, help="Whether one may follow.")
@click.option("--restart-on-failure", default=0, help="Of these, after a crash.")
def finish(
    run_dir: Path,
    exit_code: int,
    job_id: str,
    restart: int,
    number: int,
    requeues: bool,
    max_requeues: int,
    restart_on_failure: int,
) -> int:
    """Print and record how an attempt ended, start the next where one is due: the last call."""
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # the signal that ends the job must not end this
    ending.go_to_submission_folder()
    policy = Policy(requeues, max_requeues, restart_on_failure)
    attempt = Attempt(RunDir(run_dir), number)
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        return ending.finish(attempt, exit_code, job_id, restart, policy)


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--attempt", "number", type=int, required=True, help="Number that 'begin' printed.")
@click.option("--script", type=int, required=True, help="The script's process, which starts srun.")
@click.option("--ranks", type=int, required=True, help="How many tasks record their end.")
@click.option("--grace", default=step_watch.GRACE_SECONDS, help="Seconds after them.")
def watch_step(
    run_dir: Path, job_id: str, number: int, script: int, ranks: int, grace: float
) -> None:
    """End a step whose end srun cannot see, from beside srun; ends together with the script."""
    die_with_parent(script)
    attempt, job = Attempt(RunDir(run_dir), number), own_name(os.environ, job_id)
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        step_watch.watch(attempt, job, ranks, step_watch.Step(script, attempt).srun, grace)
