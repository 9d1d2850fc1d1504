"""`clusterddp begin`: makes the run's next attempt; the batch script's first call.

Prints the attempt's number on stdout, for the script; everything else goes to stderr.
"""

import os
from pathlib import Path

import click

from clusterddp import log
from clusterddp.errors import EXIT_DONE, ClusterDDPError
from clusterddp.run import batch_script, restart_policy
from clusterddp.run.attempt import NotStarted
from clusterddp.run.logs import print_to_job_log
from clusterddp.run.run_dir import RunDir


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--restart", type=int, default=0, help="SLURM_RESTART_COUNT.")
@click.option("--nodelist", default="", help="SLURM_JOB_NODELIST.")
@click.option("--max-requeues", type=int, default=0, help="Attempts after the first.")
@click.option("--patience", type=float, default=300.0, help="Seconds to wait for another attempt.")
@click.option("--or-done", is_flag=True, help="Print 'done' instead, and exit with 0, if it is.")
def command(
    run_dir: Path,
    job_id: str,
    restart: int,
    nodelist: str,
    max_requeues: int,
    patience: float,
    or_done: bool,
) -> int:
    """Make the directory of the run's next attempt and print its number."""
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}", err=True)):
        try:
            attempt = batch_script.begin(
                RunDir(run_dir), job_id, restart, nodelist, max_requeues, patience, _code_changes
            )
        except batch_script.RunIsDone as error:
            if not or_done:
                raise NotStarted(f"{error}.") from None  # a script would go on after exit code 0
            log.info(str(error))
            click.echo(restart_policy.DONE)
            return EXIT_DONE
        except ClusterDDPError as error:
            log.info(str(error))
            return error.exit_code
    click.echo(attempt.number)
    return EXIT_DONE


def _code_changes(run: RunDir) -> list[str]:
    from clusterddp.submission import snapshot  # most runs use a copy of their code

    folder = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".")
    return snapshot.changes_since_submission(run, folder) or []
