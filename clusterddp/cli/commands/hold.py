"""`clusterddp hold`: holds nodes by a job, in which runs start at once."""

import json

import click

from clusterddp import log, polling
from clusterddp.cli.options import JSON_OPTION, DurationType, SettingsCommand, given_by, options
from clusterddp.cli.runs import RUNS_DIR_OPTION
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from clusterddp.request.options import DURATION, RESOURCES
from clusterddp.request.resources import Resources
from clusterddp.request.spec import REQUEST
from clusterddp.run.run_dir import RunDir
from clusterddp.status.follow import how_it_ended
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, statuses
from clusterddp.status.stop import cancel
from clusterddp.submission.fields import generate_name

_ROWS = [
    row for row in REQUEST if row.group == RESOURCES and row.field in Resources.__annotations__
]


@click.command(name="hold", cls=SettingsCommand)
@options(_ROWS)
@click.option("--run-name", metavar="NAME", help="Name of the hold. [default: generated]")
@click.option(
    "--idle",
    type=DurationType(DURATION, ("15m", 900.0)),
    default="15m",
    show_default=True,
    metavar="DURATION",
    help="End it when no run was in it for this long.",
)
@RUNS_DIR_OPTION
@JSON_OPTION
@click.pass_context
def command(
    ctx: click.Context, /, run_name: str | None, idle: float, as_json: bool, **_values: object
) -> int:
    """Hold nodes, so that 'clusterddp submit --in HOLD' starts runs there at once.

    It waits until Slurm has given the nodes, and prints their names. Ctrl-C before that cancels the
    job. The hold ends at its --time, when it is idle, or by 'clusterddp release HOLD'.

    Exit codes: 0 the nodes are held; 1 the job ended before; 2 usage error, or refused; 130
    interrupted.
    """
    from clusterddp.submission.hold import hold_spec, submit_hold

    run = submit_hold(hold_spec(given_by(ctx), run_name or generate_name("hold")), idle)
    try:
        status = _await_nodes(run)
    except KeyboardInterrupt:
        click.echo(cancel(run, statuses([run])[0]).message, err=True)
        return EXIT_INTERRUPTED
    if status.state != RunState.RUNNING:
        log.info(f"{run.name}: {how_it_ended(status)}")
        return EXIT_FAILED
    fields = {"hold": run.name, "job_id": status.job_id, "nodes": status.hosts}
    words = (
        f"{run.name} holds {', '.join(status.hosts)} as job {status.job_id}\n"
        f"  start a run  clusterddp submit --in {run.name} -- COMMAND\n"
        f"  release      clusterddp release {run.name}"
    )
    click.echo(json.dumps(fields) if as_json else words)
    return EXIT_DONE


def _await_nodes(run: RunDir) -> RunStatus:
    """Wait until the hold has its nodes, or has ended."""
    first, longest = polling.FOLLOW_SLURM_POLL_SECONDS
    said = ""
    for _ in polling.poll(every=first, longest=longest):
        [status] = statuses([run])
        if status.has_ended or (status.state == RunState.RUNNING and status.hosts):
            break
        words = f"{run.name}: {status.state}" + (f": {status.detail}" if status.detail else "")
        if words != said:
            log.info(said := words)
    return status
