"""Measures and logs a training: lines or a progress bar, metrics.jsonl, each rank's throughput.

All ranks take a step together, so their pace is one; a straggler is the rank that never waits. A
rank's own work on a step is done when its last gradient is there: from then until the backward
pass returns it waits for the others and for the network.
"""

import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clusterddp import log
from clusterddp.checkpoints.state import Position
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import number, read_json_lines, read_lines, write_atomically
from clusterddp.run.records import MetricsLine, RankReport
from clusterddp.training.device import peak_bytes
from clusterddp.training.tensorboard import Board

if TYPE_CHECKING:
    from clusterddp.training.progress_bar import ProgressBar


@dataclass(frozen=True)
class Figures:
    """One line of metrics."""

    loss: float
    accuracy: float
    lr: float
    """The learning rate of the step that comes next."""
    images_per_second: float
    """Throughput of all ranks together."""


class Journal:
    """Rank 0's account of a training: log, bar, metrics.jsonl; on other ranks it does nothing."""

    def __init__(self, attempt: Attempt, rank: int, start: Position, total_steps: int) -> None:
        self._path = attempt.metrics if rank == 0 else None
        self._bar = _bar(start.step, total_steps) if rank == 0 and _on_terminal() else None
        self._above_bar = ExitStack()
        if self._bar is not None:
            self._above_bar.enter_context(log.to(self._bar.write))
        self.board: Board | None = None
        self._failed = False
        self._start_step = start.step
        self._known = _kinds_at(self._path, start.step) if self._path else set()

    def train(self, position: Position, figures: Figures, of_ranks: Sequence[float] = ()) -> None:
        """Log means over the images of all ranks since the last such line.

        of_ranks: images/s of each rank by itself, as `Paces` has them.
        """
        if self._path is None:
            return
        if self._bar is not None and not self._bar.gives_way:
            self._bar.set_postfix(loss=f"{figures.loss:.4f}", refresh=False)
        else:
            log.info(
                f"epoch {position.epoch_shown} step {position.step}: loss {figures.loss:.4f}, "
                f"accuracy {figures.accuracy:.2%}, lr {figures.lr:.4g}, "
                f"{figures.images_per_second:,.0f} images/s"
            )
        shown = [round(rate, 1) for rate in of_ranks]
        self._write("train", position, figures, tuple(shown))

    def evaluation(self, position: Position, figures: Figures) -> None:
        """Log loss and accuracy over the whole test set."""
        if self._path is None:
            return
        log.info(
            f"step {position.step}: test accuracy {figures.accuracy:.2%}, "
            f"test loss {figures.loss:.4f}"
        )
        self._write("eval", position, figures)

    def step(self) -> None:
        """Count an optimizer step."""
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        if self.board:
            self.board.close()
        self._above_bar.close()
        if self._bar is not None:
            self._bar.close()

    def _write(
        self,
        kind: str,
        position: Position,
        figures: Figures,
        of_ranks: tuple[float, ...] | None = None,
    ) -> None:
        if self._path is None:
            return
        if position.step == self._start_step and kind in self._known:
            return  # an earlier attempt has done the very same, and its line is there
        line = MetricsLine(
            kind=kind,
            step=position.step,
            epoch=position.epoch_shown,
            loss=figures.loss,
            accuracy=figures.accuracy,
            lr=figures.lr,
            images_per_second=figures.images_per_second,
            rank_images_per_second=of_ranks or (),
            seconds=round(position.seconds, 3),
            time=round(time.time(), 3),
        )
        content = asdict(line)
        if of_ranks is None:
            del content["rank_images_per_second"]
        if self.board:
            self.board.add(line)
        try:
            with self._path.open("a") as file:
                # What failed before may have left a torn line.
                file.write(("\n" if self._failed else "") + json.dumps(content) + "\n")
        except OSError as error:  # a full disk costs the line, never the training
            if not self._failed:
                log.warning(
                    f"cannot write {self._path}: {error.strerror}; training continues, its "
                    "metrics are in this log alone while that lasts"
                )
            self._failed = True
        else:
            self._failed = False


class Tally:
    """Sums loss and hits since the last line of metrics, on the device where they arise.

    Only `collect` moves them to the CPU, so that a GPU is not kept waiting at every step.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)
        self._count = 0
        self.steps = 0
        self._began = time.perf_counter()

    @property
    def sums(self) -> list[Tensor]:
        """The tensors that `add` changes."""
        return [self._loss, self._correct]

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Sum up one pass of this rank, on the device alone; `loss` is its mean."""
        self._loss.add_(loss, alpha=len(labels))
        self._correct.add_((scores.argmax(1) == labels).sum())

    def count(self, images: int) -> None:
        """Count a step over so many images of this rank."""
        self._count += images
        self.steps += 1

    def collect(self, waited: float | None = 0.0) -> "tuple[float, float, Paces]":
        """Return mean loss and accuracy over all ranks, and each rank's pace; starts a new sum.

        waited: seconds that this rank has waited for others since the last lap or restart; None
            where that is not known.
        """
        waited = math.nan if waited is None else waited
        busy = time.perf_counter() - self._began - waited
        own = torch.tensor([self._count, busy], dtype=torch.float64, device=self._loss.device)
        own = torch.cat([torch.stack([self._loss, self._correct.double()]), own])
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        losses, correct, images, seconds = torch.stack(everyone).T.tolist()
        self._loss.zero_()
        self._correct.zero_()
        self._count = self.steps = 0
        count = sum(images)
        return sum(losses) / count, sum(correct) / count, Paces(images, seconds)

    def lap(self) -> float:
        """Return the seconds since the last lap or restart."""
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        return seconds

    def restart(self) -> None:
        """Leave what lay between out of the next lap."""
        self._began = time.perf_counter()


def _on_terminal() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def _bar(done: int, total: int) -> "ProgressBar":
    from clusterddp.training.progress_bar import ProgressBar

    return ProgressBar(done, total)


def _kinds_at(path: Path, step: int) -> set[str]:
    try:
        return {line.kind for line in read_lines(MetricsLine, path) if line.step == step}
    except OSError:
        return set()


def copy_history(source: Path, target: Path, step: int) -> None:
    """Begin an attempt's metrics with the lines of earlier ones up to the step it starts from."""
    lines = read_json_lines(source) if step > 0 else ()
    kept = [line for line in lines if (number(line.get("step")) or 0) <= step]
    write_atomically(target, "".join(json.dumps(line) + "\n" for line in kept).encode())


class Waiting:
    """Sums up the time that one rank waits; without parameters to watch it counts nothing."""

    def __init__(self, device: torch.device, *, knows: bool = True) -> None:
        """knows: True where ranks wait for each other in the exchange of gradients alone, and it
        can be seen; not within a graph, nor where layers exchange something, too.
        """
        self._knows = knows
        self._on_gpu = device.type == "cuda"
        self._latest: Tensor | None = None
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

    def take(self) -> float | None:
        """Return the seconds since the last call, if known; a GPU has to be synchronised before."""
        for begin, end in self._events:
            self._seconds += begin.elapsed_time(end) / 1000.0
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds if self._knows else None

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


class Paces:
    """Images that each rank has trained, and its seconds without the waiting for others."""

    def __init__(self, images: Sequence[float] = (), seconds: Sequence[float] = ()) -> None:
        """One number a rank in each."""
        self._images, self._seconds = list(images), list(seconds)

    @property
    def images(self) -> float:
        """Images of all ranks together."""
        return sum(self._images)

    @property
    def images_per_second(self) -> list[float]:
        """Throughput of each rank by itself; empty where the time they wait is not known."""
        if any(math.isnan(seconds) for seconds in self._seconds):
            return []
        both = zip(self._images, self._seconds, strict=True)
        return [images / max(seconds, 1e-9) for images, seconds in both]

    def add(self, more: "Paces") -> None:
        """Add those of a later span, of the same ranks."""
        if not self._images:
            self._images, self._seconds = [0.0] * len(more._images), [0.0] * len(more._images)
        self._images = [a + b for a, b in zip(self._images, more._images, strict=True)]
        self._seconds = [a + b for a, b in zip(self._seconds, more._seconds, strict=True)]


def of_ranks(paces: Paces, device: torch.device) -> list[RankReport]:
    """Return host, memory and throughput of each rank. Collective over the default group."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    own = host, peak_bytes(device)
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    known = [round(rate, 1) for rate in paces.images_per_second]
    rates: Sequence[float | None] = known or [None] * len(everyone)
    return [
        RankReport(rank, rate, *each)
        for rank, (rate, each) in enumerate(zip(rates, everyone, strict=True))
    ]
