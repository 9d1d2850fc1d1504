"""Resumable training loop of one rank: epochs, batches, steps, saving and stopping.

`clusterddp.loop.Loop` is its public form; the built-in training (`training.loop`) is a subclass.
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn, TypeVar, cast

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from clusterddp import files, formatting, log
from clusterddp.checkpoints import catalog, sharded, state
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.shard_snapshots import ShardSnapshots
from clusterddp.checkpoints.snapshots import Snapshots
from clusterddp.checkpoints.state import Content, Position, Stateful
from clusterddp.checkpoints.writer import Costs, Saver
from clusterddp.distributed import agreement
from clusterddp.distributed.agreement import Poll
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.errors import EXIT_INTERRUPTED, EXIT_STOPPED, CheckpointError, TrainingError
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import Interval
from clusterddp.run import attempt as attempts
from clusterddp.run.attempt import Attempt
from clusterddp.run.node_memory import kill_wait, own_save_seconds
from clusterddp.run.records import FinalRecord, Liveness, Spent
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import RUN_NAME
from clusterddp.training import replay
from clusterddp.training.paces import Slowdown, StepTimer, Stragglers, Throughputs
from clusterddp.training.replay import END, Fetches, Packed, RandomStates
from clusterddp.training.stop import REASONS, Deadline, StopRequest

T = TypeVar("T")

# An attempt saves once by then, to measure what a save costs.
_FIRST_SAVE_SECONDS = 40.0
_LEAVE_SECONDS = 5.0
"""Time for a snapshot under way at a stop: the time limit may be near."""
SNAPSHOT, SAVE = 1, 2
"""What keeps the state after a step: the memory of the nodes, or a checkpoint."""


class CheckpointExit(SystemExit):
    """Exit of the ranks after a requested stop and its checkpoint."""

    def __init__(self, code: int, reason: str) -> None:
        """reason: one of `stop.REASONS`."""
        super().__init__(code)
        self.reason = reason


class Resumable:
    """One rank's training in one attempt; rank 0 writes the files for all ranks."""

    _epochs, _batches = 0, -1
    """Number of epochs, and of batches in this one; 0 and -1 if unknown."""
    _in_epoch = _has_batches = False
    """True if this epoch's batches come from `batches`; else it has at most one step."""
    _random: RandomStates | None = None
    """Random states of this rank in the checkpoint."""
    _fetches: Fetches | None = None
    """Batches of this epoch, if `Fetches` reads them."""
    _keeps_random = _in_run = True
    """True if a checkpoint keeps the generators; whether clusterddp started this rank."""
    _postponed: tuple[str, int] | None = None
    """Reason to stop, and whether to save, after the epoch's remaining code."""
    _resume_batch = 0
    """Trained batches of the epoch in the checkpoint."""
    _count_of_steps = 0
    """Steps of a loop without epochs; 0 in any other."""
    _loose = 0
    """Batches since the latest step."""

    def __init__(
        self,
        attempt: Attempt,
        states: Mapping[str, Stateful],
        position: Position,
        *,
        shards: Mapping[str, Stateful] | None = None,
        save_every: str,
        snapshot_every: float,
        keep_last: int,
        is_resumed: bool,
        request: StopRequest,
        deadline: Deadline,
        straggler_window: float,
        timer: StepTimer,
        progress: Progress | None = None,
    ) -> None:
        """states: contents of a checkpoint by name; shards: the sharded ones among them.

        position: progress of the training, which this object advances.
        request: stop request of this rank; any rank's stops all. deadline: known on rank 0.
        timer: measures this rank's steps.
        """
        self.attempt = attempt
        self.is_resumed = is_resumed
        """True if it started from a checkpoint."""
        self.rank, self.world_size = agreement.rank_and_world_size()
        self._position, self._timer = position, timer
        self._shards = shards or {}
        self._whole = {name: each for name, each in states.items() if name not in self._shards}
        self._wrappers: Mapping[str, DistributedDataParallel] = {}
        """DDP wrappers, whose bucket layout is kept, by the names of their states."""
        self._arranged: dict[str, list[int]] = {}
        """Bucket layout of each wrapper, once known."""
        self._request, self._deadline, self._poll = request, deadline, Poll()
        self._progress = progress or Progress()
        self._saver = Saver(attempt, keep_last) if self.rank == 0 else None
        self._costs = self._saver.costs if self._saver else Costs()
        self._shard_group = sharded.connect() if self._shards else None
        self._shard_save: sharded.Save | None = None
        self._best: Best | None = None
        self._first_step: float | None = None
        """Start time of the attempt's first step, once it starts."""
        self._paces = Throughputs()
        """Images and seconds of each rank in this attempt."""
        self._stragglers = Stragglers(attempt, self.rank, straggler_window)
        self._slowdown = Slowdown(attempt, self.rank, self._stragglers, position.step)
        self._saving = Interval.parse(save_every)
        self._kill_wait = kill_wait(os.environ)
        self._files = sharded.files_of(self._shards)
        self._snapshots = Snapshots(attempt, snapshot_every)
        if modules := {n: each for n, each in self._shards.items() if n not in self._files}:
            every = snapshot_every if self._shard_group and not self._files else 0.0
            self._snapshots = ShardSnapshots(attempt, every, modules)
        self._snapshots.note_step(position.step)
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
        """Yield the remaining epochs below `count`, from 0."""
        self._restore_random()
        self._epochs = count
        while self.epoch < count:
            self._in_epoch, self._has_batches = True, False
            yield self.epoch
            self._end_epoch()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the remaining batches of the epoch; collective.

        Trained batches are skipped by index if the loader is torch's without workers. Otherwise
        they are read again, so that random transforms draw the same numbers.

        Raises CheckpointError after a resume at another world size, unless the loader has torch's
        DistributedSampler or the model is sharded; RuntimeError at a second call in an epoch.
        """
        if not self._in_epoch:
            raise RuntimeError("call loop.batches() inside `for … in loop.epochs(…)`")
        if self._has_batches:
            raise RuntimeError(
                "loop.batches() was called twice in an epoch, so a resume could not continue the "
                "right one. Call it once, for the batches that are trained. For a validation use "
                "the loader itself"
            )
        self._has_batches = True
        iterator = self._rest_of(loader)
        self._timer.clock.restart()  # the time before belongs to the epoch's own code
        try:
            while True:
                self._timer.clock.start()
                self._mark(Phase.DATA)
                batch = next(iterator, END)
                if batch is END:
                    self._timer.loading.stop()
                    self._mark(Phase.USER_CODE)
                    return
                self._mark(Phase.FORWARD)
                yield cast(T, batch)
        finally:  # also after a `break`
            self._timer.clock.stop()

    def step(self, **metrics: Any) -> None:
        """Count a step, log its metrics, save if due and stop if requested; collective.

        Call it on every rank after `optimizer.step()`. metrics: rank 0's values are written;
        reports show `loss`, `accuracy` and `lr`.

        Raises SystemExit after saving: 75 for a requested stop, 130 for Ctrl-C, or 0 under a
        torchrun agent, which treats any other code as a failure. At the last batch of an epoch the
        save and the stop wait until the epoch's remaining code has run. Raises RuntimeError at the
        second step of an epoch that does not use `batches`.
        """
        if self._in_epoch and not self._has_batches:
            if self._position.step_in_epoch:
                raise RuntimeError(
                    "loop.step() was called twice in an epoch without loop.batches(), so a resume "
                    "would repeat steps. Use `for … in loop.batches(…)`; it accepts any iterable, "
                    "for example range(100)"
                )
            self._position.step_in_epoch = self._batches = 1
        if self._has_batches:
            self._mark(Phase.UPDATE)
        asks = self._asks(self.steps + 1)
        self._stop_clock(exact=asks)
        self._position.step += 1
        self._random = None  # no longer needed
        self._snapshots.note_step(self.steps)
        is_due = self._stepped(metrics)
        reason, save = self._agree() if asks else ("", 0)
        if is_due or self._saving.due("step", self.steps):
            save = SAVE
        before, was_due = self._postponed or ("", 0)
        self._postponed, self._loose = (reason or before, max(save, was_due)), 0
        if any(self._postponed) and not self._is_last_batch():
            self._save_postponed()
        self._mark(Phase.USER_CODE)
        if self.steps == self._count_of_steps:  # the script may leave its loop by `break`
            self.finish()
        elif not self._has_batches or self._position.step_in_epoch != self._batches:
            self._timer.clock.start()  # what follows in the loop's body is part of the next step

    def _end_epoch(self) -> None:
        """Begin the next epoch, after the save or the stop that waited for the end of this one."""
        self._in_epoch = False
        self._position.next_epoch()
        self._batches, self._resume_batch = -1, 0
        reason, save = self._postponed or ("", 0)
        self._postponed = reason, SAVE if self._saving.due("epoch", self.epoch) else save
        if not self._loose:  # else gradients wait for the next step
            self._save_postponed()

    def _save_postponed(self) -> None:
        (reason, save), self._postponed = self._postponed or ("", 0), None
        self._save_or_exit(reason, save)

    def stop_requested(self) -> str:
        """Return why all ranks must stop, empty if they need not; collective.

        `step` does this. Call it in a loop without `step` or in a long evaluation.
        """
        return self._agree()[0]

    def save(self) -> None:
        """Save, at most once per step; collective. A full disk is logged; the next save retries."""
        self._keep(self._save)

    def _keep(self, keep: Callable[[], None]) -> None:
        """Save or take a snapshot, outside of the training's time, unless this step is saved."""
        if self._saved_step == self.steps:
            return
        self._flush()
        place = self._progress.position
        with self._timer.clock.excluding():
            self._progress.mark(self.steps, Phase.SAVE)
            keep()
        self._progress.mark(place.step, place.phase)

    def leave(self, reason: str) -> NoReturn:
        """Save and raise SystemExit, as `step` does for a requested stop; collective."""
        self.save()
        self._await_checkpoint()
        self._snapshots.close(_LEAVE_SECONDS)
        self._note_end(reason)
        self._ended()
        if self.world_size > 1:
            dist.barrier()
        code = EXIT_INTERRUPTED if reason == "interrupt" else EXIT_STOPPED
        # torchrun's agent treats any other code as a failure; the record holds the reason.
        in_agent = "TORCHELASTIC_RUN_ID" in os.environ and self._in_run
        raise CheckpointExit(0 if in_agent else code, reason)

    def finish(self) -> None:
        """Save the final state and wait until it is on disk; collective. Raises CheckpointError."""
        reason, _ = self._postponed or ("", 0)
        if reason:  # the stop was postponed, then the loop ended by `break`
            self.leave(reason)
        self.save()
        if trouble := self._await_checkpoint():
            last = agreement.gather(self._saver.last_step if self._saver else None)[0]
            whole = "there is none yet" if last is None else f"the last whole one has step {last}"
            raise CheckpointError(
                f"the training is done, but {trouble}; {whole}. Free disk space and start the run "
                "again: it resumes from there. [CD0706]"
            )
        self._snapshots.close()
        self._ended()

    # -- hooks of a subclass -----------------------------------------------------------------------

    def _rest_of(self, loader: Iterable[T]) -> Iterator[T]:
        """Return an iterator over the epoch's untrained batches."""
        return iter(loader)

    def _is_last_batch(self) -> bool:
        """Return whether the epoch has no further batch; collective."""
        return self._position.step_in_epoch == self._batches

    def _asks(self, step: int) -> bool:
        """Return whether the ranks agree at this step; the same on all of them."""
        return self._poll.due(step)

    def _stepped(self, metrics: Mapping[str, Any]) -> bool:
        """Log a step; returns whether to save now."""
        raise NotImplementedError

    def _flush(self) -> None:
        """Log pending metrics before a checkpoint."""

    def _entries(self) -> Mapping[str, object]:
        """Return the entries of a checkpoint besides the states and the position."""
        raise NotImplementedError

    def _planned(self) -> int | None:
        """Return the last step of the training, if known."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Finish the training after its last save."""
        self._progress.mark(self.steps, Phase.DONE)

    # -- whether to stop, and to save ----------------------------------------------------------

    def _agree(self) -> tuple[str, int]:
        """Agree on whether to stop, why, and whether to keep the state now; collective.

        The ranks exchange their paces as well.
        """
        self._request.looked_at = True
        if self._deadline.is_near(self._lead_seconds):
            self._request.note("time limit")
        due = 0
        if self.rank == 0:
            due = SAVE if self._is_due() else SNAPSHOT * self._snapshots.is_due()
        wishes = [REASONS.index(self._request.reason), due]
        code, save = self._poll.ask(self.steps, wishes)
        if self._costs.saves:
            self._deadline.check_lead(self._lead_seconds)
            if self._snapshots.is_used and self._costs.longest_seconds:
                self._check_kill_wait()
        self._account()
        return REASONS[code], save

    def _check_kill_wait(self) -> None:
        """Say once if Slurm kills a job before its snapshot is saved, as slowly as a checkpoint."""
        wait, self._kill_wait = self._kill_wait, None
        took = self._costs.longest_seconds
        if wait is not None and took + own_save_seconds(os.environ) > wait:
            size = formatting.size(self._costs.bytes // self._costs.saves)
            log.info(
                f"to save a snapshot of {size} takes about {took:.0f} s here, and Slurm kills a "
                f"job {wait:.0f} s after SIGTERM (KillWait). scancel, and preemption without "
                "GraceTime, then cost the steps since the last checkpoint: use 'clusterddp stop', "
                "save more often, or ask the administrators for a longer KillWait"
            )

    @property
    def _lead_seconds(self) -> float:
        """Seconds from a stop request to a whole checkpoint, from earlier saves."""
        return 2 * self._poll.step_seconds + 1.0 + 2 * self._costs.longest_seconds

    def _is_due(self) -> bool:
        """Return whether the save interval has passed or the first save is overdue."""
        now = time.monotonic()
        first = self._saved_at == self._began and now - self._began > _FIRST_SAVE_SECONDS
        return first or now - self._saved_at >= self._saving.seconds

    def _save_or_exit(self, reason: str, save: int) -> None:
        if reason:
            self.leave(reason)
        if save:
            self._keep(self._save if save == SAVE else self._take_snapshot)

    # -- checkpoints ---------------------------------------------------------------------------

    def _save(self) -> None:
        """Copy the state of all ranks on rank 0, or their shards, and write in the background."""
        if self._shard_save:  # before the memory of another copy is needed
            (self._saver or self._shard_save).wait()
        self._arrange()
        began = time.monotonic()
        random_states = agreement.gather(replay.pack(self._random_state()), on_first=True)
        path, kept = self.attempt.checkpoints / catalog.name_of(self.steps), self._entries()
        if self._shards:
            if self._saver:
                self._saver.announce(path)
            self._shard_save = sharded.Save(path, self._shards, self._shard_group)
        if self._saver:
            content = self._content(random_states, kept)
            shards = self._shard_save.result if self._shard_save else None
            self._saver.save(content, time.monotonic() - began, shards)
        self._saved_step, self._saved_at = self.steps, time.monotonic()
        self._snapshots.postpone()

    def _take_snapshot(self) -> None:
        """Copy the state into the memory of the nodes."""
        if self._files and self.world_size > 1 and not self._wrappers:
            # Not DDP: a framework may shard its files over the nodes.
            self._snapshots.postpone()
            return
        self._arrange()
        self._snapshots.take(
            self.steps,
            self._whole,
            self._replicas,
            self._files,
            replay.pack(self._random_state()),
            lambda random_states, copy: self._content(random_states, self._entries(), copy),
        )

    @property
    def _replicas(self) -> Sequence[DistributedDataParallel]:
        """Wrappers of the models whose parameters are alike on all ranks."""
        return [*self._wrappers.values()]

    def _arrange(self) -> None:
        """Note the layout of each wrapper's buckets; collective."""
        for name in sorted(self._wrappers.keys() - self._arranged.keys()):  # on each rank alike
            if indices := replay.rebuild_buckets(self._wrappers[name]):
                self._arranged[name] = indices

    def _content(
        self,
        random_states: Sequence[Packed],
        entries: Mapping[str, object],
        copy: Callable[[Tensor], Tensor] | None = None,
    ) -> Content:
        """Return the content of a checkpoint at this step."""
        return state.collect(
            self._whole,
            self._position,
            world_size=self.world_size,
            random_states=replay.join(random_states),
            best=self._best,
            copy=copy,
            **entries,
        )

    def _await_checkpoint(self) -> str:
        """Wait for the last checkpoint, and retry once if it could not be written.

        Returns the error on all ranks, empty if it was written.
        """
        trouble = self._trouble()
        if trouble:
            self._save()
            trouble = self._trouble()
        return trouble

    def _trouble(self) -> str:
        self._progress.mark(self.steps, Phase.SAVE)
        if self._shard_save and not self._saver:
            self._shard_save.wait()
        # The other ranks wait for rank 0 here.
        self._progress.mark(self.steps, Phase.SAVE if self._saver else Phase.DONE)
        trouble = "" if self._saver is None or self._saver.wait() else self._saver.trouble
        return agreement.gather(trouble)[0]

    def _random_state(self) -> RandomStates | None:
        """Return this rank's entry of `random_states`."""
        if not self._keeps_random:
            return None
        is_inside = self._position.step_in_epoch > 0
        return (self._fetches or Fetches()).states(is_inside=is_inside)

    def _restore_random(self) -> None:
        if self._random:
            replay.restore(self._random["now"], ())

    # -- pace, end and heartbeat -------------------------------------------------------------------

    def _mark(self, phase: Phase) -> None:
        """Report this rank's phase to the watchdog, with the number of the coming step."""
        (self._timer.loading.start if phase == Phase.DATA else self._timer.loading.stop)()
        done = self.steps if phase >= Phase.LOG else self.steps + 1
        self._progress.mark(done, phase)

    def _stop_clock(self, *, exact: bool) -> None:
        """Stop counting time as training; exact: after the GPU's queued work is done."""
        self._timer.stop(exact=exact)
        self._position.seconds = self._earlier_seconds + self._timer.clock.elapsed

    def _count(self, samples: int) -> None:
        """Add a batch of this rank to the counts."""
        self._timer.images += samples
        self._loose += 1
        self._position.step_in_epoch += 1
        self._position.samples += samples * self.world_size
        self._position.images += samples * self.world_size

    def _account(self) -> None:
        """Exchange the ranks' measurements since the last call and add them up."""
        if exchanged := self._timer.exchange(self.steps):
            paces, steps, seconds = exchanged
            self._accounted += seconds
            self._waited += seconds - fmean(paces.seconds)
            self._paces += paces
            now = time.time()
            self._stragglers.add(paces, steps=steps, seconds=seconds, step=self.steps, now=now)
            loading = self._timer.loading.elapsed
            self._slowdown.add(sum(paces.images), self._spent(), loading, self.steps, now)

    def _note_end(self, reason: str) -> None:
        """Record on rank 0 how the training ended; see `note_end`."""
        if self._saver:
            saved, trouble = self._saver.last_step, self._saver.trouble
            note_end(self.attempt, reason, self.steps, saved, trouble)

    def _spent(self) -> Spent:
        """Return how this attempt has spent its time, from any thread of rank 0.

        Steps without measurements yet count like the steps before them.
        """
        accounted, waited, trained = self._accounted, self._waited, self._timer.clock.elapsed
        part = min(max(waited / accounted, 0.0), 1.0) if accounted else 0.0
        return Spent(
            self._first_step and round(self._first_step, 3),
            round(trained, 3),
            None if math.isnan(part) else round(part * trained, 3),
            round(self._costs.copy_seconds + self._costs.blocked_seconds, 3),
        )

    def _sign_of_life(self) -> Liveness:
        """Return the progress of the training, from any thread of rank 0."""
        saved = self._saver.last_step if self._saver else None
        return Liveness(self.steps, saved, self._spent(), self._planned())


def note_end(
    attempt: Attempt, reason: str, step: int, saved: int | None = None, trouble: str = ""
) -> None:
    """Record how the ranks ended, for the batch script: srun's exit code does not show it.

    reason: why they were stopped; empty if the training is done. saved: step of the checkpoint on
    disk. Raises OSError if a finished training cannot be recorded. A stopped training ends in any
    case, and the batch script reads the checkpoints from disk.
    """
    if reason:
        last = "" if saved in (step, None) else f", the last checkpoint has step {saved}"
        log.info(f"stopped at step {step} ({reason}){last}. The next attempt continues from there")
    end = vars(FinalRecord("stopped" if reason else "done", reason, step, saved, trouble))
    content = {name: value for name, value in end.items() if value or name != "write_error"}
    try:
        attempt.write_final_record(attempt.end, content)
    except OSError as error:
        if not reason:
            raise
        log.warning(f"cannot write {attempt.end}: {error.strerror}. [CD0518]")


def record_request(run: RunDir, world_size: int, hosts: Sequence[str], **what: Any) -> None:
    """Record a request for ranks that were not submitted, so that all commands know the run.

    what: fields of the request except its resources and paths. Raises RequestError for a bad one.
    """
    if run.spec.exists() or not re.fullmatch(RUN_NAME, run.name):
        return
    nodes = 1 if world_size % len(hosts) else len(hosts)
    resources = Resources(nodes=nodes, tasks_per_node=world_size // nodes)
    spec = JobSpec(run.name, str(run.path), resources, launcher="local", **what)
    files.write_atomically(run.spec, spec.to_json().encode())


def take_attempt(run: RunDir, number: int | None, job_id: str, patience: float) -> Attempt:
    """Return the attempt that the launcher created, or create one after the previous has ended.

    patience: seconds to wait for an active attempt. Raises TrainingError if the launcher's attempt
    is gone, NotStarted or Superseded.
    """
    if number is None:
        attempts.wait_until_inactive(run, job_id, patience)
        return attempts.begin(run)
    attempt = Attempt(run, number)
    if not attempt.path.is_dir():
        raise TrainingError(
            f"{attempt.path} does not exist: the run directory was removed or replaced while the "
            "job was starting. Submit the run again. [CD0512]"
        )
    return attempt


def source_of(attempt: Attempt) -> tuple[Path | None, bool]:
    """Return the checkpoint from which an attempt resumes, and whether the attempt saved it.

    The latter is true if an agent restarts the ranks of an attempt within the job.
    """
    own = catalog.newest_in(attempt.checkpoints) if attempt.checkpoints.is_dir() else None
    return own or catalog.find_resume_checkpoint(attempt.run), own is not None


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
    """Prepare an attempt's checkpoint directory and record its hosts and its source.

    Returns the path of the source in the attempt.
    """
    taken = source
    if not attempt.checkpoints.is_dir():
        taken = catalog.adopt(attempt, source, keep_last, best=best)
    attempts.record_start(
        attempt, source, step, world_size=world_size, hosts=hosts, environ=environ
    )
    return taken
