"""Built-in training of one rank: its batches, metrics and evaluations, on top of Resumable.

An evaluation counts every image once at any number of ranks: nothing is padded.
"""

import base64
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from clusterddp import log
from clusterddp.checkpoints.catalog import Best
from clusterddp.checkpoints.state import Content, Position
from clusterddp.checkpoints.writer import Saver
from clusterddp.data.loader import (
    Images,
    Loader,
    as_images,
    evaluation_order,
    generators_kept,
    training_order,
)
from clusterddp.distributed import agreement
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.errors import TrainingError, coded
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import Interval, TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import (
    Agreement,
    EvaluationRecord,
    MetricsLine,
    RankReport,
    RateSpread,
    WorstImage,
)
from clusterddp.training import replay
from clusterddp.training.learner import Learner, poor_statistics
from clusterddp.training.metrics import Journal
from clusterddp.training.paces import StepTimer, Throughputs, of_ranks
from clusterddp.training.profiling import Profiler
from clusterddp.training.resumable import SAVE, CheckpointExit, Resumable
from clusterddp.training.step import Schedule
from clusterddp.training.stop import Deadline, StopRequest

# Batch size of an evaluation; it changes speed and memory, not the result.
BATCH = 1000
_WORST = 24
_LOG_STEPS = 100


def train(training: "Training") -> str:
    """Train until the last epoch or `max_steps`, evaluate, and save.

    Returns the reason of an early stop, empty without one. Raises TrainingError if the loss is not
    finite, CheckpointError if the final state cannot be written. Always releases the step, so that
    the process group can be destroyed.
    """
    reason = ""
    try:
        training.run()
    except CheckpointExit as left:
        reason = left.reason
    finally:
        training.learner.close()
    training.journal.close()
    return reason


@dataclass(frozen=True)
class Result:
    """Result of an evaluation, the same on every rank."""

    accuracy: float
    loss: float
    """Mean over all images."""
    confusion: Tensor
    """Confusion matrix, (classes, classes) counts: one row per label, one column per prediction."""
    worst: tuple[WorstImage, ...] = ()
    """Images with the highest loss, in descending order, without their pixels."""

    def record(self, step: int, test_set: Images | Loader) -> EvaluationRecord:
        """Return the record of this result, including the pixels of the worst images."""
        order = torch.tensor([image.index for image in self.worst], dtype=torch.int64)
        shown = [image for batch, _ in test_set.batches(order, BATCH) for image in batch.cpu()]
        return EvaluationRecord(
            step,
            tuple(map(tuple, self.confusion.tolist())),
            tuple(_with_pixels(*each) for each in zip(self.worst, shown, strict=True)),
        )


class Training(Resumable):
    """One rank's training, from scratch or from a checkpoint; needs a process group."""

    result = Result(math.nan, math.nan, torch.zeros(0, 0))
    """Latest evaluation of the whole test set; NaN before the first."""
    capture_seconds = 0.0
    """Seconds of the preparation before the first step: a pass without an update, or a capture."""
    _logged_paces = Throughputs()
    """Throughputs up to the latest line of metrics."""
    _evaluated = -1
    """Step of the latest evaluation."""
    _line_step = -math.inf
    """Step at which a line of metrics was last due."""

    def __init__(
        self,
        config: TrainConfig,
        agreed: Agreement,
        device: torch.device,
        train_set: Images | Loader,
        test_set: Images | Loader,
        attempt: Attempt,
        request: StopRequest,
        *,
        deadline: Deadline | None = None,
        progress: Progress | None = None,
        resume_content: Content | None = None,
    ) -> None:
        """request: this rank's. deadline: the job's, on rank 0. resume_content: a checkpoint's."""
        self.config, self.agreed, self.device = config, agreed, device
        self.train_set, self.test_set = train_set, test_set
        rank, _ = agreement.rank_and_world_size()
        content = resume_content
        self.learner = Learner(
            config, agreed, rank=rank, device=device, mark=self._mark, resume_content=content
        )
        self.model = self.learner.model
        position = Position.of(content) if content else Position()
        super().__init__(
            attempt,
            self.learner.states,
            position,
            save_every=config.save_every,
            snapshot_every=config.snapshot_every,
            keep_last=config.keep_last,
            is_resumed=bool(agreed.resume),
            request=request,
            deadline=deadline or Deadline(),
            straggler_window=config.straggler_window,
            timer=StepTimer(self.learner.waiting, position.step),
            progress=progress,
        )
        if content and content["world_size"] == agreed.world_size:
            self._random = replay.unpack(content["random_states"], rank)  # `epochs` restores it
        if content and content["best"]:
            self._best = Best(**content["best"])
        self.last_step = config.max_steps or sys.maxsize
        self.schedule = Schedule(config, agreed.reference_world_size, len(train_set))
        self.journal = Journal(config, attempt, rank, position, self._planned())
        is_profiled = config.profile and int(config.profile) == rank
        self.profiler = Profiler(attempt.path / "profile", rank, device) if is_profiled else None
        self.ranks: list[RankReport] = []
        """Host, memory and throughput of each rank, at the end."""
        self.loads_kernels = device.type == "cuda"
        """True if the first pass loads GPU kernels, which depend on the batch size."""
        self._logged = replace(position)  # position of the latest line of metrics
        self._evaluating = Interval.parse(config.eval_every)
        poor = poor_statistics(self.model, config, agreed)
        if poor and rank == 0:
            log.warning(coded(poor, "CD0824"))
        self.warnings = [*agreed.warnings, *([poor] if poor else [])]
        """Warnings for the user, also in the report."""

    note_end, spent = Resumable._note_end, Resumable._spent
    sign_of_life = Resumable._sign_of_life

    @property
    def _replicas(self) -> Sequence[DistributedDataParallel]:
        ddp = self.learner.ddp
        return [ddp] if isinstance(ddp, DistributedDataParallel) else []

    @property
    def position(self) -> Position:
        """Progress of the run."""
        return self._position

    @property
    def saver(self) -> Saver | None:
        """Writer of the checkpoints, on rank 0."""
        return self._saver

    @property
    def has_trained(self) -> bool:
        """True if this attempt has done a step."""
        return self.steps > self._start_step

    @property
    def is_unfinished(self) -> bool:
        """True if steps remain."""
        return self.epoch < self.config.epochs and self.steps < self.last_step

    def run(self) -> None:
        """Run the remaining epochs, then evaluate and save; see `train`."""
        self.prepare()
        self._save_or_exit(*self._agree())  # a request may have arrived during the imports
        for epoch in self.epochs(self.config.epochs):
            if self.steps >= self.last_step:
                break
            for images, labels in self.batches(self._left()):
                self.learner.step.set_lr(self.schedule.lr(self.position))
                self.learner.learn(images, labels)
                self._count(len(labels))
                self.step()
                if self.steps >= self.last_step:
                    break
            if self.position.samples < len(self.train_set):
                break
            if self._is_best_due("epoch", epoch + 1):
                self._postponed = ("", SAVE)  # save at the start of the next epoch
        self.finish()

    def finish(self) -> None:
        """Evaluate and save the final state."""
        self._end_profile()
        self._log()
        self.evaluate()
        self.ranks = of_ranks(self._paces, self.device)
        super().finish()

    def _end_profile(self) -> None:
        if self.profiler:
            self.profiler.close()

    def leave(self, reason: str) -> NoReturn:
        """Save and raise CheckpointExit."""
        self._end_profile()
        self._log()
        super().leave(reason)

    def prepare(self) -> None:
        """Settle DDP's buckets, load GPU kernels, capture the step; then start the clock.

        A single GPU with a user model loads its kernels in the first step.
        """
        learner, agreed = self.learner, self.agreed
        # A single rank needs this pass only for GPU kernels, and a user model may not support it:
        # cuDNN's recurrent layers have no backward pass in eval mode.
        alone_for_kernels = self.loads_kernels and not is_reference(self.config.model)
        settles = agreed.world_size > 1 or (alone_for_kernels and not agreed.cuda_graph)
        self._progress.mark(self.steps, Phase.START)
        began = time.perf_counter()
        if self.is_unfinished and (settles or agreed.cuda_graph):
            share = math.ceil(len(self.train_set) / agreed.world_size)
            whole = self.loads_kernels or agreed.cuda_graph
            count = min(agreed.batch_size, share) if whole else 1
            with generators_kept(self.device):
                [(images, labels)] = self.train_set.batches(torch.arange(count), count)
                if settles:
                    # A GPU needs the images of a whole pass: its kernels depend on the size.
                    some = (
                        -(-count // self.config.gradient_accumulation_steps)
                        if self.loads_kernels
                        else 1
                    )
                    learner.settle(images[:some], labels[:some])
                learner.capture(images, labels)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            if learner.warning:
                self.warnings.append(learner.warning)
        self.capture_seconds = time.perf_counter() - began
        self._first_step = time.time()

    def _left(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this rank's untrained batches of the epoch."""
        position = self.position
        order = training_order(
            len(self.train_set),
            seed=self.config.seed,
            epoch=position.epoch,
            rank=self.rank,
            world_size=self.world_size,
            seen=position.samples,
        )
        salt = self.config.seed + position.epoch
        return self.train_set.batches(order, self.agreed.batch_size, salt)

    def _asks(self, step: int) -> bool:
        return step < self.last_step and super()._asks(step)

    def _mark(self, phase: Phase) -> None:
        if phase != Phase.USER_CODE:  # no user code runs here
            super()._mark(phase)

    def _stepped(self, metrics: Mapping[str, Any]) -> bool:
        self.journal.step()
        if self.profiler:
            self.profiler.step()
        if self._is_line_due():
            self._line_step = self.steps
            self._log()
        return self._is_best_due("step", self.steps)

    def _is_line_due(self) -> bool:
        """Return whether a line of metrics is due after this step, the same on every rank.

        The default is every hundred steps, and at most every half second. The interval follows the
        agreed pace, not a clock, because a line is collective.
        """
        step, every = self.steps, self.config.log_every
        paced = step % _LOG_STEPS == 0 and step - self._line_step >= self._poll.pace
        return step % every == 0 if every else paced

    def _is_best_due(self, unit: str, count: int) -> bool:
        """Evaluate if due; return whether this is the best result so far, whose step is saved."""
        if self._evaluating.due(unit, count):
            self._log()
            self.evaluate()
            return self._best is not None and self._best.step == self.steps
        return False

    def _flush(self) -> None:
        self._log()

    def _entries(self) -> Mapping[str, object]:
        agreed = self.agreed
        return {
            "config": asdict(self.config),
            "precision": agreed.precision,
            "global_batch_size": agreed.global_batch_size,
            "data_sha256": agreed.data_sha256,
        }

    def _planned(self) -> int:
        """Return the last step at this world size, from any thread."""
        per_epoch = math.ceil(len(self.train_set) / self.agreed.global_batch_size)
        left = (self.config.epochs - self.epoch) * per_epoch - self.position.step_in_epoch
        return min(self.last_step, self.steps + max(left, 0))

    def _log(self) -> None:
        """Log loss, accuracy and throughput of all ranks since the last line."""
        tally, position = self.learner.tally, self.position
        if not tally.steps:
            return
        self._progress.mark(self.steps, Phase.LOG)
        self._stop_clock(exact=True)
        self._account()
        since, self._logged = self._logged, replace(position)
        paces, self._logged_paces = self._paces - self._logged_paces, self._paces
        loss, accuracy = tally.collect()
        speed = (position.images - since.images) / max(position.seconds - since.seconds, 1e-9)
        rates = [round(rate, 1) for rate in paces.images_per_second]
        self._record("train", loss, accuracy, speed, rates)

    def _record(
        self, kind: str, loss: float, accuracy: float, speed: float, rates: Sequence[float] = ()
    ) -> None:
        """Add a line of metrics; speed: images/s of all ranks; rates: images/s of each rank.

        Raises the same TrainingError on every rank if the mean loss is not finite.
        """
        position, rate = self.position, self.schedule.lr(self.position)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the {'training' if kind == 'train' else 'test'} loss is {loss} at step "
                f"{position.step}: the training has diverged. "
                f"Lower --lr (now {self.config.lr:g}) or raise --warmup-steps. [CD0810]"
            )
        seconds, now = round(position.seconds, 3), round(time.time(), 3)
        step, epoch = position.step, position.epoch_shown
        spread = RateSpread.of(rates)
        each = () if spread else tuple(rates)
        self.journal.add(
            MetricsLine(kind, step, epoch, loss, accuracy, rate, speed, each, spread, seconds, now)
        )

    def evaluate(self) -> None:
        """Evaluate the test set over all ranks, at most once per step."""
        step = self.steps
        if self._evaluated == step:
            return
        began = time.perf_counter()
        self.result = evaluate(
            self.model,
            self.test_set,
            self.device,
            self.learner.step.autocast,
            lambda phase: self._progress.mark(step, phase),
        )
        accuracy, speed = self.result.accuracy, len(self.test_set) / (time.perf_counter() - began)
        self._record("eval", self.result.loss, accuracy, speed)
        self._evaluated = step
        if self._best is None or accuracy > self._best.accuracy:
            self._best = Best(accuracy, step)


def evaluate(
    model: nn.Module,
    test_set: Images | Loader,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[None]],
    mark: Callable[[Phase], None] = lambda _: None,
) -> Result:
    """Evaluate the bare module on all ranks; collective over the default process group.

    Ranks may have different numbers of batches, for which DDP's forward would wait.
    mark: called with each phase as it starts.
    """
    for buffer in model.buffers():  # each rank has its own; a checkpoint holds rank 0's
        dist.broadcast(buffer, src=0)
    share = evaluation_order(len(test_set), dist.get_rank(), dist.get_world_size())
    no_label = torch.zeros(0, dtype=torch.int64, device=device)
    batches = [(no_label, no_label, torch.zeros(0, device=device))]  # for a rank without images
    classes = torch.zeros((), dtype=torch.int64, device=device)
    model.eval()
    # The generators are restored afterwards, so that evaluation does not change the training.
    with generators_kept(device), torch.no_grad():
        for images, labels in test_set.batches(share, BATCH):
            mark(Phase.EVALUATE)
            with autocast():
                scores = model(as_images(images))
            losses = cross_entropy(scores.float(), labels, reduction="none")
            batches.append((labels, scores.argmax(1), losses))
            classes.fill_(scores.shape[1])
    model.train()
    mark(Phase.COUNT)
    dist.all_reduce(classes, dist.ReduceOp.MAX)
    return _joined(batches, share, int(classes), len(test_set))


def _joined(
    batches: list[tuple[Tensor, Tensor, Tensor]], share: Tensor, classes: int, count: int
) -> Result:
    labels, predicted, losses = (torch.cat(parts) for parts in zip(*batches, strict=True))
    confusion = torch.bincount(labels * classes + predicted, minlength=classes * classes).double()
    totals = torch.cat([confusion, losses.double().sum().view(1)])
    dist.all_reduce(totals)
    confusion, loss_sum = totals[:-1].view(classes, classes), float(totals[-1])
    counted = int(confusion.sum())
    assert counted == count, f"{counted} of {count} images were counted"
    highest = losses.topk(min(_WORST, len(losses))).indices
    own_rows = torch.full((_WORST, 4), -1.0, dtype=torch.float64, device=labels.device)
    own_rows[: len(highest)] = torch.stack(
        [part[highest].double() for part in (share.to(labels.device), labels, predicted, losses)], 1
    )
    gathered = [torch.empty_like(own_rows) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own_rows)
    rows = [row for row in torch.cat(gathered).tolist() if row[0] >= 0]
    rows.sort(key=lambda row: (-row[3], row[0]))
    return Result(
        accuracy=float(confusion.diagonal().sum()) / count,
        loss=loss_sum / count,
        confusion=confusion.long().cpu(),
        worst=tuple(
            WorstImage(int(index), int(label), int(taken), loss)
            for index, label, taken, loss in rows[:_WORST]
        ),
    )


def _with_pixels(worst: WorstImage, image: Tensor) -> WorstImage:
    """Add one channel of the image as bytes; other types are scaled to 0 to 255.

    A one-dimensional image becomes a row of pixels.
    """
    image = image.view(1, -1) if image.dim() < 2 else image
    plane = image if image.dim() == 2 else image.reshape(-1, *image.shape[-2:])[0]
    if plane.dtype is not torch.uint8:
        plane = plane.float() - plane.min()
        plane = (plane * (255 / max(float(plane.max()), 1e-9))).to(torch.uint8)
    pixels = base64.b64encode(plane.contiguous().numpy().tobytes()).decode()
    return replace(worst, shape=tuple(plane.shape), pixels=pixels)
