"""The optimizer, and the learning rate over the course of a run."""

import math
from dataclasses import dataclass

from torch import nn, optim

from clusterddp.train_config import TrainConfig
from clusterddp.training.checkpoint import Position


def build(config: TrainConfig, model: nn.Module) -> optim.Optimizer:
    """The optimizer that the configuration names; `momentum` is Adam's first beta too."""
    rate, decay = config.lr, config.weight_decay
    if config.optimizer == "sgd":
        return optim.SGD(model.parameters(), rate, momentum=config.momentum, weight_decay=decay)
    kind: type[optim.Adam] = {"adam": optim.Adam, "adamw": optim.AdamW}[config.optimizer]
    return kind(model.parameters(), rate, betas=(config.momentum, 0.999), weight_decay=decay)


def peak_lr(config: TrainConfig, world_size: int) -> float:
    """The full learning rate at this world size, that of the run's first start."""
    factor = {"linear": world_size, "sqrt": math.sqrt(world_size), "none": 1}[config.lr_scaling]
    return float(config.lr * factor)


@dataclass(frozen=True)
class Schedule:
    """A linear rise over the warm-up, and a linear fall to zero over all epochs.

    The fall goes by images, so that a run can go on at another world size; `max_steps` does not
    change it, so that a run cut in two trains as one in a piece.
    """

    config: TrainConfig
    world_size: int
    images_per_epoch: int

    def lr(self, position: Position) -> float:
        """The rate of the step that comes after this position."""
        done = position.epoch + min(position.samples / self.images_per_epoch, 1.0)
        rise = min(1.0, (position.step + 1) / max(self.config.warmup_steps, 1))
        fall = max(1.0 - done / self.config.epochs, 0.0)
        return peak_lr(self.config, self.world_size) * rise * fall
