"""The learner: a model with its optimizer and its step, built, restored and collected as a whole.

What a checkpoint holds of it is here, and nothing of when one is written. So is what
`--augment` changes of a batch, as its random numbers are the rank's.
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
from clusterddp.data.loader import Images, Loaded, as_images, generators_kept, seed_generators
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
from clusterddp.training.metrics import Tally
from clusterddp.training.paces import Waiting
from clusterddp.training.step import Compiled, Step

_ROTATION_DEGREES = 10.0
_STRETCH = 0.1
"""Logarithm of the greatest factor, along the width and along the height."""
_SHIFT_PIXELS = 2.0
# Below it the statistics of a single rank's batch are a poor guess at those of the data.
_SMALL_BATCH = 16


class Learner:
    """A rank's model, optimizer and step, at the start or where a checkpoint left them."""

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
        """mark: called with each phase of a step as it begins.

        resume_content: what the checkpoint to resume from holds; None without one.
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
        seed_generators(config.seed + rank)  # from here on each rank draws its own numbers
        if resume_content is not None:
            self._restore(resume_content)
        self.tally = Tally(device)
        is_seen = not (agreed.cuda_graph or config.sync_batchnorm)
        self.waiting = Waiting(device, knows=agreed.world_size == 1 or is_seen)
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
        """Part of a checkpoint."""
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
        """True once the step is replayed as a CUDA graph; a set without a full batch has none."""
        return self._graphed is not None and self._graphed.is_captured

    @property
    def warning(self) -> str:
        """Why the step is no CUDA graph, as it was to be; empty otherwise."""
        return self._graphed.warning if self._graphed else ""

    def capture(self, images: Tensor, labels: Tensor) -> None:
        """Capture the step on a full batch, where it is to be replayed; nothing is trained.

        Without this the first full batch of `learn` does it.
        """
        if self._graphed and len(labels) == self._graphed.size:
            with _naming_the_operation():
                images = self._augment(images) if self._augment else images
                self._graphed.prepare(images, labels)

    def close(self) -> None:
        """Release a captured step; the process group must not be left before."""
        if self._graphed:
            self._graphed.close()

    def settle(self, images: Tensor, labels: Tensor) -> None:
        """Do one pass before the first step, after which all steps are done alike.

        DDP arranges its buckets once, in the order in which the first backward pass yields
        gradients; sums over four ranks and more can depend on the arrangement. So a run that
        resumes would do its first step with other sums than a run in one piece (torch's Reducer,
        `rebuild_buckets`). The same pass shows which gradient comes last, and has a GPU load
        kernels of both directions: not the optimizer's, and none of training mode or torch.compile.
        """
        self.model.eval()  # so that no statistics and no random numbers are touched
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
        """Restore a checkpoint, but for fp16's scaler, which comes with the step."""
        with step.settings_kept(self.optimizer):
            states: dict[str, Stateful] = {"model": self.model, "optimizer": self.optimizer}
            state.restore(Path(self.agreed.resume), states, content)


def check_fit(
    config: TrainConfig, model: nn.Module, train_set: Images | Loaded, test_set: Images | Loaded
) -> None:
    """Check that model and sets fit: try one image, and compare labels with the model's classes.

    The rank's random numbers stay what they were, and so do the model's statistics. Raises
    TrainingError for a model that cannot take the images or gives no scores, DataError for labels
    that are none of its classes.
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
            f"{tried}: this model is made for images (N, 1, 28, 28). Give one of your own, --model "
            "MODULE:FUNCTION, or images of that shape. [CD0812]"
        ) from None
    model.train(was_training)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if not (isinstance(scores, Tensor) and scores.dim() == 2 and len(scores) == 1):
        raise TrainingError(
            f"{what}: a model has to give scores (N, classes) for N images, and gave {shape} for "
            "1. [CD0812]"
        )
    try:
        for each in (train_set, test_set):
            each.expect(scores.shape[1])
    except DataError as error:
        raise DataError(f"{what}: {error} [CD0606]") from None


def poor_statistics(model: nn.Module, config: TrainConfig, agreed: Agreement) -> str:
    """Return a warning where ranks normalise by small batches of their own, else nothing."""
    of_one_pass = agreed.batch_size // config.gradient_accumulation_steps
    small = of_one_pass < _SMALL_BATCH and agreed.world_size > 1
    if not small or config.sync_batchnorm or not step.has_batchnorm(model):
        return ""
    return (
        f"each rank normalises by {of_one_pass} images of its own, a poor guess at the "
        "statistics of all of them; --sync-batchnorm takes those of all ranks"
    )


def _channels_last(model: nn.Module) -> None:
    """Lay images' tensors out as convolutions are fastest with, on CPUs as on GPUs.

    As `model.to(memory_format=…)`, which does not take layers of other dimensions. Not by
    `contiguous(memory_format=…)`: it leaves the strides of one input channel, or of a 1 x 1 kernel,
    as they are, and by these the convolution picks its algorithm (torch's `suggest_memory_format`).
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


@contextmanager
def _naming_the_operation() -> Iterator[None]:
    """Name the operation for which torch has no deterministic algorithm, and the remedy."""
    try:
        yield
    except RuntimeError as error:
        operation, named, _ = str(error).partition(" does not have a deterministic implementation")
        if not named:
            raise
        raise TrainingError(
            f"--deterministic: {operation} has no algorithm on {os.uname().nodename} that gives "
            "the same result each time. Leave --deterministic out, or do without that "
            "operation. [CD0807]"
        ) from error


def affine(images: Tensor) -> Tensor:
    """Turn, stretch and shift each image by amounts of its own, evenly drawn.

    Up to 10 degrees, a tenth in width and height, and two pixels. Takes a batch as `as_images`
    does, returns images (N, C, H, W). What comes in from outside is the nearest pixel of the edge,
    so the background continues. Draws five numbers an image from torch's generator of the CPU,
    whatever the images' device: it is in checkpoints, so a resumed run draws what it would have
    drawn.
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
