"""What the ranks of a run write to each other in the store, and how long each waits for it.

Whoever reaches the port can read and write the store. So each message carries a proof (`seal`).
It keeps strangers from being taken for a rank; it does not keep them from disturbing a start, which
then ends with an error.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp.distributed.seal import NONCE, Seal, UnprovenError, printable
from clusterddp.distributed.timeout import bounded
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv

# How long a rank waits for the verdict beyond the time that rank 0 waits for the last rank.
GRACE_SECONDS = 10.0
# Before the keys of a run, in a store that may hold other things.
PREFIX = "clusterddp"


class PeerError(TrainingError):
    """This rank fails only because another one did; it is not the first to be named."""

    peer_lost = True


class RunStore(PrefixStore):
    """The keys of one meeting of the ranks, and the seal that their messages carry."""

    def __init__(self, prefix: str, store: Store, seal: Seal) -> None:
        super().__init__(prefix, store)
        self.seal = seal


def tell(store: Store, key: str, content: Mapping[str, Any]) -> None:
    """Leave a message for other ranks of this run."""
    store.set(key, seal_of(store).wrap(key, dict(content)))


def ask(store: Store, env: DistEnv, key: str, what: str) -> dict[str, Any] | None:
    """A message that was left before now, or None; raises TrainingError for a stranger's."""
    return take(store, env, key, what) if store.check([key]) else None


def take(store: Store, env: DistEnv, key: str, what: str) -> dict[str, Any]:
    """What a rank of this run put there; raises TrainingError, naming it `what`, for all else."""
    message = store.get(key)
    try:
        return seal_of(store).open(key, message)
    except UnprovenError:
        raise TrainingError(
            f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} lacks "
            "the proof that it comes from this run: its writer was not started with this "
            f"attempt's {NONCE}. Start all ranks from one script; if a stranger reached the port, "
            "set MASTER_PORT to another."
        ) from None
    except ValueError:
        raise strange(env, what, message) from None


def wait(store: Store, keys: list[str], seconds: float) -> None:
    """Wait for all keys; raises DistStoreError when they are not there in time."""

    def all_there() -> bool:
        store.wait(keys, timedelta(seconds=seconds))
        return True

    try:
        bounded(all_there, seconds + GRACE_SECONDS)
    except TimeoutError:
        raise dist.DistStoreError("the store does not answer") from None
    except dist.DistNetworkError as error:
        raise PeerError(f"rank 0's store went away: {str(error).splitlines()[0]}") from None


def await_ranks(store: Store, env: DistEnv, keys: Sequence[str], timeout: float) -> None:
    """Wait until all ranks have written, each its key NAME/RANK; name those that have not."""
    try:
        wait(store, list(keys), timeout)
    except dist.DistStoreError:
        absent = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
        raise TrainingError(
            f"{len(absent)} of {env.world_size} ranks did not come to "
            f"{env.master_addr}:{env.master_port} within {timeout:g} s: {_listing(absent)}. "
            "Their logs say whether they started; --rendezvous-timeout makes rank 0 wait longer."
        ) from None


def strange(env: DistEnv, what: str, message: bytes) -> TrainingError:
    """The error for what no rank of any run writes."""
    return TrainingError(
        f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} is not what "
        f"a rank writes: {printable(message.decode(errors='replace'))}. Somebody else reached "
        "the port: set MASTER_PORT to another."
    )


def seal_of(store: Store) -> Seal:
    """The seal of a store that `rendezvous.open_store` has opened."""
    assert isinstance(store, RunStore), "not from open_store"
    return store.seal


def _listing(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
