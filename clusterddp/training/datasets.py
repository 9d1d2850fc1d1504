"""How a rank comes by its two sets: from its node's one copy in memory, or read image by image."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from clusterddp.dist_env import DistEnv
from clusterddp.errors import DataError
from clusterddp.train_config import TrainConfig
from clusterddp.training import data, node_data, rendezvous
from clusterddp.training.images import Images
from clusterddp.training.loader import Loaded

Sets = tuple[Images | Loaded, Images | Loaded, node_data.Held | None]


def obtain(
    config: TrainConfig,
    env: DistEnv,
    store: Store,
    reading: node_data.Reading | None,
    device: torch.device,
    say: Callable[[str], None],
) -> Sets:
    """The training set, the test set, and what this rank holds of them for others until `close`.

    Collective over the default process group. With --data-pipeline memory the first rank of a node
    reads the files and the others map what it has read; a rank that cannot says so and reads them.
    reading: on the first rank of a node, what it has begun to read.

    Raises DataError when there is no whole set here, and PeerError where the rank that was to read
    it failed.
    """
    key = f"data/{env.node_rank}"
    held, fault = None, None
    if env.local_rank == 0:
        try:
            if env.rank:  # rank 0 has made sure of it already
                data.ensure(config.dataset, config.data_dir, progress=say, may_fetch=False)
            held = reading.held() if reading else None
        except DataError as error:
            fault = error
        offer = {"error": str(fault)} if fault else held.offer() if held else {}
        rendezvous.tell(store, key, offer)
    dist.barrier()
    if fault:  # only now: the others would wait here for this rank
        raise fault
    if config.data_pipeline == "loader":
        read = data.torchvision_set
        train_set, test_set = (
            Loaded(read(config.dataset, config.data_dir, train=train), device, config.workers)
            for train in (True, False)
        )
        return train_set, test_set, None
    if held is None:
        held = reading.held() if reading else _take(config, env, store, key, say)
    train, test = (Images(*held.tensors(train=each), device) for each in (True, False))
    return train, test, held


def _take(
    config: TrainConfig, env: DistEnv, store: Store, key: str, say: Callable[[str], None]
) -> node_data.Held:
    offer = rendezvous.ask(store, env, key, "the offer of its node's first rank")
    if offer and "error" in offer:
        raise rendezvous.PeerError(f"the first rank of this node has no dataset: {offer['error']}")
    try:
        return node_data.take(offer or {})
    except (OSError, ValueError, LookupError, TypeError) as error:
        say(node_data.why_alone(error, env.rank))
        return node_data.read(config.dataset, config.data_dir)
