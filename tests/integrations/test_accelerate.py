"""Accelerate's loop with `Loop(accelerator=…)`: stopped anywhere it ends in the same weights."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from clusterddp.distributed.agreement import Poll
from clusterddp.errors import TrainingError
from clusterddp.loop import Loop
from clusterddp.training import stop
from tests.training.ranks import run_ranks

accelerate = pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.usefixtures("asked_at_each_step"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's
]


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw each time they are read."""

    def __init__(self, count: int = 44) -> None:
        self.samples = torch.arange(count * 4.0).reshape(count, 4) / 40 / count

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.samples[index] + torch.rand(4) + random.random(), self.samples[index, :1]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([Noisy()[index] for index in range(44)])


def train(
    folder: Path,
    *,
    stops: int = 0,
    seed: int = 0,
    workers: int = 0,
    accumulation: int = 1,
    epochs: int = 3,
    data: str = "",
    passes_objects: bool = False,
    numbers: bool = False,
    **config: Any,
) -> tuple[list[Tensor], list[float], int]:
    """Train; return the weights, the sum of each batch, and the exit code.

    stops: step at which a stop is requested. numbers: return the numbers of the samples instead of
    the sums. config: of the DataLoaderConfiguration.
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
    dataset: Any = Stream() if data else Noisy()
    loader: Any = DataLoader(dataset, batch_size=4, shuffle=not data, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    states = (
        {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        if passes_objects
        else {"accelerator": accelerator}
    )
    loop, read, code = Loop(directory=folder, **states), [], 0
    try:
        for _ in loop.epochs(epochs):
            for samples, targets in loop.batches(loader):
                with accelerator.accumulate(model):
                    loss = (model(samples) - targets).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                sums = (targets[:, 0] * 40 * 44 / 4) if numbers else samples.sum()[None]
                read += [round(each, 4) for each in sums.tolist()]
                if accelerator.sync_gradients:
                    if loop.steps + 1 == stops:
                        stop.requested.note("stop")
                    loop.step(loss=loss)
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        loop.close()
        stop.requested.forget()
    return [parameter.detach().clone() for parameter in model.parameters()], read, code


def check(folder: Path, stops: Sequence[int], **config: Any) -> str:
    """Compare an undisturbed training with stopped ones; return what differs."""
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


def _on_rank(rank: int, world_size: int, act: Callable[..., Any], *arguments: Any) -> Any:
    Poll.due = lambda *_: True  # type: ignore[method-assign, assignment]
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return act(*arguments)


def _check_all(folder: str, cases: Sequence[Any]) -> list[str]:
    return [check(Path(folder, str(n)), *cases[n][:1], **cases[n][1]) for n in range(len(cases))]


@pytest.mark.parametrize(
    ("stops", "config"),
    [
        ((1, 4, 11, 17), {}),
        ((7, 11), {"use_seedable_sampler": True}),
        ((2, 3, 6), {"accumulation": 4}),  # the third step of an epoch has three batches
        ((2, 3, 6), {"accumulation": 4, "passes_objects": True}),
        ((7, 11), {"data": "stream", "dispatch_batches": False}),
        ((7, 11), {"use_stateful_dataloader": True}),
        ((7, 11), {"use_stateful_dataloader": True, "use_seedable_sampler": True}),
        pytest.param((7,), {"workers": 2}, marks=pytest.mark.release),
    ],
)
def test_one_rank_that_stops_ends_in_the_weights_of_the_undisturbed_one(
    tmp_path: Path, stops: Sequence[int], config: dict[str, Any]
) -> None:
    assert check(tmp_path, stops, **config) == ""


CASES = [
    ((1, 4, 6), {}),
    ((4,), {"use_seedable_sampler": True}),
    ((1, 2, 4), {"accumulation": 2}),
    ((4,), {"split_batches": True}),
    ((5,), {"passes_objects": True}),
    ((4,), {"use_stateful_dataloader": True}),
    ((4,), {"data": "stream", "dispatch_batches": False}),
]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.release), 4])
def test_ranks_that_stop_end_in_the_weights_of_the_undisturbed_ones(
    tmp_path: Path, world_size: int
) -> None:
    """Gloo's sum of four ranks depends on DDP's buckets."""
    for differences in run_ranks(world_size, _on_rank, _check_all, str(tmp_path), CASES):
        assert not any(differences), "\n".join(differences)


def test_a_loader_that_one_rank_reads_for_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"(?s)DataLoaderDispatcher.*dispatch_batches=False.*0819"
    ):
        train(tmp_path, data="stream")


def test_an_accelerator_without_a_prepared_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"accelerator\.prepare"):
        Loop(directory=tmp_path, accelerator=accelerate.Accelerator(cpu=True))


def _continue(folder: str, stops: int, config: dict[str, Any]) -> list[float]:
    return train(Path(folder), stops=stops, numbers=True, **config)[1]


@pytest.mark.parametrize("config", [{"use_seedable_sampler": True}, {"split_batches": True}])
def test_another_number_of_ranks_reads_each_sample_of_the_epoch(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    if "split_batches" in config:
        config = {**config, "use_seedable_sampler": True}
    first = run_ranks(2, _on_rank, _continue, str(tmp_path), 2, config)
    rest = run_ranks(4, _on_rank, _continue, str(tmp_path), 0, {**config, "seed": 7, "epochs": 1})
    read = [number for each in (*first, *rest) for number in each]
    assert sorted(set(read)) == [*range(44)]
    assert len(read) == 44 if "split_batches" in config else 44 + 12
