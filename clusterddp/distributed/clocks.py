"""Measures how far each host's wall clock is ahead of rank 0's, when the ranks meet.

The times at which ranks end are compared across hosts, to tell which of them failed first.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from clusterddp.distributed import messages
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv

# The ranks have just met: a host that takes longer is left out.
_ANSWER_SECONDS = 2.0


def speakers(hellos: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The first rank of each host but rank 0's, with the host: those that tell the time."""
    first: dict[str, int] = {}
    for hello in hellos:
        first.setdefault(str(hello["host"]), int(hello["rank"]))
    return {rank: host for host, rank in first.items() if rank != 0}


def tell(store: Store, env: DistEnv, now: float) -> None:
    """Tell rank 0 this host's time; `now` is that at which its verdict came."""
    messages.put(store, f"clock/{env.rank}", {"time": now})


def collect(store: Store, env: DistEnv, asked: Mapping[int, str], sent: float) -> dict[str, float]:
    """On rank 0, the seconds by which each host's clock is ahead of this host's.

    asked: as of `speakers`. sent: the time at which the verdict was on its way to them.
    A host that does not answer is left out.
    """
    keys = {f"clock/{rank}": host for rank, host in asked.items()}
    with suppress(dist.DistStoreError):
        messages.wait(store, list(keys), _ANSWER_SECONDS)
    ahead = {}
    for key, host in keys.items():
        with suppress(TrainingError, dist.DistStoreError, KeyError, TypeError, ValueError):
            answer = messages.ask(store, env, key, f"the clock of {host}")
            if answer is not None:
                ahead[host] = offset(sent, float(answer["time"]), time.time())
    return ahead


def offset(sent: float, told: float, received: float) -> float:
    """Seconds by which a clock that showed `told` between two of ours is ahead.

    It is known to within the round trip: 0 where that allows it, as hosts usually keep their
    clocks together more closely than a busy rank answers; else the middle.
    """
    least, most = told - received, told - sent
    return 0.0 if least <= 0 <= most else (least + most) / 2
