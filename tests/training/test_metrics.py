import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch

from clusterddp import log
from clusterddp.checkpoints.state import Position
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.files import read_json_lines
from clusterddp.run.run_dir import RunDir
from clusterddp.training.metrics import Figures, Journal, Tally, copy_history

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
