"""Ends a step whose srun waits for the exit message of a task that was lost on its way.

srun waits for one message from each task. A host that is off the network while its tasks end gives
its message up after some seconds (seen on 22.05: 12 s), and srun then waits until the time limit.
The tasks' own records say that they have ended. The batch controller runs this in a thread.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from clusterddp import log, patience
from clusterddp.errors import SlurmError
from clusterddp.processes import table
from clusterddp.run import events
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcome, read_outcomes
from clusterddp.slurm import client as slurm


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
        if not pid or table.takes(pid, number):
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
        has_last_word = attempt.end.exists()
        now = first_at_work, has_last_word, _last_sign(attempt)
        if now != before:
            before, since = now, time.monotonic()
        quiet = time.monotonic() - since
        if first_at_work >= ranks:
            if quiet >= grace_seconds:
                if all(outcome.ended is not None for outcome in read_outcomes(attempt.outcomes)):
                    return "every task's end is recorded"
                first_at_work = 0  # an agent has started its ranks anew, or there are more of them
        elif has_last_word and quiet >= patience.STEP_LAST_WORD:
            silent = f"{patience.STEP_LAST_WORD:g} s"
            return f"the training has ended, without a sign of life for {silent}"
    return "a later attempt has begun"  # in the same job, whose srun is another one


def _has_ended(attempt: Attempt, rank: int) -> bool:
    outcome = read_outcome(attempt.outcomes, rank)
    return outcome is not None and outcome.ended is not None


def _last_sign(attempt: Attempt) -> float | None:
    try:
        return attempt.alive.stat().st_mtime
    except OSError:
        return None
