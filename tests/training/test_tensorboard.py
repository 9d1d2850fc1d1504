import errno
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from clusterddp.errors import TrainingError
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import MetricsLine
from clusterddp.training.metrics import TensorBoardWriter

pytest.importorskip("tensorboard", reason="an extra: pip install 'clusterddp[tensorboard]'")

CONFIG = TrainConfig(data_dir="/a|b `c`")


def train(step: int, loss: float = 0.5, kind: str = "train") -> MetricsLine:
    rate, seconds, at = 1234.0, 1.5, 1000.0 + step
    return MetricsLine(kind, step, 1, loss, 0.75, 0.01, rate, (rate,), None, seconds, at)


def evaluation(step: int) -> MetricsLine:
    return train(step, 0.25, "eval")


def board(folder: Path, history: Iterable[MetricsLine] = ()) -> TensorBoardWriter:
    return TensorBoardWriter(folder, CONFIG, history)


def read(folder: Path) -> Any:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def steps(folder: Path, tag: str) -> list[int]:
    return [point.step for point in read(folder).Scalars(tag)]


def test_tensorboard_reads_the_lines_of_metrics(tmp_path: Path, logged: list[str]) -> None:
    ours = board(tmp_path / "a b")
    ours.add(train(10, 0.5))
    ours.add(train(20, 0.25))
    ours.add(evaluation(20))
    ours.close()
    read_back = read(tmp_path / "a b")
    assert sorted(read_back.Tags()["scalars"]) == [
        "eval/accuracy", "eval/loss",
        "train/accuracy", "train/images_per_second", "train/loss", "train/lr",
    ]  # fmt: skip
    points = [
        (point.step, point.value, point.wall_time) for point in read_back.Scalars("train/loss")
    ]
    assert points == [(10, 0.5, 1010.0), (20, 0.25, 1020.0)]
    assert logged == [f"TensorBoard's files: tensorboard --logdir '{tmp_path}/a b'"]


def test_the_configuration_is_shown_as_it_is(tmp_path: Path) -> None:
    board(tmp_path).close()
    [text] = read(tmp_path).Tensors("configuration/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    assert "    data_dir: /a|b `c`" in lines and "    model: convnet" in lines


def test_an_attempt_has_the_whole_curve_without_the_steps_that_were_lost(tmp_path: Path) -> None:
    first = board(tmp_path)
    for step in (10, 20, 30):
        first.add(train(step))
    first.close()
    # An agent starts the attempt again from step 20.
    second = board(tmp_path, [train(10), train(20), evaluation(20)])
    second.add(train(30))
    second.close()
    assert steps(tmp_path, "train/loss") == [10, 20, 30]
    assert steps(tmp_path, "eval/loss") == [20]


def test_lines_of_other_versions_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    ours = board(tmp_path, [MetricsLine("train", 1, loss=2.0), MetricsLine("other"), MetricsLine()])
    ours.close()
    assert read(tmp_path).Tags()["scalars"] == ["train/loss"]


def test_without_the_package_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match=r"pip install 'clusterddp\[tensorboard\]'"):
        board(tmp_path)


def test_a_folder_that_cannot_be_made_costs_the_files_alone(
    tmp_path: Path, logged: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    ours = board(tmp_path / "file" / "tensorboard", [train(10)])
    ours.add(train(20))
    ours.close()
    [told] = logged
    assert "cannot write TensorBoard's files" in told and "Not a directory" in told


# The writer's thread dies of the error, and its next caller gets it too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_up_costs_the_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ours = board(tmp_path, [train(10)])
    monkeypatch.setattr(RecordWriter, "write", full)
    for step in range(20, 400, 10):
        ours.add(train(step))
    ours.close()
    [_, told] = logged
    assert "No space left on device. Training continues without them" in told
