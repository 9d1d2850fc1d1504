"""Devices, process groups and clocks of the contenders that have a step."""

import os
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders.serving import Request
from clusterddp.training.step import use_tf32


def entered(asked: Request) -> torch.device:
    """Enter the process group with the device of this rank, set up as a task of ours does it.

    Options: `backend`; `cudnn_deterministic` and `cudnn_benchmark`, which differ for a comparison;
    `deterministic`.
    """
    options, on_gpu = asked.options, asked.device == "cuda"
    backend = options.get("backend") or ("nccl" if on_gpu and _is_one_of_several() else "gloo")
    device = torch.device(asked.device)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(options.get("deterministic", False))
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = options.get("cudnn_deterministic", True)
        torch.backends.cudnn.benchmark = options.get("cudnn_benchmark", False)
        use_tf32(asked.precision)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    return device


def _is_one_of_several() -> bool:
    return int(os.environ["WORLD_SIZE"]) > 1


def as_it_comes_or_exact(asked: Request) -> None:
    """Leave what is measured as it comes its torch's own settings; else fp32 is without TF32."""
    if asked.precision != "as it comes":
        use_tf32(asked.precision)


def timed(
    batches: Iterable[tuple[Tensor, Tensor]], step: Callable[[Tensor, Tensor], object], device: str
) -> float:
    """Seconds from the first batch to the end of the last step, on a GPU to that of its work."""
    began = time.perf_counter()
    for images, labels in batches:
        step(images, labels)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
