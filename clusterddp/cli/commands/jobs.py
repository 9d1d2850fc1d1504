"""`clusterddp jobs`: the runs below the output root as a table, the latest last."""

import shutil
import sys
import time
from pathlib import Path

import click

from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import JSON_OPTION, OUTPUT_ROOT_OPTION, echo_json
from clusterddp.run import formatting
from clusterddp.run.run_dir import find_runs
from clusterddp.run.state import STATES
from clusterddp.run.status import RunStatus, statuses

_HEADER = ("NAME", "STATE", "JOB", "NODES", "AGE", "STEP", "ACCURACY", "WHY")


@click.command(name="jobs", cls=SettingsCommand)
@click.option("-n", "--last", type=click.IntRange(1), metavar="N", help="The latest N runs alone.")
@click.option(
    "--state",
    type=click.Choice(STATES),
    multiple=True,
    help="The runs in this state alone; repeatable.",
)
@OUTPUT_ROOT_OPTION
@JSON_OPTION
def command(last: int | None, state: tuple[str, ...], output_root: Path, as_json: bool) -> None:
    """List the runs, the latest last.

    NODES is nodes x tasks per node; AGE counts from the submission; WHY says why a run waits, or
    how it failed. In a terminal, lines are cut to its width; 'status' has the whole. --json prints
    a list of what 'status --json' prints for each.

    Exit codes: 0 listed, 2 a wrong request.
    """
    runs = find_runs(output_root)
    listed = statuses(runs[-last:] if last and not state else runs)
    if state:
        listed = [status for status in listed if status.state in state][-(last or 0) :]
    if as_json:
        echo_json([status.as_dict() for status in listed])
    elif not listed:
        among = f"{' or '.join(state)} " if runs else ""
        click.echo(f"no {among}runs below {output_root}", err=True)
    else:
        text = formatting.table([_HEADER, *(_row(status, time.time()) for status in listed)])
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("\n".join(_cut(line, width) for line in text.splitlines()))


def _cut(line: str, width: int | None) -> str:
    """A line as wide as the terminal at most; as it is where there is none, for other programs."""
    return line if width is None or len(line) <= width else f"{line[: width - 1]}…"


def _row(status: RunStatus, now: float) -> tuple[str, ...]:
    since = status.submitted_time or status.started_time or status.created_time
    asked = f"{status.nodes}x{status.tasks_per_node}" if status.nodes else "-"
    why = status.first_failure or status.detail
    return (
        status.name,
        status.state,
        status.array_element or status.job_id or "-",
        asked,
        formatting.duration(now - since if since else None),
        "-" if status.step is None else str(status.step),
        "-" if status.accuracy is None else f"{status.accuracy:.4f}",
        formatting.line(why.partition("\n")[0]),
    )
