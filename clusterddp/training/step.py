"""One optimizer step of a rank: forward, backward, exchange of gradients, update.

Also wraps the model for `--strategy`, torch.compile and synchronized BatchNorm, and builds the
optimizer and the learning rate schedule.
"""

import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from clusterddp.checkpoints.state import Position
from clusterddp.data.loader import as_images
from clusterddp.distributed.heartbeat import Phase
from clusterddp.errors import TrainingError
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training.metrics import MetricSums

NoSync = Callable[[], AbstractContextManager[None]]
"""Returns a context that does not exchange gradients, like DDP's `no_sync`."""
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(eq=False)
class Step:
    """Trains on one batch per call, at the agreed precision."""

    model: Callable[[Tensor], Tensor]
    """Model from images to scores, with its DDP wrapper if any."""
    optimizer: Optimizer
    tally: MetricSums
    device: torch.device
    precision: str = "fp32"
    gradient_accumulation_steps: int = 1
    """Number of passes of a batch; gradients are exchanged after the last."""
    label_smoothing: float = 0.0
    mark: Callable[[Phase], None] = lambda _: None
    """Called with each phase as it starts."""
    exchanged: Callable[[], None] = lambda: None
    """Called after the gradients of a batch are exchanged."""

    def __post_init__(self) -> None:
        # Small gradients would vanish in fp16; a disabled scaler changes nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.autocast = partial(autocast, self.device.type, DTYPES[self.precision])
        self._apart: NoSync = getattr(self.model, "no_sync", nullcontext)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch, as `loader.as_images` takes it, and its labels (N,)."""
        self.compute(images, labels)
        self.tally.count(len(labels))

    def compute(self, images: Tensor, labels: Tensor) -> None:
        """Do the device's part of a step, which can be captured into a graph."""
        self.optimizer.zero_grad()
        size = -(-len(labels) // self.gradient_accumulation_steps)
        cuts = range(0, len(labels), size)
        for cut in cuts:
            some, theirs = images[cut : cut + size], labels[cut : cut + size]
            with nullcontext() if cut == cuts[-1] else self._apart():
                self.mark(Phase.FORWARD)
                with self.autocast():
                    scores = self.model(as_images(some))
                    loss = cross_entropy(
                        scores.float(), theirs, label_smoothing=self.label_smoothing
                    )
                self.mark(Phase.BACKWARD)
                share = loss if len(cuts) == 1 else loss * (len(theirs) / len(labels))
                self.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
            self.tally.add(loss.detach(), scores.detach(), theirs)
        self.exchanged()
        self.mark(Phase.UPDATE)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def set_lr(self, rate: float) -> None:
        """Set the learning rate of the next steps."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # a captured step reads the rate from it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def autocast(kind: str, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return a context in which a model computes in `dtype`; `kind` is `cuda` or `cpu`."""
    return nullcontext() if dtype is torch.float32 else torch.autocast(kind, dtype)


def use_tf32(precision: str) -> None:
    """Enable TF32 convolutions and matrix products on this process's GPU only for `tf32`.

    By default torch convolves in TF32 (10 of 23 bits) on Ampere and later. This uses the older of
    torch's two interfaces, because torch.compile reads it; torch 2.9 deprecates it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


class Compiled:
    """Model compiled at its first call, which needs a compiler on the node."""

    def __init__(self, model: nn.Module) -> None:
        """model: with its DDP wrapper, if any."""
        self.no_sync: NoSync = getattr(model, "no_sync", nullcontext)
        # Static shapes: after the first odd batch torch would switch to dynamic ones, and a
        # resumed run would use other code than an uninterrupted one.
        self._call = torch.compile(model, dynamic=False)

    def __call__(self, images: Tensor) -> Tensor:
        """Return scores (N, classes) for images (N, 1, 28, 28).

        Raises TrainingError without a compiler.
        """
        try:
            scores: Tensor = self._call(images)
        except Exception as error:
            # The modules of torch.compile's errors differ between versions, their names do not.
            # Errors of the model pass through unchanged.
            if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                raise
            needs = "a C++ compiler on every node (CXX names one)"
            if images.device.type == "cuda":  # Triton compiles kernel launchers
                needs = "a C compiler (CC names one) and Python's headers (Python.h) on every node"
            raise TrainingError(
                f"--compile: torch.compile failed on {socket.gethostname()}: "
                f"{str(error).splitlines()[0]}. It needs {needs}. Install that there, or omit "
                "--compile. [CD0809]"
            ) from None
        return scores


def wrap(model: nn.Module, config: TrainConfig, agreed: Agreement) -> nn.Module:
    """Wrap the model in DDP or DataParallel, or not at all for a single device.

    Checkpoints hold rank 0's buffers, and every evaluation copies them to all ranks. The built-in
    models need no broadcast before each pass, because no weight depends on their buffers.
    """
    device = next(model.parameters()).device
    if gpus_of_one_process(config.strategy, device.type) > 1:
        return nn.DataParallel(AtPrecision(model, agreed.precision, device.type))
    if agreed.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=config.bucket_cap_mb, gradient_as_bucket_view=True
    )
    # Not as an argument, which has another name in torch 2.15.
    wrapped.broadcast_buffers = is_reference(config.model)
    if config.comm_hook != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{config.comm_hook}_compress_hook")
        wrapped.register_comm_hook(None, hook)
    return wrapped


class AtPrecision(nn.Module):
    """Model that sets its own precision, for the threads of DataParallel.

    These threads inherit autocast without its type (torch's parallel_apply).
    """

    def __init__(self, model: nn.Module, precision: str, kind: str) -> None:
        """kind: `cuda` or `cpu`."""
        super().__init__()
        self.model, self._autocast = model, partial(autocast, kind, DTYPES[precision])

    def forward(self, images: Tensor) -> Tensor:
        """Return scores for images."""
        with self._autocast():
            scores: Tensor = self.model(images)
        return scores


def gpus_of_one_process(strategy: str, kind: str) -> int:
    """Count the GPUs that this process uses alone; 0 on a CPU. `kind` is `cuda` or `cpu`."""
    if kind != "cuda":
        return 0
    return torch.cuda.device_count() if strategy == "dp" else 1


def build_optimizer(config: TrainConfig, model: nn.Module, *, captured: bool = False) -> Optimizer:
    """Build the configured optimizer; `momentum` is also Adam's first beta.

    captured: keep its state and rate in tensors on the device, for a CUDA graph to read.
    """
    parameters = list(model.parameters())
    rate = torch.tensor(config.lr, device=parameters[0].device) if captured else config.lr
    # Fused: one kernel for all parameters, where the device has it.
    settings: dict[str, Any] = {"weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "sgd":
        return optim.SGD(parameters, rate, momentum=config.momentum, **settings)
    kind: type[optim.Adam] = {"adam": optim.Adam, "adamw": optim.AdamW}[config.optimizer]
    betas = (config.momentum, config.beta2)
    return kind(parameters, rate, betas=betas, capturable=captured, **settings)


@contextmanager
def settings_kept(optimizer: Optimizer) -> Iterator[None]:
    """Keep this configuration's settings while loading a state, because they may be new.

    Step counts move to this optimizer's device.
    """
    groups = optimizer.param_groups
    kept = [{name: group[name] for name in group if name != "params"} for group in groups]
    yield
    for group, settings in zip(optimizer.param_groups, kept, strict=True):
        group.update(settings)
    for parameter, state in optimizer.state.items():
        if "step" in state:  # a fused optimizer keeps it on the device
            state["step"] = torch.as_tensor(state["step"]).to(parameter.device, torch.float32)


@dataclass(frozen=True)
class Schedule:
    """Learning rate schedule: linear warmup, then linear decay to zero over all epochs.

    The decay counts images, so that a run can resume at another world size. `max_steps` does not
    change it, so that a run in two parts trains like an uninterrupted one.
    """

    config: TrainConfig
    world_size: int
    images_per_epoch: int

    def lr(self, position: Position) -> float:
        """Return the rate of the step after this position."""
        done = position.epoch + min(position.samples / self.images_per_epoch, 1.0)
        rise = min(1.0, (position.step + 1) / max(self.config.warmup_steps, 1))
        fall = max(1.0 - done / self.config.epochs, 0.0)
        return self.config.peak_lr(self.world_size) * rise * fall


def synchronise(model: nn.Module, name: str) -> nn.Module:
    """Convert every BatchNorm of a model to use statistics over all ranks.

    Its tensors stay the same. torch's SyncBatchNorm supports only GPUs; on CPUs the forward pass
    here uses two sums over the ranks and autograd.

    name: the model's, for messages. Raises TrainingError if it has no BatchNorm.
    """
    if not has_batchnorm(model):
        raise TrainingError(
            f"--sync-batchnorm: the model {name} has no torch.nn BatchNorm layer. Omit "
            "the option. [CD0812]"
        )
    if next(model.parameters()).device.type != "cpu":
        convert_all: Any = nn.SyncBatchNorm.convert_sync_batchnorm  # untyped in torch
        converted: nn.Module = convert_all(model)
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SyncBatchNorm
    return model


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether any module of the model normalises over the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


class SyncBatchNorm(_BatchNorm):
    """SyncBatchNorm for CPUs; torch's class supports only GPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise this rank's (N, C, ...) by mean and variance over all ranks' N."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            alone: Tensor = super().forward(input)
            return alone
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        # Under autocast the input is bf16, too coarse for sums over a batch.
        values = input.float()
        count = torch.full((1,), float(values.numel() // values.shape[1]))
        sums = _Sum.apply(torch.cat([values.sum(dims), count]))
        total = float(sums[-1].detach())
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        # A second sum, because the mean of squares loses digits if the mean is large.
        variance = _Sum.apply(centred.square().sum(dims)) / total
        self._track(mean.detach(), variance.detach() * (total / max(total - 1, 1)))
        result: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:  # cumulative mean over all batches, as in torch
                share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share or 0.0)
        self.running_var.lerp_(variance, share or 0.0)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions, like the converted classes."""


class _Sum(torch.autograd.Function):
    """Sum over all ranks; its gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(context, gradient)
