"""How a rank comes by its two sets: from its node's one copy in memory, read image by image, or
from a person's own function."""

import socket
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from clusterddp import log
from clusterddp.data import mnist, prepare, shared_memory
from clusterddp.data.in_memory import Images
from clusterddp.data.loader import Loaded
from clusterddp.data.user_dataset import OwnSets
from clusterddp.distributed import rendezvous
from clusterddp.errors import ClusterDDPError, DataError, PeerError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.train_config import TrainConfig

Sets = tuple[Images | Loaded, Images | Loaded, shared_memory.Held | None]


def obtain(
    config: TrainConfig,
    env: DistEnv,
    store: Store,
    reading: shared_memory.Reading | OwnSets | None,
    device: torch.device,
    *,
    data_sha256: str,
) -> Sets:
    """The training set, the test set, and what this rank holds of them for others until `close`.

    Collective over the default process group. With --data-pipeline memory the first rank of a node
    reads the files and the others map what it has read; a rank that cannot says so and reads them.
    reading: on the first rank of a node, what it has begun to read; of a person's own dataset on
        every rank.
    data_sha256: the fingerprint that rank 0 has found; an own set has to be that on every rank.

    Raises DataError when there is no whole set here, PeerError where the rank that was to read
    it failed, and TrainingError where a person's function fails.
    """
    key = f"data/{env.node_rank}"
    if isinstance(reading, OwnSets):
        _in_turn(reading, env, store, key)
        if reading.fingerprint() != data_sha256:
            raise DataError(
                f"--dataset {config.dataset} gives rank {env.rank} on {socket.gethostname()} "
                "another set than rank 0. Every rank has to get the same images in the same "
                "order: seed what is random, sort what is listed."
            )
        return (*reading.on(device), None)
    held, fault = None, None
    if env.local_rank == 0:
        try:
            if env.rank:  # rank 0 has made sure of it already
                prepare.ensure(config.dataset, config.data_dir, may_fetch=False)
            held = reading.held() if reading else None
        except DataError as error:
            fault = error
        offer = {"error": str(fault)} if fault else held.offer() if held else {}
        rendezvous.put(store, key, offer)
    dist.barrier()
    if fault:  # only now: the others would wait here for this rank
        raise fault
    if config.data_pipeline == "loader":
        read = mnist.torchvision_set
        train_set, test_set = (
            Loaded(read(config.dataset, config.data_dir, train=train), device, config.workers)
            for train in (True, False)
        )
        return train_set, test_set, None
    if held is None:
        held = reading.held() if reading else _take(config, env, store, key)
    train, test = (Images(*held.tensors(train=each), device) for each in (True, False))
    return train, test, held


def _in_turn(sets: OwnSets, env: DistEnv, store: Store, key: str) -> None:
    """Have a function that downloads do so once: rank 0 has called it already, then comes the
    first rank of every node, then all others.
    """
    fault = None
    if env.local_rank == 0:
        try:
            sets.load()
        except ClusterDDPError as error:
            fault = error
        rendezvous.put(store, key, {"error": str(fault)} if fault else {})
    dist.barrier()
    if fault:  # only now: the others would wait here for this rank
        raise fault
    if env.local_rank:
        _offer_of_first(store, env, key)
        sets.load()


def _take(config: TrainConfig, env: DistEnv, store: Store, key: str) -> shared_memory.Held:
    offer = _offer_of_first(store, env, key)
    try:
        return shared_memory.take(offer)
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.info(shared_memory.why_alone(error, env.rank))
        return shared_memory.read(config.dataset, config.data_dir)


def _offer_of_first(store: Store, env: DistEnv, key: str) -> dict[str, Any]:
    """What the first rank of this node has put there; raises PeerError where it has failed."""
    offer = rendezvous.ask(store, env, key, "the offer of its node's first rank") or {}
    if "error" in offer:
        raise PeerError(f"the first rank of this node has no dataset: {offer['error']}")
    return dict(offer)
