"""A dataset in memory on the rank's device, which images a rank takes, and in what order."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler


class Images:
    """Torchvision's MNIST set as two tensors; a batch is one indexed read and one normalisation.

    Kept as bytes (47 MB for MNIST) and normalised batch by batch, with the very values that the
    dataset's own per-image transform gives: reading 64 images one by one costs as much as
    training on them.
    """

    def __init__(self, dataset: Any, device: torch.device) -> None:
        self._pixels: Tensor = dataset.data.to(device)
        self._labels: Tensor = dataset.targets.to(device)
        self._normalise = dataset.transform.transforms[-1]

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images (N, 1, 28, 28) and labels (N,) at these indices."""
        chosen = indices.to(self._labels.device)
        pixels = self._pixels[chosen].unsqueeze(1).to(torch.float32).div_(255)
        return self._normalise(pixels), self._labels[chosen]


def training_batches(
    sampler: DistributedSampler[Any], batch_size: int, seen: int, world_size: int
) -> Iterator[Tensor]:
    """The rank's batches of indices of the sampler's epoch, after `seen` images of all ranks.

    The sampler deals one shuffled order out to the ranks in turn, so what the ranks have seen
    together is a stretch of that order from its start, whatever their number was: a run goes on
    from there at another world size. (Where `seen` is no multiple of the world size, up to
    world size - 1 images are repeated.)
    """
    order = torch.tensor(list(sampler))[seen // world_size :]
    if len(order):  # torch.split makes one empty batch of nothing
        yield from torch.split(order, batch_size)


def evaluation_batches(count: int, rank: int, world_size: int, batch_size: int) -> Iterator[Tensor]:
    """The rank's share of `count` images: over all ranks each exactly once, without padding."""
    share = torch.arange(count)[rank::world_size]
    if len(share):
        yield from torch.split(share, batch_size)
