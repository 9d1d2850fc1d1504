"""Whose store it is: rank 0 says so, and every other rank looks before it writes anything."""

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import messages
from clusterddp.distributed.messages import PeerError, RunStore
from clusterddp.distributed.seal import NONCE, UnprovenError, printable
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv


def tell(store: RunStore) -> None:
    """Rank 0 says whose store it is."""
    messages.tell(store, "identity", {"run": store.seal.run})


def wait_for(store: Store, env: DistEnv, deadline: float) -> None:
    """Wait for rank 0 to have said it; raises PeerError where it does not by the deadline."""
    try:
        messages.wait(store, ["identity"], max(deadline - time.monotonic(), 1.0))
    except dist.DistStoreError:
        raise nobody(env) from None


def check(store: RunStore, env: DistEnv) -> None:
    """Refuse the store of another run, which a reused port can lead to, with a TrainingError."""
    message, own = store.get("identity"), store.seal.run or "no Slurm step"
    hint = ""
    try:
        content = store.seal.open("identity", message)
        if content.get("run") == store.seal.run:
            return
    except UnprovenError as error:
        content = error.content
        if content.get("run") == store.seal.run:
            hint = f" They differ in {NONCE}" + ("." if store.seal.key else ", not set here.")
    except ValueError:
        raise messages.strange(env, "what names the run", message) from None
    theirs = printable(str(content.get("run", ""))) or "no Slurm step"
    raise TrainingError(
        f"rank {env.rank} reached another run's rank 0 at {env.master_addr}:{env.master_port}: "
        f"that one is {theirs}, this one {own}.{hint} Set MASTER_PORT to another port for this job."
    )


def nobody(env: DistEnv) -> PeerError:
    """The error of a rank to which rank 0 did not come."""
    return PeerError(
        f"rank {env.rank} waited for rank 0 at {env.master_addr}:{env.master_port}, but rank "
        "0 did not come. Its log says whether it started."
    )
