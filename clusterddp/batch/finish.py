"""End an attempt: print and record its result, and start the next attempt if one is due.

The job's exit code is the result's. srun's own code is that of ranks which it ended because of the
first failure.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from clusterddp import formatting, log
from clusterddp.batch.job import (
    JobStart,
    choose_excluded,
    exclude_bad_nodes,
    record_excluded,
    retry_while_unreachable,
)
from clusterddp.batch.result import AttemptResult, Evidence, determine_result
from clusterddp.errors import EXIT_STOPPED, ClusterDDPError, SlurmError, coded
from clusterddp.ranks.variables import has_queue, is_rehearsal
from clusterddp.request.options import EXPEDITE
from clusterddp.request.sweep import is_array
from clusterddp.run import bad_nodes, events
from clusterddp.run.attempt import (
    Attempt,
    StartRefused,
    Superseded,
    print_to_job_log,
    read_attempt_log,
)
from clusterddp.run.events import Cause, Failure
from clusterddp.run.history import History, Policy, restart_delay, steps_gained
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.client import Ending, requeued_after_grace, sbatch

_MAX_REASON = 300
_LAST_LINES = 10


def finish(job: JobStart, attempt: Attempt, exit_code: int, policy: Policy) -> int:
    """Determine how an attempt ended, record it, and start the next one if it is due.

    exit_code: srun's. Returns the job's exit code.
    """
    history, result = _determine_result(job, attempt, exit_code, policy)
    _conclude(job, attempt, result, history)
    if result.decision.restarts:
        requeued = _restart(job, attempt, result.decision.why)
        # The exit code must not say that the run is done: an afterok dependency would believe it.
        return 0 if requeued else result.exit_code
    if result.ended.cause == Cause.REQUEUED:
        if result.is_stop_asked:
            job.withdraw()
        else:
            exclude_bad_nodes(job, attempt.number)
        log.info(result.decision.why)
        return 0
    _end_job(job, attempt, result, history)
    return result.exit_code


def resume_in_job(
    job: JobStart,
    attempt: Attempt,
    exit_code: int,
    policy: Policy,
    choose: Callable[[], Sequence[str]],
    pause: Callable[[float], object] = time.sleep,
) -> Sequence[str]:
    """Close an attempt and choose nodes to restart within this job.

    choose: returns the nodes once the bad ones are recorded; none if too few are left. pause: waits
    for some seconds, if the run has started often in a short time. For the other arguments see
    `finish`; a requeue need not be allowed. Returns the nodes. Returns none, and records no end, if
    no node was lost or marked bad, no attempt is due, or the job itself is ending. Raises OSError.
    """
    history, result = _determine_result(job, attempt, exit_code, replace(policy, requeue=True))
    is_withdrawn = job.withdrawal_cause(history)
    is_ending = slurm.ending(job.name, job.restart) is not Ending.NONE
    if not result.decision.restarts or is_withdrawn or is_ending:
        return []
    _mark_bad_nodes(job, attempt, result, history)
    history = history.reread()
    chosen = choose() if history.marked_bad(attempt.number) else []
    if not chosen:
        return []
    _conclude(job, attempt, result, history)
    why, nodelist = result.decision.why, ",".join(chosen)
    wait = restart_delay(history.events, time.time())
    job.record(events.ResumedInJob(attempt=attempt.number, why=why, nodelist=nodelist, wait=wait))
    if wait:
        log.info(_announce(wait))
        pause(wait)
    # The result of the next attempt is read from srun's lines after this one.
    log.info(f"{why}: {job.run.name}, job {job.id} on {nodelist}, restarts within this job")
    return chosen


def go_to_submission_folder() -> None:
    """Enter the directory of the submission, the base of printed paths and of the next job.

    The script may run in the copy of the user's code.
    """
    with contextlib.suppress(OSError):
        os.chdir(os.environ.get("SLURM_SUBMIT_DIR") or ".")


def _determine_result(
    job: JobStart, attempt: Attempt, exit_code: int, policy: Policy
) -> tuple[History, AttemptResult]:
    write_error = attempt.write_error()
    attempt.release_space()  # for the records that follow
    history = History.read(job.run)
    return history, determine_result(
        Evidence(job, history, attempt, exit_code, write_error), policy
    )


def _conclude(job: JobStart, attempt: Attempt, result: AttemptResult, history: History) -> None:
    """Print and record how an attempt ended."""
    if result.ended.first_failure:
        _print_log_end(attempt, result.ended.first_failure)
    for line in result.lines:
        log.info(line)
    job.record(result.ended)
    attempt.remove_leftovers()
    _mark_bad_nodes(job, attempt, result, history)


def _print_log_end(attempt: Attempt, failure: Failure) -> None:
    """Print the end of the failing rank's log."""
    lines = read_attempt_log(attempt.run.rank_log(failure.rank), attempt.number).splitlines()
    if lines:
        print_to_job_log(f"--- last lines of {failure.log}:")
        print_to_job_log("\n".join(lines[-_LAST_LINES:]))


def _end_job(job: JobStart, attempt: Attempt, result: AttemptResult, history: History) -> None:
    """Let the job, and with it the run, end, and print the command that resumes the run."""
    cause, decision = result.ended.cause, result.decision
    # After a failure, Slurm decides whether hardware caused it, and then restarts the job.
    if cause not in (Cause.DONE, Cause.FAILED, Cause.SUPERSEDED):
        _disable_requeue(job, history, preempted=cause == Cause.PREEMPTED)
    if cause not in (Cause.CANCELLED, Cause.DONE, Cause.SUPERSEDED):
        log.info(coded(f"the run will not restart automatically: {decision.why}", decision.code))
    is_counted = steps_gained(attempt, history.spec) is not None
    if cause not in (Cause.DONE, Cause.SUPERSEDED) and (cause != Cause.FAILED or is_counted):
        resumes = is_counted or result.exit_code == EXIT_STOPPED
        how = "resume" if resumes else "start again"
        log.info(f"{how} with: {job.run.resume_command}")
    if result.exit_code and cause != Cause.CANCELLED and has_queue(os.environ):
        _warn_of_requeue_exit(job.run, result.exit_code)


def _disable_requeue(job: JobStart, history: History, *, preempted: bool) -> None:
    """Disable requeue so that the job ends normally.

    Slurm may requeue a preempted job. With --requeue=expedite it holds a job indefinitely whose
    script fails on healthy nodes (REQUEUE_HOLD, seen on 26.05).
    """
    if not has_queue(os.environ):
        return
    expedites = history.spec is not None and history.spec.requeue == EXPEDITE
    try:
        if (preempted and requeued_after_grace(job.name)) or expedites:
            slurm.forbid_requeue(job.name)
    except ClusterDDPError as error:
        log.info(str(error))


def _warn_of_requeue_exit(run: RunDir, exit_code: int) -> None:
    """Warn if this cluster requeues a job because of this job's exit code."""
    for setting in slurm.requeue_exits():
        if slurm.lists_exit_code(setting, exit_code):
            log.warning(
                f"slurm.conf has {setting}: Slurm requeues the job because of its exit code "
                f"{exit_code}. Take it out of the queue: clusterddp cancel {run.cli_name} [CD0413]"
            )


def _restart(job: JobStart, attempt: Attempt, why: str) -> bool:
    """Restart the run. Return whether this job was requeued.

    Otherwise a new job replaces it, or the command that resumes the run is printed.
    """
    if is_rehearsal(os.environ):
        log.info(
            f"{why}: a cluster would requeue the job now; this rehearsal has no queue. "
            f"Resume with: {job.run.resume_command}"
        )
        return False

    wait = restart_delay(History.read(job.run).events, time.time())

    def requeued(how: str, wait: float = 0.0) -> None:
        job.record(events.Requeued(attempt=attempt.number, why=why, wait=wait))
        log.info(f"{why}: {how}")
        if wait:
            _delay_start(job, wait)
        job.withdraw_if_asked()
        exclude_bad_nodes(job, attempt.number)

    if why == Cause.PREEMPTED and requeued_after_grace(job.name):
        requeued(f"Slurm requeues job {job.id}")
        return False  # a failing exit code is right if Slurm does not requeue it after all
    try:
        retry_while_unreachable(attempt, lambda: job.requeue(why))
    except slurm.RequeueRefused as refused:
        log.info(
            coded(f"Slurm refuses to requeue the job ({refused}); submitting another", refused.code)
        )
        _submit_successor(job, attempt, why, wait)
        return False
    except (Superseded, StartRefused) as error:
        log.info(coded(error))
        return False
    except SlurmError as error:
        _record_requeue_failed(job, attempt, why, error)
        return False
    requeued(f"job {job.id} is back in the queue", wait)
    return True


def _delay_start(job: JobStart, wait: float) -> None:
    """Let a requeued job wait in the queue, without nodes; a failure is logged."""
    try:
        slurm.delay_start(job.name, wait)
    except SlurmError as error:
        log.info(str(error))
        return
    log.info(_announce(wait))


def _announce(wait: float) -> str:
    seconds = formatting.setting(wait)
    return f"the run has started often within ten minutes: it waits for at least {seconds}"


def _submit_successor(job: JobStart, attempt: Attempt, why: str, wait: float) -> None:
    """Submit a job that replaces this one, or print the command that resumes the run."""
    run = job.run
    try:
        spec = run.load_spec()
        if spec.launcher == "submitit":
            raise SlurmError(
                "submitit's pickled task belongs to the job that it was made for [CD0305]"
            )
        script = run.script.read_text("utf-8")
        # A trial runs its sweep's script, or its own, which is not an array's.
        is_own = spec.trial and not is_array(script)
        index = "" if is_own else os.environ.get("SLURM_ARRAY_TASK_ID", "")
        try:
            choice, exclude = choose_excluded(job, spec, History.read(run))
        except (ClusterDDPError, OSError) as error:
            choice, exclude = bad_nodes.Choice(remarks=(f"no bad node is excluded: {error}",)), []
        successor = retry_while_unreachable(
            attempt,
            lambda: sbatch(
                script, os.environ, comment=spec.comment, exclude=exclude, array=index, wait=wait
            ),
        )
        if index:  # its own task of another array
            successor = f"{successor}_{index}"
        if successor in (job.id, job.name):
            raise SlurmError(
                "sbatch returned no job id, and Slurm shows no other job of this run [CD0404]"
            )
    except (ClusterDDPError, OSError) as error:
        _record_requeue_failed(job, attempt, why, error)
        return
    job.record(
        events.Submitted(
            job_id=successor,
            launcher="sbatch",
            in_place_of=job.id,
            attempt=attempt.number,
            why=why,
            wait=wait,
        )
    )
    log.info(f"job {successor} replaces job {job.id}")
    if wait:
        log.info(_announce(wait))
    from clusterddp.status import chain  # rarely needed

    chain.update_waiting_jobs(run)
    record_excluded(job, successor, attempt.number, choice)
    job.withdraw_if_asked(successor)


def _record_requeue_failed(job: JobStart, attempt: Attempt, why: str, error: Exception) -> None:
    job.record(events.RequeueFailed(attempt=attempt.number, why=why, error=str(error)))
    log.info(coded(f"this node cannot restart the run: {error}", "CD1225"))
    log.info(f"resume with: {job.run.resume_command}")


def _mark_bad_nodes(
    job: JobStart, attempt: Attempt, result: AttemptResult, history: History
) -> None:
    """Mark nodes bad: lost ones, those with failing hardware, repeated crashes or slow ranks.

    A node is marked once per attempt.
    """
    if is_rehearsal(os.environ):
        return
    try:
        already = history.marked_bad(attempt.number)
        marked_bad = bad_nodes.read_for(history) if result.lost_nodes else {}
        new = [
            # The log of a job can report the loss for an earlier attempt in the same job.
            host
            for host in result.lost_nodes
            if host not in already and (host not in marked_bad or marked_bad[host].job_id != job.id)
        ]
        if new:
            lost = dict.fromkeys(new, f"lost during attempt {attempt.number}")
            bad_nodes.mark_bad(attempt, job.id, lost, bad_nodes.BY_LOSS)
        first = result.ended.first_failure
        starts = history.past_attempts_with(attempt.number, failure=first)
        failure = first if first and first.host not in already else None
        if unlaunched := {result.unlaunched_node} - already - {""}:
            bad_nodes.mark_bad(
                attempt, job.id, dict.fromkeys(unlaunched, result.ended.remark), bad_nodes.BY_LAUNCH
            )
        elif failure and result.ended.hardware:
            named = {failure.host: f"rank {failure.rank} died: {result.ended.hardware}"}
            bad_nodes.mark_bad(attempt, job.id, named, bad_nodes.BY_HARDWARE)
        elif failure and (host := bad_nodes.find_repeat_offender(starts)):
            why = f"ranks crashed there repeatedly but got further elsewhere: {failure.reason}"
            again = {host: why.partition("\n")[0][:_MAX_REASON]}
            bad_nodes.mark_bad(attempt, job.id, again, bad_nodes.BY_REPETITION)
        is_latest = result.ended.cause != Cause.SUPERSEDED
        slow = bad_nodes.find_slow_nodes(starts) if is_latest and starts[-1].slow else {}
        if fresh := {host: why for host, why in slow.items() if host not in already}:
            for host, why in fresh.items():
                log.info(f"node {host} is bad: {why}")
            bad_nodes.mark_bad(attempt, job.id, fresh, bad_nodes.BY_STRAGGLING)
    except OSError as error:
        log.warning(f"bad nodes cannot be recorded: {error} [CD1302]")
