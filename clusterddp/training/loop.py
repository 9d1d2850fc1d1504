"""The training loop of one rank: the same on every rank, with rank 0's extra work named as such."""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from clusterddp import log
from clusterddp.checkpoints import state
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.state import Content, States
from clusterddp.checkpoints.writer import Costs, Saver
from clusterddp.data.loader import Images, Loaded, generators_kept, training_order
from clusterddp.distributed.agreement import Poll
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.errors import CheckpointError, TrainingError, coded
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import Interval, TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import Agreement, MetricsLine, RankReport, Spent
from clusterddp.training import evaluation
from clusterddp.training.learner import Learner, poor_statistics
from clusterddp.training.metrics import Journal, Paces, of_ranks
from clusterddp.training.profiling import Profiler
from clusterddp.training.step import Schedule
from clusterddp.training.stop import REASONS, Deadline, StopRequest
from clusterddp.training.stragglers import Stragglers

# Until then an attempt has saved once, so that it knows what that costs.
_FIRST_SAVE_SECONDS = 40.0
_LOG_STEPS = 100


def train(training: "Training") -> str:
    """Train until the last epoch or `max_steps`, then evaluate; save in any case.

    Returns the reason for which the ranks have stopped before that, empty when they have not.
    Raises TrainingError when the loss is not finite, CheckpointError when the end of a training
    cannot be written. In any case the step is released: the process group can be left.
    """
    try:
        return _train(training)
    finally:
        training.learner.close()


def _train(training: "Training") -> str:
    learner, position = training.learner, training.position
    training.prepare()
    reason = training.agree()  # a request may have come during the imports
    while not reason and training.is_unfinished:
        for images, labels in training.rest_of_epoch():
            learner.step.set_lr(training.schedule.lr(position))
            learner.learn(images, labels)
            training.journal.step()
            if training.profiler:
                training.profiler.step()
            training.log_if_due()
            training.evaluate_and_save_if_due("step", position.step)
            if position.step >= training.last_step:
                break
            if training.poll.due(position.step) and (reason := training.agree()):
                break
            training.progress.mark(position.step + 1, Phase.DATA)
        if not reason and position.samples >= len(training.train_set):
            position.next_epoch()
            training.evaluate_and_save_if_due("epoch", position.epoch)
    if training.profiler:
        training.profiler.close()
    training.log()
    if not reason:
        training.evaluate()
        training.ranks = of_ranks(training.paces, training.device)
    training.checkpoints.save()
    training.checkpoints.finish(must=not reason)
    training.progress.mark(position.step, Phase.DONE)
    training.journal.close()
    return reason


@dataclass(eq=False)
class Training:
    """One rank's training, from the start or from a checkpoint; needs a process group."""

    config: TrainConfig
    agreed: Agreement
    rank: int
    device: torch.device
    train_set: Images | Loaded
    test_set: Images | Loaded
    attempt: Attempt
    request: StopRequest
    """This rank's; any rank's stops all of them."""
    deadline: Deadline = field(default_factory=Deadline)
    """The end of the job's time, on rank 0."""
    progress: Progress = field(default_factory=Progress)
    resume_content: InitVar[Content | None] = None
    """Content of the checkpoint to resume from; None without one."""

    def __post_init__(self, resume_content: Content | None) -> None:
        config, agreed, attempt, rank = self.config, self.agreed, self.attempt, self.rank
        self.learner = Learner(
            config,
            agreed,
            rank=rank,
            device=self.device,
            mark=lambda phase: self.progress.mark(self.position.step + 1, phase),
            resume_content=resume_content,
        )
        self.model, self.position = self.learner.model, self.learner.position
        self.last_step = config.max_steps or sys.maxsize
        self.schedule = Schedule(config, agreed.reference_world_size, len(self.train_set))
        self.poll = Poll(self.device)
        self.journal = Journal(config, attempt, rank, self.position, self.planned_steps())
        self.profiler = None
        if config.profile and int(config.profile) == rank:
            self.profiler = Profiler(attempt.path / "profile", rank, self.device)
        self.checkpoints = Checkpoints(self.learner, attempt, rank, self.progress)
        self.paces = Paces()
        self.stragglers = Stragglers(attempt, rank, config.straggler_seconds)
        self._trained, self._waited = 0.0, 0.0  # seconds of this attempt; NaN where unknown
        self._first_step: float | None = None
        self.ranks: list[RankReport] = []
        """Host, memory and throughput of each rank, once all is done."""
        self.result = evaluation.Result(math.nan, math.nan, torch.zeros(0, 0))
        """The latest evaluation of the whole test set; NaN before."""
        self.loads_kernels = self.device.type == "cuda"
        """True where the first pass has a GPU load its kernels, which are chosen by its size."""
        self.capture_seconds = 0.0
        """Seconds before the first step: a pass without an update, or the capture."""
        self._evaluated = -1  # the step of that evaluation
        self._line_step = -math.inf  # of the last line that was due
        self._saving = Interval.parse(config.save_every)
        self._evaluating = Interval.parse(config.eval_every)
        self.warnings = list(agreed.warnings)
        """Warnings for the user, also in the report."""
        if poor := poor_statistics(self.model, config, agreed):
            self.warnings.append(poor)
            if rank == 0:
                log.warning(coded(poor, "CD0824"))

    @property
    def is_unfinished(self) -> bool:
        """True while there are steps to be done."""
        return self.position.epoch < self.config.epochs and self.position.step < self.last_step

    def prepare(self) -> None:
        """Settle DDP's buckets, load a GPU's kernels, capture the step; then begin to measure.

        A GPU that trains a model of one's own by itself loads its kernels in the first step.
        """
        learner, agreed = self.learner, self.agreed
        # Alone it is for a GPU's kernels only, and a model of one's own may not take it: cuDNN's
        # recurrent layers do no backward pass in eval mode.
        alone_for_kernels = self.loads_kernels and not is_reference(self.config.model)
        settles = agreed.world_size > 1 or (alone_for_kernels and not agreed.cuda_graph)
        self.progress.mark(self.position.step, Phase.START)
        began = time.perf_counter()
        if self.is_unfinished and (settles or agreed.cuda_graph):
            share = math.ceil(len(self.train_set) / agreed.world_size)
            whole = self.loads_kernels or agreed.cuda_graph
            count = min(agreed.batch_size, share) if whole else 1
            with generators_kept(self.device):
                [(images, labels)] = self.train_set.batches(torch.arange(count), count)
                if settles:
                    # Of a GPU as many images as a pass has, for its kernels are chosen by that.
                    some = -(-count // self.config.accumulate) if self.loads_kernels else 1
                    learner.settle(images[:some], labels[:some])
                learner.capture(images, labels)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if learner.warning:
                self.warnings.append(learner.warning)
        self.capture_seconds = time.perf_counter() - began
        self._first_step = time.time()
        learner.tally.lap()

    def rest_of_epoch(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches of the epoch, without what is trained already."""
        position = self.position
        self.progress.mark(position.step + 1, Phase.DATA)
        order = training_order(
            len(self.train_set),
            seed=self.config.seed,
            epoch=position.epoch,
            rank=self.rank,
            world_size=self.agreed.world_size,
            seen=position.samples,
        )
        salt = self.config.seed + position.epoch
        return self.train_set.batches(order, self.agreed.batch_size, salt)

    def log_if_due(self) -> None:
        """Log where a line of metrics is due after this step, the same on every rank.

        By default after a hundred steps, or the next hundred after half a second: by the pace that
        the ranks have agreed on, never by a clock, as they write a line together.
        """
        step, every = self.position.step, self.config.log_every
        paced = step % _LOG_STEPS == 0 and step - self._line_step >= self.poll.pace
        if step % every == 0 if every else paced:
            self._line_step = step
            self.log()

    def agree(self) -> str:
        """Agree with all ranks whether to stop, and why; save where it is time."""
        self.request.looked_at = True
        if self.deadline.is_near(self._lead_seconds()):
            self.request.note("time limit")
        due = self.rank == 0 and self.checkpoints.is_due(self._saving.seconds)
        reason = REASONS.index(self.request.reason)
        code, save = self.poll.ask(self.position.step, [reason, int(due)])
        if save and not code:
            self.log()
            self.checkpoints.save()
        if self.checkpoints.costs.saves:
            self.deadline.check_lead(self._lead_seconds())
        return REASONS[code]

    def spent(self) -> Spent:
        """Sum up what this attempt's time has gone into, from any thread of rank 0.

        Steps since the last line of metrics count as those before them.
        """
        trained, waited = self._trained, self._waited
        part = min(max(waited / trained, 0.0), 1.0) if trained else 0.0
        if Phase.DATA <= self.progress.place.phase <= Phase.UPDATE:
            trained += self.learner.tally.elapsed
        costs = self.checkpoints.costs
        return Spent(
            self._first_step and round(self._first_step, 3),
            round(trained, 3),
            None if math.isnan(part) else round(part * trained, 3),
            round(costs.copy_seconds + costs.blocked_seconds, 3),
        )

    def _lead_seconds(self) -> float:
        """Seconds from a request to stop to the last byte on the disk, judged by those before."""
        return 2 * self.poll.step_seconds + 1.0 + 2 * self.checkpoints.costs.longest_seconds

    def evaluate_and_save_if_due(self, unit: str, count: int) -> None:
        """Evaluate and save where an interval is over; the time it takes is no training time."""
        if self._evaluating.due(unit, count):
            self.log()
            self.evaluate()
            if self.learner.best and self.learner.best.step == self.position.step:
                self.checkpoints.save()  # the best one is kept
        if self._saving.due(unit, count):
            self.log()
            self.checkpoints.save()

    def log(self) -> None:
        """Log loss, accuracy and throughput of all ranks since the last such line."""
        tally, position = self.learner.tally, self.position
        if not tally.steps:
            return
        self.progress.mark(position.step, Phase.LOG)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        steps = tally.steps
        loss, accuracy, paces = tally.collect(self.learner.waiting.take())
        seconds = tally.lap()
        position.seconds += seconds
        self._trained += seconds
        self._waited += seconds - fmean(paces.seconds)
        self.paces += paces
        self.stragglers.add(
            paces, steps=steps, seconds=seconds, step=position.step, now=time.time()
        )
        rates = tuple(round(rate, 1) for rate in paces.images_per_second)
        self._record("train", loss, accuracy, sum(paces.images) / seconds, rates)

    def _record(
        self, kind: str, loss: float, accuracy: float, speed: float, rates: tuple[float, ...] = ()
    ) -> None:
        """Add a line of metrics; speed: images/s of all ranks, rates: of each by itself.

        Raises the same TrainingError on every rank where the loss, that of all, is not finite.
        """
        position, rate = self.position, self.schedule.lr(self.position)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the {'training' if kind == 'train' else 'test'} loss is {loss} by step "
                f"{position.step}: the weights are lost. "
                f"Lower --lr (now {self.config.lr:g}) or raise --warmup-steps. [CD0810]"
            )
        seconds, now = round(position.seconds, 3), round(time.time(), 3)
        step, epoch = position.step, position.epoch_shown
        self.journal.add(
            MetricsLine(kind, step, epoch, loss, accuracy, rate, speed, rates, seconds, now)
        )

    def evaluate(self) -> None:
        """Evaluate the test set over all ranks, once a step at most."""
        step = self.position.step
        if self._evaluated == step:
            return
        began = time.perf_counter()
        self.result = evaluation.evaluate(
            self.model,
            self.test_set,
            self.device,
            self.learner.step.autocast,
            lambda phase: self.progress.mark(step, phase),
        )
        accuracy, speed = self.result.accuracy, len(self.test_set) / (time.perf_counter() - began)
        self._record("eval", self.result.loss, accuracy, speed)
        self._evaluated = step
        if self.learner.best is None or accuracy > self.learner.best.accuracy:
            self.learner.best = Best(accuracy, step)
        self.learner.tally.lap()

    def planned_steps(self) -> int:
        """Return the steps done and left at this world size, from any thread."""
        per_epoch = math.ceil(len(self.train_set) / self.agreed.global_batch_size)
        left = (self.config.epochs - self.position.epoch) * per_epoch - self.position.step_in_epoch
        return min(self.last_step, self.position.step + max(left, 0))


class Checkpoints:
    """Saves the state of all ranks: rank 0 copies it, and has it written beside the training."""

    def __init__(self, learner: Learner, attempt: Attempt, rank: int, progress: Progress) -> None:
        self.saver = Saver(attempt, learner.config.keep_last) if rank == 0 else None
        self.costs = self.saver.costs if self.saver else Costs()
        self._learner, self._progress = learner, progress
        self.start_step = learner.position.step
        self._saved = self.start_step if learner.agreed.resume else -1
        self._random_states: States | None = None  # of all ranks, when that was
        self._saved_at = self._began = time.monotonic()

    def is_due(self, seconds: float) -> bool:
        """Return whether the latest save is that long ago, or the first one is overdue."""
        now = time.monotonic()
        first = self._saved_at == self._began and now - self._began > _FIRST_SAVE_SECONDS
        return first or now - self._saved_at >= seconds

    def save(self) -> None:
        """Save, once a step at most. Collective over the default process group."""
        learner, step = self._learner, self._learner.position.step
        if self._saved == step:
            return
        self._progress.mark(step, Phase.SAVE)
        began = time.perf_counter()
        self._random_states = state.gather_random_states(learner.device)
        if self.saver:
            content = learner.collect(self._random_states)
            self.saver.save(content, time.perf_counter() - began)
        self._saved, self._saved_at = step, time.monotonic()
        learner.tally.lap()

    def finish(self, *, must: bool) -> None:
        """Wait on rank 0 for the last checkpoint, and try once more if it could not be written.

        must: raise CheckpointError if it fails again, as at the end of a training.
        """
        if self.saver is None or self.saver.wait() or self._saved == self.start_step:
            return
        self.saver.save(self._learner.collect(self._random_states), 0.0)
        if not self.saver.wait() and must:
            raise CheckpointError(
                "the training is done, but its last checkpoint, step "
                f"{self._learner.position.step}, could not be written; the last whole one is of "
                f"step {self.saver.last_step}. Make room and start the run again: it resumes "
                "there. [CD0706]"
            )
