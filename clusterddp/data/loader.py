"""A dataset of single images, read by torch's DataLoader: for sets that do not fit into memory."""

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
    """As `images.Images`, over any map-style dataset of (image, label) pairs."""

    def __init__(self, dataset: Any, device: torch.device, workers: int) -> None:
        """workers: processes that read ahead; with 0 the rank reads by itself."""
        self._dataset, self._device, self._workers = dataset, device, workers
        self._classes: int | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def batches(
        self, order: Tensor, batch_size: int, salt: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images (N, …) and labels (N,), int64, in the order of these indices.

        salt: what random transforms start from, with the batch's indices and nothing else. So a
        training that goes on draws what it would have drawn, whoever reads which batch; the rank's
        own generators stay what they are.

        Raises DataError for a label that is none of the classes.
        """
        indices = order.tolist()
        cuts = range(0, len(indices), batch_size)
        loader: DataLoader[Any] = DataLoader(
            _Salted(self._dataset, salt),
            batch_sampler=[indices[cut : cut + batch_size] for cut in cuts],
            # One batch, as when the buckets are settled, is not worth a process.
            num_workers=self._workers if len(cuts) > 1 else 0,
            pin_memory=self._device.type == "cuda",
            worker_init_fn=_leave_signals_to_the_rank,
            # Of its own: the rank's would be drawn from at every epoch, and so at every start.
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
        """Refuse, as they come, labels that are none of so many classes."""
        self._classes = classes


class _Salted(Dataset[Any]):
    """A dataset every batch of which is read from a random state of its own."""

    def __init__(self, dataset: Any, salt: int) -> None:
        self._dataset, self._salt = dataset, salt

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """A batch, as DataLoader asks for it where it can: here, or in a worker."""
        digest = hashlib.sha256(f"{self._salt} {indices}".encode()).digest()
        # Not for every item: that would make small images a third dearer to read.
        with rng.kept(torch.device("cpu")):
            rng.seed_host(int.from_bytes(digest[:8], "big"))
            at_once = getattr(self._dataset, "__getitems__", None)
            return at_once(indices) if at_once else [self._dataset[index] for index in indices]


def _leave_signals_to_the_rank(_: int) -> None:
    """Slurm signals every process of a step: a worker that dies of it would fail the rank, which
    is about to save. Workers go when the rank lets them, or has gone."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
