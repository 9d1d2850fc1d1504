"""What the variables of a Slurm step say of one of its tasks, held against each other.

The names and their meaning are those of srun(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from clusterddp.errors import DistEnvError, RequestError
from clusterddp.ranks import variables
from clusterddp.slurm.hostlist import expand_nodelist, expand_tasks_per_node

# Step ids from here on are Slurm's own: batch, extern, interactive, pending (slurm/slurm.h).
FIRST_RESERVED_STEP_ID = 0xFFFFFFF0

# Of each list the first that is set counts: the step's own before the job's, which a batch script
# hands down unchanged to steps of another shape (srun(1), sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")


class Step(NamedTuple):
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    tasks_per_node: list[int]
    hosts: tuple[str, ...]
    world_size_source: str
    local_world_size_source: str
    num_nodes_source: str
    hosts_source: str


def read_step(environ: Mapping[str, str]) -> Step:
    """Read a step's variables and hold its lists against its counts."""
    refuse_heterogeneous(environ)
    rank = variables.integer(environ, required(environ, ("SLURM_PROCID",)))
    local_rank = variables.integer(environ, required(environ, ("SLURM_LOCALID",)))
    node_rank = variables.integer(environ, required(environ, ("SLURM_NODEID",)))
    tasks_name = required(environ, NUM_TASKS)
    layout_name = required(environ, _TASKS_PER_NODE)
    hosts_name = required(environ, _NODELIST)
    world_size = variables.integer(environ, tasks_name)
    try:
        tasks_per_node = expand_tasks_per_node(variables.text(environ, layout_name))
    except RequestError as error:
        raise DistEnvError(f"{layout_name}: {error}") from error
    hosts = hosts_of(environ, hosts_name)
    if sum(tasks_per_node) != world_size:
        variables.contradiction(
            variables.list_shown(environ, (layout_name, tasks_name)),
            f"the tasks of all nodes, {sum(tasks_per_node)}, to add up to {world_size}",
        )
    if len(hosts) != len(tasks_per_node):
        variables.contradiction(
            variables.list_shown(environ, (hosts_name, layout_name)),
            f"as many hosts as entries, not {len(hosts)} and {len(tasks_per_node)}",
        )
    num_nodes_source = f"{hosts_name} (number of hosts)"
    if "SLURM_STEP_NUM_NODES" in environ:
        num_nodes_source = "SLURM_STEP_NUM_NODES"
        if variables.integer(environ, num_nodes_source) != len(hosts):
            variables.contradiction(
                variables.list_shown(environ, (num_nodes_source, hosts_name)),
                f"the number of hosts in the list, {len(hosts)}",
            )
    if node_rank >= len(hosts):
        variables.contradiction(
            variables.list_shown(environ, ("SLURM_NODEID", hosts_name)),
            f"a node id from 0 to {len(hosts) - 1}",
        )
    return Step(
        rank,
        local_rank,
        node_rank,
        world_size,
        tasks_per_node,
        hosts,
        tasks_name,
        f"{layout_name} (entry {node_rank})",
        num_nodes_source,
        hosts_name,
    )


def hosts_of(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    try:
        return tuple(expand_nodelist(variables.text(environ, name)))
    except RequestError as error:
        raise DistEnvError(f"{name}: {error}") from error


def step_id_of(environ: Mapping[str, str]) -> int | None:
    """Return the id of the step that this process is a task of, None where it is of none."""
    name = variables.first_set(environ, STEP_ID)
    if name is None:
        return None
    step_id = variables.integer(environ, name)
    return step_id if step_id < FIRST_RESERVED_STEP_ID else None


def refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    if is_heterogeneous(environ):
        names = [name for name in sorted(environ) if _HETEROGENEOUS.match(name)]
        raise DistEnvError(
            f"{variables.shown(environ, names[:3])}: this is a heterogeneous Slurm job, whose "
            "components number their tasks and nodes apart; expected a job of one component. "
            "Submit without 'hetjob' and ':', or export RANK, WORLD_SIZE, MASTER_ADDR, "
            "MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE yourself."
        )


def is_heterogeneous(environ: Mapping[str, str]) -> bool:
    return any(_HETEROGENEOUS.match(name) for name in environ)


# PACK is what HET was called before Slurm 20.02. Slurm 22.05 still sets
# SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0 in the steps of every job (seen), so it tells nothing.
_HETEROGENEOUS = re.compile(r"SLURM_(?:(?:HET|PACK)_SIZE$|.*_HET_GROUP_|.*_PACK_GROUP_[1-9])")


def required(environ: Mapping[str, str], names: Sequence[str]) -> str:
    name = variables.first_set(environ, names)
    if name is None:
        raise DistEnvError(
            f"{variables.shown(environ, STEP_ID)}, but {' and '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} not set: expected every variable that srun "
            "gives to a task. Start it with srun, and do not drop SLURM_* variables on the way."
        )
    return name
