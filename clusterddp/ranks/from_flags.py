"""Places of ranks that no launcher started, from flags, free of a surrounding job.

`clusterddp train --rank 0 --world-size 4 …` in a shell a rank, and the ranks that this workstation
starts by itself. Reads no os.environ and opens no socket.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterddp.errors import RequestError
from clusterddp.ranks import variables
from clusterddp.ranks.dist_env import DistEnv

MOST_RANKS = 100_000
"""Most ranks of a run that are started by hand: torch's store waits for no more than 128 x 1024
keys at once (MAX_KEY_COUNT of its TCPStoreBackend.cpp), and rank 0 for one of every rank."""
MOST_PROCS = 1024
"""Ranks of one workstation; a number above it is a slip of the finger."""
START_METHODS = ("exec", "fork", "spawn", "forkserver")
"""Start methods of a workstation's ranks (`processes.start_methods`)."""

# A surrounding job's or agent's variables, which would tell a rank that it is its task.
_FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "TORCHELASTIC_", "PMI", "MASTER_")


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
            "shell. Give them all, or none of them to take the ranks from the environment."
        )
    _within("--world-size", world_size, 1, MOST_RANKS)
    _within("--rank", rank, 0, world_size - 1, f" (--world-size {world_size})")
    if master_port is not None:
        _within("--master-port", master_port, 1, 65535)
    if master_addr is not None and not variables.PRINTABLE.fullmatch(master_addr):
        raise RequestError(
            f"--master-addr: {master_addr!a} is no host name or address; "
            "give that of the host on which rank 0 is."
        )
    local_world_size = _ranks_of_a_host(rank, world_size, local_rank, local_world_size)
    return _placed(rank, world_size, master_addr or "127.0.0.1", master_port or 0, local_world_size)


def _ranks_of_a_host(
    rank: int, world_size: int, local_rank: int | None, local_world_size: int | None
) -> int:
    """Return the number of ranks on each host. Raises RequestError where the flags do not fit."""
    if local_world_size is None:
        if local_rank is not None:
            raise RequestError(
                f"--local-rank {local_rank} without --local-world-size: how many ranks are on a "
                "host? Give it too, or leave both out where all ranks are on one host."
            )
        return world_size
    _within("--local-world-size", local_world_size, 1, world_size, f" (--world-size {world_size})")
    if world_size % local_world_size:
        raise RequestError(
            f"--world-size {world_size} is no multiple of --local-world-size {local_world_size}: "
            "these flags take as many ranks on each host. For others export torch's variables, "
            "LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE among them."
        )
    if local_rank not in (None, rank % local_world_size):
        raise RequestError(
            f"--local-rank {local_rank} against --rank {rank} and --local-world-size "
            f"{local_world_size}: expected {rank % local_world_size}, for consecutive ranks share "
            "a host. Leave --local-rank out, or number the ranks host by host."
        )
    return local_world_size


def check_address(addr: str) -> None:
    """Raise RequestError for a name that leads nowhere, for which ranks would wait in vain."""
    import socket

    try:
        socket.getaddrinfo(addr, None)
    except OSError as error:
        raise RequestError(
            f"--master-addr {addr}: {error.strerror or error}. Name the host on which rank 0 is "
            "as this one knows it, or give its address."
        ) from None


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
        raise RequestError(f"{flag}: {value} is not a number from {lowest} to {highest}{why}.")
