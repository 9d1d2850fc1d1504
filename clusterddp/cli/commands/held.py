"""`clusterddp held`: keeps a run inside an allocation, or a hold, in a separate process."""

from pathlib import Path

import click

from clusterddp.run.run_dir import RunDir


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("nodes", default="")
@click.option("--idle", type=float, default=0.0, help="Seconds after which an idle hold ends.")
def command(run_dir: Path, nodes: str, idle: float) -> int:
    """Run the script of a run on NODES of the job; without NODES, keep a hold."""
    if nodes:
        from clusterddp.launchers import held

        return held.keep(RunDir(run_dir), nodes.split(","))
    from clusterddp.batch import hold

    return hold.keep(RunDir(run_dir), idle)
