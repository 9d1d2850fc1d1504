import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clusterddp.checkpoints import catalog, state
from clusterddp.checkpoints.catalog import Best, checksum_of, name_of
from clusterddp.checkpoints.state import Position, to_bytes
from clusterddp.errors import CheckpointError
from clusterddp.models import nets
from clusterddp.request.train_config import TrainConfig
from clusterddp.training.step import build_optimizer
from clusterddp.version import __version__
from tests.checkpoints.made_checkpoints import rehash
from tests.training.ranks import run_ranks

CONFIG = TrainConfig()
POSITION = Position(step=1200, epoch=1, step_in_epoch=2, samples=128, seconds=1.5, images=640)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step, so that the optimizer has a state."""
    torch.manual_seed(seed)
    model = nets.build(CONFIG.model).to(memory_format=torch.channels_last)
    chosen = build_optimizer(CONFIG, model)
    step(model, chosen)
    return model, chosen


def step(model: nn.Module, chosen: torch.optim.Optimizer) -> None:
    chosen.zero_grad()
    model(torch.randn(4, 1, 28, 28)).square().sum().backward()
    chosen.step()


def collected(seed: int = 1, **fields: Any) -> dict[str, Any]:
    model, chosen = trained(seed)
    fields = {"model": model, "optimizer": chosen, **fields}
    states = {name: fields.pop(name) for name in ("model", "optimizer")}
    given = {
        "best": Best(0.97, 1100),
        "random_states": [{"torch": torch.arange(10, dtype=torch.uint8)}, None],
        "config": dataclasses.asdict(CONFIG),
        **fields,
    }
    return {**state.collect(states, POSITION, world_size=2, **given)}


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / name_of(content["step"])
    path.write_bytes(to_bytes(content))
    rehash(path)
    return path


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return (
        [tensor for item in items for tensor in tensors(item)]
        if isinstance(value, (dict, list, tuple))
        else []
    )


def test_all_that_was_collected_is_restored(tmp_path: Path) -> None:
    path = written(tmp_path, collected(1))
    model, chosen = trained(7)
    content = state.load(path)
    state.restore(path, {"model": model, "optimizer": chosen}, content)
    assert Position.of(content) == POSITION
    assert content["best"] == {"accuracy": 0.97, "step": 1100}
    assert (content["world_size"], content["config"]) == (2, dataclasses.asdict(CONFIG))
    assert content["random_states"][0]["torch"].tolist() == list(range(10))
    other, its = trained(1)
    assert state.weights_sha256(model) == state.weights_sha256(other)
    # The optimizer's state too, and in the same layout: the next step gives the same bits.
    for seed_model, seed_optimizer in ((model, chosen), (other, its)):
        torch.manual_seed(5)
        step(seed_model, seed_optimizer)
    assert state.weights_sha256(model) == state.weights_sha256(other)


def test_versions_are_in_it(tmp_path: Path) -> None:
    versions = state.load(written(tmp_path, collected()))["versions"]
    assert versions["clusterddp"] == __version__
    assert set(versions) == {"clusterddp", "torch"}


def test_training_may_go_on_at_once_for_every_tensor_is_a_copy() -> None:
    model, chosen = trained(1)
    content = collected(model=model, optimizer=chosen)
    before = to_bytes(content)
    live = {tensor.untyped_storage().data_ptr() for tensor in tensors(chosen.state_dict())}
    live |= {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    copies = tensors(content)
    assert len(copies) > len(live) > 10
    for tensor in copies:
        assert tensor.untyped_storage().data_ptr() not in live
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a view of something larger"
        assert tensor.device.type == "cpu" and not tensor.requires_grad
    step(model, chosen)
    assert to_bytes(content) == before


@pytest.mark.slow
def test_a_module_is_loaded_without_this_package(tmp_path: Path) -> None:
    """By a program that has torch and the file, and nothing else of ours."""
    model, chosen = trained(1)
    path = written(tmp_path, collected(model=model, optimizer=chosen))
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    torch.save(nn.Sequential(nn.Linear(1, 1)).state_dict(), tmp_path / "small.pt")
    program = f"""
import sys, torch
class Blocked:
    def find_spec(self, name, *_):
        assert name.split(".")[0] != "clusterddp"
sys.meta_path.insert(0, Blocked())
content = torch.load({str(path)!r}, weights_only=True)
plain = torch.load({str(tmp_path / "plain.pt")!r}, weights_only=True)
assert list(content["model"]) == list(plain)
assert all(torch.equal(content["model"][name], plain[name]) for name in plain)
assert type(content["model"]) is type(plain) and content["model"]._metadata == plain._metadata
model = torch.nn.Module()
for name, value in plain.items():
    *parts, last = name.split(".")
    at = model
    for part in parts:
        if not hasattr(at, part):
            at.add_module(part, torch.nn.Module())
        at = getattr(at, part)
    at.register_parameter(last, torch.nn.Parameter(torch.zeros_like(value)))
model.load_state_dict(content["model"])
torch.optim.Adam(model.parameters()).load_state_dict(content["optimizer"])
print("loaded", content["step"])
"""
    got = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, check=False, capture_output=True,
        text=True,
    )  # fmt: skip
    assert got.stdout == "loaded 1200\n", got.stderr


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, collected())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged: it is cut off"):
        state.load(path)
    rehash(path)
    with pytest.raises(CheckpointError, match="already damaged when"):
        state.load(path)
    checksum_of(path).unlink()
    with pytest.raises(CheckpointError, match="may be incomplete"):
        state.load(path)


class _Trap:
    def __reduce__(self) -> Any:
        return (print, ("code of the file was run by clusterddp",))


def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name_of(1)
    torch.save({"format": catalog.FORMAT, "trap": _Trap()}, path)
    rehash(path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of clusterddp: Weights only"):
        state.load(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 3}, "format 3.*reads format 4.*clusterddp"),
        ({"model": {"other": torch.zeros(1)}}, "does not fit the model"),
        ({"optimizer": {"state": {}, "param_groups": []}}, "does not fit the optimizer"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_naming_both_sides(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, {**collected(), **fields})
    with pytest.raises(CheckpointError, match=message):
        model, chosen = trained(1)
        state.restore(path, {"model": model, "optimizer": chosen}, state.load(path))


def load_and_count(
    rank: int, world_size: int, path: Path, piece_bytes: int
) -> tuple[int, list[Any] | str]:
    """How often this rank read the file, and its tensors or the error."""
    read, counted = catalog.read, []

    def count(asked: Path, *, shards: bool) -> bytes:
        counted.append(asked)
        return read(asked, shards=shards)

    catalog.read, state._PIECE_BYTES = count, piece_bytes
    try:
        content = state.load_together(path)
        return len(counted), [tensor.numpy().copy() for tensor in tensors(content)]
    except CheckpointError as error:
        return len(counted), str(error)
    finally:
        catalog.read = read


@pytest.mark.parametrize("piece_bytes", [1 << 30, 10_007])
def test_rank_0_alone_reads_the_file_and_all_have_it(tmp_path: Path, piece_bytes: int) -> None:
    path = written(tmp_path, collected())
    expected = tensors(state.load(path))
    got = run_ranks(3, load_and_count, path, piece_bytes)
    assert [count for count, _ in got] == [1, 0, 0]
    for _, ours in got:
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(ours, expected, strict=True))


def test_a_file_that_rank_0_cannot_read_ends_all_ranks_for_its_reason(tmp_path: Path) -> None:
    path = written(tmp_path, collected())
    path.write_bytes(path.read_bytes()[:-1])
    first, *others = run_ranks(3, load_and_count, path, 1 << 20)
    assert first[0] == 1 and "step-00001200" in first[1]
    assert others == [(0, first[1])] * 2
