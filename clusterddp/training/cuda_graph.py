"""Captures the step as one CUDA graph: a small network's kernels take less time than launching them
one by one does, so a GPU replays the whole step at a single launch.

Follows the rules of torch's documentation, "CUDA Graphs": static inputs, warm-up on a side stream,
gradients and optimizer state that stay where they are.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from clusterddp.errors import TrainingError
from clusterddp.training.step import Step

# DDP settles its buckets within the first of them; torch's documentation asks for eleven.
_WARM_UPS = 11


class GraphedStep:
    """Trains as its step does, by replaying it; a batch of another size is trained step by step."""

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        size: int,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        """model: the bare module, whose weights the warm-up must leave as they are.

        size: images of a full batch, the one that is captured.
        capture: records a piece of work and returns what repeats it; CUDA's own by default.
        """
        self._step, self._model, self._size = step, model, size
        self._capture = capture or _cuda_graph
        self._replay: Callable[[], None] | None = None
        self._images = self._labels = torch.empty(0)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch, as `images.as_images` takes it, and its labels (N,)."""
        if len(labels) != self._size:
            self._step(images, labels)
            return
        if self._replay is None:
            self._replay = self._recorded(images, labels)
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._replay()
        self._step.tally.count(len(labels))

    def _recorded(self, images: Tensor, labels: Tensor) -> Callable[[], None]:
        """Warm up and capture on this batch, and put everything back as it was.

        Raises TrainingError where the step cannot be captured.
        """
        self._images, self._labels = images.clone(), labels.clone()
        before = {id(tensor): tensor.clone() for tensor in self._state()}
        cpu, cuda = torch.get_rng_state(), None
        if self._step.device.type == "cuda":
            cuda = torch.cuda.get_rng_state(self._step.device)

        def work() -> None:
            self._step.compute(self._images, self._labels)

        try:
            _aside(work, self._step.device)
            # Gradients belong to the graph's memory.
            self._step.optimizer.zero_grad(set_to_none=True)
            replay = self._capture(work)
        except RuntimeError as error:
            raise TrainingError(
                f"the step cannot be captured into a CUDA graph: {str(error).splitlines()[0]}. "
                "Train without one: --cuda-graph off."
            ) from error
        with torch.no_grad():
            for tensor in self._state():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)])
                else:  # the optimizer has made it during the warm-up; all begin at zero
                    tensor.zero_()
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._step.device)
        return replay

    def _state(self) -> list[Tensor]:
        """Return every tensor that a step changes."""
        states = self._step.optimizer.state.values()
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        own = [*self._model.parameters(), *self._model.buffers()]
        return [*own, *kept, *self._step.tally.sums]


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
    # What another thread does, as one that pins a loader's batches, is none of this work.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
