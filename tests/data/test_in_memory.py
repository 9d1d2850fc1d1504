from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from clusterddp.data import mnist
from clusterddp.data.in_memory import Images, as_images, evaluation_order, training_order


def test_a_batch_holds_the_very_values_of_the_datasets_own_transform(synthetic_dir: Path) -> None:
    dataset = mnist.torchvision_set("synthetic", str(synthetic_dir), train=True)
    images = Images(*mnist.load("synthetic", str(synthetic_dir), train=True), torch.device("cpu"))
    indices = torch.tensor([3, 1999, 0])
    [(pixels, labels)] = images.batches(indices, 7)
    assert len(images) == len(dataset)
    assert pixels.dtype is torch.uint8
    pixels = as_images(pixels)
    assert pixels.shape == (3, 1, 28, 28)
    assert torch.equal(as_images(pixels), pixels)
    for position, index in enumerate(indices.tolist()):
        image, label = dataset[index]
        assert torch.equal(pixels[position], image)
        assert labels[position] == label


@pytest.mark.parametrize(
    ("batch", "stride"),
    [
        (torch.zeros(3, 28, 28, dtype=torch.uint8), (784, 1, 28, 1)),
        (torch.zeros(3, 1, 28, 28), (784, 1, 28, 1)),
        # What a person's own model may `view` as it came.
        (torch.zeros(3, 2, 28, 28), (1568, 784, 28, 1)),
        (torch.zeros(3, 784), (784, 1)),
    ],
    ids=["bytes", "one channel", "two channels", "flat"],
)
def test_images_of_one_channel_say_that_they_are_channels_last_and_are_not_copied(
    batch: torch.Tensor, stride: tuple[int, ...]
) -> None:
    images = as_images(batch)
    assert images.stride() == stride
    assert images.view(3, -1).shape == (3, batch[0].numel())
    if batch.dtype is not torch.uint8:
        assert images.data_ptr() == batch.data_ptr()


@pytest.mark.parametrize("batch_size", [1, 64, 100, 9000])
def test_the_batches_are_the_order_in_pieces(batch_size: int) -> None:
    count = 20_000
    images = Images(
        torch.zeros(count, 28, 28, dtype=torch.uint8), torch.arange(count), torch.device("cpu")
    )
    order = torch.randperm(count)[:17_777]
    batches = [labels for _, labels in images.batches(order, batch_size)]
    assert torch.equal(torch.cat(batches), order)
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}


@pytest.mark.parametrize("count", [3, 240, 241, 247])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_order_is_distributed_samplers(count: int, world_size: int) -> None:
    for rank in range(world_size):
        for epoch in (0, 1, 5):
            sampler: DistributedSampler[int] = DistributedSampler(
                range(count), world_size, rank, seed=5
            )
            sampler.set_epoch(epoch)
            ours = training_order(count, seed=5, epoch=epoch, rank=rank, world_size=world_size)
            assert ours.tolist() == list(sampler)


def order(rank: int, world_size: int, seen: int = 0) -> list[int]:
    taken = training_order(240, seed=5, epoch=1, rank=rank, world_size=world_size, seen=seen)
    return list(map(int, taken))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_the_ranks_cover_an_epoch_exactly_once(world_size: int) -> None:
    seen = [index for rank in range(world_size) for index in order(rank, world_size)]
    assert sorted(seen) == list(range(240))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2)])
def test_an_epoch_goes_on_at_another_world_size_without_loss_or_repetition(
    before: int, after: int
) -> None:
    steps, batch = 3, 10
    first = [index for rank in range(before) for index in order(rank, before)[: steps * batch]]
    rest = [index for rank in range(after) for index in order(rank, after, len(first))]
    assert sorted(first + rest) == list(range(240))


@pytest.mark.parametrize("world_size", [1, 2, 3, 600])
def test_evaluation_takes_each_image_once(world_size: int) -> None:
    seen = [
        index
        for rank in range(world_size)
        for index in evaluation_order(500, rank, world_size).tolist()
    ]
    assert sorted(seen) == list(range(500))


def test_at_the_end_of_an_epoch_no_batch_is_left() -> None:
    images = Images(
        torch.zeros(240, 28, 28, dtype=torch.uint8), torch.arange(240), torch.device("cpu")
    )
    rest = training_order(240, seed=5, epoch=0, rank=1, world_size=3, seen=240)
    assert list(images.batches(rest, 7)) == []
