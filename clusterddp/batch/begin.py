"""Begin an attempt of a run in a job that Slurm has started, or refuse it, and record which."""

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from clusterddp import files, formatting, log, polling, version
from clusterddp.batch.job import JobStart, choose_excluded, record_excluded
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, ClusterDDPError, SlurmError
from clusterddp.ranks.variables import has_queue, is_rehearsal
from clusterddp.request.spec import JobSpec
from clusterddp.run import attempt as attempts
from clusterddp.run import bad_nodes, events
from clusterddp.run.attempt import Attempt, StartRefused, write_attempt_dividers
from clusterddp.run.events import Cause
from clusterddp.run.history import History, causes_by_attempt, requeue_is_off, requeue_limit_reached
from clusterddp.run.records import FinalRecord
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm import srun_lines
from clusterddp.slurm.forms import hosts_of
from clusterddp.slurm.site import nodes
from clusterddp.slurm.states import State

_LOG_TAIL_BYTES = 1 << 20
_MAX_CHANGES = 20
_MAX_UNSTARTED = 2
"""Most starts in a row that requeue the job because of its nodes; the next one keeps them."""


class JobRequeued(StartRefused):
    """Slurm gave a bad node or too few nodes, so the job was requeued."""

    exit_code = EXIT_DONE
    code = "CD1227"


class RunIsDone(StartRefused):
    """Slurm restarted a job whose run is done."""

    exit_code = EXIT_DONE
    code = "CD1228"


class _Withdrawn(StartRefused):
    """The user stopped the run or cancelled the job while it waited to start again."""

    exit_code = EXIT_STOPPED
    code = "CD1204"

    def __init__(self, cause: str) -> None:
        who = "'clusterddp cancel'" if cause == Cause.CANCELLED else "'clusterddp stop'"
        super().__init__(f"not restarted, because of {who}")
        self.cause = cause


def begin_attempt(
    job: JobStart,
    max_requeues: int,
    seconds: float,
    code_changes: Callable[[RunDir], Sequence[str]],
    spares: Sequence[str] = (),
    needed: int = 0,
) -> Attempt:
    """Begin the next attempt of the job's run.

    seconds: longest wait for an attempt that still trains. code_changes: returns the files that
    differ from the submitted code, if the run has no copy of it. spares: nodes of the job without
    tasks. needed: nodes of a step.
    Raises RunIsDone; JobRequeued if Slurm gave too few nodes, or a bad one that the next start
    excludes; and ClusterDDPError if the attempt is refused. All are recorded.
    """
    started = events.Started(
        restart=job.restart,
        nodelist=job.nodelist,
        clusterddp=version.described(),
        array_task=job.name if job.name != job.id else "",
        spares=tuple(spares),
    )
    try:
        attempt = _make(job, max_requeues, seconds, needed)
    except (RunIsDone, JobRequeued):
        raise
    except Exception as error:
        expected = isinstance(error, ClusterDDPError)
        bug = f"the attempt could not begin: {type(error).__name__}: "
        ended = events.Ended(
            restart=job.restart,
            exit_code=error.exit_code if isinstance(error, ClusterDDPError) else EXIT_FAILED,
            cause=getattr(error, "cause", Cause.FAILED),
            why=f"{'' if expected else bug}{error}",
            code=getattr(error, "code", ""),
        )
        job.record(started)
        job.record(ended)
        raise
    job.record(replace(started, attempt=attempt.number))
    try:
        _note_changed_code(job, attempt, code_changes(job.run)[:_MAX_CHANGES])
    except (ClusterDDPError, OSError) as error:  # only a warning, not worth the attempt
        log.warning(f"the code cannot be compared: {error} [CD0313]")
    return attempt


def _make(job: JobStart, max_requeues: int, seconds: float, needed: int) -> Attempt:
    """Create the attempt. Any exception means that it is refused."""
    run = job.run
    try:
        history = History.read(run)
        _refuse_if_done(job, history)
        spec = history.spec or run.load_spec()  # its error says why the request cannot be read
        _await_runs(job, spec)
        too_few = _requeue_if_too_few_nodes(job, spec, history, needed)
        if not too_few:
            history = _requeue_if_bad_nodes(job, spec, history)
        _refuse_if_withdrawn(job, history)
        if too_few:
            raise StartRefused(f"{too_few}. Resume with: {run.resume_command} [CD1227]")
        if job.name != job.id:
            history = _note_new_job(job, history)
        if len(causes_by_attempt(history.events)) > max_requeues:
            raise StartRefused(
                f"not restarted: {requeue_limit_reached(max_requeues)}. "
                f"Resume with: {run.resume_command} [CD1222]"
            )
        attempts.wait_until_inactive(run, job.id, seconds)
        _await_other_job(job, history, seconds)
        attempt = attempts.begin(run)
        attempt.reserve_space()
        write_attempt_dividers(attempt, job.id)
        # Check again now that the attempt exists: a later stop writes into its directory.
        _refuse_if_withdrawn(job, history.reread())
        return attempt
    except OSError as error:
        raise StartRefused(
            f"cannot create an attempt in {run.attempts}: {error.strerror}. Free some disk space, "
            "or restore write permission for the directory. [CD0504]"
        ) from None


def _refuse_if_done(job: JobStart, history: History) -> None:
    """Raise RunIsDone if an earlier attempt of this job finished the run.

    Slurm restarts a job whose node was lost before its script reported the end, and a job that was
    preempted while it was ending (seen on 22.05 and 24.11).
    """
    if not job.restart or not (history.done_by(job.id) or _record_unrecorded_end(job)):
        return
    words = f"{job.run.name} is already done, so this start of job {job.id} trains nothing"
    job.record(events.NotStarted(restart=job.restart, nodelist=job.nodelist, why=words))
    raise RunIsDone(words)


def _record_unrecorded_end(job: JobStart) -> bool:
    """Record the end of ranks that were done, if their script was lost before it recorded it."""
    latest = attempts.latest(job.run)
    if latest is None:
        return False
    final_record, record = latest.read_final_record() or FinalRecord(), latest.read_record()
    if final_record.cause != Cause.DONE or record is None or record.job_id != job.id:
        return False
    job.record(
        events.Ended(attempt=latest.number, exit_code=0, cause=Cause.DONE, step=final_record.step)
    )
    return True


def _await_runs(job: JobStart, spec: JobSpec) -> None:
    """Requeue the job if it must still wait for other runs. Raises JobRequeued.

    Raises NotDue if the run can no longer begin.
    """
    if not spec.after:
        return
    from clusterddp.status import chain  # rarely needed

    if words := chain.requeue_until_due(job.run, job.id, job.restart):
        job.withdraw_if_asked()
        raise JobRequeued(f"{words}: job {job.id} is back in the queue")


def _refuse_if_withdrawn(job: JobStart, history: History) -> None:
    if cause := job.withdrawal_cause(history):
        raise _Withdrawn(cause)


def _note_new_job(job: JobStart, history: History) -> History:
    """Record that the user resumed an array task with sbatch, which records nothing."""
    if any(event.job_id == job.name for event in history.every(events.Submitted)):
        return history  # recorded at submission
    starts = [event.job_id for event in history.every(events.Started)]
    if not starts or job.id in starts:
        return history
    job.record(events.ResumeRequested())
    return history.reread()


def _await_other_job(job: JobStart, history: History, seconds: float) -> None:
    """Wait while another job runs the latest attempt of a COMMAND, which has no liveness file.

    Slurm is asked if the end of that attempt is not recorded. Raises StartRefused after
    `seconds`.
    """
    if is_rehearsal(os.environ):
        return
    read = itertools.chain([history], iter(history.reread, None))

    def at_work() -> str:
        start = _unended_start(next(read))
        if start is None or start.job_id == job.id:
            return ""
        name = start.array_task or start.job_id
        if slurm.query([name])[name].state not in (State.RUNNING, State.SUSPENDED):
            return ""
        of = f"attempt {start.attempt} of {job.run.name}"
        return f"{of} still runs as job {name} on {start.nodelist}"

    waited = formatting.setting(seconds)
    refusal = f" after {waited}. Two jobs cannot write to one run: cancel one of them."
    attempts.wait_until_idle(at_work, seconds, refusal, every=polling.SLURM_POLL_SECONDS)


def _unended_start(history: History) -> events.Started | None:
    """Return the start of the latest attempt if neither its end nor its ranks are recorded."""
    starts = [event for event in history.every(events.Started) if event.attempt is not None]
    if not starts or Attempt(history.run, starts[-1].attempt or 0).read_record():
        return None
    return None if history.every(events.Ended, starts[-1].attempt) else starts[-1]


def _note_changed_code(job: JobStart, attempt: Attempt, changed: Sequence[str]) -> None:
    if changed:
        job.record(events.CodeChanged(attempt=attempt.number, changes=tuple(changed)))
        log.info(
            f"the code has changed since the run was submitted: {', '.join(changed)}; "
            "this attempt uses the current files"
        )


def _requeue_if_bad_nodes(job: JobStart, spec: JobSpec, history: History) -> History:
    """Requeue a job that was given a bad node. Raises JobRequeued; no attempt has begun then.

    This happens if Slurm requeued the job itself, or the job was already waiting when the node was
    marked bad. The start continues if a requeue is of no use: after a few in a row, with requeue
    off, or if the request needs the node. Returns the history with all nodes marked bad so far.
    """
    if not has_queue(os.environ):
        return history
    try:
        if _mark_nodes_of_lost_script(history):
            history = history.reread()
        marked_bad = bad_nodes.read_for(history)
        bad = [host for host in hosts_of(job.nodelist) if host in marked_bad]
        if not bad or job.withdrawal_cause(history):
            return history
        choice, hosts = choose_excluded(job, spec, history)
        given = [host for host in bad if host in choice.nodes]
        words = f"Slurm assigned {', '.join(given or bad)}, which is marked bad"
        if not given:
            for remark in choice.remarks:
                log.info(remark)
            return history
        if not spec.requeue:
            log.info(f"{requeue_is_off(words)}: it is used anyway")
            return history
        if _count_unstarted(history) >= _MAX_UNSTARTED:
            log.info(f"{words}, for the third start in a row: it is used anyway")
            return history
        job.requeue()
    except (ClusterDDPError, OSError) as error:
        log.warning(f"bad nodes cannot be avoided: {error} [CD1303]")
        return history
    _record_not_started(job, words)
    try:
        slurm.exclude_nodes(job.name, hosts)
        record_excluded(job, job.id, None, choice)
    except SlurmError as error:
        log.warning(f"bad nodes cannot be excluded: {error} [CD1303]")
    raise JobRequeued(f"{words}: job {job.id} is back in the queue")


def _requeue_if_too_few_nodes(job: JobStart, spec: JobSpec, history: History, needed: int) -> str:
    """Requeue a job that has fewer nodes than a step needs. Raises JobRequeued.

    The user can shrink a job, and some releases of Slurm requeue it with the nodes that it had at
    its end. Returns an error message if a requeue is of no use; empty if the nodes are enough.
    """
    given = len(hosts_of(job.nodelist))
    if given >= needed or not has_queue(os.environ):
        return ""
    words = (
        f"Slurm assigned {formatting.count(given, 'node')}, and a step of the run needs {needed}"
    )
    if not spec.requeue:
        return requeue_is_off(words)
    if job.withdrawal_cause(history):
        return words
    if (before := _count_unstarted(history)) >= _MAX_UNSTARTED:
        return f"{words}, for {before + 1} starts in a row"
    try:
        job.requeue()
    except (ClusterDDPError, OSError) as error:
        return f"{words}, and the job cannot be requeued: {error}"
    _record_not_started(job, words)
    asked = spec.resources.nodes + spec.resources.spare_nodes
    try:
        # SLURM_NTASKS_PER_NODE: the torchrun template starts one agent per node.
        each = os.environ.get("SLURM_NTASKS_PER_NODE", "")
        tasks = asked * (int(each) if each.isdecimal() else spec.resources.tasks_per_node)
        slurm.set_node_count(job.name, asked, tasks)
    except SlurmError as error:
        log.warning(f"the job cannot ask for {asked} nodes: {error} [CD0401]")
    raise JobRequeued(f"{words}: job {job.id} is back in the queue, for {asked}")


def _record_not_started(job: JobStart, words: str) -> None:
    """Record that this start requeued its job, unless the user withdrew the job meanwhile."""
    job.record(events.NotStarted(restart=job.restart, nodelist=job.nodelist, why=words))
    job.record(events.Requeued(why=words))
    job.withdraw_if_asked()


def _count_unstarted(history: History) -> int:
    """Count the latest starts in a row without an attempt."""
    starts = [e for e in history.events if isinstance(e, events.Started | events.NotStarted)]
    begun = [index for index, event in enumerate(starts) if isinstance(event, events.Started)]
    return len(starts) - 1 - max(begun, default=-1)


def _mark_nodes_of_lost_script(history: History) -> bool:
    """Mark lost nodes of an attempt without a recorded end, whose script was lost with them.

    A node is lost if srun saw it fail or it is down now. Returns whether any were. Raises OSError.
    """
    latest = max(history.past_attempts, key=lambda start: start.number, default=None)
    if latest is None or latest.cause:
        return False
    job_id = history.every(events.Started, latest.number)[-1].job_id
    text = files.read_tail(history.run.job_log, _LOG_TAIL_BYTES).decode(errors="replace")
    lost = set(srun_lines.lost_nodes(text.rpartition(f", job {job_id} on ")[2]))
    with contextlib.suppress(SlurmError):
        partition = os.environ.get("SLURM_JOB_PARTITION", "")
        lost |= {node.name for node in nodes(partition, os.environ) if node.is_lost}
    marked_bad = history.marked_bad(latest.number)
    new = [host for host in latest.nodes if host in lost and host not in marked_bad]
    reason = f"lost during attempt {latest.number}, whose end is not recorded"
    attempt = Attempt(history.run, latest.number)
    bad_nodes.mark_bad(attempt, job_id, dict.fromkeys(new, reason), bad_nodes.BY_LOSS)
    return bool(new)
