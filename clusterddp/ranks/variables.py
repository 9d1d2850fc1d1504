"""Reads what environment variables say of a task: torch's own, and those of a Slurm step.

Each number is held against the others; every error is a DistEnvError that names the variables and
their values as they were seen. The names of a step's variables and their meaning are those of
srun(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from clusterddp.errors import DistEnvError, RequestError
from clusterddp.slurm.forms import expand_nodelist, expand_tasks_per_node

PRINTABLE = re.compile(r"[!-~]+")
_INTEGER = re.compile(r"[0-9]{1,19}")
# Bash exports its functions too, under such a name; their bodies are no variable's second line.
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_[^\s=]+(?:%%|\(\)))=")
_DECLARATION = re.compile(r"\s*(?:declare|typeset|export)\s")

# torch's env:// needs these four (torch/distributed/rendezvous.py).
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("GROUP_RANK", "NODE_RANK", "GROUP_WORLD_SIZE"),
)

# Step ids from here on are Slurm's own: batch, extern, interactive, pending (slurm/slurm.h).
FIRST_RESERVED_STEP_ID = 0xFFFFFFF0

# Of each list the first that is set counts: the step's own before the job's, which a batch script
# hands down unchanged to steps of another shape (srun(1), sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
# PACK is what HET was called before Slurm 20.02. Slurm 22.05 still sets
# SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0 in the steps of every job (seen), so it tells nothing.
_HETEROGENEOUS = re.compile(r"SLURM_(?:(?:HET|PACK)_SIZE$|.*_HET_GROUP_|.*_PACK_GROUP_[1-9])")

REHEARSAL_VARIABLE = "CLUSTERDDP_LOCAL_STEPS"
"""Variable of the local launcher's tasks: the folder in which its steps note their tasks."""


class Number(NamedTuple):
    """Number with its source; true in a condition even where the number is 0."""

    value: int
    source: str


class Layout(NamedTuple):
    """Node of a rank, and its number among the ranks there."""

    local_rank: Number
    local_world_size: Number
    node_rank: Number
    num_nodes: Number


class TorchPlace(NamedTuple):
    """Place of a task as torch's variables give it."""

    rank: int
    world_size: int
    layout: Layout
    master_addr: str
    master_port: int
    # One name a node, in the order of the node ranks; empty where the variables do not tell.
    hostnames: tuple[str, ...]
    hostnames_source: str


def torch_variables_are_set(environ: Mapping[str, str]) -> bool:
    """Return whether torch's variables are set. Raises DistEnvError where only some are."""
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return False
    missing = [name for name in TORCH_VARIABLES if name not in environ]
    if missing:
        names = (*TORCH_VARIABLES, "LOCAL_RANK")
        raise DistEnvError(
            f"{shown(environ, names)}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: torch's variables come all four "
            f"({', '.join(TORCH_VARIABLES)}) or not at all. Set the missing, or unset the others "
            "(unset RANK WORLD_SIZE LOCAL_RANK) to derive them from Slurm."
        )
    return True


def read_torch_variables(environ: Mapping[str, str]) -> TorchPlace:
    """Read torch's variables, and derive those that are not set where it is beyond doubt.

    Raises DistEnvError for variables that are empty, malformed or contradictory.
    """
    rank, world_size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    step_is_ours = _step_agrees(environ, rank, world_size)
    layout = _layout(environ, rank, world_size, step_is_ours)
    master_addr = text(environ, "MASTER_ADDR")
    hostnames: tuple[str, ...] = ()
    hostnames_source = "unknown: torch's variables name the first host only"
    if step_is_ours and "SLURM_STEP_NODELIST" in environ:
        hostnames, hostnames_source = (
            hosts_of(environ, "SLURM_STEP_NODELIST"),
            "SLURM_STEP_NODELIST",
        )
    elif layout.num_nodes.value == 1:
        hostnames, hostnames_source = (master_addr,), "MASTER_ADDR"
    master_port = integer(environ, "MASTER_PORT")
    return TorchPlace(
        rank, world_size, layout, master_addr, master_port, hostnames, hostnames_source
    )


def _step_agrees(environ: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Return whether torch's variables number the very tasks of the surrounding Slurm step.

    Raises DistEnvError when they seem to, but give this task another rank: such a set leaked in
    from a surrounding job. torchrun's workers (TORCHELASTIC_RUN_ID) are numbered by its agent.
    """
    if "TORCHELASTIC_RUN_ID" in environ or "SLURM_PROCID" not in environ:
        return False
    if step_id_of(environ) is None or is_heterogeneous(environ):
        return False
    name = first_set(environ, NUM_TASKS)
    if name is None or integer(environ, name) != world_size:
        return False
    if integer(environ, "SLURM_PROCID") == rank:
        return True
    if world_size > 1:
        raise DistEnvError(
            f"{shown(environ, ('RANK', 'WORLD_SIZE', 'SLURM_PROCID', name))}: expected "
            "RANK to equal SLURM_PROCID in a step of WORLD_SIZE tasks; torch's variables seem to "
            "be those of a surrounding job. Unset RANK, WORLD_SIZE and LOCAL_RANK before srun."
        )
    return False


def _layout(environ: Mapping[str, str], rank: int, world_size: int, step_is_ours: bool) -> Layout:
    """Read LOCAL_* and GROUP_*, and derive those that are not set where it is beyond doubt."""
    local_rank = _optional(environ, "LOCAL_RANK")
    local_world_size = _optional(environ, "LOCAL_WORLD_SIZE")
    node_rank = _group_rank(environ)
    num_nodes = _optional(environ, "GROUP_WORLD_SIZE")
    if None in (local_rank, local_world_size, node_rank, num_nodes) and step_is_ours:
        # A wrapper that copied Slurm's variables under torch's names, but not all of them.
        step = read_step(environ)
        local_rank = local_rank or Number(step.local_rank, "SLURM_LOCALID")
        local_world_size = local_world_size or Number(
            step.tasks_per_node[step.node_rank], step.local_world_size_source
        )
        node_rank = node_rank or Number(step.node_rank, "SLURM_NODEID")
        num_nodes = num_nodes or Number(len(step.hosts), step.num_nodes_source)
    if local_rank is None and local_world_size is None and num_nodes is None and node_rank is None:
        assumed = "all ranks on one host, as LOCAL_RANK and LOCAL_WORLD_SIZE are not set"
        local_rank = Number(rank, f"RANK ({assumed})")
        local_world_size = Number(world_size, f"WORLD_SIZE ({assumed})")
        num_nodes = Number(1, assumed)
        node_rank = Number(0, assumed)
    local_world_size = local_world_size or _even_share(environ, world_size, num_nodes)
    blocks = f"RANK and {local_world_size.source}: consecutive ranks share a node"
    if local_world_size.value < 1:
        contradiction(list_shown(environ, _PLACE_VARIABLES), "LOCAL_WORLD_SIZE of at least 1")
    local_rank = local_rank or Number(rank % local_world_size.value, blocks)
    num_nodes = num_nodes or _even_nodes(environ, world_size, local_world_size)
    node_rank = node_rank or (
        Number(0, num_nodes.source)
        if num_nodes.value == 1
        else Number(rank // local_world_size.value, blocks)
    )
    return Layout(local_rank, local_world_size, node_rank, num_nodes)


def _group_rank(environ: Mapping[str, str]) -> Number | None:
    """Read GROUP_RANK, torchrun's name, or NODE_RANK, that of other launchers and people."""
    group, node = _optional(environ, "GROUP_RANK"), _optional(environ, "NODE_RANK")
    if group and node and group.value != node.value:
        contradiction(
            list_shown(environ, ("GROUP_RANK", "NODE_RANK")), "the same node rank in both"
        )
    return group or node


def _even_share(environ: Mapping[str, str], world_size: int, num_nodes: Number | None) -> Number:
    if world_size == 1:
        return Number(1, "WORLD_SIZE")
    if num_nodes is None or num_nodes.value < 1 or world_size % num_nodes.value:
        contradiction(
            list_shown(environ, _PLACE_VARIABLES),
            "LOCAL_WORLD_SIZE, to know how many ranks share this node",
        )
    return Number(
        world_size // num_nodes.value, f"WORLD_SIZE over {num_nodes.source}: as many on each node"
    )


def _even_nodes(environ: Mapping[str, str], world_size: int, local_world_size: Number) -> Number:
    if world_size % local_world_size.value:
        contradiction(
            list_shown(environ, _PLACE_VARIABLES),
            "GROUP_WORLD_SIZE, as WORLD_SIZE is no multiple of LOCAL_WORLD_SIZE",
        )
    return Number(
        world_size // local_world_size.value,
        f"WORLD_SIZE over {local_world_size.source}: as many on each node",
    )


def _optional(environ: Mapping[str, str], name: str) -> Number | None:
    return Number(integer(environ, name), name) if name in environ else None


class Step(NamedTuple):
    """Place of a task in a Slurm step, with the variables that some of it came from."""

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
    """Read a step's variables and hold its lists against its counts. Raises DistEnvError."""
    refuse_heterogeneous(environ)
    rank = integer(environ, required(environ, ("SLURM_PROCID",)))
    local_rank = integer(environ, required(environ, ("SLURM_LOCALID",)))
    node_rank = integer(environ, required(environ, ("SLURM_NODEID",)))
    tasks_name = required(environ, NUM_TASKS)
    layout_name = required(environ, _TASKS_PER_NODE)
    hosts_name = required(environ, _NODELIST)
    world_size = integer(environ, tasks_name)
    try:
        tasks_per_node = expand_tasks_per_node(text(environ, layout_name))
    except RequestError as error:
        raise DistEnvError(f"{layout_name}: {error}") from error
    hosts = hosts_of(environ, hosts_name)
    if sum(tasks_per_node) != world_size:
        contradiction(
            list_shown(environ, (layout_name, tasks_name)),
            f"the tasks of all nodes, {sum(tasks_per_node)}, to add up to {world_size}",
        )
    if len(hosts) != len(tasks_per_node):
        contradiction(
            list_shown(environ, (hosts_name, layout_name)),
            f"as many hosts as entries, not {len(hosts)} and {len(tasks_per_node)}",
        )
    num_nodes_source = f"{hosts_name} (number of hosts)"
    if "SLURM_STEP_NUM_NODES" in environ:
        num_nodes_source = "SLURM_STEP_NUM_NODES"
        if integer(environ, num_nodes_source) != len(hosts):
            contradiction(
                list_shown(environ, (num_nodes_source, hosts_name)),
                f"the number of hosts in the list, {len(hosts)}",
            )
    if node_rank >= len(hosts):
        contradiction(
            list_shown(environ, ("SLURM_NODEID", hosts_name)),
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
    """Expand the host list in a variable. Raises DistEnvError."""
    try:
        return tuple(expand_nodelist(text(environ, name)))
    except RequestError as error:
        raise DistEnvError(f"{name}: {error}") from error


def step_id_of(environ: Mapping[str, str]) -> int | None:
    """Return the id of the step that this process is a task of, None where it is of none."""
    name = first_set(environ, STEP_ID)
    if name is None:
        return None
    step_id = integer(environ, name)
    return step_id if step_id < FIRST_RESERVED_STEP_ID else None


def refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    """Raise DistEnvError for a heterogeneous job."""
    if is_heterogeneous(environ):
        names = [name for name in sorted(environ) if _HETEROGENEOUS.match(name)]
        raise DistEnvError(
            f"{shown(environ, names[:3])}: this is a heterogeneous Slurm job, whose "
            "components number their tasks and nodes apart; expected a job of one component. "
            "Submit without 'hetjob' and ':', or export RANK, WORLD_SIZE, MASTER_ADDR, "
            "MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE yourself."
        )


def is_heterogeneous(environ: Mapping[str, str]) -> bool:
    """Return whether this is a heterogeneous job, or a step of one."""
    return any(_HETEROGENEOUS.match(name) for name in environ)


def required(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first name that is set. Raises DistEnvError where none is."""
    name = first_set(environ, names)
    if name is None:
        raise DistEnvError(
            f"{shown(environ, STEP_ID)}, but {' and '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} not set: expected every variable that srun "
            "gives to a task. Start it with srun, and do not drop SLURM_* variables on the way."
        )
    return name


def integer(environ: Mapping[str, str], name: str) -> int:
    """Read a whole number. Raises DistEnvError for anything else."""
    value = text(environ, name)
    if not _INTEGER.fullmatch(value):
        contradiction(list_shown(environ, (name,)), "a whole number of 0 or more")
    return int(value)


def text(environ: Mapping[str, str], name: str) -> str:
    """Read a variable. Raises DistEnvError where it is empty."""
    if not environ[name]:
        raise DistEnvError(
            f"{name} is set but empty: expected a value. Set it, or remove it with 'unset {name}'."
        )
    return environ[name]


def first_set(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Return the first name that is set, if any."""
    return next((name for name in names if name in environ), None)


def contradiction(seen: Sequence[str], expected: str) -> NoReturn:
    """Raise DistEnvError for variables that do not fit: NAME=value each, and what was expected."""
    raise DistEnvError(
        f"{', '.join(seen)}: expected {expected}. Variables of a surrounding job may have leaked "
        "in: unset them, or start the task with srun or torchrun from a clean shell."
    )


def shown(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Return NAME=value of those that are set, as one text."""
    return ", ".join(list_shown(environ, names))


def list_shown(environ: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return NAME=value of those that are set."""
    return [f"{name}={shown_value(environ[name])}" for name in names if name in environ]


def shown_value(value: str) -> str:
    """Return a value for a message: escaped where it is not plain, shortened where it is long."""
    short = value[:80] if PRINTABLE.fullmatch(value) else ascii(value[:80])
    return f"{short}..." if len(value) > 80 else short


def parse_environment(text: str) -> dict[str, str]:
    """Read the output of `env` or `env -0`; values of several lines are kept whole.

    Raises RequestError where nothing is a variable, or the lines are those of several tasks.
    """
    text = text.replace("\r\n", "\n")
    if _DECLARATION.match(text):
        raise RequestError(
            "the pasted environment is a shell's own list, with the shell's quotes; paste the "
            "output of 'env' or 'env -0'."
        )
    environ: dict[str, str] = {}
    name = ""
    end = "\0" if "\0" in text else "\n"
    for record in text.split(end):
        assigned = _ASSIGNMENT.match(record)
        if assigned:
            name, value = assigned[1], record[assigned.end() :]
            if name in ("SLURM_PROCID", "RANK") and environ.get(name, value) != value:
                raise RequestError(
                    f"{name} is {environ[name]!r} and {value!r} in the pasted environment: "
                    "expected that of one task. Paste one, from 'srun --ntasks=1 env', say."
                )
            environ[name] = value
        elif name and record and end == "\n":
            # `env` quotes nothing: a line that assigns nothing goes on with the value before it.
            environ[name] += f"\n{record}"
    if not environ:
        raise RequestError(
            "the pasted environment holds no NAME=value line; paste the output of 'env'."
        )
    return environ


def own_name(environ: Mapping[str, str], job_id: str) -> str:
    """Return the job id that Slurm's commands accept for the job of this process.

    The SLURM_JOB_ID of an array's last element is that of the array, and means all of it.
    """
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else job_id


def is_rehearsal(environ: Mapping[str, str]) -> bool:
    """Return whether the local launcher plays Slurm's part: there is no controller to ask."""
    return REHEARSAL_VARIABLE in environ
