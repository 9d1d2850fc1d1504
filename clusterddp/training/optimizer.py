"""Builds the optimizer, and schedules the learning rate over the course of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from clusterddp.checkpoints.state import Position
from clusterddp.request.train_config import TrainConfig


def build(
    config: TrainConfig, model: nn.Module, *, fused: bool = True, captured: bool = False
) -> optim.Optimizer:
    """Build the optimizer that the configuration names; `momentum` is Adam's first beta too.

    fused: all parameters in one kernel, on CPUs and GPUs that have it.
    captured: its state and its rate stay in tensors on the device, for a CUDA graph to read.
    """
    parameters = list(model.parameters())
    rate: float | Tensor = config.lr
    if captured:
        rate = torch.tensor(config.lr, device=parameters[0].device)
    settings: dict[str, Any] = {"weight_decay": config.weight_decay, "fused": fused}
    if config.optimizer == "sgd":
        return optim.SGD(parameters, rate, momentum=config.momentum, **settings)
    kind: type[optim.Adam] = {"adam": optim.Adam, "adamw": optim.AdamW}[config.optimizer]
    betas = (config.momentum, config.beta2)
    return kind(parameters, rate, betas=betas, capturable=captured, **settings)


@contextmanager
def settings_kept(optimizer: optim.Optimizer) -> Iterator[None]:
    """Keep this configuration's settings while a state is loaded: they may have been changed on
    purpose. Counts of steps move to where this optimizer counts.
    """
    own = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    yield
    for group, settings in zip(optimizer.param_groups, own, strict=True):
        group.update(settings)
    for parameter, state in optimizer.state.items():
        if "step" in state:  # of fused ones on the device, wherever the file's one had it
            state["step"] = torch.as_tensor(state["step"]).to(parameter.device, torch.float32)


def peak_lr(config: TrainConfig, world_size: int) -> float:
    """Return the full learning rate at this world size, that of the run's first attempt."""
    return config.lr * config.lr_factor(world_size)


@dataclass(frozen=True)
class Schedule:
    """A linear rise over the warm-up, and a linear fall to zero over all epochs.

    The fall goes by images, so that a run can resume at another world size; `max_steps` does not
    change it, so that a run cut in two trains as one in a piece.
    """

    config: TrainConfig
    world_size: int
    images_per_epoch: int

    def lr(self, position: Position) -> float:
        """Return the rate of the step that comes after this position."""
        done = position.epoch + min(position.samples / self.images_per_epoch, 1.0)
        rise = min(1.0, (position.step + 1) / max(self.config.warmup_steps, 1))
        fall = max(1.0 - done / self.config.epochs, 0.0)
        return peak_lr(self.config, self.world_size) * rise * fall
