"""What a training is asked to do: `TrainConfig`, in torch's words, checked when it is built."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import RequestError
from clusterddp.request import user_functions
from clusterddp.request.interval import Interval
from clusterddp.request.recipes import RECIPES
from clusterddp.slurm import forms

MODELS = ("convnet", "mlp", "bn-convnet", "keras-convnet", "fastnet", "deepnet")
STRATEGIES = ("ddp", "dp", "single")
DATASETS = ("mnist", "synthetic")
OPTIMIZERS = ("sgd", "adam", "adamw")
LR_SCALINGS = ("linear", "sqrt", "none")
BACKENDS = ("auto", "nccl", "gloo")
DEVICES = ("auto", "cuda", "cpu")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
CUDA_GRAPHS = ("auto", "on", "off")
COMM_HOOKS = ("none", "bf16", "fp16")
DATA_PIPELINES = ("memory", "loader")
AUGMENTATIONS = ("none", "affine")


@dataclass(frozen=True)
class TrainConfig:
    """What every task trains; each field is a flag of `clusterddp train` of the same name."""

    recipe: str = ""
    """The recipe whose settings the other fields have taken up; by itself it decides nothing."""
    model: str = "convnet"
    """A name of MODELS, or `package.module:function` that returns a module."""
    strategy: str = "ddp"
    """How processors share a step: ddp a rank each (DistributedDataParallel), dp one process that
    drives all GPUs of its host (DataParallel), single one processor."""
    sync_batchnorm: bool = False
    """Have BatchNorm take its statistics over the batches of all ranks."""
    dataset: str = "mnist"
    """A name of DATASETS, or `package.module:function` that returns a set."""
    data_dir: str = "data"
    """The folder that holds MNIST/raw, torchvision's layout."""
    epochs: int = 2
    batch_size: int = 64
    """Images per rank in one forward pass."""
    accumulate: int = 1
    """Forward and backward passes of one optimizer step, which so takes that many batches."""
    lr: float = 0.001
    """Learning rate of one rank; see lr_scaling."""
    lr_scaling: str = "linear"
    """Factor on lr for the world size N: linear N, sqrt N**0.5, none 1."""
    warmup_steps: int = 100
    """Steps over which the rate rises linearly to its full value."""
    optimizer: str = "adam"
    """Of the three, adam keeps its accuracy best when the global batch grows with the ranks."""
    momentum: float = 0.9
    """Of sgd; adam's and adamw's first beta."""
    beta2: float = 0.999
    """Adam's and adamw's second beta."""
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    """What the training's loss takes from each label and gives evenly to all classes."""
    augment: str = "none"
    """How training images are changed at random, each time anew."""
    seed: int = 0
    deterministic: bool = False
    """Only algorithms that give the same result each time; the CPU's do so anyway."""
    precision: str = "auto"
    """Of forward and backward, by autocast; weights, gradients and updates are fp32. auto is bf16
    where the processor computes in it, fp32 elsewhere."""
    backend: str = "auto"
    device: str = "auto"
    threads: int = 0
    """Compute threads per rank; 0 takes the CPUs that the rank was given."""
    bucket_cap_mb: float = 25.0
    """Size of DDP's gradient buckets, megabytes (torch's own default is 25)."""
    comm_hook: str = "none"
    """What DDP rounds gradients to for their exchange."""
    cuda_graph: str = "auto"
    """Whether a GPU replays the whole step as one graph; auto does at a world size of 1."""
    compile: bool = False
    """Have torch.compile generate code for the model."""
    data_pipeline: str = "memory"
    """memory keeps the set as bytes on the device; loader reads image by image (DataLoader)."""
    workers: int = 2
    """Processes of each rank that read images for the loader; 0 reads in the rank itself."""
    save_every: str = "1epoch"
    keep_last: int = 3
    """Checkpoints that are kept, beside the best one."""
    eval_every: str = "1epoch"
    log_every: int = 100
    """Steps between two lines of metrics."""
    max_steps: int = 0
    """Stop after that many steps of the run; 0 is no limit."""
    resume: str = ""
    """A run directory or a checkpoint file to start from."""
    profile: str = ""
    """The rank of which torch.profiler records a few steps; empty for none."""
    tensorboard: bool = False
    """Have rank 0 write the metrics as TensorBoard files too."""
    find_batch_size: bool = False
    """Try batch sizes, say how fast each is, and leave without training."""
    allow_changed: bool = False
    """Go on from a checkpoint of another configuration."""
    rendezvous_timeout: int = 300
    """Seconds that a rank waits for the others at the start."""
    process_group_timeout: int = 600
    """Seconds that a rank waits in an exchange; torch's own default of 30 minutes would keep a
    whole allocation waiting for a hanging rank."""
    watchdog: int = 60
    """Seconds without progress after which the hanging rank is named; 0 switches that off."""

    def __post_init__(self) -> None:
        for option, value, known in (
            ("--recipe", self.recipe, ("", *RECIPES)),
            ("--model", self.model, _names_or_own(MODELS, self.model)),
            ("--dataset", self.dataset, _names_or_own(DATASETS, self.dataset)),
            ("--strategy", self.strategy, STRATEGIES),
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--lr-scaling", self.lr_scaling, LR_SCALINGS),
            ("--backend", self.backend, BACKENDS),
            ("--device", self.device, DEVICES),
            ("--precision", self.precision, PRECISIONS),
            ("--comm-hook", self.comm_hook, COMM_HOOKS),
            ("--cuda-graph", self.cuda_graph, CUDA_GRAPHS),
            ("--data-pipeline", self.data_pipeline, DATA_PIPELINES),
            ("--augment", self.augment, AUGMENTATIONS),
        ):
            if value not in known:
                names = ", ".join(name for name in known if name)
                own = " (your own is MODULE:FUNCTION)" if option in _OWN else ""
                raise RequestError(f"{option}: {value!r} is not one of {names}{own}.")
        for option, count in (
            ("--epochs", self.epochs),
            ("--batch-size", self.batch_size),
            ("--accumulate", self.accumulate),
            ("--log-every", self.log_every),
            ("--rendezvous-timeout", self.rendezvous_timeout),
            ("--process-group-timeout", self.process_group_timeout),
            ("--keep-last", self.keep_last),
        ):
            forms.positive(option, count)
        for option, number, positive in (
            ("--lr", self.lr, True),
            ("--bucket-cap-mb", self.bucket_cap_mb, True),
            ("--momentum", self.momentum, False),
            ("--weight-decay", self.weight_decay, False),
            ("--warmup-steps", self.warmup_steps, False),
            ("--max-steps", self.max_steps, False),
            ("--threads", self.threads, False),
            ("--workers", self.workers, False),
            ("--watchdog", self.watchdog, False),
        ):
            if not math.isfinite(number) or number < 0 or (positive and number == 0):
                bound = "above 0" if positive else "of at least 0"
                raise RequestError(f"{option}: {number} is not a finite number {bound}.")
        for option, number in (
            ("--beta2", self.beta2),
            ("--label-smoothing", self.label_smoothing),
        ):
            if not 0 <= number < 1:
                raise RequestError(f"{option}: {number} is not a number from 0 to below 1.")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"--seed: {self.seed} is not within 0 and {2**32 - 1}.")
        if self.backend == "nccl" and self.device == "cpu":
            raise RequestError("--backend nccl exchanges between GPUs, but --device is cpu.")
        if self.sync_batchnorm and self.strategy != "ddp":
            raise RequestError(
                f"--sync-batchnorm goes over ranks, against --strategy {self.strategy}, which has "
                "one. Leave one of them."
            )
        if self.compile and self.strategy == "dp":
            raise RequestError(
                "--compile against --strategy dp, whose copies of the model are new at each step. "
                "Leave one of them."
            )
        if self.profile and not (self.profile.isascii() and self.profile.isdigit()):
            raise RequestError(f"--profile: {self.profile!r} is no rank, such as 0.")
        self._check_graph()
        self._check_keras()
        Interval.parse("--save-every", self.save_every, minutes=True)
        Interval.parse("--eval-every", self.eval_every)
        forms.text("--data-dir", self.data_dir)
        forms.text("--resume", self.resume)
        if not self.data_dir:
            raise RequestError("--data-dir is empty; name the folder that holds MNIST/raw.")

    @property
    def own_functions(self) -> tuple[tuple[str, str], ...]:
        """The options that name a person's own function, each with its reference."""
        values = (("--model", self.model), ("--dataset", self.dataset))
        return tuple((option, value) for option, value in values if ":" in value)

    def _check_graph(self) -> None:
        if self.cuda_graph != "on":
            return
        for option, given, why in (
            ("--device cpu", self.device == "cpu", "graphs are replayed by GPUs"),
            ("--precision fp16", self.precision == "fp16", "its loss scale is chosen step by step"),
            ("--compile", self.compile, "torch.compile captures by itself"),
            (
                "--strategy dp",
                self.strategy == "dp",
                "it copies the model to each GPU at each step",
            ),
        ):
            if given:
                raise RequestError(f"--cuda-graph on against {option}: {why}. Leave one of them.")

    def _check_keras(self) -> None:
        if self.model != "keras-convnet":
            return
        for option, given, why in (
            (
                "--sync-batchnorm",
                self.sync_batchnorm,
                "Keras shares BatchNorm's statistics on TensorFlow alone",
            ),
            (
                "--compile",
                self.compile,
                "torch.compile cuts Keras' calls into pieces, and no step gets faster",
            ),
        ):
            if given:
                raise RequestError(
                    f"{option} against --model keras-convnet: {why}. Leave it out, or take --model "
                    "bn-convnet, the same network in plain torch."
                )

    def lr_factor(self, world_size: int) -> float:
        """What `lr` is multiplied by at this world size; Goyal et al. 2017, arXiv 1706.02677."""
        factors = {"linear": world_size, "sqrt": math.sqrt(world_size), "none": 1}
        return float(factors[self.lr_scaling])

    @property
    def step_size(self) -> int:
        """Images per rank in one optimizer step."""
        return self.batch_size * self.accumulate

    def to_argv(self) -> list[str]:
        """Every field as a flag, so that a command line carries the whole configuration.

        All but the recipe's name: where the flags are read, it must not add anything to them.
        """
        argv = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool):
                if value:
                    argv.append(f"--{field.name.replace('_', '-')}")
            elif field.name != "recipe" and value != "":
                argv.append(f"--{field.name.replace('_', '-')}={value}")
        return argv


_OWN = ("--model", "--dataset")


def _names_or_own(known: tuple[str, ...], value: str) -> tuple[str, ...]:
    return (*known, value) if user_functions.is_reference(value) else known


# What decides the weights that a training ends with; the rest may change between two starts.
_DECISIVE = (
    "model", "dataset", "epochs", "batch_size", "lr", "lr_scaling", "warmup_steps", "optimizer",
    "momentum", "weight_decay", "seed", "bucket_cap_mb", "accumulate", "precision", "comm_hook",
    "compile", "beta2", "label_smoothing", "augment", "sync_batchnorm",
)  # fmt: skip


def changes(before: Mapping[str, Any], after: TrainConfig) -> list[str]:
    """What of a configuration is not as it was, as lines `--lr 0.001, now 0.01`.

    before: the fields of a TrainConfig as a record holds them; one that is absent is passed over.
    """
    return [
        f"--{name.replace('_', '-')} {before[name]}, now {getattr(after, name)}"
        for name in _DECISIVE
        if name in before and before[name] != getattr(after, name)
    ]
