"""The options of training, one a field of `TrainConfig`: the same on submit, debug and train."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from clusterddp.train_config import (
    BACKENDS,
    DATASETS,
    DEVICES,
    LR_SCALINGS,
    MODELS,
    OPTIMIZERS,
    TrainConfig,
)

F = TypeVar("F", bound=Callable[..., Any])

# Field of TrainConfig -> keyword arguments of click.option. Types and defaults are the field's.
_OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"type": click.Choice(MODELS), "help": "Model to train."},
    "dataset": {
        "type": click.Choice(DATASETS),
        "help": "Dataset; synthetic is rendered on first use, without a network.",
    },
    "data_dir": {"metavar": "DIR", "help": "Folder that holds MNIST/raw, torchvision's layout."},
    "epochs": {"help": "Passes over the training set."},
    "batch_size": {"help": "Images per rank and step."},
    "lr": {"help": "Learning rate of one rank; see --lr-scaling."},
    "lr_scaling": {
        "type": click.Choice(LR_SCALINGS),
        "help": "Factor on --lr for N ranks: linear N, sqrt the root of N, none 1.",
    },
    "warmup_steps": {"help": "Steps over which the learning rate rises to its full value."},
    "optimizer": {"type": click.Choice(OPTIMIZERS), "help": "Optimizer."},
    "momentum": {"help": "Momentum of sgd, first beta of adam and adamw."},
    "weight_decay": {"help": "Weight decay."},
    "seed": {"help": "Seed of the weights and of the order of the images."},
    "deterministic": {
        "is_flag": True,
        "show_default": False,
        "help": "On GPUs use only algorithms that repeat bit for bit; an operation that has none "
        "is an error.",
    },
    "backend": {
        "type": click.Choice(BACKENDS),
        "help": "How ranks exchange; auto is nccl between GPUs and gloo between CPUs.",
    },
    "device": {
        "type": click.Choice(DEVICES),
        "help": "Processor; auto is the GPU where torch sees one.",
    },
    "threads": {"help": "Compute threads per rank; 0 takes the CPUs that a rank was given."},
    "bucket_cap_mb": {"help": "Size of DDP's gradient buckets, megabytes."},
    "save_every": {
        "metavar": "INTERVAL",
        "help": "Interval of checkpoints, such as 1epoch, 500steps or 10minutes; one at the end in "
        "any case.",
    },
    "keep_last": {"help": "Checkpoints to keep, beside the best one."},
    "eval_every": {
        "metavar": "INTERVAL",
        "help": "Interval of evaluation, such as 1epoch or 500steps; once at the end in any case.",
    },
    "log_every": {"help": "Steps between two lines of metrics."},
    "max_steps": {"help": "Stop after that many steps of the run; 0 is no limit."},
    "resume": {
        "metavar": "RUN|FILE",
        "show_default": "none",
        "help": "Run directory or checkpoint to start from; a run's own checkpoints come first.",
    },
    "allow_changed": {
        "is_flag": True,
        "show_default": False,
        "help": "Go on from a checkpoint of another configuration.",
    },
    "rendezvous_timeout": {"help": "Seconds that a rank waits for the others at the start."},
    "process_group_timeout": {"help": "Seconds that a rank waits for the others in an exchange."},
    "watchdog": {
        "help": "Seconds without progress after which the rank that hangs is named; 0 for never."
    },
}
TRAIN_OPTION_NAMES = tuple(field.name for field in dataclasses.fields(TrainConfig))
"""The parameter names of the options, which are the fields of TrainConfig."""


def train_options(function: F, *, settings: bool) -> F:
    """Add every training option to a command.

    With `settings` each is also read from CLUSTERDDP_<NAME>; the tasks of a run read their
    command line alone.
    """
    for field in reversed(dataclasses.fields(TrainConfig)):
        keywords: dict[str, Any] = {
            "type": field.type,
            "default": field.default,
            "show_default": True,
            **_OPTIONS[field.name],
        }
        if settings:
            keywords["envvar"] = f"CLUSTERDDP_{field.name.upper()}"
        flag = f"--{field.name.replace('_', '-')}"
        function = click.option(flag, field.name, **keywords)(function)
    return function


def config_from(params: Mapping[str, Any]) -> TrainConfig:
    """The checked configuration from a command's parameters; others among them are left aside.

    Raises RequestError for a value that cannot be.
    """
    return TrainConfig(**{name: params[name] for name in TRAIN_OPTION_NAMES})
