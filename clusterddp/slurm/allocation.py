"""Resources that Slurm has allocated to a running job, node by node."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from clusterddp.errors import OptionError, SlurmError
from clusterddp.slurm.client import output_of
from clusterddp.slurm.forms import expand_nodelist, gpus_of, limit_seconds

_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
_UNITS_OF = {"mem": " MB per node", "time": " s left", "cpus-per-task": " CPUs per node"}


@dataclass(frozen=True)
class Share:
    """A job's part of a node."""

    cpus: int
    memory_mb: int
    """0 if Slurm does not limit the job's memory."""
    gpus: int

    @property
    def limits(self) -> dict[str, float]:
        """Limits by the options that they bound."""
        memory = self.memory_mb or math.inf
        return {"gpus-per-node": self.gpus, "cpus-per-task": self.cpus, "mem": memory}


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


def usable(
    shares: Mapping[str, Share],
    left: float | None,
    asked: Mapping[str, Any],
    job: str,
    *,
    named: Sequence[str] = (),
    unwanted: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the nodes of an allocation that can serve a request, the named ones first.

    left: seconds until its end, if known. asked: `nodes`, and per node `cpus`, `gpus` and `mem`,
    and `time`, as in the request. job: the allocation, for messages. named: nodes that it needs.
    unwanted: other nodes that are left out, each with the reason. Raises OptionError for what is
    asked beyond the allocation.
    """
    if outside := [node for node in named if node not in shares]:
        raise OptionError(
            "--nodelist",
            f": {', '.join(outside)} requested, but {job} has {', '.join(shares)}. Name nodes of "
            "it, or submit to the queue with --launcher sbatch. [CD0417]",
        )
    rest = {node: unwanted.get(node) for node in shares if node not in named}
    nodes = [*named, *(node for node, why in rest.items() if not why)]
    wanted = {
        "gpus-per-node": asked["gpus"],
        "cpus-per-task": asked["cpus"],
        "mem": _megabytes(asked["mem"]),
    }
    has = {node: shares[node].limits for node in nodes}
    fit = [node for node in nodes if all(wanted[name] <= has[node][name] for name in wanted)]
    fits, count = {*named} <= {*fit}, asked["nodes"]
    pool, least = (nodes, count) if fits else (named, len(named))
    most = {name: sorted((has[n][name] for n in pool), reverse=True)[:least] for name in wanted}
    beyond = [
        ("nodes", count, len(nodes)),
        *((name, wanted[name], min(most[name], default=0)) for name in wanted),
        ("time", limit_seconds(asked["time"]) or 0, math.inf if left is None else left),
        ("nodes", count, len(fit)),  # some have the GPUs, others the memory
    ]
    without = [f"{node} ({why})" for node, why in rest.items() if why]
    advice = ", clear the bad one (clusterddp bad-nodes)" if "(bad:" in str(without) else ""
    for name, needs, there in beyond:
        if needs > there:
            raise OptionError(
                f"--{name}",
                f": {needs:g} requested, but {job} has {there:g}{_UNITS_OF.get(name, '')}"
                f"{' without ' if without else ''}{', '.join(without)}. Request less{advice}, or "
                "submit to the queue with --launcher sbatch. [CD0417]",
            )
    return fit


def _count(ids: str) -> int:
    """Return how many CPUs a list like `0-3,8` has."""
    spans = (part.partition("-") for part in ids.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def _megabytes(size: str) -> float:
    size = size.upper()
    return float(size.rstrip("KMGT") or 0) * _UNITS.get(size[-1:], 1)
