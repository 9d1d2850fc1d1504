"""Messages of a run's ranks to each other in the store, and how long each is waited for.

Whoever reaches the port can read and write the store. So the ranks of one start write below a
prefix that nobody can name without the run's nonce, and nothing but JSON is read. This keeps
strangers from being taken for a rank; it does not keep them from disturbing a start, which then
ends with an error.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from clusterddp.distributed.tcp_store import bounded
from clusterddp.errors import PeerError, TrainingError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.slurm.forms import NONCE_VARIABLE

# Seconds for which a rank waits for the verdict beyond those that rank 0 waits for the last rank.
GRACE_SECONDS = 10.0
# Before the keys of a run, in a store that may hold other things.
PREFIX = "clusterddp"


@dataclass(frozen=True)
class Identity:
    """Identity of one start of a run: its job and attempt, its nonce, and torchrun's round.

    Rank 0 publishes it, and every other rank checks it before it writes anything: a reused port can
    lead to another run's store. What is published proves the nonce without telling it.
    """

    run: str
    nonce: str = field(repr=False)
    round: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Identity":
        """Read it from the environment of a task; raises TrainingError for an empty nonce."""
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
        run = " ".join(f"{name}={environ[name]}" for name in names if name in environ)
        if environ.get(NONCE_VARIABLE) == "":
            raise TrainingError(
                f"{NONCE_VARIABLE} is empty: expected the random hex digits that all ranks of a "
                "run share. Unset it to start ranks without."
            )
        return cls(run, environ.get(NONCE_VARIABLE, ""))

    def of_round(self, number: int) -> "Identity":
        """Give the identity of the start in a round of torchrun's, counted from 1."""
        return replace(self, round=number)

    def within(self, store: Store) -> Store:
        """Give the part of the store in which the ranks of this start write."""
        return PrefixStore(f"{PREFIX}/{self._digest('keys')}", store)

    def published_in(self, store: Store) -> bool:
        """Return whether rank 0 has published an identity there, for this round."""
        return bool(store.check([self._key]))

    def publish(self, store: Store) -> None:
        """Publish it, as rank 0 of this start."""
        store.set(self._key, json.dumps({"run": self.run, "proof": self._digest("proof")}))

    def await_in(self, store: Store, env: DistEnv, seconds: float) -> None:
        """Wait for rank 0's, and check it; raises DistStoreError where none comes in time."""
        wait(store, [self._key], seconds)
        self.check(store, env)

    def check(self, store: Store, env: DistEnv) -> None:
        """Raise TrainingError where another run, or no run, has published its identity there."""
        published = take(store, env, self._key, "what names the run")
        if published.get("proof") == self._digest("proof"):
            return
        hint = ""
        if published.get("run") == self.run:
            hint = f" They differ in {NONCE_VARIABLE}" + ("." if self.nonce else ", not set here.")
        theirs = printable(str(published.get("run", ""))) or "no Slurm step"
        raise TrainingError(
            f"rank {env.rank} reached another run's rank 0 at {env.master_addr}:{env.master_port}: "
            f"that one is {theirs}, this one {self.run or 'no Slurm step'}.{hint} Set MASTER_PORT "
            "to another port for this job."
        )

    @property
    def _key(self) -> str:
        return f"{PREFIX}/{self.round}/identity"

    def _digest(self, purpose: str) -> str:
        scope = json.dumps([purpose, self.run, self.round, self.nonce])
        return hashlib.sha256(scope.encode()).hexdigest()


def nobody(env: DistEnv) -> PeerError:
    """Give the error of a rank to which rank 0 did not come."""
    return PeerError(
        f"rank {env.rank} waited for rank 0 at {env.master_addr}:{env.master_port}, but rank "
        "0 did not come. Its log says whether it started."
    )


def put(store: Store, key: str, content: Mapping[str, Any]) -> None:
    """Leave a message for other ranks of this run."""
    store.set(key, json.dumps(dict(content)))


def ask(store: Store, env: DistEnv, key: str, what: str) -> dict[str, Any] | None:
    """Take a message that was left before now, or None."""
    return take(store, env, key, what) if store.check([key]) else None


def take(store: Store, env: DistEnv, key: str, what: str) -> dict[str, Any]:
    """Read a message; raises TrainingError, naming it `what`, for anything but a JSON object."""
    message = store.get(key)
    try:
        content = json.loads(message)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise strange(env, what, message)
    return content


def wait(store: Store, keys: Sequence[str], seconds: float) -> None:
    """Wait for all keys; raises DistStoreError when they are not there in time."""

    def all_there() -> bool:
        store.wait(list(keys), timedelta(seconds=seconds))
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
        wait(store, keys, timeout)
    except dist.DistStoreError:
        absent = [int(key.rpartition("/")[2]) for key in keys if not store.check([key])]
        raise TrainingError(
            f"{len(absent)} of {env.world_size} ranks did not come to "
            f"{env.master_addr}:{env.master_port} within {timeout:g} s: {_listing(absent)}. "
            "Their logs say whether they started; --rendezvous-timeout makes rank 0 wait longer."
        ) from None


def strange(env: DistEnv, what: str, message: bytes) -> TrainingError:
    """Give the error for content that no rank of any run writes."""
    return TrainingError(
        f"rank {env.rank}: {what} in the store at {env.master_addr}:{env.master_port} is not what "
        f"a rank writes: {printable(message.decode(errors='replace'))}. Somebody else reached "
        "the port: set MASTER_PORT to another."
    )


def printable(text: str) -> str:
    """Give at most a line of what a stranger may have written, safe for a log."""
    return text if text.isprintable() and len(text) <= 200 else ascii(text[:200])


def _listing(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
