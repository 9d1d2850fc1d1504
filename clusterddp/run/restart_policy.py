"""Decides whether another attempt of a run follows the one that has ended, and why.

Pure: from the run's records and Slurm's word to a decision; `batch.finish` carries it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.request.spec import JobSpec
from clusterddp.run import events
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir, newest_checkpoint

DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
"""A person cancelled the job."""
STOPPED = "stopped"
"""`clusterddp stop` asked for it, after saving."""
SIGNAL = "signal"
"""Slurm's signal ahead of the time limit, or one like it, and the ranks have saved."""
TIME_LIMIT = "time limit"
OWN_CLOCK = "its own clock, ahead of the time limit"
"""What took place where the cause is SIGNAL and there was none."""
PREEMPTED = "preempted"
REQUEUED = "requeued"
"""Slurm has put the job back by itself: preemption, a lost node, `scontrol requeue`."""
NODE_LOST = "node lost"
SUSPENDED = "suspended"
"""Slurm suspended the job for longer than the ranks wait for each other, so they broke off."""
PREFLIGHT = "preflight"
"""A node has failed its checks ahead of the tasks, which were not started."""
SUPERSEDED = "superseded"
"""A later attempt has begun, as beside a lost node's orphan."""
NOT_DUE = "not due"
"""A run that it waited for has ended in another way than was asked for; no attempt has begun."""

STOP_ASKED = "'clusterddp stop' asked for it"
NO_RESTART = "a failed run starts again only with --restart-on-failure"

_FRUITLESS_STARTS = 2
_TOLD_AGAIN = (
    f"{_FRUITLESS_STARTS} starts in a row have left with exit code 0 at a signal, and nobody knows "
    "whether they saved"
)

_GOES_ON = (SIGNAL, TIME_LIMIT, PREEMPTED, NODE_LOST, SUSPENDED, PREFLIGHT)
_NOT_COUNTED = (PREEMPTED, REQUEUED, NODE_LOST, SUSPENDED, PREFLIGHT, SUPERSEDED)


@dataclass(frozen=True)
class Policy:
    """Further starts that the request allows."""

    requeue: bool
    max_requeues: int
    """Most starts after the first, whatever the cause."""
    restart_on_failure: int
    """Most of these that may follow a crash."""
    requeues_loops: bool = False
    """True where nobody has decided on a COMMAND: one that has begun a Loop is requeued."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Policy":
        """Return what a request allows."""
        undecided = spec.requeue is None
        return cls(spec.requeues, spec.max_requeues, spec.restart_on_failure, undecided)


@dataclass(frozen=True)
class Decision:
    """Decision on another attempt, and the reason as a person reads it."""

    go_on: bool
    why: str
    code: str = ""
    """Code of what holds the next attempt back, where it is more than the end itself."""


@dataclass(frozen=True)
class Start:
    """Attempt, as the run's events tell."""

    attempt: int
    cause: str = ""
    """Cause of its end; empty where nobody recorded it: killed together with its script."""
    gained: int | None = None
    """Steps by which its last checkpoint is beyond the one from which it started; None for a
    command, whose steps nobody counts."""
    told: bool = False
    """True where its ranks left with exit code 0 because a signal told them to."""


def decide(
    policy: Policy, cause: str, starts: Sequence[Start], *, stop_asked: bool = False, how: str = ""
) -> Decision:
    """Decide whether another attempt follows.

    starts: those since a person last submitted the run, the one that has just ended last.
    stop_asked: whether a person has asked the run to stop.
    how: what took place, where the cause's own word would say another thing.
    """
    if cause in (DONE, CANCELLED, STOPPED, SUPERSEDED):
        return Decision(False, cause)
    if stop_asked:
        return Decision(False, STOP_ASKED)
    if cause == REQUEUED:
        return Decision(False, "Slurm has put the job back into the queue")
    has_loop = policy.requeues_loops and starts[-1].gained is not None
    if not (policy.requeue or has_loop) and (cause in _GOES_ON or policy.restart_on_failure):
        return Decision(False, requeue_is_off(how or cause), "CD1221")
    if cause == FAILED:
        crashes = sum(start.cause == FAILED for start in starts)
        if not policy.restart_on_failure:
            return Decision(False, NO_RESTART, "CD1223")
        if crashes > policy.restart_on_failure:
            limit = f"--restart-on-failure {policy.restart_on_failure}"
            return Decision(False, f"it has failed {crashes} times ({limit})", "CD1223")
    if len(starts) > policy.max_requeues:
        return Decision(False, capped(policy.max_requeues), "CD1222")
    last = starts[-_FRUITLESS_STARTS:]
    # One that has requeued its job by itself, as Lightning at USR1, has saved before.
    told = [start for start in last if start.told and start.cause != REQUEUED]
    if len(told) == _FRUITLESS_STARTS and all(start.gained is None for start in told):
        return Decision(False, _TOLD_AGAIN, "CD1229")
    counted = [s for s in starts if s.cause and s.cause not in _NOT_COUNTED]
    last = counted[-_FRUITLESS_STARTS:]
    if len(last) == _FRUITLESS_STARTS and all(start.gained == 0 for start in last):
        why = f"{_FRUITLESS_STARTS} starts in a row have not gained a step"
        return Decision(False, why, "CD1224")
    return Decision(True, cause)


def requeue_is_off(how: str) -> str:
    """Say why a run is not started again that may not be; how: what took place."""
    return f"{how}, and requeue is off"


def capped(max_requeues: int) -> str:
    """Say why a run is not started once more."""
    times = f"{max_requeues + 1} times" if max_requeues else "once"
    return f"it has been started {times} (--max-requeues {max_requeues})"


def starts_since_submission(run: RunDir) -> list[Start]:
    """List the attempts since a person last submitted the run, the latest last."""
    history = events.read(run.events)
    told = {each.attempt for each in history if isinstance(each, events.Ended) and each.told}
    return [
        Start(number, cause, gained(Attempt(run, number)), number in told)
        for number, cause in causes_of(history).items()
    ]


def causes_of(history: Sequence[events.Event]) -> dict[int, str]:
    """Each attempt since a person last submitted the run, with how it ended (see `Start.cause`)."""
    causes: dict[int, str] = {}
    jobs: dict[int, str] = {}
    for event in history:
        number, job_id = event.attempt, event.job_id
        if _is_a_persons(event):
            # A job can start before the submitting side has written its own line.
            causes = {n: cause for n, cause in causes.items() if job_id and jobs[n] == job_id}
        elif isinstance(event, events.Started) and number is not None:
            causes[number], jobs[number] = "", job_id
        elif isinstance(event, events.Ended) and number in causes:
            causes[number] = event.cause
    return causes


def done_by(history: Sequence[events.Event], job_id: str) -> bool:
    """Return whether a start of this job has finished the run since a person last submitted it."""
    causes = causes_of(history)
    return any(
        isinstance(event, events.Ended)
        and causes.get(event.attempt or 0) == DONE
        and event.job_id == job_id
        for event in history
    )


def withdrawn(history: Sequence[events.Event], job_id: str) -> str:
    """CANCELLED or STOPPED where a person has asked that this job start nothing more, else empty.

    A stop that was asked for since the run last started counts for the jobs that the run knows
    of, as it can come while one of them waits to start again; a job that a person has submitted
    since, or gives to sbatch by hand, is another matter.
    """
    withdrawal, known = "", False
    for event in history:
        of_job = event.job_id == job_id
        known = known or of_job
        if _is_a_persons(event) or (isinstance(event, events.Started) and withdrawal == STOPPED):
            withdrawal = ""
        elif isinstance(event, events.StopAsked):
            withdrawal = withdrawal or STOPPED
        elif isinstance(event, events.StopFailed) and withdrawal == STOPPED:
            withdrawal = ""
        elif isinstance(event, events.CancelAsked) and of_job:
            withdrawal = CANCELLED
        elif isinstance(event, events.CancelFailed) and of_job and withdrawal == CANCELLED:
            withdrawal = ""
    return withdrawal if known else ""


def _is_a_persons(event: events.Event) -> bool:
    """Return whether it is a submission of a person, with which the counting of starts begins anew.

    `resubmit` stands before the submission proper, which the job's start can overtake.
    """
    submitted = isinstance(event, events.Submitted) and not event.in_place_of
    return submitted or isinstance(event, events.Resubmitted)


def gained(attempt: Attempt) -> int | None:
    """Steps that an attempt has brought onto the disk."""
    record = attempt.read_record()
    if not record:
        spec = attempt.run.read_spec()
        uncounted = spec is not None and not spec.resumable
        return None if uncounted and not attempt.run.resolved.exists() else 0
    # The next attempt takes the files over, and says from which of them it started.
    after = Attempt(attempt.run, attempt.number + 1).read_record()
    newest = newest_checkpoint(attempt.checkpoints)
    reached = max(newest[0] if newest else 0, (after.step or 0) if after else 0)
    return max(reached - (record.step or 0), 0)
