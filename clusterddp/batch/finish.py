"""Ends an attempt: prints and records the verdict, and starts the next attempt where one is due.

The exit code with which the job is to end is the verdict's: srun's own hides the first failure
behind the ranks that it ended for it.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from clusterddp import log
from clusterddp.batch.job import (
    JobStart,
    choose_excluded,
    exclude_bad_nodes,
    record_excluded,
    retry_while_unreachable,
)
from clusterddp.batch.result import AttemptResult, Evidence, determine_result
from clusterddp.errors import ClusterDDPError, SlurmError, coded
from clusterddp.ranks.variables import is_rehearsal
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
from clusterddp.run.history import History, Policy, steps_gained
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.client import Ending, requeued_after_grace, sbatch

_LONGEST_REASON = 300
_LAST_LINES = 10


def finish(job: JobStart, attempt: Attempt, exit_code: int, policy: Policy) -> int:
    """Judge how an attempt ended, record it, and start the next one where that is due.

    exit_code: srun's. Returns the job's exit code.
    """
    history, result = _judge(job, attempt, exit_code, policy)
    _conclude(job, attempt, result, history)
    if result.decision.go_on:
        requeued = _start_again(job, attempt, result.decision.why)
        # A job that is over must not say that the run is done: an afterok would believe it.
        return 0 if requeued else result.exit_code
    if result.ended.cause == Cause.REQUEUED:
        if result.is_stop_asked:
            job.withdraw()
        else:
            exclude_bad_nodes(job, attempt.number)
        log.info(result.decision.why)
        return 0
    _leave(job, attempt, result, history)
    return result.exit_code


def resume_in_job(
    job: JobStart,
    attempt: Attempt,
    exit_code: int,
    policy: Policy,
    choose: Callable[[], Sequence[str]],
) -> Sequence[str]:
    """Print and record how an attempt ended whose successor begins at once, on nodes of this job.

    choose: returns these nodes, once the bad ones are known; none where too few are left. The
    others are as of `finish`, but that no requeue has to be allowed. Returns the nodes. None, with
    no end recorded, where no node was lost or blamed, no attempt is due, or the job itself is
    ending. Raises OSError.
    """
    history, result = _judge(job, attempt, exit_code, replace(policy, requeue=True))
    is_taken_back = job.withdrawal_cause(history)
    is_ending = slurm.ending(job.name, job.restart) is not Ending.NONE
    if not result.decision.go_on or is_taken_back or is_ending:
        return []
    _mark_bad_nodes(job, attempt, result, history)
    history = history.again()
    chosen = choose() if history.marked_bad(attempt.number) else []
    if not chosen:
        return []
    _conclude(job, attempt, result, history)
    why, nodelist = result.decision.why, ",".join(chosen)
    job.record(events.ResumedInJob(attempt=attempt.number, why=why, nodelist=nodelist))
    # The verdict on the next attempt reads srun's lines from here on.
    log.info(f"{why}: {job.run.name}, job {job.id} on {nodelist}, goes on without the queue")
    return chosen


def go_to_submission_folder() -> None:
    """Enter the folder of the submission, from which shown paths and the next job start.

    The script itself may be in the copy of the person's code.
    """
    with contextlib.suppress(OSError):
        os.chdir(os.environ.get("SLURM_SUBMIT_DIR") or ".")


def _judge(
    job: JobStart, attempt: Attempt, exit_code: int, policy: Policy
) -> tuple[History, AttemptResult]:
    write_error = attempt.write_error()
    attempt.release_space()  # to what is recorded from here on
    history = History.read(job.run)
    return history, determine_result(
        Evidence(job, history, attempt, exit_code, write_error), policy
    )


def _conclude(job: JobStart, attempt: Attempt, result: AttemptResult, history: History) -> None:
    """Print and record how an attempt ended."""
    if result.ended.first_failure:
        _show_last_words(attempt, result.ended.first_failure)
    for line in result.lines:
        log.info(line)
    job.record(result.ended)
    attempt.remove_leftovers()
    _mark_bad_nodes(job, attempt, result, history)


def _show_last_words(attempt: Attempt, failure: Failure) -> None:
    """Print the end of the failing rank's log beside the verdict."""
    lines = read_attempt_log(attempt.run.path / failure.log, attempt.number).splitlines()
    if lines:
        print_to_job_log(f"--- last lines of {failure.log}:")
        print_to_job_log("\n".join(lines[-_LAST_LINES:]))


def _leave(job: JobStart, attempt: Attempt, result: AttemptResult, history: History) -> None:
    """Have the job end, with which the run ends too, and say what to type."""
    cause, decision = result.ended.cause, result.decision
    # Of a failure Slurm itself decides whether it was the hardware's, and starts the job again.
    if cause not in (Cause.DONE, Cause.FAILED, Cause.SUPERSEDED):
        _let_job_end(job, history, preempted=cause == Cause.PREEMPTED)
    if cause == Cause.CANCELLED:
        log.info(f"resume with: {job.run.resume_command}")
    elif cause not in (Cause.DONE, Cause.SUPERSEDED):
        log.info(coded(f"the run does not resume by itself: {decision.why}", decision.code))
        if cause != Cause.FAILED or steps_gained(attempt, history.spec) is not None:
            log.info(f"resume with: {job.run.resume_command}")
    if result.exit_code and cause != Cause.CANCELLED and not is_rehearsal(os.environ):
        _warn_of_requeue_exit(job.run, result.exit_code)


def _let_job_end(job: JobStart, history: History, *, preempted: bool) -> None:
    """Have a job whose run does not go on end as any other does.

    Slurm may requeue one that was preempted. With --requeue=expedite it holds a job for ever whose
    script ends with a code other than 0 on healthy nodes (REQUEUE_HOLD, seen on 26.05).
    """
    if is_rehearsal(os.environ):
        return
    expedites = history.spec is not None and history.spec.requeue == EXPEDITE
    try:
        if (preempted and requeued_after_grace(job.name)) or expedites:
            slurm.forbid_requeue(job.name)
    except ClusterDDPError as error:
        log.info(str(error))


def _warn_of_requeue_exit(run: RunDir, exit_code: int) -> None:
    """Say so where this cluster requeues a job because of the code with which this one ends."""
    for setting in slurm.requeue_exits():
        if slurm.lists_exit_code(setting, exit_code):
            log.warning(
                f"slurm.conf has {setting}: Slurm requeues the job because of its exit code "
                f"{exit_code}. Take it out of the queue: clusterddp cancel {run.cli_name} [CD0413]"
            )


def _start_again(job: JobStart, attempt: Attempt, why: str) -> bool:
    """Have the run started again; returns whether it has put this very job back into the queue.

    Otherwise the next job goes on in its place, or what is to be typed is said.
    """
    if is_rehearsal(os.environ):
        log.info(
            f"{why}: a cluster would put the job back into the queue now; this "
            f"rehearsal has none. Resume with: {job.run.resume_command}"
        )
        return False

    def requeued(how: str) -> None:
        job.record(events.Requeued(attempt=attempt.number, why=why))
        log.info(f"{why}: {how}")
        job.withdraw_if_asked()
        exclude_bad_nodes(job, attempt.number)

    if why == Cause.PREEMPTED and requeued_after_grace(job.name):
        requeued(f"Slurm puts job {job.id} back into the queue")
        return False  # and it has not ended well, should Slurm not do it
    try:
        retry_while_unreachable(attempt, lambda: job.requeue(why))
    except slurm.RequeueRefused as refused:
        log.info(
            coded(f"requeue is refused here ({refused}); submitting the next job", refused.code)
        )
        _submit_successor(job, attempt, why)
        return False
    except (Superseded, StartRefused) as error:
        log.info(coded(error))
        return False
    except SlurmError as error:
        _give_up(job, attempt, why, error)
        return False
    requeued(f"job {job.id} is back in the queue")
    return True


def _submit_successor(job: JobStart, attempt: Attempt, why: str) -> None:
    """Submit a job in place of this one, or say what is to be typed."""
    run = job.run
    try:
        spec = run.load_spec()
        if spec.launcher == "submitit":
            raise SlurmError(
                "submitit's pickled task belongs to the job that it was made for [CD0305]"
            )
        script = run.script.read_text("utf-8")
        # A point's script is that of all points, or one of its own, which is no array's.
        is_own = spec.point and not is_array(script)
        index = "" if is_own else os.environ.get("SLURM_ARRAY_TASK_ID", "")
        try:
            choice, exclude = choose_excluded(job, spec, History.read(run))
        except (ClusterDDPError, OSError) as error:
            choice, exclude = bad_nodes.Choice(remarks=(f"no bad node is left out: {error}",)), []
        successor = retry_while_unreachable(
            attempt,
            lambda: sbatch(script, os.environ, comment=spec.comment, exclude=exclude, array=index),
        )
        if index:  # its own element of another array
            successor = f"{successor}_{index}"
        if successor in (job.id, job.name):
            raise SlurmError(
                "sbatch gave no answer, and Slurm shows no other job of this run [CD0404]"
            )
    except (ClusterDDPError, OSError) as error:
        _give_up(job, attempt, why, error)
        return
    job.record(
        events.Submitted(
            job_id=successor,
            launcher="sbatch",
            in_place_of=job.id,
            attempt=attempt.number,
            why=why,
        )
    )
    log.info(f"job {successor} goes on in place of job {job.id}")
    from clusterddp.status import chain  # seldom needed

    chain.update_waiting_jobs(run)
    record_excluded(job, successor, attempt.number, choice)
    job.withdraw_if_asked(successor)


def _give_up(job: JobStart, attempt: Attempt, why: str, error: Exception) -> None:
    job.record(events.RequeueFailed(attempt=attempt.number, why=why, error=str(error)))
    log.info(coded(f"this node cannot start the run again: {error}", "CD1225"))
    log.info(f"resume with: {job.run.resume_command}")


def _mark_bad_nodes(
    job: JobStart, attempt: Attempt, result: AttemptResult, history: History
) -> None:
    """Blame nodes that were lost, that hardware names, where ranks crash again or are slow.

    One that was blamed in the attempt is not blamed twice.
    """
    if is_rehearsal(os.environ):
        return
    try:
        already = history.marked_bad(attempt.number)
        marked_bad = bad_nodes.read_for(history) if result.lost_nodes else {}
        new = [
            # A job's log can tell of an earlier attempt in the same job.
            host
            for host in result.lost_nodes
            if host not in already and (host not in marked_bad or marked_bad[host].job_id != job.id)
        ]
        if new:
            lost = dict.fromkeys(new, f"lost during attempt {attempt.number}")
            bad_nodes.mark_bad(attempt, job.id, lost, bad_nodes.BY_LOSS)
        first = result.ended.first_failure
        starts = history.starts_with(attempt.number, failure=first)
        failure = first if first and first.host not in already else None
        if failure and result.hardware:
            named = {failure.host: f"rank {failure.rank} died: {result.hardware}"}
            bad_nodes.mark_bad(attempt, job.id, named, bad_nodes.BY_HARDWARE)
        elif failure and (host := bad_nodes.find_repeat_offender(starts)):
            why = f"ranks crash there again that got further elsewhere: {failure.reason}"
            again = {host: why.partition("\n")[0][:_LONGEST_REASON]}
            bad_nodes.mark_bad(attempt, job.id, again, bad_nodes.BY_REPETITION)
        is_latest = result.ended.cause != Cause.SUPERSEDED
        slow = bad_nodes.straggling(starts) if is_latest and starts[-1].slow else {}
        if fresh := {host: why for host, why in slow.items() if host not in already}:
            for host, why in fresh.items():
                log.info(f"node {host} is bad: {why}")
            bad_nodes.mark_bad(attempt, job.id, fresh, bad_nodes.BY_STRAGGLING)
    except OSError as error:
        log.warning(f"bad nodes cannot be recorded: {error} [CD1302]")
