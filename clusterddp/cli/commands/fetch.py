"""`clusterddp fetch`: copies the results of a run from a cluster to this machine."""

from pathlib import Path

import click

from clusterddp.cli.main import ON
from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, typed_runs_dir
from clusterddp.errors import EXIT_DONE
from clusterddp.remote import results
from clusterddp.status.find import find_run


@click.command(name="fetch", cls=SettingsCommand)
@click.argument("run", type=RUN)
@click.argument("pattern", nargs=-1)
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    show_default="jobs/RUN",
    help="Copy into this directory.",
)
@click.option("--pack", is_flag=True, hidden=True)
@RUNS_DIR_OPTION
def command(run: str, pattern: tuple[str, ...], to: Path | None, pack: bool, runs_dir: Path) -> int:
    """Copy the files of RUN from the cluster of --on: logs, metrics and reports.

    Each PATTERN ('checkpoints/*', '*.html') chooses files by their path in the run's directory
    instead. Checkpoints and the code come only by a PATTERN. With --to, a file that is here
    is replaced; without, only one that was fetched from the same cluster.

    Exit codes: 0 copied, 1 the cluster was not reached, 2 no such run, no file fits, or it
    cannot be written here.
    """
    if pack:
        results.pack(find_run(runs_dir, run).path, pattern)
        return EXIT_DONE
    on = click.get_current_context().meta.get(ON)
    if on is None:
        raise click.UsageError("fetch needs a cluster: clusterddp --on NAME fetch RUN.")
    code, count, folder = results.fetch(on, run, pattern, typed_runs_dir(runs_dir), to)
    if not code:
        click.echo(f"{count} files in {folder}")
    return code
