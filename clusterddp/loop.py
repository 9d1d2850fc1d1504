"""Makes a training loop of one's own resumable: `from clusterddp.loop import Loop`.

It depends on torch alone, under any launcher and without one. In a run it writes into the run's
attempt, so that every command knows its steps, metrics and checkpoints; elsewhere into a folder.

    loop = Loop(model=model, optimizer=optimizer)
    for epoch in loop.epochs(10):
        for images, labels in loop.batches(loader):
            ...
            loop.step(loss=loss)
"""

import atexit
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import nn

from clusterddp import log
from clusterddp.checkpoints import sharded, state
from clusterddp.checkpoints.state import Content, Position, why_unreadable
from clusterddp.distributed import agreement, heartbeat
from clusterddp.distributed.heartbeat import Phase
from clusterddp.distributed.watchdog import Watchdog, noting
from clusterddp.errors import (
    CheckpointError,
    ClusterDDPError,
    RequestError,
    TrainingError,
    coded,
)
from clusterddp.ranks import dist_env
from clusterddp.ranks.variables import host_name
from clusterddp.request.spec import DEFAULT_TEMPLATE
from clusterddp.request.train_config import Interval
from clusterddp.run.attempt import Attempt, attempt_at, attempt_here
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import RUN_NAME
from clusterddp.training import replay, resumable, stop
from clusterddp.training.metrics import Lines
from clusterddp.training.paces import Pace
from clusterddp.training.resumable import Resumable
from clusterddp.training.stop import Deadline, Presence, poll_time_limit

T = TypeVar("T")

DEFAULT_FOLDER = "jobs"
"""Folder of the runs that nobody submitted, as of those that were."""
_PATIENCE_SECONDS = 60.0
_STRAGGLER_SECONDS = 60.0
_WATCHDOG_SECONDS = 300.0
"""Without progress between a batch and its step until the rank that hangs is named."""
_GROUP_SECONDS = 600.0
"""Time-out of NCCL's process groups, the shorter of torch's two; the verdict comes before it."""


class Loop(Resumable):
    """Training loop that saves, stops when it is asked to, and resumes where it was.

    Make it on every rank, after the process group, the model and the optimizer: it restores them
    where there is a checkpoint.
    """

    _folders: ClassVar[set[Path]] = set()
    """Runs into which this process has a loop that is not closed."""
    _resume_ranks = 0
    """Ranks of the checkpoint."""
    _presence: Presence | None = None
    _watchdog: Watchdog | None = None
    _lines: Lines | None = None
    _unlisten: Callable[..., None] | None = None

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        save_every: str = "10m",
        keep_last: int = 3,
        log_every: int = 0,
        random_states: bool = True,
        **states: Any,
    ) -> None:
        """Restore `states` from the newest valid checkpoint, if there is one; collective.

        states: what is saved, by the names it gets in a checkpoint: anything with `state_dict` and
            `load_state_dict`. DDP's wrapper is left out, so that the file loads anywhere. Where the
            model is sharded (FSDP), it and its optimizers are saved by
            torch.distributed.checkpoint.
        folder: where to write; by default the run that this process is in, elsewhere jobs/SCRIPT.
        save_every: `500steps`, `1epoch` or `10m`; once in the first minute in any case.
        keep_last: checkpoints that are kept.
        log_every: steps between two lines of metrics; 0 is a line a second, of which one in ten
            seconds is printed.
        random_states: save and restore the random generators of every rank, so that what is drawn
            (dropout, shuffles, augmentation) is as without the interruption.

        Raises CheckpointError where it cannot resume: no valid checkpoint is left, or it is of
        other states; TrainingError where it cannot write, another attempt or loop is at work there,
        or the ranks have no process group.
        """
        self._check(states, save_every, folder)
        self._objects = {name: _bare(each) for name, each in states.items()}
        self._keep_last, self._keeps_random = keep_last, random_states
        self._sharded = sharded.part(self._objects)
        self._check_readable()
        self.rank, self.world_size = agreement.world()
        self._unlisten = stop.requested.listen()
        try:
            attempt, source = self._begin(folder)
            wrappers = {name: ddp for name, each in states.items() if (ddp := _wrapper(each))}
            position, arranged = self._resume(source, wrappers) if source else (Position(), {})
            modules, ready = [*wrappers.values()], lambda: self._mark(Phase.BACKWARD)
            super().__init__(
                attempt,
                self._objects,
                position,
                shards=self._sharded,
                wrappers=wrappers,
                arranged=arranged,
                save_every=save_every,
                keep_last=keep_last,
                is_resumed=source is not None,
                request=stop.requested,
                deadline=self._deadline_of(attempt),
                straggler_window=_STRAGGLER_SECONDS,
                pace=Pace.of(modules, self.world_size, position.step, ready),
            )
        except BaseException:
            self._stop_listening()
            raise
        self._watch(log_every)

    def test(self, **metrics: Any) -> None:
        """Log `accuracy` and `loss` on the test set, of rank 0; the reports know them."""
        if self._lines:
            self._lines.write("eval", metrics)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the sign of life.

        The end of the process does so by itself.
        """
        with suppress(Exception):
            if self._saver:
                self._saver.wait()
        self._stop_listening()
        self._stop_watching()
        Loop._folders.discard(self.attempt.run.path)
        if self._presence:
            self._presence.__exit__()
            self._presence = None
            self.attempt.expire_liveness()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of so many, from 0; saves at the end of the last.

        An epoch takes its batches from `batches`, or is a single step: where it was cannot be told
        otherwise.
        """
        if self.epoch >= count and self.rank == 0:
            folder = "" if self._in_run else f"; remove {self.attempt.run.path} to begin anew"
            log.info(f"nothing is left to train: epoch {count} is done{folder}")
        yield from super().epochs(count)
        self.finish()

    def finish(self) -> None:
        """Save what the loop has come to, and wait until it is on the disk; collective.

        `epochs` does so by itself. Raises CheckpointError, on all ranks, where it could not be
        written.
        """
        super().finish()
        self._stop_listening()
        if not self._in_run:  # a run is done when its command is
            with suppress(OSError):
                self._note_end("")

    def _stop_watching(self) -> None:
        """Leave the others' watchdogs; they miss a rank that is not done."""
        if self._watchdog:
            self._watchdog.__exit__()
            self._watchdog = None

    def _planned(self) -> int | None:
        """Return the step at which the loop will be done, where each batch is one step."""
        epoch, batch, batches = self.epoch, self._position.step_in_epoch, self._batches
        is_a_step_each = epoch * batches + batch - self.steps in (0, 1)
        return self._epochs * batches if self._epochs and batches > 0 and is_a_step_each else None

    def _stop_listening(self) -> None:
        """Give signals their usual effect again; a late USR1 of Slurm's would end the process."""
        if self._unlisten:
            with suppress(ValueError):  # another thread than that of the beginning
                self._unlisten(signal.SIGUSR1, signal.SIGUSR2)
            self._unlisten = None

    # -- beginning ---------------------------------------------------------------------------

    def _check(self, states: Mapping[str, Any], save_every: str, folder: object) -> None:
        if not states:
            raise TypeError("Loop() needs what it is to save, such as model=model")
        for name, each in states.items():
            if name in _RESERVED:
                raise TypeError(f"Loop({name}=…): a checkpoint has that name already; take another")
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise TypeError(
                    f"Loop({name}=…): a {type(each).__name__} has no state_dict and load_state_dict"
                )
        try:
            Interval.parse(save_every)
        except ValueError:
            raise ValueError(
                f"save_every={save_every!r} is not an interval. Use '500steps', '1epoch' or '10m'."
            ) from None
        if folder is None and not agreement.has_group() and _tasks() > 1:
            raise TrainingError(
                f"this is one of {_tasks()} tasks by its environment, and there is no process "
                "group: call torch.distributed.init_process_group() before Loop(), or give each "
                "a folder of its own, Loop(folder=…). [CD0816]"
            )

    def _begin(self, folder: str | os.PathLike[str] | None) -> tuple[Attempt, Path | None]:
        """Settle on rank 0 where to write and where to resume, and restore that on all ranks."""
        own = attempt_here(os.environ) if folder is None else None
        self._in_run = own is not None
        self._hosts = agreement.gather(host_name(os.environ))
        hosts = list(dict.fromkeys(self._hosts))
        settled: tuple[str, str, type[ClusterDDPError] | None] = ("", "", None)
        if self.rank == 0:
            try:
                run = own.run if own else _run_of(folder)
                self._check_alone(run, own)
                if not own:
                    run.make(run.attempts)
                    with suppress(RequestError):  # a path or argument that no script could carry
                        command = (sys.executable, *sys.argv)
                        resumable.record_request(run, self.world_size, hosts, command=command)
                job_id = os.environ.get("SLURM_JOB_ID", "")
                number = own.number if own else None
                attempt = resumable.take_attempt(run, number, job_id, _PATIENCE_SECONDS)
                source = self._settle(attempt, hosts)
                settled = str(attempt.path), str(source or ""), None
            except CheckpointError as error:
                settled = coded(error), "", CheckpointError
            except ClusterDDPError as error:
                settled = coded(error), "", TrainingError
            except OSError as error:
                cause = f"rank 0 on {hosts[0]} cannot begin an attempt: {error} [CD0504]"
                settled = cause, "", TrainingError
        path, source_path, failure = agreement.gather(settled)[0]
        if failure:
            raise failure(path)
        return attempt_at(Path(path)), Path(source_path) if source_path else None

    def _resume(
        self, source: Path, wrappers: Mapping[str, nn.parallel.DistributedDataParallel]
    ) -> tuple[Position, dict[str, list[int]]]:
        """Restore a checkpoint on all ranks; returns its place, and the buckets of its wrappers."""
        content = state.load_together(source)
        self._on_all_ranks(source, lambda: self._restore(source, content))
        if self._sharded:
            self._on_all_ranks(source, lambda: sharded.check(source, self._sharded))
            self._on_all_ranks(source, lambda: sharded.restore(source, self._sharded))
        ranks, loop, position = content["world_size"], content["loop"], Position.of(content)
        if loop["is_whole"]:
            position.next_epoch()
        self._resume_batch, self._resume_ranks = position.step_in_epoch, ranks
        arranged: dict[str, list[int]] = {}
        if ranks == self.world_size:
            self._random = content["random_states"][self.rank] if self._keeps_random else None
            arranged = loop["buckets"]
            for name in sorted(wrappers.keys() & arranged.keys()):
                replay.arrange(wrappers[name], arranged[name])
        self._restore_random()
        if self.rank == 0:
            inside = self._resume_batch or not position.epoch
            where = f"epoch {position.epoch + 1}" if inside else f"after epoch {position.epoch}"
            log.info(f"resumes from step {position.step}, {where}: {source.name}")
        return position, arranged

    def _deadline_of(self, attempt: Attempt) -> Deadline:
        """Give the end of the job's time, which rank 0 learns."""
        spec = attempt.run.read_spec() if self._in_run and self.rank == 0 else None
        return Deadline(spec.signal_lead if spec else 0)

    def _check_alone(self, run: RunDir, own: Attempt | None) -> None:
        """Raise TrainingError where another loop writes into the run as well."""
        each = "give each a folder of its own, Loop(folder=…)."
        if run.path in Loop._folders:
            raise TrainingError(
                f"this process has a Loop in {run.path} already: close() that one, or "
                f"{each} [CD0816]"
            )
        spec = run.read_spec() if own else None
        if spec is None:
            return
        # The template for torchrun starts an agent a node; so may one of a person's own.
        is_usual = spec.template == DEFAULT_TEMPLATE
        tasks = spec.world_size if is_usual else spec.resources.nodes
        joined = self.world_size
        if "TORCHELASTIC_RUN_ID" in os.environ:
            joined = int(os.environ.get("GROUP_WORLD_SIZE", joined))
        if joined < tasks:
            raise TrainingError(
                f"the run {run.name} has {tasks} tasks, and this process group is of {joined} of "
                f"them: if the others train too, {each} [CD0816]"
            )

    def _on_all_ranks(self, source: Path, act: Callable[[], T]) -> T:
        """Return what a part of the resume returns; collective.

        Raises CheckpointError on all ranks where it fails on one: none goes on into the next
        collective alone.
        """
        results, problem = [], ""
        try:
            results.append(act())
        except (CheckpointError, OSError) as error:
            code = getattr(error, "code", "CD0505")
            problem = f"rank {self.rank} on {host_name(os.environ)}: {coded(error, code)}"
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"the checkpoint {source} does not fit what this loop was given: {error}"
        if problem := next(filter(None, agreement.gather(problem)), ""):
            raise CheckpointError(problem, code="CD0703")
        return results[0]

    def _watch(self, log_every: int) -> None:
        """Begin what goes on beside the training: the watchdog; on rank 0 the sign of life too."""
        self._first_step = time.time()
        if self.rank == 0:
            Loop._folders.add(self.attempt.run.path)
            self._presence = Presence(self.attempt, stop.requested)
            self._presence.sign = self._sign_of_life
            self._presence.__enter__()
            poll_time_limit(self._deadline, os.environ)
            path, position = self.attempt.metrics, self._position
            self._lines = Lines(path, log_every, position, self._shown_epoch, self._pace)
        self._progress.mark(self.steps, Phase.OWN)
        where: tuple[str, int] | None = ("127.0.0.1", 0)
        if self.world_size > 1:
            where = heartbeat.address_of_group()
        if where:  # else nobody could tell which rank the others wait for
            env = dist_env.of_hosts(self.rank, self._hosts, *where)
            note = noting(self.attempt.outcomes) if self._in_run else lambda _: None
            self._watchdog = Watchdog.of_ranks(
                env,
                self._progress,
                silent_seconds=_WATCHDOG_SECONDS,
                group_seconds=_GROUP_SECONDS,
                host=self._hosts[self.rank],
                note=note,
                has_own_code=True,
            ).__enter__()
        atexit.register(self.close)
        self._pace.clock.restart()

    def _settle(self, attempt: Attempt, hosts: list[str]) -> Path | None:
        """Choose on rank 0 the checkpoint to resume from, and publish the attempt."""
        source, is_own = resumable.source_of(attempt)
        step = 0
        if source:
            content = state.load(source, shards=False)
            self._check_fits(source, content)
            step, script = content["step"], content["loop"]["script"]
            if is_own and script != _script():
                raise CheckpointError(
                    f"the checkpoint {source} was saved by {script}, and this is {_script()}: give "
                    "each a folder of its own, Loop(folder=…). [CD0703]"
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
        """Raise CheckpointError for a checkpoint of another loop, or of a world that cannot be."""
        loop = content.get("loop")
        if not isinstance(loop, dict):
            raise CheckpointError(f"the checkpoint {path} was not saved by a Loop. [CD0704]")
        before, now = loop["names"], sorted(self._objects)
        if before != now:
            raise CheckpointError(
                f"the checkpoint {path} holds {', '.join(before)}, and this loop was given "
                f"{', '.join(now)}. Give it the same, or begin anew in another folder. [CD0703]"
            )
        if bool(loop["sharded"]) != bool(self._sharded):
            is_now = "is" if self._sharded else "is not"
            raise CheckpointError(
                f"the checkpoint {path} {'is' if loop['sharded'] else 'is not'} sharded, and this "
                f"model {is_now}: wrap it before Loop() as it was. [CD0709]"
            )

    def _restore(self, source: Path, content: Content) -> None:
        """Restore all but what is sharded."""
        whole = {name: each for name, each in self._objects.items() if name not in self._sharded}
        state.restore(source, whole, content)

    # -- going on ----------------------------------------------------------------------------

    def _rest_of(self, loader: Iterable[T]) -> Iterator[T]:
        """Begin behind the batches that are done, with the random numbers of then."""
        done, self._resume_batch = self._done_of(loader), 0
        self._generators = replay.generators_of(loader)
        if done and self._random:
            replay.restore(self._random[1], self._generators)
            self._start_random = self._random[1]
        else:
            if self._random:
                replay.restore_own(self._random[0], self._generators)
            self._start_random = replay.random_state(self._generators)
        if getattr(loader, "num_workers", 0):
            replay.shield_workers(loader)
        iterator = replay.beyond(loader, done)
        if done:
            self._restore_random()
        lengths = set(agreement.gather(_length(loader)))  # the last batch is that of all ranks
        self._batches = lengths.pop() if len(lengths) == 1 else -1
        self._position.step_in_epoch = done
        return self._counted(iterator)

    def _counted(self, batches: Iterator[T]) -> Iterator[T]:
        for batch in batches:
            self._count(replay.count_samples(batch))
            yield batch

    def _stepped(self, metrics: Mapping[str, Any]) -> bool:
        if self._unlisten is None:  # it was finished, and goes on
            self._unlisten = stop.requested.listen()
        if self._lines:
            self._lines.step(metrics)
        return False

    def _flush(self) -> None:
        if self._lines:
            self._lines.flush()

    def _over(self) -> None:
        super()._over()
        self._stop_watching()

    def _done_of(self, loader: object) -> int:
        """Return how many of the epoch's batches are trained, counted as this world deals them.

        At another number of ranks rounded down: some samples are trained twice, and none left out.
        """
        batches, ranks = self._resume_batch, self._resume_ranks
        if not batches or ranks == self.world_size:
            return batches
        if not (self._sharded or replay.is_dealt_out(loader, self.world_size)):
            raise CheckpointError(
                f"the checkpoint of step {self.steps} is of {ranks} ranks, and this world has "
                f"{self.world_size}: within an epoch a loader goes on at another number of ranks "
                "where torch's DistributedSampler deals its samples out. Give it one, or start "
                f"{ranks} ranks again. [CD0709]"
            )
        seen, size = self._position.samples, getattr(loader, "batch_size", None)
        if seen and size:
            done: int = seen // (size * self.world_size)
            self._position.samples = done * size * self.world_size
        else:
            done = batches * ranks // self.world_size
        if self.rank == 0:
            log.info(
                f"the checkpoint is of {ranks} ranks: what is drawn at random will be another, and "
                f"the epoch continues after {done} of this world's batches"
            )
        return done

    def _shown_epoch(self) -> int:
        """Return the epoch that metrics are of, from 1."""
        return self.epoch + 1 if self._in_epoch else max(self.epoch, 1)

    def _kept(self) -> dict[str, object]:
        """Return what a checkpoint keeps beside the states and the position."""
        self._check_readable()
        is_whole = self._in_epoch and not self._has_batches and self._position.step_in_epoch == 1
        known = {
            "script": _script(),
            "names": sorted(self._objects),
            "sharded": sorted(self._sharded),
            "buckets": self._arranged,
            "is_whole": is_whole,
        }
        return {"loop": known}

    def _check_readable(self) -> None:
        """Raise TypeError for a state of which torch.load would not take what it holds."""
        for name, each in self._objects.items():
            odd = "" if name in self._sharded else why_unreadable(each.state_dict())
            if odd:
                raise TypeError(
                    f"Loop({name}=…): its state_dict holds what torch.load does not take with "
                    f"weights_only=True: {odd}. Keep tensors, numbers, texts and containers in it."
                )


_RESERVED = frozenset(
    {
        *("format", "step", "epoch", "step_in_epoch", "samples", "seconds", "images", "best"),
        *("world_size", "versions", "loop", "config", "random_states"),
    }
)


def _bare(each: Any) -> Any:
    """Return a module without the wrappers of DDP and torch.compile."""
    while isinstance(each, nn.Module):
        inner = getattr(each, "_orig_mod", None)
        if isinstance(each, nn.parallel.DistributedDataParallel):
            inner = each.module
        if not isinstance(inner, nn.Module):
            break
        each = inner
    return each


def _wrapper(each: Any) -> nn.parallel.DistributedDataParallel | None:
    """Return DDP's wrapper among those of a module, of which torch.compile's can be another."""
    inner = getattr(each, "_orig_mod", each)
    return inner if isinstance(inner, nn.parallel.DistributedDataParallel) else None


def _script() -> str:
    return Path(sys.argv[0] if sys.argv else "").name


def _run_of(folder: str | os.PathLike[str] | None) -> RunDir:
    """Return the folder of a loop outside of a run."""
    script = Path(_script()).stem
    name = script if re.fullmatch(RUN_NAME, script) else "loop"
    return RunDir(Path(folder or Path(DEFAULT_FOLDER, name)).absolute())


def _tasks() -> int:
    """Return the number of tasks of which this is one, as its environment tells."""
    value = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", ""))
    return int(value) if value.isdigit() else 1


def _length(loader: object) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return -1
