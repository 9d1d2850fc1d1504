"""A run started once more from inside its job: back into the queue, or a job in its place."""

import os
import time
from collections.abc import Callable
from typing import Any

import click

from clusterddp import slurm
from clusterddp.attempt import Attempt
from clusterddp.errors import EXIT_FAILED, ClusterDDPError, RequestError, SlurmError
from clusterddp.run_dir import RunDir
from clusterddp.slurm import is_rehearsal
from clusterddp.spec import submission_comment

PATIENCE_SECONDS = 600.0
"""How long a controller may be away before the run gives up on it."""
_PAUSE_SECONDS = 5.0


def start(run: RunDir, attempt: Attempt, job_id: str, why: str) -> int:
    """Have the run started again; returns 0 when it is, and says what to type when it is not."""
    if is_rehearsal(os.environ):
        click.echo(
            f"clusterddp: {why}: a cluster would put the job back into the queue now; this "
            f"rehearsal has none. Go on with: clusterddp resubmit {run.shown}"
        )
        return EXIT_FAILED
    who = {"attempt": attempt.number, "why": why}
    try:
        patiently(lambda: slurm.requeue(job_id))
    except slurm.RequeueRefused as refused:
        click.echo(f"clusterddp: requeue is refused here ({refused}); submitting the next job")
        return _in_place_of(run, job_id, who)
    except SlurmError as error:
        return _give_up(run, job_id, who, error)
    record(run, "requeued", job_id=job_id, **who)
    click.echo(f"clusterddp: {why}: job {job_id} is back in the queue")
    return 0


def patiently(ask: Callable[[], None]) -> None:
    """Ask Slurm again and again while its controller is away. Raises SlurmError at the end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask()
        except slurm.RequeueRefused:
            raise
        except SlurmError as error:
            if time.monotonic() > deadline:
                raise
            click.echo(f"clusterddp: {error}; trying again")
        time.sleep(_PAUSE_SECONDS)  # a controller that comes back tells nobody


def _in_place_of(run: RunDir, job_id: str, who: dict[str, Any]) -> int:
    try:
        spec = run.load_spec()
        if spec.launcher == "submitit":
            raise SlurmError("submitit's pickled task belongs to the job that it was made for")
        element = os.environ.get("SLURM_ARRAY_TASK_ID")
        if element:
            raise SlurmError(f"an array's element goes on by itself: sbatch --array={element} FILE")
        os.chdir(os.environ.get("SLURM_SUBMIT_DIR") or ".")
        comment = dict(spec.sbatch).get("comment") or submission_comment(spec.run_name)
        successor = slurm.sbatch(run.script.read_text(), os.environ, comment=comment)
    except (ClusterDDPError, OSError) as error:
        return _give_up(run, job_id, who, error)
    record(run, "submitted", job_id=successor, launcher="sbatch", in_place_of=job_id, **who)
    click.echo(f"clusterddp: job {successor} goes on in place of job {job_id}")
    return 0


def _give_up(run: RunDir, job_id: str, who: dict[str, Any], error: Exception) -> int:
    words = str(error) if isinstance(error, RequestError | SlurmError) else f"{error}"
    record(run, "requeue_failed", job_id=job_id, **who, error=words)
    click.echo(
        f"clusterddp: this node cannot start the run again: {words}\n"
        f"clusterddp: go on with: clusterddp resubmit {run.shown}"
    )
    return EXIT_FAILED


def record(run: RunDir, event: str, **fields: Any) -> None:
    """Add an event; a run directory that is gone or full costs the record, not the run."""
    try:
        run.add_event(event, **fields)
    except OSError as error:
        click.echo(f"clusterddp: cannot record it in {run.events}: {error.strerror}.", err=True)
