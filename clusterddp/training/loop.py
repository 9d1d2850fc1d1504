"""The training loop of one rank: the same on every rank, with rank 0's extra work named as such."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from clusterddp.errors import TrainingError
from clusterddp.run_dir import RunDir
from clusterddp.train_config import Interval, TrainConfig
from clusterddp.training import checkpoint, models, optimizer
from clusterddp.training.checkpoint import Position
from clusterddp.training.images import Images, evaluation_batches, training_batches
from clusterddp.training.metrics import Figures, Journal, Tally

# Images a rank evaluates at once; it changes the speed and the memory, not the result.
_EVALUATION_BATCH = 1000


class Training:
    """One rank's training, from the start or from a checkpoint; needs a process group."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        train_set: Images,
        test_set: Images,
        run: RunDir,
        resume: Path | None = None,
    ) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.train_set, self.test_set, self.run_dir = train_set, test_set, run
        self.device = device

        torch.manual_seed(config.seed)  # the same weights on every rank
        self.model = models.build(config.model).to(device)
        if device.type == "cpu":  # convolutions on the CPU are a third faster in this layout
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = optimizer.build(config, self.model)
        self.position = Position()
        if resume:
            self.position = checkpoint.restore(resume, config, self.model, self.optimizer)
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=config.bucket_cap_mb, gradient_as_bucket_view=True
        )
        torch.manual_seed(config.seed + rank)  # from here on each rank draws its own numbers

        self.sampler: DistributedSampler[Any] = DistributedSampler(
            train_set,  # type: ignore[arg-type] # only its length is asked for
            world_size,
            rank,
            seed=config.seed,
        )
        self.schedule = optimizer.Schedule(config, world_size, len(train_set))
        self.saving = Interval.parse("--save-every", config.save_every)
        self.evaluating = Interval.parse("--eval-every", config.eval_every)
        self.last_step = config.max_steps or sys.maxsize
        self.tally = Tally(device)
        self.journal = Journal(run, rank, self.position, self._planned_steps())
        self.accuracy = self.loss = math.nan
        """Over the whole test set, when it was last evaluated."""
        self._saved = self._evaluated = -1  # the step at which it was last done

    def run(self) -> None:
        """Train until the last epoch or `max_steps`; then evaluate and save, in any case.

        Raises TrainingError when the loss is not finite.
        """
        config, position = self.config, self.position
        self.tally.restart()
        while position.epoch < config.epochs and position.step < self.last_step:
            self.sampler.set_epoch(position.epoch)
            for indices in training_batches(
                self.sampler, config.batch_size, position.samples, self.world_size
            ):
                images, labels = self.train_set.batch(indices)
                for group in self.optimizer.param_groups:
                    group["lr"] = self.schedule.lr(position)
                self.optimizer.zero_grad()
                scores = self.ddp(images)
                loss = cross_entropy(scores, labels)
                loss.backward()  # type: ignore[no-untyped-call] # torch declares no types for it
                self.optimizer.step()

                self.tally.add(loss.detach(), scores.detach(), labels)
                position.advance(len(labels) * self.world_size)
                self.journal.step()
                if position.step % config.log_every == 0:
                    self._log()
                self._pause("step", position.step)
                if position.step >= self.last_step:
                    break
            if position.samples >= len(self.train_set):
                position.next_epoch()
                self._pause("epoch", position.epoch)
        self._log()
        self._evaluate()
        self._save()
        self.journal.close()

    def _pause(self, unit: str, count: int) -> None:
        """Evaluate and save where an interval says so; the time it takes is no training time."""
        if self.evaluating.due(unit, count):
            self._log()
            self._evaluate()
        if self.saving.due(unit, count):
            self._log()
            self._save()

    def _log(self) -> None:
        if not self.tally.steps:
            return
        loss, accuracy, count = self.tally.collect()
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} by step {self.position.step}: the weights are lost. "
                f"Lower --lr (now {self.config.lr:g}) or raise --warmup-steps."
            )
        seconds = self.tally.lap()
        self.position.seconds += seconds
        rate = self.schedule.lr(self.position)
        self.journal.train(self.position, Figures(loss, accuracy, rate, count / seconds))

    def _evaluate(self) -> None:
        if self._evaluated == self.position.step:
            return
        began = time.perf_counter()
        self.accuracy, self.loss = evaluate(
            self.model, self.test_set, self.rank, self.world_size, self.device
        )
        speed = len(self.test_set) / (time.perf_counter() - began)
        rate = self.schedule.lr(self.position)
        self.journal.evaluation(self.position, Figures(self.loss, self.accuracy, rate, speed))
        self._evaluated = self.position.step
        self.tally.restart()

    def _save(self) -> None:
        if self._saved == self.position.step:
            return
        if self.rank == 0:
            checkpoint.save(
                self.run_dir,
                config=self.config,
                model=self.model,
                optimizer=self.optimizer,
                position=self.position,
                world_size=self.world_size,
            )
        self._saved = self.position.step
        self.tally.restart()

    def _planned_steps(self) -> int:
        """For the progress bar: what is done and what is left at this world size."""
        per_epoch = math.ceil(len(self.sampler) / self.config.batch_size)
        left = (self.config.epochs - self.position.epoch) * per_epoch - self.position.step_in_epoch
        return min(self.last_step, self.position.step + max(left, 0))


def evaluate(
    model: nn.Module, test_set: Images, rank: int, world_size: int, device: torch.device
) -> tuple[float, float]:
    """Accuracy and mean loss over the whole test set, every image counted once.

    Takes the bare module: shares may differ in length, and DDP's forward would wait for ranks
    that have no batch left.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for indices in evaluation_batches(len(test_set), rank, world_size, _EVALUATION_BATCH):
            images, labels = test_set.batch(indices)
            scores = model(images)
            totals[0] += cross_entropy(scores, labels, reduction="sum")
            totals[1] += (scores.argmax(1) == labels).sum()
            totals[2] += len(labels)
    model.train()
    dist.all_reduce(totals)
    loss_sum, correct, count = totals.tolist()
    assert count == len(test_set), f"{count} of {len(test_set)} test images were counted"
    return correct / count, loss_sum / count
