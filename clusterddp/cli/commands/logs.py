"""`clusterddp logs`: shows or follows the logs of the ranks and of the job."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from clusterddp import log
from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, follow
from clusterddp.errors import RequestError
from clusterddp.run.attempt import latest
from clusterddp.run.rank_log import RankLog
from clusterddp.run.run_dir import RunDir
from clusterddp.status.find import find_run, select
from clusterddp.status.follow import LogPrinter, check_logs, default_log
from clusterddp.status.state import RunState
from clusterddp.status.status import is_empty, statuses


@click.command(name="logs", cls=SettingsCommand)
@click.argument("run", type=RUN, required=False, metavar="[RUN]")
@click.option("-f", "--follow", "following", is_flag=True, help="Follow until the run has ended.")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Show the log of rank R; repeatable.",
)
@click.option("--job", is_flag=True, help="Show the log of the batch script and Slurm.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    metavar="N",
    show_default="all",
    help="Show only the last N lines of each log.",
)
@RUNS_DIR_OPTION
def command(
    run: str | None,
    following: bool,
    ranks: tuple[int, ...],
    job: bool,
    lines: int | None,
    runs_dir: Path,
) -> int:
    """Show the logs of RUN: a run's name, job id or directory; the latest run without one.

    Without --rank and --job: the job log of a failed run, which names the rank that failed first,
    and otherwise rank 0's log. Several logs are shown with the file's name before each line. The
    files are logs/job.log, logs/rank-R.log, and logs/node-N.log for each torchrun agent or, with
    --log-per node, each node. For a sweep or a pattern ('lr-*') the log of each run is shown, with
    the run's name.

    Exit codes: 0 shown, or with -f the run is done; 1 with -f: it failed or was cancelled; 2 there
    is no such run or log; 75 with -f: it was stopped and can resume; 130 interrupted.
    """
    several = select(runs_dir, run) if run else []
    if len(several) > 1:
        if following:
            raise RequestError(
                f"-f follows one run, but {run} matches {len(several)}. Name one, such as "
                f"{several[0].name}; 'clusterddp runs {run}' lists them. [CD0502]"
            )
        _print_several(several, ranks, job=job, lines=lines)
        return 0
    run_dir = several[0] if several else find_run(runs_dir, None)
    [status] = statuses([run_dir])
    for rank in ranks:
        status.check_rank(rank)
    paths = [run_dir.job_log] if job else []
    paths += [run_dir.rank_log(rank) for rank in dict.fromkeys(ranks)]
    if following:
        if status.state == RunState.CREATED:
            log.info(f"{run_dir.name} waits: {status.detail}. Next: {status.next_command}")
        failed = run_dir.rank_log(status.failed_rank or 0)
        chosen = paths or [failed if RankLog(failed).find() else default_log(run_dir, status)]
        made = latest(run_dir)
        is_queued = status.state in (RunState.CREATED, RunState.QUEUED)
        is_waiting = is_queued and made and made.end.exists()
        return follow(run_dir, chosen, lines, attempt=sys.maxsize if is_waiting else status.attempt)
    paths = paths or [default_log(run_dir, status)]
    check_logs(run_dir, status, paths)
    LogPrinter(paths, lines, sys.stdout.buffer).print_new(last=True)
    for path in filter(is_empty, paths):
        other = "" if job else f" For the job's messages: clusterddp logs --job {run_dir.cli_name}"
        log.info(f"logs/{path.name} of {run_dir.name} is empty.{other}")
    return 0


def _print_several(
    runs: Sequence[RunDir], ranks: Sequence[int], *, job: bool, lines: int | None
) -> None:
    """Print the existing logs of several runs, each line with the run's name."""
    labelled: dict[Path, str] = {}
    for run, status in zip(runs, statuses(runs), strict=True):
        paths = [run.job_log] if job else []
        paths += [run.rank_log(rank) for rank in dict.fromkeys(ranks)]
        paths = paths or [default_log(run, status)]
        labelled |= {path: f"{run.name}/{path.stem}" for path in paths if RankLog(path).find()}
    if not labelled:
        raise RequestError(f"none of the {len(runs)} runs has such a log yet. [CD0507]")
    LogPrinter([*labelled], lines, sys.stdout.buffer, [*labelled.values()]).print_new(last=True)
