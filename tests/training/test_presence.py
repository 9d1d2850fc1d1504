"""Rank 0's sign of life, and what it hears beside the training."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.records import SignOfLife
from clusterddp.run.run_dir import RunDir
from clusterddp.training import presence
from clusterddp.training.presence import Presence, poll_time_limit
from clusterddp.training.stop import Deadline, StopRequest
from tests.waiting import PATIENCE, wait_for


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "ALIVE_SECONDS", 0.01)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The reasons for which a process would have ended."""
    reasons: list[str] = []
    monkeypatch.setattr(Presence, "_end", lambda _, why: reasons.append(why))
    yield reasons
    await_thread()  # a thread that is late would end the tests' process


def await_thread() -> None:
    wait_for(lambda: "presence" not in {t.name for t in threading.enumerate()}, "its thread's end")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return begin(RunDir(tmp_path))


@pytest.mark.usefixtures("quickly")
def test_its_sign_of_life_is_renewed_with_the_step(attempt: Attempt) -> None:
    steps = iter(range(1000))
    ours = Presence(attempt, StopRequest())
    ours.sign = lambda: SignOfLife(next(steps))
    with ours:
        wait_for(lambda: attempt.alive.exists() and _step(attempt) >= 3, "a third sign of life")
        assert attempt.is_alive()
    await_thread()
    assert sorted(path.name for path in attempt.path.iterdir()) == ["alive", "outcomes"]


@pytest.mark.parametrize(
    ("content", "reason"), [('{"reason": "stop"}', "stop"), ("", "signal"), ("{torn", "signal")]
)
@pytest.mark.usefixtures("quickly")
def test_a_request_in_the_attempts_folder_is_noted(
    attempt: Attempt, content: str, reason: str
) -> None:
    request = StopRequest()
    with Presence(attempt, request):
        assert request.reason == ""
        fresh = attempt.path / "fresh"
        fresh.write_text(content)
        fresh.replace(attempt.stop)  # in one step: a file that is still empty is a request, too
        wait_for(lambda: request.reason, "the request")
    assert request.reason == reason


@pytest.mark.usefixtures("quickly")
def test_an_attempt_that_a_later_one_follows_ends(attempt: Attempt, ends: list[str]) -> None:
    with Presence(attempt, StopRequest()):
        wait_for(attempt.alive.exists, "a sign of life")
        assert not ends
        begin(attempt.run)
        wait_for(lambda: ends, "the end")
    assert ends[0] == "superseded: attempt 2 of the run has begun, and trains on"


@pytest.mark.usefixtures("quickly")
def test_a_disk_that_takes_no_sign_of_life_is_said_once_and_hides_no_request(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, logged: list[str], ends: list[str]
) -> None:
    tries = []

    def full(self: Attempt, step: int, *_: object) -> None:
        tries.append(step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Attempt, "show_life", full)
    request = StopRequest()
    with Presence(attempt, request):
        wait_for(lambda: len(tries) > 2, "more than one try")
        attempt.stop.touch()
        wait_for(lambda: request.reason, "the request")
        begin(attempt.run)
        wait_for(lambda: ends, "the end")
    [line] = [line for line in logged if "No space left on device" in line]
    assert line.endswith("[CD0518]")


@pytest.mark.usefixtures("quickly")
def test_an_attempt_whose_folder_was_removed_ends(attempt: Attempt, ends: list[str]) -> None:
    with Presence(attempt, StopRequest()):
        wait_for(attempt.alive.exists, "a sign of life")
        while attempt.path.exists():
            shutil.rmtree(attempt.path, ignore_errors=True)
        wait_for(lambda: ends, "the end")
    assert ends[0] == f"{attempt.path} was removed: nothing can be saved any more"


@pytest.mark.usefixtures("quickly")
def test_a_look_that_outlasts_the_training_does_not_end_the_process(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that was slow meanwhile; what the process does now is not the attempt's."""
    looks, answers, codes = threading.Event(), threading.Event(), list[int]()

    def slow(*_: object) -> None:
        looks.set()
        answers.wait(PATIENCE)

    monkeypatch.setattr(Attempt, "show_life", slow)
    monkeypatch.setattr(os, "_exit", codes.append)
    ours = Presence(attempt, StopRequest())
    with ours:
        assert looks.wait(PATIENCE)
        begin(attempt.run)
    answers.set()
    ours._thread.join(PATIENCE)
    assert not ours._thread.is_alive()
    assert not codes


def test_nobody_asks_slurm_on_behalf_of_a_training_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()

    def seconds_left(job: str) -> float:
        asked.append(job)
        return 60.0

    monkeypatch.setattr(presence, "_TIME_LIMIT_SECONDS", 0.01)
    monkeypatch.setattr(presence.slurm, "seconds_left", seconds_left)
    deadline, others = Deadline(), {*threading.enumerate()}
    poll_time_limit(deadline, {"SLURM_JOB_ID": "17"})
    wait_for(lambda: len(asked) > 2, "a third look")
    assert deadline.is_near(60.0)
    [thread] = [each for each in {*threading.enumerate()} - others if each.name == "time limit"]
    del deadline
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_limit_that_was_moved_is_seen_before_the_training_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = [60.0]
    asked = list[float]()

    def seconds_left(job: str) -> float:
        asked.append(limit[0])
        return limit[0]

    now = [7000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(presence.slurm, "seconds_left", seconds_left)
    deadline = Deadline()
    poll_time_limit(deadline, {"SLURM_JOB_ID": "17"})
    wait_for(lambda: deadline.is_near(60.0), "the first answer")
    assert asked == [60.0]  # what it has just heard is not asked again
    now[0] += 50.0  # suspended, say, or moved by an administrator: the answer is another now
    limit[0] = 600.0
    assert not deadline.is_near(20.0)
    now[0] += 590.0
    limit[0] = 10.0
    assert deadline.is_near(20.0)
    assert asked == [60.0, 600.0, 10.0]


def _step(attempt: Attempt) -> int:
    return int(json.loads(attempt.alive.read_text())["step"])
