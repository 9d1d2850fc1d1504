"""Place of a task in its run: its ranks and where the ranks meet, from variables or flags.

Derives from torch's variables, a Slurm step or neither; reads no os.environ, opens no socket and
starts nothing. Exporting the result is left to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from clusterddp.errors import RequestError
from clusterddp.ranks import variables
from clusterddp.ranks.variables import Number, Place

Origin = Literal["torch", "slurm", "single"]

_COUNTS = {"rank": "world_size", "local_rank": "local_world_size", "node_rank": "num_nodes"}
LOWEST_PORT = 12000
_PORTS = 20000
HIGHEST_PORT = LOWEST_PORT + _PORTS - 1
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
MOST_RANKS = 100_000
"""Most ranks of a run that are started by hand: torch's store waits for no more than 128 x 1024
keys at once (MAX_KEY_COUNT of its TCPStoreBackend.cpp), and rank 0 for one of every rank."""
MOST_PROCS = 1024
"""Ranks of one workstation; a number above it is a slip of the finger."""
# A surrounding job's or agent's variables, which would tell a rank that it is its task.
_FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "TORCHELASTIC_", "PMI", "MASTER_")


@dataclass(frozen=True)
class DistEnv:
    """Place of a task in its run, in torch's words; checked against itself at construction.

    Raises DistEnvError when the numbers contradict each other: the message shows each with the
    variable it came from.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int  # ranks on this node; nodes may differ
    num_nodes: int
    master_addr: str
    master_port: int  # 0, in a world of one only: any free port
    # One name a node, in the order of the node ranks; empty where the variables do not tell.
    hostnames: tuple[str, ...]
    origin: Origin
    # For each field above, the variable or the rule it came from.
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> DistEnv:
        """Derive a task's place from its environment variables.

        In this order: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, all four of them (torchrun,
        or exported by hand); a Slurm step (srun); a single process, which is also what a batch
        script or an salloc shell is. MASTER_ADDR and MASTER_PORT alone are presets that a step
        and a single process honour.

        Raises DistEnvError for variables that are empty, malformed, half set or contradictory.
        """
        if variables.torch_variables_are_set(environ):
            return _derived(environ, "torch", variables.read_torch_variables(environ))
        if variables.is_in_step(environ):
            return _derived(environ, "slurm", variables.read_step(environ))
        return _derived(environ, "single", _alone(environ))

    def to_environ(self) -> dict[str, str]:
        """Return the variables to export: what torchrun gives its workers, and NODE_RANK.

        The list is that of torch's local_elastic_agent.py without TORCHELASTIC_*, which would
        claim an elastic agent that is not there.
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
                f"the {elsewhere} ranks beyond this node's to fill {other_nodes} further nodes",
                *_COUNTS.values(),
            )
        lowest_port = 0 if self.world_size == 1 else 1
        if not lowest_port <= self.master_port <= 65535:
            self._refuse(f"a port from {lowest_port} to 65535", "master_port")
        if not variables.PRINTABLE.fullmatch(self.master_addr):
            self._refuse("a host name or an address", "master_addr")

    def _refuse(self, expected: str, *fields: str) -> NoReturn:
        variables.contradiction(", ".join(map(self._shown, fields)), expected)

    def _shown(self, name: str) -> str:
        value, source = variables.shown_value(str(getattr(self, name))), self.sources.get(name, "")
        if _VARIABLE.fullmatch(source):
            return f"{source}={value}"
        return f"{name}={value} ({source})" if source else f"{name}={value}"


def of_hosts(rank: int, hosts: Sequence[str], master_addr: str, master_port: int) -> DistEnv:
    """Return the place of a rank of a process group that is there, by the host of each rank."""
    names = tuple(dict.fromkeys(hosts))
    own = hosts[rank]
    return DistEnv(
        rank=rank,
        local_rank=list(hosts[:rank]).count(own),
        node_rank=names.index(own),
        world_size=len(hosts),
        local_world_size=list(hosts).count(own),
        num_nodes=len(names),
        master_addr=master_addr,
        master_port=master_port,
        hostnames=names,
        origin="torch",
    )


def master_port(job_id: int, step_id: int, restart_count: int, candidate: int = 0) -> int:
    """Return the port where the ranks of a step meet: `candidate` 0 first, then further ones.

    Every rank computes the same without talking to another, from SLURM_JOB_ID, SLURM_STEP_ID and
    SLURM_RESTART_COUNT. All ports lie in 12000 to 31999: above the well-known ones and below
    32768 to 60999, from which Linux hands out ports of its own (ip_local_port_range). Slurm's job
    ids are consecutive, so jobs sharing a node get ports 97 apart, its steps 11 apart, and a
    requeued job does not meet its predecessor's listener. 97 and 4001 are prime to 20000: ids
    collide only at 20000 jobs' distance, and the candidates visit every port.
    """
    offset = job_id * 97 + step_id * 11 + restart_count + candidate * 4001
    return LOWEST_PORT + offset % _PORTS


def foreign(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of a surrounding job, which do not hold for ranks outside its tasks."""
    return [name for name in environ if name.startswith(_FOREIGN)]


def local_ranks(procs: int, port: int) -> list[DistEnv]:
    """Return the places of `procs` ranks on this very host, which meet at a port."""
    return [_placed(rank, procs, "127.0.0.1", port, procs) for rank in range(procs)]


def from_flags(
    rank: int | None,
    world_size: int | None,
    master_addr: str | None,
    master_port: int | None,
    local_rank: int | None,
    local_world_size: int | None,
) -> DistEnv | None:
    """Return the place that `train`'s flags of these names give a rank; None where none was typed.

    Without local_world_size all ranks are taken to be on one host; with it, consecutive ranks
    share a host, as many on each. Raises RequestError, naming the flags as they were typed.
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
            f"{', '.join(typed)} without {' and '.join(missing)}: a rank that is started by hand "
            f"needs {', '.join(needed[:2])} and {needed[2]}, the same world size and port in every "
            "shell. Give them all, or none of them to take the ranks from the environment. [CD0802]"
        )
    _within("--world-size", world_size, 1, MOST_RANKS)
    _within("--rank", rank, 0, world_size - 1, f" (--world-size {world_size})")
    if master_port is not None:
        _within("--master-port", master_port, 1, 65535)
    if master_addr is not None and not variables.PRINTABLE.fullmatch(master_addr):
        raise RequestError(
            f"--master-addr: {master_addr!a} is no host name or address; "
            "give that of the host on which rank 0 is. [CD0802]"
        )
    local_world_size = _ranks_of_a_host(rank, world_size, local_rank, local_world_size)
    return _placed(rank, world_size, master_addr or "127.0.0.1", master_port or 0, local_world_size)


def check_address(addr: str) -> None:
    """Raise RequestError for a name that leads nowhere, for which ranks would wait in vain."""
    import socket

    try:
        socket.getaddrinfo(addr, None)
    except OSError as error:
        raise RequestError(
            f"--master-addr {addr}: {error.strerror or error}. Name the host on which rank 0 is "
            "as this one knows it, or give its address. [CD0904]"
        ) from None


def _derived(environ: Mapping[str, str], origin: Origin, place: Place) -> DistEnv:
    """Return the place, and where the ranks meet: by MASTER_ADDR and MASTER_PORT where set."""
    addr, addr_source = "127.0.0.1", place.hosts_source
    if "MASTER_ADDR" in environ:
        addr, addr_source = variables.text(environ, "MASTER_ADDR"), "MASTER_ADDR"
    elif origin == "slurm":
        addr, addr_source = place.hosts[0], f"{place.hosts_source} (first host)"
    if "MASTER_PORT" in environ:
        port = variables.number(environ, "MASTER_PORT")
        if origin != "torch" and not 1 <= port.value <= 65535:  # DistEnv takes a 0 for any port
            variables.refuse(environ, ("MASTER_PORT",), "a port from 1 to 65535")
    elif origin == "slurm":
        port = _step_port(environ)
    else:
        port = Number(0, f"{place.hosts_source}: any free port")
    numbers = {**place.numbers, "master_port": port}
    return DistEnv(
        **{name: number.value for name, number in numbers.items()},
        master_addr=addr,
        hostnames=place.hosts,
        origin=origin,
        sources={
            **{name: number.source for name, number in numbers.items()},
            "master_addr": addr_source,
            "hostnames": place.hosts_source,
        },
    )


def _alone(environ: Mapping[str, str]) -> Place:
    variables.refuse_heterogeneous(environ)
    default = "default: single process"
    name = variables.first_set(environ, variables.JOB_ID)
    if name:
        default += f" ({name} is set but this shell is no step; start tasks with srun)"
    first, only = Number(0, default), Number(1, default)
    numbers = {
        **dict.fromkeys(("rank", "local_rank", "node_rank"), first),
        **dict.fromkeys(("world_size", "local_world_size", "num_nodes"), only),
    }
    return Place(numbers, ("localhost",), default)


def _step_port(environ: Mapping[str, str]) -> Number:
    names = [variables.required(environ, ids) for ids in (variables.JOB_ID, variables.STEP_ID)]
    if "SLURM_RESTART_COUNT" in environ:  # unset on the first start
        names.append("SLURM_RESTART_COUNT")
    job_id, step_id, *restarts = (variables.number(environ, name).value for name in names)
    return Number(master_port(job_id, step_id, sum(restarts)), f"computed from {', '.join(names)}")


def _ranks_of_a_host(
    rank: int, world_size: int, local_rank: int | None, local_world_size: int | None
) -> int:
    """Return the number of ranks on each host. Raises RequestError where the flags do not fit."""
    if local_world_size is None:
        if local_rank is not None:
            raise RequestError(
                f"--local-rank {local_rank} without --local-world-size: how many ranks are on a "
                "host? Give it too, or leave both out where all ranks are on one host. [CD0802]"
            )
        return world_size
    _within("--local-world-size", local_world_size, 1, world_size, f" (--world-size {world_size})")
    if world_size % local_world_size:
        raise RequestError(
            f"--world-size {world_size} is no multiple of --local-world-size {local_world_size}: "
            "these flags take as many ranks on each host. For others export torch's variables, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE among them. [CD0802]"
        )
    if local_rank not in (None, rank % local_world_size):
        raise RequestError(
            f"--local-rank {local_rank} against --rank {rank} and --local-world-size "
            f"{local_world_size}: expected {rank % local_world_size}, for consecutive ranks share "
            "a host. Leave --local-rank out, or number the ranks host by host. [CD0802]"
        )
    return local_world_size


def _placed(rank: int, world_size: int, addr: str, port: int, local_world_size: int) -> DistEnv:
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
