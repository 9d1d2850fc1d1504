import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp import log
from clusterddp.checkpoints.state import Position
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.files import read_json_lines
from clusterddp.run.run_dir import RunDir
from clusterddp.training.loop import train
from clusterddp.training.metrics import (
    Figures,
    Journal,
    Paces,
    Tally,
    Waiting,
    copy_history,
    of_ranks,
)
from tests.training.ranks import run_ranks
from tests.training.trainings import agree, build, config

FIGURES = Figures(loss=0.5, accuracy=0.75, lr=0.01, images_per_second=1234.56)


@pytest.fixture
def run(tmp_path: Path) -> Attempt:
    return begin(RunDir(tmp_path))


def test_a_line_in_the_log_and_one_in_the_file(run: Attempt, logged: list[str]) -> None:
    journal = Journal(run, 0, Position(), 10)
    journal.train(Position(step=3, seconds=1.5), FIGURES)
    journal.evaluation(Position(step=3, seconds=1.5), FIGURES)
    journal.close()
    assert logged == [
        "epoch 1 step 3: loss 0.5000, accuracy 75.00%, lr 0.01, 1,235 images/s",
        "step 3: test accuracy 75.00%, test loss 0.5000",
    ]
    kinds = [(line["kind"], line["step"], line["seconds"]) for line in read_json_lines(run.metrics)]
    assert kinds == [("train", 3, 1.5), ("eval", 3, 1.5)]


def test_other_ranks_log_and_write_nothing(run: Attempt, logged: list[str]) -> None:
    journal = Journal(run, 1, Position(), 10)
    journal.step()
    journal.train(Position(step=3), FIGURES)
    journal.evaluation(Position(step=3), FIGURES)
    journal.close()
    assert logged == []
    assert not run.metrics.exists()


def test_what_a_lost_attempt_wrote_beyond_its_checkpoint_is_dropped(run: Attempt) -> None:
    earlier = run.path / "earlier.jsonl"
    lines = [json.dumps({"kind": "train", "step": step}) for step in (100, 200, 300)]
    earlier.write_text("\n".join(lines) + '\n{"kind": "tr')
    copy_history(earlier, run.metrics, 200)
    Journal(run, 0, Position(step=200), 400).train(Position(step=300), FIGURES)
    assert [line["step"] for line in read_json_lines(run.metrics)] == [100, 200, 300]
    assert run.metrics.read_text().endswith("}\n")
    copy_history(earlier, run.metrics, 0)
    assert run.metrics.read_text() == ""


def test_what_an_earlier_attempt_has_evaluated_has_one_line(run: Attempt) -> None:
    Journal(run, 0, Position(), 400).evaluation(Position(step=200), FIGURES)
    again = Journal(run, 0, Position(step=200), 400)
    again.evaluation(Position(step=200), FIGURES)
    again.train(Position(step=200), FIGURES)
    again.evaluation(Position(step=300), FIGURES)
    kinds = [(line["kind"], line["step"]) for line in read_json_lines(run.metrics)]
    assert kinds == [("eval", 200), ("train", 200), ("eval", 300)]


def test_after_a_full_disk_the_next_line_is_whole(run: Attempt, logged: list[str]) -> None:
    run.metrics.symlink_to("/dev/full")
    journal = Journal(run, 0, Position(), 400)
    journal.train(Position(step=1), FIGURES)
    journal.train(Position(step=2), FIGURES)
    assert sum("No space left on device" in line for line in logged) == 1
    run.metrics.unlink()
    run.metrics.write_text('{"kind": "train", "st')  # as much as went onto the disk
    journal.train(Position(step=3), FIGURES)
    journal.train(Position(step=4), FIGURES)
    assert [line["step"] for line in read_json_lines(run.metrics)] == [3, 4]


def test_a_log_on_a_full_disk_costs_its_lines_only(
    run: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115 -- closing it fails, too
    monkeypatch.setattr(sys, "stdout", full)
    journal = Journal(run, 0, Position(), 400)
    with log.to(log.to_stdout):
        journal.train(Position(step=1), FIGURES)
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1]


class _Terminal:
    """A stderr that is a terminal, and keeps what is written."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_a_bar_unless_no_color_is_set(
    run: Attempt, monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    journal = Journal(run, 0, Position(step=2), 10)
    journal.step()
    journal.train(Position(step=3), FIGURES)
    journal.close()
    assert ("3/10" in terminal.text) is not no_color
    assert len(list(read_json_lines(run.metrics))) == 1


def test_sums_start_anew_after_each_line(alone: None) -> None:
    tally = Tally(torch.device("cpu"))
    scores = torch.eye(10)[:4]
    tally.add(torch.tensor(2.0), scores, torch.tensor([0, 1, 2, 9]))
    tally.count(4)
    tally.add(torch.tensor(4.0), scores[:2], torch.tensor([0, 1]))
    tally.count(2)
    assert tally.steps == 2
    *means, paces = tally.collect()
    assert [*means, paces.images] == pytest.approx([(2 * 4 + 4 * 2) / 6, 5 / 6, 6])
    tally.add(torch.tensor(1.0), scores, torch.tensor([1, 2, 3, 4]))
    tally.count(4)
    *means, paces = tally.collect()
    assert [*means, paces.images] == [1.0, 0.0, 4.0]


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
    from clusterddp.models import nets

    agreed = agree(settings, run, world_size) if rank == 0 else None
    box = [agreed]
    torch.distributed.broadcast_object_list(box)
    nets.MODELS["convnet"] = lambda: Slow(rank == 1)
    ours = build(rank, settings, box[0])
    train(ours)
    return ours.ranks


def test_the_rank_that_others_wait_for_is_the_slowest(synthetic_dir: Path, tmp_path: Path) -> None:
    ranks, again = run_ranks(
        2, train_with_a_straggler, config(synthetic_dir, max_steps=5), tmp_path
    )
    assert ranks == again
    assert [each.rank for each in ranks] == [0, 1]
    assert ranks[1].images_per_second < 0.7 * ranks[0].images_per_second
    assert all(each.host and each.peak_memory_bytes > 10_000_000 for each in ranks)


def test_what_is_not_known_is_not_told(alone: None) -> None:
    assert of_ranks(Paces(), CPU)[0].images_per_second is None
    assert Waiting(CPU, knows=False).take() is None
    tally = Tally(CPU)
    tally.add(torch.tensor(1.0), torch.eye(10)[:4], torch.arange(4))
    tally.count(4)
    *_, paces = tally.collect(None)
    assert (paces.images, paces.images_per_second) == (4, [])
    assert of_ranks(paces, CPU)[0].images_per_second is None
