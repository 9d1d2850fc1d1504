"""`clusterddp stop`: asks runs to save and leave, so that they can be gone on with later."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import click

from clusterddp.cli import run_argument
from clusterddp.cli.commands.cancel import cancel
from clusterddp.cli.settings import SettingsCommand
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ClusterDDPError,
    RequestError,
)
from clusterddp.run import events
from clusterddp.run.attempt import latest
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import CREATED, ENDED, FAILED, QUEUED, RUNNING, UNKNOWN
from clusterddp.run.status import RunStatus
from clusterddp.run.submission import Submission, latest_submission
from clusterddp.slurm import control


@dataclass(frozen=True)
class Stop:
    """What became of one run: `asked` says whether it was asked now to save and leave."""

    name: str
    job_id: str
    asked: bool
    cancelled: bool
    """Whether it was taken out of the queue instead, as nothing trained."""
    message: str
    next_command: str = ""


@click.command(name="stop", cls=SettingsCommand)
@click.argument("run", type=run_argument.RUN, nargs=-1, required=True, metavar="RUN...")
@click.option("--wait", is_flag=True, help="Return when the runs have left.")
@run_argument.output_root_option
@run_argument.JSON_OPTION
def command(run: tuple[str, ...], wait: bool, output_root: Path, as_json: bool) -> int:
    """Ask each RUN to save and leave: a run's name, job id or directory.

    Its ranks save a checkpoint at one step and end, within seconds, and no other start follows
    until 'clusterddp resubmit RUN' goes on from there. The job of a COMMAND gets SIGUSR1. A run
    that waits in the queue is cancelled, for nothing trains; one that has ended is left as it is.
    Where it does not work with one of several, the others are asked.

    Exit codes: 0 each is asked, or had ended (with --wait: and it did not fail), 1 one could not
    be asked, or failed, 2 one is no run, 130 interrupted.
    """
    reached: list[RunDir] = []

    def ask(one: RunDir, status: RunStatus) -> Stop:
        result = stop(one, status)
        reached.append(one)
        return result

    found, failed = run_argument.find_those(output_root, run)
    done = run_argument.on_each(found, ask, None if as_json else _told, failed)
    code = run_argument.say_failed(failed)
    if wait:
        code = max(code, _wait(reached))
    if as_json:
        click.echo(run_argument.as_json([dataclasses.asdict(result) for result in done]))
    return code


def stop(run: RunDir, status: RunStatus) -> Stop:
    """Ask a run to save and leave; the record comes first, so that no other start follows.

    Raises SlurmError with scancel's words, or RequestError when its directory cannot be written
    or it has not started yet; the record is then taken back.
    """
    submission = latest_submission(events.read(run.events))
    attempt = latest(run) if submission is None and status.state == RUNNING else None
    if attempt:  # of ranks that a person started
        try:
            attempt.ask_to_stop("stop")
        except OSError as error:
            raise RequestError(
                f"{run.name}: {attempt.path} cannot be written: {error.strerror}."
            ) from None
        message = f"{run.name}: asked attempt {attempt.number} to save and leave"
        return Stop(run.name, status.job_id, True, False, message)
    if submission is None or status.state == CREATED:
        message = f"{run.name} was never submitted: there is nothing to stop"
        return Stop(run.name, "", False, False, message)
    again = run.resubmission
    if status.state in ENDED:
        message = f"{run.name} has already ended: {status.state}"
        return Stop(run.name, submission.job_id, False, False, message)
    if status.state == QUEUED:
        result = cancel(run, status)
        where = "waits in the queue, where nothing trains"
        if submission.is_local:
            where = "is still starting, and has nothing to save"
        message = f"{run.name} {where}: cancelled it"
        return Stop(run.name, submission.job_id, False, result.cancelled, message, again)
    try:
        events.add(run.events, events.StopAsked, job_id=submission.job_id, attempt=status.attempt)
        try:
            asked = _ask(run, submission, status)
        except (ClusterDDPError, OSError):
            events.add(run.events, events.StopFailed, job_id=submission.job_id)
            raise
    except OSError as error:
        raise RequestError(
            f"{run.name}: its directory {run.path} cannot be written: {error.strerror}. Use "
            f"'clusterddp cancel {run.shown}', or make room there."
        ) from None
    doubt = f" ({status.detail})" if status.state == UNKNOWN else ""
    return Stop(run.name, submission.job_id, True, False, f"{run.name}: {asked}{doubt}", again)


def _ask(run: RunDir, submission: Submission, status: RunStatus) -> str:
    """Reach the attempt that is at work; returns what was done.

    The attempt is looked for after the record was written: one that begins now sees the record,
    one that has begun gets the mark.
    """
    attempt = latest(run)
    at_work = attempt is not None and not attempt.end.exists()
    if attempt and at_work:
        attempt.ask_to_stop("stop")
    command = run.load_spec().command
    if command and not submission.is_local:
        job = status.array_element or submission.job_id
        control.signal_script(job)
        return (
            f"sent SIGUSR1 to its command through the script of job {job}; it is not started again"
        )
    if command:
        return "its command cannot be asked to save; it is not started again when it has ended"
    if attempt and at_work:
        return f"asked attempt {attempt.number} to save and leave"
    if _begins_by_script(run):
        return "no attempt trains right now, and none starts any more"
    raise RequestError(
        f"{run.name} is still starting, and has nothing to save yet. Ask again in a few seconds, "
        f"or use 'clusterddp cancel {run.shown}'."
    )


def _told(result: Stop) -> str:
    again = f"\n  go on with: {result.next_command}" if result.next_command else ""
    return f"{result.message}{again}"


def _begins_by_script(run: RunDir) -> bool:
    """Whether a batch script starts it, which sees the record; `debug` has none."""
    return run.script.exists()


def _wait(found: list[RunDir]) -> int:
    from clusterddp.run.follow import how_it_ended, say, wait_for_end

    failed = False
    try:
        for run in found:
            status = wait_for_end(run)
            say(run, how_it_ended(status))
            failed = failed or status.state in (FAILED, UNKNOWN)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if failed else EXIT_DONE
