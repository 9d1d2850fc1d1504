"""Begins and finishes an attempt on behalf of its batch script.

`begin` makes the attempt's directory, or refuses; `finish` records the verdict, starts the next
attempt where one is due, and returns the exit code with which the job is to end: srun's own hides
the first failure behind the ranks that it ended for it.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from clusterddp import log
from clusterddp.errors import EXIT_FAILED, EXIT_PAUSED, ClusterDDPError
from clusterddp.run import attempt as attempts
from clusterddp.run import attempt_logs, events, next_start, restart_policy
from clusterddp.run.attempt import Attempt, NotStarted
from clusterddp.run.attempt_logs import of_attempt
from clusterddp.run.events import Failure
from clusterddp.run.files import read_json
from clusterddp.run.job_log import say
from clusterddp.run.restart_policy import Policy, Start, decide, gained, starts_since_submission
from clusterddp.run.run_dir import RunDir
from clusterddp.run.verdict import judge, stop_asked
from clusterddp.slurm.own_job import is_rehearsal, own_name

_MOST_CHANGES = 20
_LAST_LINES = 10


class RunIsDone(NotStarted):
    """An earlier attempt of this job has finished the run, and Slurm has started the job again."""


def begin(
    run: RunDir,
    job_id: str,
    restart: int,
    nodelist: str,
    max_requeues: int,
    patience: float,
    code_changes: Callable[[RunDir], Sequence[str]],
) -> Attempt:
    """Make the next attempt of the run.

    restart: SLURM_RESTART_COUNT. patience: seconds to wait for an attempt that still trains.
    code_changes: lists what differs from the submitted code, where the run uses no copy of it.
    Raises RunIsDone, and ClusterDDPError where the attempt is refused; both are recorded.
    """
    name = own_name(os.environ, job_id)
    job: dict[str, Any] = {"job_id": job_id, "restart": restart, "nodelist": nodelist}
    if name != job_id:
        job["array_element"] = name
    if restart and _is_done(run, job_id):
        words = f"{run.name} is done, so this start of job {job_id} has nothing left to do"
        next_start.record(
            run, events.StartedInVain, job_id=job_id, restart=restart, nodelist=nodelist, why=words
        )
        raise RunIsDone(words)
    try:
        attempt = _make_attempt(run, job_id, max_requeues, patience)
    except Exception as error:
        next_start.record(run, events.Started, **job)
        expected = isinstance(error, ClusterDDPError)
        bug = f"'clusterddp begin' failed: {type(error).__name__}: "
        next_start.record(
            run,
            events.Ended,
            job_id=job_id,
            restart=restart,
            exit_code=error.exit_code if isinstance(error, ClusterDDPError) else EXIT_FAILED,
            cause=error.cause if isinstance(error, _Withdrawn) else restart_policy.FAILED,
            why=f"{'' if expected else bug}{error}",
        )
        raise
    next_start.record(run, events.Started, **job, attempt=attempt.number)
    try:
        _note_changed_code(attempt, code_changes(run))
    except (ClusterDDPError, OSError) as error:  # a remark, which must not end the attempt
        say(f"clusterddp: the code cannot be compared: {error}", err=True)
    return attempt


def finish(attempt: Attempt, exit_code: int, job_id: str, restart: int, policy: Policy) -> int:
    """Print and record how an attempt ended, and start the next one where that is due.

    exit_code: srun's. restart: SLURM_RESTART_COUNT. Returns the job's exit code.
    """
    run = attempt.run
    trouble = attempt.trouble_writing()
    attempt.give_room_back()  # to what is recorded from here on
    end = judge(attempt, exit_code, job_id, restart, trouble)
    if end.failure:
        _show_last_words(attempt, end.failure)
    for line in end.lines:
        say(f"clusterddp: {line}")
    is_stop_asked = stop_asked(attempt, job_id)
    earlier = [start for start in starts_since_submission(run) if start.attempt != attempt.number]
    starts = [*earlier, Start(attempt.number, end.cause, gained(attempt))]
    decision = decide(policy, end.cause, starts, stop_asked=is_stop_asked, how=end.how)
    next_start.record(
        run,
        events.Ended,
        job_id=job_id,
        restart=restart,
        attempt=attempt.number,
        exit_code=end.exit_code,
        cause=end.cause,
        how=end.how,
        step=end.step,
        saved=end.saved,
        first_failure=end.failure,
        trouble=end.trouble,
        why="" if decision.go_on or end.cause == restart_policy.DONE else decision.why,
    )
    attempt.remove_leftovers()
    if decision.go_on:
        requeued = next_start.start(run, attempt, job_id, restart, decision.why)
        # A job that is over must not say that the run is done: an afterok would believe it.
        return 0 if requeued else end.exit_code
    if end.cause == restart_policy.REQUEUED:
        if is_stop_asked:
            next_start.withdraw(run, job_id)
        say(f"clusterddp: {decision.why}")
        return 0
    # Of a failure Slurm itself decides whether it was the hardware's, and starts the job again.
    if end.cause not in (restart_policy.DONE, restart_policy.FAILED, restart_policy.SUPERSEDED):
        next_start.let_job_end(run, job_id, preempted=end.cause == restart_policy.PREEMPTED)
    if end.cause == restart_policy.CANCELLED:
        say(f"clusterddp: go on with: {run.resubmission}")
    elif end.cause not in (restart_policy.DONE, restart_policy.SUPERSEDED):
        say(f"clusterddp: the run does not go on by itself: {decision.why}")
        if end.cause != restart_policy.FAILED or gained(attempt) is not None:
            say(f"clusterddp: go on with: {run.resubmission}")
    if end.exit_code and end.cause != restart_policy.CANCELLED and not is_rehearsal(os.environ):
        next_start.warn_of_requeue_exit(run, end.exit_code)
    return end.exit_code


def _is_done(run: RunDir, job_id: str) -> bool:
    """Return whether an earlier attempt of this job has finished the run.

    Slurm starts a job once more whose node's daemon was lost with its script's last word, and one
    that was preempted while it was ending (seen on 22.05 and 24.11).
    """
    if restart_policy.done_by(events.read(run.events), job_id):
        return True
    latest = attempts.latest(run)
    left = read_json(latest.end) or {} if latest else {}
    if latest is None or left.get("cause") != restart_policy.DONE:
        return False
    if latest.read_record().get("job_id") != job_id:
        return False
    # Its ranks were done, and its script was lost before it could say so.
    next_start.record(
        run,
        events.Ended,
        job_id=job_id,
        attempt=latest.number,
        exit_code=0,
        cause=restart_policy.DONE,
        step=left.get("step"),
    )
    return True


def _make_attempt(run: RunDir, job_id: str, max_requeues: int, patience: float) -> Attempt:
    """Make the attempt. Raises ClusterDDPError, and what else ends this process."""
    try:
        run.load_spec()  # refused where a newer version has written it
        _refuse_withdrawn(run, job_id)
        if own_name(os.environ, job_id) != job_id:
            _note_new_job(run, job_id)
        if len(restart_policy.causes_of(events.read(run.events))) > max_requeues:
            raise NotStarted(
                f"not started again: {restart_policy.capped(max_requeues)}. "
                f"Go on with: {run.resubmission}"
            )
        with log.to(lambda line: say(f"clusterddp: {line}", err=True)):
            attempts.await_silence(run, job_id, patience)
        attempt = attempts.begin(run)
        attempt.set_room_aside()
        attempt_logs.divide(attempt, job_id)
        # Checked again now that the attempt can be seen: a later stop leaves its mark in it.
        _refuse_withdrawn(run, job_id)
        return attempt
    except OSError as error:
        raise NotStarted(
            f"cannot make an attempt below {run.attempts}: {error.strerror}. Make room, or give "
            "the folder back its write permission."
        ) from None


class _Withdrawn(NotStarted):
    """A person has stopped the run or cancelled the job while it waited to start again."""

    exit_code = EXIT_PAUSED

    def __init__(self, cause: str) -> None:
        who = "'clusterddp cancel'" if cause == restart_policy.CANCELLED else "'clusterddp stop'"
        super().__init__(f"not started again: {who} asked for it")
        self.cause = cause


def _refuse_withdrawn(run: RunDir, job_id: str) -> None:
    cause = restart_policy.withdrawn(events.read(run.events), job_id)
    if cause:
        raise _Withdrawn(cause)


def _note_new_job(run: RunDir, job_id: str) -> None:
    """Record that a person has submitted an array's element once more; sbatch notes nothing."""
    starts = [e.job_id for e in events.read(run.events) if isinstance(e, events.Started)]
    if starts and job_id not in starts:
        next_start.record(run, events.Resubmitted, job_id=job_id)


def _note_changed_code(attempt: Attempt, changed: Sequence[str]) -> None:
    run, changed = attempt.run, changed[:_MOST_CHANGES]
    if changed:
        next_start.record(run, events.CodeChanged, attempt=attempt.number, changes=tuple(changed))
        say(
            f"clusterddp: the code has changed since the run was submitted: {', '.join(changed)}; "
            "this attempt uses it as it is now",
            err=True,
        )


def _show_last_words(attempt: Attempt, failure: Failure) -> None:
    """Print the end of the failing rank's log beside the verdict."""
    lines = of_attempt(attempt.run.path / failure.log, attempt.number).splitlines()
    if lines:
        say(f"--- last lines of {failure.log}:")
        say("\n".join(lines[-_LAST_LINES:]))
