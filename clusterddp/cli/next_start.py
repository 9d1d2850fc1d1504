"""A run started once more from inside its job: back into the queue, or a job in its place."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from clusterddp import requeue
from clusterddp.attempt import Attempt, Superseded
from clusterddp.cli.job_log import say
from clusterddp.errors import EXIT_FAILED, ClusterDDPError, RequestError, SlurmError
from clusterddp.run_dir import RunDir
from clusterddp.slurm import control
from clusterddp.slurm.own_job import Ending, ending, is_rehearsal, own_name
from clusterddp.slurm.sbatch import sbatch
from clusterddp.spec import submission_comment

T = TypeVar("T")

PATIENCE_SECONDS = 600.0
"""How long a controller may be away before the run gives up on it."""
_PAUSE_SECONDS = 5.0


def start(run: RunDir, attempt: Attempt, job_id: str, restart: int, why: str) -> int:
    """Have the run started again; returns 0 when it is, and says what to type when it is not."""
    if is_rehearsal(os.environ):
        say(
            f"clusterddp: {why}: a cluster would put the job back into the queue now; this "
            f"rehearsal has none. Go on with: clusterddp resubmit {run.shown}"
        )
        return EXIT_FAILED
    who = {"attempt": attempt.number, "why": why}
    try:
        patiently(attempt, lambda: _requeue(own_name(os.environ, job_id), restart))
    except control.RequeueRefused as refused:
        say(f"clusterddp: requeue is refused here ({refused}); submitting the next job")
        return _in_place_of(run, attempt, job_id, who)
    except (Superseded, _Cancelled) as error:
        say(f"clusterddp: {error}")
        return EXIT_FAILED
    except SlurmError as error:
        return _give_up(run, job_id, who, error)
    record(run, "requeued", job_id=job_id, **who)
    say(f"clusterddp: {why}: job {job_id} is back in the queue")
    _heed_withdrawal(run, job_id, job_id)
    return 0


class _Cancelled(ClusterDDPError):
    """A person has cancelled the job, as was only seen once the controller was back."""


def _requeue(name: str, restart: int) -> None:
    """Requeue a job, unless it was cancelled: Slurm would put that back as well."""
    word = ending(name, restart)
    if word is Ending.UNKNOWN:
        raise SlurmError("Slurm does not say how the job is doing")
    if word is Ending.CANCELLED:
        raise _Cancelled("the job was cancelled, and is not put back into the queue")
    control.requeue(name)


def patiently(attempt: Attempt, ask: Callable[[], T]) -> T:
    """Ask Slurm again and again while its controller is away.

    Raises SlurmError at the end, and Superseded once the run goes on elsewhere: this job was given
    up meanwhile, and its number is that of its successor.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        if attempt.is_superseded:
            raise Superseded(
                f"attempt {attempt.number} is superseded: a later one of the run has begun"
            )
        try:
            return ask()
        except control.RequeueRefused:
            raise
        except SlurmError as error:
            if time.monotonic() > deadline:
                raise
            say(f"clusterddp: {error}; trying again")
        time.sleep(_PAUSE_SECONDS)  # a controller that comes back tells nobody


def _in_place_of(run: RunDir, attempt: Attempt, job_id: str, who: dict[str, Any]) -> int:
    try:
        spec = run.load_spec()
        if spec.launcher == "submitit":
            raise SlurmError("submitit's pickled task belongs to the job that it was made for")
        element = os.environ.get("SLURM_ARRAY_TASK_ID")
        if element:
            raise SlurmError(f"an array's element goes on by itself: sbatch --array={element} FILE")
        comment = dict(spec.sbatch).get("comment") or submission_comment(spec.run_name)
        script = run.script.read_text()
        successor = patiently(attempt, lambda: sbatch(script, os.environ, comment=comment))
        if successor == job_id:
            raise SlurmError("sbatch gave no answer, and Slurm shows no other job of this run")
    except (ClusterDDPError, OSError) as error:
        return _give_up(run, job_id, who, error)
    record(run, "submitted", job_id=successor, launcher="sbatch", in_place_of=job_id, **who)
    say(f"clusterddp: job {successor} goes on in place of job {job_id}")
    _heed_withdrawal(run, job_id, successor)
    return 0


def _heed_withdrawal(run: RunDir, job_id: str, successor: str) -> None:
    """Who has asked the run to stop, or has cancelled it, meanwhile did not see what comes next."""
    if requeue.withdrawn(run.read_events(), job_id):
        withdraw(run, successor)


def withdraw(run: RunDir, job_id: str) -> None:
    """Take a job out of the queue; one that stays there all the same starts nothing (`begin`)."""
    record(run, "cancelled", job_id=job_id)
    try:
        own = job_id == os.environ.get("SLURM_JOB_ID")
        control.cancel(own_name(os.environ, job_id) if own else job_id)
    except SlurmError as error:
        say(f"clusterddp: {error}")
    say(f"clusterddp: job {job_id} is cancelled: a person has taken it back")


def _give_up(run: RunDir, job_id: str, who: dict[str, Any], error: Exception) -> int:
    words = str(error) if isinstance(error, RequestError | SlurmError) else f"{error}"
    record(run, "requeue_failed", job_id=job_id, **who, error=words)
    say(
        f"clusterddp: this node cannot start the run again: {words}\n"
        f"clusterddp: go on with: clusterddp resubmit {run.shown}"
    )
    return EXIT_FAILED


def go_to_submission_folder() -> None:
    """Where the person was: a name or a path that is shown, and the next job, start from there.

    The script itself may be in the copy of the person's code.
    """
    with contextlib.suppress(OSError):
        os.chdir(os.environ.get("SLURM_SUBMIT_DIR") or ".")


def record(run: RunDir, event: str, **fields: Any) -> None:
    """Add an event; a run directory that is gone or full costs the record, not the run."""
    try:
        run.add_event(event, **fields)
    except OSError as error:
        say(f"clusterddp: cannot record {event!r} in {run.events}: {error.strerror}.", err=True)
