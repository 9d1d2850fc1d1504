"""Random generators, saved and given back; DDP's buckets are tested with the loop."""

from typing import Any

import pytest
import torch

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


def _gather(rank: int, world_size: int) -> tuple[Any, Any]:
    """Seeds of its own, the states of all ranks as far as they are here, and what comes next."""
    seed_generators(rank)
    numbers_drawn()
    states = agreement.gather(replay.random_state(()), on_first=True)
    return [{**each, "torch": each["torch"].tolist()} for each in states], numbers_drawn()


def test_rank_0_has_the_random_states_of_all_ranks() -> None:
    (gathered, _), *others = results = run_ranks(3, _gather)
    assert [states for states, _ in others] == [[], []]
    for state, (_, expected) in zip(gathered, results, strict=True):
        replay.restore({**state, "torch": torch.tensor(state["torch"], dtype=torch.uint8)}, ())
        assert numbers_drawn() == expected
