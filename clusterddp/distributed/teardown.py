"""Leaves the process group when something failed."""

import torch.distributed as dist

from clusterddp import log
from clusterddp.distributed.timeout import bounded
from clusterddp.ranks.dist_env import DistEnv


def break_off(env: DistEnv) -> None:
    """Leave the process group without waiting for ranks that may be gone.

    The process ends soon after and takes its sockets with it; a destructor that hangs must not
    keep it, so it gets a few seconds.
    """
    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    leave = abort if dist.get_backend() == "nccl" else dist.destroy_process_group
    try:
        bounded(lambda: (leave(), True), 1.0 if env.world_size == 1 else 5.0)
    except Exception as error:
        log.info(f"leaving the process group: {error or 'it did not answer'}")
