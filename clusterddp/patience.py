"""Waits for what sends no word, by one loop, and how long and how often that is done.

So wait files on a file system that hosts share, a slurmctld that comes back, processes of others.
Times are in seconds. A time that says when something counts as silent, late or lost stands with
what it judges; what is waited for by an event (a pipe, a child, a thread) is not here either.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

_GROWTH = 1.5

SLURM_AWAY = 600.0
"""A slurmctld that is restarted, or fails over, is back within minutes."""
SLURM_AWAY_PAUSE = 5.0
SUBMITTED, SUBMITTED_PAUSE = 7.0, 2.0
"""slurmctld may still be working on a submission to which it has given no answer."""
PARTITIONS = 1.0
"""Time that a submission has for sinfo's answer, from the moment of the question."""
OTHER_ATTEMPT = 300.0
"""Another job may run the latest attempt for so long until this one gives up waiting for it."""
RECORDS_PAUSE = 0.5
"""Between two looks at a run's records, which lie on a file system that hosts share."""
STEP_PAUSE = 2.0
"""Between two looks at a step's records, for as long as it runs."""
STEP_ENDS = 20.0
"""After the last task's recorded end, for srun to end by itself: it usually takes less than one."""
STEP_OF_AGENTS_ENDS = 180.0
"""Where an agent may start its ranks anew, which takes it longer."""
STEP_FINAL_RECORD = 120.0
"""Grace after rank 0's last word, where the end of some task is not recorded."""
STEP_CANCELLED = 35.0
"""srun waits for KillWait (30 s by default) and two seconds more once its step is cancelled."""
SRUN_LISTENS = 10.0
"""Time for srun to listen to signals; one that came earlier would end it."""
SPARES_IDLE_PAUSE = 30.0
"""Between two looks at idle spares, for whose loss Slurm would end the whole job."""
NODE_ANSWERS = 3.0
"""Time that a slurmd has to take a connection."""
LEFT_RANKS_LEAVE, LEFT_RANKS_KILLED = 5.0, 2.0
"""Time for ranks beside a lost node to end by themselves: what they compute is lost anyway."""
LOST_NODE_TAKEN_BACK = 120.0
"""Slurm takes a second node back only once its accounting has recorded the first."""
OUTPUT_PAUSE = 30.0
"""Between two looks at what ranks print, at most."""
FOLLOWED_FILES_PAUSE = 0.3
"""Between two looks at a run's files: as quick as a person sees a line come."""
FOLLOWED_SLURM_PAUSES = (1.0, 10.0)
"""Between two questions to Slurm: at first and after a change, and at most."""
FOLLOWED_SETTLES = 30.0
"""A failed run's job may take so long to leave until the run's own record is final."""
WATCHED_LIST_PAUSE = 10.0
"""Between two lists of `runs --watch`, each of which is one call of squeue."""
NOTICE_SETTLES = 90.0
"""Slurm may still show a job at work whose end has let the next one start."""
NOTICE_UNANSWERED = 480.0
"""Slurm may not answer for so long; the job that asks has ten minutes."""
NOTICE_PAUSE = 2.0
NOTIFIED_PROGRAM = 60.0
"""Time that the program of --notify has."""
NOTIFIED_PROGRAM_LEAVES = 5.0
"""Between TERM and KILL for one that takes longer."""
CHILD_PAUSE = 0.01
"""Between two looks at a process of this machine, or at a file of it, which are cheap."""
LATE_SIGNAL = 0.3
"""Slurm's signals reach two processes of a step so far apart on a busy machine."""
STACKS_ANSWER = 3.0
"""A Python that runs code answers at once, whatever else its machine does."""
WORLD_PAUSES = (0.25, 60.0)
"""Between two looks for ranks of a process's own: it starts them soon, or late, or never."""
MEETING_DENSE, MEETING_DENSE_PAUSE, MEETING_PAUSE = 60.0, 0.25, 2.0
"""Ranks mostly meet within a minute of their start, in which looks are more frequent."""


def looks(
    seconds: float = math.inf, *, every: float, longest: float | None = None
) -> Iterator[bool]:
    """Yield for each look that is due, for so many seconds: whether it is the last one.

    The first comes at once, and the last when the time is over. longest: pauses grow up to it.
    """
    deadline = time.monotonic() + seconds
    is_last = False
    while not is_last:
        is_last = time.monotonic() >= deadline
        yield is_last
        if not is_last:
            time.sleep(max(min(every, deadline - time.monotonic()), 0.0))
            every = max(every, min(every * _GROWTH, longest or every))


def wait_until(
    condition: Callable[[], T],
    seconds: float = math.inf,
    *,
    every: float,
    longest: float | None = None,
) -> T:
    """Ask until the answer is true, for so many seconds; returns the last answer. See `looks`."""
    for _ in looks(seconds, every=every, longest=longest):
        if answer := condition():
            break
    return answer
