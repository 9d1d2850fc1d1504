"""`clusterddp notify`: sends the notification of a run's end, from the notification job."""

from pathlib import Path

import click

from clusterddp import log
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.status.notify import notify_from_job


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
def command(run_dir: Path) -> None:
    """Run the program of --notify for the end of a run or sweep, unless that was done."""
    sweep = SweepDir(run_dir)
    with log.to(lambda line: click.echo(f"clusterddp: {line}")):
        notify_from_job(sweep if sweep.is_sweep else RunDir(run_dir))
