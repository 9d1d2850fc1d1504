import math
from types import SimpleNamespace

import pytest

from clusterddp import polling


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have time pass only by pauses; returns the list of them."""
    taken: list[float] = []
    monkeypatch.setattr(polling, "time", SimpleNamespace(monotonic=lambda: sum(taken)))
    monkeypatch.setattr(polling, "pause", taken.append)
    return taken


def test_what_is_so_already_is_not_waited_for(pauses: list[float]) -> None:
    assert polling.wait_until(lambda: "there", 0.0, every=1.0) == "there"
    assert not pauses


def test_the_wait_ends_with_the_first_true_answer(pauses: list[float]) -> None:
    answers = iter(["", "", "there"])
    assert polling.wait_until(lambda: next(answers), every=1.0) == "there"
    assert pauses == [1.0, 1.0]


def test_the_last_look_comes_when_the_time_is_over(pauses: list[float]) -> None:
    assert polling.wait_until(lambda: False, 2.5, every=1.0) is False
    assert list(polling.poll(0.0, every=1.0)) == [True]
    assert pauses == [1.0, 1.0, 0.5]


def test_pauses_grow_up_to_the_longest(pauses: list[float]) -> None:
    polls = polling.poll(math.inf, every=1.0, longest=2.0)
    assert not any(next(polls) for _ in range(5))
    assert pauses == [1.0, 1.5, 2.0, 2.0]


def test_a_long_pause_is_slept_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a signal just before a sleep waits for a second, not for an hour."""
    slept: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(polling, "time", clock)
    polling.pause(3.5)
    assert slept == [1.0, 1.0, 1.0, 0.5]
    polling.pause(0.0)
    assert len(slept) == 4
