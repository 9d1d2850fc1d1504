"""`clusterddp tensorboard`: shows the metrics of a run in TensorBoard."""

import signal
import sys
from pathlib import Path

import click

from clusterddp.cli.main import ON
from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, typed_runs_dir
from clusterddp.remote import board
from clusterddp.status.find import find_run


@click.command(name="tensorboard", cls=SettingsCommand)
@click.argument("run", type=RUN)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    show_default="6006, or a free one",
    help="Port of this machine; 0 for a free one.",
)
@click.option("--serve", is_flag=True, hidden=True, expose_value=False)
@RUNS_DIR_OPTION
def command(run: str, port: int | None, runs_dir: Path) -> int:
    """Show the metrics of RUN in TensorBoard until Ctrl-C.

    The built-in training writes them with --tensorboard; your own may write them below the run's
    directory. With --on NAME, TensorBoard runs on the cluster and ssh forwards its port. The URL
    has a secret: without it, other users of that host get no answer.

    Exit codes: 1 the cluster was not reached, 2 no such run, or TensorBoard does not start, 130
    Ctrl-C.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # the forward and TensorBoard end, too
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    on = click.get_current_context().meta.get(ON)
    if on is not None:
        return board.forward(on, run, typed_runs_dir(runs_dir), port, click.echo)
    found = find_run(runs_dir, run)
    spec = found.read_spec()
    own = spec.python if spec and not spec.container_image and Path(spec.python).is_file() else ""
    return board.serve(found.path, own or sys.executable, board.free_port(port), click.echo)
