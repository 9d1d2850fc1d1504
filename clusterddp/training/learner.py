"""Learner: a model with its optimizer and its step, built and restored together.

It also holds `--augment`, which draws from the rank's random numbers.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

from clusterddp.checkpoints import state
from clusterddp.checkpoints.state import Content, Stateful
from clusterddp.data.loader import Images, Loader, as_images, generators_kept, seed_generators
from clusterddp.distributed.heartbeat import Phase
from clusterddp.errors import DataError, TrainingError
from clusterddp.models import nets
from clusterddp.request import user_functions
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training import device as devices
from clusterddp.training import step
from clusterddp.training.cuda_graph import GraphedStep, SideStream
from clusterddp.training.metrics import MetricSums
from clusterddp.training.paces import ExchangeWait
from clusterddp.training.step import Compiled, Step

_ROTATION_DEGREES = 10.0
_STRETCH = 0.1
"""Logarithm of the largest factor in width and height."""
_SHIFT_PIXELS = 2.0
# With fewer images a batch's statistics are a poor estimate of those of the data.
_SMALL_BATCH = 16


class Learner:
    """Model, optimizer and step of a rank, new or restored from a checkpoint."""

    def __init__(
        self,
        config: TrainConfig,
        agreed: Agreement,
        *,
        rank: int,
        device: torch.device,
        mark: Callable[[Phase], None],
        resume_content: Content | None = None,
    ) -> None:
        """mark: called with each phase of a step as it starts.

        resume_content: content of the checkpoint to resume from, or None.
        """
        self.config, self.agreed, self.device = config, agreed, device
        if device.type == "cpu":
            devices.keep_freed()
        seed_generators(config.seed)  # the same weights on every rank
        self.model = nets.build(config.model).to(device)
        if config.sync_batchnorm:
            self.model = step.synchronise(self.model, config.model)
        _channels_last(self.model)
        self.optimizer = step.build_optimizer(config, self.model, captured=agreed.cuda_graph)
        seed_generators(config.seed + rank)  # from here each rank draws different numbers
        if resume_content is not None:
            self._restore(resume_content)
        self.tally = MetricSums(device)
        is_seen = not (agreed.cuda_graph or config.sync_batchnorm)
        self.waiting = ExchangeWait(device, is_measurable=agreed.world_size == 1 or is_seen)
        aside = SideStream(device) if agreed.cuda_graph else None
        self._aside = aside or nullcontext
        with self._aside():
            self.ddp = step.wrap(self.model, config, agreed)
        self.step = Step(
            Compiled(self.ddp) if config.compile else self.ddp,
            self.optimizer,
            self.tally,
            device=device,
            precision=agreed.precision,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            label_smoothing=config.label_smoothing,
            mark=mark,
            exchanged=self.waiting.done,
        )
        scaler = self.step.scaler
        if scaler.is_enabled() and resume_content and resume_content["scaler"]:
            scaler.load_state_dict(resume_content["scaler"])
        self.states: dict[str, Stateful] = {
            "model": self.model, "optimizer": self.optimizer, "scaler": scaler,
        }  # fmt: skip
        """Entries of a checkpoint."""
        self._graphed: GraphedStep | None = None
        if agreed.cuda_graph:
            falls_back = config.cuda_graph == "auto" and agreed.world_size == 1
            self._graphed = GraphedStep(self.step, self.model, agreed.batch_size, aside, falls_back)
        self._train: Callable[[Tensor, Tensor], None] = self._graphed or self.step
        self._augment = AUGMENTATIONS.get(config.augment)

    def learn(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch, as `loader.as_images` takes it, and its labels (N,)."""
        with _naming_the_operation():
            self._train(self._augment(images) if self._augment else images, labels)

    @property
    def is_captured(self) -> bool:
        """True if the step is replayed as a CUDA graph, which needs a full batch."""
        return self._graphed is not None and self._graphed.is_captured

    @property
    def warning(self) -> str:
        """Why the step is not a CUDA graph as requested; empty otherwise."""
        return self._graphed.warning if self._graphed else ""

    def capture(self, images: Tensor, labels: Tensor) -> None:
        """Capture the step on a full batch if it is to be replayed, without training.

        Without this call the first full batch of `learn` is captured.
        """
        if self._graphed and len(labels) == self._graphed.size:
            with _naming_the_operation():
                images = self._augment(images) if self._augment else images
                self._graphed.prepare(images, labels)

    def close(self) -> None:
        """Release a captured step; call it before the process group is destroyed."""
        if self._graphed:
            self._graphed.close()

    def settle(self, images: Tensor, labels: Tensor) -> None:
        """Run one pass before the first step, so that all steps compute alike.

        DDP rebuilds its buckets once, in the order in which the first backward pass yields
        gradients, and sums over four or more ranks can depend on the order. Without this pass the
        first step of a resumed run would have other sums than that of an uninterrupted one
        (torch's Reducer, `rebuild_buckets`). The pass also shows which gradient comes last, and
        loads GPU kernels of both directions, but not those of the optimizer, of training mode or
        of torch.compile.
        """
        self.model.eval()  # changes no statistics and draws no random numbers
        several = self.agreed.world_size > 1
        waits = several and not self.agreed.cuda_graph
        learning = self.waiting.learn(self.model) if waits else nullcontext()
        with _naming_the_operation(), learning, self._aside():
            with self.step.autocast():
                loss = cross_entropy(self.ddp(as_images(images)).float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        if several:
            nets.check_gradients(self.config.model, self.model)
        self.optimizer.zero_grad()
        self.model.train()

    def _restore(self, content: Content) -> None:
        """Restore a checkpoint except fp16's scaler, which belongs to the step."""
        with step.settings_kept(self.optimizer):
            states: dict[str, Stateful] = {"model": self.model, "optimizer": self.optimizer}
            state.restore(Path(self.agreed.resume), states, content)


def check_fit(
    config: TrainConfig, model: nn.Module, train_set: Images | Loader, test_set: Images | Loader
) -> None:
    """Check that model and data fit: try one image, compare labels with the model's classes.

    Changes neither random numbers nor the model's statistics. Raises TrainingError for a model
    that does not accept the images or return scores, DataError for labels outside its classes.
    """
    what = f"--model {config.model} with --dataset {config.dataset}"
    [(images, _)] = train_set.batches(torch.zeros(1, dtype=torch.int64), 1)
    images = as_images(images)
    was_training = model.training
    model.eval()
    tried = f"{what} on images {tuple(images.shape)}"
    try:
        with (
            generators_kept(images.device),
            torch.no_grad(),
            user_functions.running(tried) if is_reference(config.model) else nullcontext(),
        ):
            scores = model(images)
    except (RuntimeError, ValueError) as error:  # the latter from Keras
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise TrainingError(
            f"{tried}: this model expects images (N, 1, 28, 28). Use your own, --model "
            "MODULE:FUNCTION, or images of that shape. [CD0812]"
        ) from None
    model.train(was_training)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if not (isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == 1):
        raise TrainingError(
            f"{what}: the model returned {shape} for 1 image; expected scores (N, classes) for N "
            "images. [CD0812]"
        )
    try:
        for each in (train_set, test_set):
            each.expect(scores.shape[1])
    except DataError as error:
        raise DataError(f"{what}: {error} [CD0606]") from None


def poor_statistics(model: nn.Module, config: TrainConfig, agreed: Agreement) -> str:
    """Return a warning if ranks normalise over small batches, else an empty string."""
    of_one_pass = agreed.batch_size // config.gradient_accumulation_steps
    small = of_one_pass < _SMALL_BATCH and agreed.world_size > 1
    if not small or config.sync_batchnorm or not step.has_batchnorm(model):
        return ""
    return (
        f"BatchNorm uses only the {of_one_pass} images of each rank, a poor estimate of the "
        "data's statistics. Use --sync-batchnorm to include all ranks"
    )


def _channels_last(model: nn.Module) -> None:
    """Convert 4-D weights to channels-last, the fastest layout for convolutions on CPU and GPU.

    `model.to(memory_format=…)` rejects layers of other dimensions. `contiguous(memory_format=…)`
    keeps the strides of a single input channel or a 1 x 1 kernel, which decide the convolution's
    algorithm (torch's `suggest_memory_format`).
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


@contextmanager
def _naming_the_operation() -> Iterator[None]:
    """Name an operation without a deterministic algorithm, and the remedy."""
    try:
        yield
    except RuntimeError as error:
        operation, named, _ = str(error).partition(" does not have a deterministic implementation")
        if not named:
            raise
        raise TrainingError(
            f"--deterministic: {operation} has no deterministic algorithm on "
            f"{os.uname().nodename}. Omit --deterministic, or replace the operation. [CD0807]"
        ) from error


def affine(images: Tensor) -> Tensor:
    """Rotate, stretch and shift each image by random amounts, uniformly distributed.

    Up to 10 degrees, a tenth in width and height, and two pixels. Takes a batch like `as_images`,
    returns images (N, C, H, W). Pixels from outside repeat the nearest edge pixel. Draws five
    numbers per image from torch's CPU generator on every device: checkpoints hold it, so that a
    resumed run draws the same numbers.
    """
    images = as_images(images)
    count, _, height, width = images.shape
    turn, wide, high, right, down = (2 * torch.rand(5, count) - 1).to(images.device)
    angle = turn * math.radians(_ROTATION_DEGREES)
    wide, high = torch.exp(wide * _STRETCH), torch.exp(high * _STRETCH)
    # In affine_grid's coordinates an image reaches from -1 to 1.
    right, down = right * (2 * _SHIFT_PIXELS / width), down * (2 * _SHIFT_PIXELS / height)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    matrix = torch.stack([cosine * wide, -sine * high, right, sine * wide, cosine * high, down], 1)
    grid = affine_grid(matrix.view(count, 2, 3), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {"affine": affine}
