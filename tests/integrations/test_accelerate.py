"""Accelerate's loop with `Loop(accelerator=…)`: stopped anywhere it ends in the same weights."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from clusterddp.distributed.agreement import Poll
from clusterddp.loop import Loop
from clusterddp.training import stop
from tests.training.ranks import run_ranks

accelerate = pytest.importorskip("accelerate")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw each time they are read."""

    def __init__(self, count: int = 44) -> None:
        self.samples = torch.arange(count * 4.0).reshape(count, 4) / 40 / count

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index] + torch.rand(4) + random.random(), self.samples[index, :1]


def train(
    folder: Path,
    *,
    stops: int = 0,
    seed: int = 0,
    workers: int = 0,
    accumulation: int = 1,
    data: Any = None,
    passes_objects: bool = False,
    **config: Any,
) -> tuple[list[Tensor], list[float], int]:
    """Train three epochs; return the weights, the sum of each batch, and the exit code.

    stops: step after which a stop is requested. config: of the DataLoaderConfiguration.
    """
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(seed)
    random.seed(seed)
    accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        dataloader_config=accelerate.DataLoaderConfiguration(**config),
    )
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    loader: Any = DataLoader(data or Noisy(), batch_size=4, shuffle=not data, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    states = (
        {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if passes_objects
        else {"accelerator": accelerator}
    )
    loop, read, code = Loop(directory=folder, **states), [], 0
    try:
        for _ in loop.epochs(3):
            for samples, targets in loop.batches(loader):
                with accelerator.accumulate(model):
                    loss = (model(samples) - targets).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                read.append(round(samples.sum().item(), 4))
                if accelerator.sync_gradients:
                    if loop.steps + 1 == stops:
                        stop.requested.note("stop")
                    loop.step(loss=loss)
    except SystemExit as left:
        code = int(left.code or 0)
    loop.close()
    stop.requested.forget()
    return [parameter.detach().clone() for parameter in model.parameters()], read, code


def check(folder: Path, stops: Sequence[int], **config: Any) -> str:
    """Compare an undisturbed training with stopped ones; return what differs."""
    Poll.due = lambda *_: True  # type: ignore[method-assign, assignment]
    weights, read, code = train(folder / "whole", **config)
    assert code == 0
    for step in stops:
        where = folder / f"stopped-{step}"
        _, before, code = train(where, stops=step, **config)
        after, rest, _ = train(where, **{**config, "seed": 7})
        if code != 75 or before + rest != read or not before or not rest:
            return f"{config}, stopped at {step} with {code}: {before} and {rest}, not {read}"
        if not all(map(torch.equal, weights, after)):
            return f"{config}, stopped at {step}: other weights"
    return ""


def _on_rank(rank: int, world_size: int, folder: str, cases: list[Any]) -> list[str]:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return [
        check(Path(folder, str(number)), stops, **config)
        for number, (stops, config) in enumerate(cases)
    ]


CASES = [
    ((1, 4, 6), {}),
    ((4,), {"use_seedable_sampler": True}),
    ((1, 2, 4), {"accumulation": 4}),
    ((4,), {"split_batches": True}),
    ((5,), {"passes_objects": True}),
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_stopped_training_ends_in_the_weights_of_the_undisturbed_one(
    tmp_path: Path, world_size: int
) -> None:
    for differences in run_ranks(world_size, _on_rank, str(tmp_path), CASES):
        assert not any(differences), "\n".join(differences)
