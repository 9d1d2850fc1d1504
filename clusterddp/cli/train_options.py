"""The options of training, one a field of `TrainConfig`: the same on submit, debug and train."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from clusterddp.request.recipes import RECIPES
from clusterddp.request.train_config import (
    AUGMENTATIONS,
    BACKENDS,
    COMM_HOOKS,
    CUDA_GRAPHS,
    DATA_PIPELINES,
    DATASETS,
    DEVICES,
    LR_SCALINGS,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    TrainConfig,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class NameOrOwn(click.types.StringParamType):
    """A name of those that there are, or MODULE:FUNCTION; `TrainConfig` checks which."""

    name = "NAME|MODULE:FUNCTION"

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def get_metavar(self, param: click.Parameter, ctx: Any = None) -> str:
        return param.metavar or self.name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> "list[CompletionItem]":
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names if name.startswith(incomplete)]


F = TypeVar("F", bound=Callable[..., Any])

# Field of TrainConfig -> keyword arguments of click.option. Types and defaults are the field's.
_OPTIONS: dict[str, dict[str, Any]] = {
    "recipe": {
        "type": NameOrOwn(tuple(RECIPES)),
        "metavar": "NAME",
        "show_default": "none",
        "help": "Settings that go together, for those that are not given: "
        + "; ".join(f"{name}, {recipe.summary}" for name, recipe in RECIPES.items())
        + ".",
    },
    "model": {
        "type": NameOrOwn(MODELS),
        "help": f"Model to train: {', '.join(MODELS)}, or your own function that returns one.",
    },
    "strategy": {
        "type": click.Choice(STRATEGIES),
        "help": "How processors share a step: ddp, a rank each; dp, one process with all GPUs of "
        "its host (DataParallel); single, one of them.",
    },
    "sync_batchnorm": {
        "is_flag": True,
        "show_default": False,
        "help": "Have BatchNorm take its statistics over the batches of all ranks.",
    },
    "dataset": {
        "type": NameOrOwn(DATASETS),
        "help": f"Dataset: {', '.join(DATASETS)} (rendered on first use, without a network), or "
        "your own function that returns one.",
    },
    "data_dir": {"metavar": "DIR", "help": "Folder that holds MNIST/raw, torchvision's layout."},
    "epochs": {"help": "Passes over the training set."},
    "batch_size": {"help": "Images per rank in one forward pass."},
    "accumulate": {"help": "Batches over whose gradients one optimizer step takes the mean."},
    "lr": {"help": "Learning rate of one rank; see --lr-scaling."},
    "lr_scaling": {
        "type": click.Choice(LR_SCALINGS),
        "help": "Factor on --lr for N ranks: linear N, sqrt the root of N, none 1.",
    },
    "warmup_steps": {"help": "Steps over which the learning rate rises to its full value."},
    "optimizer": {"type": click.Choice(OPTIMIZERS), "help": "Optimizer."},
    "momentum": {"help": "Momentum of sgd, first beta of adam and adamw."},
    "beta2": {"help": "Second beta of adam and adamw."},
    "weight_decay": {"help": "Weight decay."},
    "label_smoothing": {"help": "Share of each label that the loss gives evenly to all classes."},
    "augment": {
        "type": click.Choice(AUGMENTATIONS),
        "help": "Change training images at random: affine turns, stretches and shifts them a bit.",
    },
    "seed": {"help": "Seed of the weights and of the order of the images."},
    "deterministic": {
        "is_flag": True,
        "show_default": False,
        "help": "On GPUs use only algorithms that repeat bit for bit; an operation that has none "
        "is an error.",
    },
    "precision": {
        "type": click.Choice(PRECISIONS),
        "help": "Precision of the passes; auto is bf16 where the processor has it. fp32 is exact.",
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
    "comm_hook": {
        "type": click.Choice(COMM_HOOKS),
        "help": "What gradients are rounded to for their exchange between ranks.",
    },
    "cuda_graph": {
        "type": click.Choice(CUDA_GRAPHS),
        "help": "Replay the whole step as one CUDA graph; auto does on a single rank, on also with "
        "the exchange of several in it (experimental).",
    },
    "compile": {
        "is_flag": True,
        "show_default": False,
        "help": "Compile the model with torch.compile, which takes its time at the start.",
    },
    "data_pipeline": {
        "type": click.Choice(DATA_PIPELINES),
        "help": "Keep the set in memory on the device, or read it by torch's DataLoader.",
    },
    "workers": {"help": "Processes of each rank that read for --data-pipeline loader."},
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
    "max_steps": {
        "help": "Stop after that many steps of the run; 0 is no limit. The learning rate goes by "
        "--epochs all the same."
    },
    "resume": {
        "metavar": "RUN|FILE",
        "show_default": "none",
        "help": "Run directory or checkpoint to start from; a run's own checkpoints come first.",
    },
    "profile": {
        "metavar": "[RANK]",
        "is_flag": False,
        "flag_value": "0",
        "show_default": "none",
        "help": "Record a few steps of a rank (0 when none is named) with torch.profiler.",
    },
    "tensorboard": {
        "is_flag": True,
        "show_default": False,
        "help": "Write the metrics as TensorBoard files too.",
    },
    "find_batch_size": {
        "is_flag": True,
        "show_default": False,
        "help": "Try batch sizes, say how fast each is, and leave without training.",
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


def recipe_settings(name: str) -> Mapping[str, Any]:
    """What a recipe gives to fields of TrainConfig, which itself refuses an unknown name."""
    return RECIPES[name].settings if name in RECIPES else {}


def config_from(params: Mapping[str, Any], ctx: click.Context) -> TrainConfig:
    """The checked configuration from a command's parameters; others among them are left aside.

    A recipe gives those that have their default in `ctx`, the command's. Raises RequestError for
    a value that cannot be.
    """
    values = {name: params[name] for name in TRAIN_OPTION_NAMES}
    for name, value in recipe_settings(params["recipe"]).items():
        if ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            values[name] = value
    return TrainConfig(**values)
