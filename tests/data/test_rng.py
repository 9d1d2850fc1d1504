import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clusterddp.checkpoints import state
from clusterddp.data import rng
from clusterddp.data.rng import States
from clusterddp.data.rng import seed as seeded
from clusterddp.errors import CheckpointError
from tests.training.ranks import run_ranks
from tests.training.trainings import generator_states

CPU = torch.device("cpu")


def drawn() -> tuple[Any, ...]:
    """Some numbers of every generator; an odd count of Gaussians leaves half a pair waiting."""
    return (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.standard_normal(),
    )


def rows(*states: States) -> States:
    """The states of several ranks, as `gather` returns them."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def test_a_seed_repeats_every_generator() -> None:
    seeded(2**40)
    expected = drawn()
    drawn()
    seeded(2**40)
    assert drawn() == expected
    seeded(2**40 + 1)
    assert not any(one == other for one, other in zip(drawn(), expected, strict=True))


def test_what_is_kept_is_as_it_was_whatever_happens_meanwhile() -> None:
    seeded(3)
    drawn()
    before = generator_states()
    with pytest.raises(KeyError), rng.kept(CPU):
        seeded(4)
        drawn()
        raise KeyError
    assert torch.equal(generator_states(), before)


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_random_states_are_taken_up_again(draws: int) -> None:
    seeded(3)
    for _ in range(draws):
        drawn()
    state, before = rng.capture(CPU), generator_states()
    expected = [drawn() for _ in range(5)]
    seeded(4)
    drawn()
    assert [drawn() for _ in range(5)] != expected
    rng.restore(rows(state, state), 1, 2, CPU)
    assert torch.equal(generator_states(), before)
    assert [drawn() for _ in range(5)] == expected


def test_random_states_have_one_length() -> None:
    """So that they can be gathered as tensors."""
    lengths = set()
    for draws in range(4):
        seeded(draws)
        for _ in range(draws):
            drawn()
        lengths.add(tuple(len(state) for state in rng.capture(CPU).values()))
    assert len(lengths) == 1


def test_the_states_of_another_number_of_ranks_are_left_alone() -> None:
    states = rows(*[rng.capture(CPU)] * 2)
    drawn()
    before = generator_states()
    for given in (None, states, torch.zeros(2, 9)):
        rng.restore(given, 0, 3, CPU)
    assert torch.equal(generator_states(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_random_state_of_a_gpu_is_taken_up_again() -> None:
    device = torch.device("cuda", 0)
    states = rows(rng.capture(device))
    expected = torch.rand(3, device=device).tolist()
    rng.restore(states, 0, 1, device)
    assert torch.rand(3, device=device).tolist() == expected
    rng.restore(states, 0, 1, CPU)
    expected = torch.rand(3, device=device).tolist()
    rng.restore(states, 0, 1, device)
    torch.rand(3, device=device)
    with rng.kept(device):
        rng.seed(0)
        torch.rand(9, device=device)
    assert torch.rand(3, device=device).tolist() != expected


def test_the_generator_of_a_gpu_is_passed_over_on_a_cpu() -> None:
    seeded(1)
    states = rows({**rng.capture(CPU), "cuda": torch.ones(16, dtype=torch.uint8)})
    expected = drawn()
    rng.restore(states, 0, 1, CPU)
    assert drawn() == expected


# Drawn by clusterddp 0.1.0 after it had restored the states of each rank from its checkpoint.
DRAWN_BY_0_1_0 = (
    (
        [0.6650960445404053, 0.8751140236854553, 0.339042067527771], 0.8444218515250481,
        0.05219198828260849, [0.5488135039273248, 0.7151893663724195, 0.6027633760716439],
        -2.268328201180374,
    ),
    (
        [0.089313805103302, 0.45620179176330566, 0.7100127339363098], 0.13436424411240122,
        0.9762429492718849, [0.417022004702574, 0.7203244934421581, 0.00011437481734488664],
        -0.8021728386486427,
    ),
)  # fmt: skip


@pytest.fixture
def older() -> Tensor:
    """The packed states in a checkpoint that two ranks of clusterddp 0.1.0 wrote."""
    [path] = Path(__file__).parents[1].glob("golden/checkpoint-0.1.0/*.pt")
    states = state.load(path)["random_states"]
    assert isinstance(states, Tensor)
    return states


@pytest.mark.parametrize("rank", [0, 1])
def test_the_states_of_an_older_checkpoint_are_taken_up(older: Tensor, rank: int) -> None:
    rng.restore(older, rank, 2, CPU)
    assert drawn() == DRAWN_BY_0_1_0[rank]


@pytest.mark.parametrize("cut", [0, 3, 100, 6000, 10_000])
def test_damaged_states_are_refused(older: Tensor, cut: int) -> None:
    before = generator_states()
    lacking = rows(rng.capture(CPU))
    del lacking["python"]
    for states, world in ((older[:, :cut], 2), (lacking, 1)):
        with pytest.raises(CheckpointError, match="cannot be restored"):
            rng.restore(states, 0, world, CPU)
    assert torch.equal(generator_states(), before)
    with pytest.raises(CheckpointError, match="layout"):
        rng.restore(torch.ones(1, 20_000, dtype=torch.uint8), 0, 1, CPU)


def _gather(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    seeded(rank)
    drawn()
    states = rng.gather(CPU)
    return None if states is None else _lists(states), _lists(rng.capture(CPU)), drawn()


def _lists(states: States) -> dict[str, Any]:
    return {name: state.tolist() for name, state in states.items()}


def test_rank_0_has_the_random_states_of_all_ranks() -> None:
    results = run_ranks(3, _gather)
    gathered = results[0][0]
    assert [result[0] for result in results[1:]] == [None, None]
    own = [result[1] for result in results]
    assert gathered == {name: [state[name] for state in own] for name in own[0]}
    for rank, (_, _, expected) in enumerate(results):
        kinds = {"torch": torch.uint8, "python": torch.float64, "numpy": torch.float64}
        states = {name: torch.tensor(gathered[name], dtype=kind) for name, kind in kinds.items()}
        rng.restore(states, rank, 3, CPU)
        assert drawn() == expected
