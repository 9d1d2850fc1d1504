"""A run started once more from inside its job: back into the queue, or a job in its place."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from clusterddp.errors import ClusterDDPError, SlurmError
from clusterddp.request.spec import EXPEDITE, submission_comment
from clusterddp.run import events, restart_policy
from clusterddp.run.attempt import Attempt, Superseded
from clusterddp.run.job_log import say
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import control, requeue_exit
from clusterddp.slurm.own_job import (
    Ending,
    ending,
    is_rehearsal,
    own_name,
    requeued_after_grace,
)
from clusterddp.slurm.sbatch import sbatch

T = TypeVar("T")
P = ParamSpec("P")

PATIENCE_SECONDS = 600.0
"""How long a controller may be away before the run gives up on it."""
_PAUSE_SECONDS = 5.0


def start(run: RunDir, attempt: Attempt, job_id: str, restart: int, why: str) -> bool:
    """Have the run started again; returns whether it has put this very job back into the queue.

    Otherwise the next job goes on in its place, or what is to be typed is said.
    """
    if is_rehearsal(os.environ):
        say(
            f"clusterddp: {why}: a cluster would put the job back into the queue now; this "
            f"rehearsal has none. Go on with: {run.resubmission}"
        )
        return False

    def requeued() -> None:
        record(run, events.Requeued, job_id=job_id, attempt=attempt.number, why=why)

    if why == restart_policy.PREEMPTED and _slurm_requeues(own_name(os.environ, job_id)):
        requeued()
        say(f"clusterddp: {why}: Slurm puts job {job_id} back into the queue")
        _heed_withdrawal(run, job_id, job_id)
        return False  # and it has not ended well, should Slurm not do it
    try:
        patiently(attempt, lambda: _requeue(own_name(os.environ, job_id), restart))
    except control.RequeueRefused as refused:
        say(f"clusterddp: requeue is refused here ({refused}); submitting the next job")
        _in_place_of(run, attempt, job_id, why)
        return False
    except (Superseded, _Cancelled) as error:
        say(f"clusterddp: {error}")
        return False
    except SlurmError as error:
        _give_up(attempt, job_id, why, error)
        return False
    requeued()
    say(f"clusterddp: {why}: job {job_id} is back in the queue")
    _heed_withdrawal(run, job_id, job_id)
    return True


def _slurm_requeues(name: str) -> bool:
    try:
        return requeued_after_grace(name)
    except SlurmError:
        return False


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


def _in_place_of(run: RunDir, attempt: Attempt, job_id: str, why: str) -> None:
    try:
        spec = run.load_spec()
        if spec.launcher == "submitit":
            raise SlurmError("submitit's pickled task belongs to the job that it was made for")
        if os.environ.get("SLURM_ARRAY_TASK_ID"):
            raise SlurmError("a job in the place of an array's element would be no element")
        comment = dict(spec.sbatch).get("comment") or submission_comment(spec.run_name)
        script = run.script.read_text()
        successor = patiently(attempt, lambda: sbatch(script, os.environ, comment=comment))
        if successor == job_id:
            raise SlurmError("sbatch gave no answer, and Slurm shows no other job of this run")
    except (ClusterDDPError, OSError) as error:
        _give_up(attempt, job_id, why, error)
        return
    record(
        run,
        events.Submitted,
        job_id=successor,
        launcher="sbatch",
        in_place_of=job_id,
        attempt=attempt.number,
        why=why,
    )
    say(f"clusterddp: job {successor} goes on in place of job {job_id}")
    _heed_withdrawal(run, job_id, successor)


def _heed_withdrawal(run: RunDir, job_id: str, successor: str) -> None:
    """Who has asked the run to stop, or has cancelled it, meanwhile did not see what comes next."""
    if restart_policy.withdrawn(events.read(run.events), job_id):
        withdraw(run, successor)


def withdraw(run: RunDir, job_id: str) -> None:
    """Take a job out of the queue; one that stays there all the same starts nothing (`begin`)."""
    record(run, events.CancelAsked, job_id=job_id)
    try:
        own = job_id == os.environ.get("SLURM_JOB_ID")
        control.cancel(own_name(os.environ, job_id) if own else job_id)
    except SlurmError as error:
        say(f"clusterddp: {error}")
    say(f"clusterddp: job {job_id} is cancelled: a person has taken it back")


def let_job_end(run: RunDir, job_id: str, *, preempted: bool) -> None:
    """Have a job whose run does not go on end as any other does.

    Slurm may requeue one that was preempted. With --requeue=expedite it holds a job for ever whose
    script ends with a code other than 0 on healthy nodes (REQUEUE_HOLD, seen on 26.05).
    """
    if is_rehearsal(os.environ):
        return
    name = own_name(os.environ, job_id)
    try:
        if (preempted and _slurm_requeues(name)) or run.load_spec().requeue == EXPEDITE:
            control.forbid_requeue(name)
    except ClusterDDPError as error:
        say(f"clusterddp: {error}")


def _give_up(attempt: Attempt, job_id: str, why: str, error: Exception) -> None:
    run = attempt.run
    record(
        run,
        events.RequeueFailed,
        job_id=job_id,
        attempt=attempt.number,
        why=why,
        error=str(error),
    )
    say(
        f"clusterddp: this node cannot start the run again: {error}\n"
        f"clusterddp: go on with: {run.resubmission}"
    )


def warn_of_requeue_exit(run: RunDir, exit_code: int) -> None:
    """Say so where this cluster requeues a job because of the code with which this one ends."""
    try:
        settings = requeue_exit.settings()
    except SlurmError:
        return
    for setting in settings:
        if requeue_exit.names(setting, exit_code):
            say(
                f"clusterddp: warning: slurm.conf has {setting}: Slurm requeues the job for its "
                f"exit code {exit_code}. Take it out with: clusterddp cancel {run.shown}"
            )


def go_to_submission_folder() -> None:
    """Where the person was: a name or a path that is shown, and the next job, start from there.

    The script itself may be in the copy of the person's code.
    """
    with contextlib.suppress(OSError):
        os.chdir(os.environ.get("SLURM_SUBMIT_DIR") or ".")


def record(
    run: RunDir, event: Callable[P, events.Event], *args: P.args, **fields: P.kwargs
) -> None:
    """Add an event; a run directory that is gone or full costs the record, not the run."""
    try:
        events.add(run.events, event, *args, **fields)
    except OSError as error:
        kind = event(*args, **fields).kind
        say(f"clusterddp: cannot record {kind!r} in {run.events}: {error.strerror}.", err=True)
