"""`clusterddp notify`: what the job does that tells the end of a run (`run.notify`)."""

from pathlib import Path

import click

from clusterddp import log
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.status.notify import notify_from_job


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
def command(run_dir: Path) -> None:
    """Tell the program of --notify how a run or a sweep has ended, unless that was done."""
    sweep = SweepDir(run_dir)
    with log.to(lambda line: click.echo(f"clusterddp: {line}")):
        notify_from_job(sweep if sweep.is_sweep else RunDir(run_dir))
