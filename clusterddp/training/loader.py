"""A dataset of single images, read by torch's DataLoader: for sets that do not fit into memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Loaded:
    """As `images.Images`, over any map-style dataset of (image, label) pairs."""

    def __init__(self, dataset: Any, device: torch.device, workers: int) -> None:
        """workers: processes that read ahead; with 0 the rank reads by itself."""
        self._dataset, self._device, self._workers = dataset, device, workers

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Images (N, ...) and labels (N,), in the order of these indices."""
        indices = order.tolist()
        cuts = range(0, len(indices), batch_size)
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=[indices[cut : cut + batch_size] for cut in cuts],
            # One batch, as when the buckets are settled, is not worth a process.
            num_workers=self._workers if len(cuts) > 1 else 0,
            pin_memory=self._device.type == "cuda",
            # Of its own: the rank's would be drawn from at every epoch, and so at every start.
            generator=torch.Generator(),
        )
        for images, labels in loader:
            yield (
                images.to(self._device, non_blocking=True),
                labels.to(self._device, non_blocking=True),
            )
