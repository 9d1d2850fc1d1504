"""`clusterddp logs`: what the ranks and the job printed, now or as it comes."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from clusterddp.cli import run_argument
from clusterddp.cli.settings import SettingsCommand
from clusterddp.errors import RequestError
from clusterddp.run.follow import LogPrinter, follow
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import FAILED
from clusterddp.run.status import RunStatus


@click.command(name="logs", cls=SettingsCommand)
@click.argument("run", type=run_argument.RUN, required=False, metavar="[RUN]")
@click.option("-f", "--follow", "following", is_flag=True, help="Go on until the run has ended.")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="That rank's log; repeatable.",
)
@click.option("--job", is_flag=True, help="What the batch script and Slurm said.")
@click.option(
    "-n", "--lines", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each."
)
@run_argument.output_root_option
def command(
    *,
    run: str | None,
    following: bool,
    ranks: tuple[int, ...],
    job: bool,
    lines: int | None,
    output_root: Path,
) -> int:
    """Show the logs of RUN: a run's name, job id or directory; the latest run without one.

    Without --rank and --job: the job log of a failed run, which says who failed first, and
    otherwise rank 0's log. Several logs are shown with the file's name before each line. The files
    are logs/job.log, logs/rank-R.log, and logs/node-N.log for each torchrun agent.

    Exit codes: 0 shown, or with -f the run is done; 1 with -f: it failed or was cancelled; 2 there
    is no such run or log; 75 with -f: it was stopped and can go on; 130 interrupted.
    """
    found = run_argument.find_run(output_root, run)
    [status] = run_argument.statuses([found])
    paths = [found.job_log] if job else []
    paths += [found.rank_log(rank) for rank in dict.fromkeys(ranks)]
    _check_ranks(found, status, ranks)
    if not paths:
        paths = [default_log(found, status)]
    if following:
        return follow(found, paths, lines)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise RequestError(_nothing_there(found, status, missing[0]))
    LogPrinter(paths, lines, sys.stdout.buffer).print_new(last=True)
    return 0


def default_log(run: RunDir, status: RunStatus) -> Path:
    """The log that says most: the job's after a failure, otherwise rank 0's."""
    if status.state == FAILED and run.job_log.is_file():
        return run.job_log
    if not run.rank_log(0).is_file() and status.has_ended and run.job_log.is_file():
        return run.job_log  # it ended before any rank started
    return run.rank_log(0)


def _check_ranks(run: RunDir, status: RunStatus, ranks: Sequence[int]) -> None:
    if status.world_size is None:
        return
    for rank in ranks:
        if rank >= status.world_size:
            raise RequestError(
                f"--rank {rank}: {run.name} has {status.world_size} ranks; name one of 0 to "
                f"{status.world_size - 1}."
            )


def _nothing_there(run: RunDir, status: RunStatus, path: Path) -> str:
    there = sorted(found.name for found in run.logs.glob("*.log")) if run.logs.is_dir() else []
    ranks = [name for name in there if re.fullmatch(r"rank-\d+\.log", name)]
    others = [name for name in there if name not in ranks]
    state = f"{status.state}{f' ({status.detail})' if status.detail else ''}"
    if status.has_ended and status.started_time is None and not there:
        return f"{run.name} has no logs: it never started; it is {state}."
    have = ", ".join([*others, *ranks[:4], *(["…"] if len(ranks) > 4 else [])]) or "no log"
    if status.has_ended:
        return (
            f"{run.name} has no {path.name}: it is {state} and has {have}. See 'clusterddp status "
            f"{run.shown}'."
        )
    return (
        f"{run.name} has no {path.name} (yet): it is {state} and has {have}. Follow it with "
        f"'clusterddp logs -f {run.shown}', or see 'clusterddp status {run.shown}'."
    )
