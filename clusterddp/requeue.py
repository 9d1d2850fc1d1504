"""What becomes of a run when one of its attempts has ended: another one, or not, and why.

Pure: from the run's own records and Slurm's word to a decision. Carrying it out is `cli/finish`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterddp.attempt import Attempt
from clusterddp.run_dir import RunDir

DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
"""By a person."""
STOPPED = "stopped"
"""By `clusterddp stop`, after saving."""
SIGNAL = "signal"
"""Slurm's signal ahead of the time limit, or one like it, and the ranks have saved."""
TIME_LIMIT = "time limit"
PREEMPTED = "preempted"
REQUEUED = "requeued"
"""Slurm has put the job back by itself: preemption, a lost node, `scontrol requeue`."""

_GOES_ON = (SIGNAL, TIME_LIMIT, PREEMPTED)
_NOT_COUNTED = (PREEMPTED, REQUEUED)
_FRUITLESS_STARTS = 2


@dataclass(frozen=True)
class Policy:
    """What the request says of further starts."""

    requeue: bool
    max_requeues: int
    """Starts after the first, whoever caused them."""
    restart_on_failure: int
    """Of these, how many may follow a crash."""


@dataclass(frozen=True)
class Decision:
    """Whether the run is to go on by itself, and the reason as a person reads it."""

    go_on: bool
    why: str


@dataclass(frozen=True)
class Start:
    """One attempt, as the run's events tell."""

    attempt: int
    cause: str = ""
    """How it ended; empty where nobody recorded it: killed together with its script."""
    gained: int | None = None
    """Steps by which its last checkpoint is beyond the one from which it started; None for a
    command, whose steps nobody counts."""


def decide(policy: Policy, cause: str, starts: Sequence[Start]) -> Decision:
    """Whether another start follows.

    starts: those since a person last submitted the run, the one that has just ended last.
    """
    if cause in (DONE, CANCELLED, STOPPED):
        return Decision(False, cause)
    if cause == REQUEUED:
        return Decision(False, "Slurm has put the job back into the queue")
    if cause in _GOES_ON and not policy.requeue:
        return Decision(False, f"{cause}, and requeue is off")
    if cause == FAILED:
        crashes = sum(start.cause == FAILED for start in starts)
        if not policy.restart_on_failure:
            return Decision(False, "a failed run starts again only with --restart-on-failure")
        if crashes > policy.restart_on_failure:
            return Decision(
                False, f"it has failed {crashes} times (--restart-on-failure "
                f"{policy.restart_on_failure})"
            )  # fmt: skip
    if len(starts) > policy.max_requeues:
        return Decision(False, capped(policy.max_requeues))
    counted = [s for s in starts if s.cause and s.cause not in _NOT_COUNTED]
    last = counted[-_FRUITLESS_STARTS:]
    if len(last) == _FRUITLESS_STARTS and all(start.gained == 0 for start in last):
        return Decision(False, f"{_FRUITLESS_STARTS} starts in a row have not gained a step")
    return Decision(True, cause)


def capped(max_requeues: int) -> str:
    """Why a run is not started once more."""
    return f"it has been started {max_requeues + 1} times (--max-requeues {max_requeues})"


def starts_since_submission(run: RunDir) -> list[Start]:
    """The attempts since a person last submitted the run, the latest last."""
    return starts_of(run, run.read_events())


def starts_of(run: RunDir, events: Sequence[Mapping[str, Any]]) -> list[Start]:
    """As `starts_since_submission`, from the run's events."""
    causes: dict[int, str] = {}
    for event in events:
        number = event.get("attempt")
        if event.get("event") == "submitted" and not event.get("in_place_of"):
            causes = {}
        elif event.get("event") == "started" and isinstance(number, int):
            causes[number] = ""
        elif event.get("event") == "ended" and number in causes:
            causes[number] = str(event.get("cause") or "")
    return [Start(number, cause, gained(Attempt(run, number))) for number, cause in causes.items()]


def gained(attempt: Attempt) -> int | None:
    """Steps that an attempt has brought onto the disk."""
    steps = [
        int(path.stem.removeprefix("step-"))
        for path in attempt.checkpoints.glob("step-*.pt")
        if path.stem.removeprefix("step-").isdigit()
    ]
    record = attempt.read_record()
    if not record:
        return None if not attempt.run.resolved.exists() and _runs_a_command(attempt.run) else 0
    return max(max(steps, default=0) - int(record.get("step") or 0), 0)


def _runs_a_command(run: RunDir) -> bool:
    from clusterddp.errors import RequestError

    try:
        return run.load_spec().train is None
    except RequestError:
        return False
