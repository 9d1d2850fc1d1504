"""How processors share a step, by `--strategy`: torch's DistributedDataParallel or DataParallel."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.request.train_config import TrainConfig
from clusterddp.training.step import DTYPES


def wrap(
    model: nn.Module,
    config: TrainConfig,
    world_size: int,
    *,
    precision: str = "fp32",
    captured: bool = False,
) -> nn.Module:
    """The model as it is trained: under DDP or DataParallel, or by itself where nothing is shared.

    precision: what was agreed on.
    captured: its passes will be captured into a graph, so DDP has to be made on a stream of its own
    (torch's documentation, "CUDA Graphs", usage with DistributedDataParallel).
    """
    device = next(model.parameters()).device
    if gpus_of_one_process(config.strategy, device.type) > 1:
        return nn.DataParallel(AtPrecision(model, precision, device.type))
    if world_size == 1:
        return model
    with _aside(device) if captured else nullcontext():
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=config.bucket_cap_mb, gradient_as_bucket_view=True
        )
    if config.comm_hook != "none":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{config.comm_hook}_compress_hook")
        wrapped.register_comm_hook(None, hook)
    return wrapped


class AtPrecision(nn.Module):
    """A model that sets its precision by itself: the threads in which DataParallel runs its copies
    know that there is autocast, but not of which type (torch's parallel_apply)."""

    def __init__(self, model: nn.Module, precision: str, kind: str) -> None:
        """kind: `cuda` or `cpu`."""
        super().__init__()
        self.model, self._dtype, self._kind = model, DTYPES[precision], kind

    def forward(self, images: Tensor) -> Tensor:
        """Images to scores."""
        enabled = self._dtype is not torch.float32
        with torch.autocast(self._kind, self._dtype if enabled else None, enabled=enabled):
            scores: Tensor = self.model(images)
        return scores


def gpus_of_one_process(strategy: str, kind: str) -> int:
    """How many GPUs this process drives by itself; 0 on a CPU. `kind` is `cuda` or `cpu`."""
    if kind != "cuda":
        return 0
    return torch.cuda.device_count() if strategy == "dp" else 1


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """A stream of its own, in order with what comes before and after."""
    usual = torch.cuda.current_stream(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(usual)
    with torch.cuda.stream(stream):
        yield
    usual.wait_stream(stream)
