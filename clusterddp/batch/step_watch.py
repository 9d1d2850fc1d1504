"""Watches a job's step for what nobody tells: a message that is lost, ranks that print no more.

srun waits for one message from each task. A host that is off the network while its tasks end gives
its message up after some seconds (seen on 22.05: 12 s), and srun then waits until the time limit.
The tasks' own records say that they have ended, and the step is ended.

Of a program of one's own nothing is known but what it prints. Once none of its ranks has printed
anything for a while, the stacks of all go to the job's log, once an attempt, as a program may be
silent for good reasons. The batch controller runs each of the two in a thread.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from clusterddp import files, log, patience
from clusterddp.errors import ClusterDDPError, SlurmError
from clusterddp.formatting import duration
from clusterddp.processes import table
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, printed_bytes
from clusterddp.run.outcome import (
    HUNG,
    any_began,
    last_renewal,
    note_hung,
    read_outcome,
    read_outcomes,
)
from clusterddp.run.records import HungRanks, Silence
from clusterddp.slurm import client as slurm
from clusterddp.status import stacks
from clusterddp.status.stacks import RankStacks


class Step:
    """Process among a batch script's lines that starts the tasks: srun, or what has their words."""

    def __init__(self, lines: int, attempt: Attempt) -> None:
        """lines: the process that runs the script's lines."""
        self._lines, self._attempt = lines, attempt
        self._process: table.Process | None = None
        self._seen_time = 0.0
        self._words = {f"--run-dir={attempt.run.path}", f"{attempt.run.path}/submitit"}

    @property
    def has_begun(self) -> bool:
        """Return whether it was seen, or a task has recorded its start."""
        return self._process is not None or self._has_tasks

    @property
    def _has_tasks(self) -> bool:
        return any(self._attempt.outcomes.glob("rank-*.json"))

    def process(self) -> int | None:
        """Return the process that passes signals on to the tasks; None before it and after it.

        Lines of the set-up may start an srun as well. The run's own has the words of the tasks;
        where a wrapper hides these, it is the one that is there once a task has begun.
        """
        before = self._process
        if before and (now := _alive(before.pid)) and now.ticks == before.ticks:
            return before.pid
        lines = [process] if (process := _alive(self._lines)) else []
        below = [each for each in table.descendants(self._lines) if each.state != "Z"]
        found = [*lines, *below]
        own = [process for process in found if not self._words.isdisjoint(process.argv)]
        if not own and self._has_tasks:
            own = [process for process in found if process.name == "srun"]
        if not own:
            return None
        if not self._process:
            self._seen_time = time.monotonic()
        self._process = own[0]
        return own[0].pid

    def srun(self) -> int | None:
        """Return the process, where it is srun."""
        pid = self.process()
        process = table.read_process(pid) if pid else None
        return pid if process and process.name == "srun" else None

    def may_run(self) -> bool:
        """Return whether the script's lines have not ended."""
        return _alive(self._lines) is not None

    def listens(self, number: int) -> bool:
        """Return whether it takes a signal by itself, or has had its time to come to that.

        One that would end it is not sent ahead of its tasks, which see the attempt's mark instead.
        """
        pid = self.process()
        if not pid or table.handles_signal(pid, number):
            return True
        is_late = time.monotonic() > self._seen_time + patience.SRUN_LISTENS
        return is_late and (self._has_tasks or not self._attempt.stop.exists())

    def signal(self, number: int) -> None:
        """Signal it, if it is there."""
        if pid := self.process():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _alive(pid: int) -> table.Process | None:
    process = table.read_process(pid)
    return process if process and process.state != "Z" else None


def watch(
    attempt: Attempt, job: str, ranks: int, srun: Callable[[], int | None], grace_seconds: float
) -> None:
    """Return when srun has no message left to wait for and has ended, by itself or not.

    job: the id that Slurm's commands take. ranks: how many ends are recorded once all have ended.
    srun: returns its process, or None once that has ended.
    """
    why = _await_the_end(attempt, ranks, grace_seconds)
    if srun() is None or attempt.is_superseded:
        return  # an orphan's step has the number of another one by now
    step = step_name(attempt, job)
    step_id = step.rpartition(".")[2]
    log.info(
        f"{why}, but srun still waits: a task's exit message was lost. Ending step {step or '?'}"
    )
    with suppress(OSError):
        events.add(
            attempt.run.events,
            events.StepEnded(job_id=job, attempt=attempt.number, step_id=step_id, why=why),
        )
    try:
        if step:
            slurm.cancel(step)
            await_end(srun, patience.STEP_CANCELLED)
    except SlurmError as error:
        # The hosts have told slurmctld that the step is over: srun alone does not know.
        log.info(str(error))
    kill(srun)


def await_end(srun: Callable[[], int | None], seconds: float) -> None:
    """Wait until srun has ended, for so long at most; it may be no child of this process."""
    patience.wait_until(lambda: not srun(), seconds, every=patience.RECORDS_PAUSE)


def kill(srun: Callable[[], int | None]) -> None:
    """Kill an srun that has not ended with its step."""
    if pid := srun():
        log.info("killing srun, which does not end with its step")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # not TERM, for which srun would end tasks first


def step_name(attempt: Attempt, job: str) -> str:
    """Name the attempt's step, as scancel takes it; empty where its tasks have not recorded it.

    A job's id alone would cancel all of the job.
    """
    step_id = next((o.step_id for o in read_outcomes(attempt.outcomes) if o.step_id), "")
    return f"{job}.{step_id}" if step_id else ""


def _await_the_end(attempt: Attempt, ranks: int, grace_seconds: float) -> str:
    """Wait until srun should have ended; returns the reason.

    Each look reads the record of one rank that is still at work, however many there are.
    """
    before: tuple[object, ...] = ()
    since = time.monotonic()
    first_at_work = 0
    for _ in patience.looks(every=patience.STEP_PAUSE):
        if attempt.is_superseded:
            break
        while first_at_work < ranks and _has_ended(attempt, first_at_work):
            first_at_work += 1
        has_final_record, sign = attempt.end.exists(), 0.0
        with suppress(OSError):  # a COMMAND gives none
            sign = last_renewal(attempt.alive)
        now = first_at_work, has_final_record, sign
        if now != before:
            before, since = now, time.monotonic()
        quiet = time.monotonic() - since
        if first_at_work >= ranks:
            if quiet >= grace_seconds:
                if all(outcome.ended is not None for outcome in read_outcomes(attempt.outcomes)):
                    return "every task's end is recorded"
                first_at_work = 0  # an agent has started its ranks anew, or there are more of them
        elif has_final_record and quiet >= patience.STEP_FINAL_RECORD:
            silent = f"{patience.STEP_FINAL_RECORD:g} s"
            return f"the training has ended, without a sign of life for {silent}"
    return "a later attempt has begun"  # in the same job, whose srun is another one


def _has_ended(attempt: Attempt, rank: int) -> bool:
    outcome = read_outcome(attempt.outcomes, rank)
    return outcome is not None and outcome.ended is not None


_LOOKS = 20
"""Looks at the logs until they count as silent."""


def watch_output(
    attempt: Attempt,
    world_size: int,
    seconds: float,
    end: Callable[[], None] | None,
) -> None:
    """Print the stacks of all ranks once they have printed nothing for so many seconds.

    end: ends the tasks, where that is asked for; who is to blame is recorded before.
    """
    pause = min(patience.OUTPUT_PAUSE, seconds / _LOOKS)
    before, silent = printed_bytes(attempt.run), 0.0
    looks = patience.looks(every=pause)
    next(looks)
    while silent < seconds:
        next(looks)
        if attempt.is_superseded:
            return  # by one in the same job
        # Not by a clock: in a job that was suspended nobody could print.
        silent += pause
        now = printed_bytes(attempt.run)
        if now != before or not any_began(attempt.outcomes):  # none has begun
            before, silent = now, 0.0
    log.info(f"no rank has printed anything for {duration(seconds)}. Where they are:")
    rank_stacks: list[RankStacks] = []
    try:
        rank_stacks = stacks.gather(attempt.run, world_size=world_size)
        for line in stacks.format_stacks(rank_stacks).splitlines():
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
    if printed_bytes(attempt.run) != before:  # a look takes its time
        log.info("the ranks print again: the job goes on, and this is not printed again")
        return
    log.info("ending the job for it, as --end-silent asks")
    with suppress(OSError):
        _record_hung_ranks(attempt, rank_stacks, world_size, seconds)
    try:
        end()
    except ClusterDDPError as error:
        log.info(f"the job cannot be ended, and goes on: {error}")
        with suppress(OSError):
            note_hung(attempt.outcomes, (), "")


def _record_hung_ranks(
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
