"""One rank's part in a resumable training: how its attempt begins, when it saves, stops and leaves.

It is the same under the built-in training (`loop`) and a script of one's own (`clusterddp.loop`).
What a batch and a step are is theirs.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from clusterddp import files, log
from clusterddp.checkpoints import catalog, sharded, state
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.state import Position, Stateful
from clusterddp.checkpoints.writer import Costs, Saver
from clusterddp.distributed import exchange
from clusterddp.distributed.agreement import Poll
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.errors import CheckpointError, TrainingError
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import Interval
from clusterddp.run import attempt as attempts
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import LastWord, SignOfLife, Spent
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import RUN_NAME
from clusterddp.training.paces import Paces, Stragglers
from clusterddp.training.stop import REASONS, Deadline, StopRequest

# Until then an attempt has saved once, so that it knows what that costs.
_FIRST_SAVE_SECONDS = 40.0


class Resumable:
    """One rank's part in one attempt of a training; what it writes, rank 0 writes for all."""

    def __init__(
        self,
        attempt: Attempt,
        states: Mapping[str, Stateful],
        position: Position,
        *,
        shards: Mapping[str, Stateful] | None = None,
        save_every: str,
        keep_last: int,
        is_resumed: bool,
        request: StopRequest,
        deadline: Deadline,
        straggler_seconds: float,
        progress: Progress | None = None,
        random_state: Callable[[], object] = lambda: None,
        more: Callable[[], Mapping[str, object]] = dict,
        trained: Callable[[], float],
        planned: Callable[[], int | None],
    ) -> None:
        """states: what a checkpoint holds by name; shards: those of them that are sharded.

        position: where the training is; whoever trains moves it on.
        request: this rank's; any rank's stops all of them. deadline: known on rank 0.
        random_state: returns this rank's random generators, plain values or nothing.
        more: returns what else a checkpoint holds.
        trained: returns the seconds of this attempt that went into steps.
        planned: returns the step at which the training will be done, where that is known.
        """
        self.attempt, self.position = attempt, position
        self._shards = shards or {}
        self._whole = {name: each for name, each in states.items() if name not in self._shards}
        self.rank, self.world_size = exchange.world()
        self.request, self.deadline, self.poll = request, deadline, Poll()
        self.progress = progress or Progress()
        self.saver = Saver(attempt, keep_last) if self.rank == 0 else None
        self.costs = self.saver.costs if self.saver else Costs()
        self.best: Best | None = None
        self.first_step: float | None = None
        """Time at which the attempt's first step begins, once it does."""
        self.paces = Paces()
        """Images and seconds of each rank in this attempt."""
        self.stragglers = Stragglers(attempt, self.rank, straggler_seconds)
        self._saving = Interval.parse(save_every)
        self._random_state, self._more = random_state, more
        self._trained, self._planned = trained, planned
        self._accounted = self._waited = 0.0
        self.start_step = position.step
        self.saved_step = position.step if is_resumed else -1
        self._began = self._saved_at = time.monotonic()

    # -- whether to stop, and to save ----------------------------------------------------------

    def agree(self) -> tuple[str, bool]:
        """Agree with all ranks whether to stop, and why, and whether to save now; collective."""
        self.request.looked_at = True
        if self.deadline.is_near(self._lead_seconds):
            self.request.note("time limit")
        due = self.rank == 0 and self._is_due()
        wishes = [REASONS.index(self.request.reason), int(due)]
        code, save = self.poll.ask(self.position.step, wishes)
        if self.costs.saves:
            self.deadline.check_lead(self._lead_seconds)
        return REASONS[code], bool(save)

    @property
    def _lead_seconds(self) -> float:
        """Seconds from a request to stop to the last byte on the disk, judged by those before."""
        return 2 * self.poll.step_seconds + 1.0 + 2 * self.costs.longest_seconds

    def _is_due(self) -> bool:
        """Return whether the latest save is long ago, or the first one is overdue."""
        now = time.monotonic()
        first = self._saved_at == self._began and now - self._began > _FIRST_SAVE_SECONDS
        return first or now - self._saved_at >= self._saving.seconds

    def is_due_at(self, unit: str, count: int) -> bool:
        """Return whether so many steps or epochs are a time to save."""
        return self._saving.due(unit, count)

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self) -> None:
        """Save, once a step at most; collective. A full disk is logged, and the next save tries.

        Rank 0 copies the state of all ranks, and has it written beside the training.
        """
        step = self.position.step
        if self.saved_step == step:
            return
        self.progress.mark(step, Phase.SAVE)
        began = time.monotonic()
        random_states = exchange.gather(self._random_state(), on_first=True)
        path, more = self.attempt.checkpoints / catalog.name_of(step), self._more()
        shards, problem = sharded.save(path, self._shards) if self._shards else ({}, "")
        if self.saver and problem:
            self.saver.failed(path, problem)
        elif self.saver:
            content = state.collect(
                self._whole,
                self.position,
                world_size=self.world_size,
                random_states=random_states,
                best=self.best,
                **more,
            )
            self.saver.save(content, time.monotonic() - began, shards)
        self.saved_step, self._saved_at = step, time.monotonic()

    def await_checkpoint(self) -> str:
        """Wait for the last checkpoint, and try once more where it could not be written.

        Returns on all ranks why it is not there, empty where it is.
        """
        trouble = self._trouble()
        if trouble:
            self.saved_step = -1
            self.save()
            trouble = self._trouble()
        return trouble

    def _trouble(self) -> str:
        if self.saver is None:  # rank 0 is the one that is waited for
            self.progress.mark(self.position.step, Phase.DONE)
        trouble = "" if self.saver is None or self.saver.wait() else self.saver.trouble
        return exchange.gather(trouble)[0]

    # -- the end, and signs of life --------------------------------------------------------------

    def finish(self) -> None:
        """Save the end of a training, and wait until it is on the disk; collective.

        Raises CheckpointError, on all ranks, where it could not be written.
        """
        self.save()
        if trouble := self.await_checkpoint():
            last = exchange.gather(self.saver.last_step if self.saver else None)[0]
            whole = "there is none yet" if last is None else f"the last whole one is of step {last}"
            raise CheckpointError(
                f"the training is done, but {trouble}; {whole}. Make room and start the run again: "
                "it resumes there. [CD0706]"
            )

    def stop(self) -> None:
        """Save before the ranks leave, as far as that goes; collective."""
        self.save()
        self.await_checkpoint()

    def note_end(self, reason: str) -> None:
        """Record on rank 0 that the training is done, or stopped for a reason; see `note_end`."""
        if self.saver:
            saved, trouble = self.saver.last_step, self.saver.trouble
            note_end(self.attempt, reason, self.position.step, saved, trouble)

    def account(self, paces: Paces, *, steps: int, seconds: float) -> None:
        """Take what the ranks have measured over so many steps and seconds until now."""
        self._accounted += seconds
        self._waited += seconds - fmean(paces.seconds)
        self.paces += paces
        step, now = self.position.step, time.time()
        self.stragglers.add(paces, steps=steps, seconds=seconds, step=step, now=now)

    def spent(self) -> Spent:
        """Sum up what this attempt's time has gone into, from any thread of rank 0.

        Steps that nobody has accounted for yet count as those before them.
        """
        accounted, waited, trained = self._accounted, self._waited, self._trained()
        part = min(max(waited / accounted, 0.0), 1.0) if accounted else 0.0
        return Spent(
            self.first_step and round(self.first_step, 3),
            round(trained, 3),
            None if math.isnan(part) else round(part * trained, 3),
            round(self.costs.copy_seconds + self.costs.blocked_seconds, 3),
        )

    def sign_of_life(self) -> SignOfLife:
        """Return how far the training is, from any thread of rank 0."""
        saved = self.saver.last_step if self.saver else None
        return SignOfLife(self.position.step, saved, self.spent(), self._planned())


def note_end(
    attempt: Attempt, reason: str, step: int, saved: int | None = None, trouble: str = ""
) -> None:
    """Record how the ranks left, for the batch script: srun's exit code does not show it.

    reason: why they were stopped; empty where the training is done. saved: the step that is on the
    disk. Raises OSError where a training that is done cannot note it: one that was asked to stop
    leaves in any case, and the script looks at the disk itself.
    """
    if reason:
        last = "" if saved in (step, None) else f", the last checkpoint is of step {saved}"
        log.info(
            f"stopped at step {step} ({reason}){last}; start the run again to resume from there"
        )
    end = vars(LastWord("stopped" if reason else "done", reason, step, saved, trouble))
    content = {name: value for name, value in end.items() if value or name != "trouble"}
    try:
        attempt.write_last_word(attempt.end, content)
    except OSError as error:
        if not reason:
            raise
        log.warning(f"{attempt.end} cannot be written: {error.strerror} [CD0518]")


def record_request(run: RunDir, world_size: int, hosts: Sequence[str], **what: Any) -> None:
    """Record a request for ranks that nobody submitted, so that all commands know the run.

    what: fields of the request, beside where it runs. Raises RequestError for a bad one.
    """
    if run.spec.exists() or not re.fullmatch(RUN_NAME, run.name):
        return
    nodes = 1 if world_size % len(hosts) else len(hosts)
    resources = Resources(nodes=nodes, tasks_per_node=world_size // nodes)
    spec = JobSpec(run.name, str(run.path), resources, launcher="local", **what)
    files.write_atomically(run.spec, spec.to_json().encode())


def take_attempt(run: RunDir, number: int | None, job_id: str, patience: float) -> Attempt:
    """Return the attempt that the starting side has made, or begin one after any other's end.

    patience: seconds for which another one may still be at work. Raises TrainingError where it is
    gone, NotStarted or Superseded.
    """
    if number is None:
        attempts.await_silence(run, job_id, patience)
        return attempts.begin(run)
    attempt = Attempt(run, number)
    if not attempt.path.is_dir():
        raise TrainingError(
            f"{attempt.path} is gone: the run directory was removed or replaced while the job "
            "was starting. Submit the run again. [CD0512]"
        )
    return attempt


def source_of(attempt: Attempt) -> tuple[Path | None, bool]:
    """Return the checkpoint from which an attempt resumes, and whether it is its own.

    That is so where an agent starts the ranks of an attempt again, within the job.
    """
    own = catalog.newest_in(attempt.checkpoints) if attempt.checkpoints.is_dir() else None
    return own or catalog.source(attempt.run), own is not None


def publish(
    attempt: Attempt,
    source: Path | None,
    step: int,
    *,
    keep_last: int,
    world_size: int,
    hosts: Sequence[str],
    environ: Mapping[str, str],
    best: Best | None = None,
) -> Path | None:
    """Lay out an attempt's checkpoints, and record who trains, from which of them.

    Returns the source as it lies in the attempt.
    """
    taken = source
    if not attempt.checkpoints.is_dir():
        taken = catalog.adopt(attempt, source, keep_last, best=best)
    attempts.take_up(attempt, source, step, world_size=world_size, hosts=hosts, environ=environ)
    return taken
