"""Slurm's words for the state of a job, as plain values."""

import re
from dataclasses import dataclass
from enum import Enum

HELD = "job requeued in held state"
"""Slurm's reason of a job that `scontrol requeuehold` holds (seen on 22.05 and 24.11), and of one
with --requeue=expedite that failed on healthy nodes (26.05). A person's own hold has another."""
# sacct shows an exit code of 128 + signal without the 128; these are signals more often than codes.
_SACCT_SIGNALS = (6, 9, 11, 15)


class State(str, Enum):
    """State of a job, whatever the version of Slurm calls it."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    COMPLETING = "completing"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    PREEMPTED = "preempted"
    NODE_FAIL = "node_fail"
    OUT_OF_MEMORY = "out_of_memory"
    DEADLINE = "deadline"
    BOOT_FAIL = "boot_fail"
    OTHER = "other"
    """Slurm knows the job, in a state for which this table has no word: a later release's."""
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        """Return whether the job is over, as far as this word can tell: a requeue may follow."""
        waits_or_runs = self in (State.PENDING, State.RUNNING, State.SUSPENDED, State.COMPLETING)
        return not waits_or_runs and self not in (State.OTHER, State.UNKNOWN)


# squeue(1), sacct(1), scontrol(1): JOB STATE CODES.
_WORDS = {
    State.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
    # 25.11 and later: waits to start again, ahead of all others.
    "SPECIAL_EXIT EXPEDITING",
    State.RUNNING: "RUNNING RESIZING SIGNALING",
    State.SUSPENDED: "SUSPENDED STOPPED",
    State.COMPLETING: "COMPLETING STAGE_OUT",
    State.DONE: "COMPLETED",
    State.FAILED: "FAILED LAUNCH_FAILED RECONFIG_FAIL",
    State.CANCELLED: "CANCELLED REVOKED",
    State.TIMEOUT: "TIMEOUT",
    State.PREEMPTED: "PREEMPTED",
    State.NODE_FAIL: "NODE_FAIL",
    State.OUT_OF_MEMORY: "OUT_OF_MEMORY",
    State.DEADLINE: "DEADLINE",
    State.BOOT_FAIL: "BOOT_FAIL",
}


@dataclass(frozen=True)
class JobState:
    """One job as Slurm knows it."""

    state: State
    reason: str = ""
    """Slurm's reason for the state, such as Resources or NonZeroExitCode."""
    exit_code: int | None = None
    """Exit code of an ended job, as a shell would show it: 128 + N for signal N."""
    problem: str = ""
    """Reason that Slurm could not be asked. Unknown without a problem: Slurm knows no such job."""
    comment: str = ""
    """The job's comment, by which a run knows a job of its own."""
    element: str = ""
    """The name of an array's element, 89_0: its raw id can be that of the whole array."""
    start: float | None = None
    """Time at which Slurm expects a job to start that is pending, in seconds since the epoch."""
    restarts: int | None = None
    """Number of times that Slurm has put an ended job back into the queue; None where unknown."""
    word: str = ""
    """Slurm's own word for `State.OTHER`."""


def parse_state(text: str) -> State:
    """Return the state of Slurm's word, also of a decorated one: `CANCELLED by 0`, `RUNNING+`."""
    words = re.findall(r"[A-Z_]+", text.upper())
    if not words:
        return State.UNKNOWN
    return next((state for state in _WORDS if words[0] in _WORDS[state].split()), State.OTHER)


def other_word(text: str) -> str:
    """Return Slurm's word where `parse_state` has none for it, otherwise nothing."""
    return text.strip() if parse_state(text) is State.OTHER else ""


def parse_exit_code(text: str, source: str = "scontrol") -> int | None:
    """Return `CODE:SIGNAL` as a shell shows it, the same number from scontrol and sacct.

    For a job whose srun was killed by signal 9, scontrol shows 137:0 and sacct 9:0: sacct takes
    128 off, so that its 9:0 can be either. The signals that end ranks are taken for signals.
    """
    parts = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not parts:
        return None
    code, signal = int(parts[1]), int(parts[2])
    if signal:
        return 128 + signal
    return code + 128 if source == "sacct" and code in _SACCT_SIGNALS else code
