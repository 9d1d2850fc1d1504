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
from clusterddp.checkpoints.catalog import FORMAT, Best, checksum_of, name_of
from clusterddp.checkpoints.state import Position, States
from clusterddp.checkpoints.tensors import to_bytes
from clusterddp.data.loader import generators_kept, seed_generators
from clusterddp.errors import CheckpointError, PeerError
from clusterddp.models import nets
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training.step import build_optimizer
from clusterddp.version import __version__
from tests.checkpoints.made_checkpoints import rehash
from tests.training.ranks import run_ranks
from tests.training.trainings import generator_states, numbers_drawn

CONFIG = TrainConfig()
CPU = torch.device("cpu")
AGREED = Agreement(world_size=2, global_batch_size=128, data_sha256="d" * 64)
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
    return state.collect(
        **{
            "config": CONFIG,
            "model": model,
            "optimizer": chosen,
            "position": POSITION,
            "agreed": AGREED,
            "best": Best(0.97, 1100),
            "random_states": {"torch": torch.arange(20, dtype=torch.uint8).reshape(2, 10)},
            "scaler": {},
            **fields,
        }
    )


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
    got = state.restore(path, CONFIG, model, chosen, state.load(path))
    assert got.position == POSITION
    assert got.best == Best(0.97, 1100)
    content = state.load(path)
    assert (content["world_size"], content["global_batch_size"]) == (2, 128)
    assert content["config"] == dataclasses.asdict(CONFIG)
    assert content["data_sha256"] == "d" * 64
    assert isinstance(got.random_states, dict)
    assert got.random_states["torch"].tolist() == torch.arange(20).reshape(2, 10).tolist()
    other, its = trained(1)
    assert state.weights_sha256(model) == state.weights_sha256(other)
    # The optimizer's state too, and in the same layout: the next step gives the same bits.
    for seed_model, seed_optimizer in ((model, chosen), (other, its)):
        torch.manual_seed(5)
        step(seed_model, seed_optimizer)
    assert state.weights_sha256(model) == state.weights_sha256(other)


def test_what_is_not_known_may_be_absent(tmp_path: Path) -> None:
    agreed = dataclasses.replace(AGREED, data_sha256="")
    path = written(tmp_path, collected(best=None, random_states=None, agreed=agreed))
    got = state.restore(path, CONFIG, *trained(1), state.load(path))
    assert (got.best, got.random_states) == (None, None)


def test_versions_are_in_it(tmp_path: Path) -> None:
    versions = state.load(written(tmp_path, collected()))["versions"]
    assert versions["clusterddp"] == __version__
    assert set(versions) == {"clusterddp", "torch", "numpy", "python"}


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
        [sys.executable, "-I", "-c", program],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert got.stdout == "loaded 1200\n", got.stderr


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, collected())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="damaged: it is cut off"):
        state.load(path)
    rehash(path)
    with pytest.raises(CheckpointError, match="no checkpoint of clusterddp"):
        state.load(path)
    checksum_of(path).unlink()
    with pytest.raises(CheckpointError, match="may be incomplete"):
        state.load(path)


class _Trap:
    def __reduce__(self) -> Any:
        return (print, ("code of the file was run by clusterddp",))


def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name_of(1)
    torch.save({"format": FORMAT, "trap": _Trap()}, path)
    rehash(path)
    with pytest.raises(CheckpointError, match="no checkpoint of clusterddp: Weights only"):
        state.load(path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 1}, "format 1.*reads format 3.*clusterddp"),
        ({"config": {**dataclasses.asdict(CONFIG), "model": "resnet"}}, "--model resnet.*convnet"),
        ({"config": {**dataclasses.asdict(CONFIG), "dataset": "synthetic"}}, "synthetic.*mnist"),
        ({"config": {**dataclasses.asdict(CONFIG), "optimizer": "sgd"}}, "sgd.*adam"),
        ({"model": {"other": torch.zeros(1)}}, "does not fit"),
        ({"optimizer": {"state": {}, "param_groups": []}}, "does not fit"),
        ({"best": {"other": 1}}, "does not fit"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_naming_both_sides(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, {**collected(), **fields})
    with pytest.raises(CheckpointError, match=message):
        state.restore(path, CONFIG, *trained(1), state.load(path))


def test_another_dataset_under_the_same_name_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, collected())
    content = state.load(path)
    with pytest.raises(CheckpointError, match=r"has changed since.*d{16}\.\.\..*e{16}\.\.\."):
        state.check_fits(path, content, CONFIG, data_sha256="e" * 64)
    state.check_fits(path, content, CONFIG, data_sha256="d" * 64)
    state.check_fits(path, content, CONFIG)
    state.check_fits(path, {**content, "data_sha256": ""}, CONFIG, data_sha256="e" * 64)


def load_and_count(
    rank: int, world_size: int, path: Path, piece_bytes: int
) -> tuple[int, list[Any] | str]:
    """How often this rank read the file, and its tensors or the error."""
    read, counted = catalog.read, []

    def count(asked: Path) -> bytes:
        counted.append(asked)
        return read(asked)

    catalog.read, state._PIECE_BYTES = count, piece_bytes
    try:
        content = state.load_together(path, CPU)
        return len(counted), [tensor.numpy().copy() for tensor in tensors(content)]
    except CheckpointError as error:
        return len(counted), str(error)
    except PeerError as error:
        return -1, str(error)
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


def test_a_file_that_rank_0_cannot_read_ends_all_ranks_and_blames_rank_0(tmp_path: Path) -> None:
    path = written(tmp_path, collected())
    path.write_bytes(path.read_bytes()[:-1])
    first, *others = run_ranks(3, load_and_count, path, 1 << 20)
    assert first[0] == 1 and "step-00001200" in first[1]
    assert [count for count, _ in others] == [-1, -1]
    assert all("rank 0 could not read the checkpoint" in said for _, said in others)


def rows(*states: States) -> States:
    """The states of several ranks, as `gather` returns them."""
    return {name: torch.stack([each[name] for each in states]) for name in states[0]}


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_random_states_are_taken_up_again(draws: int) -> None:
    seed_generators(3)
    for _ in range(draws):
        numbers_drawn()
    states, before = state.random_states(CPU), generator_states()
    expected = [numbers_drawn() for _ in range(5)]
    seed_generators(4)
    numbers_drawn()
    assert [numbers_drawn() for _ in range(5)] != expected
    state.restore_random_states(rows(states, states), 1, 2, CPU)
    assert torch.equal(generator_states(), before)
    assert [numbers_drawn() for _ in range(5)] == expected


def test_random_states_have_one_length() -> None:
    """So that they can be gathered as tensors."""
    lengths = set()
    for draws in range(4):
        seed_generators(draws)
        for _ in range(draws):
            numbers_drawn()
        lengths.add(tuple(len(each) for each in state.random_states(CPU).values()))
    assert len(lengths) == 1


def test_the_states_of_another_number_of_ranks_are_left_alone() -> None:
    states = rows(*[state.random_states(CPU)] * 2)
    numbers_drawn()
    before = generator_states()
    for given in (None, states):
        state.restore_random_states(given, 0, 3, CPU)
    assert torch.equal(generator_states(), before)


@pytest.mark.gpu
def test_the_random_state_of_a_gpu_is_taken_up_again() -> None:
    device = torch.device("cuda", 0)
    states = rows(state.random_states(device))
    expected = torch.rand(3, device=device).tolist()
    state.restore_random_states(states, 0, 1, device)
    assert torch.rand(3, device=device).tolist() == expected
    state.restore_random_states(states, 0, 1, CPU)
    expected = torch.rand(3, device=device).tolist()
    state.restore_random_states(states, 0, 1, device)
    torch.rand(3, device=device)
    with generators_kept(device):
        seed_generators(0)
        torch.rand(9, device=device)
    assert torch.rand(3, device=device).tolist() != expected


def test_the_generator_of_a_gpu_is_passed_over_on_a_cpu() -> None:
    seed_generators(1)
    states = rows({**state.random_states(CPU), "cuda": torch.ones(16, dtype=torch.uint8)})
    expected = numbers_drawn()
    state.restore_random_states(states, 0, 1, CPU)
    assert numbers_drawn() == expected


def test_damaged_states_are_refused() -> None:
    before = generator_states()
    whole = rows(state.random_states(CPU))
    lacking = {name: each for name, each in whole.items() if name != "python"}
    short = {**whole, "torch": whole["torch"][:, :100]}
    for states in (lacking, short):
        with pytest.raises(CheckpointError, match="cannot be restored"):
            state.restore_random_states(states, 0, 1, CPU)
    assert torch.equal(generator_states(), before)


def _gather(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    seed_generators(rank)
    numbers_drawn()
    states = state.gather_random_states(CPU)
    return (
        None if states is None else _lists(states),
        _lists(state.random_states(CPU)),
        numbers_drawn(),
    )


def _lists(states: States) -> dict[str, Any]:
    return {name: each.tolist() for name, each in states.items()}


def test_rank_0_has_the_random_states_of_all_ranks() -> None:
    results = run_ranks(3, _gather)
    gathered = results[0][0]
    assert [result[0] for result in results[1:]] == [None, None]
    own = [result[1] for result in results]
    assert gathered == {name: [each[name] for each in own] for name in own[0]}
    for rank, (_, _, expected) in enumerate(results):
        kinds = {"torch": torch.uint8, "python": torch.float64, "numpy": torch.float64}
        states = {name: torch.tensor(gathered[name], dtype=kind) for name, kind in kinds.items()}
        state.restore_random_states(states, rank, 3, CPU)
        assert numbers_drawn() == expected
