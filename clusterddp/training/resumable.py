"""The resumable training loop of one rank: its epochs, batches and steps, when it saves and leaves.

A script of one's own has it as `clusterddp.loop.Loop`, and the built-in training is one of it
(`loop`). What a batch and a step are is theirs.
"""

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clusterddp import files, log
from clusterddp.checkpoints import catalog, sharded, state
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.state import Position, Stateful
from clusterddp.checkpoints.writer import Costs, Saver
from clusterddp.distributed import agreement
from clusterddp.distributed.agreement import Poll
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.errors import EXIT_INTERRUPTED, EXIT_PAUSED, CheckpointError, TrainingError
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import Interval
from clusterddp.run import attempt as attempts
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import FinalRecord, Liveness, Spent
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import RUN_NAME
from clusterddp.training import replay
from clusterddp.training.paces import Pace, Paces, Stragglers
from clusterddp.training.stop import REASONS, Deadline, StopRequest

T = TypeVar("T")

_END = object()
"""Stands for the end of an iterator."""
# Until then an attempt has saved once, so that it knows what that costs.
_FIRST_SAVE_SECONDS = 40.0


class Left(SystemExit):
    """The end of the ranks that were asked to stop, once they have saved."""

    def __init__(self, code: int, reason: str) -> None:
        """reason: one of `stop.REASONS`."""
        super().__init__(code)
        self.reason = reason


class Resumable:
    """One rank's part in one attempt of a training; what it writes, rank 0 writes for all."""

    _epochs, _batches = 0, -1
    """Epochs of all, and batches of this one; 0 and -1 where nobody has said."""
    _in_epoch = _has_batches = False
    """True where this epoch's batches come from `batches`; else it is one step, or none."""
    _random: tuple[Any, Any] | None = None
    """This rank's generators as they were saved: then, and at the beginning of the epoch."""
    _start_random: Any = None
    _keeps_random = _in_run = True
    """Whether a checkpoint keeps the generators; whether clusterddp has started this rank."""
    _postponed: tuple[str, bool] | None = None
    _resume_batch = 0
    """Batches of the epoch that the checkpoint is of."""

    def __init__(
        self,
        attempt: Attempt,
        states: Mapping[str, Stateful],
        position: Position,
        *,
        shards: Mapping[str, Stateful] | None = None,
        wrappers: Mapping[str, DistributedDataParallel] | None = None,
        arranged: Mapping[str, list[int]] | None = None,
        save_every: str,
        keep_last: int,
        is_resumed: bool,
        request: StopRequest,
        deadline: Deadline,
        straggler_window: float,
        pace: Pace,
        progress: Progress | None = None,
    ) -> None:
        """states: what a checkpoint holds by name; shards: those of them that are sharded.

        wrappers: DDP's, by those names, whose arrangement of buckets is kept; arranged: what is
        known of it.
        position: where the training is; this moves it on.
        request: this rank's; any rank's stops all of them. deadline: known on rank 0.
        pace: measures this rank's steps.
        """
        self.attempt = attempt
        self.is_resumed = is_resumed
        """True where it began with a checkpoint."""
        self.rank, self.world_size = agreement.world()
        self._position, self._pace = position, pace
        self._shards, self._wrappers = shards or {}, wrappers or {}
        self._whole = {name: each for name, each in states.items() if name not in self._shards}
        self._arranged = dict(arranged or {})
        """Arrangement of the buckets of each of DDP's wrappers, once it is known."""
        self._generators: list[torch.Generator] = []
        """Generators of the loader itself."""
        self._request, self._deadline, self._poll = request, deadline, Poll()
        self._progress = progress or Progress()
        self._saver = Saver(attempt, keep_last) if self.rank == 0 else None
        self._costs = self._saver.costs if self._saver else Costs()
        self._best: Best | None = None
        self._first_step: float | None = None
        """Time at which the attempt's first step begins, once it does."""
        self._paces = Paces()
        """Images and seconds of each rank in this attempt."""
        self._stragglers = Stragglers(attempt, self.rank, straggler_window)
        self._saving = Interval.parse(save_every)
        self._accounted = self._waited = 0.0
        self._start_step, self._earlier_seconds = position.step, position.seconds
        self._saved_step = position.step if is_resumed else -1
        self._began = self._saved_at = time.monotonic()

    @property
    def steps(self) -> int:
        """Steps since the run began, over all its attempts."""
        return self._position.step

    @property
    def epoch(self) -> int:
        """Epoch that is being trained, from 0."""
        return self._position.epoch

    # -- the training --------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of so many, from 0."""
        self._restore_random()
        self._epochs = count
        while self.epoch < count:
            self._in_epoch, self._has_batches = True, False
            yield self.epoch
            self._in_epoch = False
            self._position.next_epoch()
            self._batches, self._resume_batch = -1, 0
            reason, save = self._postponed or ("", False)
            self._postponed = None
            self._save_or_leave(reason, save or self._saving.due("epoch", self.epoch))

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, after a resume those left of the epoch; collective.

        After a resume at another number of ranks the loader needs torch's DistributedSampler, or a
        sharded model; raises CheckpointError without.

        What lies before is skipped without being read where the loader is torch's without workers,
        and read again otherwise, so that random transforms draw what they would have drawn.
        """
        if not self._in_epoch:
            raise RuntimeError("loop.batches() belongs into the body of `for … in loop.epochs(…)`")
        self._has_batches = True
        iterator = self._rest_of(loader)
        self._pace.clock.restart()  # what has come before is the epoch's own code
        while True:
            self._pace.clock.start()
            self._mark(Phase.DATA)
            batch = next(iterator, _END)
            if batch is _END:
                self._pace.clock.stop()
                self._mark(Phase.OWN)
                return
            self._mark(Phase.FORWARD)
            yield cast(T, batch)

    def step(self, **metrics: Any) -> None:
        """Count a step, log its metrics, save where it is due, leave if asked to; collective.

        Call it on every rank after `optimizer.step()`. metrics: of rank 0; `loss`, `accuracy` and
        `lr` are known to the reports, others are kept beside them.

        Raises SystemExit with 75 after saving, where a stop was asked for; 130 after a Ctrl-C. At
        the last batch of an epoch both wait for the epoch's own code, so that this is not skipped.
        RuntimeError at the second step of an epoch that does not use `batches`.
        """
        if self._in_epoch and not self._has_batches:
            if self._position.step_in_epoch:
                raise RuntimeError(
                    "loop.step() came twice in an epoch that does not use loop.batches(): a resume "
                    "would do its steps again. Write `for … in loop.batches(…)` there; it takes "
                    "any iterable, such as range(100)"
                )
            self._position.step_in_epoch = self._batches = 1
        if self._has_batches:
            self._mark(Phase.UPDATE)
        asks = self._asks(self.steps + 1)
        self._stop_clock(exact=asks)
        self._position.step += 1
        self._random = None  # it is on its way
        save = self._stepped(metrics)
        reason, is_time = self._agree() if asks else ("", False)
        save = save or is_time or self._saving.due("step", self.steps)
        if self._position.step_in_epoch == self._batches:
            before, was_due = self._postponed or ("", False)
            self._postponed = reason or before, save or was_due
        else:
            self._save_or_leave(reason, save)
        if not self._has_batches:
            self._pace.clock.start()
        self._mark(Phase.OWN)

    def stop_asked(self) -> str:
        """Return why all ranks are to stop, empty where they are not; collective.

        `step` looks by itself. For a loop of another form, or a long evaluation.
        """
        return self._agree()[0]

    def save(self) -> None:
        """Save, once a step at most; collective. A full disk is logged, and the next save tries."""
        if self._saved_step == self.steps:
            return
        self._flush()
        place = self._progress.place
        with self._pace.clock.halted():
            self._save()
        self._progress.mark(place.step, place.phase)

    def leave(self, reason: str) -> NoReturn:
        """Save and raise SystemExit, as `step` does when it is asked to stop; collective."""
        self.save()
        self._await_checkpoint()
        self._note_end(reason)
        self._over()
        if self.world_size > 1:
            dist.barrier()
        code = EXIT_INTERRUPTED if reason == "interrupt" else EXIT_PAUSED
        # An agent of torchrun's takes any other code for a failure; the record says what it was.
        in_agent = "TORCHELASTIC_RUN_ID" in os.environ and self._in_run
        raise Left(0 if in_agent else code, reason)

    def finish(self) -> None:
        """Save the end, and wait until it is on the disk; collective. Raises CheckpointError."""
        reason, _ = self._postponed or ("", False)
        if reason:  # a `break` has come before it
            self.leave(reason)
        self.save()
        if trouble := self._await_checkpoint():
            last = agreement.gather(self._saver.last_step if self._saver else None)[0]
            whole = "there is none yet" if last is None else f"the last whole one is of step {last}"
            raise CheckpointError(
                f"the training is done, but {trouble}; {whole}. Make room and start the run again: "
                "it resumes there. [CD0706]"
            )
        self._over()

    # -- what a kind of training does in its own way ----------------------------------------------

    def _rest_of(self, loader: Iterable[T]) -> Iterator[T]:
        """Begin an epoch's batches behind those that are trained already."""
        return iter(loader)

    def _asks(self, step: int) -> bool:
        """Return whether the ranks agree at this step; the same on all of them."""
        return self._poll.due(step)

    def _stepped(self, metrics: Mapping[str, Any]) -> bool:
        """Log a step; returns whether to save now."""
        raise NotImplementedError

    def _flush(self) -> None:
        """Log what is not logged yet, ahead of a checkpoint."""

    def _kept(self) -> Mapping[str, object]:
        """Return what a checkpoint keeps beside the states and the position."""
        raise NotImplementedError

    def _planned(self) -> int | None:
        """Return the step at which the training will be done, where that is known."""
        raise NotImplementedError

    def _over(self) -> None:
        """Do what follows a training's last save."""
        self._progress.mark(self.steps, Phase.DONE)

    # -- whether to stop, and to save ----------------------------------------------------------

    def _agree(self) -> tuple[str, bool]:
        """Agree with all ranks whether to stop, and why, and whether to save now; collective.

        They exchange their paces as well.
        """
        self._request.looked_at = True
        if self._deadline.is_near(self._lead_seconds):
            self._request.note("time limit")
        due = self.rank == 0 and self._is_due()
        wishes = [REASONS.index(self._request.reason), int(due)]
        code, save = self._poll.ask(self.steps, wishes)
        if self._costs.saves:
            self._deadline.check_lead(self._lead_seconds)
        self._account()
        return REASONS[code], bool(save)

    @property
    def _lead_seconds(self) -> float:
        """Seconds from a request to stop to the last byte on the disk, judged by those before."""
        return 2 * self._poll.step_seconds + 1.0 + 2 * self._costs.longest_seconds

    def _is_due(self) -> bool:
        """Return whether the latest save is long ago, or the first one is overdue."""
        now = time.monotonic()
        first = self._saved_at == self._began and now - self._began > _FIRST_SAVE_SECONDS
        return first or now - self._saved_at >= self._saving.seconds

    def _save_or_leave(self, reason: str, save: bool) -> None:
        if reason:
            self.leave(reason)
        if save:
            self.save()

    # -- checkpoints ---------------------------------------------------------------------------

    def _save(self) -> None:
        """Copy the state of all ranks on rank 0, and have it written beside the training."""
        self._progress.mark(self.steps, Phase.SAVE)
        for name in sorted(self._wrappers.keys() - self._arranged.keys()):  # on each rank alike
            if indices := replay.arrangement(self._wrappers[name]):
                self._arranged[name] = indices
        began = time.monotonic()
        random_states = agreement.gather(self._random_state(), on_first=True)
        path, kept = self.attempt.checkpoints / catalog.name_of(self.steps), self._kept()
        shards, problem = sharded.save(path, self._shards) if self._shards else ({}, "")
        if self._saver and problem:
            self._saver.failed(path, problem)
        elif self._saver:
            content = state.collect(
                self._whole,
                self._position,
                world_size=self.world_size,
                random_states=random_states,
                best=self._best,
                **kept,
            )
            self._saver.save(content, time.monotonic() - began, shards)
        self._saved_step, self._saved_at = self.steps, time.monotonic()

    def _await_checkpoint(self) -> str:
        """Wait for the last checkpoint, and try once more where it could not be written.

        Returns on all ranks why it is not there, empty where it is.
        """
        trouble = self._trouble()
        if trouble:
            self._save()
            trouble = self._trouble()
        return trouble

    def _trouble(self) -> str:
        # Rank 0 is the one that is waited for.
        self._progress.mark(self.steps, Phase.SAVE if self._saver else Phase.DONE)
        trouble = "" if self._saver is None or self._saver.wait() else self._saver.trouble
        return agreement.gather(trouble)[0]

    def _random_state(self) -> object:
        """Return this rank's generators: now, and at the beginning of the epoch."""
        now = replay.random_state(self._generators), self._start_random
        return now if self._keeps_random else None

    def _restore_random(self) -> None:
        if self._random and self._random[0]:
            replay.restore(self._random[0], ())

    # -- pace, the end, and signs of life ---------------------------------------------------------

    def _mark(self, phase: Phase) -> None:
        """Tell the watchdog where this rank is; what comes before a step has its number."""
        done = self.steps if phase >= Phase.LOG else self.steps + 1
        self._progress.mark(done, phase)

    def _stop_clock(self, *, exact: bool) -> None:
        """Count no more as training; exact: once the GPU has done what it was given."""
        self._pace.stop(exact=exact)
        self._position.seconds = self._earlier_seconds + self._pace.clock.elapsed

    def _count(self, samples: int) -> None:
        """Count a batch of this rank."""
        self._pace.images += samples
        self._position.step_in_epoch += 1
        self._position.samples += samples * self.world_size
        self._position.images += samples * self.world_size

    def _account(self) -> None:
        """Exchange what the ranks have measured since the last time, and account for it."""
        if exchanged := self._pace.exchange(self.steps):
            paces, steps, seconds = exchanged
            self._accounted += seconds
            self._waited += seconds - fmean(paces.seconds)
            self._paces += paces
            now = time.time()
            self._stragglers.add(paces, steps=steps, seconds=seconds, step=self.steps, now=now)

    def _note_end(self, reason: str) -> None:
        """Record on rank 0 that the training is done, or stopped for a reason; see `note_end`."""
        if self._saver:
            saved, trouble = self._saver.last_step, self._saver.trouble
            note_end(self.attempt, reason, self.steps, saved, trouble)

    def _spent(self) -> Spent:
        """Sum up what this attempt's time has gone into, from any thread of rank 0.

        Steps that nobody has accounted for yet count as those before them.
        """
        accounted, waited, trained = self._accounted, self._waited, self._pace.clock.elapsed
        part = min(max(waited / accounted, 0.0), 1.0) if accounted else 0.0
        return Spent(
            self._first_step and round(self._first_step, 3),
            round(trained, 3),
            None if math.isnan(part) else round(part * trained, 3),
            round(self._costs.copy_seconds + self._costs.blocked_seconds, 3),
        )

    def _sign_of_life(self) -> Liveness:
        """Return how far the training is, from any thread of rank 0."""
        saved = self._saver.last_step if self._saver else None
        return Liveness(self.steps, saved, self._spent(), self._planned())


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
    end = vars(FinalRecord("stopped" if reason else "done", reason, step, saved, trouble))
    content = {name: value for name, value in end.items() if value or name != "write_error"}
    try:
        attempt.write_final_record(attempt.end, content)
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
    gone, StartRefused or Superseded.
    """
    if number is None:
        attempts.wait_until_inactive(run, job_id, patience)
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
    attempts.record_start(
        attempt, source, step, world_size=world_size, hosts=hosts, environ=environ
    )
    return taken
