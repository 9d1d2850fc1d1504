import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clusterddp.data import rng
from clusterddp.data.rng import seed as seeded
from clusterddp.errors import CheckpointError
from tests.training.ranks import run_ranks

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
    before = rng.capture(CPU)
    with pytest.raises(KeyError), rng.kept(CPU):
        seeded(4)
        drawn()
        raise KeyError
    assert torch.equal(rng.capture(CPU), before)


@pytest.mark.parametrize("draws", [0, 1, 2, 700])
def test_random_states_are_taken_up_again(draws: int) -> None:
    seeded(3)
    for _ in range(draws):
        drawn()
    state = rng.capture(CPU)
    assert state.dtype == torch.uint8 and state.dim() == 1
    expected = [drawn() for _ in range(5)]
    seeded(4)
    drawn()
    assert [drawn() for _ in range(5)] != expected
    rng.restore(state, CPU)
    assert torch.equal(rng.capture(CPU), state)
    assert [drawn() for _ in range(5)] == expected


def test_random_states_have_one_length() -> None:
    lengths = set()
    for draws in range(4):
        seeded(draws)
        for _ in range(draws):
            drawn()
        lengths.add(len(rng.capture(CPU)))
    assert len(lengths) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_the_random_state_of_a_gpu_is_taken_up_again() -> None:
    device = torch.device("cuda", 0)
    state = rng.capture(device)
    expected = torch.rand(3, device=device).tolist()
    rng.restore(state, device)
    assert torch.rand(3, device=device).tolist() == expected
    rng.restore(state, CPU)
    expected = torch.rand(3, device=device).tolist()
    rng.restore(state, device)
    torch.rand(3, device=device)
    with rng.kept(device):
        rng.seed(0)
        torch.rand(9, device=device)
    assert torch.rand(3, device=device).tolist() != expected
    rng.restore(state, device)
    with rng.kept(device):
        rng.seed(0)
    assert torch.rand(3, device=device).tolist() == expected


def test_the_generator_of_a_gpu_is_passed_over_on_a_cpu() -> None:
    """A state as a GPU's rank makes it: 16 bytes more, and their number in the header."""
    seeded(1)
    data = bytearray(rng.capture(CPU).tolist())
    data[8:12] = (16).to_bytes(4, sys.byteorder)
    expected = drawn()
    rng.restore(torch.tensor([*data, *range(16)], dtype=torch.uint8), CPU)
    assert drawn() == expected


@pytest.mark.parametrize("cut", [0, 3, 100, 6000, 10_000])
def test_bytes_that_are_no_random_state_are_refused(cut: int) -> None:
    state = rng.capture(CPU)
    before = drawn_after(state)
    with pytest.raises(CheckpointError, match="cannot be taken up again"):
        rng.restore(state[:cut], CPU)
    assert drawn_after(state) == before
    with pytest.raises(CheckpointError, match="layout"):
        rng.restore(torch.ones(20_000, dtype=torch.uint8), CPU)


def drawn_after(state: Tensor) -> tuple[Any, ...]:
    rng.restore(state, CPU)
    return drawn()


def _gather(rank: int, world_size: int) -> tuple[Any, Any, Any]:
    seeded(rank)
    drawn()
    rows = rng.gather(CPU)
    return (
        None if rows is None else [bytes(row.tolist()) for row in rows],
        bytes(rng.capture(CPU).tolist()),
        drawn(),
    )


def test_rank_0_has_the_random_states_of_all_ranks() -> None:
    results = run_ranks(3, _gather)
    rows = results[0][0]
    assert [result[0] for result in results[1:]] == [None, None]
    assert rows == [result[1] for result in results]
    assert len(set(rows)) == 3
    for row, (_, _, expected) in zip(rows, results, strict=True):
        rng.restore(torch.tensor(list(row), dtype=torch.uint8), CPU)
        assert drawn() == expected
