"""Plans a comparison: which strategies on how many devices, where they run, each run's request."""

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import RequestError
from clusterddp.processes import processors
from clusterddp.ranks.dist_env import MOST_PROCS
from clusterddp.request.spec import JobSpec, Resources
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
    """Resource that is too scarce for it to run: `needs 2 GPUs`."""

    @classmethod
    def of(cls, spec: JobSpec) -> "Row":
        """Build the row of a run from its request. Raises RequestError for a command's."""
        if spec.train is None:
            raise RequestError(
                f"{spec.run_name} runs a command; only trainings can be compared, for they report "
                "their figures."
            )
        ranks, gpus = spec.world_size, spec.resources.gpus_per_node
        devices = max(gpus, 1) if spec.train.strategy == "dp" else ranks
        return cls(spec.train.strategy, devices, spec.train, spec.resources.nodes)

    @property
    def ranks(self) -> int:
        return self.devices if self.strategy == "ddp" else 1

    @property
    def name(self) -> str:
        """Name of its runs, after that of the comparison."""
        return self.strategy if self.strategy == "single" else f"{self.strategy}-{self.devices}"

    @property
    def label(self) -> str:
        return label(self.strategy, self.devices)

    def images_of_a_device(self, train_images: int | None) -> int:
        """Count the images of a device in one optimizer step: its batch, or a smaller share.

        train_images: size of the training set; None where it is not known.
        """
        most = self.train.step_size
        if train_images:
            most = min(most, math.ceil(train_images / self.ranks))  # as training_order deals them
        return math.ceil(most / (self.devices if self.strategy == "dp" else 1))


@dataclass(frozen=True)
class Place:
    """Hosts on which the rows run."""

    gpus: int
    """Usable GPUs of one host."""
    on_gpus: bool
    """True where ranks compute on GPUs."""
    ranks_per_node: int | None = None
    """Most ranks on one node of a cluster; None on this workstation."""


def plan(
    config: TrainConfig,
    strategies: Sequence[str],
    world_sizes: Sequence[int],
    place: Place,
    *,
    fixed_global_batch: bool = False,
) -> list[Row]:
    """Plan the rows: single; dp on each number of GPUs above one; ddp on each number of ranks.

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
    """Name a row: `ddp, 2 ranks`."""
    if strategy == "single":
        return strategy
    return f"{strategy}, {counted(devices, 'GPU' if strategy == 'dp' else 'rank')}"


def counted(number: int, noun: str) -> str:
    """Count a noun: `1 rank`, `2 ranks`."""
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


Planned = list[tuple[Row, JobSpec]]
"""The runs in the order in which they run."""


def workstation(config: TrainConfig) -> Place:
    """Describe this host."""
    gpus = 0 if config.device == "cpu" else processors.visible_gpus()
    return Place(gpus, on_gpus=config.device == "cuda" or gpus > 0)


def cluster(base: JobSpec, config: TrainConfig) -> Place:
    """Describe nodes as `base` requests them."""
    gpus = 0 if config.device == "cpu" else base.resources.gpus_per_node
    return Place(gpus, config.device == "cuda" or gpus > 0, base.resources.tasks_per_node)


def powers_of_two(place: Place) -> list[int]:
    """List 2, 4, 8 … up to the devices of a host, 2 in any case."""
    most = max(place.gpus, place.ranks_per_node or 0, 2)
    return [2**power for power in range(1, most.bit_length())]


def requests(
    rows: Sequence[Row], name: str, root: str, repeat: int, base: JobSpec | None
) -> Planned:
    """Build the request of every run, in turns of all rows.

    base: the request of jobs; None on this workstation.

    Raises RequestError, before any of them runs, for an impossible run or one that exists.
    """
    planned = []
    for turn in range(1, repeat + 1):
        for row in rows:
            if row.missing:
                continue
            if base is None and row.ranks > MOST_PROCS:
                raise RequestError(
                    f"--world-sizes: {row.ranks} ranks are more than one workstation starts, "
                    f"{MOST_PROCS}. Ask for fewer, or add --launcher sbatch."
                )
            own = run_name(name, row, turn, repeat)
            path = f"{os.path.abspath(root)}/{own}"
            if Path(path).exists():
                raise RequestError(
                    f"the run {own} exists already at {path}; choose another --name."
                )
            planned.append(
                (row, _here(row, own, path) if base is None else _job(row, own, path, base))
            )
    if len(planned) > 1 and base is not None:
        after(base, "1")  # raises now what it would raise for all but the first
    return planned


def _here(row: Row, name: str, path: str) -> JobSpec:
    gpus = row.devices if row.strategy == "dp" else 0  # from which the table reads their number
    resources = Resources(tasks_per_node=row.ranks, gpus_per_node=gpus)
    return JobSpec(name, path, resources, sys.executable, train=row.train, launcher="local")


def _job(row: Row, name: str, path: str, base: JobSpec) -> JobSpec:
    asked = base.resources
    tasks, gpus = row.ranks // row.nodes, 0
    if asked.gpus_per_node:
        per_task = asked.gpus_per_node // asked.tasks_per_node if row.strategy == "ddp" else 1
        gpus = row.devices // row.nodes * per_task
    resources = dataclasses.replace(
        asked, nodes=row.nodes, tasks_per_node=tasks, gpus_per_node=gpus
    )
    return dataclasses.replace(
        base, run_name=name, run_dir=path, resources=resources, train=row.train
    )


def after(spec: JobSpec, job_id: str) -> JobSpec:
    """Add a job whose end the request waits for, as two at once could share a node.

    Raises RequestError where it cannot be added to the request's own dependencies.
    """
    if not job_id:
        return spec
    asked = spec.resources.dependency
    if "?" in asked:
        raise RequestError(
            f"--dependency {asked}: the jobs wait for one another too, which cannot be added to a "
            "list of which any will do ('?'). Give one of which all must be met (',')."
        )
    dependency = ",".join(filter(None, (asked, f"afterany:{job_id}")))
    resources = dataclasses.replace(spec.resources, dependency=dependency)
    return dataclasses.replace(spec, resources=resources)


def run_name(name: str, row: Row, turn: int, turns: int) -> str:
    """Name a run: `NAME-ddp-2`, and `NAME-ddp-2-r3` where each row is repeated."""
    return f"{name}-{row.name}{f'-r{turn}' if turns > 1 else ''}"
