"""A run on images that are transformed at random, cut off: it ends with the very weights."""

import multiprocessing
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.checkpoints import state
from clusterddp.data.loader import Loader
from clusterddp.models import nets
from clusterddp.training.loop import train
from tests.training.ranks import run_ranks
from tests.training.trainings import CPU, agree, asked_at_once, build, config


class Turned(list[None]):
    """Images that every generator has a part in."""

    def __getitem__(self, index: Any) -> Any:
        image = torch.rand(28, 28) * random.random() * np.random.random()
        return image.unsqueeze(0) * (index + 1), index % 10


class Draws(nn.Module):
    """Random in training, and where it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        noise = torch.rand(()) * random.random() * np.random.random()
        scores: Tensor = self.layer(images.flatten(1) * noise)
        return scores


def _train(rank: int, world_size: int, run: Path, workers: int, stop: int = -1) -> tuple[Any, ...]:
    """As a start of a run; asked to stop at a step. Returns the step, the weights and draws."""
    # This process is the rank's alone. Workers are forked, as by a task.
    multiprocessing.set_start_method("fork", force=True)
    nets.MODELS["convnet"] = Draws
    settings = config(run, batch_size=5, eval_every="4steps")
    box = [agree(settings, run, world_size) if rank == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    ours = build(
        settings, box[0], train_set=Loader(Turned([None] * 50), CPU, workers),
        test_set=Loader(Turned([None] * 20), CPU, workers),
    )  # fmt: skip
    asked_at_once(ours, stop)
    train(ours)
    draws = (torch.rand(()).item(), random.random(), np.random.random())
    return ours.position.step, state.weights_sha256(ours.model), ours.result.loss, draws


def test_a_run_cut_off_in_mid_epoch_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    """Two ranks, which try a batch before their first step; cut off, and with other workers."""
    whole = run_ranks(2, _train, tmp_path / "whole", 0)
    assert [step for step, *_ in whole] == [10, 10]
    cut = run_ranks(2, _train, tmp_path / "cut", 2, 3)
    assert [step for step, *_ in cut] == [3, 3]
    assert run_ranks(2, _train, tmp_path / "cut", 0) == whole
