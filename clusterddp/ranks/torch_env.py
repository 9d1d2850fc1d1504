"""What torch's variables say of a task, as torchrun, a wrapper or a person has set them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from clusterddp.errors import DistEnvError
from clusterddp.ranks import slurm_step, variables

# torch's env:// needs these four (torch/distributed/rendezvous.py).
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PLACE_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "GROUP_WORLD_SIZE",
)  # fmt: skip


class Number(NamedTuple):
    """A number and where it came from; true in a condition even where the number is 0."""

    value: int
    source: str


class Layout(NamedTuple):
    """Which of the nodes a rank lives on, and which of the ranks there it is."""

    local_rank: Number
    local_world_size: Number
    node_rank: Number
    num_nodes: Number


class Place(NamedTuple):
    """A task's place as torch's variables give it."""

    rank: int
    world_size: int
    layout: Layout
    master_addr: str
    master_port: int
    # One name a node, in the order of the node ranks; empty where the variables do not tell.
    hostnames: tuple[str, ...]
    hostnames_source: str


def are_set(environ: Mapping[str, str]) -> bool:
    """Whether torch's variables are there; raises DistEnvError where only some of them are."""
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return False
    missing = [name for name in VARIABLES if name not in environ]
    if missing:
        names = (*VARIABLES, "LOCAL_RANK")
        raise DistEnvError(
            f"{variables.shown(environ, names)}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: torch's variables come all four "
            f"({', '.join(VARIABLES)}) or not at all. Set the missing, or unset the others "
            "(unset RANK WORLD_SIZE LOCAL_RANK) to derive them from Slurm."
        )
    return True


def read(environ: Mapping[str, str]) -> Place:
    """Take what the variables say, and fill in the rest where it is beyond doubt.

    Raises DistEnvError for variables that are empty, malformed or contradictory.
    """
    rank, world_size = variables.integer(environ, "RANK"), variables.integer(environ, "WORLD_SIZE")
    step_is_ours = _step_agrees(environ, rank, world_size)
    layout = _layout(environ, rank, world_size, step_is_ours)
    master_addr = variables.text(environ, "MASTER_ADDR")
    hostnames: tuple[str, ...] = ()
    hostnames_source = "unknown: torch's variables name the first host only"
    if step_is_ours and "SLURM_STEP_NODELIST" in environ:
        hostnames, hostnames_source = (
            slurm_step.hosts_of(environ, "SLURM_STEP_NODELIST"),
            "SLURM_STEP_NODELIST",
        )
    elif layout.num_nodes.value == 1:
        hostnames, hostnames_source = (master_addr,), "MASTER_ADDR"
    master_port = variables.integer(environ, "MASTER_PORT")
    return Place(rank, world_size, layout, master_addr, master_port, hostnames, hostnames_source)


def _step_agrees(environ: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Whether torch's variables speak of the very tasks of the Slurm step around this process.

    Raises when they seem to, but give this task another rank: such a set leaked in from a
    surrounding job. torchrun's workers (TORCHELASTIC_RUN_ID) are numbered by its agent instead.
    """
    if "TORCHELASTIC_RUN_ID" in environ or "SLURM_PROCID" not in environ:
        return False
    if slurm_step.step_id_of(environ) is None or slurm_step.is_heterogeneous(environ):
        return False
    name = variables.first_set(environ, slurm_step.NUM_TASKS)
    if name is None or variables.integer(environ, name) != world_size:
        return False
    if variables.integer(environ, "SLURM_PROCID") == rank:
        return True
    if world_size > 1:
        raise DistEnvError(
            f"{variables.shown(environ, ('RANK', 'WORLD_SIZE', 'SLURM_PROCID', name))}: expected "
            "RANK to equal SLURM_PROCID in a step of WORLD_SIZE tasks; torch's variables seem to "
            "be those of a surrounding job. Unset RANK, WORLD_SIZE and LOCAL_RANK before srun."
        )
    return False


def _layout(environ: Mapping[str, str], rank: int, world_size: int, step_is_ours: bool) -> Layout:
    """Take what LOCAL_* and GROUP_* say, and fill in the rest where it is beyond doubt."""
    local_rank = _optional(environ, "LOCAL_RANK")
    local_world_size = _optional(environ, "LOCAL_WORLD_SIZE")
    node_rank = _group_rank(environ)
    num_nodes = _optional(environ, "GROUP_WORLD_SIZE")
    if None in (local_rank, local_world_size, node_rank, num_nodes) and step_is_ours:
        # A wrapper that copied Slurm's variables under torch's names, but not all of them.
        step = slurm_step.read_step(environ)
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
        variables.contradiction(
            variables.list_shown(environ, _PLACE_VARIABLES), "LOCAL_WORLD_SIZE of at least 1"
        )
    local_rank = local_rank or Number(rank % local_world_size.value, blocks)
    num_nodes = num_nodes or _even_nodes(environ, world_size, local_world_size)
    node_rank = node_rank or (
        Number(0, num_nodes.source)
        if num_nodes.value == 1
        else Number(rank // local_world_size.value, blocks)
    )
    return Layout(local_rank, local_world_size, node_rank, num_nodes)


def _group_rank(environ: Mapping[str, str]) -> Number | None:
    """GROUP_RANK is torchrun's name for it; NODE_RANK what other launchers and people use."""
    group, node = _optional(environ, "GROUP_RANK"), _optional(environ, "NODE_RANK")
    if group and node and group.value != node.value:
        variables.contradiction(
            variables.list_shown(environ, ("GROUP_RANK", "NODE_RANK")), "the same node rank in both"
        )
    return group or node


def _even_share(environ: Mapping[str, str], world_size: int, num_nodes: Number | None) -> Number:
    if world_size == 1:
        return Number(1, "WORLD_SIZE")
    if num_nodes is None or num_nodes.value < 1 or world_size % num_nodes.value:
        variables.contradiction(
            variables.list_shown(environ, _PLACE_VARIABLES),
            "LOCAL_WORLD_SIZE, to know how many ranks share this node",
        )
    return Number(
        world_size // num_nodes.value, f"WORLD_SIZE over {num_nodes.source}: as many on each node"
    )


def _even_nodes(environ: Mapping[str, str], world_size: int, local_world_size: Number) -> Number:
    if world_size % local_world_size.value:
        variables.contradiction(
            variables.list_shown(environ, _PLACE_VARIABLES),
            "GROUP_WORLD_SIZE, as WORLD_SIZE is no multiple of LOCAL_WORLD_SIZE",
        )
    return Number(
        world_size // local_world_size.value,
        f"WORLD_SIZE over {local_world_size.source}: as many on each node",
    )


def _optional(environ: Mapping[str, str], name: str) -> Number | None:
    return Number(variables.integer(environ, name), name) if name in environ else None
