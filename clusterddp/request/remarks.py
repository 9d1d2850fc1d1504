"""Remarks on a sound request: what a person should know before it waits in the queue."""

from clusterddp.request.spec import FULL_PREFLIGHT, NO_PREFLIGHT, JobSpec
from clusterddp.request.sweep import unswept
from clusterddp.request.train_config import TrainConfig


def remarks(spec: JobSpec) -> tuple[str, ...]:
    """Return what a person should know of a sound request before it waits in the queue."""
    gpus, tasks = spec.resources.gpus_per_node, spec.resources.tasks_per_node
    said = [
        f"{word} stays as it is in the COMMAND, as there is no --sweep of this name"
        for word in unswept(spec.command, spec.sweep.names)
    ]
    if gpus and spec.train and spec.train.device == "cpu":
        said.append(f"--device cpu leaves the {gpus} GPUs of each node idle")
    elif gpus > tasks and spec.train and spec.train.strategy == "ddp":
        said.append(
            f"{gpus - tasks} of the {gpus} GPUs of each node lie idle, as a rank computes on "
            f"one: leave --tasks-per-node {tasks} out, or ask for fewer"
        )
    elif 0 < gpus < tasks:
        said.append(f"{tasks // gpus} ranks share each GPU, its time and its memory")
    if spec.launcher == "local":
        if spec.preflight not in (None, NO_PREFLIGHT):
            said.append(f"--preflight {spec.preflight} checks nothing here: one machine")
        return tuple(said)
    if spec.command and spec.preflight == FULL_PREFLIGHT:
        said.append(
            "--preflight full is quick for a COMMAND: what it adds is measured inside "
            "clusterddp's own training"
        )
    if gpus and not (spec.says_cpus or "cpus-per-task" in spec.omit_directives):
        rank = "GPU rank" if spec.train else "task"
        gets = f"each {rank} gets one CPU, unless the partition has a DefCpuPerGPU"
        if "torchrun" in spec.template:  # whose agents ask for their ranks' CPUs
            gets = "each rank gets one CPU, whatever DefCpuPerGPU the partition has"
        said.append(
            f"{gets}. That is too few for a GPU's steps, NCCL, reading and checkpoints: type "
            "--cpus-per-task 4, say, or set cpus-per-task in site.cfg"
        )
    wanted = _wants_gpus(spec.train)
    if wanted and not gpus:
        said.append(
            f"{wanted} needs GPUs, and the request names none: type --gpus-per-node N, unless "
            "the partition gives them without"
        )
    return tuple(said)


def _wants_gpus(train: TrainConfig | None) -> str:
    """Return the option with which nothing but GPUs will do, if there is one."""
    if train is None:
        return ""
    of_gpus = {"device": "cuda", "backend": "nccl", "precision": "tf32", "cuda_graph": "on"}
    chosen = [name for name, value in of_gpus.items() if getattr(train, name) == value]
    return f"--{chosen[0].replace('_', '-')} {of_gpus[chosen[0]]}" if chosen else ""
