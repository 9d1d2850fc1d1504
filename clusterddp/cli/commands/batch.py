"""`clusterddp batch`: what a batch script becomes, and of which its lines are a child."""

import os
from pathlib import Path

import click

from clusterddp.batch import controller
from clusterddp.run.run_dir import RunDir


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("script", type=click.Path(path_type=Path))
def command(run_dir: Path, script: Path) -> int:
    """Be the batch process of a job: run the lines of its script from an attempt to its verdict."""
    return controller.control(run_dir, script, code_changes, _carry)


def code_changes(run: RunDir) -> list[str]:
    """List what differs from the code that was submitted, where the run uses no copy of it."""
    from clusterddp.submission import snapshot  # most runs use a copy of their code

    folder = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".")
    return snapshot.changes_since_submission(run, folder) or []


def _carry(run: RunDir) -> None:
    if not run.bundle.exists():
        from clusterddp.submission import bundle  # most runs carry one

        bundle.bundle_manual_run(run)
