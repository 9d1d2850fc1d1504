"""The training loop of one rank: the same on every rank, with rank 0's extra work named as such."""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import InitVar, asdict, dataclass, field

import torch
from torch import Tensor

from clusterddp import log
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.state import Content
from clusterddp.data.loader import Images, Loaded, generators_kept, training_order
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.errors import TrainingError, coded
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import Interval, TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import Agreement, MetricsLine, RankReport
from clusterddp.training import evaluation, replay
from clusterddp.training.learner import Learner, poor_statistics
from clusterddp.training.metrics import Journal
from clusterddp.training.paces import of_ranks
from clusterddp.training.profiling import Profiler
from clusterddp.training.resumable import Resumable
from clusterddp.training.step import Schedule
from clusterddp.training.stop import Deadline, StopRequest

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
            if training.core.poll.due(position.step) and (reason := training.agree()):
                break
            training.progress.mark(position.step + 1, Phase.DATA)
        if not reason and position.samples >= len(training.train_set):
            position.next_epoch()
            training.evaluate_and_save_if_due("epoch", position.epoch)
    if training.profiler:
        training.profiler.close()
    training.log()
    if reason:
        training.core.stop()
    else:
        training.evaluate()
        training.ranks = of_ranks(training.core.paces, training.device)
        training.core.finish()
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
        self.journal = Journal(config, attempt, rank, self.position, self.planned_steps())
        self.profiler = None
        if config.profile and int(config.profile) == rank:
            self.profiler = Profiler(attempt.path / "profile", rank, self.device)
        self._start_seconds = self.position.seconds
        self.core = Resumable(
            attempt,
            self.learner.states,
            self.position,
            save_every=config.save_every,
            keep_last=config.keep_last,
            is_resumed=bool(agreed.resume),
            request=self.request,
            deadline=self.deadline,
            straggler_seconds=config.straggler_seconds,
            progress=self.progress,
            random_state=lambda: replay.random_state(()),
            more=self._kept,
            trained=self._trained,
            planned=self.planned_steps,
        )
        if resume_content and resume_content["best"]:
            self.core.best = Best(**resume_content["best"])
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
        self.core.first_step = time.time()
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
        paced = step % _LOG_STEPS == 0 and step - self._line_step >= self.core.poll.pace
        if step % every == 0 if every else paced:
            self._line_step = step
            self.log()

    def agree(self) -> str:
        """Agree with all ranks whether to stop, and why; save where it is time."""
        if self.device.type == "cuda":  # so that the pace is the GPU's, not that of its queue
            torch.cuda.synchronize(self.device)
        reason, save = self.core.agree()
        if save and not reason:
            self.save()
        return reason

    def save(self) -> None:
        """Log what was trained until now, and save; the time it takes is no training time."""
        self.log()
        self.core.save()
        self.learner.tally.lap()

    def _kept(self) -> dict[str, object]:
        """Return what a checkpoint keeps beside the states, for those who resume from it."""
        agreed = self.agreed
        return {
            "config": asdict(self.config),
            "precision": agreed.precision,
            "global_batch_size": agreed.global_batch_size,
            "data_sha256": agreed.data_sha256,
        }

    def _trained(self) -> float:
        """Return the seconds of training in this attempt, from any thread."""
        seconds = self.position.seconds - self._start_seconds
        if Phase.DATA <= self.progress.place.phase <= Phase.UPDATE:
            seconds += self.learner.tally.elapsed
        return seconds

    def evaluate_and_save_if_due(self, unit: str, count: int) -> None:
        """Evaluate and save where an interval is over."""
        if self._evaluating.due(unit, count):
            self.log()
            self.evaluate()
            if self.core.best and self.core.best.step == self.position.step:
                self.save()  # the best one is kept
        if self.core.is_due_at(unit, count):
            self.save()

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
        self.core.account(paces, steps=steps, seconds=seconds)
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
        if self.core.best is None or accuracy > self.core.best.accuracy:
            self.core.best = Best(accuracy, step)
        self.learner.tally.lap()

    def planned_steps(self) -> int:
        """Return the steps done and left at this world size, from any thread."""
        per_epoch = math.ceil(len(self.train_set) / self.agreed.global_batch_size)
        left = (self.config.epochs - self.position.epoch) * per_epoch - self.position.step_in_epoch
        return min(self.last_step, self.position.step + max(left, 0))
