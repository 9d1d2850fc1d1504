"""Two ranks over NCCL of which one fails: all end, and the verdict names that one.

`tests/run/test_outcome.py` has the verdicts for recorded ends, `tests/cli/commands/` a step that is
stuck, with gloo in NCCL's place.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import read_tail
from clusterddp.run.attempt import begin
from clusterddp.run.outcome import first_failure, read_outcome, read_outcomes
from clusterddp.run.run_dir import RunDir
from tests.on_gpu.hand_started import END_SECONDS, START_SECONDS, started
from tests.waiting import wait_for

pytestmark = pytest.mark.gpu
TIMEOUT = 20
NCCL_FOLLOWS = 60
"""Seconds after which NCCL's own time-out follows ours."""
# Python imports it at every start, before anything else: on rank 1 a batch in mid-training fails.
FAULT = """
import os, time
from clusterddp.data import loader
batches, fault = loader.Images.batches, os.environ.get("FAULT")
def failing(self, *order):
    for number, batch in enumerate(batches(self, *order)):
        if os.environ.get("RANK") == "1" and number == 10 and fault == "raises":
            raise RuntimeError("boom")
        if os.environ.get("RANK") == "1" and number == 10 and fault == "sleeps":
            time.sleep(3600)
        yield batch
loader.Images.batches = failing
"""


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "RuntimeError: boom"),
        ("sleeps", "hung: fetching the batch of step"),
        ("SIGKILL", "killed by SIGKILL"),
        ("SIGSTOP", "hung: it did not respond"),
    ],
)
def test_every_rank_ends_and_the_one_that_failed_is_named(
    fault: str, reason: str, graph: str, gpu_digits: tuple[str, str], tmp_path: Path,
    record_property: Any,
) -> None:  # fmt: skip
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FAULT)
    run = RunDir(tmp_path / "run")
    attempt = begin(run)
    more = (
        "--epochs=1000000", "--log-every=100", "--own-log", "--attempt=1", "--hang-timeout=4s",
        f"--process-group-timeout={TIMEOUT}s", f"--cuda-graph={graph}",
    )  # fmt: skip
    path = f"{site}:{os.environ.get('PYTHONPATH', '')}"
    with started(gpu_digits, run.path, *more, world_size=2, PYTHONPATH=path, FAULT=fault) as ranks:
        if fault.startswith("SIG"):
            wait_for(lambda: read_tail(attempt.metrics, 1), "the first line of metrics")
            victim = read_outcome(attempt.outcomes, 1)
            assert victim is not None
            os.kill(victim.pid, signal.Signals[fault])
        code = ranks[0].end(START_SECONDS + TIMEOUT + NCCL_FOLLOWS + END_SECONDS)
        said = run.rank_log(0).read_text()
        if fault == "SIGSTOP":  # such a rank is left to srun, or to an agent
            os.kill(victim.pid, signal.SIGKILL)
        assert ranks[1].end(NCCL_FOLLOWS + END_SECONDS) != 0
    record_property("rank 0's code", code)
    # The loss of a connection can have NCCL end a rank at once; its time-out is never first.
    assert code in (1, 134), said
    assert "Watchdog caught collective operation timeout" not in said
    if fault in ("sleeps", "SIGSTOP"):
        assert code == 1, said
        assert attempt.nccl_trace(0).stat().st_size > 0
    outcomes = read_outcomes(attempt.outcomes)
    assert outcomes[0].peer_lost, said
    failure = first_failure(outcomes)
    assert failure is not None
    assert failure.rank == 1
    assert failure.reason.startswith(reason)
