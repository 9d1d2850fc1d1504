"""Reads a task's environment variables, set by torchrun or by a Slurm step.

The numbers are cross-checked; every error is a DistEnvError with the variables and their values.
srun(1), OUTPUT ENVIRONMENT VARIABLES, documents a step's variables.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

from clusterddp.errors import DistEnvError, RequestError
from clusterddp.slurm.forms import expand_nodelist, expand_tasks_per_node

T = TypeVar("T")

PRINTABLE = re.compile(r"[!-~]+")
_INTEGER = re.compile(r"[0-9]{1,19}")
# Bash also exports functions, under such names; their bodies do not continue another variable.
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
"""DistEnv's fields and torchrun's variables for a rank's node and its number there."""

# Slurm reserves step ids from here on: batch, extern, interactive, pending (slurm/slurm.h).
_FIRST_RESERVED_STEP_ID = 0xFFFFFFF0

# The first set variable of each list counts: the step's before the job's, which steps of another
# layout inherit unchanged (srun(1), sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
STEP_ID = ("SLURM_STEP_ID", "SLURM_STEPID")
NUM_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
_NODELIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
JOB_ID = ("SLURM_JOB_ID", "SLURM_JOBID")
# PACK was the name of HET before Slurm 20.02. Slurm 22.05 still sets
# SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0 in the steps of every job (seen), so it is ignored.
_HETEROGENEOUS = re.compile(r"SLURM_(?:(?:HET|PACK)_SIZE$|.*_HET_GROUP_|.*_PACK_GROUP_[1-9])")

REHEARSAL_VARIABLE = "CLUSTERDDP_LOCAL_STEPS"
"""Variable of the local launcher's tasks: the directory for its steps' records of tasks."""

HELD_VARIABLE = "CLUSTERDDP_HELD_UNTIL"
"""Variable of a run inside an allocation that the user holds: when its time ends, in seconds since
the epoch; empty without a limit."""

IMAGE_VARIABLE = "CLUSTERDDP_CONTAINER_IMAGE"
"""Variable of a task in a container: its image."""
OWN_PIDS_VARIABLE = "CLUSTERDDP_OWN_PIDS"
"""Variable of a task whose container has a separate PID namespace."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"\s*(\d+|(?:GPU|MIG)-[^\s,]+)\s*")


class Number(NamedTuple):
    """A number with its source."""

    value: int
    source: str


class RankLayout(NamedTuple):
    """Ranks of a task according to its variables."""

    numbers: Mapping[str, Number]
    """Rank, world size and so on, by DistEnv's field names."""
    hosts: tuple[str, ...]
    """One name per node, in order of node ranks; empty if unknown."""
    hosts_source: str


def host_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's name for this host, or its own name outside Slurm."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename


def named_gpus(value: str) -> list[str]:
    """Return the GPUs in a value of CUDA_VISIBLE_DEVICES.

    CUDA stops at the first invalid entry, for example `-1` (CUDA C++ Programming Guide).
    """
    matches = itertools.takewhile(bool, map(_GPU.fullmatch, value.split(",")))
    return [match[1] for match in matches if match]


def own_mig_device(
    environ: Mapping[str, str], local_rank: int, local_world_size: int
) -> dict[str, str]:
    """Return the variable that selects a rank's MIG device if several are visible.

    CUDA only uses the first MIG device of a list (NVIDIA's MIG user guide), so all ranks of the
    host would share it. Empty for the only rank of a host, which may start further ranks.
    """
    devices = environ.get(VISIBLE_GPUS, "").split(",")
    if local_world_size == 1 or len(devices) == 1 or not devices[0].startswith("MIG-"):
        return {}
    return {VISIBLE_GPUS: devices[local_rank % len(devices)]}


def _interfaces() -> list[str]:
    import socket  # rarely needed

    return [name for _, name in socket.if_nameindex()]


def _is_usable(interface: str) -> bool:
    from clusterddp.processes import hardware  # rarely needed

    with suppress(OSError):
        if Path("/sys/class/net", interface, "operstate").read_text().strip() == "down":
            return False
    return bool(hardware.address_of(interface))


def own_gloo_interfaces(
    environ: Mapping[str, str],
    world_size: int,
    present: Callable[[], list[str]] = _interfaces,
    is_usable: Callable[[str], bool] = _is_usable,
) -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME with the name of one of this host's interfaces.

    gloo ends a rank if it gets NCCL's forms: a prefix, `=ib0`, `^docker0`, or names of which this
    host has only some. It connects once per name, and waits forever for a host with fewer names: so
    a list or a prefix means the first interface that is up and has an IPv4 address, or else the
    first. With ^, gloo uses the address of the host's name. Empty if there is nothing to change.
    present: returns the host's interfaces.

    Raises DistEnvError if the host has none of them and there are several ranks.
    """
    wanted = environ.get(GLOO_INTERFACE, "")
    if not wanted:
        return {}
    if wanted.startswith("^"):
        return {GLOO_INTERFACE: ""}
    names, found = present(), list[str]()
    for part in filter(None, wanted.lstrip("=").split(",")):
        alike = () if wanted.startswith("=") else (n for n in names if n.startswith(part))
        found += [part] if part in names else alike
    if not found and world_size == 1:  # gloo looks up a name that it does not need then
        return {GLOO_INTERFACE: ""}
    if not found:
        raise DistEnvError(
            f"{GLOO_INTERFACE}={format_value(wanted)}: expected network interfaces of "
            f"{host_name(environ)}, which has {', '.join(names)}. Name one that every node has, "
            "with --network-interface. [CD0911]"
        )
    return {GLOO_INTERFACE: next(filter(is_usable, found), found[0])}


def torch_variables_are_set(environ: Mapping[str, str]) -> bool:
    """Return whether torch's variables are set. Raises DistEnvError if only some are."""
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return False
    missing = [name for name in TORCH_VARIABLES if name not in environ]
    if missing:
        names = (*TORCH_VARIABLES, "LOCAL_RANK")
        raise DistEnvError(
            f"{assignments(environ, names)}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: torch needs all four of "
            f"{', '.join(TORCH_VARIABLES)}. Set the missing ones, or derive all of them from "
            "Slurm: unset RANK WORLD_SIZE LOCAL_RANK"
        )
    return True


def read_torch_variables(environ: Mapping[str, str]) -> RankLayout:
    """Read torch's variables and derive missing ones if they are unambiguous.

    Raises DistEnvError for variables that are empty, malformed or contradictory.
    """
    rank, world_size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    step_is_ours = _step_agrees(environ, rank.value, world_size.value)
    layout = _layout(environ, rank.value, world_size.value, step_is_ours)
    hosts: tuple[str, ...] = ()
    hosts_source = "unknown: torch's variables only name the first host"
    if step_is_ours and "SLURM_STEP_NODELIST" in environ:
        hosts_source = "SLURM_STEP_NODELIST"
        hosts = tuple(_expanded(expand_nodelist, environ, hosts_source))
    elif layout["num_nodes"].value == 1:
        hosts, hosts_source = (text(environ, "MASTER_ADDR"),), "MASTER_ADDR"
    return RankLayout({"rank": rank, "world_size": world_size, **layout}, hosts, hosts_source)


def _step_agrees(environ: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Return whether torch's variables number the tasks of the surrounding Slurm step.

    Raises DistEnvError if the world size matches but the rank does not: such variables leaked from
    a surrounding job. torchrun's agent numbers its workers (TORCHELASTIC_RUN_ID) itself.
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
            f"{assignments(environ, ('RANK', 'WORLD_SIZE', 'SLURM_PROCID', name))}: expected RANK "
            "to equal SLURM_PROCID in a step of WORLD_SIZE tasks; torch's variables probably come "
            "from a surrounding job. Unset RANK, WORLD_SIZE and LOCAL_RANK before srun."
        )
    return False


def _layout(
    environ: Mapping[str, str], rank: int, world_size: int, step_is_ours: bool
) -> dict[str, Number]:
    """Read LOCAL_* and GROUP_*, and derive missing ones if they are unambiguous."""
    layout = {field: number(environ, name) for field, name in _LAYOUT.items() if name in environ}
    if "NODE_RANK" in environ:  # other launchers' name for GROUP_RANK
        node_rank = number(environ, "NODE_RANK")
        if layout.setdefault("node_rank", node_rank).value != node_rank.value:
            refuse(environ, ("GROUP_RANK", "NODE_RANK"), "the same node rank in both")
    if step_is_ours and len(layout) < len(_LAYOUT):
        # A wrapper copied some of Slurm's variables to torch's names.
        step = read_step(environ).numbers
        layout = {field: step[field] for field in _LAYOUT} | layout
    if not layout:
        assumed = "all ranks on one host, because LOCAL_RANK and LOCAL_WORLD_SIZE are not set"
        return {
            "local_rank": Number(rank, f"RANK ({assumed})"),
            "local_world_size": Number(world_size, f"WORLD_SIZE ({assumed})"),
            "num_nodes": Number(1, assumed),
            "node_rank": Number(0, assumed),
        }
    names = ("RANK", "WORLD_SIZE", *_LAYOUT.values(), "NODE_RANK")
    evenly = "WORLD_SIZE over {}: the same number per node"
    share, nodes = layout.get("local_world_size"), layout.get("num_nodes")
    if share is None and world_size == 1:
        share = Number(1, "WORLD_SIZE")
    if share is None:
        if nodes is None or nodes.value < 1 or world_size % nodes.value:
            refuse(environ, names, "LOCAL_WORLD_SIZE, the number of ranks on this node")
        share = Number(world_size // nodes.value, evenly.format(nodes.source))
    if share.value < 1:
        refuse(environ, names, "LOCAL_WORLD_SIZE of at least 1")
    if nodes is None:
        if world_size % share.value:
            needed = "GROUP_WORLD_SIZE, because LOCAL_WORLD_SIZE does not divide WORLD_SIZE"
            refuse(environ, names, needed)
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


def read_step(environ: Mapping[str, str]) -> RankLayout:
    """Read a step's variables and check its lists against its counts. Raises DistEnvError."""
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
    return RankLayout(numbers, hosts, hosts_name)


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
            f"{assignments(environ, names[:3])}: this is a heterogeneous Slurm job, whose "
            "components number their tasks and nodes separately; expected a job of one component. "
            "Submit without 'hetjob' and ':', or export RANK, WORLD_SIZE, MASTER_ADDR, "
            "MASTER_PORT, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE yourself."
        )


def is_heterogeneous(environ: Mapping[str, str]) -> bool:
    """Return whether this is a heterogeneous job or one of its steps."""
    return any(_HETEROGENEOUS.match(name) for name in environ)


def required(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the first name that is set. Raises DistEnvError if none is."""
    name = first_set(environ, names)
    if name is None:
        raise DistEnvError(
            f"{assignments(environ, STEP_ID)}, but {' and '.join(names)} "
            f"{'is' if len(names) == 1 else 'are'} not set: expected every variable that srun "
            "gives a task. Start it with srun, and keep all SLURM_* variables."
        )
    return name


def number(environ: Mapping[str, str], name: str) -> Number:
    """Read a whole number with its name as source. Raises DistEnvError for other values."""
    value = text(environ, name)
    if not _INTEGER.fullmatch(value):
        refuse(environ, (name,), "a whole number of 0 or more")
    return Number(int(value), name)


def text(environ: Mapping[str, str], name: str) -> str:
    """Read a variable. Raises DistEnvError if it is empty."""
    if not environ[name]:
        raise DistEnvError(
            f"{name} is set but empty: expected a value. Set it, or remove it with 'unset {name}'."
        )
    return environ[name]


def first_set(environ: Mapping[str, str], names: Sequence[str]) -> str | None:
    """Return the first name that is set, if any."""
    return next((name for name in names if name in environ), None)


def refuse(environ: Mapping[str, str], names: Sequence[str], expected: str) -> NoReturn:
    """Raise DistEnvError for invalid variables, with their values and the expectation."""
    contradiction(assignments(environ, names), expected)


def contradiction(variables: str, expected: str) -> NoReturn:
    """Raise DistEnvError for invalid variables, given as `assignments`, with the expectation."""
    raise DistEnvError(
        f"{variables}: expected {expected}. Variables of a surrounding job may have leaked in: "
        "unset them, or start the task with srun or torchrun from a clean shell."
    )


def assignments(environ: Mapping[str, str], names: Sequence[str]) -> str:
    """Return NAME=value of the set variables, joined by commas."""
    return ", ".join(f"{name}={format_value(environ[name])}" for name in names if name in environ)


def format_value(value: str) -> str:
    """Return a value for a message: escaped unless plain ASCII, and cut if long."""
    short = value[:80] if PRINTABLE.fullmatch(value) else ascii(value[:80])
    return f"{short}..." if len(value) > 80 else short


def parse_environment(text: str) -> dict[str, str]:
    """Parse the output of `env` or `env -0`, including values of several lines.

    Raises RequestError if it has no variable, or variables of several tasks.
    """
    text = text.replace("\r\n", "\n")
    if _DECLARATION.match(text):
        raise RequestError(
            "the pasted environment has a shell's declarations and quotes; paste the output of "
            "'env' or 'env -0'. [CD0801]"
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
                    "expected one task's variables. Paste the output of, for example, "
                    "'srun --ntasks=1 env'. [CD0801]"
                )
            environ[name] = value
        elif name and record and end == "\n":
            # `env` quotes nothing: a line without an assignment continues the previous value.
            environ[name] += f"\n{record}"
    if not environ:
        raise RequestError(
            "the pasted environment has no NAME=value line; paste the output of 'env'. [CD0801]"
        )
    return environ


def slurm_job_name(environ: Mapping[str, str], job_id: str) -> str:
    """Return the job id that Slurm's commands accept for the job of this process.

    The SLURM_JOB_ID of an array's last task is the array's id, which selects all tasks.
    """
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{element}" if array and element else job_id


def is_held(environ: Mapping[str, str]) -> bool:
    """Return whether the job is the user's allocation, of which this run is only a part."""
    return HELD_VARIABLE in environ


def has_queue(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm can start the run's job again."""
    return not (is_rehearsal(environ) or is_held(environ))


def is_rehearsal(environ: Mapping[str, str]) -> bool:
    """Return whether the local launcher runs this, so that there is no slurmctld."""
    return REHEARSAL_VARIABLE in environ
