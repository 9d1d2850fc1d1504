import base64
import random
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clusterddp.data.loader import Images, Loaded
from clusterddp.run.records import WorstImage
from clusterddp.training import evaluation
from clusterddp.training.evaluation import Result
from tests.training.ranks import run_ranks

from .trainings import generator_states

CPU = torch.device("cpu")
# Label, and what the model below takes the image for.
SEEN = [(0, 0), (1, 1), (2, 1), (2, 2), (1, 2), (0, 0), (2, 1)]


class Reads(nn.Module):
    """Its scores are in the image: what it takes it for, and how sure it is of that."""

    def forward(self, images: Tensor) -> Tensor:
        scores = torch.zeros(len(images), 3)
        flat = images.flatten(1)
        scores[torch.arange(len(images)), flat[:, 0].long()] = flat[:, 1]
        return scores


def floats() -> Images:
    images = torch.zeros(len(SEEN), 1, 2, 2)
    images[:, 0, 0, 0] = torch.tensor([float(taken) for _, taken in SEEN])
    images[:, 0, 0, 1] = torch.arange(1.0, len(SEEN) + 1)  # the later, the surer
    return Images(images, torch.tensor([label for label, _ in SEEN]), CPU)


def evaluated(rank: int, world_size: int) -> dict[str, Any]:
    result = evaluation.evaluate(Reads(), floats(), CPU, nullcontext)
    return {"accuracy": result.accuracy, "loss": result.loss, **asdict(result.record(7, floats()))}


def test_the_result_is_one_at_every_world_size_each_image_counted_once(alone: None) -> None:
    """With more ranks than would fill a batch, and one that has no image at all."""
    one = evaluated(0, 1)
    assert one["confusion"] == ((2, 0, 0), (0, 1, 1), (0, 2, 1))
    assert one["accuracy"] == 4 / 7
    for world_size in (2, 8):
        for theirs in run_ranks(world_size, evaluated):
            assert theirs["confusion"] == one["confusion"]
            assert theirs["accuracy"] == one["accuracy"]
            assert [row["index"] for row in theirs["worst"]] == [
                row["index"] for row in one["worst"]
            ]
            assert abs(theirs["loss"] - one["loss"]) < 1e-9


class Draws(Reads):
    """Random in evaluation too, as a model that averages over dropout."""

    def forward(self, images: Tensor) -> Tensor:
        torch.rand(()), random.random(), np.random.random()
        return super().forward(images)


class Turned(list[tuple[Tensor, int]]):
    """Transforms at random, test images too."""

    def __getitem__(self, index: Any) -> Any:
        torch.rand(()), random.random(), np.random.random()
        return super().__getitem__(index)


def test_evaluating_takes_no_random_number_from_the_training(alone: None) -> None:
    [(images, labels)] = floats().batches(torch.arange(len(SEEN)), len(SEEN))
    turned = Loaded(Turned(zip(images, labels, strict=True)), CPU, 0)
    for model, test_set in ((Draws(), floats()), (Reads(), turned)):
        before = generator_states()
        evaluation.evaluate(model, test_set, CPU, nullcontext).record(7, test_set)
        assert torch.equal(generator_states(), before)


def test_the_worst_images_come_first_with_what_they_were_taken_for(alone: None) -> None:
    worst = evaluated(0, 1)["worst"]
    assert [(row["index"], row["label"], row["predicted"]) for row in worst[:3]] == [
        (6, 2, 1), (4, 1, 2), (2, 2, 1),
    ]  # fmt: skip
    losses = [row["loss"] for row in worst]
    assert losses == sorted(losses, reverse=True)
    assert len(worst) == len(SEEN)


def test_their_pixels_are_kept_as_bytes() -> None:
    pixels = torch.arange(8, dtype=torch.uint8).view(2, 2, 2)
    labels = torch.tensor([0, 1])
    result = Result(0.5, 1.0, torch.eye(2), (WorstImage(1, 1, 0, 2.0),))
    [kept] = result.record(7, Images(pixels, labels, CPU)).worst
    assert kept.shape == (2, 2)
    assert list(base64.b64decode(kept.pixels)) == [4, 5, 6, 7]
    # Other values are stretched over the whole range; of several channels it is the first.
    pairs = [(torch.tensor([[[-1.0, 0.0], [0.0, 1.0]]] * 3), 0)] * 2
    [kept] = result.record(7, Loaded(pairs, CPU, 0)).worst
    assert list(base64.b64decode(kept.pixels)) == [0, 127, 127, 255]
