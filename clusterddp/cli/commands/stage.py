"""`clusterddp stage`: unpacks the environment on a node, started there by the batch controller."""

import json
import os
import signal
import sys
from pathlib import Path

import click

from clusterddp.errors import EXIT_FAILED
from clusterddp.ranks.variables import host_name
from clusterddp.staging import node
from clusterddp.staging.environment import StagingError


@click.command(hidden=True)
@click.argument("archive", type=click.Path(path_type=Path))
@click.argument("copy", type=click.Path(path_type=Path))
@click.argument("needed", type=int)
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
def command(archive: Path, copy: Path, needed: int, bundle: Path | None) -> int:
    """Unpack ARCHIVE to COPY unless it is there, and print the result as JSON."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # meant for the tasks, which start later
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves no draft
    result: dict[str, object] = {"host": host_name(os.environ)}
    try:
        result["unpacked"] = node.unpack(archive, copy, needed, bundle)
    except StagingError as error:
        result["error"] = str(error)
    click.echo(json.dumps(result))
    return EXIT_FAILED if "error" in result else 0
