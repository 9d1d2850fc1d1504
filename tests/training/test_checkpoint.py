import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.errors import CheckpointError
from clusterddp.run_dir import RunDir
from clusterddp.train_config import TrainConfig
from clusterddp.training import checkpoint, checkpoint_file, models, optimizer
from clusterddp.training.checkpoint import Position
from clusterddp.training.checkpoint_file import checksum_of

CONFIG = TrainConfig()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def save(run: RunDir, step: int, config: TrainConfig = CONFIG) -> Path:
    torch.manual_seed(step)
    model = models.build(config.model)
    return checkpoint.save(
        run,
        config=config,
        model=model,
        optimizer=optimizer.build(config, model),
        position=Position(
            step=step, epoch=1, step_in_epoch=2, samples=128, seconds=1.5, images=640
        ),
        world_size=2,
    )


def tampered(path: Path, **fields: Any) -> Path:
    """Change a checkpoint's content, and its checksum with it."""
    content = torch.load(path, weights_only=True)
    torch.save({**content, **fields}, path)
    rehash(path)
    return path


def rehash(path: Path) -> None:
    checksum_of(path).write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")


def test_what_was_saved_is_restored_into_the_bare_model(run: RunDir) -> None:
    path = save(run, 1200)
    assert path.name == "step-00001200.pt"
    torch.manual_seed(7)
    model = models.build("convnet")
    position = checkpoint.restore(path, CONFIG, model, optimizer.build(CONFIG, model))
    assert position == Position(1200, 1, 2, 128, 1.5, 640)
    torch.manual_seed(1200)
    assert checkpoint.weights_sha256(model) == checkpoint.weights_sha256(models.build("convnet"))
    content = checkpoint.load(path)
    assert content["world_size"] == 2
    assert content["config"] == dataclasses.asdict(CONFIG)


def test_the_checksum_is_in_the_form_of_sha256sum(run: RunDir) -> None:
    path = save(run, 1)
    digest, name = checksum_of(path).read_text().split()
    assert (digest, name) == (hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


def test_nothing_but_the_two_files_is_left(run: RunDir) -> None:
    save(run, 1)
    save(run, 1)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "step-00000001.pt", "step-00000001.pt.sha256",
    ]  # fmt: skip


def test_a_flipped_bit_is_noticed(run: RunDir) -> None:
    path = save(run, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


def test_a_checkpoint_that_is_cut_off_or_incomplete_is_refused(run: RunDir) -> None:
    path = save(run, 1)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)
    rehash(path)
    with pytest.raises(CheckpointError, match="no checkpoint of clusterddp"):
        checkpoint.load(path)
    checksum_of(path).unlink()
    with pytest.raises(CheckpointError, match="may be incomplete"):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.load(run.checkpoints / "step-2.pt")


class _Trap:
    def __reduce__(self) -> Any:
        return (print, ("code of the file was run",))


def test_code_in_a_file_is_not_run(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(run, 1)
    torch.save({"format": 1, "trap": _Trap()}, path)
    rehash(path)
    with pytest.raises(CheckpointError):
        checkpoint.load(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 99}, "format 99.*reads format 1"),
        ({"config": {**dataclasses.asdict(CONFIG), "model": "resnet"}}, "--model resnet.*convnet"),
        ({"config": {**dataclasses.asdict(CONFIG), "dataset": "synthetic"}}, "synthetic.*mnist"),
        ({"config": {**dataclasses.asdict(CONFIG), "optimizer": "sgd"}}, "sgd.*adam"),
        ({"model": {"other": torch.zeros(1)}}, "does not fit"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_naming_both_sides(
    run: RunDir, fields: dict[str, Any], message: str
) -> None:
    path = tampered(save(run, 1), **fields)
    model = models.build("convnet")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.restore(path, CONFIG, model, optimizer.build(CONFIG, model))


def test_the_newest_whole_checkpoint_is_found(run: RunDir) -> None:
    warnings: list[str] = []
    assert checkpoint_file.newest(run, warnings.append) is None
    paths = [save(run, step) for step in (9, 10, 100, 101)]
    paths[3].write_bytes(b"torn")
    checksum_of(paths[2]).unlink()
    assert checkpoint_file.newest(run, warnings.append) == paths[1]
    assert [warning.split(":")[0] for warning in warnings] == [
        "passing over step-00000101.pt", "passing over step-00000100.pt",
    ]  # fmt: skip


def test_resume_takes_a_run_its_checkpoints_or_a_file(run: RunDir) -> None:
    path = save(run, 3)
    for named in (run.path, run.checkpoints, path):
        assert checkpoint_file.find(str(named), print) == path
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoint_file.find(str(run.path.parent), print)
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint_file.find(str(run.path / "nothing.pt"), print)


def test_leftovers_of_a_killed_writer_are_removed(run: RunDir) -> None:
    path = save(run, 1)
    leftover = run.checkpoints / ".step-00000002.pt.abc"
    leftover.write_bytes(b"half")
    checkpoint_file.remove_leftovers(run)
    assert path.exists() and not leftover.exists()


def test_a_full_or_closed_folder_is_one_clear_error(run: RunDir) -> None:
    run.checkpoints.write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        save(run, 1)
