"""Ranks of a task and its rendezvous address.

Derived from torch's variables, a Slurm step, flags, or defaults. Pure: reads no os.environ, opens
no socket, starts no process. The caller exports the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from clusterddp.errors import RequestError
from clusterddp.ranks import variables
from clusterddp.ranks.variables import Number, RankLayout

Origin = Literal["torch", "slurm", "single"]

_COUNTS = {"rank": "world_size", "local_rank": "local_world_size", "node_rank": "num_nodes"}
MIN_PORT = 12000
_PORTS = 20000
MAX_PORT = MIN_PORT + _PORTS - 1
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
MAX_RANKS = 100_000
"""Limit of ranks started by hand: torch's store waits for at most 128 x 1024 keys at once
(MAX_KEY_COUNT in TCPStoreBackend.cpp), and rank 0 waits for one key per rank."""
MAX_PROCS = 1024
"""Limit of ranks on one workstation; a higher number is a typing error."""
# Variables of a surrounding job or agent, which would make a rank look like its task.
_FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "TORCHELASTIC_", "PMI", "MASTER_")


@dataclass(frozen=True)
class DistEnv:
    """Ranks and rendezvous address of a task, in torch's terms; validated at construction.

    Raises DistEnvError if the numbers contradict each other, with the source of each number.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int  # ranks on this node; nodes may differ
    num_nodes: int
    master_addr: str
    master_port: int  # 0, in a world of one only: any free port
    # One name per node, in order of node ranks; empty if unknown.
    hostnames: tuple[str, ...]
    origin: Origin
    # The variable or rule that each field above came from.
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> DistEnv:
        """Derive them from its environment variables.

        In this order: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together (torchrun, or exported
        by hand); a Slurm step (srun); a single process, also in a batch script or salloc shell.
        MASTER_ADDR and MASTER_PORT without the others are presets for a step or single process.

        Raises DistEnvError for variables that are empty, malformed, incomplete or contradictory.
        """
        if variables.torch_variables_are_set(environ):
            return _derived(environ, "torch", variables.read_torch_variables(environ))
        if variables.is_in_step(environ):
            return _derived(environ, "slurm", variables.read_step(environ))
        return _derived(environ, "single", _single(environ))

    def to_environ(self) -> dict[str, str]:
        """Return the variables to export: those that torchrun gives its workers, and NODE_RANK.

        They are the variables of torch's local_elastic_agent.py without TORCHELASTIC_*, which would
        claim an elastic agent.
        """
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "NODE_RANK": str(self.node_rank),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
        }

    def __post_init__(self) -> None:
        for index, count in _COUNTS.items():
            highest = getattr(self, count) - 1
            if highest < 0:
                self._refuse(f"{count} of at least 1", count)
            if not 0 <= getattr(self, index) <= highest:
                self._refuse(f"{index} from 0 to {highest}", index, count)
        elsewhere, other_nodes = self.world_size - self.local_world_size, self.num_nodes - 1
        if elsewhere < other_nodes or (elsewhere and not other_nodes):
            self._refuse(
                f"the {elsewhere} ranks on other nodes to fill {other_nodes} other nodes",
                *_COUNTS.values(),
            )
        lowest_port = 0 if self.world_size == 1 else 1
        if not lowest_port <= self.master_port <= 65535:
            self._refuse(f"a port from {lowest_port} to 65535", "master_port")
        if not variables.PRINTABLE.fullmatch(self.master_addr):
            self._refuse("a host name or an address", "master_addr")

    def _refuse(self, expected: str, *fields: str) -> NoReturn:
        variables.contradiction(", ".join(map(self._assignment, fields)), expected)

    def _assignment(self, name: str) -> str:
        value, source = variables.format_value(str(getattr(self, name))), self.sources.get(name, "")
        if _VARIABLE.fullmatch(source):
            return f"{source}={value}"
        return f"{name}={value} ({source})" if source else f"{name}={value}"


def of_hosts(rank: int, hosts: Sequence[str], master_addr: str, master_port: int) -> DistEnv:
    """Return the environment of a rank in an existing process group, from the host of each rank."""
    names = tuple(dict.fromkeys(hosts))
    host = hosts[rank]
    return DistEnv(
        rank=rank,
        local_rank=list(hosts[:rank]).count(host),
        node_rank=names.index(host),
        world_size=len(hosts),
        local_world_size=list(hosts).count(host),
        num_nodes=len(names),
        master_addr=master_addr,
        master_port=master_port,
        hostnames=names,
        origin="torch",
    )


def master_port(job_id: int, step_id: int, restart_count: int, candidate: int = 0) -> int:
    """Return the rendezvous port of a step; candidates 1, 2, … are alternatives to candidate 0.

    Every rank computes the same port independently from SLURM_JOB_ID, SLURM_STEP_ID and
    SLURM_RESTART_COUNT. All ports are in 12000 to 31999: above the well-known ones and below Linux'
    ephemeral range, 32768 to 60999 (ip_local_port_range). Consecutive jobs get ports 97 apart,
    consecutive steps 11 apart, and a requeued job avoids its predecessor's listener. 97 and 4001
    are coprime to 20000: with equal steps and restarts, only job ids a multiple of 20000 apart
    collide, and the candidates cover every port.
    """
    return MIN_PORT + (job_id * 97 + step_id * 11 + restart_count + candidate * 4001) % _PORTS


def foreign_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of variables that a surrounding job or torchrun agent has set.

    They are wrong for ranks outside of its tasks.
    """
    return [name for name in environ if name.startswith(_FOREIGN)]


def local_ranks(procs: int, port: int) -> list[DistEnv]:
    """Return the environments of `procs` ranks on this host with this rendezvous port."""
    return [_env_of(rank, procs, "127.0.0.1", port, procs) for rank in range(procs)]


def from_flags(
    rank: int | None,
    world_size: int | None,
    master_addr: str | None,
    master_port: int | None,
    local_rank: int | None,
    local_world_size: int | None,
) -> DistEnv | None:
    """Return a rank's environment from `train`'s flags of these names, or None if none is given.

    Without local_world_size, all ranks are on one host; with it, each host has this number of
    consecutive ranks. Raises RequestError, quoting the flags.
    """
    given = {
        "--rank": rank,
        "--world-size": world_size,
        "--master-addr": master_addr,
        "--master-port": master_port,
        "--local-rank": local_rank,
        "--local-world-size": local_world_size,
    }
    typed = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    if not typed:
        return None
    if rank is None or world_size is None or (master_port is None and world_size > 1):
        needed = ("--rank", "--world-size", "--master-port")
        missing = [name for name in needed if given[name] is None]
        raise RequestError(
            f"{', '.join(typed)} without {' and '.join(missing)}: a rank started by hand needs "
            f"{', '.join(needed[:2])} and {needed[2]}, with the same world size and port in every "
            "shell. Give all of them, or none to read the ranks from the environment. [CD0802]"
        )
    _within("--world-size", world_size, 1, MAX_RANKS)
    _within("--rank", rank, 0, world_size - 1, f" (--world-size {world_size})")
    if master_port is not None:
        _within("--master-port", master_port, 1, 65535)
    if master_addr is not None and not variables.PRINTABLE.fullmatch(master_addr):
        raise RequestError(
            f"--master-addr: {master_addr!a} is not a host name or address; "
            "give that of rank 0's host. [CD0802]"
        )
    local_world_size = _ranks_per_host(rank, world_size, local_rank, local_world_size)
    return _env_of(rank, world_size, master_addr or "127.0.0.1", master_port or 0, local_world_size)


def check_address(addr: str) -> None:
    """Raise RequestError for a name that does not resolve, before a rendezvous would time out."""
    import socket

    try:
        socket.getaddrinfo(addr, None)
    except OSError as error:
        raise RequestError(
            f"--master-addr {addr}: {error.strerror or error}. Give a name of rank 0's host that "
            "resolves on this host, or its address. [CD0904]"
        ) from None


def _derived(environ: Mapping[str, str], origin: Origin, layout: RankLayout) -> DistEnv:
    """Add the rendezvous address to a layout: MASTER_ADDR and MASTER_PORT if set, else derived."""
    addr, addr_source = "127.0.0.1", layout.hosts_source
    if "MASTER_ADDR" in environ:
        addr, addr_source = variables.text(environ, "MASTER_ADDR"), "MASTER_ADDR"
    elif origin == "slurm":
        addr, addr_source = layout.hosts[0], f"{layout.hosts_source} (first host)"
    if "MASTER_PORT" in environ:
        port = variables.number(environ, "MASTER_PORT")
        if origin != "torch" and not 1 <= port.value <= 65535:  # to DistEnv, 0 means any port
            variables.refuse(environ, ("MASTER_PORT",), "a port from 1 to 65535")
    elif origin == "slurm":
        port = _step_port(environ)
    else:
        port = Number(0, f"{layout.hosts_source}: any free port")
    numbers = {**layout.numbers, "master_port": port}
    return DistEnv(
        **{name: number.value for name, number in numbers.items()},
        master_addr=addr,
        hostnames=layout.hosts,
        origin=origin,
        sources={
            **{name: number.source for name, number in numbers.items()},
            "master_addr": addr_source,
            "hostnames": layout.hosts_source,
        },
    )


def _single(environ: Mapping[str, str]) -> RankLayout:
    variables.refuse_heterogeneous(environ)
    default = "default: single process"
    name = variables.first_set(environ, variables.JOB_ID)
    if name:
        default += f" ({name} is set but this shell is not in a step; start tasks with srun)"
    first, only = Number(0, default), Number(1, default)
    numbers = {
        **dict.fromkeys(("rank", "local_rank", "node_rank"), first),
        **dict.fromkeys(("world_size", "local_world_size", "num_nodes"), only),
    }
    return RankLayout(numbers, ("localhost",), default)


def _step_port(environ: Mapping[str, str]) -> Number:
    names = [variables.required(environ, ids) for ids in (variables.JOB_ID, variables.STEP_ID)]
    if "SLURM_RESTART_COUNT" in environ:  # unset on the first start
        names.append("SLURM_RESTART_COUNT")
    job_id, step_id, *restarts = (variables.number(environ, name).value for name in names)
    return Number(master_port(job_id, step_id, sum(restarts)), f"computed from {', '.join(names)}")


def _ranks_per_host(
    rank: int, world_size: int, local_rank: int | None, local_world_size: int | None
) -> int:
    """Return the number of ranks per host. Raises RequestError if the flags contradict."""
    if local_world_size is None:
        if local_rank is not None:
            raise RequestError(
                f"--local-rank {local_rank} without --local-world-size: the number of ranks per "
                "host is unknown. Give it, or omit both if all ranks are on one host. [CD0802]"
            )
        return world_size
    _within("--local-world-size", local_world_size, 1, world_size, f" (--world-size {world_size})")
    if world_size % local_world_size:
        raise RequestError(
            f"--world-size {world_size} is not a multiple of --local-world-size "
            f"{local_world_size}: these flags need the same number of ranks on each host. For "
            "other layouts export torch's variables, including LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "GROUP_RANK and GROUP_WORLD_SIZE. [CD0802]"
        )
    if local_rank not in (None, rank % local_world_size):
        raise RequestError(
            f"--local-rank {local_rank} conflicts with --rank {rank} and --local-world-size "
            f"{local_world_size}: expected {rank % local_world_size}, because consecutive ranks "
            "share a host. Omit --local-rank, or number the ranks host by host. [CD0802]"
        )
    return local_world_size


def _env_of(rank: int, world_size: int, addr: str, port: int, local_world_size: int) -> DistEnv:
    num_nodes = world_size // local_world_size
    return DistEnv(
        rank=rank,
        local_rank=rank % local_world_size,
        node_rank=rank // local_world_size,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
        master_addr=addr,
        master_port=port,
        hostnames=(addr,) if num_nodes == 1 else (),
        origin="torch",
    )


def _within(flag: str, value: int, lowest: int, highest: int, why: str = "") -> None:
    if not lowest <= value <= highest:
        raise RequestError(
            f"{flag}: {value} is not a number from {lowest} to {highest}{why}. [CD0802]"
        )
