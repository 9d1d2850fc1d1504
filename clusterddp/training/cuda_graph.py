"""Captures the step into a CUDA graph and replays it, on a stream of its passes."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from clusterddp import log
from clusterddp.distributed.tcp_store import bounded
from clusterddp.errors import TrainingError, coded
from clusterddp.training.step import Step

# DDP settles its buckets within the first of them; torch's documentation asks for eleven.
_WARM_UPS = 11
_RESET_SECONDS = 10.0


class SideStream:
    """Side stream of a GPU for all passes of a captured step; none on a CPU.

    DDP keeps the stream on which it was created. A pass on another stream would have to wait for
    it, which a capture does not allow (torch's documentation, "CUDA Graphs", usage with
    DistributedDataParallel).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run on the stream, ordered with the work before and after."""
        if self.stream is None:
            yield
            return
        usual = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            yield
        usual.wait_stream(self.stream)


class Graph(Protocol):
    """Captured work, like torch.cuda.CUDAGraph."""

    def replay(self) -> None: ...
    def reset(self) -> None: ...


def capture(work: Callable[[], None], aside: SideStream) -> Graph:
    """Capture the GPU work of a function. Raises RuntimeError, without a partial graph."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        # Other threads, for example one that pins a loader's batches, are not captured.
        with (
            aside(),
            torch.cuda.graph(
                graph, pool=pool, stream=aside.stream, capture_error_mode="thread_local"
            ),
        ):
            work()
    except RuntimeError:
        _stop_allocating_to(pool)
        graph.reset()
        torch.cuda.synchronize(aside.device)
        # In older versions of torch the generator still waits for the end of the capture and
        # refuses to draw outside of it; a copy of its state does not.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph


def _stop_allocating_to(pool: tuple[int, int]) -> None:
    """Stop the allocator from using the graph's pool after a failed capture.

    Older versions of torch leave it active; newer ones have stopped it and refuse this call.
    """
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
    end = next((found for name in names if (found := getattr(torch._C, name, None))), None)
    with suppress(RuntimeError):
        if end:
            end(torch.cuda.current_device(), pool)


@dataclass(eq=False)
class GraphedStep:
    """Replays a captured training step; a batch of another size is trained without the graph."""

    step: Step
    model: nn.Module
    """Bare module, whose weights the warm-up must not change."""
    size: int
    """Images in a full batch, for which the step is captured."""
    aside: InitVar[SideStream | None] = None
    """Stream on which DDP was created; without DDP it is created here."""
    falls_back: bool = False
    """True if to warn once and train without a graph if the step cannot be captured."""
    warning: str = field(default="", init=False)
    """Why there is no graph; empty if there is or will be one."""
    is_captured: bool = field(default=False, init=False)
    """True if the step has been captured; stays true after `close`."""
    _graph: Graph | None = field(default=None, init=False)

    def __post_init__(self, aside: SideStream | None) -> None:
        self._aside = aside or SideStream(self.step.device)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch, as `loader.as_images` takes it, and its labels (N,)."""
        is_full = len(labels) == self.size
        if is_full and self._graph is None and not self.warning:
            self.prepare(images, labels)
        if not is_full or self._graph is None:
            with self._aside():
                self.step(images, labels)
            return
        self._images.copy_(images)
        self._labels.copy_(labels)
        self._graph.replay()
        self.step.tally.count(len(labels))

    def prepare(self, images: Tensor, labels: Tensor) -> None:
        """Warm up and capture on a full batch, then restore the previous state.

        Raises TrainingError if the step cannot be captured and may not fall back.
        """
        self._images, self._labels = images.clone(), labels.clone()
        # Not attached: the copy would keep a node of autograd that belongs to the usual stream.
        before = {id(tensor): tensor.detach().clone() for tensor in self._state()}
        cpu, cuda = torch.get_rng_state(), None
        if self.step.device.type == "cuda":
            cuda = torch.cuda.get_rng_state(self.step.device)

        def work() -> None:
            self.step.compute(self._images, self._labels)

        with self._aside():
            for _ in range(_WARM_UPS):
                work()
        # Gradients belong to the graph's memory.
        self.step.optimizer.zero_grad(set_to_none=True)
        failure: RuntimeError | None = None
        try:
            self._graph = capture(work, self._aside)
            self.is_captured = True
        except RuntimeError as error:
            failure = error
            self.step.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor in self._state():
                if id(tensor) in before:
                    tensor.copy_(before[id(tensor)])
                else:  # created by the optimizer during the warm-up; it starts at zero
                    tensor.zero_()
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.step.device)
        if failure:
            self._warn(failure)

    def close(self) -> None:
        """Release the graph and its memory; call it before the process group is destroyed.

        ncclCommDestroy waits indefinitely for graphs that hold one of its collectives. cuBLAS's
        workspace of the stream is freed too, also after a failed capture: 32 MiB on an H100.
        """
        graph, self._graph = self._graph, None
        on_gpu = self.step.device.type == "cuda"
        if graph is None and not on_gpu:
            return

        def reset() -> None:
            if on_gpu:
                torch.cuda.set_device(self.step.device)  # every thread starts with GPU 0
            if graph:
                graph.reset()
            if on_gpu:
                torch.cuda.synchronize(self.step.device)  # wait for kernels that use it
                torch._C._cuda_clearCublasWorkspaces()

        try:
            bounded(reset, _RESET_SECONDS)
        except Exception as error:  # a GPU that is lost; what comes after is bounded, too
            log.info(f"releasing the captured step: {str(error) or 'the GPU did not answer'}")
        self.__dict__.pop("_images", None)
        self.__dict__.pop("_labels", None)
        self.step.optimizer.zero_grad(set_to_none=True)
        gc.collect()

    def _warn(self, failure: RuntimeError) -> None:
        cause: BaseException = failure
        while cause.__context__:  # the end of a failed capture fails, too
            cause = cause.__context__
        reason = f"the step cannot be captured into a CUDA graph: {str(cause).splitlines()[0]}"
        if not self.falls_back:
            raise TrainingError(
                f"{reason}. Train without one: --cuda-graph off. [CD0808]"
            ) from failure
        self.warning = f"{reason}; training without one, as --cuda-graph off does"
        log.warning(coded(self.warning, "CD0808"))

    def _state(self) -> list[Tensor]:
        """Return every tensor that a step changes."""
        states = self.step.optimizer.state.values()
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *kept, *self.step.tally.sums]
