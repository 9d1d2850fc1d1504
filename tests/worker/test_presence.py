import json
import shutil
import threading
from pathlib import Path

import pytest

from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.run_dir import RunDir
from clusterddp.training.stop import StopRequest
from clusterddp.worker import presence
from clusterddp.worker.presence import Presence
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "ALIVE_SECONDS", 0.01)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return begin(RunDir(tmp_path))


def test_its_sign_of_life_is_renewed_with_the_step(attempt: Attempt) -> None:
    steps = iter(range(1000))
    ours = Presence(attempt, StopRequest())
    ours.step = lambda: next(steps)
    with ours:
        wait_for(lambda: attempt.alive.exists() and _step(attempt) >= 3, "a third sign of life")
        assert attempt.is_alive()
    wait_for(lambda: "presence" not in {t.name for t in threading.enumerate()}, "its thread's end")
    assert sorted(path.name for path in attempt.path.iterdir()) == ["alive", "outcomes"]


@pytest.mark.parametrize(
    ("content", "reason"), [('{"reason": "stop"}', "stop"), ("", "signal"), ("{torn", "signal")]
)
def test_a_request_in_the_attempts_folder_is_noted(
    attempt: Attempt, content: str, reason: str
) -> None:
    request = StopRequest()
    with Presence(attempt, request):
        assert request.reason == ""
        attempt.stop.write_text(content)
        wait_for(lambda: request.reason, "the request")
    assert request.reason == reason


def test_an_attempt_that_a_later_one_follows_is_told(attempt: Attempt) -> None:
    told = threading.Event()
    with Presence(attempt, StopRequest(), superseded=told.set):
        wait_for(attempt.alive.exists, "a sign of life")
        assert not told.is_set()
        begin(attempt.run)
        assert told.wait(90)


def test_a_disk_that_takes_no_sign_of_life_is_said_once_and_hides_no_request(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    tries = []

    def full(self: Attempt, step: int, saved: int | None) -> None:
        tries.append(step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Attempt, "show_life", full)
    request, told = StopRequest(), threading.Event()
    with Presence(attempt, request, superseded=told.set):
        wait_for(lambda: len(tries) > 2, "more than one try")
        attempt.stop.touch()
        wait_for(lambda: request.reason, "the request")
        begin(attempt.run)
        assert told.wait(90)
    assert sum("No space left on device" in line for line in logged) == 1


def test_an_attempt_whose_folder_was_removed_ends(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Presence, "_end", lambda _, why: said.append(why))
    with Presence(attempt, StopRequest()):
        wait_for(attempt.alive.exists, "a sign of life")
        while attempt.path.exists():
            shutil.rmtree(attempt.path, ignore_errors=True)
        wait_for(lambda: said, "the end")
    assert said[0] == f"{attempt.path} was removed: nothing can be saved any more"


def _step(attempt: Attempt) -> int:
    return int(json.loads(attempt.alive.read_text())["step"])
