"""Polling, and how long and how often to poll for what sends no event.

Examples are files on a shared file system, a slurmctld that restarts and processes of others. Times
are in seconds. A timeout after which something counts as silent, late or lost is defined where it
is used. Waits for an event (a pipe, a child, a thread) are not here either.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_GROWTH = 1.5
_SLICE = 1.0

SLURM_RESTART_SECONDS = 600.0
"""Time for a slurmctld to restart or fail over."""
SLURM_POLL_SECONDS = 5.0
SUBMITTED_SECONDS, SUBMITTED_POLL_SECONDS = 7.0, 2.0
"""Time for slurmctld to finish a submission that it has not answered."""
SINFO_SECONDS = 1.0
"""Timeout of sinfo during a submission."""
OTHER_ATTEMPT_SECONDS = 300.0
"""Time to wait for another job that runs the latest attempt."""
RECORDS_POLL_SECONDS = 0.5
"""Poll interval of a run's records, which are on a shared file system."""
STEP_POLL_SECONDS = 2.0
"""Poll interval of a step's records while it runs."""
SRUN_EXIT_SECONDS = 20.0
"""Time for srun to end after the last task's recorded end: it usually takes less than a second."""
AGENT_STEP_EXIT_SECONDS = 180.0
"""The same with agents, which may take longer to restart their ranks."""
FINAL_RECORD_SECONDS = 120.0
"""Time after rank 0's final record, if the end of a task is not recorded."""
STEP_CANCEL_SECONDS = 35.0
"""srun waits for KillWait (30 s by default) plus two seconds after its step is cancelled."""
SRUN_HANDLERS_SECONDS = 10.0
"""Time for srun to install its signal handlers; an earlier signal would end it."""
IDLE_SPARES_POLL_SECONDS = 30.0
"""Poll interval of idle spares, whose loss would make Slurm end the whole job."""
SLURMD_CONNECT_SECONDS = 3.0
"""Timeout of a connection to a slurmd."""
LEFT_RANKS_EXIT_SECONDS, LEFT_RANKS_KILL_SECONDS = 8.0, 2.0
"""Time for hung ranks, or those left by a lost node, to end after SIGTERM, and after SIGKILL. In
the first their parents begin to save the newest snapshot in their memory."""
MEMORY_SAVE_SECONDS = 300.0
"""Time to save a snapshot from a node's memory."""
NODE_RELEASE_SECONDS = 120.0
"""Slurm releases a second node only once its accounting has recorded the first."""
OUTPUT_POLL_SECONDS = 30.0
"""Longest poll interval of the ranks' output."""
FOLLOW_FILES_POLL_SECONDS = 0.3
"""Poll interval of a run's files while a user watches them."""
FOLLOW_SLURM_POLL_SECONDS = (1.0, 10.0)
"""Poll intervals of Slurm: at first and after a change, and the longest."""
FOLLOW_SETTLE_SECONDS = 30.0
"""Time for a failed run's job to end until the run's own record counts as final."""
WATCH_POLL_SECONDS = 10.0
"""Refresh interval of `runs --watch`; each refresh calls squeue once."""
NOTIFY_SETTLE_SECONDS = 90.0
"""Slurm may still show a job as running whose end has already started the next one."""
NOTIFY_UNANSWERED_SECONDS = 480.0
"""Time for Slurm to answer; the job that asks has ten minutes."""
NOTIFY_POLL_SECONDS = 2.0
NOTIFY_PROGRAM_SECONDS = 60.0
"""Timeout of the program given by --notify."""
NOTIFY_PROGRAM_EXIT_SECONDS = 5.0
"""Time between TERM and KILL when it times out."""
GPU_RELEASE_SECONDS, GPU_RELEASE_POLL_SECONDS = 6.0, 0.5
"""Time for the driver to release the memory of processes that have just ended."""
STAGE_SECONDS = 1800.0
"""Time for the nodes to unpack an environment of some gigabytes on slow disks."""
PACKING_SECONDS = 120.0
"""Time after which a job that packs an environment and writes nothing counts as dead."""
CHILD_POLL_SECONDS = 0.01
"""Poll interval of a local process or file, which is cheap."""
SIGNAL_SECONDS = 0.3
"""Longest delay, on a busy machine, between Slurm's signals to two processes of a step."""
STACKS_SECONDS = 3.0
"""A Python that runs code answers at once, however busy its machine is."""
WORLD_POLL_SECONDS = (0.25, 60.0)
"""Poll interval for ranks that a process starts itself: it does so soon, late or never."""
EARLY_MEETING_SECONDS, EARLY_POLL_SECONDS, MEETING_POLL_SECONDS = 60.0, 0.25, 2.0
"""Ranks usually meet within a minute of their start; until then, polls are more frequent."""


def poll(
    seconds: float = math.inf, *, every: float, longest: float | None = None
) -> Iterator[bool]:
    """Yield for each poll within `seconds` whether it is the last one.

    The first poll is immediate, the last one when the time is over. longest: pauses grow up to it.
    """
    deadline = time.monotonic() + seconds
    is_last = False
    while not is_last:
        is_last = time.monotonic() >= deadline
        yield is_last
        if not is_last:
            pause(max(min(every, deadline - time.monotonic()), 0.0))
            every = max(every, min(every * _GROWTH, longest or every))


def wait_until(
    condition: Callable[[], T],
    seconds: float = math.inf,
    *,
    every: float,
    longest: float | None = None,
) -> T:
    """Poll until the condition is true or `seconds` pass. Return its last value."""
    for _ in poll(seconds, every=every, longest=longest):
        if answer := condition():
            break
    return answer


def pause(seconds: float) -> None:
    """Sleep in slices.

    A signal between Python's check for signals and the sleep does not interrupt it (PEP 475): its
    handler runs after the slice.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE))
