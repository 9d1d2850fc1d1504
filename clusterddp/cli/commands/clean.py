"""`clusterddp clean`: frees the disk space used by old runs."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from clusterddp import errors, formatting
from clusterddp.cli.options import JSON_OPTION, DurationType, SettingsCommand, dry_run_option
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, confirm, echo_failures, echo_json
from clusterddp.request.options import DURATION_OR_NEVER
from clusterddp.run.run_dir import find_runs
from clusterddp.status.find import find_sweep, find_sweeps, select_each
from clusterddp.submission.clean import Cleaning, clean, plan

_HEADER = ("NAME", "STATE", "SIZE", "PATH", "WHAT")


@click.command(name="clean", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, metavar="[RUN...]")
@click.option(
    "--older-than",
    metavar="DURATION",
    type=DurationType(DURATION_OR_NEVER),
    default=0,
    show_default="any age",
    help="Only runs that ended at least this long ago: 12h, 30d.",
)
@dry_run_option("what would be removed and change nothing")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@RUNS_DIR_OPTION
@JSON_OPTION
def command(
    run: tuple[str, ...], older_than: float, dry_run: bool, yes: bool, runs_dir: Path, as_json: bool
) -> int:
    """Free the disk space used by RUNs (names, job ids or directories); default: all old runs.

    A sweep or a pattern ('lr-*') means several runs. The copies of your code and of clusterddp
    that a sweep's trials share are removed if the sweep or no RUN is named, and none of its
    trials can be resumed.

    For a run that has ended for good, it removes the checkpoints except the last valid one and the
    best, the copy of your code except files that your program wrote or changed, and the copy of
    clusterddp. Records, logs, metrics and reports stay.

    A run that is queued, running, stopped or could be resumed is skipped unless it is named. Even
    then its code, its clusterddp and the checkpoints of its current attempt stay. Links out of a
    run's directory are not followed.

    Exit codes: 0 removed, or nothing to remove; 1 something could not be removed; 2 usage error,
    the answer was not yes, or another process is using one of the runs; 130 interrupted.
    """
    if as_json and not (dry_run or yes):
        raise click.UsageError("--json needs --yes or --dry-run, because it cannot ask.")
    now = time.time()
    runs, failed = select_each(runs_dir, run) if run else (find_runs(runs_dir), [])
    sweeps = map(partial(find_sweep, runs_dir), run) if run else find_sweeps(runs_dir)
    runs += dict.fromkeys(sweep for sweep in sweeps if sweep)  # their shared files
    cleanings = plan(runs, named=bool(run), older_than=older_than, now=now)
    if not as_json and (cleanings or not failed):
        _show(cleanings, named=bool(run))
    full = [cleaning for cleaning in cleanings if cleaning.items]
    if full and not dry_run:
        if not yes:
            confirm(f"Remove {_sum(full)}?", "removed")
        cleanings = []
        for each in full:
            try:
                cleanings.append(clean(each.run, named=bool(run), older_than=older_than, now=now))
            except errors.ClusterDDPError as error:
                failed.append(error)
        if not as_json:
            click.echo(f"removed {_sum(cleanings)}")
    code = echo_failures(failed)
    if as_json:
        echo_json([_record(cleaning, removed=not dry_run) for cleaning in cleanings])
    return code


def _show(cleanings: Sequence[Cleaning], *, named: bool) -> None:
    """Print the items to remove, one per line; on stderr the runs that are skipped."""
    rows = [
        (each.run.name, each.state, formatting.size(item.bytes), item.path, item.description)
        for each in cleanings
        for item in each.items
    ]
    if rows:
        click.echo(formatting.clean(formatting.table([_HEADER, *rows])))
        click.echo(f"to remove: {_sum(cleanings)}")
    skipped = [each for each in cleanings if not each.items]
    reasons = [each.skip_reason or "nothing to remove" for each in skipped]
    if named:
        for each, words in zip(skipped, reasons, strict=True):
            click.echo(f"{each.run.name} is skipped: {words}", err=True)
    elif reasons:
        counts = (f"{count:,} {words}" for words, count in Counter(reasons).most_common())
        click.echo(f"skipped: {formatting.join_limited([*counts], 8, '; ')}", err=True)
    if not rows:
        click.echo("nothing to remove", err=True)


def _sum(cleanings: Sequence[Cleaning]) -> str:
    """Return a text like `12 items of 3 runs, 1.2 GB`."""
    full = [cleaning for cleaning in cleanings if cleaning.items]
    items = formatting.count(sum(len(cleaning.items) for cleaning in full), "item")
    size = formatting.size(sum(cleaning.bytes for cleaning in full))
    return f"{items} of {formatting.count(len(full), 'run')}, {size}"


def _record(cleaning: Cleaning, *, removed: bool) -> dict[str, object]:
    return {
        "name": cleaning.run.name,
        "directory": str(cleaning.run.path),
        "state": cleaning.state,
        "skip_reason": cleaning.skip_reason,
        "removed": removed and bool(cleaning.items),
        "bytes": cleaning.bytes,
        "items": [
            {
                "kind": item.kind,
                "path": item.path,
                "step": item.step,
                "files": len(item.files),
                "bytes": item.bytes,
            }
            for item in cleaning.items
        ],
    }
