"""`clusterddp jobs`: the runs below the output root as a table, the latest last."""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import JSON_OPTION, OUTPUT_ROOT_OPTION, RUN, echo_json
from clusterddp.run import formatting
from clusterddp.run.run_dir import RunDir, SweepDir, find_runs
from clusterddp.run.state import STATES
from clusterddp.run.status import RunStatus, statuses
from clusterddp.run.sweeps import SweepStatus, grouped, select_each, sweep_status

_HEADER = ("NAME", "STATE", "JOB", "NODES", "AGE", "STEP", "ACCURACY", "WHY")


@click.command(name="jobs", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, metavar="[RUN...]")
@click.option("-n", "--last", type=click.IntRange(1), metavar="N", help="The latest N runs alone.")
@click.option(
    "--state",
    type=click.Choice(STATES),
    multiple=True,
    help="The runs in this state alone; repeatable.",
)
@OUTPUT_ROOT_OPTION
@JSON_OPTION
def command(
    run: tuple[str, ...],
    last: int | None,
    state: tuple[str, ...],
    output_root: Path,
    as_json: bool,
) -> None:
    """List the runs, the latest last; of a sweep a line with how many of its points are how.

    RUN is a run, a sweep, whose points are listed then, or a pattern such as 'lr-*'. With --state,
    too, each point has its own line.

    NODES is nodes x tasks per node; AGE counts from the submission; WHY says why a run waits, or
    how it failed. In a terminal, lines are cut to its width; 'status' has the whole. --json prints
    a list of what 'status --json' prints for each.

    Exit codes: 0 listed, 2 a wrong request.
    """
    runs = find_runs(output_root)
    if run:
        found, wrong = select_each(output_root, run)
        if wrong:
            raise wrong[0]
        names = {each.path.absolute() for each in found}
        chosen: list[RunDir] = [each for each in runs if each.path.absolute() in names]
    else:
        chosen = runs if state else grouped(output_root, runs)
    listed = _statuses(chosen[-last:] if last and not state else chosen)
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


def _statuses(runs: Sequence[RunDir]) -> list[RunStatus | SweepStatus]:
    """Return the statuses in order; of a sweep that of all its points together."""
    alone = [run for run in runs if not isinstance(run, SweepDir)]
    known = {run.path: status for run, status in zip(alone, statuses(alone), strict=True)}
    return [sweep_status(run) if isinstance(run, SweepDir) else known[run.path] for run in runs]


def _row(status: RunStatus | SweepStatus, now: float) -> tuple[str, ...]:
    if isinstance(status, SweepStatus):
        age = formatting.duration(now - status.submitted_time if status.submitted_time else None)
        job = status.job_ids[-1] if status.job_ids else "-"
        points = f"{formatting.count(len(status.points), 'point')}: {status.summary}"
        return status.name, status.state, job, status.layout, age, "-", "-", points
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
