"""Measures and logs a training: lines or a progress bar, metrics.jsonl, each rank's throughput.

All ranks take a step together, so their pace is one; a straggler is the rank that never waits. A
rank's own work on a step is done when its last gradient is there: from then until the backward
pass returns it waits for the others and for the network.
"""

import functools
import json
import math
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clusterddp import log
from clusterddp.checkpoints.state import Position
from clusterddp.files import read_lines
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import MetricsLine, RankReport
from clusterddp.training.device import peak_bytes
from clusterddp.training.tensorboard import Board

if TYPE_CHECKING:
    from tqdm import tqdm

# Audit events of what is about to print or to ask: `breakpoint()`, a debugger that begins to trace
# (`pdb.set_trace()`), `input()`. Source: the audit events table of Python's documentation.
_ASKING = frozenset({"builtins.breakpoint", "builtins.input", "sys.settrace"})


class Journal:
    """Rank 0's account of a training: log, bar, metrics.jsonl, TensorBoard's files.

    On other ranks it does nothing.
    """

    def __init__(
        self, config: TrainConfig, attempt: Attempt, rank: int, start: Position, total_steps: int
    ) -> None:
        self._path = attempt.metrics if rank == 0 else None
        self._bar: tqdm | None = None
        self._board: Board | None = None
        self._at_end = ExitStack()
        self._failed = False
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
            self._board = Board(attempt.path / "tensorboard", config, history)
            self._at_end.callback(self._board.close)

    def add(self, line: MetricsLine) -> None:
        """Log a line and write it to metrics.jsonl."""
        if self._path is None:
            return
        if line.tested:
            log.info(
                f"step {line.step}: test accuracy {line.accuracy:.2%}, test loss {line.loss:.4f}"
            )
        elif self._bar is not None and not self._bar.gives_way:
            self._bar.set_postfix({"training loss": f"{line.loss:.4f}"}, refresh=False)
        else:
            log.info(
                f"epoch {line.epoch} step {line.step}: training loss {line.loss:.4f}, "
                f"training accuracy {line.accuracy:.2%}, lr {line.lr:.4g}, "
                f"{line.images_per_second:,.0f} images/s"
            )
        if line.step == self._start_step and line.kind in self._known:
            return  # an earlier attempt has done the very same, and its line is there
        if self._board:
            self._board.add(line)
        self._write(self._path, line)

    def step(self) -> None:
        """Count an optimizer step."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        self._at_end.close()

    def _write(self, path: Path, line: MetricsLine) -> None:
        content = asdict(line)
        if line.tested:
            del content["rank_images_per_second"]
        try:
            with path.open("a") as file:
                # What failed before may have left a torn line.
                file.write(("\n" if self._failed else "") + json.dumps(content) + "\n")
        except OSError as error:  # a full disk costs the line, never the training
            if not self._failed:
                log.warning(
                    f"cannot write {path}: {error.strerror}; training continues, its "
                    "metrics are in this log alone while that lasts [CD0518]"
                )
            self._failed = True
        else:
            self._failed = False


def progress_bar(done: int, total: int) -> "tqdm":
    """Show steps done and left on stderr, in a bar of tqdm; raises ImportError without that.

    A debugger that stops the training finds an empty line. As long as it traces, nothing is drawn:
    it would stand where the user types.
    """
    from tqdm import tqdm  # not needed in a job, whose ranks have no terminal

    class Bar(tqdm):  # type: ignore[misc] # tqdm has no types
        monitor_interval = 0
        """Without tqdm's thread, which draws again while the training stands still."""
        is_shown = False

        @property
        def gives_way(self) -> bool:
            """True while a debugger is at work."""
            return sys.gettrace() is not None

        def display(self, *args: Any, **kwargs: Any) -> Any:
            """Draw the bar, unless it gives way."""
            if self.gives_way:
                return None
            self.is_shown = True
            return super().display(*args, **kwargs)

        def make_room(self) -> None:
            """Clear the line of a bar that is shown, until it is drawn again."""
            if self.is_shown and not self.disable:
                self.is_shown = False
                self.clear()

    bar = Bar(initial=done, total=total, unit="step", dynamic_ncols=True)
    _bars.add(bar)
    _listen()
    return bar


_bars = weakref.WeakSet["tqdm"]()
"""Bars in use: the hook outlives every one."""


@functools.cache
def _listen() -> None:
    """Listen for prompts from the first call on: an audit hook cannot be removed."""
    sys.addaudithook(_hear)


def _hear(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _ASKING:
        for bar in list(_bars):
            bar.make_room()


class Tally:
    """Sums loss and hits since the last line of metrics, on the device where they arise.

    Only `collect` moves them to the CPU, so that a GPU is not kept waiting at every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self.sums = [self._loss, self._correct]
        """The tensors that `add` changes."""
        self._count = self.steps = 0
        self._began = time.perf_counter()

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Sum up one pass of this rank, on the device alone; `loss` is its mean."""
        self._loss.add_(loss, alpha=len(labels))
        self._correct.add_((scores.argmax(1) == labels).sum())

    def count(self, images: int) -> None:
        """Count a step over so many images of this rank."""
        self._count += images
        self.steps += 1

    def collect(self, waited: float = 0.0) -> "tuple[float, float, Paces]":
        """Return mean loss and accuracy over all ranks, and each rank's pace; starts a new sum.

        waited: seconds that this rank has waited for others since the last lap; NaN
            where that is not known.
        """
        busy = time.perf_counter() - self._began - waited
        counts = torch.tensor([self._count, busy], dtype=torch.float64, device=self._loss.device)
        of_rank = torch.cat([torch.stack([self._loss, self._correct.double()]), counts])
        everyone = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, of_rank)
        losses, correct, images, seconds = torch.stack(everyone).T.tolist()
        self._loss.zero_()
        self._correct.zero_()
        self._count = self.steps = 0
        count = sum(images)
        return sum(losses) / count, sum(correct) / count, Paces(images, seconds)

    @property
    def elapsed(self) -> float:
        """Seconds since the lap began."""
        return time.perf_counter() - self._began

    def lap(self) -> float:
        """Begin a lap: what lay before is left out of it. Returns the seconds of the last one."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        return seconds


class Waiting:
    """Sums up the time that one rank waits; without parameters to watch it counts nothing."""

    def __init__(self, device: torch.device, *, knows: bool = True) -> None:
        """knows: True where ranks wait for each other in the exchange of gradients alone, and it
        can be seen; not within a graph, nor where layers exchange something, too.
        """
        self._knows = knows
        self._on_gpu = device.type == "cuda"
        self._ready: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        # On a GPU what happens when is asked later, so that it never stands still for it.
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def learn(self, model: nn.Module) -> Iterator[None]:
        """Learn in a context around one backward pass which gradient comes last."""
        came: list[Tensor] = []
        watched = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles = [_hook(parameter, came.append) for parameter in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if came:
            _hook(came[-1], self._note)

    def done(self) -> None:
        """Count the wait that ends as the backward pass returns."""
        if self._ready is None:
            return
        if isinstance(self._ready, float):
            self._seconds += time.perf_counter() - self._ready
        else:
            self._events.append((self._ready, _event()))
        self._ready = None

    def take(self) -> float:
        """Return the seconds since the last call, NaN where they are not known; a GPU has to be
        synchronised before.
        """
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000.0
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds if self._knows else math.nan

    def _note(self, _: Tensor) -> None:
        self._ready = _event() if self._on_gpu else time.perf_counter()


def _hook(parameter: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `note` when the gradient is there; before DDP's own hook, which begins to exchange."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    return handle


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class Paces:
    """Images that each rank has trained, and its seconds without the waiting for others."""

    images: Sequence[float] = ()
    seconds: Sequence[float] = ()

    @property
    def images_per_second(self) -> list[float]:
        """Throughput of each rank by itself; empty where the time they wait is not known."""
        if any(map(math.isnan, self.seconds)):
            return []
        both = zip(self.images, self.seconds, strict=True)
        return [images / max(seconds, 1e-9) for images, seconds in both]

    def __add__(self, more: "Paces") -> "Paces":
        """Return these with those of a later span, of the same ranks."""
        images = zip_longest(self.images, more.images, fillvalue=0.0)
        seconds = zip_longest(self.seconds, more.seconds, fillvalue=0.0)
        return Paces([*map(sum, images)], [*map(sum, seconds)])


def of_ranks(paces: Paces, device: torch.device) -> list[RankReport]:
    """Return host, memory and throughput of each rank. Collective over the default group."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    everyone = [("", 0)] * dist.get_world_size()
    dist.all_gather_object(everyone, (host, peak_bytes(device)))
    known = [round(rate, 1) for rate in paces.images_per_second]
    rates: Sequence[float | None] = known or [None] * len(everyone)
    return [
        RankReport(rank, rate, *each)
        for rank, (rate, each) in enumerate(zip(rates, everyone, strict=True))
    ]
