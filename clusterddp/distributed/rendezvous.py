"""Where the ranks meet before torch's process group: a store, a roll call, one verdict for all.

Every wait has a deadline of its own, as torch's TCPStore could not say which rank never came.
"""

import itertools
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, unlisted
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import identity, messages, tcp_store, torchrun_rounds
from clusterddp.distributed.messages import PeerError, RunStore
from clusterddp.distributed.seal import Seal
from clusterddp.errors import ClusterDDPError, TrainingError
from clusterddp.ranks.dist_env import DistEnv

# How long rank 0 stays for the others to hear that the start is called off.
_HEARING_SECONDS = 2.0


def open_store(
    env: DistEnv,
    environ: Mapping[str, str],
    timeout: float,
    *,
    bound: socket.socket | None = None,
    answered: Callable[[], bool] = lambda: True,
) -> RunStore:
    """Rank 0 listens at the master address and the others connect, within `timeout` seconds.

    Under a torchrun agent, which listens there itself, all connect, and return once all are there.
    A single process needs no port. No rank writes to a store before it knows that it is its own
    run's: the same CLUSTERDDP_NONCE, which never leaves the process, or without one the same job.

    bound: rank 0's socket where `listener.bind` has made it already; taken over.
    answered: whether name servers answer; where they do not, none is asked from here on.

    Raises TrainingError with the rank, the address and what to do.
    """
    seal = Seal.from_environ(environ)
    if env.world_size == 1:
        return RunStore(messages.PREFIX, HashStore(), seal)
    deadline = time.monotonic() + timeout
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents = tcp_store.connect(env, deadline, answered)
        if env.rank == 0:
            return torchrun_rounds.open_round(agents, env, seal, timeout)
        return torchrun_rounds.enter_round(agents, env, seal, timeout)
    if env.rank == 0:
        listening = tcp_store.listen(env, environ, timeout, bound, answered)
        store = RunStore(messages.PREFIX, listening, seal)
        identity.tell(store)
    else:
        connected = tcp_store.connect(env, deadline, answered)
        store = RunStore(messages.PREFIX, connected, seal)
        identity.wait_for(store, env, deadline)
        identity.check(store, env)
    return store


def agree(
    store: Store,
    env: DistEnv,
    hello: Mapping[str, Any],
    decide: Callable[[list[dict[str, Any]]], dict[str, Any]],
    timeout: float,
    decision_seconds: float = messages.GRACE_SECONDS,
) -> dict[str, Any]:
    """Collect every rank's `hello`, let rank 0 `decide`, and return its verdict on every rank.

    A hello holds at least the rank's `world_size`. decision_seconds: what rank 0 may take to
    decide, once all have come.

    An error raised by `decide` is raised on all ranks: there as it is, elsewhere as PeerError.
    Raises TrainingError where ranks do not come within `timeout` seconds, naming them.
    """
    if store.add(f"claim/{env.rank}", 1) > 1:
        raise TrainingError(
            f"two processes say that they are rank {env.rank} of {env.world_size}: this is the "
            "second one. Give each process a RANK of its own."
        )
    messages.tell(store, f"hello/{env.rank}", hello)
    if env.rank == 0:
        try:
            verdict = decide(_roll_call(store, env, timeout))
        except ClusterDDPError as error:
            _call_off(store, env, str(error))
            raise
        except BaseException:
            _call_off(store, env, "its log says why.")
            raise
        messages.tell(store, "verdict", verdict)
        return verdict
    patience = timeout + decision_seconds
    try:
        messages.wait(store, ["verdict"], patience)
    except dist.DistStoreError:
        raise PeerError(
            f"rank {env.rank} met rank 0 at {env.master_addr}:{env.master_port}, but was not told "
            f"to start within {patience:g} s. The log of rank 0 says what it did."
        ) from None
    content = messages.take(store, env, "verdict", "rank 0's verdict")
    if "error" in content:
        store.set(f"heard/{env.rank}", "")
        raise PeerError(f"rank 0 called the start off: {content['error']}")
    return content


def decline(store: Store, env: DistEnv, error: BaseException) -> None:
    """Tell rank 0, which would wait, that this rank cannot take part; rank 0 tells all others."""
    if env.rank == 0:
        _call_off(store, env, str(error))
    else:
        messages.tell(store, f"hello/{env.rank}", {"declines": str(error)})


def leave(store: Store, env: DistEnv, timeout: float = 5.0) -> None:
    """Keep rank 0's store open until every rank has left, or for `timeout` seconds."""
    store.set(f"left/{env.rank}", "1")
    if env.rank == 0:
        try:
            messages.wait(store, [f"left/{rank}" for rank in range(env.world_size)], timeout)
        except dist.DistStoreError:
            pass  # one of them takes its time; the work is done


def _roll_call(store: Store, env: DistEnv, timeout: float) -> list[dict[str, Any]]:
    """Every rank's hello, in the order of the ranks."""
    keys = [f"hello/{rank}" for rank in range(env.world_size)]
    messages.await_ranks(store, env, keys, timeout)
    hellos = [
        messages.take(store, env, key, f"the hello of rank {rank}") for rank, key in enumerate(keys)
    ]
    for rank, hello in enumerate(hellos):
        if "declines" in hello:
            raise PeerError(f"rank {rank} cannot take part: {hello['declines']}")
        if hello.get("world_size") != env.world_size:
            raise TrainingError(
                f"rank {rank} was started with a world size of {hello.get('world_size')}, rank 0 "
                f"with {env.world_size}. Give every rank the same WORLD_SIZE."
            )
    return hellos


def _call_off(store: Store, env: DistEnv, reason: str) -> None:
    """Publish an error, and stay until those who have come have heard it."""
    messages.tell(store, "verdict", {"error": reason})
    waiting = [rank for rank in _present(store, env) if not _declined(store, rank)]
    if waiting:
        try:
            messages.wait(store, [f"heard/{rank}" for rank in waiting], _HEARING_SECONDS)
        except (TrainingError, dist.DistStoreError):
            pass  # they find the store gone, which tells them as much


def _present(store: Store, env: DistEnv) -> list[int]:
    """The others that have come, as far as a look at each gets within the time that they have."""
    deadline = time.monotonic() + _HEARING_SECONDS
    ranks = itertools.takewhile(lambda _: time.monotonic() < deadline, range(1, env.world_size))
    return [rank for rank in ranks if store.check([f"hello/{rank}"])]


def _declined(store: Store, rank: int) -> bool:
    try:
        key = f"hello/{rank}"
        return "declines" in messages.seal_of(store).open(key, store.get(key))
    except ValueError:
        return True  # not a rank of ours: it waits for nothing
