"""A step whose srun waits for a lost exit message; the message is lost for real in the campaign."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterddp import log, patience
from clusterddp.batch import step_watch
from clusterddp.run.attempt import Attempt
from clusterddp.run.events import StepEnded
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir
from tests.waiting import PATIENCE

ENDED = {"ended": 2.0, "exit_code": 0}


class Step:
    """An attempt of two ranks, an srun that ends with its stdin, and a scancel."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt = Attempt(RunDir(folder / "a run's"), 1)
        self.attempt.outcomes.mkdir(parents=True)
        self.calls = folder / "calls"
        self.said: list[str] = []
        self.bin = folder / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        monkeypatch.setattr(patience, "STEP_LAST_WORD", 0.4)
        monkeypatch.setattr(patience, "STEP_CANCELLED", 0.2)
        monkeypatch.setattr(patience, "STEP_PAUSE", 0.02)
        monkeypatch.setattr(patience, "RECORDS_PAUSE", 0.02)
        self.scancel("exit 0")
        (self.bin / "srun").symlink_to("/bin/sh")
        argv = [self.bin / "srun", "-c", "read line; exit 0"]
        self.srun = subprocess.Popen(argv, stdin=subprocess.PIPE)

    def scancel(self, then: str) -> None:
        path = self.bin / "scancel"
        path.write_text(f'#!/bin/sh\necho "$*" >>{self.calls}\n{then}\n')
        path.chmod(0o755)

    def record(self, rank: int, **fields: object) -> None:
        content = {
            "rank": rank, "local_rank": 0, "node_rank": rank, "host": "h01", "pid": 1,
            "job_id": "17", "restart": 0, "step_id": "3", "started": 1.0, **fields,
        }  # fmt: skip
        (self.attempt.outcomes / f"rank-{rank}.json").write_text(json.dumps(content))

    def end(self, **fields: object) -> None:
        """Record that both ranks have ended."""
        for rank in (0, 1):
            self.record(rank, **fields, **ENDED)

    def watch(self) -> None:
        with log.to(self.said.append):
            step_watch.watch(self.attempt, "17", 2, self.at_work, 0.2)

    def at_work(self) -> int | None:
        return self.srun.pid if self.srun.poll() is None else None

    @property
    def cancelled(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    @property
    def noted(self) -> list[StepEnded]:
        """What the verdict on the attempt finds of it."""
        return History.read(self.attempt.run).every(StepEnded, self.attempt.number)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    made = Step(tmp_path, monkeypatch)
    yield made
    made.srun.kill()
    made.srun.communicate()


def test_once_every_end_is_recorded_the_step_is_cancelled_and_no_other(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "STEP_CANCELLED", PATIENCE)
    step.scancel(f"kill -9 {step.srun.pid}")
    step.end()
    step.watch()
    assert step.cancelled == ["17.3"]
    assert [event.step_id for event in step.noted] == ["3"]
    assert "every task's end is recorded" in step.said[0]
    assert len(step.said) == 1


@pytest.mark.parametrize("scancel", ["exit 0", "echo Invalid job id specified >&2; exit 1"])
def test_an_srun_that_a_cancelled_step_does_not_end_is_killed_never_terminated(
    step: Step, scancel: str
) -> None:
    step.scancel(scancel)
    step.end()
    step.watch()
    assert step.srun.wait(PATIENCE) == -signal.SIGKILL


def test_without_a_step_to_name_the_job_is_not_cancelled_in_its_place(step: Step) -> None:
    step.end(step_id="")
    step.watch()
    assert step.cancelled == []
    assert step.srun.wait(PATIENCE) == -signal.SIGKILL


def test_an_srun_that_ends_by_itself_is_left_alone(step: Step) -> None:
    step.end()
    step.srun.communicate(b"\n")
    step.watch()
    assert (step.cancelled, step.said) == ([], [])
    assert not step.noted


AT_WORK: dict[str, Callable[[Step], None]] = {
    "one has ended hours ago": lambda step: step.record(1),
    "one has not begun": lambda _: None,
    "there are more than were asked for": lambda step: (step.record(1, **ENDED), step.record(2))[0],
    "one that had ended is started anew by its agent": lambda step: step.record(1, **ENDED),
}


@pytest.mark.parametrize("why", AT_WORK)
def test_a_rank_that_is_at_work_is_waited_for(
    step: Step, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it takes: many times each grace, then its end."""
    step.record(0, **ENDED)
    AT_WORK[why](step)
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1 and "anew" in why:
            step.record(1)
        if looks == 50:
            assert step.cancelled == []
            for rank in (1, 2):
                step.record(rank, **ENDED)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: looks * 0.02)
    monkeypatch.setattr(step_watch, "time", clock)
    monkeypatch.setattr(patience, "time", clock)
    step.watch()
    assert looks > 50
    assert step.cancelled == ["17.3"]


def test_with_rank_0s_last_word_alone_the_step_is_ended_after_a_longer_grace(step: Step) -> None:
    step.record(0, **ENDED)
    step.record(1)
    step.attempt.end.write_text('{"cause": "done"}')
    step.watch()
    assert step.cancelled == ["17.3"]
    assert "without a sign of life for 0.4 s" in step.said[0]


def test_a_sign_of_life_is_waited_for(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    step.record(0)
    step.attempt.end.write_text('{"cause": "done"}')
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks <= 50:
            assert step.cancelled == []
            step.attempt.show_life(looks)

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: looks * 0.02)
    monkeypatch.setattr(step_watch, "time", clock)
    monkeypatch.setattr(patience, "time", clock)
    step.watch()
    assert looks > 50 + 20  # the longer grace
    assert step.cancelled == ["17.3"]
