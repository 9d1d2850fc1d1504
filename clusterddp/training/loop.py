"""The training loop of one rank: the same on every rank, with rank 0's extra work named as such."""

import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from clusterddp.attempt import Attempt, attempts
from clusterddp.errors import CheckpointError, TrainingError
from clusterddp.stop import REASONS, StopRequest
from clusterddp.train_config import Interval, TrainConfig
from clusterddp.training import checkpoint, memory, models, optimizer, parallel
from clusterddp.training.agreement import Agreement
from clusterddp.training.augment import AUGMENTATIONS
from clusterddp.training.checkpoint import Position
from clusterddp.training.checkpoint_file import Best
from clusterddp.training.compiled import Compiled
from clusterddp.training.deadline import Deadline
from clusterddp.training.graph import GraphedStep
from clusterddp.training.images import Images, as_images, evaluation_order, training_order
from clusterddp.training.loader import Loaded
from clusterddp.training.metrics import Figures, Journal, Tally
from clusterddp.training.poll import Poll
from clusterddp.training.saver import Saver
from clusterddp.training.step import Step
from clusterddp.training.watchdog import Phase, Progress

# Images a rank evaluates at once; it changes the speed and the memory, not the result.
_EVALUATION_BATCH = 1000
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

        if device.type == "cpu":
            memory.keep_freed()
        torch.manual_seed(config.seed)  # the same weights on every rank
        self.model = models.build(config.model).to(device)
        # Convolutions are faster in this layout, on CPUs as on GPUs.
        self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = optimizer.build(config, self.model, captured=agreed.cuda_graph)
        self.position = Position()
        self.best: Best | None = None
        self._scaler_state: dict[str, Any] = {}
        torch.manual_seed(config.seed + rank)  # from here on each rank draws its own numbers
        if agreed.resume:
            self._restore(Path(agreed.resume), resume_content)
        self.tally = Tally(device)
        self.ddp = parallel.wrap(self.model, config, self.world_size, captured=agreed.cuda_graph)
        self.step = Step(
            Compiled(self.ddp) if config.compile else self.ddp,
            self.optimizer,
            self.tally,
            device=device,
            precision=agreed.precision,
            accumulate=config.accumulate,
            label_smoothing=config.label_smoothing,
            mark=lambda phase: self.progress.mark(self.position.step + 1, phase),
        )
        if self._scaler_state and self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(self._scaler_state)
        self._train = (
            GraphedStep(self.step, self.model, agreed.batch_size)
            if agreed.cuda_graph
            else self.step
        )
        self._augment = AUGMENTATIONS[config.augment]
        self.schedule = optimizer.Schedule(config, agreed.reference_world_size, len(train_set))
        self.saving = Interval.parse("--save-every", config.save_every, minutes=True)
        self.evaluating = Interval.parse("--eval-every", config.eval_every)
        self.last_step = config.max_steps or sys.maxsize
        self.journal = Journal(attempt, rank, self.position, self._planned_steps())
        self.saver = (
            Saver(
                attempt.checkpoints,
                keep_last=config.keep_last,
                say=self.journal.say,
                may_write=lambda: not attempt.is_superseded,
                older=[
                    each.checkpoints
                    for each in attempts(attempt.run)
                    if each.number < attempt.number
                ],
            )
            if rank == 0
            else None
        )
        self.poll = Poll(device)
        self.start_step = self.position.step
        self.accuracy = self.loss = math.nan
        """Over the whole test set, when it was last evaluated."""
        self._saved = self.position.step if agreed.resume else -1
        self._random_states: Tensor | None = None  # of all ranks, when that was
        self._evaluated = -1  # the step at which it was last done
        self._saved_at = self._began = time.monotonic()

    def run(self) -> str:
        """Train until the last epoch or `max_steps`, then evaluate; save in any case.

        Returns the reason for which the ranks have stopped before that, empty when they have not.
        Raises TrainingError when the loss is not finite, CheckpointError when the end of a
        training cannot be written.
        """
        position = self.position
        self.progress.mark(position.step, Phase.START)
        if self.world_size > 1:
            self._settle_buckets()
        self.tally.restart()
        reason = self._ask()  # a request may have come during the imports
        while not reason and position.epoch < self.config.epochs and position.step < self.last_step:
            reason = self._epoch()
            if not reason and position.samples >= len(self.train_set):
                position.next_epoch()
                self._pause("epoch", position.epoch)
        self._log()
        if not reason:
            self._evaluate()
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
        for images, labels in self.train_set.batches(order, self.agreed.batch_size):
            self.step.set_lr(self.schedule.lr(position))
            self._train(self._augment(images), labels)
            position.advance(len(labels) * self.world_size)
            self.journal.step()
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

    def _settle_buckets(self) -> None:
        """Have DDP arrange its buckets before the first step rather than after it.

        It does so once, in the order in which the first backward pass yields gradients; sums over
        four ranks and more can depend on the arrangement. So a run that goes on from a checkpoint
        would do its first step with other sums than a run in one piece. (torch's Reducer,
        `rebuild_buckets`; in evaluation mode no statistics and no random numbers are touched.)
        """
        self.model.eval()
        [(images, labels)] = self.train_set.batches(torch.zeros(1, dtype=torch.int64), 1)
        with self.step.autocast():
            loss = cross_entropy(self.ddp(as_images(images)).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()
        self.model.train()

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
            self.deadline.check_lead(self._lead_seconds(), self.journal.say)
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
            if self.best and self.best.step == self.position.step:
                self._save()  # the best one is kept
        if self.saving.due(unit, count):
            self._log()
            self._save()

    def _log(self) -> None:
        if not self.tally.steps:
            return
        self.progress.mark(self.position.step, Phase.LOG)
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
        self.accuracy, self.loss = self._test()
        speed = len(self.test_set) / (time.perf_counter() - began)
        rate = self.schedule.lr(self.position)
        self.journal.evaluation(self.position, Figures(self.loss, self.accuracy, rate, speed))
        self._evaluated = self.position.step
        if self.best is None or self.accuracy > self.best.accuracy:
            self.best = Best(self.accuracy, self.position.step)
        self.tally.restart()

    def _test(self) -> tuple[float, float]:
        """Accuracy and mean loss over the whole test set, every image counted once.

        Takes the bare module: shares may differ in length, and DDP's forward would wait for ranks
        that have no batch left.
        """
        step = self.position.step
        for buffer in self.model.buffers():  # of rank 0, as saved; DDP does so before each forward
            dist.broadcast(buffer, src=0)
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.model.eval()
        with torch.no_grad():
            share = evaluation_order(len(self.test_set), self.rank, self.world_size)
            for images, labels in self.test_set.batches(share, _EVALUATION_BATCH):
                self.progress.mark(step, Phase.EVALUATE)
                with self.step.autocast():
                    scores = self.model(as_images(images))
                totals[0] += cross_entropy(scores.float(), labels, reduction="sum")
                totals[1] += (scores.argmax(1) == labels).sum()
                totals[2] += len(labels)
        self.model.train()
        self.progress.mark(step, Phase.COUNT)
        dist.all_reduce(totals)
        loss_sum, correct, count = totals.tolist()
        assert count == len(self.test_set), f"{count} of {len(self.test_set)} images were counted"
        return correct / count, loss_sum / count

    def _save(self) -> None:
        """Rank 0 copies the state and has it written behind the training's back."""
        if self._saved == self.position.step:
            return
        self.progress.mark(self.position.step, Phase.SAVE)
        began = time.perf_counter()
        self._random_states = checkpoint.gather_random_states(self.device)
        if self.saver:
            content = self._content()
            self.saver.save(content, time.perf_counter() - began)
        self._saved, self._saved_at = self.position.step, time.monotonic()
        self.tally.restart()

    def _content(self) -> dict[str, Any]:
        return checkpoint.collect(
            config=self.config,
            model=self.model,
            optimizer=self.optimizer,
            position=self.position,
            world_size=self.world_size,
            global_batch_size=self.agreed.global_batch_size,
            data_sha256=self.agreed.data_sha256,
            best=self.best,
            random_states=self._random_states,
            scaler=self.step.scaler.state_dict(),
            precision=self.agreed.precision,
        )

    def _finish_saving(self, *, must: bool) -> None:
        """Rank 0 waits until the last checkpoint is on the disk, and tries once more where it
        could not be written; at the end of a training it `must` be.
        """
        if self.saver is None or self.saver.wait() or self._saved == self.start_step:
            return
        self.saver.save(self._content(), 0.0)
        if not self.saver.wait() and must:
            raise CheckpointError(
                f"the training is done, but its last checkpoint, step {self.position.step}, could "
                f"not be written; the last whole one is of step {self.saver.last_step}. Make room "
                "and start the run again: it goes on from there."
            )

    def _restore(self, path: Path, content: dict[str, Any] | None) -> None:
        own = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        restored = checkpoint.restore(path, self.config, self.model, self.optimizer, content)
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            group.update(settings)  # this configuration's, where it was changed on purpose
        for parameter, state in self.optimizer.state.items():
            if "step" in state:  # where fused optimizers count, wherever the file's one did
                state["step"] = torch.as_tensor(state["step"]).to(parameter.device, torch.float32)
        self.position, self.best = restored.position, restored.best
        self._scaler_state = restored.scaler
        states = restored.random_states
        if states is not None and len(states) == self.world_size:
            checkpoint.set_random_state(states[self.rank], self.device)

    def _planned_steps(self) -> int:
        """For the progress bar: what is done and what is left at this world size."""
        per_epoch = math.ceil(len(self.train_set) / self.agreed.global_batch_size)
        left = (self.config.epochs - self.position.epoch) * per_epoch - self.position.step_in_epoch
        return min(self.last_step, self.position.step + max(left, 0))
