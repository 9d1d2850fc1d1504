"""`clusterddp jobs`: the runs below the output root as a table, the latest last."""

import dataclasses
import time
from pathlib import Path

import click

from clusterddp import units
from clusterddp.cli import runs
from clusterddp.cli.settings import SettingsCommand
from clusterddp.run_status import RunStatus

_HEADER = ("NAME", "STATE", "JOB", "NODES", "AGE", "STEP", "ACCURACY", "")


@click.command(name="jobs", cls=SettingsCommand)
@runs.output_root_option
@runs.JSON_OPTION
def command(output_root: Path, as_json: bool) -> None:
    """List the runs, the latest last.

    NODES is nodes x tasks per node; AGE counts from the submission; the last column says why a run
    is waiting, or how it failed. --json prints a list of what 'status --json' prints for each.

    Exit codes: 0 listed, 2 a wrong request.
    """
    found = runs.statuses(runs.all_runs(output_root))
    if as_json:
        click.echo(runs.as_json([dataclasses.asdict(status) for status in found]))
    elif not found:
        click.echo(f"no runs below {output_root}", err=True)
    else:
        click.echo(table([_HEADER, *(_row(status, time.time()) for status in found)]))


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns aligned to the left, two blanks apart, without trailing blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(status: RunStatus, now: float) -> tuple[str, ...]:
    since = status.submitted_time or status.started_time or status.created_time
    asked = f"{status.nodes}x{status.tasks_per_node}" if status.nodes else "-"
    why = status.first_failure or status.detail
    return (
        status.name,
        status.state,
        status.job_id or "-",
        asked,
        runs.duration(now - since if since else None),
        "-" if status.step is None else str(status.step),
        "-" if status.accuracy is None else f"{status.accuracy:.4f}",
        units.line(why.partition("\n")[0]),
    )
