"""What rank 0 tells: lines in its log or a bar on a terminal, metrics.jsonl."""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from clusterddp import log
from clusterddp.checkpoints.state import Position
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import read_json_lines, read_lines, write_atomically
from clusterddp.run.records import MetricsLine
from clusterddp.training.tensorboard import Board
from clusterddp.training.throughput import Paces

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
    """Of all ranks together."""


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
        """Loss and accuracy are means over the images of all ranks since the last such line.

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
        """Loss and accuracy over the whole test set."""
        if self._path is None:
            return
        log.info(
            f"step {position.step}: test accuracy {figures.accuracy:.2%}, "
            f"test loss {figures.loss:.4f}"
        )
        self._write("eval", position, figures)

    def step(self) -> None:
        """One optimizer step is done."""
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
                    f"cannot write {self._path}: {error.strerror}; training goes on, its "
                    "metrics are in this log alone while that lasts"
                )
            self._failed = True
        else:
            self._failed = False


class Tally:
    """Loss and hits since the last line of metrics, summed where they arise.

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
        """What `add` changes."""
        return [self._loss, self._correct]

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Sum up one pass of this rank, on the device alone; `loss` is its mean."""
        self._loss.add_(loss, alpha=len(labels))
        self._correct.add_((scores.argmax(1) == labels).sum())

    def count(self, images: int) -> None:
        """One step over so many images of this rank is done."""
        self._count += images
        self.steps += 1

    def collect(self, waited: float | None = 0.0) -> tuple[float, float, Paces]:
        """Mean loss and accuracy over all ranks, and each rank's pace; starts a new sum.

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
        """Seconds since the last lap or restart."""
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
    """Begin an attempt's metrics with what earlier ones wrote up to the step it starts from."""
    kept = [line for line in read_json_lines(source) if line.get("step", 0) <= step and step > 0]
    write_atomically(target, "".join(json.dumps(line) + "\n" for line in kept).encode())
