"""Loop that a framework's training loop drives: what the integrations have in common.

A framework trains in fits: `trainer.fit()`, `trainer.train()`. A script may have several; a
checkpoint holds the files of the current fit and of the finished ones, `fit-1`, `fit-2` …, so that
an attempt passes the finished fits without training.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from clusterddp.distributed import agreement
from clusterddp.distributed.heartbeat import Phase
from clusterddp.errors import TrainingError
from clusterddp.loop import Loop
from clusterddp.training import replay, stop
from clusterddp.training.sources import Source
from clusterddp.training.wrappers import wrapper_of

_loops: dict[str, "Driven"] = {}
"""Loops of this process by their `directory`."""


def begin_fit(write: Callable[[Path], object], **options: Any) -> "Driven":
    """Return this process's loop, at another fit; collective.

    write: writes the framework's files into a directory, on all ranks together.
    options: the first fit's; see `Loop`.
    """
    place = str(options.get("directory") or "")
    number = 0
    if place in _loops and not _loops[place].fits.is_over:  # left by SystemExit or an error
        left = _loops.pop(place)
        left.close()
        number = left.fits.number - 1  # this is the same fit again
    if place not in _loops:
        _loops[place] = Driven(trainer=Fits(number), **options)
    loop = _loops[place]
    loop.begin_fit(write)
    return loop


def require(owner: object, *names: str, package: str) -> None:
    """Raise TrainingError unless an object of a framework has these private names."""
    for name in names:
        if not hasattr(owner, name):
            import importlib.metadata

            version = importlib.metadata.version(package)
            raise TrainingError(
                f"{package} {version} has no {type(owner).__name__}.{name}, which this version of "
                f"clusterddp needs. Update clusterddp, or install another {package}. [CD0821]"
            )


class Fits:
    """Files of the fits in a checkpoint; a `FileState`. A fit without a step may have none."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """Current fit, from 1."""
        self.is_over = False
        """True if the current fit is done."""
        self._source: Path | None = None
        self._last = 0
        """Fit in which the checkpoint was saved."""
        self._write: Callable[[Path], object] = lambda _: None

    def begin(self, write: Callable[[Path], object]) -> None:
        """Begin the next fit."""
        self.number, self._write, self.is_over = self.number + 1, write, False

    @property
    def resumed(self) -> Path | None:
        """Directory from which the current fit resumes."""
        path = self._source / f"fit-{self.number}" if self._source else None
        return path if path and path.is_dir() else None

    @property
    def is_finished(self) -> bool:
        """True if the checkpoint was saved in a later fit."""
        return self.number < self._last

    def save_state(self, directory: str) -> None:
        """Write the files of the current fit, and link the finished fits' files."""
        folder = Path(directory)
        rank, _ = agreement.rank_and_world_size()
        if rank == 0:
            for number in range(1, self.number):
                name = f"step-*.shards/{folder.name}/fit-{number}"
                if found := sorted(folder.parent.parent.glob(name)):
                    shutil.copytree(found[-1], folder / found[-1].name, copy_function=_link)
        folder.joinpath(f"fit-{self.number}").mkdir(parents=True, exist_ok=True)
        self._write(folder / f"fit-{self.number}")

    def load_state(self, directory: str) -> None:
        """Note where the files are; the framework reads them itself."""
        self._source = Path(directory)
        self._last = max(int(each.name[len("fit-") :]) for each in self._source.glob("fit-*"))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


class Driven(Loop):
    """Loop without a loop: the framework calls it at each batch, step, epoch and fit."""

    _total: int | None = None

    @property
    def fits(self) -> Fits:
        """Fits of the script."""
        fits: Fits = self._objects["trainer"]
        return fits

    @property
    def resumes_inside(self) -> bool:
        """True until the first batch of a fit that resumes within an epoch."""
        return bool(self._resume_batch) and not self.fits.is_finished

    def begin_fit(self, write: Callable[[Path], object]) -> None:
        """Begin another fit; see `begin_fit`."""
        self.fits.begin(write)
        if not (
            self.fits.resumed or self.fits.is_finished
        ):  # the position in the checkpoint is not in this fit
            self._random, self._place, self._resume_batch = None, None, 0

    def begin(self, model: nn.Module, total: int | None) -> None:
        """Begin to train, once the framework has wrapped the model; collective.

        total: the last step of all fits, if known.
        """
        self._total, self._in_epoch, self._has_batches = total, True, True
        wrapper = wrapper_of(model)
        self._measure({"model": wrapper} if wrapper else {})
        if wrapper and "model" in self._arranged and not self.fits.is_finished:
            replay.restore_buckets(wrapper, self._arranged["model"])
        if self.fits.number > 1:  # the end of the fit before stopped them
            if self._saver and not self._in_run:
                self.attempt.end.unlink(missing_ok=True)
            self._unlisten = self._unlisten or stop.requested.listen()
            if not self._watchdog:
                self._start_watchdog()
        self._restore_random()

    def read(self, loader: Any) -> None:
        """Have the framework's next iteration over a loader read an epoch.

        It begins at the position of the checkpoint.
        """
        source = Source(loader)

        def begin() -> Iterator[Any]:
            fetches, skips = self._begin_reading(source, self._fetching)
            for batch in fetches.read(source.base, skips=skips):
                self._mark(Phase.FORWARD)
                yield batch

        replay.read_by(source.base, begin)

    def done_of(self, loader: Any) -> int:
        """Return the trained batches of the epoch in which the current fit resumes."""
        return self._done_of(loader) if self.resumes_inside else 0

    @property
    def has_other_ranks(self) -> bool:
        """True if it resumes from a checkpoint of another number of ranks."""
        return self._resume_ranks not in (0, self.world_size)

    def skip(self, batches: int, loader: Any) -> None:
        """Have the next epoch begin after this number of a loader's batches."""
        self._resume_batch, self._resume_ranks = batches, self.world_size
        if size := getattr(loader, "batch_size", None):
            self._position.samples = batches * size * self.world_size

    @property
    def batches_done(self) -> int:
        """Trained batches of this epoch."""
        return self._position.step_in_epoch

    def _fetching(self) -> None:
        self._timer.clock.start()
        self._mark(Phase.DATA)

    def pause(self) -> None:
        """Stop the clock of the step and the watch for hangs, for example during an evaluation."""
        self._timer.clock.stop()
        self._mark(Phase.USER_CODE)

    def batch_done(self) -> None:
        """Count a trained batch."""
        self._count(self._fetches.trained() if self._fetches else 0)

    def step_done(self, *, is_last: bool, **metrics: Any) -> None:
        """Count an optimizer step; see `step`. is_last: whether the epoch has no further batch."""
        self._batches = self._position.step_in_epoch if is_last else -1
        self.step(**metrics)

    def epoch_done(self) -> None:
        """Count an epoch, after all its work; save or stop if that waited for it."""
        self._end_epoch()
        self._in_epoch = True

    def abandon(self) -> None:
        """Restore the signals' actions after a fit that failed; the script may continue."""
        self._stop_listening()

    def finish(self) -> None:
        super().finish()
        self._timer.clock.stop()
        self.fits.is_over = True

    def _take_snapshot(self) -> None:
        if self.fits.number > 1:  # the files of earlier fits are on disk only
            self._snapshots.postpone()
        else:
            super()._take_snapshot()

    def _planned(self) -> int | None:
        return self._total
