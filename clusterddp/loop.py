"""Makes your own training loop resumable: `from clusterddp.loop import Loop`.

It needs only torch, and works under any launcher or none. In a run it writes to the run's attempt,
so that every command sees its steps, metrics and checkpoints; elsewhere it writes to a directory.

    loop = Loop(model=model, optimizer=optimizer)
    for epoch in loop.epochs(10):
        for images, labels in loop.batches(loader):
            ...
            loop.step(loss=loss)

A framework's loop has `clusterddp.integrations`.
"""

import atexit
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from torch import nn

from clusterddp import log
from clusterddp.checkpoints import sharded, state
from clusterddp.checkpoints.state import Position, why_unreadable
from clusterddp.distributed import agreement, heartbeat
from clusterddp.distributed.heartbeat import Phase
from clusterddp.distributed.watchdog import Watchdog, noting
from clusterddp.errors import CheckpointError, ClusterDDPError, RequestError, TrainingError, coded
from clusterddp.formatting import seconds
from clusterddp.ranks import dist_env
from clusterddp.ranks.variables import host_name
from clusterddp.request.spec import DEFAULT_TEMPLATE
from clusterddp.request.train_config import Interval
from clusterddp.run.attempt import Attempt, attempt_at, attempt_here
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import RUN_NAME
from clusterddp.training import replay, resumable, stop
from clusterddp.training.metrics import Lines
from clusterddp.training.paces import ExchangeWait, StepTimer
from clusterddp.training.replay import END, Fetches
from clusterddp.training.resumable import Resumable
from clusterddp.training.sources import Source, length_of, order_of, splits_batches
from clusterddp.training.stop import Deadline, LivenessWriter, poll_time_limit
from clusterddp.training.wrappers import ddp_wrappers, states_of

T = TypeVar("T")

DEFAULT_FOLDER = "jobs"
"""Default runs directory, relative to the current directory."""
_OTHER_LOOP_SECONDS = 60.0
_STRAGGLER_SECONDS = 60.0
_WATCHDOG_SECONDS = 300.0
"""Time without progress between a batch and its step before the hanging rank is reported."""
_CLOSE_SECONDS = 600.0
"""Time for which `close` waits for the shards of all ranks."""
_GROUP_SECONDS = 600.0
"""Timeout of NCCL's process groups, the shorter of torch's two; a hang is reported before it."""


class Loop(Resumable):
    """Training loop that saves checkpoints, stops on request and resumes.

    Create it on every rank, after the process group, the model and the optimizer: it restores them
    if there is a checkpoint.
    """

    _directories: ClassVar[set[Path]] = set()
    """Runs with an open loop in this process."""
    _resume_ranks = 0
    """World size of the checkpoint."""
    _resume_order: str | None = None
    """Order of the samples in the checkpoint; see `order_of`."""
    _liveness_writer: LivenessWriter | None = None
    _watchdog: Watchdog | None = None
    _lines: Lines | None = None
    _unlisten: Callable[..., None] | None = None
    _source: Source | None = None
    """Loader of this epoch."""
    _place: dict[str, Any] | None = None
    """Position of the loader in the checkpoint; see `Source.state`."""
    _drawn: replay.RandomStates | None = None
    """Random state before the latest batch that `ahead` drew."""
    _left: Iterator[Any] | None = None
    """Batches left of the epoch."""

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        save_every: str = "10m",
        keep_last: int = 3,
        snapshot_every: float | str = "10s",
        log_every: int = 0,
        random_states: bool = True,
        **states: Any,
    ) -> None:
        """Restore `states` from the newest valid checkpoint, if there is one; collective.

        states: objects to save, by their names in a checkpoint: anything with `state_dict` and
            `load_state_dict`. DDP's wrapper is not saved, so that the file loads anywhere. A
            sharded model (FSDP) and its optimizers are saved by torch.distributed.checkpoint.
        directory: where to write. Default: the current run, or jobs/SCRIPT outside of a run.
        save_every: `500steps`, `1epoch` or `10m`. The first checkpoint is saved at the first step
            after 40 s, whatever the interval.
        keep_last: number of checkpoints to keep.
        snapshot_every: interval of snapshots in the memory of the nodes, `30s`; 0: none.
        log_every: steps between two lines of metrics; 0 writes one line per second and prints one
            every ten seconds.
        random_states: save and restore the random generators of every rank, so that a resumed run
            draws the same numbers (dropout, shuffles, augmentation) as an uninterrupted one.

        Raises CheckpointError if no valid checkpoint is left, or it has other states; TrainingError
        if it cannot write, if another attempt or loop uses the directory, or if the ranks have no
        process group; TypeError for an unsuitable state, ValueError for an invalid interval.
        """
        self._check(states, save_every, snapshot_every, directory)
        self._objects = states_of(states)
        self._keep_last, self._keeps_random = keep_last, random_states
        self._peeked: list[Any] = []  # a batch, or END, that was read early
        self._sharded = sharded.select_sharded(self._objects)
        self._check_readable()
        self.rank, self.world_size = agreement.rank_and_world_size()
        self._unlisten = stop.requested.listen()
        try:
            attempt, source = self._begin(directory)
            wrappers = ddp_wrappers(states)
            position, arranged = self._resume(source, wrappers) if source else (Position(), {})
            super().__init__(
                *(attempt, self._objects, position),
                shards=self._sharded,
                save_every=save_every,
                snapshot_every=_seconds(snapshot_every) if self._in_run else 0,
                keep_last=keep_last,
                is_resumed=source is not None,
                request=stop.requested,
                deadline=self._deadline_of(attempt),
                straggler_window=_STRAGGLER_SECONDS,
                timer=StepTimer(ExchangeWait(agreement.device()), position.step),
            )
            self._arranged = arranged
            self._measure(wrappers)
            self._watch(log_every)
        except BaseException:
            self._stop_listening()
            raise

    def test(self, **metrics: Any) -> None:
        """Log rank 0's test metrics; reports show `accuracy` and `loss`.

        The time since the last step counts as evaluation, not as training.
        """
        self._timer.clock.drop()
        if self._lines:
            self._lines.write("eval", metrics)

    def close(self) -> None:
        """Wait for the current checkpoint write and stop the heartbeat; runs at exit as well."""
        with suppress(Exception):
            # Another rank may have been lost silently.
            ended = not self._shard_save or self._shard_save.wait(_CLOSE_SECONDS)
            if self._saver and ended:
                self._saver.wait()
            self._snapshots.close()
        has_stepped = self.steps > self._start_step or hasattr(sys, "last_type")
        if self.rank == 0 and self._unlisten and not has_stepped:
            log.warning(
                "Loop counted no step, so nothing was saved. Call loop.step() after each "
                "optimizer.step(). [CD0824]"
            )
        self._stop_listening()
        self._stop_watching()
        Loop._directories.discard(self.attempt.run.path)
        if self._liveness_writer:
            self._liveness_writer.__exit__()
            self._liveness_writer = None
            self.attempt.expire_liveness()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs below `count`, from 0; save at the end of the last.

        Take each epoch's batches from `batches`, or call `step` once per epoch: otherwise a resume
        could not tell how far the epoch was.
        """
        if self.epoch >= count:
            self._say_nothing_left(f"epoch {count}")
        yield from super().epochs(count)
        self.finish()

    def iterations(self, count: int) -> Iterator[int]:
        """Yield the remaining iterations below `count`, from 0, for a loop without epochs.

        Call `step` once in each, after all batches of a gradient accumulation. The last one saves.
        Raises RuntimeError for an iteration without a step.
        """
        self._restore_random()
        self._count_of_steps = count
        if self.steps >= count:
            self._say_nothing_left(f"step {count}")
            self.finish()
        while self.steps < count:
            before = self.steps
            yield before
            if self.steps != before + 1:
                raise RuntimeError(
                    f"loop.step() was called {self.steps - before} times in an iteration of "
                    "loop.iterations(). Call it once, after optimizer.step()"
                )

    def ahead(self, draw: Callable[..., T]) -> Callable[..., T]:
        """Return a function that draws batches before the step that precedes theirs has ended.

        After a resume its first call draws the last of these batches again.
        """

        def drawn(*given: Any, **named: Any) -> T:
            again = self._random.pop("drawn", None) if self._random else None
            if again:
                replay.restore(again, ())
            self._drawn = replay.random_state(())
            batch = draw(*given, **named)
            if again:
                self._restore_random()
            return batch

        return drawn

    def finish(self) -> None:
        """Save the final state and wait until it is on disk; collective. `epochs` calls it.

        Raises CheckpointError on all ranks if the write fails.
        """
        super().finish()
        self._stop_listening()
        if not self._in_run:  # a run is done when its command is
            with suppress(OSError):
                self._note_end("")

    def _measure(self, wrappers: Mapping[str, nn.parallel.DistributedDataParallel]) -> None:
        """Keep the wrappers' bucket layouts, and measure the waiting in their exchange."""
        self._wrappers, modules = wrappers, [*wrappers.values()]
        self._timer.measure(modules, self.world_size, lambda: self._mark(Phase.BACKWARD))

    def _say_nothing_left(self, last: str) -> None:
        if self.rank == 0:
            restart = "" if self._in_run else f". To start again, remove {self.attempt.run.path}"
            log.info(f"nothing left to train: {last} is done{restart}")

    def _stop_watching(self) -> None:
        """Leave the watchdog; the other ranks report a rank that disappears without this."""
        if self._watchdog:
            self._watchdog.__exit__()
            self._watchdog = None

    def _planned(self) -> int | None:
        """Return the loop's last step, or None unless each batch is one step."""
        if self._count_of_steps:
            return self._count_of_steps
        epoch, batch, batches = self.epoch, self._position.step_in_epoch, self._batches
        is_a_step_each = epoch * batches + batch - self.steps in (0, 1)
        return self._epochs * batches if self._epochs and batches > 0 and is_a_step_each else None

    def _stop_listening(self) -> None:
        """Restore the signals' default actions, except that of a late USR1 from Slurm."""
        if self._unlisten:
            with suppress(ValueError):  # not the thread that created the loop
                self._unlisten(signal.SIGUSR1, signal.SIGUSR2)
            self._unlisten = None

    # -- start -------------------------------------------------------------------------------

    def _check(
        self, states: Mapping[str, Any], save_every: str, snapshot_every: object, directory: object
    ) -> None:
        if not states:
            raise TypeError("Loop() has nothing to save. Pass model=model, optimizer=optimizer")
        for name, each in states.items():
            if name in _RESERVED:
                raise TypeError(f"Loop({name}=…): this name is reserved. Choose another")
            has_state = hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
            if not (has_state or sharded.has_files(each)):
                raise TypeError(
                    f"Loop({name}=…): a {type(each).__name__} has no state_dict and load_state_dict"
                )
        try:
            Interval.parse(save_every)
        except ValueError:
            raise ValueError(
                f"save_every={save_every!r} is not an interval. Use '500steps', '1epoch' or '10m'"
            ) from None
        if not 0 <= _seconds(snapshot_every) < math.inf:
            raise ValueError(
                f"snapshot_every={snapshot_every!r} is not an interval. Use '30s', or 0 for no "
                "snapshots"
            )
        if directory is None and not agreement.has_group() and _tasks() > 1:
            raise TrainingError(
                f"the environment names {_tasks()} tasks, but there is no process group. Call "
                "torch.distributed.init_process_group() before Loop(), request as many ranks from "
                "the framework (Lightning: devices and num_nodes), or pass each task a different "
                "Loop(directory=…). [CD0816]"
            )

    def _begin(self, directory: str | os.PathLike[str] | None) -> tuple[Attempt, Path | None]:
        """Choose on rank 0 the attempt and the checkpoint to resume; return both on all ranks."""
        own = attempt_here(os.environ) if directory is None else None
        self._in_run = own is not None
        self._hosts = agreement.gather(host_name(os.environ))
        hosts = list(dict.fromkeys(self._hosts))
        settled: tuple[str, str, type[ClusterDDPError] | None] = ("", "", None)
        if self.rank == 0:
            try:
                run = own.run if own else _run_of(directory)
                self._refuse_second_loop(run, own)
                if not own:
                    run.make(run.attempts)
                    with suppress(RequestError):  # a path or argument that no script can hold
                        command = (sys.executable, *sys.argv)
                        resumable.record_request(run, self.world_size, hosts, command=command)
                job_id = os.environ.get("SLURM_JOB_ID", "")
                number = own.number if own else None
                attempt = resumable.take_attempt(run, number, job_id, _OTHER_LOOP_SECONDS)
                settled = str(attempt.path), str(self._publish_attempt(attempt, hosts) or ""), None
            except CheckpointError as error:
                settled = coded(error), "", CheckpointError
            except ClusterDDPError as error:
                settled = coded(error), "", TrainingError
            except OSError as error:
                cause = f"rank 0 on {hosts[0]} cannot create an attempt: {error} [CD0504]"
                settled = cause, "", TrainingError
        path, source_path, failure = agreement.gather(settled)[0]
        if failure:
            raise failure(path)
        return attempt_at(Path(path)), Path(source_path) if source_path else None

    def _resume(
        self, source: Path, wrappers: Mapping[str, nn.parallel.DistributedDataParallel]
    ) -> tuple[Position, dict[str, list[int]]]:
        """Restore a checkpoint on all ranks; return its position and its wrappers' buckets."""
        content = state.load_together(source)
        whole = {name: each for name, each in self._objects.items() if name not in self._sharded}
        self._on_all_ranks(source, lambda: state.restore(source, whole, content))
        if self._sharded:
            self._on_all_ranks(source, lambda: sharded.check(source, self._sharded))
            self._on_all_ranks(source, lambda: sharded.restore(source, self._sharded))
        ranks, loop, position = content["world_size"], content["loop"], Position.of(content)
        if loop["is_whole"]:
            position.next_epoch()
        self._resume_batch, self._resume_ranks = position.step_in_epoch, ranks
        self._resume_order = loop.get("order")
        arranged: dict[str, list[int]] = {}
        is_same = ranks == self.world_size
        saved = replay.unpack(content["random_states"], self.rank if is_same else 0) or {}
        self._place = saved.get("loader")
        if not is_same and self._place:
            self._place = {name: each for name, each in self._place.items() if name != "own"}
        if is_same:
            self._random = saved if self._keeps_random and "now" in saved else None
            arranged = loop["buckets"]
            for name in sorted(wrappers.keys() & arranged.keys()):
                replay.restore_buckets(wrappers[name], arranged[name])
        self._restore_random()
        if self.rank == 0:
            inside = self._resume_batch or not position.epoch
            where = f"epoch {position.epoch + 1}" if inside else f"after epoch {position.epoch}"
            log.info(f"resuming from step {position.step}, {where}: {source.name}")
        return position, arranged

    def _deadline_of(self, attempt: Attempt) -> Deadline:
        """Return the deadline of the job; only rank 0 knows the signal's lead."""
        spec = attempt.run.read_spec() if self._in_run and self.rank == 0 else None
        return Deadline(spec.signal_lead if spec else 0)

    def _refuse_second_loop(self, run: RunDir, own: Attempt | None) -> None:
        """Raise TrainingError if another loop writes to the run as well."""
        each = "pass each a different Loop(directory=…)."
        if run.path in Loop._directories:
            raise TrainingError(
                f"this process already has a Loop in {run.path}. close() it, or {each} [CD0816]"
            )
        spec = run.read_spec() if own else None
        if spec is None:
            return
        # The torchrun template starts one agent per node; a custom template may as well.
        tasks = spec.world_size if spec.template == DEFAULT_TEMPLATE else spec.resources.nodes
        joined = self.world_size
        if "TORCHELASTIC_RUN_ID" in os.environ:
            joined = int(os.environ.get("GROUP_WORLD_SIZE", joined))
        if joined < tasks:
            raise TrainingError(
                f"the run {run.name} has {tasks} tasks, but this process group has {joined} of "
                f"them. If the others train too, {each} [CD0816]"
            )

    def _on_all_ranks(self, source: Path, act: Callable[[], object]) -> None:
        """Call a part of the resume; collective.

        Raises CheckpointError on all ranks if it fails on one: no rank enters the next collective
        without the others.
        """
        problem = ""
        try:
            act()
        except (CheckpointError, OSError) as error:
            code = getattr(error, "code", "CD0505")
            problem = f"rank {self.rank} on {host_name(os.environ)}: {coded(error, code)}"
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"the checkpoint {source} does not fit this loop's states: {error}"
        if problem := next(filter(None, agreement.gather(problem)), ""):
            raise CheckpointError(problem, code="CD0703")

    def _watch(self, log_every: int) -> None:
        """Start, on rank 0, the heartbeat; and the watchdog."""
        self._first_step = time.time()
        if self.rank == 0:
            Loop._directories.add(self.attempt.run.path)
            self._liveness_writer = LivenessWriter(self.attempt, stop.requested)
            self._liveness_writer.sign = self._sign_of_life
            self._liveness_writer.__enter__()
            poll_time_limit(self._deadline, os.environ)
            path, position = self.attempt.metrics, self._position
            self._lines = Lines(path, log_every, position, self._shown_epoch, self._timer)
        self._start_watchdog()
        atexit.register(self.close)
        self._timer.clock.restart()

    def _start_watchdog(self) -> None:
        self._progress.mark(self.steps, Phase.USER_CODE)
        where: tuple[str, int] | None = ("127.0.0.1", 0)
        if self.world_size > 1:
            where = heartbeat.address_of_group()
        spec = self.attempt.run.read_spec() if self._in_run else None
        given = spec.hang_timeout if spec and not spec.has_default("hang_timeout") else None
        seconds = _WATCHDOG_SECONDS if given is None else given
        if where and seconds:  # without an address no rank learns which one the others wait for
            env = dist_env.of_hosts(self.rank, self._hosts, *where)
            note = noting(self.attempt.outcomes) if self._in_run else lambda _: None
            self._watchdog = Watchdog.of_ranks(
                env,
                self._progress,
                silent_seconds=seconds,
                group_seconds=_GROUP_SECONDS,
                host=self._hosts[self.rank],
                note=note,
                has_own_code=True,
            ).__enter__()

    def _publish_attempt(self, attempt: Attempt, hosts: list[str]) -> Path | None:
        """Choose on rank 0 the checkpoint to resume from and publish the attempt."""
        source, is_own = resumable.source_of(attempt)
        step = 0
        if source:
            content = state.load(source, shards=False)
            self._check_fits(source, content)
            step, script = content["step"], content["loop"]["script"]
            if is_own and script != _script():
                raise CheckpointError(
                    f"the checkpoint {source} was saved by {script}, but this script is "
                    f"{_script()}. Pass each script a different Loop(directory=…). [CD0703]"
                )
        return resumable.publish(
            attempt,
            source,
            step,
            keep_last=self._keep_last,
            world_size=self.world_size,
            hosts=hosts,
            environ=os.environ,
        )

    def _check_fits(self, path: Path, content: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a checkpoint of a different loop or sharding."""
        loop = content.get("loop")
        if not isinstance(loop, dict):
            raise CheckpointError(f"the checkpoint {path} was not saved by a Loop. [CD0704]")
        before, now = loop["names"], sorted(self._objects)
        if before != now:
            raise CheckpointError(
                f"the checkpoint {path} holds {', '.join(before)}, but this loop was given "
                f"{', '.join(now)}. Pass the same names, or another Loop(directory=…). [CD0703]"
            )
        if bool(loop["sharded"]) != bool(self._sharded):
            is_now = "is" if self._sharded else "is not"
            raise CheckpointError(
                f"the checkpoint {path} {'is' if loop['sharded'] else 'is not'} sharded, but this "
                f"model {is_now}. Wrap the model before Loop() in the same way. [CD0709]"
            )

    # -- steps -------------------------------------------------------------------------------

    def _rest_of(self, loader: Iterable[T]) -> Iterator[T]:
        """Skip the trained batches and restore the random state at that position."""
        source = Source(loader)
        fetches, skips = self._begin_reading(source)
        self._peeked.clear()
        lengths = set(agreement.gather(length_of(loader)))  # ranks must agree on the last batch
        self._batches = lengths.pop() if len(lengths) == 1 else -1
        return self._counted(source.iterate(fetches, skips=skips), fetches)

    def _begin_reading(
        self, source: Source, on_fetch: Callable[[], None] = lambda: None
    ) -> tuple[Fetches, bool]:
        """Begin to read an epoch; also return whether the trained batches are left to skip."""
        done, self._resume_batch = self._done_of(source.loader), 0
        skips = source.load(self._place, is_inside=bool(done))
        replay.shield_workers(source.base)
        self._source, self._fetches = source, Fetches(self._random, done, on_fetch)
        self._place, self._position.step_in_epoch = None, done
        return self._fetches, skips

    def _counted(self, batches: Iterator[T], fetches: Fetches) -> Iterator[T]:
        self._left = batches
        while True:
            batch = self._peeked.pop() if self._peeked else next(batches, END)
            if batch is END:
                self._left = None
                return
            self._count(fetches.trained())
            yield cast(T, batch)

    def _is_last_batch(self) -> bool:
        if self._batches >= 0 or not (self._left and self._source and self._fetches):
            return super()._is_last_batch()
        is_last = self._source.is_at_end
        if is_last is None:  # of unknown length: reads the next batch early
            if not self._peeked:
                self._place = self._source.state(is_inside=True)
                self._fetches.is_early = True
                self._peeked.append(next(self._left, END))
                self._fetches.is_early = False
            is_last = self._peeked[0] is END
        return all(agreement.gather(is_last))

    def _random_state(self) -> dict[str, Any] | None:
        is_inside = self._position.step_in_epoch > 0
        place = self._place
        if self._source and not (is_inside and self._peeked):
            place = self._source.state(is_inside=is_inside)
        more = {"loader": place} if place else {}
        if self._drawn and self._keeps_random:
            more["drawn"] = self._drawn
        return {**(super()._random_state() or {}), **more} or None

    def _stepped(self, metrics: Mapping[str, Any]) -> bool:
        if self._unlisten is None:  # training continues after finish()
            self._unlisten = stop.requested.listen()
        if self._lines:
            self._lines.step(metrics)
        return False

    def _flush(self) -> None:
        if self._lines:
            self._lines.flush()

    def _ended(self) -> None:
        super()._ended()
        self._stop_watching()

    def _done_of(self, loader: object) -> int:
        """Return the number of trained batches of the epoch, counted at this world size.

        At another world size it is rounded down: some samples are repeated, none is skipped.
        """
        batches, ranks = self._resume_batch, self._resume_ranks
        if not batches or ranks == self.world_size:
            return batches
        is_sharded = any(map(sharded.is_sharded, self._sharded.values()))
        order = order_of(loader, self.world_size)
        if not (is_sharded or (order and self._resume_order in (order, None))):
            raise CheckpointError(
                f"the checkpoint of step {self.steps} has {ranks} ranks, but this world has "
                f"{self.world_size}. Only a loader with torch's DistributedSampler, or one of "
                "Accelerate with use_seedable_sampler=True, can continue an epoch at another "
                f"number of ranks. Use one, or start {ranks} ranks. [CD0709]"
            )
        seen, size = self._position.samples, getattr(loader, "batch_size", None)
        if seen and size:
            done: int = seen // (size * self.world_size)
            self._position.samples = done * size * self.world_size
        else:
            done = batches if splits_batches(loader) else batches * ranks // self.world_size
        if self.rank == 0:
            log.info(
                f"the checkpoint has {ranks} ranks, this world {self.world_size}: random numbers "
                f"will differ, and the epoch continues after {done} of this world's batches"
            )
        return done

    def _shown_epoch(self) -> int:
        """Return the epoch to show with metrics, from 1."""
        return self.epoch + 1 if self._in_epoch else max(self.epoch, 1)

    def _save(self) -> None:
        self._check_readable()
        super()._save()

    def _entries(self) -> dict[str, object]:
        """Return the entries of a checkpoint besides the states and the position."""
        is_whole = self._in_epoch and not self._has_batches and self._position.step_in_epoch == 1
        known = {
            "script": _script(),
            "names": sorted(self._objects),
            "sharded": sorted(self._sharded),
            "buckets": self._arranged,
            "is_whole": is_whole,
        }
        if self._source:
            known["order"] = order_of(self._source.loader, self.world_size)
        return {"loop": known}

    def _check_readable(self) -> None:
        """Raise TypeError for a state that torch.load refuses with weights_only=True."""
        for name, each in self._objects.items():
            odd = "" if name in self._sharded else why_unreadable(each.state_dict())
            if odd:
                raise TypeError(
                    f"Loop({name}=…): torch.load with weights_only=True refuses its state_dict: "
                    f"{odd}. Keep only tensors, numbers, strings and containers in it."
                )


_RESERVED = frozenset(
    {
        *("format", "step", "epoch", "step_in_epoch", "samples", "seconds", "images", "best"),
        *("world_size", "versions", "loop", "config", "random_states"),
    }
)


def _seconds(interval: object) -> float:
    """Return the seconds of an interval such as `30s` or 30; NaN for anything else."""
    number = seconds(interval) if isinstance(interval, str) else interval
    return number if isinstance(number, int | float) and number is not True else math.nan


def _script() -> str:
    return Path(sys.argv[0] if sys.argv else "").name


def _run_of(directory: str | os.PathLike[str] | None) -> RunDir:
    """Return the directory of a loop outside of a run."""
    script = Path(_script()).stem
    name = script if re.fullmatch(RUN_NAME, script) else "loop"
    return RunDir(Path(directory or Path(DEFAULT_FOLDER, name)).absolute())


def _tasks() -> int:
    """Return the number of tasks according to the environment."""
    value = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", ""))
    return int(value) if value.isdigit() else 1
