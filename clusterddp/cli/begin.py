"""`clusterddp begin`: the batch script's first word: one more attempt of the run, or none.

Prints the attempt's number on stdout, for the script; everything else goes to stderr.
"""

import os
from pathlib import Path
from typing import Any

import click

from clusterddp import attempt as attempts
from clusterddp import attempt_logs, requeue
from clusterddp.attempt import Attempt, NotStarted
from clusterddp.cli import next_start
from clusterddp.cli.job_log import say
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, EXIT_PAUSED, ClusterDDPError
from clusterddp.run_dir import RunDir, read_json, run_folders
from clusterddp.slurm.own_job import own_name

_MOST_CHANGES = 20


@click.command(hidden=True)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--job-id", default="", help="Slurm's job id.")
@click.option("--restart", type=int, default=0, help="SLURM_RESTART_COUNT.")
@click.option("--nodelist", default="", help="SLURM_JOB_NODELIST.")
@click.option("--max-requeues", type=int, default=0, help="Starts after the first.")
@click.option("--patience", type=float, default=300.0, help="Seconds to wait for another attempt.")
@click.option("--or-done", is_flag=True, help="Print 'done' instead, and exit with 0, if it is.")
def command(
    run_dir: Path,
    job_id: str,
    restart: int,
    nodelist: str,
    max_requeues: int,
    patience: float,
    or_done: bool,
) -> int:
    """Make the directory of the run's next attempt and print its number."""
    run = RunDir(run_dir)
    who = {"job_id": job_id, "restart": restart}
    name = own_name(os.environ, job_id)
    element = {"array_element": name} if name != job_id else {}
    if restart and _is_done(run, job_id):
        words = f"{run.name} is done, so this start of job {job_id} has nothing left to do"
        next_start.record(run, "not_started", **who, nodelist=nodelist, why=words)
        if not or_done:
            raise NotStarted(f"{words}.")  # to a script that would go on after exit code 0
        say(f"clusterddp: {words}", err=True)
        click.echo(requeue.DONE)
        return EXIT_DONE
    try:
        made = _begin(run, job_id, max_requeues, patience)
    except Exception as error:
        next_start.record(run, "started", **who, **element, nodelist=nodelist)
        next_start.record(run, "ended", **who, **_failure(error))
        if not isinstance(error, ClusterDDPError):
            raise
        say(f"clusterddp: {error}", err=True)
        return error.exit_code
    next_start.record(run, "started", **who, **element, nodelist=nodelist, attempt=made.number)
    try:
        _note_changed_code(run, made)
    except (ClusterDDPError, OSError) as error:  # a remark, which must not end the start
        say(f"clusterddp: the code cannot be compared: {error}", err=True)
    click.echo(made.number)
    return EXIT_DONE


def _begin(run: RunDir, job_id: str, max_requeues: int, patience: float) -> Attempt:
    """Make the attempt. Raises ClusterDDPError, and what else ends this process."""
    try:
        run.load_spec()  # refused where a newer version has written it
        _refuse_withdrawn(run, job_id)
        if own_name(os.environ, job_id) != job_id:
            _note_new_job(run, job_id)
        if len(requeue.causes_of(run.read_events())) > max_requeues:
            raise NotStarted(
                f"not started again: {requeue.capped(max_requeues)}. Go on with: {run.resubmission}"
            )
        attempts.await_silence(run, job_id, patience, lambda line: say(line, err=True))
        made = attempts.begin(run)
        made.set_room_aside()
        attempt_logs.divide(made, job_id)
        # Looked at now that the attempt can be seen: who asks from here on leaves a mark in it.
        _refuse_withdrawn(run, job_id)
        return made
    except OSError as error:
        raise NotStarted(
            f"cannot make an attempt below {run.attempts}: {error.strerror}. Make room, or give "
            "the folder back its write permission."
        ) from None


def _failure(error: Exception) -> dict[str, Any]:
    """The fields of an `ended` record of a start that has not begun."""
    if not isinstance(error, ClusterDDPError):
        why = f"'clusterddp begin' failed: {type(error).__name__}: {error}"
        return {"exit_code": EXIT_FAILED, "cause": requeue.FAILED, "why": why}
    cause = error.cause if isinstance(error, _Withdrawn) else requeue.FAILED
    return {"exit_code": error.exit_code, "cause": cause, "why": str(error)}


class _Withdrawn(NotStarted):
    """A person has stopped the run or cancelled the job while it waited to start again."""

    exit_code = EXIT_PAUSED

    def __init__(self, cause: str) -> None:
        who = "'clusterddp cancel'" if cause == requeue.CANCELLED else "'clusterddp stop'"
        super().__init__(f"not started again: {who} asked for it")
        self.cause = cause


def _is_done(run: RunDir, job_id: str) -> bool:
    """Return whether an earlier start of this job has finished the run.

    Slurm starts a job once more whose node's daemon was lost with its script's last word, and one
    that was preempted while it was ending (seen on 22.05 and 24.11).
    """
    if requeue.done_by(run.read_events(), job_id):
        return True
    latest = attempts.latest(run)
    left = read_json(latest.end) or {} if latest else {}
    if latest is None or left.get("cause") != requeue.DONE:
        return False
    if latest.read_record().get("job_id") != job_id:
        return False
    # Its ranks were done, and its script was lost before it could say so.
    end = {"exit_code": 0, "cause": requeue.DONE, "step": left.get("step")}
    next_start.record(run, "ended", job_id=job_id, attempt=latest.number, **end)
    return True


def _note_new_job(run: RunDir, job_id: str) -> None:
    """Record that a person has submitted an array's element once more; sbatch notes nothing."""
    starts = [event.get("job_id") for event in run.read_events() if event.get("event") == "started"]
    if starts and job_id not in starts:
        next_start.record(run, "resubmit", job_id=job_id)


def _refuse_withdrawn(run: RunDir, job_id: str) -> None:
    cause = requeue.withdrawn(run.read_events(), job_id)
    if cause:
        raise _Withdrawn(cause)


def _note_changed_code(run: RunDir, attempt: Attempt) -> None:
    """Record in what the code differs from what was submitted, where no copy of it is used."""
    if run.code.is_dir() or not run.code_record.exists():
        return
    from clusterddp import snapshot

    before = snapshot.Snapshot.from_json(run.code_record.read_text())
    after = snapshot.fingerprint(
        Path(os.environ.get("SLURM_SUBMIT_DIR") or "."), leave_out=run_folders(run)
    )
    changed = snapshot.difference(before, after) if after else []
    if changed:
        next_start.record(
            run, "code_changed", attempt=attempt.number, changes=changed[:_MOST_CHANGES]
        )
        say(
            f"clusterddp: the code has changed since the run was submitted: "
            f"{', '.join(changed[:_MOST_CHANGES])}; this start uses it as it is now",
            err=True,
        )
