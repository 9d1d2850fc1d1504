"""Which trainings are compared: a strategy on a number of devices, and what each is to train."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig


@dataclass(frozen=True)
class Row:
    """One line of the table, before anything has run."""

    strategy: str
    devices: int
    """Ranks of ddp, GPUs that dp's one process drives; 1 of single."""
    train: TrainConfig
    nodes: int = 1
    missing: str = ""
    """What there is too little of for it to run: `needs 2 GPUs`."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Row":
        """The row that a run belongs to by its request. Raises RequestError for a command's."""
        if spec.train is None:
            raise RequestError(
                f"{spec.run_name} runs a command; only trainings can be compared, for they report "
                "what they achieved."
            )
        ranks, gpus = spec.world_size, spec.resources.gpus_per_node
        devices = max(gpus, 1) if spec.train.strategy == "dp" else ranks
        return cls(spec.train.strategy, devices, spec.train, spec.resources.nodes)

    @property
    def ranks(self) -> int:
        return self.devices if self.strategy == "ddp" else 1

    @property
    def name(self) -> str:
        """What its runs are called, after the name of the comparison."""
        return self.strategy if self.strategy == "single" else f"{self.strategy}-{self.devices}"

    @property
    def label(self) -> str:
        return label(self.strategy, self.devices)

    def images_of_a_device(self, train_images: int | None) -> int:
        """Images of a device in one optimizer step, which all of its rank's images may not fill.

        train_images: of the training set; None where that is not known.
        """
        most = self.train.step_size
        if train_images:
            most = min(most, math.ceil(train_images / self.ranks))  # as training_order deals them
        return math.ceil(most / (self.devices if self.strategy == "dp" else 1))


@dataclass(frozen=True)
class Place:
    """Where the rows run: what a host has, and whether there are several."""

    gpus: int
    """GPUs of one host that its processes can use."""
    on_gpus: bool
    """Whether ranks compute on GPUs."""
    ranks_per_node: int | None = None
    """Most ranks on one node of a cluster; None where there is this one host."""


def plan(
    config: TrainConfig,
    strategies: Sequence[str],
    world_sizes: Sequence[int],
    place: Place,
    *,
    fixed_global_batch: bool = False,
) -> list[Row]:
    """The rows: single; dp on each number of GPUs above one; ddp on each number of ranks.

    Each device takes the batch of `config`, so that N of them take N times as many images in a
    step; with `fixed_global_batch` they share that batch. Raises RequestError where it does not
    divide, where ranks do not fill their nodes, and where no row is left or could run.
    """
    asked = [("single", 1)] if "single" in strategies else []
    asked += [("dp", size) for size in world_sizes if size > 1 and "dp" in strategies]
    asked += [("ddp", size) for size in world_sizes if "ddp" in strategies]
    if not asked:
        raise RequestError(
            f"--strategies {','.join(strategies)} with --world-sizes "
            f"{','.join(map(str, world_sizes))} leaves no row: dp begins at 2 GPUs."
        )
    rows = [
        Row(
            strategy,
            devices,
            _training(config, strategy, devices, fixed_global_batch),
            _nodes(devices, place.ranks_per_node) if strategy == "ddp" else 1,
            _missing(strategy, devices, place),
        )
        for strategy, devices in asked
    ]
    if all(row.missing for row in rows):
        needs = "; ".join(f"{row.label} {row.missing}" for row in rows)
        raise RequestError(
            f"there is nothing to compare: {needs}, and {counted(place.gpus, 'GPU')} can be had. "
            "Ask for more (--gpus-per-node), or compare ranks on the CPU with --device cpu."
        )
    return rows


def label(strategy: str, devices: int) -> str:
    """`ddp, 2 ranks`."""
    if strategy == "single":
        return strategy
    return f"{strategy}, {counted(devices, 'GPU' if strategy == 'dp' else 'rank')}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _training(config: TrainConfig, strategy: str, devices: int, fixed: bool) -> TrainConfig:
    own = dataclasses.replace(
        config,
        strategy=strategy,
        sync_batchnorm=config.sync_batchnorm and strategy == "ddp",
        # DataParallel's copies of the model do not live long enough for a graph.
        cuda_graph="off" if strategy == "dp" else config.cuda_graph,
    )
    if fixed:
        if config.batch_size % devices:
            raise RequestError(
                f"--fixed-global-batch: --batch-size {config.batch_size} cannot be shared out "
                f"among {devices} devices. Give a multiple of {devices}."
            )
        if strategy == "ddp":  # the batch of a step is the same, so its rate is as well
            return dataclasses.replace(
                own, batch_size=config.batch_size // devices, lr_scaling="none"
            )
    elif strategy == "dp":  # one rank, which scales no rate, cuts its batch among its GPUs
        rate = config.lr * config.lr_factor(devices)
        return dataclasses.replace(own, batch_size=config.batch_size * devices, lr=rate)
    return own


def _nodes(ranks: int, per_node: int | None) -> int:
    if per_node is None or ranks <= per_node:
        return 1
    if ranks % per_node:
        raise RequestError(
            f"--world-sizes: {counted(ranks, 'rank')} cannot fill nodes of {per_node} evenly. Use "
            f"multiples of {per_node}, or another --tasks-per-node or --gpus-per-node."
        )
    return ranks // per_node


def _missing(strategy: str, devices: int, place: Place) -> str:
    one_host = place.ranks_per_node is None
    bounded = strategy == "dp" or (place.on_gpus and (one_host or not place.gpus))
    return f"needs {counted(devices, 'GPU')}" if bounded and devices > place.gpus else ""
