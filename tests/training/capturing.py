"""A stand-in for CUDA graphs on a CPU: it records what torch computes, and computes it again."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clusterddp.training import cuda_graph
from clusterddp.training.cuda_graph import SideStream

# What brings a value to Python, for which a GPU would have to come to its end.
_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}
REFUSED = "operation not permitted when stream is capturing"


class Recording(TorchDispatchMode):
    """Records operations with the tensors that they read and write; Python is not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation.name().partition(".")[0] in _WAITS:
            raise RuntimeError(f"{REFUSED}\nmore")
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))
        return result


class Graph:
    """A captured piece of work: every replay reads and writes the tensors of the capture."""

    def __init__(self, recording: Recording, captures: "Captures") -> None:
        self._recording, self._captures = recording, captures
        self.replays = self.resets = 0

    def replay(self) -> None:
        assert not self.resets, "a graph that was released"
        self.replays += 1
        with torch.no_grad():
            for operation, args, kwargs, before in self._recording.operations:
                for old, new in zip(
                    tree_leaves(before), tree_leaves(operation(*args, **kwargs)), strict=True
                ):
                    if isinstance(old, Tensor) and not _is_one(old, new):
                        old.copy_(new)

    def reset(self) -> None:
        self.resets += 1
        self._captures.released += 1
        self._recording.operations.clear()


def _is_one(old: Tensor, new: Tensor) -> bool:
    return old.untyped_storage().data_ptr() == new.untyped_storage().data_ptr()


class Captures:
    """Stands in for `cuda_graph.capture`, and knows which graphs there were and which there are."""

    def __init__(self) -> None:
        self.made = self.released = 0
        self.alive = WeakSet[Graph]()
        self.refuses = ""
        """Message of the RuntimeError with which each capture ends, if it is to fail."""

    def __call__(self, work: Callable[[], None], aside: SideStream) -> Graph:
        with aside(), Recording() as recording:
            work()
            if self.refuses:
                raise RuntimeError(self.refuses)
        self.made += 1
        graph = Graph(recording, self)
        self.alive.add(graph)
        return graph


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Captures by a stand-in for CUDA graphs."""
    made = Captures()
    monkeypatch.setattr(cuda_graph, "capture", made)
    return made
