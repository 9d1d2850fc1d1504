"""Checks of a request against Slurm before submission: partitions, array limits, forecast."""

import math
import os
from collections.abc import Mapping

from clusterddp import formatting, log
from clusterddp.errors import OptionError, RequestError, SlurmError
from clusterddp.request.spec import IN_ALLOCATION, JobSpec
from clusterddp.slurm import forms
from clusterddp.slurm.site import ArrayLimits, Partition

_MAX_NAMES = 30


def check_partitions(
    spec: JobSpec, partitions: Mapping[str, Partition], *, force: bool = False
) -> None:
    """Refuse an unknown partition, and a request that exceeds the partition's limits.

    Depending on the site's settings, sbatch would reject such a job or leave it pending
    indefinitely. With several partitions, at least one must fit. Nothing is checked if no
    partitions are known or sbatch gets no --partition.

    force: warn, rather than refuse, if limits are exceeded.
    """
    if not partitions or "partition" in spec.omit_directives:
        return
    asked, names = spec.resources, spec.resources.partition.split(",")
    unknown = [name for name in names if name and name not in partitions]
    if unknown:
        known = formatting.join_limited(list(partitions), _MAX_NAMES, ", ")
        problem = f" {unknown[0]}: no such partition. This cluster has {known}."
        raise OptionError("--partition", problem)
    of_job = [p for p in partitions.values() if p.name in names or (names == [""] and p.is_default)]
    if not of_job:
        return
    where = "partition " + " or ".join(partition.name for partition in of_job)
    cpus = (asked.cpus_per_task or 0) * asked.tasks_per_node
    kind = f" of type {asked.gpu_type}" if asked.gpu_type else ""
    most_gpus = max(partition.gpus.get(asked.gpu_type, 0) for partition in of_job)
    most_cpus = max(partition.cpus for partition in of_job)
    most_nodes = max(partition.nodes for partition in of_job)
    longest = max(of_job, key=lambda partition: partition.limit_seconds or math.inf)
    limit = forms.limit_seconds(asked.time)
    problems = []
    if asked.gpus_per_node > most_gpus:
        problems.append(
            f"--gpus-per-node {asked.gpus_per_node}: no node of {where} has more than "
            f"{most_gpus} GPUs{kind}"
        )
    if cpus > most_cpus and "overcommit" not in dict(spec.sbatch):
        problems.append(
            f"--cpus-per-task {asked.cpus_per_task} for {asked.tasks_per_node} tasks per node "
            f"needs {cpus} CPUs: no node of {where} has more than {most_cpus}"
        )
    if asked.job_nodes > most_nodes:
        spares = f" and --spare-nodes {asked.spare_nodes}" if asked.spare_nodes else ""
        problems.append(f"--nodes {asked.nodes}{spares}: {where} has only {most_nodes}")
    is_too_long = longest.limit_seconds and (limit or math.inf) > longest.limit_seconds
    if asked.time and is_too_long and "time-min" not in dict(spec.sbatch):
        problems.append(f"--time {asked.time}: the limit of {where} is {longest.limit}")
    if not problems:
        return
    text = (
        f"{'; '.join(problems)} (from sinfo). Slurm would reject the job or leave it pending "
        "indefinitely"
    )
    if not force:
        raise RequestError(
            f"{text}. Request less or another --partition; to submit anyway, add --force. [CD0407]"
        )
    log.warning(f"{text} [CD0407]")


def check_array(spec: JobSpec, count: int, limits: ArrayLimits) -> None:
    """Raise OptionError if Slurm's limits are too low for the sweep as one array.

    count: number of trials submitted now.
    """
    size, last = limits.size, len(spec.sweep) - 1
    if size is not None and last >= size:
        parts = -(-len(spec.sweep) // size)
        raise OptionError(
            "--sweep",
            f": {len(spec.sweep)} trials have indices up to {last}, but MaxArraySize {size} of "
            f"this cluster allows at most {size - 1}. Split it into {parts} sweeps. [CD0412]",
        )
    bounds = {
        "max_array_tasks in SchedulerParameters": (limits.tasks, 0),
        "MaxJobCount": (limits.jobs, 0),
        "your MaxSubmitJobs": (limits.submitted, limits.present),
    }
    for name, (most, present) in bounds.items():
        if most is not None and count + present > most:
            more = f" and your {present} queued or running jobs" if present else ""
            raise OptionError(
                "--sweep",
                f": {count} trials{more} exceed {name} ({most}). Submit fewer trials now and the "
                f"rest later: clusterddp resume {spec.run_name} --sweep … [CD0412]",
            )


def check_directives(spec: JobSpec) -> None:
    """Warn of a directive that sbatch does not have; a plugin of the site may add it."""
    if not spec.sbatch or spec.launcher in ("local", IN_ALLOCATION):
        return
    from clusterddp.scripts import sbatch_file  # needed only here

    for name, _ in spec.sbatch:
        if not sbatch_file.has_option(name):
            near = sbatch_file.nearest_name(name)
            hint = f"Did you mean --{near}?" if near else "See sbatch(1) for the options."
            log.warning(
                f"--sbatch {name}: sbatch has no option --{name} and rejects the job unless a "
                f"plugin of the site adds it. {hint} [CD0107]"
            )


def forecast(script: str) -> str:
    """Return Slurm's forecast of the job's start, and warn of settings that requeue every job.

    Raises RequestError if Slurm refuses the job, SlurmError if it cannot be asked.
    """
    from clusterddp.slurm.client import predict_start, requeue_exits

    try:
        can_start, words = predict_start(script, os.environ)
    except SlurmError as error:
        if error.code != "CD0402":
            raise
        raise RequestError(error, code=error.code) from None
    for setting in requeue_exits():
        log.warning(
            f"slurm.conf has {setting}: Slurm requeues jobs with this exit code despite "
            "--no-requeue, --max-requeues and 'clusterddp stop'. A stopped run exits with 75, a "
            "failed one with its rank's code or 1. [CD0413]"
        )
    if can_start:
        return words
    if "configuration is not available" in words:
        raise RequestError(
            f"Slurm refuses the job: {words}. If nodes or a partition are down, a submission can "
            "wait for them: see sinfo. Otherwise request less. [CD0407]"
        )
    raise RequestError(f"Slurm refuses the job: {words}. Change the option that it names. [CD0403]")
