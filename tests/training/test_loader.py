import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from clusterddp.training import data
from clusterddp.training.images import Images, as_images
from clusterddp.training.loader import Loaded

CPU = torch.device("cpu")


@pytest.mark.parametrize("workers", [0, 2])
def test_it_gives_the_batches_that_are_kept_in_memory_too(
    synthetic_dir: Path, workers: int
) -> None:
    loaded = Loaded(data.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, workers)
    kept = Images(*data.load("synthetic", str(synthetic_dir), train=True), CPU)
    order = torch.randperm(100)[:75]
    ours, theirs = list(loaded.batches(order, 20)), list(kept.batches(order, 20))
    assert [len(labels) for _, labels in ours] == [20, 20, 20, 15]
    for (images, labels), (pixels, digits) in zip(ours, theirs, strict=True):
        assert torch.equal(images, as_images(pixels))
        assert torch.equal(labels, digits)


def test_reading_draws_no_number_of_the_ranks_own(synthetic_dir: Path) -> None:
    loaded = Loaded(data.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, 1)
    before = torch.get_rng_state()
    list(loaded.batches(torch.arange(40), 20))
    assert torch.equal(before, torch.get_rng_state())


def test_a_signal_to_every_process_of_the_step_leaves_the_reading_alone(
    synthetic_dir: Path,
) -> None:
    """As Slurm sends it: the rank is to save, and does not know how without its workers."""
    loaded = Loaded(data.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, 2)
    batches = loaded.batches(torch.arange(200), 20)
    next(batches), next(batches)  # one from each: both are at work
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            assert worker.pid
            os.kill(worker.pid, number)
    assert len(list(batches)) == 8


def test_a_datasets_own_random_numbers_differ_from_epoch_to_epoch() -> None:
    noisy = [(torch.zeros(1), 0)] * 40

    class Noisy(list):  # type: ignore[type-arg]
        def __getitem__(self, index: object) -> tuple[torch.Tensor, int]:
            return torch.rand(1), 0

    loaded = Loaded(Noisy(noisy), CPU, 1)
    one, again, other = (
        torch.cat([images for images, _ in loaded.batches(order, 20)])
        for order in (torch.arange(40), torch.arange(40), torch.arange(40).flip(0))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_an_epoch_that_is_over_has_no_batch(synthetic_dir: Path) -> None:
    loaded = Loaded(data.torchvision_set("synthetic", str(synthetic_dir), train=False), CPU, 2)
    assert list(loaded.batches(torch.arange(0), 20)) == []
