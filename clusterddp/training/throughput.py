"""How fast each rank is by itself.

All ranks take a step together, so their pace is one; what tells a straggler is that it alone
never waits. A rank's own work on a step is done when its last gradient is there: from then until
the backward pass returns it waits for the others and for the network.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.run.records import RankReport
from clusterddp.training.device import peak_bytes


class Waiting:
    """Sums up one rank's waiting; without parameters to watch it counts nothing."""

    def __init__(self, device: torch.device, *, knows: bool = True) -> None:
        """knows: whether ranks wait for each other in the exchange of gradients alone, and where it
        can be seen; not within a graph, nor where layers exchange something, too.
        """
        self._knows = knows
        self._on_gpu = device.type == "cuda"
        self._latest: Tensor | None = None
        self._ready: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        # On a GPU what happens when is asked later, so that it never stands still for it.
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def learn(self, model: nn.Module) -> "_Learning":
        """A context around one backward pass, in which it learns which gradient comes last."""
        return _Learning(self, model)

    def done(self) -> None:
        """The backward pass has returned."""
        if self._ready is None:
            return
        if isinstance(self._ready, float):
            self._seconds += time.perf_counter() - self._ready
        else:
            self._events.append((self._ready, _event()))
        self._ready = None

    def take(self) -> float | None:
        """Seconds since the last time, if known; on a GPU everything before has to be done."""
        for begin, end in self._events:
            self._seconds += begin.elapsed_time(end) / 1000.0
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds if self._knows else None

    def watch(self, parameter: Tensor) -> None:
        """Take its gradient as a step's last one."""
        _hook(parameter, self._note)

    def _note(self, _: Tensor) -> None:
        self._ready = _event() if self._on_gpu else time.perf_counter()


class _Learning:
    def __init__(self, waiting: Waiting, model: nn.Module) -> None:
        self._waiting, self._model = waiting, model
        self._last: Tensor | None = None

    def __enter__(self) -> None:
        self._handles = [
            _hook(parameter, self._note)
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        if self._last is not None:
            self._waiting.watch(self._last)

    def _note(self, parameter: Tensor) -> None:
        self._last = parameter


def _hook(parameter: Tensor, note: Callable[[Tensor], None]) -> Any:
    """Have it told when the gradient is there; before DDP's own hook, which begins to exchange."""
    return parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class Paces:
    """What each rank has trained, and how long it took without the waiting for others."""

    def __init__(self, images: Sequence[float] = (), seconds: Sequence[float] = ()) -> None:
        """One number a rank in each."""
        self._images, self._seconds = list(images), list(seconds)

    @property
    def images(self) -> float:
        """Of all ranks together."""
        return sum(self._images)

    @property
    def images_per_second(self) -> list[float]:
        """Of each rank by itself: all keep one pace, so a straggler is who never waits. Empty where
        it is not known how long they wait.
        """
        if any(math.isnan(seconds) for seconds in self._seconds):
            return []
        both = zip(self._images, self._seconds, strict=True)
        return [images / max(seconds, 1e-9) for images, seconds in both]

    def add(self, more: "Paces") -> None:
        """Of the same ranks."""
        if not self._images:
            self._images, self._seconds = [0.0] * len(more._images), [0.0] * len(more._images)
        self._images = [a + b for a, b in zip(self._images, more._images, strict=True)]
        self._seconds = [a + b for a, b in zip(self._seconds, more._seconds, strict=True)]


def of_ranks(paces: Paces, device: torch.device) -> list[RankReport]:
    """What became of each rank, for the report. Collective over the default process group."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    own = host, peak_bytes(device)
    everyone = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    known = [round(rate, 1) for rate in paces.images_per_second]
    rates: Sequence[float | None] = known or [None] * len(everyone)
    return [
        RankReport(rank, rate, *each)
        for rank, (rate, each) in enumerate(zip(rates, everyone, strict=True))
    ]
