"""`clusterddp batch`: what a batch script hands over to once its environment is set up."""

import os
from pathlib import Path

import click

from clusterddp.batch import controller
from clusterddp.run.run_dir import RunDir


@click.command(hidden=True, context_settings={"allow_interspersed_args": False})
@click.option("--run-dir", type=click.Path(path_type=Path), required=True)
@click.option(
    "--script",
    type=click.Path(path_type=Path),
    required=True,
    help="The batch script, which says what was asked, and of which the run keeps a copy.",
)
@click.option("--ended", type=int, help="Exit code of a script that failed before its step.")
@click.argument("srun", nargs=-1, type=click.UNPROCESSED)
def command(run_dir: Path, script: Path, ended: int | None, srun: tuple[str, ...]) -> int:
    """Run one attempt of a run to its verdict; ends with the job's exit code."""
    return controller.control(run_dir, script, srun, ended, code_changes, _carry)


def code_changes(run: RunDir) -> list[str]:
    """List what differs from the code that was submitted, where the run uses no copy of it."""
    from clusterddp.submission import snapshot  # most runs use a copy of their code

    folder = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".")
    return snapshot.changes_since_submission(run, folder) or []


def _carry(run: RunDir) -> None:
    if not run.bundle.exists():
        from clusterddp.submission import bundle  # most runs carry one

        bundle.carry_at_start(run)
