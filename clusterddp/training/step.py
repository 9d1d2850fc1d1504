"""One optimizer step of a rank: forward, backward, exchange of gradients, update."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from clusterddp.data.in_memory import as_images
from clusterddp.distributed.heartbeat import Phase
from clusterddp.training.metrics import Tally

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Step:
    """Trains on one batch a call, at the precision that was agreed on."""

    def __init__(
        self,
        model: Callable[[Tensor], Tensor],
        optimizer: Optimizer,
        tally: Tally,
        *,
        device: torch.device,
        precision: str = "fp32",
        accumulate: int = 1,
        label_smoothing: float = 0.0,
        mark: Callable[[Phase], None] = lambda _: None,
        exchanged: Callable[[], None] = lambda: None,
    ) -> None:
        """model: images to scores; DDP's wrapper where there is one.

        accumulate: passes into which a batch is cut; gradients are exchanged after the last.
        mark: told of each phase as it begins.
        exchanged: called when the gradients of a batch have been exchanged.
        """
        self.model, self.optimizer, self.tally = model, optimizer, tally
        self.device, self.accumulate = device, accumulate
        self._dtype, self._mark, self._exchanged = DTYPES[precision], mark, exchanged
        self._smoothing = label_smoothing
        # Small gradients would vanish in fp16; switched off it hands everything through.
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        """Train on a batch, as `images.as_images` takes it, and its labels (N,)."""
        self.compute(images, labels)
        self.tally.count(len(labels))

    def compute(self, images: Tensor, labels: Tensor) -> None:
        """All of it that happens on the device, and so can be captured into a graph."""
        self.optimizer.zero_grad()
        size = -(-len(labels) // self.accumulate)
        cuts = range(0, len(labels), size)
        for cut in cuts:
            some, theirs = images[cut : cut + size], labels[cut : cut + size]
            with nullcontext() if cut == cuts[-1] else self._apart():
                self._mark(Phase.FORWARD)
                with self.autocast():
                    scores = self.model(as_images(some))
                    loss = cross_entropy(scores.float(), theirs, label_smoothing=self._smoothing)
                self._mark(Phase.BACKWARD)
                share = loss if len(cuts) == 1 else loss * (len(theirs) / len(labels))
                self.scaler.scale(share).backward()  # type: ignore[no-untyped-call]
            self.tally.add(loss.detach(), scores.detach(), theirs)
        self._exchanged()
        self._mark(Phase.UPDATE)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def set_lr(self, rate: float) -> None:
        """The learning rate of the steps to come."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # of a captured step, which reads it from there
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which the model computes at the precision that was agreed on."""
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self._dtype)

    def _apart(self) -> AbstractContextManager[None]:
        """Keep the gradients of a pass that is not the batch's last from being exchanged."""
        no_sync = getattr(self.model, "no_sync", nullcontext)
        context: AbstractContextManager[None] = no_sync()
        return context
