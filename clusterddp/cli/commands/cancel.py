"""`clusterddp cancel`: ends runs in Slurm or on this workstation."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import click

from clusterddp.cli.options import JSON_OPTION, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, act_on_each, confirm
from clusterddp.status.status import RunStatus
from clusterddp.status.stop import cancel


@click.command(name="cancel", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, required=True, metavar="RUN...")
@click.option("-y", "--yes", is_flag=True, help="Do not ask about several runs, or one elsewhere.")
@RUNS_DIR_OPTION
@JSON_OPTION
def command(run: tuple[str, ...], yes: bool, runs_dir: Path, as_json: bool) -> int:
    """Cancel each RUN: a run's name, job id or directory, a sweep, or a pattern ('lr-*').

    A Slurm job is cancelled by scancel; a local run gets SIGTERM. The command returns at once;
    'clusterddp status' shows when the run has ended. A run that has ended does not change. If one
    run cannot be cancelled, the others still are.

    Exit codes: 0 all are cancelled or had ended, 1 one could not be cancelled, 2 one does not
    exist, or the answer was not yes.
    """
    ask = None if yes else _confirm
    return act_on_each(runs_dir, run, cancel, attrgetter("message"), as_json=as_json, confirm=ask)


def _confirm(runs: Sequence[RunStatus]) -> None:
    """Ask before cancelling. Raises RequestError unless the answer is yes."""
    counts = Counter(status.state for status in runs if not status.has_ended)
    if not counts:
        return
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    what = runs[0].directory if len(runs) == 1 else f"{counts.total()} runs"
    confirm(f"Cancel {what} ({states})?", "cancelled")
