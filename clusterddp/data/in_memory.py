"""Keeps a dataset in memory on the rank's device, and deals its images out to the ranks."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clusterddp.data.mnist import PIXEL_MEAN, PIXEL_STD
from clusterddp.errors import DataError

# Images put in order at once: enough to make it cheap, few beside the set itself.
_STRETCH = 8192


class Images:
    """A set of images as two tensors (MNIST has 47 MB of bytes); a batch is a slice of them.

    Batches stay bytes until `as_images` makes images of them, within the step: reading 64 images
    one by one takes as long as training on them.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, device: torch.device) -> None:
        """pixels: (N, 28, 28), bytes, or (N, …), float32; labels: (N,), int64."""
        self._pixels = pixels.to(device)
        self._labels = labels.to(device)

    def __len__(self) -> int:
        return len(self._labels)

    def batches(
        self, order: Tensor, batch_size: int, salt: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images as they were given, and labels (N,), in the order of these indices.

        salt: seeds random transforms in `loader.Loaded`; here there are none.
        """
        stretch = max(_STRETCH // batch_size, 1) * batch_size
        order = order.to(self._labels.device)
        for begin in range(0, len(order), stretch):
            indices = order[begin : begin + stretch]
            # Copies image by image, in a seventh of the time on CPUs of indexing by a tensor, which
            # copies byte by byte.
            pixels = self._pixels.index_select(0, indices)
            labels = self._labels.index_select(0, indices)
            for start in range(0, len(indices), batch_size):
                some = slice(start, start + batch_size)
                yield pixels[some], labels[some]

    def expect(self, classes: int) -> None:
        """Raise DataError when a label is none of so many classes."""
        check_labels(self._labels, classes)


def check_labels(labels: Tensor, classes: int | None) -> None:
    """Raise DataError when one of them is negative, or none of so many classes."""
    lowest, highest = (int(each) for each in labels.aminmax())
    if lowest < 0:
        raise DataError(f"label {lowest} is negative; classes are numbered from 0.")
    if classes is not None and highest >= classes:
        raise DataError(
            f"label {highest} is none of the {classes} classes that the model scores, which are "
            f"numbered from 0 to {classes - 1}."
        )


def as_images(batch: Tensor) -> Tensor:
    """Return a batch as normalised images (N, 1, H, W), made of bytes (N, H, W) or as given.

    The values are exactly those of torchvision's ToTensor and Normalize, computed in the same
    steps. Images of one channel get channels_last's strides: the layouts are the same bytes, but
    convolutions choose their algorithm by the strides.
    """
    if batch.dtype is not torch.uint8:
        one_channel = batch.dim() == 4 and batch.shape[1] == 1
        return _with_a_channel(batch.squeeze(1)) if one_channel else batch
    images = _with_a_channel(batch).to(torch.float32)
    return images.div_(255).sub_(PIXEL_MEAN).div_(PIXEL_STD)


def _with_a_channel(batch: Tensor) -> Tensor:
    """View (N, H, W) as (N, 1, H, W) in the channels_last layout."""
    return batch.unsqueeze(-1).permute(0, 3, 1, 2)


def training_order(
    count: int, *, seed: int, epoch: int, rank: int, world_size: int, seen: int = 0
) -> Tensor:
    """Return the indices that a rank takes in an epoch, after `seen` images of all ranks.

    The order is exactly that of torch's DistributedSampler with these arguments, shuffled: one
    random order of all images, padded from its start to a multiple of the world size, dealt out to
    the ranks in turn. So the ranks together have seen the beginning of that order, whatever their
    number: a run resumes from there at another world size. (Where `seen` is no multiple of the
    world size, up to world size - 1 images are repeated.)
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(count, generator=generator)
    padding = -count % world_size
    order = torch.cat([order, order.repeat(math.ceil(padding / count))[:padding]])
    return order[rank::world_size][seen // world_size :]


def evaluation_order(count: int, rank: int, world_size: int) -> Tensor:
    """Return the rank's share of `count` images: over all ranks each exactly once, unpadded."""
    return torch.arange(count)[rank::world_size]
