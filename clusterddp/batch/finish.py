"""Begins and finishes an attempt on behalf of its batch script.

`begin` makes the attempt's directory, or refuses; `finish` records the verdict, starts the next
attempt where one is due, and returns the exit code with which the job is to end: srun's own hides
the first failure behind the ranks that it ended for it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from clusterddp import files, formatting, log, version
from clusterddp.batch.verdict import End, judge, stop_asked
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PAUSED,
    ClusterDDPError,
    SlurmError,
    coded,
)
from clusterddp.ranks.variables import is_rehearsal, own_name
from clusterddp.request.options import EXPEDITE
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import is_array
from clusterddp.run import attempt as attempts
from clusterddp.run import bad_nodes, events, logs, restart_policy
from clusterddp.run.attempt import Attempt, NotStarted, Superseded
from clusterddp.run.events import Failure
from clusterddp.run.logs import of_attempt, print_to_job_log
from clusterddp.run.records import LastWord, SlowRanks
from clusterddp.run.restart_policy import (
    Decision,
    Policy,
    Start,
    decide,
    gained,
    starts_since_submission,
)
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm import partitions, srun_lines
from clusterddp.slurm.client import Ending, ending, requeued_after_grace, sbatch
from clusterddp.slurm.forms import hosts_of
from clusterddp.slurm.states import State

T = TypeVar("T")
P = ParamSpec("P")

PATIENCE_SECONDS = 600.0
"""Time for which slurmctld may be away before the run gives up on it."""
ANOTHER_ATTEMPT_SECONDS = 300.0
"""Patience with an attempt that still trains, where no rendezvous timeout is given."""
_PAUSE_SECONDS = 5.0
_MOST_CHANGES = 20
_LAST_LINES = 10
_LONGEST_REASON = 300
_LOG_TAIL_BYTES = 1 << 20
_MOST_STARTS_IN_VAIN = 2
"""Starts in a row that put the job back for the nodes that it was given; the next one does not."""


class BackInQueue(NotStarted):
    """Slurm has given a bad node or too few, and the job is back in the queue for others."""

    exit_code = EXIT_DONE
    code = "CD1227"


class RunIsDone(NotStarted):
    """An earlier attempt of this job has finished the run, and Slurm has started the job again."""

    exit_code = EXIT_DONE
    code = "CD1228"


def begin(
    run: RunDir,
    job_id: str,
    restart: int,
    nodelist: str,
    max_requeues: int,
    patience: float,
    code_changes: Callable[[RunDir], Sequence[str]],
    spares: Sequence[str] = (),
    needed: int = 0,
) -> Attempt:
    """Make the next attempt of the run.

    restart: SLURM_RESTART_COUNT. patience: seconds to wait for an attempt that still trains.
    code_changes: lists what differs from the submitted code, where the run uses no copy of it.
    spares: the job's nodes beside those of `nodelist`. needed: nodes of a step.
    Raises RunIsDone, BackInQueue where Slurm has given too few nodes, or a bad one that the next
    start leaves out, and ClusterDDPError where the attempt is refused; all are recorded.
    """
    name = own_name(os.environ, job_id)
    job: dict[str, Any] = {"job_id": job_id, "restart": restart, "nodelist": nodelist}
    job["clusterddp"] = version.described()
    if name != job_id:
        job["array_element"] = name
    if spares:
        job["spares"] = tuple(spares)
    if restart and _is_done(run, job_id):
        words = f"{run.name} is done, so this start of job {job_id} has nothing left to do"
        _record(
            run, events.StartedInVain, job_id=job_id, restart=restart, nodelist=nodelist, why=words
        )
        raise RunIsDone(words)
    try:
        _await_runs(run, job_id, restart)
        too_few = _give_too_few_back(run, job_id, restart, nodelist, needed)
        if not too_few:
            _avoid_bad_nodes(run, job_id, restart, nodelist)
        attempt = _make_attempt(run, job_id, max_requeues, patience, too_few)
    except BackInQueue:
        raise
    except Exception as error:
        _record(run, events.Started, **job)
        expected = isinstance(error, ClusterDDPError)
        bug = f"the attempt could not be made: {type(error).__name__}: "
        _record(
            run,
            events.Ended,
            job_id=job_id,
            restart=restart,
            exit_code=error.exit_code if isinstance(error, ClusterDDPError) else EXIT_FAILED,
            cause=getattr(error, "cause", restart_policy.FAILED),
            why=f"{'' if expected else bug}{error}",
            code=getattr(error, "code", ""),
        )
        raise
    _record(run, events.Started, **job, attempt=attempt.number)
    try:
        _note_changed_code(attempt, code_changes(run))
    except (ClusterDDPError, OSError) as error:  # a remark, which must not end the attempt
        log.warning(f"the code cannot be compared: {error} [CD0313]")
    return attempt


def finish(attempt: Attempt, exit_code: int, job_id: str, restart: int, policy: Policy) -> int:
    """Print and record how an attempt ended, and start the next one where that is due.

    exit_code: srun's. restart: SLURM_RESTART_COUNT. Returns the job's exit code.
    """
    run = attempt.run
    verdict = _judge(attempt, exit_code, job_id, restart, policy)
    end, decision = verdict.end, verdict.decision
    _conclude(attempt, verdict, job_id, restart)
    if decision.go_on:
        requeued = _start_again(run, attempt, job_id, restart, decision.why)
        # A job that is over must not say that the run is done: an afterok would believe it.
        return 0 if requeued else end.exit_code
    if end.cause == restart_policy.REQUEUED:
        if verdict.is_stop_asked:
            _withdraw(run, job_id)
        else:
            _leave_out(run, job_id, attempt.number)
        log.info(decision.why)
        return 0
    # Of a failure Slurm itself decides whether it was the hardware's, and starts the job again.
    if end.cause not in (restart_policy.DONE, restart_policy.FAILED, restart_policy.SUPERSEDED):
        _let_job_end(run, job_id, preempted=end.cause == restart_policy.PREEMPTED)
    if end.cause == restart_policy.CANCELLED:
        log.info(f"resume with: {run.resubmission}")
    elif end.cause not in (restart_policy.DONE, restart_policy.SUPERSEDED):
        log.info(coded(f"the run does not resume by itself: {decision.why}", decision.code))
        if end.cause != restart_policy.FAILED or gained(attempt) is not None:
            log.info(f"resume with: {run.resubmission}")
    if end.exit_code and end.cause != restart_policy.CANCELLED and not is_rehearsal(os.environ):
        _warn_of_requeue_exit(run, end.exit_code)
    return end.exit_code


def resume_in_job(
    attempt: Attempt,
    exit_code: int,
    job_id: str,
    restart: int,
    policy: Policy,
    choose: Callable[[], Sequence[str]],
) -> Sequence[str]:
    """Print and record how an attempt ended whose successor begins at once, on nodes of this job.

    choose: returns these nodes, once the bad ones are known; none where too few are left. The
    others are as of `finish`, but that no requeue has to be allowed. Returns the nodes. None, with
    no end recorded, where no node was lost or blamed, no attempt is due, or the job itself is
    ending. Raises OSError.
    """
    run, name = attempt.run, own_name(os.environ, job_id)
    verdict = _judge(attempt, exit_code, job_id, restart, replace(policy, requeue=True))
    is_withdrawn = restart_policy.withdrawn(events.read(run.events), job_id)
    if not verdict.decision.go_on or is_withdrawn or ending(name, restart) is not Ending.NONE:
        return []
    _blame_nodes(attempt, job_id, verdict.end)
    nodes = choose() if bad_nodes.blamed(attempt) else []
    if not nodes:
        return []
    _conclude(attempt, verdict, job_id, restart)
    why, nodelist = verdict.decision.why, ",".join(nodes)
    _record(
        run,
        events.ResumedInJob,
        job_id=job_id,
        attempt=attempt.number,
        why=why,
        nodelist=nodelist,
    )
    # The verdict on the next attempt reads srun's lines from here on.
    log.info(f"{why}: {run.name}, job {job_id} on {nodelist}, goes on without the queue")
    return nodes


@dataclass(frozen=True)
class _Verdict:
    """End of an attempt, and what follows."""

    end: End
    decision: Decision
    is_stop_asked: bool


def _judge(attempt: Attempt, exit_code: int, job_id: str, restart: int, policy: Policy) -> _Verdict:
    trouble = attempt.trouble_writing()
    attempt.give_room_back()  # to what is recorded from here on
    end = judge(attempt, exit_code, job_id, restart, trouble)
    is_stop_asked = stop_asked(attempt, job_id)
    known = starts_since_submission(attempt.run)
    earlier = [start for start in known if start.attempt != attempt.number]
    starts = [*earlier, Start(attempt.number, end.cause, gained(attempt), bool(end.told))]
    decision = decide(policy, end.cause, starts, stop_asked=is_stop_asked, how=end.how)
    return _Verdict(end, decision, is_stop_asked)


def _conclude(attempt: Attempt, verdict: _Verdict, job_id: str, restart: int) -> None:
    """Print and record how an attempt ended."""
    end, decision = verdict.end, verdict.decision
    if end.failure:
        _show_last_words(attempt, end.failure)
    for line in end.lines:
        log.info(line)
    _record(
        attempt.run,
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
        remark=end.remark,
        why="" if decision.go_on or end.cause == restart_policy.DONE else decision.why,
        code=end.code,
        told=end.told,
    )
    attempt.remove_leftovers()
    _blame_nodes(attempt, job_id, end)


def go_to_submission_folder() -> None:
    """Enter the folder of the submission, from which shown paths and the next job start.

    The script itself may be in the copy of the person's code.
    """
    with contextlib.suppress(OSError):
        os.chdir(os.environ.get("SLURM_SUBMIT_DIR") or ".")


def _is_done(run: RunDir, job_id: str) -> bool:
    """Return whether an earlier attempt of this job has finished the run.

    Slurm starts a job once more whose node's daemon was lost with its script's last word, and one
    that was preempted while it was ending (seen on 22.05 and 24.11).
    """
    if restart_policy.done_by(events.read(run.events), job_id):
        return True
    latest = attempts.latest(run)
    if latest is None:
        return False
    last_word, record = latest.read_last_word() or LastWord(), latest.read_record()
    if last_word.cause != restart_policy.DONE or record is None or record.job_id != job_id:
        return False
    # Its ranks were done, and its script was lost before it could say so.
    _record(
        run,
        events.Ended,
        job_id=job_id,
        attempt=latest.number,
        exit_code=0,
        cause=restart_policy.DONE,
        step=last_word.step,
    )
    return True


def _await_runs(run: RunDir, job_id: str, restart: int) -> None:
    """Put a job back into the queue that is to wait for other runs still. Raises BackInQueue.

    Raises NotDue where the run is not to begin at all.
    """
    spec = run.read_spec()  # a damaged one is refused later
    if spec is None or not spec.after:
        return
    from clusterddp.status import chain  # few runs wait

    if words := chain.wait_again(run, job_id, restart):
        _heed_withdrawal(run, job_id, job_id)
        raise BackInQueue(f"{words}: job {job_id} is back in the queue")


def _make_attempt(
    run: RunDir, job_id: str, max_requeues: int, patience: float, too_few: str
) -> Attempt:
    """Make the attempt. Raises ClusterDDPError, and what else ends this process.

    too_few: what is said of a start that has not the nodes for a step.
    """
    try:
        run.load_spec()  # refused where a newer version has written it
        _refuse_withdrawn(run, job_id)
        if too_few:
            raise NotStarted(f"{too_few}. Resume with: {run.resubmission} [CD1227]")
        if own_name(os.environ, job_id) != job_id:
            _note_new_job(run, job_id)
        if len(restart_policy.causes_of(events.read(run.events))) > max_requeues:
            raise NotStarted(
                f"not started again: {restart_policy.capped(max_requeues)}. "
                f"Resume with: {run.resubmission} [CD1222]"
            )
        attempts.await_silence(run, job_id, patience)
        _await_other_job(run, job_id, patience)
        attempt = attempts.begin(run)
        attempt.set_room_aside()
        logs.divide(attempt, job_id)
        # Checked again now that the attempt can be seen: a later stop leaves its mark in it.
        _refuse_withdrawn(run, job_id)
        return attempt
    except OSError as error:
        raise NotStarted(
            f"cannot make an attempt below {run.attempts}: {error.strerror}. Make room, or give "
            "the folder back its write permission. [CD0504]"
        ) from None


def _await_other_job(run: RunDir, job_id: str, patience: float) -> None:
    """Wait while another job runs the latest attempt of a COMMAND, which shows no sign of life.

    Slurm is asked, where nobody has recorded that attempt's end. Raises NotStarted after `patience`
    seconds.
    """
    if is_rehearsal(os.environ):
        return
    deadline, announced = time.monotonic() + patience, False
    while start := _unended_start(run):
        name = start.array_element or start.job_id
        state = slurm.query([name])[name].state if start.job_id != job_id else State.UNKNOWN
        if state not in (State.RUNNING, State.SUSPENDED):
            return
        who = f"attempt {start.attempt} of {run.name} still runs as job {name} on {start.nodelist}"
        if time.monotonic() > deadline:
            raise NotStarted(
                f"{who}, and has for {patience:g} s. Two jobs cannot write one run: cancel "
                "one of them."
            )
        if not announced:
            log.info(f"{who}; waiting up to {patience:g} s for it to end")
            announced = True
        time.sleep(_PAUSE_SECONDS)


def _unended_start(run: RunDir) -> events.Started | None:
    """Return the start of the latest attempt, if it has recorded neither an end nor its ranks."""
    history = events.read(run.events)
    starts = [e for e in history if isinstance(e, events.Started) and e.attempt is not None]
    if not starts or Attempt(run, starts[-1].attempt or 0).read_record():
        return None
    ends = (e.attempt for e in history if isinstance(e, events.Ended))
    return None if starts[-1].attempt in ends else starts[-1]


class _Withdrawn(NotStarted):
    """A person has stopped the run or cancelled the job while it waited to start again."""

    exit_code = EXIT_PAUSED
    code = "CD1204"

    def __init__(self, cause: str) -> None:
        who = "'clusterddp cancel'" if cause == restart_policy.CANCELLED else "'clusterddp stop'"
        super().__init__(f"not started again: {who} asked for it")
        self.cause = cause


def _refuse_withdrawn(run: RunDir, job_id: str) -> None:
    if cause := _withdrawal(events.read(run.events), job_id):
        raise _Withdrawn(cause)


def _withdrawal(history: Sequence[events.Event], job_id: str) -> str:
    """Return how a person has taken back this job, as `restart_policy.withdrawn` does.

    Until an array's element has recorded a start, it is known by its name.
    """
    name = own_name(os.environ, job_id)
    return restart_policy.withdrawn(history, job_id) or restart_policy.withdrawn(history, name)


def _note_new_job(run: RunDir, job_id: str) -> None:
    """Record that a person has submitted an array's element once more; sbatch notes nothing."""
    history, name = events.read(run.events), own_name(os.environ, job_id)
    if any(isinstance(e, events.Submitted) and e.job_id == name for e in history):
        return  # whoever submitted it has recorded that
    starts = [e.job_id for e in history if isinstance(e, events.Started)]
    if starts and job_id not in starts:
        _record(run, events.Resubmitted, job_id=job_id)


def _note_changed_code(attempt: Attempt, changed: Sequence[str]) -> None:
    run, changed = attempt.run, changed[:_MOST_CHANGES]
    if changed:
        _record(run, events.CodeChanged, attempt=attempt.number, changes=tuple(changed))
        log.info(
            f"the code has changed since the run was submitted: {', '.join(changed)}; "
            "this attempt uses it as it is now"
        )


def _show_last_words(attempt: Attempt, failure: Failure) -> None:
    """Print the end of the failing rank's log beside the verdict."""
    lines = of_attempt(attempt.run.path / failure.log, attempt.number).splitlines()
    if lines:
        print_to_job_log(f"--- last lines of {failure.log}:")
        print_to_job_log("\n".join(lines[-_LAST_LINES:]))


def _start_again(run: RunDir, attempt: Attempt, job_id: str, restart: int, why: str) -> bool:
    """Have the run started again; returns whether it has put this very job back into the queue.

    Otherwise the next job goes on in its place, or what is to be typed is said.
    """
    if is_rehearsal(os.environ):
        log.info(
            f"{why}: a cluster would put the job back into the queue now; this "
            f"rehearsal has none. Resume with: {run.resubmission}"
        )
        return False

    def requeued(how: str) -> None:
        _record(run, events.Requeued, job_id=job_id, attempt=attempt.number, why=why)
        log.info(f"{why}: {how}")
        _heed_withdrawal(run, job_id, job_id)
        _leave_out(run, job_id, attempt.number)

    if why == restart_policy.PREEMPTED and requeued_after_grace(own_name(os.environ, job_id)):
        requeued(f"Slurm puts job {job_id} back into the queue")
        return False  # and it has not ended well, should Slurm not do it
    try:
        _patiently(attempt, lambda: _requeue(own_name(os.environ, job_id), restart, why))
    except slurm.RequeueRefused as refused:
        log.info(
            coded(f"requeue is refused here ({refused}); submitting the next job", refused.code)
        )
        _in_place_of(run, attempt, job_id, why)
        return False
    except (Superseded, NotStarted) as error:
        log.info(coded(error))
        return False
    except SlurmError as error:
        _give_up(attempt, job_id, why, error)
        return False
    requeued(f"job {job_id} is back in the queue")
    return True


def _requeue(name: str, restart: int, why: str = "") -> None:
    """Requeue a job, unless a person cancelled it: Slurm would put that back as well."""
    word = ending(name, restart)
    if word is Ending.UNKNOWN:
        raise SlurmError("Slurm does not say how the job is doing")
    if word is Ending.CANCELLED and why != restart_policy.PREEMPTED:
        raise NotStarted("the job was cancelled, and is not put back into the queue [CD1203]")
    slurm.requeue(name)


def _patiently(attempt: Attempt, ask: Callable[[], T]) -> T:
    """Ask Slurm again and again while slurmctld is away.

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
        except slurm.RequeueRefused:
            raise
        except SlurmError as error:
            if time.monotonic() > deadline:
                raise
            log.info(f"{error}; trying again")
        time.sleep(_PAUSE_SECONDS)  # a slurmctld that comes back tells nobody


def _in_place_of(run: RunDir, attempt: Attempt, job_id: str, why: str) -> None:
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
            choice, exclude = _nodes_to_leave_out(run, spec, job_id)
        except (ClusterDDPError, OSError) as error:
            choice, exclude = bad_nodes.Choice(remarks=(f"no bad node is left out: {error}",)), []
        successor = _patiently(
            attempt,
            lambda: sbatch(script, os.environ, comment=spec.comment, exclude=exclude, array=index),
        )
        if index:  # its own element of another array
            successor = f"{successor}_{index}"
        if successor in (job_id, own_name(os.environ, job_id)):
            raise SlurmError(
                "sbatch gave no answer, and Slurm shows no other job of this run [CD0404]"
            )
    except (ClusterDDPError, OSError) as error:
        _give_up(attempt, job_id, why, error)
        return
    _record(
        run,
        events.Submitted,
        job_id=successor,
        launcher="sbatch",
        in_place_of=job_id,
        attempt=attempt.number,
        why=why,
    )
    log.info(f"job {successor} goes on in place of job {job_id}")
    from clusterddp.status import chain  # seldom needed

    chain.rejoin(run)
    _note_left_out(run, successor, attempt.number, choice)
    _heed_withdrawal(run, job_id, successor)


def _heed_withdrawal(run: RunDir, job_id: str, successor: str) -> None:
    """Withdraw the next job where a person has stopped or cancelled the run meanwhile."""
    if _withdrawal(events.read(run.events), job_id):
        _withdraw(run, successor)


def _withdraw(run: RunDir, job_id: str) -> None:
    """Take a job out of the queue; one that stays there all the same starts nothing (`begin`)."""
    name = own_name(os.environ, job_id) if job_id == os.environ.get("SLURM_JOB_ID") else job_id
    _record(run, events.CancelAsked, job_id=name)
    try:
        slurm.cancel(name)
    except SlurmError as error:
        log.info(str(error))
    log.info(f"job {job_id} is cancelled: a person has taken it back")


def _blame_nodes(attempt: Attempt, job_id: str, end: End) -> None:
    """Blame nodes that were lost, that hardware names, where ranks crash again or are slow.

    One that was blamed in the attempt is not blamed twice.
    """
    if is_rehearsal(os.environ):
        return
    try:
        already = bad_nodes.blamed(attempt)
        blamed = bad_nodes.read_for(attempt.run) if end.lost_nodes else {}
        new = [
            # A job's log can tell of an earlier attempt in the same job.
            host
            for host in end.lost_nodes
            if host not in already and (host not in blamed or blamed[host].job_id != job_id)
        ]
        if new:
            lost = dict.fromkeys(new, f"lost during attempt {attempt.number}")
            bad_nodes.blame(attempt, job_id, lost, bad_nodes.BY_LOSS)
        failure = end.failure if end.failure and end.failure.host not in already else None
        if failure and end.hardware:
            named = {failure.host: f"rank {failure.rank} died: {end.hardware}"}
            bad_nodes.blame(attempt, job_id, named, bad_nodes.BY_HARDWARE)
        elif failure and (host := bad_nodes.failed_again(_trials(attempt, failure))):
            why = f"ranks crash there again that got further elsewhere: {failure.reason}"
            again = {host: why.partition("\n")[0][:_LONGEST_REASON]}
            bad_nodes.blame(attempt, job_id, again, bad_nodes.BY_REPETITION)
        is_latest = end.cause != restart_policy.SUPERSEDED
        is_slow = is_latest and attempt.stragglers.exists()
        slow = bad_nodes.straggling(_trials(attempt, end.failure)) if is_slow else {}
        if fresh := {host: why for host, why in slow.items() if host not in already}:
            for host, why in fresh.items():
                log.info(f"node {host} is bad: {why}")
            bad_nodes.blame(attempt, job_id, fresh, bad_nodes.BY_STRAGGLING)
    except OSError as error:
        log.warning(f"bad nodes cannot be recorded: {error} [CD1302]")


def _trials(latest: Attempt, failure: Failure | None) -> list[bad_nodes.Trial]:
    """Return the run's attempts since a person last submitted it, the latest last.

    failure: of that one, whose end need not be recorded yet.
    """
    run, history = latest.run, events.read(latest.run.events)
    started = {e.attempt: e for e in history if isinstance(e, events.Started)}
    failures = {e.attempt: e.first_failure for e in history if isinstance(e, events.Ended)}
    failures[latest.number] = failure
    trials = []
    for number in restart_policy.causes_of(history):
        attempt = Attempt(run, number)
        more, record = gained(attempt), attempt.read_record()
        begin_step = (record.step or 0) if record else 0
        reached = None if more is None else begin_step + more
        hosts = hosts_of(started[number].nodelist)
        slow = (files.read(SlowRanks, attempt.stragglers) or SlowRanks()).stragglers
        trials.append(bad_nodes.Trial(hosts, failures.get(number), reached, slow))
    return trials


def _leave_out(run: RunDir, job_id: str, number: int) -> None:
    """Have a job in the queue leave out the bad nodes; where that fails it is logged.

    number: of the attempt that has ended.
    """
    if not bad_nodes.known_to(run):
        return
    try:
        spec = run.load_spec()
        name = own_name(os.environ, job_id)
        choice, hosts = _nodes_to_leave_out(run, spec, job_id)
        if set(hosts) != set(slurm.job_nodes(name).excluded):
            slurm.exclude_nodes(name, hosts)
    except (ClusterDDPError, OSError) as error:
        log.warning(f"bad nodes cannot be left out: {error} [CD1303]")
        return
    _note_left_out(run, job_id, number, choice)


def _nodes_to_leave_out(
    run: RunDir, spec: JobSpec, job_id: str
) -> tuple[bad_nodes.Choice, list[str]]:
    """Return the bad nodes that the next start can do without, and all that it leaves out.

    Raises SlurmError where Slurm does not say what the job leaves out so far.
    """
    known = bad_nodes.known_to(run)
    if not known:
        return bad_nodes.Choice(), []
    job = slurm.job_nodes(own_name(os.environ, job_id))
    count = os.environ.get("SLURM_JOB_NUM_NODES", "")
    choice = bad_nodes.choose(
        run.path.parent,
        spec.resources,
        os.environ,
        count=int(count) if count.isdecimal() else 0,
        partition=job.partition,
        others=dict(spec.sbatch),
        run=run,
    )
    return choice, bad_nodes.merged(spec.resources, job.excluded, choice.nodes, known)


def _note_left_out(run: RunDir, job_id: str, number: int | None, choice: bad_nodes.Choice) -> None:
    for remark in choice.remarks:
        log.info(remark)
    if choice.nodes:
        _record(run, events.NodesLeftOut, job_id=job_id, attempt=number, nodes=choice.nodes)
        log.info(choice.line)


def _avoid_bad_nodes(run: RunDir, job_id: str, restart: int, nodelist: str) -> None:
    """Put a job back into the queue that Slurm has started on a bad node. Raises BackInQueue.

    As where Slurm has requeued it by itself, or it waited when the node was blamed. No attempt is
    begun. Where that is of no use the start goes on: a few times in a row, with requeue off, where
    the request needs the node.
    """
    if is_rehearsal(os.environ):
        return
    try:
        spec, history = run.load_spec(), events.read(run.events)
        _blame_lost_script(run, history)
        blamed = bad_nodes.read_for(run)
        bad = [host for host in hosts_of(nodelist) if host in blamed]
        if not bad or _withdrawal(history, job_id):
            return
        choice, hosts = _nodes_to_leave_out(run, spec, job_id)
        given = [host for host in bad if host in choice.nodes]
        words = f"Slurm has given {', '.join(given or bad)}, which is bad"
        if not given:
            for remark in choice.remarks:
                log.info(remark)
            return
        if not spec.requeues:
            log.info(f"{restart_policy.requeue_is_off(words)}: it is used all the same")
            return
        if _starts_in_vain(history) >= _MOST_STARTS_IN_VAIN:
            log.info(f"{words}, once more: it is used all the same")
            return
        _requeue(own_name(os.environ, job_id), restart)
    except (ClusterDDPError, OSError) as error:
        log.warning(f"bad nodes cannot be avoided: {error} [CD1303]")
        return
    _record(run, events.StartedInVain, job_id=job_id, restart=restart, nodelist=nodelist, why=words)
    _record(run, events.Requeued, job_id=job_id, why=words)
    _heed_withdrawal(run, job_id, job_id)
    try:
        slurm.exclude_nodes(own_name(os.environ, job_id), hosts)
        _note_left_out(run, job_id, None, choice)
    except SlurmError as error:
        log.warning(f"bad nodes cannot be left out: {error} [CD1303]")
    raise BackInQueue(f"{words}: job {job_id} is back in the queue")


def _give_too_few_back(run: RunDir, job_id: str, restart: int, nodelist: str, needed: int) -> str:
    """Put a job back into the queue that has fewer nodes than a step needs. Raises BackInQueue.

    As a person can have it, and a release of Slurm whose requeue asks for the nodes that the job
    had at its end. Returns what is to be said where that is of no use; empty with nodes enough.
    """
    given = len(hosts_of(nodelist))
    if given >= needed or is_rehearsal(os.environ):
        return ""
    nodes = formatting.count(given, "node")
    words = f"Slurm has given {nodes}, and a step of the run needs {needed}"
    try:
        spec, history = run.load_spec(), events.read(run.events)
        if not spec.requeues:
            return restart_policy.requeue_is_off(words)
        if _withdrawal(history, job_id):
            return words
        if (before := _starts_in_vain(history)) >= _MOST_STARTS_IN_VAIN:
            return f"{words}, for {before + 1} starts in a row"
        _requeue(own_name(os.environ, job_id), restart)
    except (ClusterDDPError, OSError) as error:
        return f"{words}, and the job cannot go back into the queue: {error}"
    _record(run, events.StartedInVain, job_id=job_id, restart=restart, nodelist=nodelist, why=words)
    _record(run, events.Requeued, job_id=job_id, why=words)
    _heed_withdrawal(run, job_id, job_id)
    asked = spec.resources.nodes + spec.resources.spare_nodes
    try:
        # As the job asked Slurm for them: torchrun's template starts one agent a node.
        each = os.environ.get("SLURM_NTASKS_PER_NODE", "")
        tasks = asked * (int(each) if each.isdecimal() else spec.resources.tasks_per_node)
        slurm.ask_for_nodes(own_name(os.environ, job_id), asked, tasks)
    except SlurmError as error:
        log.warning(f"the job cannot ask for {asked} nodes: {error} [CD0401]")
    raise BackInQueue(f"{words}: job {job_id} is back in the queue, for {asked}")


def _starts_in_vain(history: Sequence[events.Event]) -> int:
    """Count the latest starts in a row that began no attempt."""
    starts = [e for e in history if isinstance(e, events.Started | events.StartedInVain)]
    begun = [index for index, event in enumerate(starts) if isinstance(event, events.Started)]
    return len(starts) - 1 - max(begun, default=-1)


def _blame_lost_script(run: RunDir, history: Sequence[events.Event]) -> None:
    """Blame the nodes of an attempt that nobody judged, if they are lost: its script was with them.

    srun has seen them fail, or they are down now. Raises OSError.
    """
    causes = restart_policy.causes_of(history)
    number = max(causes, default=0)
    if not number or causes[number]:
        return
    before = {e.attempt: e for e in history if isinstance(e, events.Started)}[number]
    blamed = bad_nodes.blamed(Attempt(run, number))
    text = files.read_tail(run.job_log, _LOG_TAIL_BYTES).decode(errors="replace")
    lost = set(srun_lines.lost_nodes(text.rpartition(f", job {before.job_id} on ")[2]))
    with contextlib.suppress(SlurmError):
        partition = os.environ.get("SLURM_JOB_PARTITION", "")
        lost |= {node.name for node in partitions.nodes(partition, os.environ) if node.is_lost}
    named = [host for host in hosts_of(before.nodelist) if host in lost]
    new = [host for host in named if host not in blamed]
    if new:
        reason = f"lost during attempt {number}, whose end nobody recorded"
        bad_nodes.blame(
            Attempt(run, number), before.job_id, dict.fromkeys(new, reason), bad_nodes.BY_LOSS
        )


def _let_job_end(run: RunDir, job_id: str, *, preempted: bool) -> None:
    """Have a job whose run does not go on end as any other does.

    Slurm may requeue one that was preempted. With --requeue=expedite it holds a job for ever whose
    script ends with a code other than 0 on healthy nodes (REQUEUE_HOLD, seen on 26.05).
    """
    if is_rehearsal(os.environ):
        return
    name = own_name(os.environ, job_id)
    try:
        if (preempted and requeued_after_grace(name)) or run.load_spec().requeue == EXPEDITE:
            slurm.forbid_requeue(name)
    except ClusterDDPError as error:
        log.info(str(error))


def _give_up(attempt: Attempt, job_id: str, why: str, error: Exception) -> None:
    run = attempt.run
    _record(
        run, events.RequeueFailed, job_id=job_id, attempt=attempt.number, why=why, error=str(error)
    )
    log.info(coded(f"this node cannot start the run again: {error}", "CD1225"))
    log.info(f"resume with: {run.resubmission}")


def _warn_of_requeue_exit(run: RunDir, exit_code: int) -> None:
    """Say so where this cluster requeues a job because of the code with which this one ends."""
    for setting in slurm.requeue_exits():
        if slurm.lists_exit_code(setting, exit_code):
            log.warning(
                f"slurm.conf has {setting}: Slurm requeues the job for its "
                f"exit code {exit_code}. Take it out with: clusterddp cancel {run.shown} [CD0413]"
            )


def _record(
    run: RunDir, event: Callable[P, events.Event], *args: P.args, **fields: P.kwargs
) -> None:
    """Add an event; a run directory that is gone or full costs the record, not the run."""
    try:
        events.add(run.events, event, *args, **fields)
    except OSError as error:
        kind = event(*args, **fields).kind
        line = f"clusterddp: cannot record {kind!r} in {run.events}: {error.strerror}. [CD0518]"
        print_to_job_log(line, err=True)
