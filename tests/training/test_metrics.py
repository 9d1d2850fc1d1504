import contextlib
import functools
import gc
import json
import math
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp import log
from clusterddp.checkpoints.state import Position
from clusterddp.files import read_json_lines
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt, begin, copy_history
from clusterddp.run.records import MetricsLine, RateSpread
from clusterddp.run.run_dir import RunDir
from clusterddp.training import metrics
from clusterddp.training.loop import train
from clusterddp.training.metrics import Journal, MetricSums
from clusterddp.training.paces import ExchangeWait, StepTimer, Throughputs, of_ranks
from tests.training.ranks import run_ranks
from tests.training.trainings import agree, build, config


def train_line(step: int, kind: str = "train") -> MetricsLine:
    return MetricsLine(kind, step, 1, 0.5, 0.75, 0.01, 1234.56, seconds=1.5, time=1000.0)


def eval_line(step: int) -> MetricsLine:
    return train_line(step, "eval")


@pytest.fixture
def run(tmp_path: Path) -> Attempt:
    return begin(RunDir(tmp_path))


def test_a_line_in_the_log_and_one_in_the_file(run: Attempt, logged: list[str]) -> None:
    journal = Journal(TrainConfig(), run, 0, Position(), 10)
    journal.add(train_line(3))
    journal.add(eval_line(3))
    journal.close()
    assert logged == [
        "epoch 1 step 3: training loss 0.5000, training accuracy 75.00%, lr 0.01, 1,235 images/s",
        "step 3: test accuracy 75.00%, test loss 0.5000",
    ]
    kinds = [(line["kind"], line["step"], line["seconds"]) for line in read_json_lines(run.metrics)]
    assert kinds == [("train", 3, 1.5), ("eval", 3, 1.5)]


def test_a_line_names_the_rates_of_at_most_64_ranks(run: Attempt) -> None:
    """Of the built-in training and of a Loop alike."""
    timer = StepTimer(ExchangeWait(torch.device("cpu")), 0)
    journal = Journal(TrainConfig(), run, 0, Position(), 10)
    lines = metrics.Lines(run.metrics, 1, Position(3), lambda: 1, timer)
    for count in (64, 65):
        timer.rates = [float(rank) for rank in range(count)]
        spread = RateSpread.of(timer.rates)
        each = () if spread else tuple(timer.rates)
        journal.add(replace(train_line(3), rank_images_per_second=each, rank_spread=spread))
        lines.write("train", {"loss": 1.0}, timer.rates)
    journal.close()
    written = [*read_json_lines(run.metrics)]
    named = ("rank_images_per_second", "rank_spread")
    assert [[name for name in named if name in line] for line in written] == [
        *[["rank_images_per_second"]] * 2,
        *[["rank_spread"]] * 2,
    ]
    assert written[0][named[0]] == written[1][named[0]] == [float(rank) for rank in range(64)]
    assert written[2][named[1]] == written[3][named[1]]


def test_other_ranks_log_and_write_nothing(run: Attempt, logged: list[str]) -> None:
    journal = Journal(TrainConfig(), run, 1, Position(), 10)
    journal.step()
    journal.add(train_line(3))
    journal.add(eval_line(3))
    journal.close()
    assert logged == []
    assert not run.metrics.exists()


def test_what_a_lost_attempt_wrote_beyond_its_checkpoint_is_dropped(run: Attempt) -> None:
    earlier = run.path / "earlier.jsonl"
    lines = [json.dumps({"kind": "train", "step": step}) for step in (100, 200, 300)]
    earlier.write_text("\n".join(lines) + '\n{"kind": "tr')
    copy_history(earlier, run.metrics, 200)
    Journal(TrainConfig(), run, 0, Position(step=200), 400).add(train_line(300))
    assert [line["step"] for line in read_json_lines(run.metrics)] == [100, 200, 300]
    assert run.metrics.read_text().endswith("}\n")
    copy_history(earlier, run.metrics, 0)
    assert run.metrics.read_text() == ""


def test_what_an_earlier_attempt_has_evaluated_has_one_line(run: Attempt) -> None:
    Journal(TrainConfig(), run, 0, Position(), 400).add(eval_line(200))
    again = Journal(TrainConfig(), run, 0, Position(step=200), 400)
    again.add(eval_line(200))
    again.add(train_line(200))
    again.add(eval_line(300))
    kinds = [(line["kind"], line["step"]) for line in read_json_lines(run.metrics)]
    assert kinds == [("eval", 200), ("train", 200), ("eval", 300)]


def test_after_a_full_disk_the_next_line_is_whole(run: Attempt, logged: list[str]) -> None:
    run.metrics.symlink_to("/dev/full")
    journal = Journal(TrainConfig(), run, 0, Position(), 400)
    journal.add(train_line(1))
    journal.add(train_line(2))
    assert sum("No space left on device" in line for line in logged) == 1
    run.metrics.unlink()
    run.metrics.write_text('{"kind": "train", "st')  # as much as went onto the disk
    journal.add(train_line(3))
    journal.add(train_line(4))
    assert [line["step"] for line in read_json_lines(run.metrics)] == [3, 4]


def test_a_log_on_a_full_disk_costs_its_lines_only(
    run: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115 -- closing it fails, too
    monkeypatch.setattr(sys, "stdout", full)
    journal = Journal(TrainConfig(), run, 0, Position(), 400)
    with log.to(log.to_stdout):
        journal.add(train_line(1))
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
    journal = Journal(TrainConfig(), run, 0, Position(step=2), 10)
    journal.step()
    journal.add(train_line(3))
    journal.close()
    assert ("3/10" in terminal.text) is not no_color
    assert len(list(read_json_lines(run.metrics))) == 1


def test_closed_bars_are_let_go_and_leave_a_single_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Callable[..., None]] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    monkeypatch.setattr(metrics, "_listen", functools.cache(metrics._listen.__wrapped__))
    bars = []
    for _ in range(3):
        bar = metrics.progress_bar(0, 2)
        bar.update()
        bar.close()
        bars.append(weakref.ref(bar))
        del bar
    gc.collect()
    assert not [bar for bar in bars if bar() is not None]
    assert len(hooks) == 1
    hooks[0]("builtins.breakpoint", ())  # without a bar, nothing to clear


def test_sums_start_anew_after_each_line(alone: None) -> None:
    tally = MetricSums(torch.device("cpu"))
    scores = torch.eye(10)[:4]
    tally.add(torch.tensor(2.0), scores, torch.tensor([0, 1, 2, 9]))
    tally.count(4)
    tally.add(torch.tensor(4.0), scores[:2], torch.tensor([0, 1]))
    tally.count(2)
    assert tally.steps == 2
    assert tally.collect() == pytest.approx(((2 * 4 + 4 * 2) / 6, 5 / 6))
    tally.add(torch.tensor(1.0), scores, torch.tensor([1, 2, 3, 4]))
    tally.count(4)
    assert (tally.collect(), tally.steps) == ((1.0, 0.0), 0)


CPU = torch.device("cpu")


def test_waiting_is_from_the_last_gradient_to_the_end_of_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    clock = iter([10.0, 17.0, 20.0, 20.5])
    waiting = ExchangeWait(CPU)
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
    paces = Throughputs()
    assert paces.images_per_second == []
    paces += Throughputs([100, 100], [1.0, 2.0])
    paces += Throughputs([100, 100], [1.0, 2.0])
    assert paces.images == [200, 200]
    assert paces.images_per_second == [100.0, 50.0]


class Slow(nn.Module):
    """A model that one rank takes longer over."""

    def __init__(self, slow: bool) -> None:
        super().__init__()
        self.layer, self.slow = nn.Linear(784, 10), slow

    def forward(self, images: Tensor) -> Tensor:
        if self.slow and self.training:
            threading.Event().wait(0.3)  # a busy machine keeps the other one, too
        scores: Tensor = self.layer(images.flatten(1))
        return scores


def train_with_a_straggler(rank: int, world_size: int, settings: Any, run: Path) -> Any:
    from clusterddp.models import nets

    agreed = agree(settings, run, world_size) if rank == 0 else None
    box = [agreed]
    torch.distributed.broadcast_object_list(box)
    nets.MODELS["convnet"] = lambda: Slow(rank == 1)
    ours = build(settings, box[0])
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
    assert of_ranks(Throughputs(), CPU)[0].images_per_second is None
    assert math.isnan(ExchangeWait(CPU, is_measurable=False).take())
    pace = StepTimer(ExchangeWait(CPU, is_measurable=False), 0)
    pace.images = 4
    exchanged = pace.exchange(1)
    assert exchanged
    paces, *_ = exchanged
    assert (paces.images, paces.images_per_second) == ((4,), [])
    assert of_ranks(paces, CPU)[0].images_per_second is None
