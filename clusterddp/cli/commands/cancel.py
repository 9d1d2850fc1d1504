"""`clusterddp cancel`: ends runs, whether Slurm or this workstation runs them."""

from operator import attrgetter
from pathlib import Path

import click

from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import JSON_OPTION, OUTPUT_ROOT_OPTION, RUN, act_on_each
from clusterddp.run.stop import cancel


@click.command(name="cancel", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, required=True, metavar="RUN...")
@OUTPUT_ROOT_OPTION
@JSON_OPTION
def command(run: tuple[str, ...], output_root: Path, as_json: bool) -> int:
    """Cancel each RUN: a run's name, job id or directory.

    A Slurm job is given to scancel; a run on this workstation gets SIGTERM and ends in order. It
    returns at once: 'clusterddp status' shows when the run has ended. One that has ended already
    is left as it is. Where it does not work with one of several, the others are cancelled.

    Exit codes: 0 each is cancelled or had ended, 1 one could not be cancelled, 2 one is no run.
    """
    return act_on_each(output_root, run, cancel, attrgetter("message"), as_json=as_json)
