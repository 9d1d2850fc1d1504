"""`clusterddp release`: ends holds."""

from operator import attrgetter
from pathlib import Path

import click

from clusterddp.cli.options import JSON_OPTION, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, act_on_each
from clusterddp.errors import RequestError
from clusterddp.run import hold
from clusterddp.run.history import History
from clusterddp.run.hold import Room
from clusterddp.run.run_dir import RunDir
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus
from clusterddp.status.stop import Send, StopResult, stop


@click.command(name="release", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, required=True, metavar="HOLD...")
@click.option("-y", "--yes", is_flag=True, help="Cancel the runs in it.")
@RUNS_DIR_OPTION
@JSON_OPTION
def command(run: tuple[str, ...], yes: bool, runs_dir: Path, as_json: bool) -> int:
    """End each HOLD and give its nodes back; one that waits in the queue is cancelled.

    Exit codes: 0 all are released or had ended; 2 one does not exist, is not a hold, or has runs.
    """

    def release(run: RunDir, status: RunStatus, send: Send) -> StopResult:
        if not hold.is_hold(run):
            raise RequestError(
                f"{run.name} is a run, not a hold. Use 'clusterddp cancel'. [CD0420]"
            )
        runs = Room.of(History.read(run).events).runs if status.state == RunState.RUNNING else {}
        if runs and not yes:
            names = ", ".join(Path(event.run).name for event in runs.values())
            raise RequestError(
                f"{run.name} has runs: {names}. Wait for their ends, or cancel them with --yes. "
                "[CD0420]"
            )
        return stop(run, status, send)

    return act_on_each(runs_dir, run, release, attrgetter("message"), as_json=as_json)
