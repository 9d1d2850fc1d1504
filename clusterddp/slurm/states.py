"""Job states and exit codes, parsed from Slurm's output."""

import re
from dataclasses import dataclass
from enum import Enum

HELD = "job requeued in held state"
"""Slurm's reason for a job held by `scontrol requeuehold` (seen on 22.05 and 24.11), or with
--requeue=expedite that failed on healthy nodes (26.05). A user's hold has another reason."""
# sacct shows an exit code of 128 + signal without the 128; these values are usually signals.
_SACCT_SIGNALS = (6, 9, 11, 15)


class State(str, Enum):
    """State of a job, independent of Slurm's version."""

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
    """A state of a later Slurm release that this table lacks."""
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        """True if this is a final state; a requeue may still follow."""
        waits_or_runs = self in (State.PENDING, State.RUNNING, State.SUSPENDED, State.COMPLETING)
        return not waits_or_runs and self not in (State.OTHER, State.UNKNOWN)


# squeue(1), sacct(1), scontrol(1): JOB STATE CODES.
_WORDS = {
    State.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
    # 25.11 and later: waits to restart before all other jobs.
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
    """A job's state in Slurm."""

    state: State
    reason: str = ""
    """Slurm's reason for the state, for example Resources or NonZeroExitCode."""
    exit_code: int | None = None
    """Exit code of an ended job, as in a shell: 128 + N for signal N."""
    problem: str = ""
    """Reason why Slurm could not be asked; empty if Slurm answered."""
    comment: str | None = ""
    """Comment, which identifies the run's jobs; None if accounting answered, which has none."""
    element: str = ""
    """Name of an array task, 89_0, since its raw id may equal the array's."""
    start: float | None = None
    """Expected start of a pending job, in seconds since the epoch."""
    restarts: int | None = None
    """Number of requeues; None if unknown."""
    word: str = ""
    """Slurm's own word for `State.OTHER`."""


def parse_state(text: str) -> State:
    """Return the state for Slurm's word, also with additions: `CANCELLED by 0`, `RUNNING+`."""
    words = re.findall(r"[A-Z_]+", text.upper())
    if not words:
        return State.UNKNOWN
    return next((state for state in _WORDS if words[0] in _WORDS[state].split()), State.OTHER)


def other_word(text: str) -> str:
    """Return Slurm's word if `parse_state` does not know it, else an empty text."""
    return text.strip() if parse_state(text) is State.OTHER else ""


def parse_exit_code(text: str, source: str = "scontrol") -> int | None:
    """Return the shell's exit code for `CODE:SIGNAL`, the same from scontrol and sacct.

    For a job whose srun was killed by signal 9, scontrol shows 137:0 and sacct 9:0: sacct subtracts
    128, so 9:0 is ambiguous. Numbers of signals that typically end ranks count as signals.
    """
    parts = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not parts:
        return None
    code, signal = int(parts[1]), int(parts[2])
    if signal:
        return 128 + signal
    return code + 128 if source == "sacct" and code in _SACCT_SIGNALS else code
