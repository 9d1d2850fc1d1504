"""The training loop of one rank: the same on every rank, with rank 0's extra work named as such."""

import math
import sys
import time
from typing import Any

import torch

from clusterddp import log
from clusterddp.checkpoints.files import Best
from clusterddp.checkpoints.writer import Saver
from clusterddp.data import rng
from clusterddp.data.in_memory import Images, training_order
from clusterddp.data.loader import Loaded
from clusterddp.data.rng import States
from clusterddp.distributed.agreement import Agreement, Poll
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.errors import CheckpointError, TrainingError
from clusterddp.request.train_config import Interval, TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import read_json_lines
from clusterddp.training import evaluation, sync_batchnorm, throughput
from clusterddp.training.deadline import Deadline
from clusterddp.training.learner import Learner
from clusterddp.training.metrics import Figures, Journal
from clusterddp.training.optimizer import Schedule
from clusterddp.training.profiling import Profiler
from clusterddp.training.stop import REASONS, StopRequest
from clusterddp.training.tensorboard import Board

# Until then an attempt has saved once, so that it knows what that costs.
_FIRST_SAVE_SECONDS = 40.0


class Training:
    """One rank's training, from the start or from a checkpoint; needs a process group."""

    def __init__(
        self,
        config: TrainConfig,
        agreed: Agreement,
        *,
        rank: int,
        device: torch.device,
        train_set: Images | Loaded,
        test_set: Images | Loaded,
        attempt: Attempt,
        request: StopRequest,
        progress: Progress | None = None,
        deadline: Deadline | None = None,
        resume_content: dict[str, Any] | None = None,
    ) -> None:
        """`request` is this rank's; any rank's stops all of them. `deadline` is rank 0's.

        resume_content: what the checkpoint to go on from holds, where it was loaded already.
        """
        self.config, self.agreed, self.rank = config, agreed, rank
        self.world_size, self.device = agreed.world_size, device
        self.train_set, self.test_set = train_set, test_set
        self.request, self.attempt = request, attempt
        self.progress = progress or Progress()
        self.deadline = deadline or Deadline()

        self.learner = Learner(
            config,
            agreed,
            rank=rank,
            device=device,
            mark=lambda phase: self.progress.mark(self.position.step + 1, phase),
            resume_content=resume_content,
        )
        self.model, self.optimizer = self.learner.model, self.learner.optimizer
        self.position, self.tally = self.learner.position, self.learner.tally
        self.paces = throughput.Paces()
        self.schedule = Schedule(config, agreed.reference_world_size, len(train_set))
        self.saving = Interval.parse(config.save_every)
        self.evaluating = Interval.parse(config.eval_every)
        self.last_step = config.max_steps or sys.maxsize
        self.journal = Journal(attempt, rank, self.position, self._planned_steps())
        if config.tensorboard and rank == 0:
            history = read_json_lines(attempt.metrics)
            self.journal.board = Board(attempt.path / "tensorboard", config, history)
        self.profiler = Profiler(attempt.path / "profile", rank, config.profile, device)
        self.saver = Saver.of_attempt(attempt, config.keep_last) if rank == 0 else None
        self.ranks: list[dict[str, Any]] = []
        """What became of each, once all is done."""
        self.poll = Poll(device)
        self.start_step = self.position.step
        self.warnings = list(agreed.warnings)
        """What its person should know."""
        poor = sync_batchnorm.poor_statistics(self.model, config, agreed)
        if poor:
            self.warnings.append(poor)
            if rank == 0:
                log.warning(poor)
        self.result: evaluation.Result | None = None
        """Of the whole test set, when it was last evaluated."""
        self._saved = self.position.step if agreed.resume else -1
        self._random_states: States | None = None  # of all ranks, when that was
        self._evaluated = -1  # the step at which it was last done
        self._saved_at = self._began = time.monotonic()

    @property
    def accuracy(self) -> float:
        """Over the whole test set, when it was last evaluated; NaN before."""
        return self.result.accuracy if self.result else math.nan

    @property
    def loss(self) -> float:
        """Mean over the whole test set, when it was last evaluated; NaN before."""
        return self.result.loss if self.result else math.nan

    def run(self) -> str:
        """Train until the last epoch or `max_steps`, then evaluate; save in any case.

        Returns the reason for which the ranks have stopped before that, empty when they have not.
        Raises TrainingError when the loss is not finite, CheckpointError when the end of a
        training cannot be written.
        """
        position = self.position
        self.progress.mark(position.step, Phase.START)
        if self.world_size > 1:
            with rng.kept(self.device):
                [batch] = self.train_set.batches(torch.zeros(1, dtype=torch.int64), 1)
                self.learner.settle(*batch)
        self.tally.restart()
        reason = self._ask()  # a request may have come during the imports
        while not reason and position.epoch < self.config.epochs and position.step < self.last_step:
            reason = self._epoch()
            if not reason and position.samples >= len(self.train_set):
                position.next_epoch()
                self._pause("epoch", position.epoch)
        self.profiler.close()
        self._log()
        if not reason:
            self._evaluate()
            self.ranks = throughput.of_ranks(self.paces, self.device)
        self._save()
        self._finish_saving(must=not reason)
        self.progress.mark(position.step, Phase.DONE)
        self.journal.close()
        return reason

    def _epoch(self) -> str:
        """Train what is left of the epoch; returns the reason when the ranks stop before."""
        position, progress = self.position, self.progress
        progress.mark(position.step + 1, Phase.DATA)
        order = training_order(
            len(self.train_set),
            seed=self.config.seed,
            epoch=position.epoch,
            rank=self.rank,
            world_size=self.world_size,
            seen=position.samples,
        )
        salt = self.config.seed + position.epoch
        for images, labels in self.train_set.batches(order, self.agreed.batch_size, salt):
            self.learner.step.set_lr(self.schedule.lr(position))
            self.learner.learn(images, labels)
            self.journal.step()
            self.profiler.step()
            if position.step % self.config.log_every == 0:
                self._log()
            self._pause("step", position.step)
            if position.step >= self.last_step:
                break
            if self.poll.due(position.step):
                reason = self._ask()
                if reason:
                    return reason
            progress.mark(position.step + 1, Phase.DATA)
        return ""

    def _ask(self) -> str:
        """All ranks together: the reason to stop here, if any has one; saves where it is time."""
        self.request.looked_at = True
        if self.deadline.is_near(self._lead_seconds()):
            self.request.note("time limit")
        now = time.monotonic()
        waited = now - self._saved_at
        first = self._saved_at == self._began and now - self._began > _FIRST_SAVE_SECONDS
        wish = self.rank == 0 and (waited >= self.saving.seconds or first)
        code, save = self.poll.ask(
            self.position.step, [REASONS.index(self.request.reason), int(wish)]
        )
        if save and not code:
            self._log()
            self._save()
        if self.saver and self.saver.costs.saves:
            self.deadline.check_lead(self._lead_seconds())
        return REASONS[code]

    def _lead_seconds(self) -> float:
        """What it takes from a request to stop to the last byte on the disk, on this evidence."""
        one = self.saver.costs.seconds_of_one() if self.saver else 0.0
        return 2 * self.poll.step_seconds + 1.0 + 2 * one

    def _pause(self, unit: str, count: int) -> None:
        """Evaluate and save where an interval says so; the time it takes is no training time."""
        if self.evaluating.due(unit, count):
            self._log()
            self._evaluate()
            if self.learner.best and self.learner.best.step == self.position.step:
                self._save()  # the best one is kept
        if self.saving.due(unit, count):
            self._log()
            self._save()

    def _log(self) -> None:
        if not self.tally.steps:
            return
        self.progress.mark(self.position.step, Phase.LOG)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        loss, accuracy, paces = self.tally.collect(self.learner.waiting.take())
        self._check_finite(loss, "loss")
        seconds = self.tally.lap()
        self.position.seconds += seconds
        self.paces.add(paces)
        rate = self.schedule.lr(self.position)
        figures = Figures(loss, accuracy, rate, paces.images / seconds)
        self.journal.train(self.position, figures, paces.images_per_second)

    def _check_finite(self, loss: float, name: str) -> None:
        """The same on every rank, as the loss is that of all."""
        if not math.isfinite(loss):
            raise TrainingError(
                f"the {name} is {loss} by step {self.position.step}: the weights are lost. "
                f"Lower --lr (now {self.config.lr:g}) or raise --warmup-steps."
            )

    def _evaluate(self) -> None:
        if self._evaluated == self.position.step:
            return
        began = time.perf_counter()
        step = self.position.step
        self.result = evaluation.evaluate(
            self.model,
            self.test_set,
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            autocast=self.learner.step.autocast,
            mark=lambda phase: self.progress.mark(step, phase),
        )
        accuracy, loss = self.result.accuracy, self.result.loss
        self._check_finite(loss, "test loss")
        speed = len(self.test_set) / (time.perf_counter() - began)
        rate = self.schedule.lr(self.position)
        self.journal.evaluation(self.position, Figures(loss, accuracy, rate, speed))
        self._evaluated = step
        if self.learner.best is None or accuracy > self.learner.best.accuracy:
            self.learner.best = Best(accuracy, step)
        self.tally.restart()

    def _save(self) -> None:
        """Rank 0 copies the state and has it written behind the training's back."""
        if self._saved == self.position.step:
            return
        self.progress.mark(self.position.step, Phase.SAVE)
        began = time.perf_counter()
        self._random_states = rng.gather(self.device)
        if self.saver:
            content = self.learner.collect(self._random_states)
            self.saver.save(content, time.perf_counter() - began)
        self._saved, self._saved_at = self.position.step, time.monotonic()
        self.tally.restart()

    def _finish_saving(self, *, must: bool) -> None:
        """Rank 0 waits until the last checkpoint is on the disk, and tries once more where it
        could not be written; at the end of a training it `must` be.
        """
        if self.saver is None or self.saver.wait() or self._saved == self.start_step:
            return
        self.saver.save(self.learner.collect(self._random_states), 0.0)
        if not self.saver.wait() and must:
            raise CheckpointError(
                f"the training is done, but its last checkpoint, step {self.position.step}, could "
                f"not be written; the last whole one is of step {self.saver.last_step}. Make room "
                "and start the run again: it goes on from there."
            )

    def _planned_steps(self) -> int:
        """For the progress bar: what is done and what is left at this world size."""
        per_epoch = math.ceil(len(self.train_set) / self.agreed.global_batch_size)
        left = (self.config.epochs - self.position.epoch) * per_epoch - self.position.step_in_epoch
        return min(self.last_step, self.position.step + max(left, 0))
