"""Reads what environment variables say of a task: torch's own, and those of a Slurm step.

Each number is held against the others; every error is a DistEnvError that names the variables and
their values as they were seen. The names of a step's variables and their meaning are those of
srun(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from clusterddp.errors import DistEnvError, RequestError
from clusterddp.slurm.forms import expand_nodelist, expand_tasks_per_node

T = TypeVar("T")

PRINTABLE = re.compile(r"[!-~]+")
_INTEGER = re.compile(r"[0-9]{1,19}")
# Bash exports its functions too, under such a name; their bodies are no variable's second line.
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_[^\s=]+(?:%%|\(\)))=")
_DECLARATION = re.compile(r"\s*(?:declare|typeset|export)\s")

# torch's env:// needs these four (torch/distributed/rendezvous.py).
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAYOUT = {
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "num_nodes": "GROUP_WORLD_SIZE",
}
"""Node of a rank, and its number among the ranks there: DistEnv's fields and torchrun's names."""

# Step ids from here on are Slurm's own: batch, extern, interactive, pending (slurm/slurm.h).
_FIRST_RESERVED_STEP_ID = 0xFFFFFFF0

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

IMAGE_VARIABLE = "CLUSTERDDP_CONTAINER_IMAGE"
"""Variable of a task in a container: its image."""
OWN_PIDS_VARIABLE = "CLUSTERDDP_OWN_PIDS"
"""Variable of a task whose process has another number outside of its container."""
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"\s*(\d+|(?:GPU|MIG)-[^\s,]+)\s*")


class Number(NamedTuple):
    """Number with its source."""

    value: int
    source: str


class Place(NamedTuple):
    """Place of a task as variables give it."""

    numbers: Mapping[str, Number]
    """Rank, world size and so on, by the names of DistEnv's fields."""
    hosts: tuple[str, ...]
    """One name a node, in the order of the node ranks; empty where the variables do not tell."""
    hosts_source: str


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name by which Slurm knows this host; elsewhere its own."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


def named_gpus(shown: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names: those before the first that is
    none, as `-1`, behind which CUDA does not look (CUDA C++ Programming Guide).
    """
    matches = itertools.takewhile(bool, map(_GPU.fullmatch, shown.split(",")))
    return [match[1] for match in matches if match]


def own_mig_device(
    environ: Mapping[str, str], local_rank: int, local_world_size: int
) -> dict[str, str]:
    """Return the variable that shows a rank its own MIG device, where it is shown several.

    CUDA takes the first of a list of them and no other (NVIDIA's MIG user guide), so all ranks of
    the host would compute on that one. Empty for a rank that is alone: it may start others itself.
    """
    devices = environ.get(VISIBLE_GPUS, "").split(",")
    if local_world_size == 1 or len(devices) == 1 or not devices[0].startswith("MIG-"):
        return {}
    return {VISIBLE_GPUS: devices[local_rank % len(devices)]}


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


def read_torch_variables(environ: Mapping[str, str]) -> Place:
    """Read torch's variables, and derive those that are not set where it is beyond doubt.

    Raises DistEnvError for variables that are empty, malformed or contradictory.
    """
    rank, world_size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    step_is_ours = _step_agrees(environ, rank.value, world_size.value)
    layout = _layout(environ, rank.value, world_size.value, step_is_ours)
    hosts: tuple[str, ...] = ()
    hosts_source = "unknown: torch's variables name the first host only"
    if step_is_ours and "SLURM_STEP_NODELIST" in environ:
        hosts_source = "SLURM_STEP_NODELIST"
        hosts = tuple(_expanded(expand_nodelist, environ, hosts_source))
    elif layout["num_nodes"].value == 1:
        hosts, hosts_source = (text(environ, "MASTER_ADDR"),), "MASTER_ADDR"
    return Place({"rank": rank, "world_size": world_size, **layout}, hosts, hosts_source)


def _step_agrees(environ: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Return whether torch's variables number the very tasks of the surrounding Slurm step.

    Raises DistEnvError when they seem to, but give this task another rank: such a set leaked in
    from a surrounding job. torchrun's workers (TORCHELASTIC_RUN_ID) are numbered by its agent.
    """
    if "TORCHELASTIC_RUN_ID" in environ or "SLURM_PROCID" not in environ:
        return False
    if not is_in_step(environ) or is_heterogeneous(environ):
        return False
    name = first_set(environ, NUM_TASKS)
    if name is None or number(environ, name).value != world_size:
        return False
    if number(environ, "SLURM_PROCID").value == rank:
        return True
    if world_size > 1:
        raise DistEnvError(
            f"{shown(environ, ('RANK', 'WORLD_SIZE', 'SLURM_PROCID', name))}: expected "
            "RANK to equal SLURM_PROCID in a step of WORLD_SIZE tasks; torch's variables seem to "
            "be those of a surrounding job. Unset RANK, WORLD_SIZE and LOCAL_RANK before srun."
        )
    return False


def _layout(
    environ: Mapping[str, str], rank: int, world_size: int, step_is_ours: bool
) -> dict[str, Number]:
    """Read LOCAL_* and GROUP_*, and derive those that are not set where it is beyond doubt."""
    layout = {field: number(environ, name) for field, name in _LAYOUT.items() if name in environ}
    if "NODE_RANK" in environ:  # the name that other launchers and people give to GROUP_RANK
        node_rank = number(environ, "NODE_RANK")
        if layout.setdefault("node_rank", node_rank).value != node_rank.value:
            refuse(environ, ("GROUP_RANK", "NODE_RANK"), "the same node rank in both")
    if step_is_ours and len(layout) < len(_LAYOUT):
        # A wrapper that copied Slurm's variables under torch's names, but not all of them.
        step = read_step(environ).numbers
        layout = {field: step[field] for field in _LAYOUT} | layout
    if not layout:
        assumed = "all ranks on one host, as LOCAL_RANK and LOCAL_WORLD_SIZE are not set"
        return {
            "local_rank": Number(rank, f"RANK ({assumed})"),
            "local_world_size": Number(world_size, f"WORLD_SIZE ({assumed})"),
            "num_nodes": Number(1, assumed),
            "node_rank": Number(0, assumed),
        }
    places = ("RANK", "WORLD_SIZE", *_LAYOUT.values(), "NODE_RANK")
    evenly = "WORLD_SIZE over {}: as many on each node"
    share, nodes = layout.get("local_world_size"), layout.get("num_nodes")
    if share is None and world_size == 1:
        share = Number(1, "WORLD_SIZE")
    if share is None:
        if nodes is None or nodes.value < 1 or world_size % nodes.value:
            refuse(environ, places, "LOCAL_WORLD_SIZE, to know how many ranks share this node")
        share = Number(world_size // nodes.value, evenly.format(nodes.source))
    if share.value < 1:
        refuse(environ, places, "LOCAL_WORLD_SIZE of at least 1")
    if nodes is None:
        if world_size % share.value:
            needed = "GROUP_WORLD_SIZE, as WORLD_SIZE is no multiple of LOCAL_WORLD_SIZE"
            refuse(environ, places, needed)
        nodes = Number(world_size // share.value, evenly.format(share.source))
    blocks = f"RANK and {share.source}: consecutive ranks share a node"
    first = Number(0, nodes.source)
    derived = {
        "local_rank": Number(rank % share.value, blocks),
        "local_world_size": share,
        "node_rank": first if nodes.value == 1 else Number(rank // share.value, blocks),
        "num_nodes": nodes,
    }
    return derived | layout


def read_step(environ: Mapping[str, str]) -> Place:
    """Read a step's variables and hold its lists against its counts. Raises DistEnvError."""
    refuse_heterogeneous(environ)
    rank = number(environ, required(environ, ("SLURM_PROCID",)))
    local_rank = number(environ, required(environ, ("SLURM_LOCALID",)))
    node_rank = number(environ, required(environ, ("SLURM_NODEID",)))
    tasks_name = required(environ, NUM_TASKS)
    layout_name = required(environ, _TASKS_PER_NODE)
    hosts_name = required(environ, _NODELIST)
    world_size = number(environ, tasks_name)
    tasks_per_node = _expanded(expand_tasks_per_node, environ, layout_name)
    hosts = tuple(_expanded(expand_nodelist, environ, hosts_name))
    num_nodes = Number(len(hosts), f"{hosts_name} (number of hosts)")
    if "SLURM_STEP_NUM_NODES" in environ:
        num_nodes = number(environ, "SLURM_STEP_NUM_NODES")
    total = sum(tasks_per_node)
    if total != world_size.value:
        expected = f"the tasks of all nodes, {total}, to add up to {world_size.value}"
        refuse(environ, (layout_name, tasks_name), expected)
    if len(hosts) != len(tasks_per_node):
        expected = f"as many hosts as entries, not {len(hosts)} and {len(tasks_per_node)}"
        refuse(environ, (hosts_name, layout_name), expected)
    if num_nodes.value != len(hosts):
        expected = f"the number of hosts in the list, {len(hosts)}"
        refuse(environ, (num_nodes.source, hosts_name), expected)
    if node_rank.value >= len(hosts):
        refuse(environ, ("SLURM_NODEID", hosts_name), f"a node id from 0 to {len(hosts) - 1}")
    entry = f"{layout_name} (entry {node_rank.value})"
    numbers = {
        "rank": rank,
        "local_rank": local_rank,
        "node_rank": node_rank,
        "world_size": world_size,
        "local_world_size": Number(tasks_per_node[node_rank.value], entry),
        "num_nodes": num_nodes,
    }
    return Place(numbers, hosts, hosts_name)


def _expanded(expand: Callable[[str], list[T]], environ: Mapping[str, str], name: str) -> list[T]:
    try:
        return expand(text(environ, name))
    except RequestError as error:
        raise DistEnvError(f"{name}: {error}") from error


def is_in_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of a step."""
    name = first_set(environ, STEP_ID)
    return name is not None and number(environ, name).value < _FIRST_RESERVED_STEP_ID


def refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    """Raise DistEnvError for a heterogeneous job."""
    names = sorted(filter(_HETEROGENEOUS.match, environ))
    if names:
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


def number(environ: Mapping[str, str], name: str) -> Number:
    """Read a whole number, with its name. Raises DistEnvError for anything else."""
    value = text(environ, name)
    if not _INTEGER.fullmatch(value):
        refuse(environ, (name,), "a whole number of 0 or more")
    return Number(int(value), name)


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


def refuse(environ: Mapping[str, str], names: Sequence[str], expected: str) -> NoReturn:
    """Raise DistEnvError for variables that do not fit: their values, and what was expected."""
    contradiction(shown(environ, names), expected)


def contradiction(variables: str, expected: str) -> NoReturn:
    """Raise DistEnvError for variables, as `shown`, that do not fit: with what was expected."""
    raise DistEnvError(
        f"{variables}: expected {expected}. Variables of a surrounding job may have leaked "
        "in: unset them, or start the task with srun or torchrun from a clean shell."
    )


def shown(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Return NAME=value of those that are set, as one text."""
    return ", ".join(f"{name}={shown_value(environ[name])}" for name in names if name in environ)


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
            "output of 'env' or 'env -0'. [CD0801]"
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
                    "expected that of one task. Paste one, from 'srun --ntasks=1 env', "
                    "say. [CD0801]"
                )
            environ[name] = value
        elif name and record and end == "\n":
            # `env` quotes nothing: a line that assigns nothing continues the value before it.
            environ[name] += f"\n{record}"
    if not environ:
        raise RequestError(
            "the pasted environment holds no NAME=value line; paste the output of 'env'. [CD0801]"
        )
    return environ


def slurm_job_name(environ: Mapping[str, str], job_id: str) -> str:
    """Return the job id that Slurm's commands accept for the job of this process.

    The SLURM_JOB_ID of an array's last element is that of the array, and means all of it.
    """
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else job_id


def is_rehearsal(environ: Mapping[str, str]) -> bool:
    """Return whether the local launcher plays Slurm's part: there is no slurmctld to ask."""
    return REHEARSAL_VARIABLE in environ
