"""Random generators, saved and given back; DDP's buckets are tested with the loop."""

import io
import pickle
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from clusterddp.checkpoints.state import to_bytes
from clusterddp.data.loader import seed_generators
from clusterddp.distributed import agreement
from clusterddp.errors import CheckpointError
from clusterddp.training import replay
from tests.training.ranks import run_ranks
from tests.training.trainings import generator_states, numbers_drawn


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_random_states_are_taken_up_again(draws: int) -> None:
    seed_generators(3)
    for _ in range(draws):
        numbers_drawn()
    state, before = replay.random_state(()), generator_states()
    expected = [numbers_drawn() for _ in range(5)]
    seed_generators(4)
    numbers_drawn()
    assert [numbers_drawn() for _ in range(5)] != expected
    replay.restore(state, ())
    assert torch.equal(generator_states(), before)
    assert [numbers_drawn() for _ in range(5)] == expected


@pytest.mark.gpu
def test_the_random_state_of_a_gpu_is_taken_up_again() -> None:
    device = torch.device("cuda", 0)
    torch.rand(3, device=device)
    state = replay.random_state(())
    expected = torch.rand(3, device=device).tolist()
    replay.restore(state, ())
    assert torch.rand(3, device=device).tolist() == expected
    seed_generators(0)
    assert torch.rand(3, device=device).tolist() != expected


def test_the_generator_of_a_gpu_is_passed_over_on_a_cpu() -> None:
    seed_generators(1)
    state = {**replay.random_state(()), "cuda": torch.ones(16, dtype=torch.uint8)}
    expected = numbers_drawn()
    replay.restore(state, ())
    assert numbers_drawn() == expected


@pytest.mark.parametrize("lacks", ["torch", "python"])
def test_damaged_states_are_refused(lacks: str) -> None:
    before = generator_states()
    state = replay.random_state(())
    del state[lacks]
    with pytest.raises(CheckpointError, match="cannot be restored"):
        replay.restore(state, ())
    assert torch.equal(generator_states(), before)


def _states(draws: int, *, seeded: bool = True) -> dict[str, Any]:
    """A rank's states after this many draws since the start of its epoch, as a GPU's rank has."""
    seed_generators(20_261_127)
    if not seeded:
        random.seed()
        np.random.seed(None)
        torch.seed()

    def taken() -> dict[str, Any]:
        bits = torch.tensor([7] * 8 + [draws % 256] * 8, dtype=torch.uint8)
        return {**replay.random_state([torch.Generator().manual_seed(draws)]), "cuda": bits}

    start = taken()
    for _ in range(draws):
        numbers_drawn()
    return {"now": taken(), "start": start, "ahead": [None, taken()], "live": False}


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and [*one] == [*other]
            and _is_same([*one.values()], [*other.values()])
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and one == other


def _in_a_checkpoint(states: list[Any]) -> Any:
    joined = replay.join([replay.pack(each) for each in states])
    return torch.load(io.BytesIO(to_bytes(joined)), weights_only=True)


def test_packed_states_are_the_same_to_the_bit() -> None:
    place = {"loader": {"own": [1, torch.ones(2)], 3: "x"}}
    states = [
        None, place, {**_states(0), **place}, *map(_states, (1, 2, 700, 5000)),
        _states(3, seeded=False), {**_states(1), "drawn": replay.random_state(())},
    ]  # fmt: skip
    without = _states(1)
    for each in ("now", "start"):
        del without[each]["numpy"], without[each]["cuda"]
    states.append(without)
    joined = _in_a_checkpoint(states)
    for rank, expected in enumerate(states):
        assert _is_same(replay.unpack(joined, rank), expected), rank


def test_packed_states_do_not_depend_on_the_default_dtype() -> None:
    states = _states(1)
    joined = _in_a_checkpoint([states])
    before = torch.get_default_dtype()
    replay._seeded_once.cache_clear()  # as after a restart
    torch.set_default_dtype(torch.float64)
    try:
        assert _is_same(replay.unpack(joined, 0), states)
    finally:
        torch.set_default_dtype(before)
        replay._seeded_once.cache_clear()


@pytest.mark.parametrize("draws", [1, 700])
@pytest.mark.parametrize("saves", [True, False])
def test_packed_states_may_come_from_a_process_without_numpy(
    monkeypatch: pytest.MonkeyPatch, saves: bool, draws: int
) -> None:
    """Or go to one. saves: whether the process that saves has numpy."""

    def has_numpy(wanted: bool) -> None:
        monkeypatch.setitem(sys.modules, "numpy", np if wanted else None)
        replay._seeded_once.cache_clear()  # as in a new process

    has_numpy(saves)
    states = _states(draws)
    joined = _in_a_checkpoint([states])
    assert ("numpy" in states["now"]) == saves
    has_numpy(not saves)
    found = replay.unpack(joined, 0)
    assert found and _is_same(found, states)
    numbers_drawn()
    replay.restore(found["now"], ())
    assert random.getstate()[1] == tuple(states["now"]["python"][1])


@pytest.mark.parametrize("draws", [0, 1])
def test_states_that_follow_from_the_seed_take_little_at_rank_0(draws: int) -> None:
    states = _states(draws) | {"ahead": []}
    for each in ("now", "start"):
        states[each]["generators"] = []
    rest, bits = replay.pack(states)
    assert len(rest) + len(bits) < 200 < len(pickle.dumps(states)) / 100


def test_what_ranks_have_alike_is_in_a_checkpoint_once() -> None:
    joined = _in_a_checkpoint([_states(1)] * 50)
    assert len(joined["states"]) == 1 and len(joined["sizes"]) == 50
    assert _is_same(replay.unpack(joined, 49), _states(1))
    assert sum(isinstance(each, torch.Tensor) for each in joined.values()) == 1


@pytest.mark.parametrize("name", ["states", "numbers", "sizes", "bits"])
def test_damaged_packed_states_are_refused(name: str) -> None:
    joined = _in_a_checkpoint([_states(1)])
    damaged = {"states": [{"now": 1}], "numbers": [4], "sizes": [9], "bits": torch.zeros(90)}
    for wrong in (None, damaged[name]):
        with pytest.raises(CheckpointError, match="random states of the checkpoint cannot be read"):
            replay.unpack({**joined, name: wrong}, 0)


def _gather(rank: int, world_size: int) -> tuple[Any, Any]:
    """Seeds of its own, the states of all ranks as far as they are here, and what comes next."""
    seed_generators(rank)
    numbers_drawn()
    own = {"now": replay.random_state(())}
    return agreement.gather(replay.pack(own), on_first=True), numbers_drawn()


def test_rank_0_has_the_random_states_of_all_ranks() -> None:
    (gathered, _), *others = results = run_ranks(3, _gather)
    assert [packed for packed, _ in others] == [[], []]
    joined = replay.join(gathered)
    for rank, (_, expected) in enumerate(results):
        states = replay.unpack(joined, rank)
        assert states
        replay.restore(states["now"], ())
        assert numbers_drawn() == expected
