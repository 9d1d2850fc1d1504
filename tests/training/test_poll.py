import itertools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterddp.training.poll import POLL_SECONDS, Poll
from tests.training.ranks import run_ranks


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 500.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def train(poll: Poll, clock: Any, steps: int, step_seconds: float, first: int = 0) -> list[int]:
    """The steps at which the ranks ask each other, as the loop has them do."""
    asked = []
    for step in range(first, first + steps + 1):
        if step == first or poll.due(step):
            poll.ask(step, [0])
            asked.append(step)
        clock.now += step_seconds
    return asked


@pytest.mark.parametrize("step_seconds", [0.001, 0.02, 0.3, 4.0])
def test_ranks_ask_about_twice_a_second_and_at_most_at_every_step(
    step_seconds: float, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: (sums.append(1), all_reduce(*a, **k)))
    steps = max(int(60 / step_seconds), 30)
    asked = train(Poll(torch.device("cpu")), Clock(monkeypatch), steps, step_seconds)
    between = max(int(POLL_SECONDS / step_seconds), 1)
    careful = 12  # at first, when nobody knows yet how long a step takes
    assert len(sums) == len(asked) <= steps / between * 1.05 + careful
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert max(gaps[1:]) * step_seconds <= max(POLL_SECONDS, step_seconds) * 1.01


def test_nobody_asks_for_more_than_a_thousand_steps(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = train(Poll(torch.device("cpu")), Clock(monkeypatch), 20_000, 1e-6)
    assert max(b - a for a, b in itertools.pairwise(asked)) == 1000


def test_a_step_that_becomes_slow_is_known_at_the_next_look(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, poll = Clock(monkeypatch), Poll(torch.device("cpu"))
    train(poll, clock, 1000, 0.01)
    asked = train(poll, clock, 200, 5.0, first=1001)
    assert poll.step_seconds == pytest.approx(5.0)
    assert asked[-20:] == list(range(asked[-20], asked[-20] + 20))


def at_unequal_speeds(rank: int, world_size: int) -> tuple[list[int], list[list[int]]]:
    import time

    now = [1000.0 * rank]  # clocks that have nothing in common
    time.monotonic = lambda: now[0]  # type: ignore[assignment]
    poll = Poll(torch.device("cpu"))
    asked, answers = [], []
    for step in range(400):
        if poll.due(step):
            asked.append(step)
            answers.append(poll.ask(step, [rank if step > 200 else 0, int(rank == 1)]))
        now[0] += [0.01, 0.05, 0.002][rank]
    return asked, answers


def test_all_ranks_look_at_the_same_steps_and_see_the_same() -> None:
    first, *others = run_ranks(3, at_unequal_speeds)
    assert all(other == first for other in others)
    asked, answers = first
    assert len(asked) < 60
    assert json.loads(json.dumps(answers)) == [[2 if step > 200 else 0, 1] for step in asked]


def test_what_was_measured_leaves_out_the_wait_for_others(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, poll = Clock(monkeypatch), Poll(torch.device("cpu"))
    all_reduce = dist.all_reduce

    def slow(*arguments: Any, **options: Any) -> None:
        all_reduce(*arguments, **options)
        clock.now += 30.0

    monkeypatch.setattr(dist, "all_reduce", slow)
    train(poll, clock, 20, 0.1)
    assert poll.step_seconds == pytest.approx(0.1)
