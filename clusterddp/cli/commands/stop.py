"""`clusterddp stop`: asks runs to checkpoint and exit, so that they can be resumed."""

from collections.abc import Sequence
from pathlib import Path

import click

from clusterddp import log
from clusterddp.cli.options import JSON_OPTION, SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, act_on_each
from clusterddp.errors import EXIT_FAILED, EXIT_INTERRUPTED
from clusterddp.run.run_dir import RunDir
from clusterddp.status.state import RunState
from clusterddp.status.stop import StopResult, stop


@click.command(name="stop", cls=SettingsCommand)
@click.argument("run", type=RUN, nargs=-1, required=True, metavar="RUN...")
@click.option("--wait", is_flag=True, help="Wait until the runs have ended.")
@RUNS_DIR_OPTION
@JSON_OPTION
def command(run: tuple[str, ...], wait: bool, runs_dir: Path, as_json: bool) -> int:
    """Ask each RUN to checkpoint and exit.

    RUN is a run's or sweep's name, job id or directory, or a pattern ('lr-*').

    All ranks save a checkpoint at the same step and exit within seconds. No other attempt follows
    until 'clusterddp resume RUN'. The job of a COMMAND gets SIGUSR1. A queued run is cancelled; an
    ended run is not changed. If one run fails to stop, the others are still asked.

    Exit codes: 0 all are asked, or had ended (with --wait: and none failed); 1 one could not be
    asked, or failed; 2 one does not exist; 130 interrupted.
    """
    return act_on_each(runs_dir, run, stop, _message, as_json=as_json, wait=_wait if wait else None)


def _message(result: StopResult) -> str:
    again = f"\n  resume with: {result.next_command}" if result.next_command else ""
    return f"{result.message}{again}"


def _wait(runs: Sequence[RunDir]) -> int:
    from clusterddp.status.follow import how_it_ended, wait_for_end

    code = 0
    try:
        for run in runs:
            status = wait_for_end(run)
            log.info(f"{run.name}: {how_it_ended(status)}")
            if status.state in (RunState.FAILED, RunState.UNKNOWN):
                code = EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code
