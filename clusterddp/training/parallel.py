"""How the ranks' gradients come together: torch's DistributedDataParallel, set up."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

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
    with _aside(next(model.parameters()).device) if captured else nullcontext():
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=config.bucket_cap_mb, gradient_as_bucket_view=True
        )
    if config.comm_hook != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{config.comm_hook}_compress_hook")
        wrapped.register_comm_hook(None, hook)
    return wrapped


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """A stream of its own, in order with what comes before and after."""
    usual = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(usual)
    with torch.cuda.stream(stream):
        yield
    usual.wait_stream(stream)
