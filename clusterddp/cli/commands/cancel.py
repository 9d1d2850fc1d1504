"""`clusterddp cancel`: ends runs, whether Slurm or this workstation runs them."""

import contextlib
import dataclasses
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import click

from clusterddp.cli import run_argument
from clusterddp.cli.settings import SettingsCommand
from clusterddp.errors import RequestError, SlurmError
from clusterddp.run import events
from clusterddp.run.local_process import process_alive
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import CREATED, ENDED, FORGOTTEN, RUNNING, UNKNOWN
from clusterddp.run.status import RunStatus
from clusterddp.run.submission import Submission, latest_submission
from clusterddp.slurm import control


@dataclass(frozen=True)
class Cancellation:
    """What became of one run: `cancelled` says whether its end was asked for now."""

    name: str
    job_id: str
    cancelled: bool
    message: str


@click.command(name="cancel", cls=SettingsCommand)
@click.argument("run", type=run_argument.RUN, nargs=-1, required=True, metavar="RUN...")
@run_argument.output_root_option
@run_argument.JSON_OPTION
def command(run: tuple[str, ...], output_root: Path, as_json: bool) -> int:
    """Cancel each RUN: a run's name, job id or directory.

    A Slurm job is given to scancel; a run on this workstation gets SIGTERM and ends in order. It
    returns at once: 'clusterddp status' shows when the run has ended. One that has ended already
    is left as it is. Where it does not work with one of several, the others are cancelled.

    Exit codes: 0 each is cancelled or had ended, 1 one could not be cancelled, 2 one is no run.
    """
    found, failed = run_argument.find_those(output_root, run)
    tell = None if as_json else lambda result: result.message
    done = run_argument.on_each(found, cancel, tell, failed)
    code = run_argument.say_failed(failed)
    if as_json:
        click.echo(run_argument.as_json([dataclasses.asdict(result) for result in done]))
    return code


def cancel(run: RunDir, status: RunStatus) -> Cancellation:
    """Ask for the end of a run, and record that first, so that its end is not taken for a failure.

    A disk on which nothing can be recorded keeps no run from being ended; that is said. Raises
    SlurmError with scancel's words, or RequestError for a run of another machine; the record is
    then taken back.
    """
    submission = latest_submission(events.read(run.events))
    if submission is None and status.state == RUNNING:
        message = (
            f"{run.name}: its ranks were started by hand: end them where they were started, or use "
            f"'clusterddp stop {run.shown}'"
        )
        return Cancellation(run.name, status.job_id, False, message)
    if submission is None or status.state == CREATED:
        message = f"{run.name} was never submitted: there is nothing to cancel"
        return Cancellation(run.name, "", False, message)
    if status.state in ENDED:
        message = f"{run.name} has already ended: {status.state}"
        return Cancellation(run.name, submission.job_id, False, message)
    if status.state == UNKNOWN and status.detail.startswith(FORGOTTEN):
        message = f"{run.name}: Slurm no longer knows job {submission.job_id}: nothing to cancel"
        return Cancellation(run.name, submission.job_id, False, message)
    if submission.is_local:
        _check_local(run, submission)
    try:
        events.add(run.events, events.CancelAsked, job_id=submission.job_id)
    except OSError as error:
        click.echo(
            f"clusterddp: warning: {run.path} cannot be written ({error.strerror}): 'status' can "
            "take the end of this run for a failure",
            err=True,
        )
    try:
        _end(submission, status)
    except (SlurmError, OSError) as error:
        with contextlib.suppress(OSError):
            events.add(run.events, events.CancelFailed, job_id=submission.job_id)
        if isinstance(error, OSError):
            raise RequestError(
                f"{run.name}: process {submission.pid} cannot be signalled: {error.strerror}."
            ) from None
        raise
    message = f"{run.name}: asked {_who(submission, status)} to end it"
    return Cancellation(run.name, submission.job_id, True, message)


def _check_local(run: RunDir, submission: Submission) -> None:
    if process_alive(submission) is None:
        where = submission.host or "another machine"
        raise RequestError(
            f"{run.name} runs on {where}, not here; cancel it there with "
            f"'clusterddp cancel {run.shown}'."
        )


def _end(submission: Submission, status: RunStatus) -> None:
    if not submission.is_local:
        control.cancel(status.array_element or submission.job_id)
    elif submission.pid is not None:
        try:
            os.kill(submission.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it ended between the look and the signal


def _who(submission: Submission, status: RunStatus) -> str:
    if submission.is_local:
        return f"process {submission.pid}"
    return f"Slurm (job {status.array_element or submission.job_id})"
