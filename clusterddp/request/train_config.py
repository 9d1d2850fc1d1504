"""The configuration of a training, `TrainConfig`, in torch's terms, checked at construction.

A recipe, `--recipe NAME`, sets values that were tuned together for options not given.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from clusterddp import formatting
from clusterddp.errors import OptionError
from clusterddp.request import options as table
from clusterddp.request.options import (
    COUNT,
    DURATION,
    DURATION_OR_NEVER,
    NUMBER,
    POSITIVE,
    SHARE,
    WHOLE,
    Choice,
    Given,
    Record,
    decisive,
    option,
)
from clusterddp.request.resources import Resources
from clusterddp.slurm.forms import LINE, PATH, Form

FieldValues: TypeAlias = Mapping[str, Any]
"""Values for fields of TrainConfig."""


@dataclass(frozen=True, eq=False, repr=False)
class Recipe:
    """Recipe for one rank on the real MNIST."""

    summary: str
    """Line in `--help`."""
    settings: FieldValues


_COMMON: FieldValues = {
    "optimizer": "adamw",
    "momentum": 0.9,
    # There are few steps, so Adam needs a recent estimate of the gradients' size.
    "beta2": 0.95,
    "weight_decay": 0.01,
    "label_smoothing": 0.1,
}

# Tuned on the last 10,000 training images, with the first 50,000 to train on, two cores and bf16.
# `fast`: three to ten seeds per setting; the cheapest setting of one epoch above 99% (99.03% over
# six seeds). `accurate`: one to three seeds per setting; 99.61% over three in five sixths of its
# steps. The test set was read once per seed, after a recipe was final; an earlier, wider `fast`
# had been tested as well (99.22%), and that margin motivated a cheaper one.
# `python -m benchmarks.accuracy` repeats the figures on all 60,000 images;
# benchmarks/README.md lists them, with the rejected settings.
RECIPES: dict[str, Recipe] = {
    "fast": Recipe(
        "99% test accuracy in one epoch",
        {
            **_COMMON,
            "model": "fastnet",
            "epochs": 1,
            "batch_size": 250,
            "lr": 0.025,
            # A fifth of the steps, so the rate peaks at 0.02, then falls to zero.
            "warmup_steps": 48,
        },
    ),
    "accurate": Recipe(
        "99.6% test accuracy in minutes",
        {
            **_COMMON,
            "model": "deepnet",
            "epochs": 6,
            "batch_size": 125,
            "lr": 0.0125,
            "warmup_steps": 576,
            "augment": "affine",
        },
    ),
}
SUMMARIES = "; ".join(map("{0[0]}, {0[1].summary}".format, RECIPES.items()))

# Names in each package's registry; a test compares them.
MODELS = ("convnet", "mlp", "bn-convnet", "keras-convnet", "fastnet", "deepnet")
STRATEGIES = ("ddp", "dp", "single")
DATASETS = ("mnist", "synthetic")
OPTIMIZERS = ("sgd", "adam", "adamw")
AUGMENTATIONS = ("none", "affine")

_COUNTED = "0*[1-9][0-9]{0,8}(?:epoch|step)s?"


INTERVAL = Form(_COUNTED, "interval", "1epoch, 2epochs or 500steps")
TIMED_INTERVAL = Form(
    f"{_COUNTED}|(?=.*[1-9]){formatting.DURATION}", "interval", "1epoch, 500steps, 30s, 10m or 1h"
)

_RENDEZVOUS_SECONDS, _RENDEZVOUS_SECONDS_PER_NODE = 300.0, 0.5
_BINDINGS = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True, eq=False, repr=False)
class TrainConfig(Record):
    """Configuration of the training; each field is an option of the same name."""

    recipe: str = option(
        "",
        f"Tuned settings for options not given: {SUMMARIES}.",
        Choice(tuple(RECIPES)),
        "NAME",
        shown="none",
    )
    model: str = decisive(
        "convnet",
        f"Model: {', '.join(MODELS)}, or your own function that returns one.",
        Choice(MODELS, or_function=True),
        "NAME|MODULE:FUNCTION",
    )
    strategy: str = option(
        "ddp",
        "ddp: one rank per device; dp: DataParallel in one process; single: one device.",
        Choice(STRATEGIES),
    )
    sync_batchnorm: bool = decisive(False, "Compute BatchNorm statistics over all ranks.")
    dataset: str = decisive(
        "mnist",
        f"Dataset: {', '.join(DATASETS)} (generated locally), or your own function.",
        Choice(DATASETS, or_function=True),
        "NAME|MODULE:FUNCTION",
    )
    data_dir: str = option("data", "Directory with MNIST/raw.", PATH, "DIR")
    epochs: int = decisive(2, "Passes over the training set.", COUNT)
    batch_size: int = decisive(64, "Images per rank in each batch.", COUNT)
    gradient_accumulation_steps: int = decisive(1, "Batches per optimizer step.", COUNT)
    lr: float = decisive(0.001, "Learning rate for one rank.", POSITIVE)
    lr_scaling: str = decisive(
        "linear", "Scale --lr for N ranks by N, sqrt(N) or 1.", Choice(("linear", "sqrt", "none"))
    )
    warmup_steps: int = decisive(100, "Learning rate warmup steps.", WHOLE)
    optimizer: str = decisive("adam", "Optimizer.", Choice(OPTIMIZERS))
    momentum: float = decisive(0.9, "SGD momentum or Adam beta1.", NUMBER)
    beta2: float = decisive(0.999, "Adam beta2.", SHARE)
    weight_decay: float = decisive(0.0, "Weight decay.", NUMBER)
    label_smoothing: float = decisive(0.0, "Label smoothing.", SHARE)
    augment: str = decisive("none", "Random affine augmentation.", Choice(AUGMENTATIONS))
    seed: int = decisive(
        0,
        "Seed of weights and shuffling.",
        table.Number(f"a whole number from 0 to {2**32 - 1}", below=2**32),
    )
    deterministic: bool = option(False, "Use only deterministic GPU algorithms, or fail.")
    precision: str = decisive(
        "auto",
        "Compute precision; auto is bf16 if the device supports it.",
        Choice(("auto", "fp32", "tf32", "bf16", "fp16")),
    )
    backend: str = option(
        "auto",
        "Communication backend; auto: nccl on GPUs, else gloo.",
        Choice(("auto", "nccl", "gloo")),
    )
    device: str = option("auto", "Device; auto: a GPU if any.", Choice(("auto", "cuda", "cpu")))
    threads: int = option(0, "CPU threads per rank; 0: one per CPU of the rank.", WHOLE)
    numa_binding: str = option(
        "none",
        "Bind each rank to the CPUs near its GPU, as torchrun does.",
        Choice(("none", *_BINDINGS)),
    )
    bucket_cap_mb: float = decisive(25.0, "DDP bucket size in MB.", POSITIVE)
    comm_hook: str = decisive("none", "Gradient compression.", Choice(("none", "bf16", "fp16")))
    cuda_graph: str = option(
        "auto", "CUDA graph of a step; auto: off.", Choice(("auto", "on", "off"))
    )
    compile: bool = decisive(False, "Compile the model with torch.compile.")
    data_pipeline: str = option(
        "memory",
        "Keep the data in memory, or use torch's DataLoader.",
        Choice(("memory", "loader")),
    )
    num_workers: int = option(2, "DataLoader workers per rank (loader pipeline only).", WHOLE)
    save_every: str = option(
        "1epoch", "Checkpoint interval: 1epoch, 500steps or 10m.", TIMED_INTERVAL, "INTERVAL"
    )
    snapshot_every: float = option(
        10,
        "Interval of snapshots in the nodes' memory, longer where one takes long; 0: never.",
        DURATION_OR_NEVER,
    )
    keep_last: int = option(3, "Checkpoints to keep, plus the best.", COUNT)
    eval_every: str = option("1epoch", "Evaluation interval.", INTERVAL, "INTERVAL")
    log_every: int = option(0, "Steps per log line; 0: automatic.", WHOLE)
    max_steps: int = option(0, "Stop after N steps; 0: no limit.", WHOLE)
    init_from: str = option(
        "", "Run or checkpoint to start a new run from.", LINE, "RUN|FILE", shown="none"
    )
    profile: str = option(
        "",
        "Profile RANK (default 0) with torch.profiler.",
        Form("[0-9]+", "rank", "a number from 0"),
        "[RANK]",
        bare="0",
        shown="none",
    )
    tensorboard: bool = option(False, "Also write metrics for TensorBoard.")
    find_batch_size: bool = option(False, "Time batch sizes and exit without training.")
    allow_config_change: bool = option(False, "Resume despite a changed configuration.")
    rendezvous_timeout: float | None = option(
        None, "Time to wait for all ranks.", DURATION, shown="5m, and 0.5s per further node"
    )
    process_group_timeout: float = option(600, "Timeout of collectives.", DURATION)
    straggler_window: float = option(
        60,
        "Report a rank below 80% of the others' speed for this long; 0: never.",
        DURATION_OR_NEVER,
    )

    hang_timeout: float = 60
    """Seconds without a training step until a hang is reported; 0: never. Set by
    `JobSpec.hang_timeout`."""

    def __post_init__(self) -> None:
        table.check_fields(self)
        DURATION_OR_NEVER.check("--hang-timeout", self.hang_timeout)
        typed = self.to_argv(defaults=False)
        for first, second, why in _CONTRADICTIONS:
            if first in typed and second in typed:
                names = f"{first} conflicts with {second}".replace("=", " ")
                raise OptionError(names, f": {why}. Remove one of them. [CD0103]")

    def check_ranks(self, resources: Resources) -> None:
        """Raise OptionError for ranks that the training cannot use."""
        if self.strategy != "ddp" and resources.num_tasks > 1:
            other = f"--nodes {resources.nodes}"
            if resources.nodes == 1:
                other = f"--tasks-per-node {resources.tasks_per_node}"
            raise OptionError(
                "--strategy",
                f" {self.strategy} conflicts with {other}: it trains in one process on one node. "
                "Use --strategy ddp, or a single task. [CD0103]",
            )
        if self.strategy == "single" and resources.gpus_per_node > 1:
            raise OptionError(
                "--strategy",
                f" single conflicts with --gpus-per-node {resources.gpus_per_node}: it uses only "
                "one GPU. Request one, or use --strategy ddp. [CD0105]",
            )
        if self.cuda_graph == "on" and self.backend == "gloo" and resources.num_tasks > 1:
            raise OptionError(
                "--cuda-graph",
                f" on conflicts with --backend gloo for {resources.layout}: a graph cannot record "
                "gloo's transfers through the hosts. Use --backend nccl, or --cuda-graph off.",
                code="CD0808",
            )
        if self.profile and int(self.profile) >= resources.num_tasks:
            raise OptionError(
                "--profile",
                f" {self.profile}: there is no such rank. Ranks count from 0: {resources.layout}.",
            )

    @property
    def user_functions(self) -> tuple[tuple[str, str], ...]:
        """Options that refer to a user function, each with its reference."""
        values = (("--model", self.model), ("--dataset", self.dataset))
        return tuple((option, value) for option, value in values if ":" in value)

    def peak_lr(self, world_size: int) -> float:
        """Return the peak learning rate for the world size of the run's first attempt.

        `lr` is scaled as in Goyal et al. 2017, arXiv 1706.02677.
        """
        factors = {"linear": world_size, "sqrt": math.sqrt(world_size), "none": 1}
        return self.lr * float(factors[self.lr_scaling])

    def rendezvous_seconds(self, nodes: int) -> float:
        """Return the time to wait for all ranks of this number of nodes, in seconds.

        Nodes start slower the more of them import torch from one file system: 36,000 requests for
        metadata per node (counted with strace), of which a server answers some 72,000 per second.
        """
        if self.rendezvous_timeout is not None:
            return self.rendezvous_timeout
        return _RENDEZVOUS_SECONDS + _RENDEZVOUS_SECONDS_PER_NODE * (nodes - 1)

    @property
    def step_size(self) -> int:
        """Images per rank in one optimizer step."""
        return self.batch_size * self.gradient_accumulation_steps

    def reference_world_size(self, world_size: int, images: int, step_size: int) -> int:
        """Return the world size that determines a resumed run's total batch and learning rate.

        It is the checkpoint's, or the present `world_size` if the batch size was changed.
        images: per step over all ranks at the checkpoint. step_size: per rank at the checkpoint.
        """
        return images // step_size if step_size == self.step_size else world_size

    def uneven_batch(self, reference: int, world_size: int) -> str:
        """Explain why the ranks cannot share the run's batch evenly; empty if they can.

        reference: the run's `reference_world_size`.
        """
        images = self.step_size * reference
        if images % world_size == 0:
            return ""
        passes = (
            f" x --gradient-accumulation-steps {self.gradient_accumulation_steps}"
            if self.gradient_accumulation_steps > 1
            else ""
        )
        return (
            f"the run's batch of {images} images over all ranks (--batch-size {self.batch_size}"
            f"{passes} x {reference} ranks at its start) cannot be divided evenly among "
            f"{world_size} ranks. Use a number of ranks that divides {images}."
        )

    @classmethod
    def of(cls, given: Given, **paths: str) -> "TrainConfig":
        """Return the checked configuration for the values of options, with these paths.

        A recipe sets the values that were not given. Raises RequestError for an invalid value.
        """
        names = (*(row.parameter for row in TRAINING), "hang_timeout")
        values = {name: given.values[name] for name in names if given.values.get(name) is not None}
        for name, value in recipe_settings(values.get("recipe")).items():
            if name not in given.sources:
                values[name] = value
        return cls(**{**values, **paths})

    def missing_package(self) -> str:
        """Return a message if this interpreter lacks a package that the training needs, or "".

        Imports nothing.
        """
        import importlib.util

        for flag, package in (("--model=keras-convnet", "keras"), ("--tensorboard", "tensorboard")):
            if flag not in self.to_argv():
                continue
            spec = importlib.util.find_spec(package)
            # A directory of that name, such as one of logs, is not a package.
            if spec is None or spec.origin is None:
                return (
                    f"{flag.replace('=', ' ')} needs the package {package}, which is not installed "
                    f"for {sys.executable}. Install it there: pip install 'clusterddp[{package}]'."
                )
        return ""

    def to_argv(self, *, defaults: bool = True) -> list[str]:
        """Return the whole configuration as flags.

        defaults: include default values. The recipe's name is omitted, so that it cannot add
        settings when the flags are parsed.
        """
        rows = [row for row in TRAINING if row.name != "recipe"]
        fields = [(row, getattr(self, row.parameter)) for row in rows]
        argv = [
            row.flag if value is True else f"{row.flag}={row.text(value)}"
            for row, value in fields
            if value is not False
            and value not in ("", None)
            and (defaults or value != getattr(TrainConfig, row.parameter))
        ]
        if defaults or self.hang_timeout != TrainConfig.hang_timeout:
            argv.append(f"--hang-timeout={formatting.setting(self.hang_timeout)}")
        return argv


def recipe_settings(name: str | None) -> FieldValues:
    """Return a recipe's settings; empty for an unknown name, which TrainConfig rejects."""
    return RECIPES[name].settings if name in RECIPES else {}


TRAINING = tuple(table.options_of(TrainConfig, table.BUILT_IN))
"""Options of the training, in the order of their fields."""

_ONE_PROCESS = "it needs several ranks, and there is only one"
_PLAIN = "; --model bn-convnet is the same network in plain torch"
_CONTRADICTIONS = (
    ("--backend=nccl", "--device=cpu", "NCCL needs GPUs"),
    ("--precision=tf32", "--device=cpu", "TF32 needs a GPU"),
    ("--sync-batchnorm", "--strategy=dp", _ONE_PROCESS),
    ("--sync-batchnorm", "--strategy=single", _ONE_PROCESS),
    ("--compile", "--strategy=dp", "dp makes new copies of the model in each step"),
    ("--cuda-graph=on", "--device=cpu", "CUDA graphs need a GPU"),
    ("--cuda-graph=on", "--precision=fp16", "fp16 chooses its loss scale in each step"),
    ("--cuda-graph=on", "--compile", "torch.compile captures its own graphs"),
    ("--cuda-graph=on", "--strategy=dp", "dp copies the model to each GPU in each step"),
    *((f"--numa-binding={mode}", "--device=cpu", "it needs a rank's GPU") for mode in _BINDINGS),
    (
        "--sync-batchnorm",
        "--model=keras-convnet",
        f"Keras synchronizes BatchNorm only on TensorFlow{_PLAIN}",
    ),
    (
        "--compile",
        "--model=keras-convnet",
        f"Keras' calls cause graph breaks, so no step gets faster{_PLAIN}",
    ),
)
"""Pairs of conflicting options in the form of `to_argv`, and why they conflict."""


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the changes of options that affect the weights: `--lr 0.001, now 0.01`.

    Both are values by parameter; parameters missing from a record are skipped.
    """
    return [
        f"{option.flag} {before[option.parameter]}, now {after[option.parameter]}"
        for option in TRAINING
        if option.decisive
        and option.parameter in before
        and before[option.parameter] != after[option.parameter]
    ]


@dataclass(frozen=True, eq=False, repr=False)
class Interval(Record):
    """Period in a training: every `count` epochs, steps or seconds."""

    count: float
    unit: str
    """`epoch`, `step` or `second`."""

    @classmethod
    def parse(cls, value: str) -> "Interval":
        """Parse `500steps`, `1epoch` or `10m`; raises ValueError."""
        if re.fullmatch(_COUNTED, value):
            unit = value.lstrip("0123456789")
            return cls(int(value.removesuffix(unit)), unit.removesuffix("s"))
        if seconds := formatting.seconds(value):
            return cls(seconds, "second")
        raise ValueError(value)

    def due(self, unit: str, count: int) -> bool:
        """Return whether it is due after this count of epochs or steps in the run."""
        return unit == self.unit and count % self.count == 0

    @property
    def seconds(self) -> float:
        """Interval in seconds; infinite for epochs and steps."""
        return self.count if self.unit == "second" else math.inf
