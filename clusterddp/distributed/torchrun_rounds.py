"""The rounds of starts in the store of torchrun's agents, which outlives the workers.

Rank 0 begins a round for each start; the others enter rounds until one begins with them in it.
"""

import secrets
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import identity, messages
from clusterddp.distributed.messages import PeerError, RunStore
from clusterddp.distributed.seal import Seal
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv

# How long a rank under an agent waits in one round before it looks for a later one.
_LOOK_SECONDS = 1.0


def open_round(agents: Store, env: DistEnv, seal: Seal, timeout: float) -> RunStore:
    """Rank 0's side of a start under torchrun: begin a new round and wait for all to enter it.

    The agents' store outlives the workers, so a round of its own keeps each start apart from
    what an earlier one left. The agents' restart counts cannot name it: with the c10d rendezvous
    an agent whose workers still ran when it was asked to start again does not count that.
    """
    last = _last_round(agents, env)
    if last and (earlier := round_of(agents, last, seal)).check(["identity"]):
        identity.check(earlier, env)
    store = round_of(agents, agents.add(f"{messages.PREFIX}/rounds", 1), seal)
    identity.tell(store)
    keys = [f"enters/{rank}" for rank in range(1, env.world_size)]
    error: TrainingError | None = None
    try:
        messages.await_ranks(store, env, keys, timeout)
    except PeerError:
        raise
    except TrainingError as absence:
        error = absence
    begins = {}
    for rank, key in enumerate(keys, start=1):
        try:
            if store.check([key]):
                entry = messages.take(store, env, key, f"the entry of rank {rank}")
                begins[str(rank)] = entry.get("token")
        except TrainingError as forgery:
            error = error or forgery
    messages.tell(store, "begins", {**begins, "error": str(error or "")})
    if error:
        raise error
    return store


def enter_round(agents: Store, env: DistEnv, seal: Seal, timeout: float) -> RunStore:
    """The other ranks' side: enter rounds until rank 0 begins one with this very process in it."""
    token, number, entered = secrets.token_hex(8), 1, 0
    deadline = time.monotonic() + timeout
    while True:
        number = max(number, _last_round(agents, env))
        store = round_of(agents, number, seal)
        try:
            if number != entered:
                messages.wait(store, ["identity"], _LOOK_SECONDS)
                identity.check(store, env)
                messages.tell(store, f"enters/{env.rank}", {"token": token})
                entered, deadline = number, time.monotonic() + timeout + messages.GRACE_SECONDS
            messages.wait(store, ["begins"], _LOOK_SECONDS)
        except dist.DistStoreError:
            if time.monotonic() > deadline:
                raise identity.nobody(env) from None
            continue
        begins = messages.take(store, env, "begins", "what rank 0 wrote")
        if begins.get(str(env.rank)) != token:
            number += 1  # that round's processes are gone
        elif error := begins.get("error"):
            raise PeerError(f"rank 0 called the start off: {error}")
        else:
            return store


def round_of(agents: Store, number: int, seal: Seal) -> RunStore:
    """The part of the agents' store in which the ranks of one start meet."""
    return RunStore(f"{messages.PREFIX}/{number}", agents, seal.of_round(number))


def _last_round(agents: Store, env: DistEnv) -> int:
    """0 before the first. Read without a proof: a round proves itself by its identity."""
    key = f"{messages.PREFIX}/rounds"
    count = agents.get(key) if agents.check([key]) else b"0"
    if not count.isdigit() or len(count) > 18:
        raise messages.strange(env, "the count of rounds", count)
    return int(count)
