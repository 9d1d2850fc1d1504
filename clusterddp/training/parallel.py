"""How the ranks' gradients come together: torch's DistributedDataParallel, set up."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.train_config import TrainConfig


def wrap(
    model: nn.Module, config: TrainConfig, world_size: int, *, captured: bool = False
) -> nn.Module:
    """The model as it is trained: under DDP, or by itself where a rank is alone.

    captured: its passes will be captured into a graph, so DDP has to be made on a stream of its own
    (torch's documentation, "CUDA Graphs", usage with DistributedDataParallel).
    """
    if world_size == 1:
        return model
    device = next(model.parameters()).device
    stream = torch.cuda.Stream(device) if captured else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # of None it is no context at all
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=config.bucket_cap_mb, gradient_as_bucket_view=True
        )
    if config.comm_hook != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{config.comm_hook}_compress_hook")
        wrapped.register_comm_hook(None, hook)
    return wrapped
