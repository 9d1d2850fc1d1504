"""Loaders with a position of their own: a stopped training reads on where it was."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

from clusterddp.distributed.agreement import Poll
from clusterddp.errors import CheckpointError, TrainingError
from clusterddp.loop import Loop
from clusterddp.training import stop
from tests.training.ranks import run_ranks

SAMPLES, BATCH = 22, 4

pytestmark = [
    pytest.mark.usefixtures("asked_at_each_step"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


def noise() -> Tensor:
    """Draw; not in a worker, whose generators no StatefulDataLoader saves."""
    return torch.rand(4) if get_worker_info() is None else torch.zeros(4)


class Mapped(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / SAMPLES) + noise()


class Stream(IterableDataset[Tensor]):
    """Samples that draw, in another order each time."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(SAMPLES).tolist():
            self.read += 1
            yield torch.full((4,), index / SAMPLES) + torch.rand(4) + random.random()


class Positioned(IterableDataset[Tensor]):
    """A stream that knows its position, as a HF IterableDataset does."""

    def __init__(self) -> None:
        self.read = self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < SAMPLES:
            self.position += 1
            self.read += 1
            yield torch.full((4,), self.position / SAMPLES) + noise()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train(folder: Path, loader: Any, stops: int, seed: int = 0) -> tuple[list[Tensor], Any, Any]:
    """Train three epochs; return the weights, the sum of each batch, and the exit code."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop, read, code = Loop(directory=folder, model=model, optimizer=optimizer), [], None
    try:
        for _ in loop.epochs(3):
            for samples in loop.batches(loader):
                optimizer.zero_grad()
                model(samples).square().mean().backward()
                optimizer.step()
                read.append(round(samples.sum().item(), 4))
                if loop.steps + 1 == stops:
                    stop.requested.note("stop")
                loop.step()
            read.append(loop.steps)  # what stands behind the epoch runs once
    except SystemExit as left:
        code = left.code
    finally:
        loop.close()
        stop.requested.forget()
    return [each.detach().clone() for each in model.parameters()], read, code


def check(folder: Path, loader: Callable[[], Any], *stops: int) -> None:
    """Compare a stopped training with the undisturbed one; loader makes one for each."""

    def made(seed: int = 1) -> Any:
        torch.manual_seed(seed)
        return loader()

    whole, read, _ = train(folder / "whole", made(), 0)
    for step in stops:
        where = folder / f"stopped-{step}"
        _, before, code = train(where, made(), step)
        after, rest, _ = train(where, made(2), 0, seed=7)
        assert (code, before + rest) == (75, read), f"stopped at {step}"
        assert all(map(torch.equal, whole, after)), f"stopped at {step}: other weights"


# The sixth batch is the last of an epoch, which a stream does not tell.
STOPS = (1, 6, 8, 13)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.release)])
def test_a_stream_is_read_again_up_to_its_position(tmp_path: Path, workers: int) -> None:
    check(tmp_path, lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=workers), *STOPS)


def test_persistent_workers_that_ran_before_the_epoch_draw_no_other_order(tmp_path: Path) -> None:
    """A fresh start of workers draws a number, which the epochs after the first do not."""
    check(
        tmp_path,
        lambda: DataLoader(
            Mapped(), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True
        ),
        *STOPS,
    )


def test_a_stream_that_knows_its_position_is_not_read_again(tmp_path: Path) -> None:
    check(tmp_path, lambda: DataLoader(Positioned(), batch_size=BATCH), *STOPS)
    train(tmp_path / "one", DataLoader(Positioned(), batch_size=BATCH), 8)
    resumed = DataLoader(Positioned(), batch_size=BATCH)
    train(tmp_path / "one", resumed, 0)
    assert resumed.dataset.read == 2 * SAMPLES - 2 * BATCH  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.release)])
@pytest.mark.parametrize("dataset", [Mapped, Stream, Positioned])
def test_a_stateful_dataloader_continues_by_its_own_state(
    tmp_path: Path, dataset: Any, workers: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    shuffle = dataset is Mapped
    check(
        tmp_path,
        lambda: stateful.StatefulDataLoader(
            dataset(), batch_size=BATCH, shuffle=shuffle, num_workers=workers
        ),
        *STOPS,
    )


def test_a_loader_of_fabric_continues(tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning.fabric")
    check(
        tmp_path,
        lambda: fabric.Fabric(accelerator="cpu", devices=1).setup_dataloaders(
            DataLoader(Mapped(), batch_size=BATCH, shuffle=True)
        ),
        *STOPS,
    )


def as_rank_of_fabric(rank: int, world_size: int, folder: str) -> list[Any]:
    """Train three epochs, undisturbed or stopped at steps; return what differs."""
    from lightning.fabric import Fabric

    Poll.due = lambda *_: True  # type: ignore[method-assign, assignment]
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": "1"}
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
    fabric.launch()

    def attempt(name: str, stops: int, seed: int) -> tuple[list[Tensor], list[float], Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        layers = nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 1)
        module = nn.Sequential(*layers)
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        loader = fabric.setup_dataloaders(DataLoader(Mapped(), batch_size=BATCH, shuffle=True))
        loop: Any = Loop(directory=Path(folder, name), model=model, optimizer=optimizer)
        read, code = [], None
        try:
            for _ in loop.epochs(3):
                for samples in loop.batches(loader):
                    optimizer.zero_grad()
                    fabric.backward(model(samples).square().mean())
                    optimizer.step()
                    read.append(round(samples.sum().item(), 4))
                    if loop.steps + 1 == stops:
                        stop.requested.note("stop")
                    loop.step()
        except SystemExit as left:
            code = left.code
        finally:
            loop.close()
            stop.requested.forget()
        return [each.detach().clone() for each in model.parameters()], read, code

    whole, read, _ = attempt("whole", 0, 0)
    found: list[Any] = []
    for step in (1, 2):
        _, before, code = attempt(f"stopped-{step}", step, 0)
        after, rest, _ = attempt(f"stopped-{step}", 0, 7)
        found.append((code, before + rest == read, all(map(torch.equal, whole, after))))
    return found


def test_ranks_of_fabric_end_in_the_weights_of_the_undisturbed_ones(tmp_path: Path) -> None:
    """Gloo's sum of four ranks depends on DDP's buckets."""
    pytest.importorskip("lightning.fabric")
    for found in run_ranks(4, as_rank_of_fabric, str(tmp_path)):
        assert found == [(75, True, True)] * 2


def test_an_order_that_another_number_of_ranks_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A framework may add a DistributedSampler only where there are several ranks."""
    train(tmp_path, DataLoader(Mapped(), batch_size=BATCH, shuffle=True), 2)
    monkeypatch.setattr(Loop, "_resume", with_ranks(2))
    sampler: Any = DistributedSampler(Mapped(), num_replicas=1, rank=0)
    with pytest.raises(CheckpointError, match=r"(?s)has 2 ranks.*CD0709"):
        train(tmp_path, DataLoader(Mapped(), batch_size=BATCH, sampler=sampler), 0)


def with_ranks(count: int) -> Callable[..., Any]:
    """Return a resume that takes the checkpoint for one of another number of ranks."""
    original = Loop._resume

    def resume(loop: Loop, *given: Any) -> Any:
        result = original(loop, *given)
        loop._resume_ranks = count
        return result

    return resume


def test_a_frameworks_loader_whose_position_is_unknown_is_refused(tmp_path: Path) -> None:
    class Other:
        __module__ = "accelerate.data_loader"

        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(4)

    with pytest.raises(
        TrainingError, match=r"(?s)position of accelerate.data_loader.Other is unknown.*CD0819"
    ):
        train(tmp_path, Other(), 0)
