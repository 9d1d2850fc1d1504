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
import dataclasses
import io
import json
import math
import os
import pickle
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from clusterddp import files, log
from clusterddp.checkpoints import catalog, sharded
from clusterddp.checkpoints.tensors import copied, why_unreadable
from clusterddp.checkpoints.writer import Costs, Saver
from clusterddp.distributed import exchange
from clusterddp.distributed.agreement import Poll
from clusterddp.errors import (
    EXIT_INTERRUPTED,
    EXIT_PAUSED,
    CheckpointError,
    ClusterDDPError,
    RequestError,
    TrainingError,
    coded,
)
from clusterddp.request.resources import Resources
from clusterddp.request.spec import DEFAULT_TEMPLATE, JobSpec
from clusterddp.request.train_config import Interval
from clusterddp.run import attempt as attempts
from clusterddp.run.attempt import Attempt
from clusterddp.run.loop_variables import attempt_at, attempt_here
from clusterddp.run.records import LastWord, MetricsLine, Spent
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import RUN_NAME
from clusterddp.training import buckets, replay, stop
from clusterddp.training.presence import Presence, poll_time_limit
from clusterddp.training.stop import REASONS, Deadline
from clusterddp.version import __version__

T = TypeVar("T")

DEFAULT_FOLDER = "jobs"
"""Folder of the runs that nobody submitted, as of those that were."""
_FIRST_SAVE_SECONDS = 40.0
_LINE_SECONDS = 1.0
_PRINT_SECONDS = 10.0
"""Between two lines of metrics that are printed among the script's own, unless it says how many."""
_PATIENCE_SECONDS = 60.0
_INTERVAL = re.compile(r"[1-9]\d{0,8}(step|epoch|minute)s?", re.ASCII)


class Loop:
    """Training loop that saves, stops when it is asked to, and resumes where it was.

    Make it on every rank, after the process group, the model and the optimizer: it restores them
    where there is a checkpoint.
    """

    _folders: ClassVar[set[Path]] = set()
    """Runs into which this process has a loop that is not closed."""

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        save_every: str = "10minutes",
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
        save_every: `500steps`, `1epoch` or `10minutes`; once in the first minute in any case.
        keep_last: checkpoints that are kept.
        log_every: steps between two lines of metrics; 0 is a line a second, of which one in ten
            seconds is printed.
        random_states: save and restore the random generators of every rank, so that what is drawn
            (dropout, shuffles, augmentation) is as without the interruption.

        Raises CheckpointError where it cannot resume: no valid checkpoint is left, or it is of
        other states, or of another number of ranks and not sharded; TrainingError where it cannot
        write, another attempt or loop is at work there, or the ranks have no process group.
        """
        self._began = self._saved_at = self._lap = time.monotonic()
        self._check(states, save_every, folder)
        self._objects = {name: _bare(each) for name, each in states.items()}
        self._sharded = _sharded_part(self._objects)
        self._wrappers = {name: ddp for name, each in states.items() if (ddp := _wrapper(each))}
        self._arranged: dict[str, list[int]] = {}
        """Arrangement of the buckets of each of DDP's wrappers, once it is known."""
        self._saving, self._log_every = Interval.parse(save_every), log_every
        self._keep_last, self._keeps_random = keep_last, random_states
        self._plain_states()
        self.rank, self.world_size = _world()
        self.steps = 0
        """Steps since the run began, over all its attempts."""
        self.epoch = 0
        """Epoch that is being trained, from 0."""
        self._epochs = 0
        """Epochs of all; 0 where nobody has said."""
        self._batch, self._batches = 0, -1
        """Batches of the epoch that are trained, and how many it has; -1 where nobody knows."""
        self._seconds = 0.0
        self._samples = self._lap_samples = 0
        self._resume_batch, self._in_epoch = 0, False
        self._has_batches = False
        """True where this epoch's batches come from `batches`; else it is one step, or none."""
        self._random: tuple[Any, Any] | None = None
        """This rank's generators as they were saved: then, and at the beginning of the epoch."""
        self._start_random: Any = None
        self._generators: list[torch.Generator] = []
        """Those of the loader itself."""
        self._all_random: list[Any] = []
        """Generators of all ranks, as they were at the latest save."""
        self._postponed: tuple[str, bool] | None = None
        self._poll, self._deadline = Poll(_exchanging_device()), Deadline()
        self._unlisten: Callable[..., None] | None = stop.requested.listen()
        try:
            self.attempt, source = self._begin(folder)
        except BaseException:
            self._unlisten()
            raise
        self.is_resumed = source is not None
        """True where it began with a checkpoint."""
        self._saved_step = self.steps if source else -1
        self._presence: Presence | None = None
        self._saver: Saver | None = None
        self._metrics: Mapping[str, Any] = {}
        self._can_log, self._logged_step, self._printed = True, -1, -math.inf
        if self.rank == 0:
            self._start_background()
        self._lap = time.monotonic()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of so many, from 0; saves at the end of the last.

        An epoch takes its batches from `batches`, or is a single step: where it was cannot be told
        otherwise.
        """
        self._restore_random(0)
        self._epochs = count
        if self.epoch >= count and self.rank == 0:
            folder = "" if self._in_run else f"; remove {self.attempt.run.path} to begin anew"
            log.info(f"nothing is left to train: epoch {count} is done{folder}")
        while self.epoch < count:
            self._in_epoch, self._has_batches = True, False
            yield self.epoch
            self._in_epoch = False
            self.epoch += 1
            self._batch, self._batches, self._resume_batch = 0, -1, 0
            reason, save = self._postponed or ("", False)
            self._postponed = None
            self._save_or_leave(reason, save or self._saving.due("epoch", self.epoch))
        self.finish()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, after a resume those left of the epoch; collective.

        What lies before is skipped without being read where the loader is torch's without workers,
        and read again otherwise, so that random transforms draw what they would have drawn.
        """
        if not self._in_epoch:
            raise RuntimeError("loop.batches() belongs into the body of `for … in loop.epochs(…)`")
        done, self._resume_batch, self._has_batches = self._resume_batch, 0, True
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
            self._restore_random(0)
        lengths = set(self._gather(_length(loader)))  # the last batch is that of all ranks
        self._batches = lengths.pop() if len(lengths) == 1 else -1
        self._batch = done
        for batch in iterator:
            self._batch += 1
            self._lap_samples += replay.count_samples(batch)
            yield batch

    def step(self, **metrics: Any) -> None:
        """Count a step, log its metrics, save where it is due, leave if asked to; collective.

        Call it on every rank after `optimizer.step()`. metrics: of rank 0; `loss`, `accuracy` and
        `lr` are known to the reports, others are kept beside them.

        Raises SystemExit with 75 after saving, where a stop was asked for; 130 after a Ctrl-C. At
        the last batch of an epoch both wait for the epoch's own code, so that this is not skipped.
        RuntimeError at the second step of an epoch that does not use `batches`.
        """
        if self._unlisten is None:  # it was finished, and goes on
            self._unlisten = stop.requested.listen()
        if self._in_epoch and not self._has_batches:
            if self._batch:
                raise RuntimeError(
                    "loop.step() came twice in an epoch that does not use loop.batches(): a resume "
                    "would do its steps again. Write `for … in loop.batches(…)` there; it takes "
                    "any iterable, such as range(100)"
                )
            self._batch = self._batches = 1
        self.steps += 1
        self._random = None  # it is on its way
        self._log(metrics)
        reason, save = self._agree() if self._poll.due(self.steps) else ("", False)
        save = save or self._saving.due("step", self.steps)
        if self._batch == self._batches:
            before, was_due = self._postponed or ("", False)
            self._postponed = reason or before, save or was_due
        else:
            self._save_or_leave(reason, save)

    def test(self, **metrics: Any) -> None:
        """Log `accuracy` and `loss` on the test set, of rank 0; the reports know them."""
        if self.rank == 0:
            self._write("eval", metrics)

    def stop_asked(self) -> str:
        """Return why all ranks are to stop, empty where they are not; collective.

        `step` looks by itself. For a loop of another form, or a long evaluation.
        """
        return self._agree()[0]

    def save(self) -> None:
        """Save, once a step at most; collective. A full disk is logged, and the next save tries."""
        if self._saved_step == self.steps:
            return
        self._flush_metrics()
        began = time.monotonic()
        now = replay.random_state(self._generators), self._start_random
        self._all_random = self._gather(now if self._keeps_random else None)
        for name in sorted(self._wrappers.keys() - self._arranged.keys()):  # on each rank alike
            if indices := buckets.arrangement(self._wrappers[name]):
                self._arranged[name] = indices
        path = self.attempt.checkpoints / catalog.name_of(self.steps)
        shards, problem = sharded.save(path, self._sharded) if self._sharded else ({}, "")
        if self._saver and problem:
            self._saver.failed(path, problem)
        elif self._saver:
            self._saver.save(self._content(), time.monotonic() - began, shards)
        self._saved_step, self._saved_at = self.steps, time.monotonic()

    def leave(self, reason: str) -> NoReturn:
        """Save and raise SystemExit, as `step` does when it is asked to stop; collective."""
        self.save()
        self._await_checkpoint()
        if self._saver:
            saved = self._saver.last_step
            last = LastWord("stopped", reason, self.steps, saved, self._saver.trouble)
            content = {k: v for k, v in vars(last).items() if v or k != "trouble"}
            with suppress(OSError):
                self.attempt.write_last_word(self.attempt.end, content)
            log.info(f"saved step {saved} and leaving at step {self.steps}: {reason}")
        if self.world_size > 1:
            dist.barrier()
        code = EXIT_INTERRUPTED if reason == "interrupt" else EXIT_PAUSED
        # An agent of torchrun's takes any other code for a failure; the record says what it was.
        in_agent = "TORCHELASTIC_RUN_ID" in os.environ and self._in_run
        raise SystemExit(0 if in_agent else code)

    def finish(self) -> None:
        """Save what the loop has come to, and wait until it is on the disk; collective.

        `epochs` does so by itself. Raises CheckpointError, on all ranks, where it could not be
        written.
        """
        reason, _ = self._postponed or ("", False)
        if reason:  # a `break` has come before it
            self.leave(reason)
        self.save()
        if trouble := self._await_checkpoint():
            raise CheckpointError(f"the loop is done, but {trouble}. [CD0706]")
        self._stop_listening()
        if self._saver and not self._in_run:  # a run is done when its command is
            with suppress(OSError):
                last = LastWord("done", "", self.steps, self._saver.last_step)
                files.write_record(self.attempt.end, vars(last))

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the sign of life.

        The end of the process does so by itself.
        """
        with suppress(Exception):
            if self._saver:
                self._saver.wait()
        self._stop_listening()
        Loop._folders.discard(self.attempt.run.path)
        if self._presence and self._saver:
            self._presence.__exit__()
            self._presence = None
            with suppress(OSError):
                saved, spent = self._saver.last_step, self._spent()
                self.attempt.show_life(self.steps, saved, spent, self._planned())
            self.attempt.end_life()

    def _planned(self) -> int | None:
        """Return the step at which the loop will be done, where each batch is one step."""
        epoch, batch, batches = self.epoch, self._batch, self._batches
        is_a_step_each = epoch * batches + batch - self.steps in (0, 1)
        return self._epochs * batches if self._epochs and batches > 0 and is_a_step_each else None

    def _spent(self) -> Spent:
        """Sum up rank 0's time; what ranks wait for each other is not seen from here."""
        costs = self._saver.costs if self._saver else Costs()
        saving = costs.copy_seconds + costs.blocked_seconds
        training = max(time.time() - self._loops_since - saving, 0.0)
        return Spent(round(self._loops_since, 3), round(training, 3), None, round(saving, 3))

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
        if not _INTERVAL.fullmatch(save_every):
            raise ValueError(
                f"save_every={save_every!r}: expected such as '500steps', '1epoch' or '10minutes'"
            )
        if folder is None and not _has_group() and _tasks() > 1:
            raise TrainingError(
                f"this is one of {_tasks()} tasks by its environment, and there is no process "
                "group: call torch.distributed.init_process_group() before Loop(), or give each "
                "a folder of its own, Loop(folder=…). [CD0816]"
            )

    def _begin(self, folder: str | os.PathLike[str] | None) -> tuple[Attempt, Path | None]:
        """Settle on rank 0 where to write and where to resume, and restore that on all ranks."""
        own = attempt_here(os.environ) if folder is None else None
        self._in_run = own is not None
        hosts = list(dict.fromkeys(self._gather(_host())))
        settled: tuple[str, str, type[ClusterDDPError] | None] = ("", "", None)
        if self.rank == 0:
            try:
                run = own.run if own else _run_of(folder)
                self._check_alone(run, own)
                attempt = own or _new_attempt(run, self.world_size, hosts)
                source = self._settle(attempt, hosts)
                settled = str(attempt.path), str(source or ""), None
            except CheckpointError as error:
                settled = coded(error), "", CheckpointError
            except ClusterDDPError as error:
                settled = coded(error), "", TrainingError
            except OSError as error:
                cause = f"rank 0 on {_host()} cannot begin an attempt: {error} [CD0504]"
                settled = cause, "", TrainingError
        path, source_path, failure = self._from_first(settled)
        if failure:
            raise failure(path)
        attempt = attempt_at(Path(path))
        if not source_path:
            return attempt, None
        source = Path(source_path)
        content = self._on_all_ranks(
            source, lambda: _parsed(source, catalog.read(source, shards=False))
        )
        self._on_all_ranks(source, lambda: self._restore(content))
        if self._sharded:
            self._on_all_ranks(source, lambda: sharded.check(source, self._sharded))
            self._on_all_ranks(source, lambda: sharded.restore(source, self._sharded))
        if content["world_size"] == self.world_size:
            self._arranged = content["loop"]["buckets"]
            for name in sorted(self._wrappers.keys() & self._arranged.keys()):
                buckets.arrange(self._wrappers[name], self._arranged[name])
        self._restore_random(0)
        if self.rank == 0:
            inside = self._resume_batch or not self.epoch
            where = f"epoch {self.epoch + 1}" if inside else f"after epoch {self.epoch}"
            log.info(f"resumes from step {self.steps}, {where}: {source.name}")
        return attempt, source

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
            problem = f"rank {self.rank} on {_host()}: {coded(error, code)}"
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = f"the checkpoint {source} does not fit what this loop was given: {error}"
        if problem := next(filter(None, self._gather(problem)), ""):
            raise CheckpointError(problem, code="CD0703")
        return results[0]

    def _start_background(self) -> None:
        """Begin what rank 0 does beside the training: saving, signs of life, the time limit."""
        Loop._folders.add(self.attempt.run.path)
        saver = self._saver = Saver(self.attempt, self._keep_last)
        self._loops_since = time.time()
        self._presence = Presence(self.attempt, stop.requested)
        self._presence.step = lambda: self.steps
        self._presence.saved = lambda: saver.last_step
        self._presence.spent = self._spent
        self._presence.planned = self._planned
        self._presence.__enter__()
        spec = self.attempt.run.read_spec() if self._in_run else None
        self._deadline = Deadline(spec.signal_lead if spec else 0)
        poll_time_limit(self._deadline, os.environ)
        atexit.register(self.close)

    def _settle(self, attempt: Attempt, hosts: list[str]) -> Path | None:
        """Choose on rank 0 the checkpoint to resume from, and publish the attempt."""
        if not attempt.path.is_dir():
            raise TrainingError(
                f"{attempt.path} is gone: the run directory was removed or replaced while the job "
                "was starting. Submit the run again. [CD0512]"
            )
        has_begun = attempt.checkpoints.is_dir()  # an agent starts the ranks of an attempt again
        of_attempt = catalog.newest_in(attempt.checkpoints) if has_begun else None
        source = of_attempt or catalog.source(attempt.run)
        step = 0
        if source:
            content = _parsed(source, catalog.read(source, shards=False))
            self._check_fits(source, content)
            step, script = content["step"], content["loop"]["script"]
            if of_attempt and script != _script():
                raise CheckpointError(
                    f"the checkpoint {source} was saved by {script}, and this is {_script()}: give "
                    "each a folder of its own, Loop(folder=…). [CD0703]"
                )
        taken = source
        if not has_begun:
            taken = catalog.adopt(attempt, source, self._keep_last)
        attempts.take_up(
            attempt, source, step, world_size=self.world_size, hosts=hosts, environ=os.environ
        )
        return taken

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
        ranks = content["world_size"]
        if bool(loop["sharded"]) != bool(self._sharded):
            is_now = "is" if self._sharded else "is not"
            raise CheckpointError(
                f"the checkpoint {path} {'is' if loop['sharded'] else 'is not'} sharded, and this "
                f"model {is_now}: wrap it before Loop() as it was. [CD0709]"
            )
        if ranks != self.world_size and not self._sharded:
            raise CheckpointError(
                f"the checkpoint {path} is of {ranks} ranks, and this world has "
                f"{self.world_size}: each would continue at another place in the data, and with "
                f"another batch over all ranks. Start {ranks} ranks again; only a sharded model "
                "(FSDP) resumes at another number. [CD0709]"
            )

    def _restore(self, content: Mapping[str, Any]) -> None:
        """Restore all but what is sharded."""
        for name, each in self._objects.items():
            if name not in self._sharded:
                each.load_state_dict(content[name])
        ranks, loop = content["world_size"], content["loop"]
        self.steps, self.epoch = content["step"], content["epoch"]
        self._seconds, self._samples = content["seconds"], content["images"]
        self._resume_batch = content["step_in_epoch"] * ranks // self.world_size
        if ranks == self.world_size:
            randoms = loop["random_states"]
            self._random = randoms[self.rank] if self._keeps_random else None
        elif self.rank == 0:
            log.info(
                f"the checkpoint is of {ranks} ranks: what is drawn at random will be another, and "
                f"the epoch continues after {self._resume_batch} of this world's batches"
            )

    def _restore_random(self, index: int) -> None:
        if self._random and self._random[index]:
            replay.restore(self._random[index], ())

    # -- going on ----------------------------------------------------------------------------

    def _agree(self) -> tuple[str, bool]:
        """Agree with all ranks whether to stop, and why; and whether it is time to save."""
        stop.requested.looked_at = True
        costs = self._saver.costs if self._saver else Costs()
        lead = 2 * self._poll.step_seconds + 1.0 + 2 * costs.longest_seconds
        if self._deadline.is_near(lead):
            stop.requested.note("time limit")
        now = time.monotonic()
        is_first = self._saved_at == self._began and now - self._began > _FIRST_SAVE_SECONDS
        due = self.rank == 0 and (is_first or now - self._saved_at >= self._saving.seconds)
        reason = REASONS.index(stop.requested.reason)
        code, save = self._poll.ask(self.steps, [reason, int(due)])
        if costs.saves:
            self._deadline.check_lead(lead)
        return REASONS[code], bool(save)

    def _save_or_leave(self, reason: str, save: bool) -> None:
        if reason:
            self.leave(reason)
        if save:
            self.save()

    def _await_checkpoint(self) -> str:
        """Wait for the last checkpoint, and try once more where it could not be written.

        Returns on all ranks why it is not there, empty where it is.
        """
        trouble = self._trouble()
        if trouble:
            self._saved_step = -1
            self.save()
            trouble = self._trouble()
        return trouble

    def _trouble(self) -> str:
        trouble = "" if self._saver is None or self._saver.wait() else self._saver.trouble
        return self._from_first(trouble)

    def _content(self) -> dict[str, Any]:
        """Return a copy of all that a checkpoint holds, on the CPU."""
        content: dict[str, Any] = copied({**self._head(), **self._plain_states()})
        return content

    def _plain_states(self) -> dict[str, Any]:
        """Return the states that every rank has whole; raises TypeError for what cannot be read."""
        states = {
            name: each.state_dict()
            for name, each in self._objects.items()
            if name not in self._sharded
        }
        for name, state in states.items():
            if odd := why_unreadable(state):
                raise TypeError(
                    f"Loop({name}=…): its state_dict holds what torch.load does not take with "
                    f"weights_only=True: {odd}. Keep tensors, numbers, texts and containers in it."
                )
        return states

    def _head(self) -> dict[str, Any]:
        """Return all but the states; `format` comes first, where `catalog` looks for it."""
        is_whole = self._in_epoch and not self._has_batches and self._batch == 1
        return {
            "format": catalog.FORMAT,
            "step": self.steps,
            "epoch": self.epoch + is_whole,
            "step_in_epoch": 0 if is_whole else self._batch,
            "seconds": self._seconds,
            "images": self._samples,
            "best": None,
            "world_size": self.world_size,
            "versions": {"clusterddp": __version__, "torch": torch.__version__.split("+")[0]},
            "loop": {
                "script": _script(),
                "names": sorted(self._objects),
                "sharded": sorted(self._sharded),
                "random_states": self._all_random,
                "buckets": self._arranged,
            },
        }

    # -- metrics -----------------------------------------------------------------------------

    def _log(self, metrics: Mapping[str, Any]) -> None:
        if self.rank:
            return
        self._metrics = metrics
        now = time.monotonic()
        if self._log_every:
            due = self.steps % self._log_every == 0
        else:
            due = self._logged_step < 0 or now - self._lap >= _LINE_SECONDS
        if due:
            self._flush_metrics()

    def _flush_metrics(self) -> None:
        """Write the metrics of the latest step, once."""
        now = time.monotonic()
        if self.rank or not self._metrics or self._logged_step == self.steps:
            return
        seconds, self._lap = now - self._lap, now
        samples, self._lap_samples = self._lap_samples * self.world_size, 0
        self._seconds += seconds
        self._samples += samples
        self._logged_step = self.steps
        rate = {"images_per_second": samples / seconds} if samples and seconds else {}
        self._write("train", {**self._metrics, **rate})

    def _write(self, kind: str, metrics: Mapping[str, Any]) -> None:
        values = {name: _number(name, value) for name, value in metrics.items()}
        epoch = self.epoch + 1 if self._in_epoch else max(self.epoch, 1)
        known = MetricsLine(kind, self.steps, epoch)
        line = {**dataclasses.asdict(known), **values}
        line |= {"seconds": round(self._seconds, 3), "time": round(time.time(), 3)}
        line = {name: value for name, value in line.items() if value not in (None, ())}
        shown = ", ".join(f"{name} {value:.5g}" for name, value in values.items())
        if kind == "eval" or self._log_every or self._lap - self._printed >= _PRINT_SECONDS:
            log.info(f"epoch {epoch} step {self.steps}{' test' * (kind == 'eval')}: {shown}")
            self._printed = self._lap if kind == "train" else self._printed
        try:
            files.append_line(self.attempt.metrics, json.dumps(line), os.O_CREAT)
            self._can_log = True
        except OSError as error:  # a full disk costs the line, never the training
            if self._can_log:
                log.warning(f"cannot write {self.attempt.metrics}: {error.strerror} [CD0518]")
            self._can_log = False

    # -- ranks -------------------------------------------------------------------------------

    def _gather(self, value: T) -> list[T]:
        """Give every rank the values of all."""
        if self.world_size == 1:
            return [value]
        return exchange.gather(value, _exchanging_device())

    def _from_first(self, value: T) -> T:
        """Give every rank the value of rank 0."""
        return self._gather(value)[0]


_RESERVED = frozenset(
    {
        *("format", "step", "epoch", "step_in_epoch", "samples", "seconds", "images", "best"),
        *("world_size", "versions", "loop", "config", "random_states"),
    }
)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _world() -> tuple[int, int]:
    if _has_group():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _exchanging_device() -> torch.device:
    """Return where the default process group exchanges small numbers: NCCL on GPUs alone."""
    if _has_group() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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


def _sharded_part(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sharded modules and the optimizers, where there is a sharded module."""
    if not any(map(sharded.is_sharded, objects.values())):
        return {}
    part = {
        name: each for name, each in objects.items() if isinstance(each, (Optimizer, nn.Module))
    }
    for each in part.values():
        if isinstance(each, Optimizer):
            sharded.owner(each, part)
    return part


def _script() -> str:
    return Path(sys.argv[0] if sys.argv else "").name


def _run_of(folder: str | os.PathLike[str] | None) -> RunDir:
    """Return the folder of a loop outside of a run."""
    script = Path(_script()).stem
    name = script if re.fullmatch(RUN_NAME, script) else "loop"
    return RunDir(Path(folder or Path(DEFAULT_FOLDER, name)).absolute())


def _new_attempt(run: RunDir, world_size: int, hosts: list[str]) -> Attempt:
    """Make an attempt outside of a run, where the commands find it too."""
    run.make(run.attempts)
    if not run.spec.exists() and re.fullmatch(RUN_NAME, run.name):
        nodes = 1 if world_size % len(hosts) else len(hosts)
        resources = Resources(nodes=nodes, tasks_per_node=world_size // nodes)
        with suppress(RequestError):  # a path or an argument that no script could carry
            command = (sys.executable, *sys.argv)
            spec = JobSpec(run.name, str(run.path), resources, command=command, launcher="local")
            files.write_atomically(run.spec, spec.to_json().encode())
    attempts.await_silence(run, os.environ.get("SLURM_JOB_ID", ""), _PATIENCE_SECONDS)
    return attempts.begin(run)


def _parsed(path: Path, data: bytes) -> Mapping[str, Any]:
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return cast(Mapping[str, Any], dict(content))
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, ValueError):
        raise CheckpointError(
            f"{path} cannot be loaded by torch {torch.__version__}. [CD0704]"
        ) from None


def _tasks() -> int:
    """Return the number of tasks of which this is one, as its environment tells."""
    value = os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", ""))
    return int(value) if value.isdigit() else 1


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _length(loader: object) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return -1


def _number(name: str, value: Any) -> float | int:
    """Return a metric as Python's own number; raises TypeError for what is none."""
    try:
        number: float | int = value.item() if hasattr(value, "item") else value
        return number if isinstance(number, int) else float(number)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name} is no number but {value!r:.60}") from None
