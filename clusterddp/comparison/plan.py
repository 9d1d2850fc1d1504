"""From the options of `compare` to its runs: where the rows run, and the request of each run."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from clusterddp import launchers
from clusterddp.comparison import here, jobs
from clusterddp.comparison.rows import Place, Row
from clusterddp.comparison.trials import run_name
from clusterddp.errors import RequestError
from clusterddp.processes import processors
from clusterddp.ranks.from_flags import MOST_PROCS
from clusterddp.request.spec import JobSpec, Resources
from clusterddp.request.train_config import TrainConfig

Planned = list[tuple[Row, JobSpec]]
"""The runs in the order in which they run."""


def workstation(config: TrainConfig) -> Place:
    gpus = 0 if config.device == "cpu" else processors.visible_gpus()
    return Place(gpus, on_gpus=config.device == "cuda" or gpus > 0)


def cluster(base: JobSpec, config: TrainConfig) -> Place:
    """Nodes such as `base` asks for."""
    gpus = 0 if config.device == "cpu" else base.resources.gpus_per_node
    return Place(gpus, config.device == "cuda" or gpus > 0, base.resources.tasks_per_node)


def powers_of_two(place: Place) -> list[int]:
    """2, 4, 8 … as far as the devices of a host go; 2 in any case."""
    most = max(place.gpus, place.ranks_per_node or 0, 2)
    return [2**power for power in range(1, most.bit_length())]


def requests(
    rows: Sequence[Row], name: str, root: str, repeat: int, base: JobSpec | None
) -> Planned:
    """The request of every run, in turns of all rows; on this workstation there is no `base`.

    Raises RequestError, before any of them runs, for one that cannot be or is there already.
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
        jobs.after(base, "1")  # all but the first will wait for the one before
    return planned


def print_dry(
    rows: Sequence[Row], planned: Planned, base: JobSpec | None, template_folder: Path | None
) -> None:
    """The commands or scripts as they would be started, each under a line that says which it is."""
    for row in rows:
        if row.missing:
            click.echo(f"# {row.label}: not run: {row.missing}")
    for number, (row, spec) in enumerate(planned, 1):
        click.echo(f"# [{number}/{len(planned)}] {row.label}: {spec.run_name}")
        if base is None:
            click.echo(here.shown_command(row, spec))
            continue
        before = ""
        if number > 1:
            before = str(number - 1)
            click.echo(f"# for afterany:{before} in it: the job id of [{before}/{len(planned)}]")
        sent = jobs.after(spec, before)
        click.echo(launchers.load(sent.launcher).prepare(sent, template_folder), nl=False)


def _here(row: Row, name: str, path: str) -> JobSpec:
    gpus = row.devices if row.strategy == "dp" else 0  # by which the table knows how many it drove
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
