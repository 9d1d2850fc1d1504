"""The seconds of a number of steps, taken the same way of every contender that has a step."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


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
