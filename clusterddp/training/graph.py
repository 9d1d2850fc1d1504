"""The step as one CUDA graph: a small network's kernels take less time than launching them one by
one does, so a GPU replays the whole step at a single launch.

Follows the rules of torch's documentation, "CUDA Graphs": static inputs, warm-up on a side stream,
gradients and optimizer state that stay where they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clusterddp.training.step import Step

# DDP settles its buckets within the first of them; torch's documentation asks for eleven.
_WARM_UPS = 11


class GraphedStep:
    """Trains as its step does, by replaying it; a batch of another size is trained step by step."""

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        """model: the bare module, whose weights the warm-up must leave as they are.

        capture: records a piece of work and returns what repeats it; CUDA's own by default.
        """
        self._step, self._model = step, model
        self._capture = capture or _cuda_graph
        self._replay: Callable[[], None] | None = None
        self._images = self._labels = torch.empty(0)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch, as `images.as_images` takes it, and its labels (N,)."""
        if self._replay is None:
            self._record(images, labels)
        if self._replay is None or not _alike(images, self._images):
            self._step(images, labels)
            return
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._replay()
        self._step.tally.count(len(labels))

    def _record(self, images: Tensor, labels: Tensor) -> None:
        """Warm up and capture on this batch, and put everything back as it was."""
        self._images, self._labels = images.clone(), labels.clone()
        before = {id(tensor): tensor.clone() for tensor in self._state()}
        cpu, cuda = torch.get_rng_state(), None
        if self._step.device.type == "cuda":
            cuda = torch.cuda.get_rng_state(self._step.device)

        def work() -> None:
            self._step.compute(self._images, self._labels)

        _aside(work, self._step.device)
        self._step.optimizer.zero_grad(set_to_none=True)  # gradients belong to the graph's memory
        replay = self._capture(work)
        with torch.no_grad():
            for tensor in self._state():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)])
                else:  # the optimizer has made it during the warm-up; all begin at zero
                    tensor.zero_()
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._step.device)
        self._replay = replay

    def _state(self) -> list[Tensor]:
        """Every tensor that a step changes."""
        states = self._step.optimizer.state.values()
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        own = [*self._model.parameters(), *self._model.buffers()]
        return [*own, *kept, *self._step.tally.sums]


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _aside(work: Callable[[], None], device: torch.device) -> None:
    if device.type != "cuda":
        work()
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            work()
    torch.cuda.current_stream(device).wait_stream(stream)


def _cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
