import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clusterddp.data import mnist
from clusterddp.data.in_memory import Images, as_images
from clusterddp.data.loader import Loaded
from tests.training.trainings import generator_states

CPU = torch.device("cpu")


@pytest.mark.parametrize("workers", [0, 2])
def test_it_gives_the_batches_that_are_kept_in_memory_too(
    synthetic_dir: Path, workers: int
) -> None:
    loaded = Loaded(
        mnist.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, workers
    )
    kept = Images(*mnist.load("synthetic", str(synthetic_dir), train=True), CPU)
    order = torch.randperm(100)[:75]
    ours, theirs = list(loaded.batches(order, 20)), list(kept.batches(order, 20))
    assert [len(labels) for _, labels in ours] == [20, 20, 20, 15]
    for (images, labels), (pixels, digits) in zip(ours, theirs, strict=True):
        assert torch.equal(images, as_images(pixels))
        assert torch.equal(labels, digits)


def test_reading_draws_no_number_of_the_ranks_own(synthetic_dir: Path) -> None:
    loaded = Loaded(mnist.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, 1)
    before = torch.get_rng_state()
    list(loaded.batches(torch.arange(40), 20))
    assert torch.equal(before, torch.get_rng_state())


def test_a_signal_to_every_process_of_the_step_leaves_the_reading_alone(
    synthetic_dir: Path,
) -> None:
    """As Slurm sends it: the rank is to save, and does not know how without its workers."""
    loaded = Loaded(mnist.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, 2)
    batches = loaded.batches(torch.arange(200), 20)
    next(batches), next(batches)  # one from each: both are at work
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            assert worker.pid
            os.kill(worker.pid, number)
    assert len(list(batches)) == 8


class Noisy(list):  # type: ignore[type-arg]
    """Draws from every generator that a random transform can draw from."""

    def __getitem__(self, index: object) -> tuple[Tensor, int]:
        return torch.tensor([torch.rand(()), random.random(), np.random.random()]), 0


class AtOnce(Noisy):
    """Reads whole batches, as torch's Subset does."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [(image + 1, label) for image, label in (self[index] for index in indices)]


def drawn(workers: int = 0, seen: int = 0, salt: int = 0, kind: type[Noisy] = Noisy) -> Tensor:
    """What is drawn for the batches of an epoch of 100 images, after those that were seen."""
    loaded = Loaded(kind([None] * 100), CPU, workers)
    batches = loaded.batches(torch.arange(100)[seen:], 20, salt)
    return torch.stack([images for images, _ in batches])


def test_random_transforms_are_the_same_whoever_reads_and_wherever_a_run_was_cut_off() -> None:
    whole = drawn()
    assert len(whole.unique()) == whole.numel()
    for workers in range(3):
        for seen in (0, 20, 60, 80):
            assert torch.equal(drawn(workers, seen), whole[seen // 20 :]), (workers, seen)


def test_random_transforms_differ_from_epoch_to_epoch_for_the_very_batch() -> None:
    assert not any((one == other).any() for one, other in zip(drawn(), drawn(salt=1), strict=True))


def test_random_transforms_draw_nothing_from_the_ranks_own_generators() -> None:
    before = generator_states()
    drawn()
    assert torch.equal(generator_states(), before)


def test_a_dataset_that_reads_batches_at_once_is_left_to_do_so() -> None:
    assert torch.equal(drawn(kind=AtOnce), drawn() + 1)


def test_an_epoch_that_is_over_has_no_batch(synthetic_dir: Path) -> None:
    loaded = Loaded(mnist.torchvision_set("synthetic", str(synthetic_dir), train=False), CPU, 2)
    assert list(loaded.batches(torch.arange(0), 20)) == []
