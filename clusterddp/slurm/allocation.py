"""Resources that Slurm has allocated to a running job, node by node."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from clusterddp.errors import OptionError, SlurmError
from clusterddp.slurm.client import output_of
from clusterddp.slurm.forms import expand_nodelist, gpus_of, limit_seconds

_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class Share:
    """A job's part of a node."""

    cpus: int
    memory_mb: int
    """0 if Slurm does not limit the job's memory."""
    gpus: int


def allocated(job_id: str) -> dict[str, Share]:
    """Return a job's part of each of its nodes. Raises SlurmError if Slurm shows none."""
    shares = parse(output_of(["scontrol", "show", "job", "-d", "-o", job_id]))
    if not shares:
        raise SlurmError(
            f"Slurm shows no nodes of job {job_id}: it has ended, or waits in the queue [CD0418]"
        )
    return shares


def parse(record: str) -> dict[str, Share]:
    """Return the nodes in a line of `scontrol show job -d -o`, as 22.05 to 26.05 print it."""
    form = r" Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+) GRES=(\S*)"
    return {
        node: Share(_count(cpus), int(memory), sum(gpus_of(gres).values()))
        for nodes, cpus, memory, gres in re.findall(form, record)
        for node in expand_nodelist(nodes)
    }


def check(
    shares: Mapping[str, Share], left: float | None, asked: Mapping[str, object], job: str
) -> None:
    """Raise OptionError for what is asked beyond an allocation.

    left: seconds until its end, if known. asked: `nodes`, and per node `cpus`, `gpus` and `mem`,
    and `time`, as in the request. job: the allocation, for the message.
    """
    least = min(shares.values(), key=lambda share: (share.gpus, share.cpus))
    memory, seconds = str(asked["mem"]), limit_seconds(str(asked["time"]))
    beyond = {
        "nodes": (asked["nodes"], len(shares)),
        "gpus-per-node": (asked["gpus"], least.gpus),
        "cpus-per-task": (asked["cpus"], least.cpus),
        "mem": (_megabytes(memory), least.memory_mb or float("inf")),
        "time": (seconds or 0, left if left is not None else float("inf")),
    }
    for name, (wanted, has) in beyond.items():
        if wanted > has:  # type: ignore[operator]
            units = {"mem": " MB per node", "time": " s left", "cpus-per-task": " CPUs per node"}
            raise OptionError(
                f"--{name}",
                f": {wanted:g} requested, but {job} has {has:g}{units.get(name, '')}. Request "
                "less, or submit to the queue with --launcher sbatch. [CD0417]",
            )


def _count(ids: str) -> int:
    """Return how many CPUs a list like `0-3,8` has."""
    spans = (part.partition("-") for part in ids.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def _megabytes(size: str) -> float:
    size = size.upper()
    return float(size.rstrip("KMGT") or 0) * _UNITS.get(size[-1:], 1)
