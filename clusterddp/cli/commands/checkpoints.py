"""`clusterddp checkpoints`: lists and verifies the checkpoints of a run, the latest last."""

import dataclasses
import time
from pathlib import Path

import click

from clusterddp import formatting, log
from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.catalog import Entry
from clusterddp.cli.options import JSON_OPTION, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, echo_json
from clusterddp.errors import CheckpointError, coded
from clusterddp.run import events
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir
from clusterddp.status.find import find_run

_HEADER = ("STEP", "AGE", "SIZE", "", "STATE")


@click.command(name="checkpoints", cls=SettingsCommand)
@click.argument("run", type=RUN, required=False, metavar="[RUN]")
@RUNS_DIR_OPTION
@JSON_OPTION
def command(run: str | None, runs_dir: Path, as_json: bool) -> None:
    """List and verify the checkpoints of RUN: a name, job id or directory; default: the latest.

    STATE is 'verified' (the file has its recorded SHA-256) or the problem. 'best' marks the highest
    test accuracy, 'next' the checkpoint that the run would resume from, 'memory' one that was saved
    from the memory of a node.

    Exit codes: 0 listed, even if some are damaged; 1 a directory cannot be read; 2 no such run.
    """
    run_dir = find_run(runs_dir, run)
    entries = catalog.list_verified(run_dir)[::-1]
    if as_json:
        echo_json([dataclasses.asdict(entry) | {"path": str(entry.path)} for entry in entries])
    elif not entries:
        click.echo(_why_none(run_dir), err=True)
    else:
        click.echo(formatting.table([_HEADER, *(_row(entry, time.time()) for entry in entries)]))
        there = {entry.step for entry in entries}
        cleaned = History.read(run_dir).every(events.Cleaned)
        gone = {step for event in cleaned for step in event.checkpoints} - there
        if gone:
            steps = formatting.join_limited([str(step) for step in sorted(gone)], 8)
            click.echo(f"removed by 'clusterddp clean': step {steps}", err=True)


def _why_none(run: RunDir) -> str:
    try:
        with log.to(lambda _: None):
            catalog.find_resume_checkpoint(run)
    except CheckpointError as error:
        return f"clusterddp: {coded(error)}"
    return f"{run.cli_name} has no checkpoints"


def _row(entry: Entry, now: float) -> tuple[str, ...]:
    known = (("best", entry.is_best), ("next", entry.is_next), ("memory", entry.from_memory))
    marks = [word for word, holds in known if holds]
    return (
        str(entry.step),
        formatting.duration(now - entry.modified),
        formatting.size(entry.bytes),
        ",".join(marks),
        entry.problem or "verified",
    )
