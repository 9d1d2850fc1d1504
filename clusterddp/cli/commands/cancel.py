"""`clusterddp cancel`: ends runs, whether Slurm or this workstation runs them."""

import sys
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import click

from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import JSON_OPTION, RUN, RUNS_DIR_OPTION, act_on_each
from clusterddp.errors import RequestError
from clusterddp.status.status import RunStatus
from clusterddp.status.stop import cancel


@click.command(name="cancel", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, required=True, metavar="RUN...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask ahead of several runs at once.")
@RUNS_DIR_OPTION
@JSON_OPTION
def command(run: tuple[str, ...], yes: bool, runs_dir: Path, as_json: bool) -> int:
    """Cancel each RUN: a name, job id or directory; of a sweep all its points, or those of 'lr-*'.

    A Slurm job is given to scancel; a run on this workstation gets SIGTERM and ends in order. It
    returns at once: 'clusterddp status' shows when the run has ended. One that has ended already
    is left as it is. Where it does not work with one of several, the others are cancelled.

    Exit codes: 0 each is cancelled or had ended, 1 one could not be cancelled, 2 one is no run,
    or nobody said yes.
    """
    confirm = None if yes else _confirm
    return act_on_each(
        runs_dir, run, cancel, attrgetter("message"), as_json=as_json, confirm=confirm
    )


def _confirm(runs: Sequence[RunStatus]) -> None:
    """Ask once whether several runs are meant; raises RequestError where nobody can answer."""
    counts = Counter(status.state for status in runs if not status.has_ended)
    if not counts:
        return
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    question = f"Cancel {counts.total()} runs ({states})?"
    if not sys.stdin.isatty():
        raise RequestError(f"{question} Nobody is here to answer: add --yes. [CD0109]")
    if not click.confirm(question, err=True):
        raise RequestError("nothing was cancelled. [CD0109]")
