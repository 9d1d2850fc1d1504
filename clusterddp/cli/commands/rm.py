"""`clusterddp rm`: removes runs."""

import fnmatch
import os
from collections.abc import Sequence
from pathlib import Path

import click

from clusterddp import errors, formatting
from clusterddp.cli.options import SettingsCommand, dry_run_option
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, confirm, echo_failures
from clusterddp.status.find import find_sweep, select_each
from clusterddp.submission.clean import plan_removals, remove_run


@click.command(name="rm", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, required=True, metavar="RUN...")
@dry_run_option("what would be removed and change nothing")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@RUNS_DIR_OPTION
def command(run: tuple[str, ...], dry_run: bool, yes: bool, runs_dir: Path) -> int:
    """Delete the directory of each RUN: a run's name, job id or directory.

    Records, logs, checkpoints, reports and the copy of your code are deleted permanently. A sweep
    means all its trials and their shared files; 'lr-*' means several runs. A run is not removed
    while it is queued or running, or if another run starts from its checkpoint. 'clusterddp clean'
    only frees disk space.

    Exit codes: 0 removed, 1 something could not be removed, 2 one does not exist or may not be
    removed, or the answer was not yes.
    """
    runs, failed = select_each(runs_dir, run)
    sweeps = (find_sweep(runs_dir, text) for text in run)
    known = {each.path for each in runs}
    runs = [each for each in runs if each.path.is_dir()]
    runs += dict.fromkeys(sweep for sweep in sweeps if sweep and sweep.path not in known)
    # A run outside the runs directory must be named by its path.
    here = runs_dir.resolve()
    far = [e for e in runs if e.path.parent.resolve() != here and not _is_typed(e.path, run)]
    failed += [
        errors.RequestError(f"{one.name} is at {one.path}. To remove it, name this path. [CD0502]")
        for one in far
    ]
    removals, refused = plan_removals([each for each in runs if each not in far])
    failed += refused
    for each in removals:
        state = f" ({each.state})" if each.state else ""
        click.echo(f"{each.run.path.absolute()}{state}: {formatting.size(each.bytes)}")
    if removals and not dry_run:
        if not yes:
            confirm(f"Permanently remove {formatting.count(len(removals), 'run')}?", "removed")
        for each in removals:
            try:
                remove_run(each)
                click.echo(f"removed {each.run.name}")
            except errors.ClusterDDPError as error:
                failed.append(error)
    return echo_failures(failed)


def _is_typed(path: Path, texts: Sequence[str]) -> bool:
    """Return whether a path was typed as a path, by its sweep's path or by a pattern."""
    typed = [os.path.realpath(text) for text in texts if "/" in text]
    place, sweep = os.path.realpath(path), os.path.realpath(path).rpartition("-")[0]
    return any(fnmatch.fnmatchcase(place, each) or each == sweep for each in typed)
