"""Watches what the ranks of a COMMAND print; of a program of one's own nothing else is known.

Once none of them has printed anything for a while, the stacks of all go to the job's log. That is
done once an attempt, as a program may be silent for good reasons. The batch controller runs this in
a thread.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from clusterddp import files, log, patience
from clusterddp.errors import ClusterDDPError
from clusterddp.formatting import duration
from clusterddp.run.attempt import Attempt
from clusterddp.run.logs import printed
from clusterddp.run.outcome import HUNG, any_began, note_hung
from clusterddp.run.records import HungRanks, Silence
from clusterddp.status import stacks
from clusterddp.status.stacks import RankStacks

_LOOKS = 20
"""Looks at the logs until they count as silent."""


def watch(
    attempt: Attempt,
    world_size: int,
    seconds: float,
    end: Callable[[], None] | None,
) -> None:
    """Print the stacks of all ranks once they have printed nothing for so many seconds.

    end: ends the tasks, where that is asked for; who is to blame is recorded before.
    """
    pause = min(patience.OUTPUT_PAUSE, seconds / _LOOKS)
    before, silent = printed(attempt.run), 0.0
    looks = patience.looks(every=pause)
    next(looks)
    while silent < seconds:
        next(looks)
        if attempt.is_superseded:
            return  # by one in the same job
        # Not by a clock: in a job that was suspended nobody could print.
        silent += pause
        now = printed(attempt.run)
        if now != before or not any_began(attempt.outcomes):  # none has begun
            before, silent = now, 0.0
    log.info(f"no rank has printed anything for {duration(seconds)}. Where they are:")
    rank_stacks: list[RankStacks] = []
    try:
        rank_stacks = stacks.gather(attempt.run, world_size=world_size)
        for line in stacks.described(rank_stacks).splitlines():
            log.info(line)
    except (ClusterDDPError, OSError) as error:
        log.info(f"their stacks cannot be read: {error}")
    ranks, where = _elsewhere(rank_stacks, world_size)
    with suppress(OSError):
        record = Silence(round(time.time() - seconds, 3), before, tuple(ranks), where)
        files.write_record(attempt.silent, vars(record))
    if not end:
        log.info("the job goes on, and this is not printed again; --end-silent would end it")
        return
    if printed(attempt.run) != before:  # a look takes its time
        log.info("the ranks print again: the job goes on, and this is not printed again")
        return
    log.info("ending the job for it, as --end-silent asks")
    with suppress(OSError):
        _blame(attempt, rank_stacks, world_size, seconds)
    try:
        end()
    except ClusterDDPError as error:
        log.info(f"the job cannot be ended, and goes on: {error}")
        with suppress(OSError):
            note_hung(attempt.outcomes, (), "")


def _blame(
    attempt: Attempt, rank_stacks: list[RankStacks], world_size: int, seconds: float
) -> None:
    """Record which ranks are elsewhere than most, or none where that is not sure.

    Where the watchdog of a loop has named some, these are.
    """
    named = files.read(HungRanks, attempt.outcomes / HUNG)
    if named and named.ranks:
        note_hung(attempt.outcomes, named.ranks, named.reason, ended=True)
        return
    ranks, where = _elsewhere(rank_stacks, world_size)
    reason = f"no rank printed anything for {duration(seconds)}"
    if ranks:
        reason = f"{reason}; it is in {where}"
    elif stacks.places(rank_stacks):
        reason += "; the job's log has their stacks"
    note_hung(attempt.outcomes, ranks, reason, ended=True)


def _elsewhere(rank_stacks: list[RankStacks], world_size: int) -> tuple[list[int], str]:
    """Return the ranks that are elsewhere than most, and where both are; none where not sure.

    It is sure where each rank was read, and they are in two places, one of which has most of them.
    The ranks of an agent of its own have other numbers than the tasks, whose ends are recorded.
    """
    places = stacks.places(rank_stacks)
    read = [rank for _, some in places for rank in some]
    are_tasks = all(p.rank is None for each in rank_stacks for p in each.programs)
    if are_tasks and sorted(read) == list(range(world_size)) and len(places) == 2:
        (most, at_most), (place, elsewhere) = places
        if len(at_most) > len(elsewhere):
            return elsewhere, f"{place}, most are in {most}"
    return [], ""
