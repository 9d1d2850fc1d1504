"""The model by torch.compile, and what its failures mean to the person who asked for it."""

import socket
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from clusterddp.errors import TrainingError


class Compiled:
    """A model whose code is generated at its first call, for which it needs a compiler."""

    def __init__(self, model: nn.Module) -> None:
        """model: DDP's wrapper where there is one."""
        self._model = model
        # With shapes as they come: torch would generalise over them after the first odd batch, and
        # a run that goes on from a checkpoint would compute with other code than one in a piece.
        self._call = torch.compile(model, dynamic=False)

    def __call__(self, images: Tensor) -> Tensor:
        """Images (N, 1, 28, 28) to scores (N, classes); raises TrainingError without a compiler."""
        try:
            scores: Tensor = self._call(images)
        except Exception as error:
            # Where the errors of torch.compile live has moved between versions; their names have
            # not. What the model itself raises comes through as it is.
            if not type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
                raise
            raise TrainingError(
                f"--compile: torch.compile failed on {socket.gethostname()}: "
                f"{str(error).splitlines()[0]}. It needs a C++ compiler on every node (CXX names "
                "one). Install it there, or leave --compile out."
            ) from None
        return scores

    def no_sync(self) -> AbstractContextManager[None]:
        """DDP's context in which gradients are not exchanged."""
        context: AbstractContextManager[None] = getattr(self._model, "no_sync", nullcontext)()
        return context
