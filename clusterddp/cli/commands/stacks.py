"""`clusterddp stacks`: shows the current stack of each rank of a running job."""

import dataclasses
import os
from pathlib import Path

import click

from clusterddp.cli.options import JSON_OPTION, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, echo_json
from clusterddp.errors import EXIT_DONE, EXIT_FAILED
from clusterddp.ranks.variables import host_name
from clusterddp.run.run_dir import RunDir
from clusterddp.status import stacks
from clusterddp.status.find import find_run
from clusterddp.status.status import statuses


@click.command(name="stacks", cls=SettingsCommand)
@click.argument("run", type=RUN, required=False, metavar="[RUN]")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Show only rank R, with its threads and worker processes; repeatable.",
)
@RUNS_DIR_OPTION
@JSON_OPTION
@click.option("--here", is_flag=True, hidden=True)
@click.option("--workers", is_flag=True, hidden=True)
def command(
    run: str | None,
    ranks: tuple[int, ...],
    runs_dir: Path,
    as_json: bool,
    here: bool,
    workers: bool,
) -> int:
    """Print the current Python stack of each rank of a running job.

    RUN is a run's name, job id or directory; default: the latest run.

    Equal stacks are shown once: '61 of 64 in all_reduce', 'rank 17 on gpu03 in DataLoader'. A
    separate Slurm step reads them: no rank is stopped or changed. It uses a signal handler, which
    the built-in training and every Python of a COMMAND have (without --no-stacks); py-spy, which
    shows all threads, if it is on the ranks' PATH; or Python's own interface from 3.14 on.

    Exit codes: 0 all stacks are shown; 1 a stack could not be read, or Slurm did not respond; 2 no
    such run, or it is not running.
    """
    if here:
        for line in stacks.encode_lines(
            stacks.read_here(RunDir(Path(run or ".")), ranks, workers=workers),
            host_name(os.environ),
        ):
            click.echo(line)
        return EXIT_DONE
    run_dir = find_run(runs_dir, run)
    [status] = statuses([run_dir])
    found = stacks.read(run_dir, status, ranks)
    if as_json:
        echo_json([dataclasses.asdict(each) for each in found])
    else:
        click.echo(stacks.heading(run_dir.name, found))
        click.echo(stacks.format_stacks(found, whole=bool(ranks)))
    return EXIT_DONE if all(each.is_known for each in found) else EXIT_FAILED
