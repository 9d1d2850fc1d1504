"""Distributes a dataset's images over the ranks and reads them in batches.

`Images` keeps the set in memory on the rank's device; `Loader` reads single images with torch's
DataLoader, for sets that do not fit in memory. Code that draws random numbers here either seeds the
generators of torch, Python and numpy or leaves them unchanged.
"""

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clusterddp.data.mnist import PIXEL_MEAN, PIXEL_STD
from clusterddp.errors import DataError
from clusterddp.processes.signals import end_workers_at_exit, ignore_requests

# Images reordered at once: enough to be cheap, few compared with the set.
_STRETCH = 8192


class Images:
    """Images and labels in two tensors (MNIST's are 47 MB); a batch is a slice of them.

    Batches remain bytes until `as_images` converts them within the step: reading 64 images one by
    one takes as long as training on them.
    """

    def __init__(self, pixels: Tensor, labels: Tensor, device: torch.device) -> None:
        """pixels: (N, 28, 28), bytes, or (N, …), float32; labels: (N,), int64."""
        try:
            self._pixels = pixels.to(device)
            self._labels = labels.to(device)
        except torch.cuda.OutOfMemoryError as error:
            raise DataError(
                f"{len(pixels):,} images of {pixels.nbytes / 2**30:.1f} GiB do not fit into the "
                f"memory of {device}: {str(error).splitlines()[0]} Read them batch by batch with "
                "--data-pipeline loader. [CD0811]"
            ) from None

    def __len__(self) -> int:
        return len(self._labels)

    def batches(
        self, order: Tensor, batch_size: int, salt: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield unmodified images and labels (N,) in the order of these indices.

        salt: unused; seeds random transforms in `Loader`.
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
        """Raise DataError if a label is not one of this many classes."""
        check_labels(self._labels, classes)


def check_labels(labels: Tensor, classes: int | None) -> None:
    """Raise DataError if a label is negative or not one of this many classes."""
    lowest, highest = (int(each) for each in labels.aminmax())
    if lowest < 0:
        raise DataError(f"the label {lowest} is negative; classes start at 0. [CD0606]")
    if classes is not None and highest >= classes:
        raise DataError(
            f"the label {highest} is not one of the model's {classes} classes, 0 to "
            f"{classes - 1}. [CD0606]"
        )


def as_images(batch: Tensor) -> Tensor:
    """Return normalised images (N, 1, H, W) from bytes (N, H, W); other batches unchanged.

    The values are identical to torchvision's ToTensor and Normalize, computed in the same steps.
    Images with one channel get the strides of channels_last: the bytes are the same, but
    convolutions choose their algorithm by the strides.
    """
    if batch.dtype is not torch.uint8:
        one_channel = batch.dim() == 4 and batch.shape[1] == 1
        return _with_a_channel(batch.squeeze(1)) if one_channel else batch
    return _with_a_channel(batch).to(torch.float32).div_(255).sub_(PIXEL_MEAN).div_(PIXEL_STD)


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
    number: a run resumes from there at another world size. (If `seen` is not a multiple of the
    world size, up to world size - 1 images are repeated.)
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
    padding = -count % world_size
    order = torch.cat([order, order.repeat(math.ceil(padding / count))[:padding]])
    return order[rank::world_size][seen // world_size :]


def evaluation_order(count: int, rank: int, world_size: int) -> Tensor:
    """Return the rank's share of `count` images: each is on exactly one rank, without padding."""
    return torch.arange(count)[rank::world_size]


class Items(Protocol):
    """A map-style dataset of (image, label) pairs."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


class Loader:
    """Any map-style dataset of (image, label) pairs, with the interface of `Images`."""

    def __init__(self, dataset: Items, device: torch.device, workers: int) -> None:
        """workers: processes that read ahead; with 0 the rank itself reads."""
        self._dataset, self._device, self._workers = dataset, device, workers
        self._classes: int | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(
        self, order: Tensor, batch_size: int, salt: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (N, …) and labels (N,), int64, in the order of these indices.

        salt: seeds random transforms, together with the batch's indices. A resumed training
        therefore draws the same numbers, whichever process reads the batch, and the rank's
        generators do not change.

        Raises DataError for a label that is not a class.
        """
        indices = order.tolist()
        cuts = range(0, len(indices), batch_size)
        loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            _SeededPerBatch(self._dataset, salt),
            batch_sampler=[indices[cut : cut + batch_size] for cut in cuts],
            # A single batch (DDP's warm-up has one) is not worth a process.
            num_workers=self._workers if len(cuts) > 1 else 0,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=ignore_requests,
            # Else DataLoader draws from the rank's generator at every epoch.
            generator=torch.Generator().manual_seed(salt),
        )
        end_workers_at_exit()
        for images, labels in loader:
            check_labels(labels, self._classes)  # on a GPU a wrong one breaks the CUDA context
            pixels = images.float() if images.is_floating_point() else images
            yield (
                pixels.to(self._device, non_blocking=True),
                labels.long().to(self._device, non_blocking=True),
            )

    def expect(self, classes: int) -> None:
        """Check the labels of each batch against this number of classes."""
        self._classes = classes


class _SeededPerBatch(Dataset[tuple[Tensor, Tensor]]):
    """Dataset that seeds the random generators for each batch."""

    def __init__(self, dataset: Items, salt: int) -> None:
        self._dataset, self._salt = dataset, salt

    def __getitems__(self, indices: list[int]) -> list[object]:
        """Return a batch; DataLoader calls this if a dataset has it."""
        digest = hashlib.sha256(f"{self._salt} {indices}".encode()).digest()
        # Once per batch: once per item would slow the reading of small images by a third.
        with generators_kept(torch.device("cpu")):
            _seed_host(int.from_bytes(digest[:8], "big"))
            at_once = getattr(self._dataset, "__getitems__", None)
            return list(at_once(indices) if at_once else map(self._dataset.__getitem__, indices))


def seed_generators(number: int) -> None:
    """Seed all random generators of this rank, including the devices'."""
    torch.manual_seed(number)
    _seed_host(number)


def _seed_host(number: int) -> None:
    """Seed all generators except the devices', in microseconds and in any process."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    with suppress(TypeError):  # only numpy's default generator can be seeded
        np.random.seed(number % 2**32)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore all random generators of this rank on leaving the context."""
    # Cheaper than the states in a checkpoint, because this runs for every batch.
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
