"""A framework's training of a tiny model, with the lines of an integration or without them.

    python -m benchmarks.contenders.hooked lightning on STEPS

Rank 0 prints the main thread's processor seconds per step, without the first quarter of the steps.
"""

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

_BATCH = 8


class Clock:
    """Processor time of the steps after the first quarter."""

    def __init__(self, steps: int) -> None:
        self._first, self._steps, self._done, self.seconds = steps // 4, steps, 0, 0.0

    def step(self) -> None:
        """Count a step."""
        self._done += 1
        if self._done == self._first:
            self.seconds -= time.thread_time()
        elif self._done == self._steps - 1:
            self.seconds = (self.seconds + time.thread_time()) / (self._done - self._first)


def _data(steps: int, ranks: int) -> Any:
    return list(torch.rand(steps * _BATCH * ranks, 4))


def lightning(steps: int, ranks: int, clock: Clock, is_hooked: bool) -> None:
    """Train with Lightning."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    class Model(LightningModule):  # type: ignore[misc] # it comes without types here
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Tensor, index: int) -> Any:
            clock.step()
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = Trainer(
        accelerator="cpu", devices=ranks, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, strategy="ddp",
        plugins=[TorchElasticEnvironment()],
    )  # fmt: skip
    if is_hooked:
        from clusterddp.integrations.lightning import resume

        resume(trainer)
    trainer.fit(Model(), DataLoader(_data(steps, ranks), batch_size=_BATCH))


def transformers(steps: int, ranks: int, clock: Clock, is_hooked: bool) -> None:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            clock.step()
            return {"loss": self.layer(x).square().mean()}

    arguments = TrainingArguments(
        output_dir="out", use_cpu=True, ddp_backend="gloo", report_to=[], save_strategy="no",
        disable_tqdm=True, num_train_epochs=1, per_device_train_batch_size=_BATCH,
    )  # fmt: skip
    trainer = Trainer(Model(), arguments, train_dataset=[{"x": x} for x in _data(steps, ranks)])
    if is_hooked:
        from clusterddp.integrations.transformers import resume

        resume(trainer)
    trainer.train()


def accelerate(steps: int, ranks: int, clock: Clock, is_hooked: bool) -> None:
    """Train a loop with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    prepared = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01),
        DataLoader(_data(steps, ranks), batch_size=_BATCH, shuffle=True),
    )  # fmt: skip
    model, optimizer, loader = prepared
    loop = None
    if is_hooked:
        from clusterddp.loop import Loop

        loop = Loop(accelerator=accelerator)
    for _ in loop.epochs(1) if loop else range(1):
        for batch in loop.batches(loader) if loop else loader:
            clock.step()
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if loop:
                loop.step(loss=loss)


if __name__ == "__main__":
    name, hooked, count = sys.argv[1:]
    torch.set_num_threads(1)
    number, world_size = int(count), int(os.environ["WORLD_SIZE"])
    measured = Clock(number)
    train = {"lightning": lightning, "transformers": transformers, "accelerate": accelerate}[name]
    train(number, world_size, measured, hooked == "on")
    if os.environ["RANK"] == "0":
        print("seconds per step:", measured.seconds, flush=True)
