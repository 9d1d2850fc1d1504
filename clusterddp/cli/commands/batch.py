"""`clusterddp batch`: the batch controller, which runs the script's own lines as its child."""

import os
from pathlib import Path

import click

from clusterddp.batch import controller
from clusterddp.run.run_dir import RunDir


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("script", type=click.Path(path_type=Path))
def command(run_dir: Path, script: Path) -> int:
    """Run the batch script of a job and record the result of the attempt."""
    return controller.control(run_dir, script, code_changes, _bundle)


def code_changes(run: RunDir) -> list[str]:
    """Return the files that have changed since the submission, if the run has no copy of them."""
    from clusterddp.submission import snapshot  # most runs use a copy of their code

    folder = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".")
    return snapshot.changes_since_submission(run, folder) or []


def _bundle(run: RunDir) -> None:
    if not run.bundle.exists():
        from clusterddp.submission import bundle  # most runs have one

        bundle.bundle_manual_run(run)
