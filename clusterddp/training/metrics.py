"""Logs a training: lines or a progress bar, metrics.jsonl and TensorBoard's files."""

import functools
import json
import math
import os
import shlex
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clusterddp import log
from clusterddp.checkpoints.state import Position
from clusterddp.distributed import agreement
from clusterddp.errors import TrainingError
from clusterddp.files import append_line, read_lines
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import MetricsLine, RateSpread
from clusterddp.training.paces import StepTimer

if TYPE_CHECKING:
    from tqdm import tqdm

# Audit events before a prompt: `breakpoint()`, a debugger that starts to trace
# (`pdb.set_trace()`), `input()`. Source: the audit events table of Python's documentation.
_ASKING = frozenset({"builtins.breakpoint", "builtins.input", "sys.settrace"})


_SHOWN = {"train": ("loss", "accuracy", "images_per_second", "lr"), "eval": ("loss", "accuracy")}
_LINE_SECONDS = 1.0
_PRINT_SECONDS = 10.0
"""Seconds between two lines printed in a script's output, unless it sets its own interval."""
_FLUSH_SECONDS = 10  # so that curves are current during the training


class MetricsFile:
    """Rank 0's metrics.jsonl; a failed write never stops the training."""

    def __init__(self, path: Path) -> None:
        self._path, self._failed = path, False

    def write(self, line: Mapping[str, object]) -> None:
        """Append a line; a failure is logged once."""
        try:
            append_line(self._path, json.dumps(line), os.O_CREAT)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning(
                    f"cannot write {self._path}: {error.strerror}. Training continues; until the "
                    "file can be written, its metrics are only in this log. [CD0518]"
                )
            self._failed = True


class Lines:
    """Rank 0's lines of a Loop: one per second, or one every few steps."""

    def __init__(
        self, path: Path, every: int, position: Position, epoch: Callable[[], int], timer: StepTimer
    ) -> None:
        """every: steps; 0 is by the clock. position: updated by the loop. epoch: from 1."""
        self._file, self._every, self._position = MetricsFile(path), every, position
        self._epoch, self._timer = epoch, timer
        self._metrics: Mapping[str, Any] = {}
        self._written, self._printed = -1, -math.inf
        self._at, self._from = time.monotonic(), replace(position)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Keep the metrics of a step, and write them if a line is due."""
        self._metrics = metrics
        due = self._written < 0 or time.monotonic() - self._at >= _LINE_SECONDS
        if self._position.step % self._every == 0 if self._every else due:
            self.flush()

    def flush(self) -> None:
        """Write the metrics of the latest step, once."""
        position = self._position
        if not self._metrics or self._written == position.step:
            return
        since, self._from = self._from, replace(position)
        self._written, self._at = position.step, time.monotonic()
        seconds, images = position.seconds - since.seconds, position.images - since.images
        rate = {"images_per_second": images / seconds} if images and seconds else {}
        self.write("train", {**self._metrics, **rate}, self._timer.rates)

    def write(self, kind: str, metrics: Mapping[str, Any], rates: Iterable[float] = ()) -> None:
        """Write a line, and print it if due; kind: `train` or `eval`."""
        position, epoch, is_test = self._position, self._epoch(), kind == "eval"
        values = {name: _number(name, value) for name, value in metrics.items()}
        if is_test or self._every or self._at - self._printed >= _PRINT_SECONDS:
            shown = ", ".join(f"{name} {value:.5g}" for name, value in values.items())
            log.info(f"epoch {epoch} step {position.step}{' test' * is_test}: {shown}")
            self._printed = self._printed if is_test else self._at
        line: dict[str, Any] = {"kind": kind, "step": position.step, "epoch": epoch, **values}
        each = [round(rate, 1) for rate in rates]
        if spread := RateSpread.of(each):
            line["rank_spread"] = asdict(spread)
        elif each:
            line["rank_images_per_second"] = each
        line |= {"seconds": round(position.seconds, 3), "time": round(time.time(), 3)}
        self._file.write(line)


def _number(name: str, value: Any) -> float | int:
    """Return a metric as a Python number. Raises TypeError for other values."""
    try:
        number: float | int = value.item() if hasattr(value, "item") else value
        return number if isinstance(number, int) else float(number)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"the metric {name} is not a number: {value!r:.60}") from None


class Journal:
    """Rank 0's record of a training: log, progress bar, metrics.jsonl, TensorBoard's files.

    It does nothing on other ranks.
    """

    def __init__(
        self, config: TrainConfig, attempt: Attempt, rank: int, start: Position, total_steps: int
    ) -> None:
        self._file = MetricsFile(attempt.metrics) if rank == 0 else None
        self._bar: tqdm | None = None
        self._board: TensorBoardWriter | None = None
        self._at_end = ExitStack()
        self._start_step, self._known = start.step, set[str]()
        if rank != 0:
            return
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            with suppress(ImportError):
                self._bar = self._at_end.enter_context(progress_bar(start.step, total_steps))
                self._at_end.enter_context(log.to(self._bar.write))
        history: list[MetricsLine] = []
        with suppress(OSError):
            history = list(read_lines(MetricsLine, attempt.metrics))
        self._known.update(line.kind for line in history if line.step == start.step)
        if config.tensorboard:
            self._board = TensorBoardWriter(attempt.path / "tensorboard", config, history)
            self._at_end.callback(self._board.close)

    def add(self, line: MetricsLine) -> None:
        """Log a line and write it to metrics.jsonl."""
        if self._file is None:
            return
        if line.tested:
            log.info(
                f"step {line.step}: test accuracy {line.accuracy:.2%}, test loss {line.loss:.4f}"
            )
        elif self._bar is not None and not self._bar.is_debugged:
            self._bar.set_postfix({"training loss": f"{line.loss:.4f}"}, refresh=False)
        else:
            log.info(
                f"epoch {line.epoch} step {line.step}: training loss {line.loss:.4f}, "
                f"training accuracy {line.accuracy:.2%}, lr {line.lr:.4g}, "
                f"{line.images_per_second:,.0f} images/s"
            )
        if line.step == self._start_step and line.kind in self._known:
            return  # repeats a step of an earlier attempt, whose line is present
        if self._board:
            self._board.add(line)
        content = asdict(line)
        if line.tested or line.rank_spread:
            del content["rank_images_per_second"]
        if not line.rank_spread:
            del content["rank_spread"]
        self._file.write(content)

    def step(self) -> None:
        """Count an optimizer step."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        self._at_end.close()


def progress_bar(done: int, total: int) -> "tqdm":
    """Return a tqdm bar on stderr of the done and remaining steps. Raises ImportError without tqdm.

    A debugger starts on an empty line, and nothing is drawn while it traces: the bar would be in
    the way of the prompt.
    """
    from tqdm import tqdm  # not needed in a job, whose ranks have no terminal

    class Bar(tqdm):  # type: ignore[misc] # tqdm has no types
        monitor_interval = 0
        """Progress bar without tqdm's thread, which redraws while the training is stopped."""
        is_shown = False

        @property
        def is_debugged(self) -> bool:
            """True if a debugger is active."""
            return sys.gettrace() is not None

        def display(self, *args: Any, **kwargs: Any) -> Any:
            """Draw the bar unless a debugger is active."""
            if self.is_debugged:
                return None
            self.is_shown = True
            return super().display(*args, **kwargs)

        def clear_line(self) -> None:
            """Clear the line of a visible bar until the next draw."""
            if self.is_shown and not self.disable:
                self.is_shown = False
                self.clear()

    bar = Bar(initial=done, total=total, unit="step", dynamic_ncols=True)
    _bars.add(bar)
    _listen()
    return bar


_bars = weakref.WeakSet["tqdm"]()
"""Bars in use: the hook outlives each of them."""


@functools.cache
def _listen() -> None:
    """Install the hook for prompts, once: an audit hook cannot be removed."""
    sys.addaudithook(_on_audit_event)


def _on_audit_event(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _ASKING:
        for bar in list(_bars):
            bar.clear_line()


class TensorBoardWriter:
    """Rank 0's TensorBoard writer of `train/loss`, `eval/accuracy` and so on.

    Its failures never stop the training. SummaryWriter writes from a separate thread, so the error
    of a full disk is raised by a later call (with its traceback in the log), and it cannot write
    after that: the next attempt writes the whole curve again.
    """

    def __init__(self, folder: Path, config: TrainConfig, history: Iterable[MetricsLine]) -> None:
        """folder: directory of this attempt; files of an earlier start in it are deleted.

        history: previous lines of metrics.jsonl, so that each attempt's directory has the whole
        curve without lost steps.

        Raises TrainingError if the package cannot be imported.
        """
        try:
            # Imported here, because it is slow and most trainings do not need it.
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # a mismatched protobuf raises arbitrary errors
            raise TrainingError(
                f"--tensorboard: {error}. Install it there: pip install "
                "'clusterddp[tensorboard]'. [CD0803]"
            ) from None
        self._folder = folder
        self._writer: SummaryWriter | None = None
        with self._disabled_on_failure():
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._writer = SummaryWriter(str(folder), flush_secs=_FLUSH_SECONDS)
            # A Markdown code block needs no quoting.
            fields = [f"    {name}: {value}" for name, value in asdict(config).items()]
            self._writer.add_text("configuration", "\n".join(fields), 0)
        for line in history:
            self.add(line)
        if self._writer:
            log.info(f"TensorBoard's files: tensorboard --logdir {shlex.quote(str(folder))}")

    def add(self, line: MetricsLine) -> None:
        """Add a line of metrics.jsonl."""
        with self._disabled_on_failure():
            for name in _SHOWN.get(line.kind, ()):
                value = getattr(line, name)
                if self._writer and value is not None:
                    self._writer.add_scalar(f"{line.kind}/{name}", value, line.step, line.time)

    def close(self) -> None:
        """Flush everything to disk."""
        with self._disabled_on_failure():
            if self._writer:
                self._writer.flush()  # raises errors that close would hide
                self._writer.close()
        self._writer = None

    @contextmanager
    def _disabled_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            writer, self._writer = self._writer, None
            if writer and writer.file_writer:
                with suppress(OSError):  # the same error again
                    # SummaryWriter.close would return before the thread has ended.
                    writer.file_writer.close()
            log.warning(
                f"cannot write TensorBoard's files to {self._folder}: {error.strerror}. Training "
                "continues without them. [CD0820]"
            )


class MetricSums:
    """Sums of loss and correct predictions since the last line of metrics, on the device.

    Only `collect` moves them to the CPU, so that a GPU does not wait at every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self.sums = [self._loss, self._correct]
        """Tensors changed by `add`."""
        self._count = self.steps = 0

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Add one pass of this rank on the device; `loss` is its mean."""
        self._loss.add_(loss, alpha=len(labels))
        self._correct.add_((scores.argmax(1) == labels).sum())

    def count(self, images: int) -> None:
        """Count a step with `images` images of this rank."""
        self._count += images
        self.steps += 1

    def collect(self) -> tuple[float, float]:
        """Return mean loss and accuracy over all ranks, and start new sums."""
        own = torch.stack([self._loss, self._correct.double()]).tolist()
        loss, correct, count = map(sum, zip(*agreement.rows([*own, self._count]), strict=True))
        self._loss.zero_()
        self._correct.zero_()
        self._count = self.steps = 0
        return loss / count, correct / count
