"""Remarks on a sound request: what a person should know before it waits in the queue."""

from clusterddp.request.program import NO_PREFLIGHT
from clusterddp.request.spec import JobSpec

_OF_GPUS = {"device": "cuda", "backend": "nccl", "precision": "tf32", "cuda_graph": "on"}
"""Values of options with which nothing but GPUs will do."""


def remarks(spec: JobSpec) -> tuple[str, ...]:
    """Return what a person should know of a sound request before it waits in the queue."""
    gpus, tasks = spec.resources.gpus_per_node, spec.resources.tasks_per_node
    program = spec.program
    said = [
        f"{word} stays as it is in the COMMAND, as there is no --sweep of this name"
        for word in program.unswept(spec.sweep.names)
    ]
    if gpus and program.options.get("device") == "cpu":
        said.append(f"--device cpu leaves the {gpus} GPUs of each node idle")
    elif gpus > tasks and program.options.get("strategy") == "ddp":
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
    if spec.preflight and spec.preflight not in program.preflights:
        said.append(
            f"--preflight {spec.preflight} is quick for a COMMAND: what it adds is measured inside "
            "clusterddp's own training"
        )
    if gpus and not (spec.says_cpus or "cpus-per-task" in spec.omit_directives):
        gets = f"each {program.rank} gets one CPU, unless the partition has a DefCpuPerGPU"
        if "torchrun" in spec.template:  # whose agents ask for their ranks' CPUs
            gets = "each rank gets one CPU, whatever DefCpuPerGPU the partition has"
        said.append(
            f"{gets}. That is too few for a GPU's steps, NCCL, reading and checkpoints: type "
            "--cpus-per-task 4, say, or set cpus-per-task in site.cfg"
        )
    wanted = [name for name, value in _OF_GPUS.items() if program.options.get(name) == value]
    if wanted and not gpus:
        said.append(
            f"--{wanted[0].replace('_', '-')} {_OF_GPUS[wanted[0]]} needs GPUs, and the request "
            "names none: type --gpus-per-node N, unless the partition gives them without"
        )
    return tuple(said)
