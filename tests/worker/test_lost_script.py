"""A task that has failed looks whether the batch script of its job still lives."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterddp import files, polling
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.client import Ending
from clusterddp.worker import lost_script
from tests.event_lines import read_events
from tests.request.test_spec import spec

PEER_LOST = {"type": "RuntimeError", "message": "closed by peer", "peer_lost": True}
RAISED = {"type": "ValueError", "message": "boom"}


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Attempt of a job whose script is on h01; this task is on h02 and lost its peer."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h[01-02]", "SLURMD_NODENAME": "h02"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    run = RunDir(tmp_path / "run")
    made = Attempt(run, 1)
    made.outcomes.mkdir(parents=True)
    made.controller.touch()
    files.write_atomically(run.spec, spec(requeue=True).to_json().encode())
    outcome(made, 1, "h02", PEER_LOST)
    return made


def outcome(attempt: Attempt, rank: int, host: str, error: dict[str, Any] | None) -> None:
    record = {
        "rank": rank, "local_rank": 0, "node_rank": rank, "host": host, "pid": 100, "job_id": "7",
        "restart": 0, "step_id": "0", "started": 1.0, "ended": 2.0, "exit_code": 1, "error": error,
    }  # fmt: skip
    files.write_record(attempt.outcomes / f"rank-{rank}.json", record)


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that were put back."""
    jobs: list[str] = []
    monkeypatch.setattr(lost_script, "LIVENESS_TIMEOUT", 0.05)
    monkeypatch.setattr(polling, "RECORDS_POLL_SECONDS", 0.01)
    monkeypatch.setattr(lost_script.slurm, "ending", lambda *_: Ending.NONE)
    monkeypatch.setattr(lost_script.slurm, "requeue", jobs.append)
    return jobs


def requeue_if_lost(attempt: Attempt) -> None:
    lost_script.requeue_if_lost(attempt, DistEnv.from_environ({}))


def test_a_job_whose_controller_shows_no_life_is_put_back(
    attempt: Attempt, requeued: list[str]
) -> None:
    requeue_if_lost(attempt)
    assert requeued == ["7"]
    [event] = read_events(attempt.run)
    assert (event["event"], event["why"]) == ("requeued", "the batch script is lost with h01")


def test_whoever_has_put_it_back_first_was_enough(
    attempt: Attempt, requeued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_script.slurm, "ending", lambda *_: Ending.REQUEUED)
    requeue_if_lost(attempt)
    assert requeued == []


def test_a_controller_that_shows_its_life_judges_the_attempt(
    attempt: Attempt, requeued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_script, "LIVENESS_TIMEOUT", 60.0)

    def sleep(_: float) -> None:
        later = time.time() + 5
        os.utime(attempt.controller, (later, later))

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(polling, "time", clock)
    requeue_if_lost(attempt)
    assert requeued == []


@pytest.mark.parametrize(("host", "jobs"), [("h01", []), ("h03", ["7"])])
def test_rank_0_that_failed_on_the_scripts_host_shows_that_it_lives(
    host: str, jobs: list[str], attempt: Attempt, requeued: list[str]
) -> None:
    outcome(attempt, 0, host, RAISED)
    requeue_if_lost(attempt)
    assert requeued == jobs


@pytest.mark.parametrize("how", ["no requeue", "on the script's host", "without a controller"])
def test_otherwise_it_stays(
    how: str, attempt: Attempt, requeued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "no requeue":
        files.write_atomically(attempt.run.spec, spec(requeue=False).to_json().encode())
    elif how == "on the script's host":
        monkeypatch.setenv("SLURMD_NODENAME", "h01")
    else:
        attempt.controller.unlink()
    requeue_if_lost(attempt)
    assert requeued == []
