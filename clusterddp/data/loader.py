"""Reads a dataset of single images with torch's DataLoader: for sets too large for memory."""

import hashlib
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clusterddp.data import rng
from clusterddp.data.in_memory import check_labels


class Loaded:
    """Any map-style dataset of (image, label) pairs, with the interface of `in_memory.Images`."""

    def __init__(self, dataset: Any, device: torch.device, workers: int) -> None:
        """workers: processes that read ahead; with 0 the rank itself reads."""
        self._dataset, self._device, self._workers = dataset, device, workers
        self._classes: int | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(
        self, order: Tensor, batch_size: int, salt: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (N, …) and labels (N,), int64, in the order of these indices.

        salt: seeds random transforms, together with the batch's indices alone. So a resumed
        training draws the same numbers, whichever process reads the batch, and the rank's
        generators are left as they are.

        Raises DataError for a label that is none of the classes.
        """
        indices = order.tolist()
        cuts = range(0, len(indices), batch_size)
        loader: DataLoader[Any] = DataLoader(
            _Salted(self._dataset, salt),
            batch_sampler=[indices[cut : cut + batch_size] for cut in cuts],
            # A single batch, as the one that settles DDP's buckets, is not worth a process.
            num_workers=self._workers if len(cuts) > 1 else 0,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_leave_signals_to_the_rank,
            # Else DataLoader draws from the rank's generator at every epoch.
            generator=torch.Generator().manual_seed(salt),
        )
        for images, labels in loader:
            check_labels(labels, self._classes)  # on a GPU a wrong one breaks all that follows
            yield (
                (images.float() if images.is_floating_point() else images).to(
                    self._device, non_blocking=True
                ),
                labels.long().to(self._device, non_blocking=True),
            )

    def expect(self, classes: int) -> None:
        """Refuse labels beyond so many classes, batch by batch."""
        self._classes = classes


class _Salted(Dataset[Any]):
    """A dataset that seeds the random generators anew for every batch."""

    def __init__(self, dataset: Any, salt: int) -> None:
        self._dataset, self._salt = dataset, salt

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return a batch, as DataLoader asks for one where a dataset can."""
        digest = hashlib.sha256(f"{self._salt} {indices}".encode()).digest()
        # Once a batch: once an item would make reading small images take a third longer.
        with rng.kept(torch.device("cpu")):
            rng.seed_host(int.from_bytes(digest[:8], "big"))
            at_once = getattr(self._dataset, "__getitems__", None)
            return at_once(indices) if at_once else [self._dataset[index] for index in indices]


def _leave_signals_to_the_rank(_: int) -> None:
    """Ignore Slurm's signals in a worker, whose death would fail a rank that is about to save.

    Slurm signals every process of a step. Workers end with their rank.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
