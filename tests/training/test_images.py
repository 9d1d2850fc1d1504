from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from clusterddp.training import data
from clusterddp.training.images import Images, evaluation_batches, training_batches


def test_a_batch_holds_the_very_values_of_the_datasets_own_transform(synthetic_dir: Path) -> None:
    dataset = data.load("synthetic", str(synthetic_dir), train=True)
    images = Images(dataset, torch.device("cpu"))
    indices = torch.tensor([3, 1999, 0])
    pixels, labels = images.batch(indices)
    assert len(images) == len(dataset)
    assert pixels.shape == (3, 1, 28, 28)
    for position, index in enumerate(indices.tolist()):
        image, label = dataset[index]
        assert torch.equal(pixels[position], image)
        assert labels[position] == label


def sampler(count: int, rank: int, world_size: int) -> DistributedSampler[int]:
    ours: DistributedSampler[int] = DistributedSampler(range(count), world_size, rank, seed=5)
    ours.set_epoch(1)
    return ours


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_ranks_cover_an_epoch_exactly_once(world_size: int) -> None:
    seen = [
        index
        for rank in range(world_size)
        for batch in training_batches(sampler(240, rank, world_size), 7, 0, world_size)
        for index in batch.tolist()
    ]
    assert sorted(seen) == list(range(240))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2)])
def test_an_epoch_goes_on_at_another_world_size_without_loss_or_repetition(
    before: int, after: int
) -> None:
    steps, batch = 3, 10
    first = [
        index
        for rank in range(before)
        for taken in list(training_batches(sampler(240, rank, before), batch, 0, before))[:steps]
        for index in taken.tolist()
    ]
    rest = [
        index
        for rank in range(after)
        for taken in training_batches(sampler(240, rank, after), batch, len(first), after)
        for index in taken.tolist()
    ]
    assert sorted(first + rest) == list(range(240))


@pytest.mark.parametrize("world_size", [1, 2, 3, 600])
def test_evaluation_takes_each_image_once(world_size: int) -> None:
    seen = [
        index
        for rank in range(world_size)
        for batch in evaluation_batches(500, rank, world_size, 64)
        for index in batch.tolist()
    ]
    assert sorted(seen) == list(range(500))


def test_at_the_end_of_an_epoch_no_batch_is_left() -> None:
    assert list(training_batches(sampler(240, 1, 3), 7, 240, 3)) == []
