"""Watches of a job's step for a lost task-exit message and for ranks that print nothing.

srun waits for one message from each task. A host that is off the network while its tasks end drops
its message after some seconds (seen on 22.05: 12 s), and srun then waits until the time limit. The
tasks' own records show that they have ended, so the step is ended.

A COMMAND is observed only through its output. Once none of its ranks has printed anything for a
while, the stacks of all ranks go to the job log, once per attempt, because a program can have good
reasons to print nothing. The batch controller runs each watch in a thread.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from clusterddp import files, log, polling
from clusterddp.errors import ClusterDDPError, SlurmError
from clusterddp.formatting import setting
from clusterddp.processes import table
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, printed_bytes
from clusterddp.run.outcome import (
    HUNG,
    any_began,
    last_renewal,
    note_hung,
    read_outcomes,
    read_outcomes_of,
    step_name,
)
from clusterddp.run.records import HungRanks, Outcome, StalledOutput
from clusterddp.slurm import client as slurm
from clusterddp.status import stacks
from clusterddp.status.stacks import RankStacks


class SrunProcess:
    """Process, among the script's lines, that starts the tasks: srun, or a stand-in for it."""

    def __init__(self, lines: int, attempt: Attempt) -> None:
        """lines: the process that runs the script's lines."""
        self._lines, self._attempt = lines, attempt
        self._process: table.Process | None = None
        self._seen_time = 0.0
        self._words = {f"--run-dir={attempt.run.path}", f"{attempt.run.path}/submitit"}

    @property
    def has_begun(self) -> bool:
        """True if the process was seen or a task has recorded its start."""
        return self._process is not None or self._has_tasks

    @property
    def _has_tasks(self) -> bool:
        return any_began(self._attempt.outcomes)

    def process(self) -> int | None:
        """Return the process that forwards signals to the tasks; None before and after its life.

        Setup lines can start an srun too. The step's srun has the words of the tasks on its command
        line; if a wrapper hides them, it is the srun that runs once a task has started.
        """
        before = self._process
        if before and (now := _alive(before.pid)) and now.ticks == before.ticks:
            return before.pid
        lines = [process] if (process := _alive(self._lines)) else []
        found = [*lines, *[each for each in table.descendants(self._lines) if each.state != "Z"]]
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
        """Return the process if it is srun."""
        pid = self.process()
        process = table.read_process(pid) if pid else None
        return pid if process and process.name == "srun" else None

    def may_run(self) -> bool:
        """Return whether the script's lines still run."""
        return _alive(self._lines) is not None

    def listens(self, number: int) -> bool:
        """Return whether the process handles a signal, or has had time to install a handler.

        A signal that would kill srun is held back while the tasks can see the stop file instead.
        """
        pid = self.process()
        if not pid or table.handles_signal(pid, number):
            return True
        is_late = time.monotonic() > self._seen_time + polling.SRUN_HANDLERS_SECONDS
        return is_late and (self._has_tasks or not self._attempt.stop.exists())

    def signal(self, number: int) -> None:
        """Signal the process, if it runs."""
        if pid := self.process():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _alive(pid: int) -> table.Process | None:
    process = table.read_process(pid)
    return process if process and process.state != "Z" else None


def watch(
    attempt: Attempt, job: str, ranks: int, srun: Callable[[], int | None], grace_seconds: float
) -> None:
    """Wait until srun has ended, and end its step if it waits for a message that was lost.

    job: the id that Slurm's commands take. ranks: number of recorded ends once all have ended.
    srun: returns its process, or None once it has ended.
    """
    why = _await_the_end(attempt, ranks, grace_seconds)
    if srun() is None or attempt.is_superseded:
        return  # an orphan: its step number may now belong to another step
    step = step_name(attempt.outcomes, job)
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
            await_end(srun, polling.STEP_CANCEL_SECONDS)
    except SlurmError as error:
        # The hosts have reported the end of the step to slurmctld; only srun does not know.
        log.info(str(error))
    kill(srun)


def await_end(srun: Callable[[], int | None], seconds: float) -> None:
    """Wait until srun has ended, for at most `seconds`. It need not be a child process."""
    polling.wait_until(lambda: not srun(), seconds, every=polling.RECORDS_POLL_SECONDS)


def end_tasks(attempt: Attempt, step: str, at_work: Callable[[], int | None]) -> None:
    """End the tasks of a step, once their parents have saved the newest snapshot in their memory.

    at_work: returns a process while tasks are left. Raises SlurmError.
    """
    slurm.terminate_step(step)
    await_end(at_work, polling.LEFT_RANKS_EXIT_SECONDS)
    polling.wait_until(
        lambda: not (at_work() and attempt.is_saving_memory),
        polling.MEMORY_SAVE_SECONDS,
        every=polling.RECORDS_POLL_SECONDS,
    )
    if at_work():
        slurm.kill_step(step)
        await_end(at_work, polling.LEFT_RANKS_KILL_SECONDS)


def kill(srun: Callable[[], int | None]) -> None:
    """Kill an srun that did not end with its step."""
    if pid := srun():
        log.info("killing srun, which did not end with its step")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # not TERM, at which srun would first end tasks


def _await_the_end(attempt: Attempt, ranks: int, grace_seconds: float) -> str:
    """Wait until srun should have ended. Return the reason.

    Each poll reads the record of one host with an active rank, whatever their number.
    """
    before: tuple[object, ...] = ()
    since = time.monotonic()
    at_work = _AtWork(attempt, ranks)
    for _ in polling.poll(every=polling.STEP_POLL_SECONDS):
        if attempt.is_superseded:
            break
        first_at_work = at_work.first()
        has_final_record, sign = attempt.end.exists(), 0.0
        with suppress(OSError):  # a COMMAND has no liveness file
            sign = last_renewal(attempt.alive)
        now = first_at_work, has_final_record, sign
        if now != before or attempt.is_saving_memory:
            before, since = now, time.monotonic()
        quiet = time.monotonic() - since
        if first_at_work is None:
            if quiet >= grace_seconds:
                return "every task's end is recorded"
        elif has_final_record and quiet >= polling.FINAL_RECORD_SECONDS:
            seconds = setting(polling.FINAL_RECORD_SECONDS)
            return f"the training has ended, with no heartbeat for {seconds}"
    return "a later attempt has begun"  # in the same job, with another srun


_LOOKS_AT_ONE_HOST = 10


class _AtWork:
    """First rank of an attempt without a recorded end."""

    def __init__(self, attempt: Attempt, ranks: int) -> None:
        self._folder, self._ranks = attempt.outcomes, ranks
        self._known: Outcome | None = None
        self._looks = 0

    def first(self) -> int | None:
        """Return its number; None without one, until an agent restarts its ranks."""
        self._looks += 1
        known = self._known
        if known and self._looks % _LOOKS_AT_ONE_HOST:  # an agent can move a rank to another
            of_host = read_outcomes_of(self._folder, known.host)
            if any(o.rank == known.rank and o.ended is None for o in of_host):
                return known.rank
        outcomes = {each.rank: each for each in read_outcomes(self._folder)}
        self._known = next((each for each in outcomes.values() if each.ended is None), None)
        if self._known:
            return self._known.rank
        return next((rank for rank in range(self._ranks) if rank not in outcomes), None)


_POLLS = 20
"""Polls of the logs per --hang-timeout."""


def watch_output(
    attempt: Attempt, world_size: int, seconds: float, end: Callable[[], None] | None
) -> None:
    """Print the stacks of all ranks when they have printed nothing for `seconds`.

    After a mere report, twice that time: pauses of its length are normal in this job.

    end: ends the tasks, if the request asks for it, once the hung ranks are recorded.
    """
    while _finds_false_alarm(attempt, world_size, seconds, end):
        log.info("the ranks print again: the job continues")
        seconds *= 1 if end else 2


def _finds_false_alarm(
    attempt: Attempt, world_size: int, seconds: float, end: Callable[[], None] | None
) -> bool:
    """Handle one silence of the ranks. Return True if they printed before the job was ended."""
    pause = min(polling.OUTPUT_POLL_SECONDS, seconds / _POLLS)
    before, silent = printed_bytes(attempt.run), 0.0
    polls = polling.poll(every=pause)
    next(polls)
    while silent < seconds:
        next(polls)
        if attempt.is_superseded:
            return False  # by an attempt in the same job
        # Counted, not measured: ranks of a suspended job cannot print.
        silent += pause
        now = printed_bytes(attempt.run)
        if now != before or not any_began(attempt.outcomes):
            before, silent = now, 0.0
    log.info(f"no rank has printed anything for {setting(seconds)}. Stacks of the ranks:")
    rank_stacks: list[RankStacks] = []
    try:
        rank_stacks = stacks.gather(attempt.run, world_size=world_size)
        for line in stacks.format_stacks(rank_stacks).splitlines():
            log.info(line)
    except (ClusterDDPError, OSError) as error:
        log.info(f"the stacks cannot be read: {error}")
    ranks, where = _elsewhere(rank_stacks, world_size)
    with suppress(OSError):
        record = StalledOutput(round(time.time() - seconds, 3), before, tuple(ranks), where)
        files.write_record(attempt.stalled, vars(record))
    if not end:
        log.info("the job continues; --on-hang end would end it")
        while printed_bytes(attempt.run) == before:
            if attempt.is_superseded:
                return False
            next(polls)
        return True
    if printed_bytes(attempt.run) != before:  # reading the stacks takes time
        return True
    _end_hang(attempt, end, lambda: _record_hung_ranks(attempt, rank_stacks, world_size, seconds))
    return False


def watch_hung_ranks(attempt: Attempt, end: Callable[[], None]) -> None:
    """End the tasks once the watchdog of the training or of a Loop has recorded hung ranks."""
    for _ in polling.poll(every=polling.STEP_POLL_SECONDS):
        hung = files.read(HungRanks, attempt.outcomes / HUNG) or HungRanks()
        if hung.ended or attempt.is_superseded:
            return
        if hung.reason:
            who = f"rank {', '.join(map(str, hung.ranks))} hangs: " if hung.ranks else ""
            log.info(f"{who}{hung.reason}")
            note = partial(note_hung, attempt.outcomes, hung.ranks, hung.reason, ended=True)
            _end_hang(attempt, end, note)
            return


def _end_hang(attempt: Attempt, end: Callable[[], None], note: Callable[[], None]) -> None:
    """End the tasks; `note` records why. If that fails, the job continues."""
    log.info("ending the job because of --on-hang end")
    with suppress(OSError):
        note()
    try:
        end()
    except ClusterDDPError as error:
        log.info(f"the job cannot be ended, and continues: {error}")
        with suppress(OSError):
            note_hung(attempt.outcomes, (), "")


def _record_hung_ranks(
    attempt: Attempt, rank_stacks: list[RankStacks], world_size: int, seconds: float
) -> None:
    """Record the ranks elsewhere than most ranks; none if that is not certain.

    Ranks that a loop's watchdog has named take precedence.
    """
    named = files.read(HungRanks, attempt.outcomes / HUNG)
    if named and named.ranks:
        note_hung(attempt.outcomes, named.ranks, named.reason, ended=True)
        return
    ranks, where = _elsewhere(rank_stacks, world_size)
    reason = f"no rank printed anything for {setting(seconds)}"
    if ranks:
        reason = f"{reason}; it is in {where}"
    elif stacks.code_locations(rank_stacks):
        reason += "; the job's log has their stacks"
    note_hung(attempt.outcomes, ranks, reason, ended=True)


def _elsewhere(rank_stacks: list[RankStacks], world_size: int) -> tuple[list[int], str]:
    """Return the ranks elsewhere than most ranks, and both locations; none if uncertain.

    It is certain if every rank was read and the ranks are at two locations, one of them with a
    majority. Ranks of a torchrun agent are excluded: their numbers differ from those of the tasks.
    """
    locations = stacks.code_locations(rank_stacks)
    read = [rank for _, some in locations for rank in some]
    are_tasks = all(p.rank is None for each in rank_stacks for p in each.programs)
    if are_tasks and sorted(read) == list(range(world_size)) and len(locations) == 2:
        (most, at_most), (location, elsewhere) = locations
        if len(at_most) > len(elsewhere):
            return elsewhere, f"{location}, most are in {most}"
    return [], ""
