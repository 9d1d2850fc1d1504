import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp.training.loop import train
from clusterddp.training.metrics import Tally
from clusterddp.training.throughput import Paces, Waiting, of_ranks
from tests.training.ranks import run_ranks
from tests.training.trainings import agree, build, config

CPU = torch.device("cpu")


def test_waiting_is_from_the_last_gradient_to_the_end_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    clock = iter([10.0, 17.0, 20.0, 20.5])
    waiting = Waiting(CPU)
    with waiting.learn(model):
        model(torch.ones(1, 3)).sum().backward()
    waiting.done()
    assert waiting.take() == 0, "what was learnt from is no step"
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    monkeypatch.setattr("time.perf_counter", lambda: (order.append("clock"), next(clock))[1])
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        waiting.done()
    assert waiting.take() == 7.5
    assert waiting.take() == 0
    # Looked at once in each pass, as the last of all gradients comes, and once at its end.
    of_one_pass = order[: len(order) // 2]
    assert of_one_pass.count("clock") == 2
    assert len(set(of_one_pass[: of_one_pass.index("clock")])) >= 3


def test_paces_add_up_rank_by_rank() -> None:
    paces = Paces()
    assert paces.images_per_second == []
    paces.add(Paces([100, 100], [1.0, 2.0]))
    paces.add(Paces([100, 100], [1.0, 2.0]))
    assert paces.images == 400
    assert paces.images_per_second == [100.0, 50.0]


class Slow(nn.Module):
    """A model that one rank takes longer over."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.layer, self.slow = nn.Linear(784, 10), slow

    def forward(self, images: Tensor) -> Tensor:
        if self.slow and self.training:
            threading.Event().wait(0.05)
        scores: Tensor = self.layer(images.flatten(1))
        return scores


def train_with_a_straggler(rank: int, world_size: int, settings: Any, run: Path) -> Any:
    from clusterddp.models import registry

    agreed = agree(settings, run, world_size) if rank == 0 else None
    box = [agreed]
    torch.distributed.broadcast_object_list(box)
    registry.MODELS["convnet"] = lambda: Slow(rank == 1)
    ours = build(rank, settings, box[0])
    train(ours)
    return ours.ranks


def test_the_rank_that_others_wait_for_is_the_slowest(synthetic_dir: Path, tmp_path: Path) -> None:
    ranks, again = run_ranks(
        2, train_with_a_straggler, config(synthetic_dir, max_steps=5), tmp_path
    )
    assert ranks == again
    assert [one["rank"] for one in ranks] == [0, 1]
    assert ranks[1]["images_per_second"] < 0.7 * ranks[0]["images_per_second"]
    assert all(one["host"] and one["peak_memory_bytes"] > 10_000_000 for one in ranks)


def test_what_is_not_known_is_not_told(alone: None) -> None:
    assert of_ranks(Paces(), CPU)[0]["images_per_second"] is None
    assert Waiting(CPU, knows=False).take() is None
    tally = Tally(CPU)
    tally.add(torch.tensor(1.0), torch.eye(10)[:4], torch.arange(4))
    tally.count(4)
    *_, paces = tally.collect(None)
    assert (paces.images, paces.images_per_second) == (4, [])
    assert of_ranks(paces, CPU)[0]["images_per_second"] is None
