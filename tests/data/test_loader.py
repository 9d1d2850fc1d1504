"""Batches from memory and from DataLoader: the same images, in DistributedSampler's order."""

import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from clusterddp.data import mnist
from clusterddp.data.loader import (
    Images,
    Loader,
    as_images,
    evaluation_order,
    generators_kept,
    seed_generators,
    training_order,
)
from clusterddp.errors import DataError
from clusterddp.version import arming_folder
from tests.training.trainings import generator_states, numbers_drawn
from tests.waiting import PATIENCE

CPU = torch.device("cpu")


def in_memory(synthetic_dir: Path) -> Images:
    return Images(*mnist.read("synthetic", str(synthetic_dir)).tensors(train=True), CPU)


def test_a_batch_holds_the_very_values_of_the_datasets_own_transform(synthetic_dir: Path) -> None:
    dataset = mnist.torchvision_set("synthetic", str(synthetic_dir), train=True)
    images = in_memory(synthetic_dir)
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


@pytest.mark.parametrize("workers", [0, 2])
def test_it_gives_the_batches_that_are_kept_in_memory_too(
    synthetic_dir: Path, workers: int
) -> None:
    loaded = Loader(
        mnist.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, workers
    )
    kept = in_memory(synthetic_dir)
    order = torch.randperm(100)[:75]
    ours, theirs = list(loaded.batches(order, 20)), list(kept.batches(order, 20))
    assert [len(labels) for _, labels in ours] == [20, 20, 20, 15]
    for (images, labels), (pixels, digits) in zip(ours, theirs, strict=True):
        assert torch.equal(images, as_images(pixels))
        assert torch.equal(labels, digits)


def test_reading_draws_no_number_of_the_ranks_own(synthetic_dir: Path) -> None:
    loaded = Loader(mnist.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, 1)
    before = torch.get_rng_state()
    list(loaded.batches(torch.arange(40), 20))
    assert torch.equal(before, torch.get_rng_state())


def test_a_signal_to_all_processes_of_the_step_leaves_reading_alone(synthetic_dir: Path) -> None:
    """As Slurm sends it: the rank is to save, and does not know how without its workers."""
    loaded = Loader(mnist.torchvision_set("synthetic", str(synthetic_dir), train=True), CPU, 2)
    batches = loaded.batches(torch.arange(200), 20)
    next(batches), next(batches)  # one from each: both are at work
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for name in ("-TERM", "-INT", "-USR1"):
        subprocess.run(["kill", name, *(str(worker.pid) for worker in workers)], check=True)
    assert len(list(batches)) == 8


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_outlive_slurms_signals_and_end_with_their_process(
    tmp_path: Path, method: str
) -> None:
    """As in the terminal: the traceback keeps the batches, and multiprocessing sends SIGTERM."""
    (tmp_path / "fails.py").write_text(
        "import clusterddp.training.replay as r, torch.utils.data as d\n"
        f"loader = d.DataLoader(range(80), num_workers=2, multiprocessing_context='{method}')\n"
        "r.shield_workers(loader)\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing as m, multiprocessing.forkserver as f, os, signal\n"
        "    from multiprocessing.resource_tracker import _resource_tracker as t\n"
        "    batches = iter(loader)\n"
        "    next(batches), next(batches)  # one from each worker: both are at work\n"
        "    workers = [worker.pid for worker in m.active_children()]\n"
        "    for pid in filter(None, [f._forkserver._forkserver_pid, t._pid, *workers]):\n"
        "        for number in ('SIGTERM', 'SIGHUP', 'SIGUSR1', 'SIGUSR2'):\n"
        "            os.kill(pid, getattr(signal, number))\n"
        "    print(len([next(batches) for _ in range(70)]), flush=True)\n"
        "    1 / 0"
    )
    end = subprocess.run(
        [sys.executable, tmp_path / "fails.py"], env={**os.environ, "PYTHONPATH": arming_folder()},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (end.returncode, end.stdout) == (1, "70\n"), end.stderr
    assert end.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert end.stderr.count("Traceback") == 1  # and none of the resource tracker


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
    loaded = Loader(kind([None] * 100), CPU, workers)
    return torch.stack([images for images, _ in loaded.batches(torch.arange(100)[seen:], 20, salt)])


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
    loaded = Loader(mnist.torchvision_set("synthetic", str(synthetic_dir), train=False), CPU, 2)
    assert list(loaded.batches(torch.arange(0), 20)) == []


def test_a_seed_repeats_every_generator() -> None:
    seed_generators(2**40)
    expected = numbers_drawn()
    numbers_drawn()
    seed_generators(2**40)
    assert numbers_drawn() == expected
    seed_generators(2**40 + 1)
    assert not any(one == other for one, other in zip(numbers_drawn(), expected, strict=True))


def test_what_is_kept_is_as_it_was_whatever_happens_meanwhile() -> None:
    seed_generators(3)
    numbers_drawn()
    before = generator_states()
    with pytest.raises(KeyError), generators_kept(CPU):
        seed_generators(4)
        numbers_drawn()
        raise KeyError
    assert torch.equal(generator_states(), before)


def test_a_set_that_a_gpu_does_not_hold_is_to_be_read_batch_by_batch() -> None:
    class Full(torch.Tensor):
        def to(self, *_: object) -> torch.Tensor:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 47 GiB.\nmore")

    pixels = torch.zeros(10, 28, 28, dtype=torch.uint8).as_subclass(Full)
    expected = r"10 images of 0\.0 GiB do not fit .* cuda:1: CUDA out .*--data-pipeline loader"
    with pytest.raises(DataError, match=expected):
        Images(pixels, torch.zeros(10, dtype=torch.int64), torch.device("cuda:1"))
