"""Decides whether another attempt of a run follows the one that has ended, and why.

Pure: from the run's records and Slurm's word to a decision; `batch.finish` carries it out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.request.spec import JobSpec
from clusterddp.run.events import Cause
from clusterddp.run.history import PastAttempt

OWN_CLOCK = "its own clock, ahead of the time limit"
"""What took place where the cause is SIGNAL and there was none."""
STOP_ASKED = "'clusterddp stop' asked for it"
NO_RESTART = "a failed run starts again only with --restart-on-failure"

_FRUITLESS_STARTS = 2
_TOLD_AGAIN = (
    f"{_FRUITLESS_STARTS} starts in a row have left with exit code 0 at a signal, and nobody knows "
    "whether they saved"
)

_GOES_ON = (
    Cause.SIGNAL,
    Cause.TIME_LIMIT,
    Cause.PREEMPTED,
    Cause.NODE_LOST,
    Cause.SUSPENDED,
    Cause.PREFLIGHT,
)
_NOT_COUNTED = (
    Cause.PREEMPTED,
    Cause.REQUEUED,
    Cause.NODE_LOST,
    Cause.SUSPENDED,
    Cause.PREFLIGHT,
    Cause.SUPERSEDED,
)


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


def decide(
    policy: Policy,
    cause: str,
    starts: Sequence[PastAttempt],
    *,
    stop_asked: bool = False,
    how: str = "",
) -> Decision:
    """Decide whether another attempt follows.

    starts: those since a person last submitted the run, the one that has just ended last.
    stop_asked: whether a person has asked the run to stop.
    how: what took place, where the cause's own word would say another thing.
    """
    if cause in (Cause.DONE, Cause.CANCELLED, Cause.STOPPED, Cause.SUPERSEDED):
        return Decision(False, cause)
    if stop_asked:
        return Decision(False, STOP_ASKED)
    if cause == Cause.REQUEUED:
        return Decision(False, "Slurm has put the job back into the queue")
    has_loop = policy.requeues_loops and starts[-1].gained is not None
    if not (policy.requeue or has_loop) and (cause in _GOES_ON or policy.restart_on_failure):
        return Decision(False, requeue_is_off(how or cause), "CD1221")
    if cause == Cause.FAILED:
        crashes = sum(start.cause == Cause.FAILED for start in starts)
        if not policy.restart_on_failure:
            return Decision(False, NO_RESTART, "CD1223")
        if crashes > policy.restart_on_failure:
            limit = f"--restart-on-failure {policy.restart_on_failure}"
            return Decision(False, f"it has failed {crashes} times ({limit})", "CD1223")
    if len(starts) > policy.max_requeues:
        return Decision(False, capped(policy.max_requeues), "CD1222")
    last = starts[-_FRUITLESS_STARTS:]
    # One that has requeued its job by itself, as Lightning at USR1, has saved before.
    told = [start for start in last if start.told and start.cause != Cause.REQUEUED]
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
