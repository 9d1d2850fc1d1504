import pytest

from clusterddp.training.deadline import Deadline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [7000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_end_is_near_when_stopping_takes_what_is_left(clock: list[float]) -> None:
    deadline = Deadline()
    deadline.set(100.0)
    assert not deadline.is_near(20.0)
    clock[0] += 74.9  # 20 s to stop, and five to spare
    assert not deadline.is_near(20.0)
    clock[0] += 0.2
    assert deadline.is_near(20.0)
    assert not deadline.is_near(10.0)


@pytest.mark.parametrize("seconds_left", [None, 0.0, -3.0])
def test_without_a_limit_it_is_never_near(clock: list[float], seconds_left: float | None) -> None:
    deadline = Deadline()
    deadline.set(seconds_left)
    clock[0] += 1e9
    assert not deadline.is_near(1e6)


def test_a_lead_that_is_too_short_is_logged_once_with_one_that_is_enough(
    logged: list[str],
) -> None:
    deadline = Deadline(signal_lead=30)
    deadline.check_lead(25.5)
    deadline.check_lead(99.0)
    assert len(logged) == 1
    for words in ("30 s ahead", "takes 25.5 s", "B:USR1@61", "30 s late"):
        assert words in logged[0]


@pytest.mark.parametrize(("lead", "needed"), [(30, 25.0), (0, 500.0)])
def test_a_lead_that_is_enough_or_was_not_asked_for_is_not_mentioned(
    lead: int, needed: float, logged: list[str]
) -> None:
    Deadline(lead).check_lead(needed)
    assert logged == []
