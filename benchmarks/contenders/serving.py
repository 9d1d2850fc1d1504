"""The request that all contenders read, and the loop in which they are asked to train."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """A training, the same for every contender."""

    root: str
    """Torchvision's MNIST root."""
    precision: str
    """`fp32`, `tf32` or `bf16`; `as it comes` is fp32 with torch's own settings."""
    device: str
    """`cpu` or `cuda`."""
    steps: int
    """Optimizer steps of a sample."""
    batch_size: int
    """Images of a rank in a step."""
    options: dict[str, Any] = field(default_factory=dict)
    """More options, for one contender; each says which it takes."""


def request() -> Request:
    """Return the request that the parent gave, in the one argument."""
    return Request(**json.loads(sys.argv[1]))


def mnist(root: str) -> Any:
    """The training set as a plain script opens it."""
    from torchvision import datasets, transforms

    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    return datasets.MNIST(root=root, train=True, transform=transform)


def serve(train: Callable[[], float | None]) -> None:
    """Train once for every line of standard input; answer with the seconds and the peak memory.

    train: returns its own measure of the seconds, or None to have them taken around it. What
    libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        seconds = train()
        took = time.perf_counter() - began if seconds is None else seconds
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
        print(json.dumps({"seconds": took, "peak_mib": peak}), file=answers, flush=True)
    os._exit(0)  # without the libraries' own goodbyes, which would wait for each other
