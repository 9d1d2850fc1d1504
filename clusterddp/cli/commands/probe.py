"""`clusterddp probe`: the preflight probe, which the batch controller starts on each node."""

import os

import click

from clusterddp.preflight import probe
from clusterddp.preflight.collector import UNREACHED
from clusterddp.ranks.variables import host_name
from clusterddp.slurm.forms import NONCE_VARIABLE


@click.command(hidden=True)
@click.option("--collector", multiple=True, help="Name or address of the batch host.")
@click.option("--port", type=int, required=True, help="Its port.")
@click.option(
    "--listen",
    "ports",
    type=int,
    multiple=True,
    help="Candidate ports; the first free one is used.",
)
@click.option("--gpus", type=int, default=0, help="GPUs of the job on this node.")
def command(collector: tuple[str, ...], port: int, ports: tuple[int, ...], gpus: int) -> None:
    """Measure this node together with the job's other nodes, and report to the batch host."""
    nonce = os.environ.get(NONCE_VARIABLE, "")
    try:
        probe.run(collector, port, gpus, nonce, host_name(os.environ), ports)
    except OSError as error:
        where = f"{', '.join(collector)}, port {port}"
        click.echo(f"the batch host ({where}): {error}", err=True)
        raise SystemExit(UNREACHED if isinstance(error, probe.Unreachable) else 1) from None
