"""Stop runs (save a checkpoint, exit, resumable) and cancel runs (end them now)."""

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from clusterddp import formatting, log
from clusterddp.errors import ClusterDDPError, RequestError, SlurmError
from clusterddp.processes.table import process_alive
from clusterddp.run import events, hold
from clusterddp.run.attempt import latest
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.slurm import client as slurm
from clusterddp.status.state import ENDED, RunState, Submission, latest_submission
from clusterddp.status.status import RunStatus, run_status, statuses

_Result = TypeVar("_Result", bound="StopResult | CancelResult")
Send = Callable[[str], None]
"""Function that cancels a job by its id; `apply_to_all` collects the ids instead."""


@dataclass(frozen=True)
class StopResult:
    """Result of `stop` for one run."""

    name: str
    job_id: str
    requested: bool
    """True if this call asked the run to save a checkpoint and exit."""
    cancelled: bool
    """True if it was removed from the queue instead."""
    message: str
    next_command: str = ""


@dataclass(frozen=True)
class CancelResult:
    """Result of `cancel` for one run."""

    name: str
    job_id: str
    cancelled: bool
    """True if this call requested its end."""
    message: str


def stop(run: RunDir, status: RunStatus, send: Send = slurm.cancel) -> StopResult:
    """Ask a run to save a checkpoint and exit; cancel it if it still waits in the queue.

    The request is recorded first, so that no further attempt starts; on an error it is withdrawn.
    Raises SlurmError with scancel's message, or RequestError if the run's directory cannot be
    written or the run is still starting.
    """
    history, again = History.read(run), run.resume_command
    if awaits_turn(history):
        end = cancel(run, status, send)
        return StopResult(run.name, end.job_id, False, end.cancelled, end.message, again)
    submission = latest_submission(history.reread().events)  # it may have started since
    attempt = latest(run) if submission is None and status.state == RunState.RUNNING else None
    if attempt:  # its ranks were started by hand
        try:
            attempt.ask_to_stop("stop")
        except OSError as error:
            raise RequestError(
                f"{run.name}: {attempt.path} cannot be written: {error.strerror}. [CD0504]"
            ) from None
        message = f"{run.name}: asked attempt {attempt.number} to save a checkpoint and exit"
        return StopResult(run.name, status.job_id, True, False, message)
    if submission is None or status.state == RunState.CREATED:
        message = f"{run.name} was never submitted: nothing to stop"
        return StopResult(run.name, "", False, False, message)
    if status.state in ENDED:
        message = f"{run.name} has already ended: {status.state}"
        return StopResult(run.name, submission.job_id, False, False, message)
    if status.state == RunState.QUEUED:
        result = cancel(run, status, send)
        early = "was still starting and had nothing to save"
        message = f"{run.name} {early if submission.is_local else 'had not started'}: cancelled"
        return StopResult(run.name, submission.job_id, False, result.cancelled, message, again)
    try:
        event = events.StopRequested(job_id=submission.job_id, attempt=status.attempt)
        events.add(run.events, event)
        try:
            asked = _ask(run, submission, status)
        except (ClusterDDPError, OSError):
            events.add(run.events, events.StopFailed(job_id=submission.job_id))
            raise
    except OSError as error:
        raise RequestError(
            f"{run.name}: its directory {run.path} cannot be written: {error.strerror}. Use "
            f"'clusterddp cancel {run.cli_name}', or free disk space there. [CD0504]"
        ) from None
    message = f"{run.name}: {asked}"
    if status.state == RunState.UNKNOWN:
        message += f" ({status.detail})"
    elif status.is_hanging:
        message += f". It hangs: if it does not exit, use 'clusterddp cancel {run.cli_name}'"
    return StopResult(run.name, submission.job_id, True, False, message, again)


def apply_to_all(
    act: Callable[[RunDir, RunStatus, Send], _Result], runs: Sequence[tuple[RunDir, RunStatus]]
) -> list[_Result | ClusterDDPError]:
    """Stop or cancel several runs; return a result or an error for each.

    The tasks of an array are passed to scancel together, pending ones first: cancelled one by one,
    the end of each would start the next.
    """
    results: dict[Path, _Result | ClusterDDPError] = {}
    waiting = [each for each in runs if each[1].state == RunState.QUEUED and _element(each[1])]
    for group in (waiting, [each for each in runs if each not in waiting]):
        arrays: dict[str, dict[str, RunDir]] = {}
        for run, status in group:
            send: Send = slurm.cancel
            if array := _element(status).partition("_")[0]:
                send = partial(_note, arrays.setdefault(array, {}), run)
            try:
                results[run.path] = act(run, status, send)
            except ClusterDDPError as error:
                results[run.path] = error
        for jobs in filter(None, arrays.values()):
            try:
                slurm.cancel_all(list(jobs))
            except SlurmError as error:
                for run in jobs.values():
                    _record_cancel_failure(run)
                    results[run.path] = error
    return [results[run.path] for run, _ in runs]


def _element(status: RunStatus) -> str:
    """Return the id of the run's array task; empty if its job is not an array task."""
    return status.array_task or (status.job_id if "_" in status.job_id else "")


def _note(jobs: dict[str, RunDir], run: RunDir, job: str) -> None:
    jobs[job] = run


def _record_cancel_failure(run: RunDir) -> None:
    """Record that a cancellation has failed."""
    with contextlib.suppress(OSError):
        submission = latest_submission(events.read(run.events))
        if submission:
            events.add(run.events, events.CancelFailed(job_id=submission.job_id))


def cancel(run: RunDir, status: RunStatus, send: Send = slurm.cancel) -> CancelResult:
    """End a run; record the request first, so that the end does not count as a failure.

    send: passes the job to scancel. If the request cannot be recorded, a warning is logged and the
    run is still ended. Raises SlurmError with scancel's message, or RequestError for a run on
    another machine; the record is then withdrawn.
    """
    history = History.read(run)
    if awaits_turn(history):
        return _cancel_before_turn(run, send)
    submission = latest_submission(history.reread().events)  # it may have started since
    if submission is None and status.state == RunState.RUNNING:
        message = (
            f"{run.name}: its ranks were started by hand. End them where they were started, or use "
            f"'clusterddp stop {run.cli_name}'"
        )
        return CancelResult(run.name, status.job_id, False, message)
    if status.state in ENDED:
        message = f"{run.name} has already ended: {status.state}"
        return CancelResult(run.name, submission.job_id if submission else "", False, message)
    if submission is None or status.state == RunState.CREATED:
        message = f"{run.name} was never submitted: nothing to cancel"
        return CancelResult(run.name, "", False, message)
    if status.is_forgotten:
        message = f"{run.name}: Slurm no longer knows job {submission.job_id}: nothing to cancel"
        return CancelResult(run.name, submission.job_id, False, message)
    if submission.is_local and submission.is_alive is None:
        where = submission.host or "another machine"
        raise RequestError(
            f"{run.name} runs on {where}. Cancel it there: "
            f"'clusterddp cancel {run.cli_name}'. [CD0507]"
        )
    try:
        events.add(run.events, events.CancelRequested(job_id=submission.job_id))
    except OSError as error:
        log.warning(
            f"{run.path} cannot be written ({error.strerror}): 'status' may report this "
            "run as failed. [CD0504]"
        )
    job = status.array_task or submission.job_id
    name = formatting.job(job, submission.launcher)
    try:
        if submission.is_held:
            pass  # its keeper reads the record
        elif not submission.is_local:
            send(job)
        elif submission.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(submission.pid, signal.SIGTERM)
    except (SlurmError, OSError) as error:
        _record_cancel_failure(run)
        if isinstance(error, OSError):
            raise RequestError(
                f"{run.name}: {name} cannot be signalled: {error.strerror}. [CD0507]"
            ) from None
        raise
    who = name if submission.is_local else f"Slurm ({name})"
    if submission.is_held:
        who = f"its controller in {name}, which continues,"
    return CancelResult(run.name, submission.job_id, True, f"{run.name}: asked {who} to end it")


def awaits_turn(history: History) -> bool:
    """Return whether a trial of a local sweep waits for its turn."""
    run, sent = history.run, history.every(events.Submitted)
    name, _, index = run.name.rpartition("-")
    if not (name and index.isdecimal()) or any(event.launcher != "local" for event in sent[-1:]):
        return False
    sweep = History.read(SweepDir(run.path.with_name(name)))
    submitted = [e for e in sweep.every(events.Submitted) if int(index) in e.indices]
    if not submitted or submitted[-1].pid is None:  # submitted to Slurm, or not a trial
        return False
    last = submitted[-1]
    has_begun = bool(sent) and (sent[-1].time or 0.0) >= (last.time or 0.0)
    return not has_begun and process_alive(last.pid, last.host, last.time) is not False


def _cancel_before_turn(run: RunDir, send: Send) -> CancelResult:
    """Cancel a trial that waits for its turn; raises RequestError if this cannot be recorded."""
    try:
        events.add(run.events, events.CancelRequested())
    except OSError as error:
        raise RequestError(f"{run.path} cannot be written: {error.strerror}. [CD0504]") from None
    if not awaits_turn(History.read(run)):  # it has started since
        return cancel(run, run_status(run, {}), send)
    return CancelResult(run.name, "", True, f"{run.name}: cancelled before it started")


def _ask(run: RunDir, submission: Submission, status: RunStatus) -> str:
    """Ask the current attempt to stop; return a description of how it was asked.

    Called after the request was recorded: a later attempt sees the record, the current one gets the
    stop file.
    """
    attempt = latest(run)
    at_work = attempt is not None and not attempt.end.exists()
    if attempt and at_work:
        attempt.ask_to_stop("stop")
    if hold.is_hold(run):
        with contextlib.suppress(SlurmError):  # it also looks at the record every few seconds
            slurm.signal_script(submission.job_id)
        return "its runs end, then its job, which gives the nodes back"
    command = run.load_spec().command
    has_loop = attempt is not None and attempt.record.exists()  # a Loop sees the stop file
    if command and submission.is_held:
        return f"its controller in job {submission.job_id} sends SIGUSR1 to its command"
    if command and not submission.is_local:
        job = status.array_task or submission.job_id
        try:
            slurm.signal_script(job)
        except SlurmError:
            # If the job ends at once, scancel can fail although the signal has arrived.
            now = statuses([run])[0]
            if not now.has_ended:
                raise
            if now.state != RunState.STOPPED:
                return f"it has just ended: {now.state}; it will not restart"
        dies = "" if has_loop else " (without a handler for it, the command fails)"
        return f"sent SIGUSR1 to its command through job {job}{dies}; it will not restart"
    if command and not has_loop:
        end = f"'clusterddp cancel {run.cli_name}'"
        return (
            "its command has not started a Loop. A Loop that starts later saves and exits; "
            f"any other command runs to its end. End it now: {end}"
        )
    if attempt and at_work:
        return f"asked attempt {attempt.number} to save a checkpoint and exit"
    if run.script.exists():  # a batch script sees the record; `debug` has none
        return "no attempt is running, and none will start"
    raise RequestError(
        f"{run.name} is still starting and has nothing to save yet. Try again in a few seconds, "
        f"or use 'clusterddp cancel {run.cli_name}'. [CD0507]"
    )
