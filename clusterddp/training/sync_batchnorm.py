"""Synchronises BatchNorm: statistics of all ranks' batches together, on GPUs and on CPUs.

torch's SyncBatchNorm computes on GPUs alone; on CPUs its forward is done here, by two sums over
the ranks and autograd.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from clusterddp.errors import TrainingError


def convert(model: nn.Module, name: str) -> nn.Module:
    """Synchronise every BatchNorm of a model on its device; its tensors stay the same.

    name: the model's, for messages. Raises TrainingError when it has no BatchNorm to convert.
    """
    if not has_batchnorm(model):
        raise TrainingError(
            f"--sync-batchnorm: the model {name} has no BatchNorm of torch.nn. Leave the flag "
            "out. [CD0812]"
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
    """The counterpart on CPUs of torch's class, which computes on GPUs alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise this rank's (N, C, ...) by mean and variance over all ranks' N."""
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            alone: Tensor = super().forward(input)
            return alone
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        # Under autocast the input is bf16, in which sums over a batch would lose digits.
        values = input.float()
        count = torch.full((1,), float(values.numel() // values.shape[1]))
        sums = _Sum.apply(torch.cat([values.sum(dims), count]))
        total = float(sums[-1].detach())
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        # A second sum rather than the mean of squares, which cancels where the mean is large.
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
            if share is None:  # a mean over all batches, as in torch
                share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, share or 0.0)
        self.running_var.lerp_(variance, share or 0.0)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions: the class that was converted has its own rule."""


class _Sum(torch.autograd.Function):
    """The sum over all ranks, whose gradient is the sum over all ranks of theirs."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _Sum.forward(context, gradient)
