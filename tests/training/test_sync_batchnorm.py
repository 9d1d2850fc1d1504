from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from clusterddp.errors import TrainingError
from clusterddp.models import nets
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training.learner import poor_statistics
from clusterddp.training.step import SyncBatchNorm, synchronise
from tests.training.ranks import run_ranks

STEPS = 3


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(size, 1, 28, 28, generator=generator) + 100.0
    return images, torch.randint(10, (size,), generator=generator)


def trained(rank: int, world_size: int, momentum: float | None, synced: bool) -> dict[str, Any]:
    """A few steps on this rank's share of every batch."""
    torch.manual_seed(0)
    model = nets.build("bn-convnet")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # drawn by each rank for itself
    if synced:
        model = synchronise(model, "bn-convnet")
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        images, labels = batch(step, 12)
        optimizer.zero_grad()
        share = slice(rank, None, world_size)
        cross_entropy(wrapped(images[share]), labels[share]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scores = model(batch(99, 4)[0])
    found = {"scores": scores, **model.state_dict()}
    return {name: value.double().numpy() for name, value in found.items()}


def alone(momentum: float | None) -> dict[str, Any]:
    return trained(0, 1, momentum, False)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(
        float(abs(one[name] - other[name]).max() / abs(one[name]).max())
        for name in one
        if abs(one[name]).max() > 0
    )


@pytest.mark.parametrize("momentum", [0.1, pytest.param(None, marks=pytest.mark.slow)])
def test_two_ranks_normalise_as_one_process_does_on_the_joined_batch(
    momentum: float | None,
) -> None:
    """Weights, running statistics and scores; without the flag they are others."""
    expected = alone(momentum)
    ranks = run_ranks(2, trained, momentum, True)
    assert difference(ranks[0], ranks[1]) == 0
    assert difference(expected, ranks[0]) < 1e-3
    if momentum:
        apart = run_ranks(2, trained, momentum, False)
        assert difference(expected, apart[0]) > 1e-2


def by_ourselves_and_by_torch(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(1)
    images = torch.randn(4, 3, 5, dtype=torch.float32)
    plain, ours = nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3))
    ours = synchronise(ours, "x")
    found = []
    for images_of in (images, images.bfloat16()):
        theirs = ours(images_of[rank::world_size])
        assert theirs.dtype == images_of.dtype
        whole = plain(images_of.float())[rank::world_size]
        found.append(float((theirs.float() - whole).abs().max()))
    # Far from zero: a variance by the mean of squares would lose its digits.
    far = images + 1000.0
    found.append(float((ours(far[rank::world_size]) - plain(far)[rank::world_size]).abs().max()))
    for module in (plain, ours):
        module.eval()
    found.append(float((plain(images) - ours(images)).abs().max()))
    return found


def test_the_values_are_those_of_torch_over_the_whole_batch_in_bf16_too() -> None:
    for exact, rounded, far, evaluated in run_ranks(2, by_ourselves_and_by_torch):
        assert exact < 1e-5
        assert rounded < 0.05
        assert far < 1e-3
        assert evaluated < 1e-2


def test_a_rank_alone_normalises_as_torch_does() -> None:
    assert not dist.is_initialized()
    images = torch.randn(4, 3, 5)
    plain, ours = nn.BatchNorm1d(3), synchronise(nn.BatchNorm1d(3), "x")
    assert isinstance(ours, SyncBatchNorm)
    assert torch.equal(plain(images), ours(images))
    assert torch.equal(plain.running_var, ours.running_var)  # type: ignore[arg-type]


def test_a_model_without_batchnorm_is_refused() -> None:
    with pytest.raises(
        TrainingError, match=r"--sync-batchnorm: the model convnet has no torch.nn BatchNorm"
    ):
        synchronise(nets.build("convnet"), "convnet")


@pytest.mark.parametrize(
    ("model", "batch_size", "ranks", "synced", "warned"),
    [
        ("bn-convnet", 8, 2, False, True),
        ("bn-convnet", 16, 2, False, False),
        ("bn-convnet", 8, 1, False, False),
        ("bn-convnet", 8, 2, True, False),
        ("convnet", 8, 2, False, False),
    ],
)
def test_small_batches_of_each_rank_are_warned_of(
    model: str, batch_size: int, ranks: int, synced: bool, warned: bool
) -> None:
    agreed = Agreement(
        "gloo", "cpu", 1, ranks, global_batch_size=batch_size * ranks, reference_world_size=ranks
    )
    config = TrainConfig(model=model, batch_size=batch_size, sync_batchnorm=synced)
    words = poor_statistics(nets.build(model), config, agreed)
    assert bool(words) is warned
    # It goes by the passes of which a step may have several.
    in_passes = TrainConfig(
        model=model,
        batch_size=batch_size // 4,
        gradient_accumulation_steps=4,
        sync_batchnorm=synced,
    )
    small = bool(poor_statistics(nets.build(model), in_passes, agreed))
    assert small is (model == "bn-convnet" and ranks == 2 and not synced)
    if warned:
        assert "8 images" in words and "--sync-batchnorm" in words
