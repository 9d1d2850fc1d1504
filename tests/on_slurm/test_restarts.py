"""Failures that restart a run by themselves, and those that end it, on a real Slurm."""

import signal
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcome
from clusterddp.run.run_dir import RunDir, newest_checkpoint
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.held import LONG, Hold
from tests.on_slurm.test_life import TRAINING, typed, wait_held, weights
from tests.on_slurm.test_submit import submit
from tests.training.trainings import weights_in_one_piece
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several starts of a job

# Raises at the step that its attempt is given: in the middle, after a checkpoint.
RAISING = """
import pathlib, sys, torch
from clusterddp.loop import Loop

model = torch.nn.Linear(1, 1)
loop = Loop(model=model, save_every="10steps")
bad = [int(step) for step in sys.argv[1:]]
attempt = len(list(pathlib.Path().glob("began-*"))) + 1
pathlib.Path(f"began-{attempt}").touch()
for step in loop.iterations(100):
    if loop.steps == bad[min(attempt, len(bad)) - 1]:
        raise ValueError(f"row {attempt} of the data is broken")
    loop.step()
"""


# Hangs long after a snapshot, and before the first checkpoint.
HANGING = """
import os, pathlib, time, torch
from clusterddp.loop import Loop

pathlib.Path("kill-wait").write_text(os.environ.get("CLUSTERDDP_KILL_WAIT", ""))
loop = Loop(model=torch.nn.Linear(1, 1), save_every="9000steps", snapshot_every=0.2)
for step in loop.iterations(9000):
    time.sleep(3600 if step == 200 else 0.01)
    loop.step()
"""


def of_kind(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


def test_a_rank_that_dies_of_hardware_restarts_the_run_without_a_retry(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    hold = Hold(tmp_path, 60)
    data = ["--data-dir", str(synthetic_dir)]
    submit(cluster, tmp_path, *TRAINING, *data, "--run-name", "bus", env=hold.env)
    run = RunDir(tmp_path / "jobs/bus")
    wait_held(hold, run.path)
    outcome = read_outcome(Attempt(run, 1).outcomes, 1)
    assert outcome is not None
    cluster.run_on(outcome.host, ["kill", f"-{signal.SIGBUS:d}", str(outcome.pid)])
    hold.release()
    wait_for(lambda: len(of_kind(run, "ended")) == 2, "two ends", LONG)
    first, second = of_kind(run, "ended")
    assert (first["cause"], first["hardware"]) == ("failed", "killed by SIGBUS")
    assert (second["cause"], of_kind(run, "requeued")[0]["why"]) == ("done", "failed")
    assert weights(run.path) == weights_in_one_piece(
        tmp_path / "undisturbed", synthetic_dir, 2, batch_size=32, max_steps=150,
        eval_every="1000epochs",
    )  # fmt: skip


def test_a_hang_within_a_wrapper_ends_with_its_snapshot_saved(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(HANGING)
    ends = ["--on-hang", "end", "--hang-timeout", "15s", "--no-requeue", "--no-snapshot"]
    submit(
        cluster, tmp_path, "--run-name", "hung", "--nodes", "1", "--tasks-per-node", "1", *ends,
        "--", "bash", "-c", "python train.py; exit $?", check=True,
    )  # fmt: skip
    run = RunDir(tmp_path / "jobs/hung")
    [job] = of_kind(run, "submitted")
    cluster.wait_job(job["job_id"], LONG)
    assert (tmp_path / "kill-wait").read_text() == "30"  # as in the fixture's slurm.conf
    log = run.job_log.read_text() + run.rank_log(0).read_text()
    newest = newest_checkpoint(run.checkpoints)
    assert newest and 50 < newest.step <= 200, log
    status = typed(cluster, tmp_path, "status", "hung").stdout
    assert f"step {newest.step}, " in status and "saved from memory" in status
    assert (200 - newest.step == 0) or f"a resume repeats {200 - newest.step} step" in status
    assert "next,memory" in typed(cluster, tmp_path, "checkpoints", "hung").stdout


def raising(cluster: SlurmCluster, folder: Path, name: str, *steps: int) -> RunDir:
    (folder / "train.py").write_text(RAISING)
    submit(
        cluster, folder, "--run-name", name, "--nodes", "1", "--tasks-per-node", "1",
        "--no-snapshot", "--retries", "5", "--", "python", "train.py", *map(str, steps), check=True,
    )  # fmt: skip
    return RunDir(folder / "jobs" / name)


def test_the_same_error_at_the_same_step_ends_the_run_after_two_attempts(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    run = raising(cluster, tmp_path, "same", 25)
    [job] = of_kind(run, "submitted")
    wrap = ["--parsable", "--wrap", "true", "--output", "/dev/null"]
    depends = ["--dependency", f"afternotok:{job['job_id']}"]
    behind = cluster.run(["sbatch", *depends, *wrap], check=True).stdout.strip()
    assert cluster.wait_job(job["job_id"], LONG) == "FAILED", run.job_log.read_text()
    shown = cluster.run(["scontrol", "show", "job", job["job_id"]], check=True).stdout
    assert "JobState=FAILED" in shown and " ExitCode=1:0" in shown
    assert cluster.wait_job(behind, LONG) == "COMPLETED"
    first, last = of_kind(run, "ended")
    assert "why" not in first
    assert last["why"] == (
        "attempts 1 and 2 failed with the same error after step 25, so the program or its data "
        "causes it"
    )
    status = typed(cluster, tmp_path, "status", "same").stdout
    assert "attempts 1 and 2 failed with the same error" in status
    assert "clusterddp logs --rank 0 same" in status  # a resume would fail again


def test_errors_at_different_steps_go_on_and_the_fourth_restart_waits_in_the_queue(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    run = raising(cluster, tmp_path, "other", 25, 35, 45, 55)
    wait_for(lambda: len(of_kind(run, "requeued")) == 4, "four requeues", LONG)
    assert [event.get("wait", 0) for event in of_kind(run, "requeued")] == [0, 0, 0, 30]
    [job] = of_kind(run, "submitted")

    def waits() -> bool:
        shown = cluster.run(["squeue", "-h", "-j", job["job_id"], "-o", "%T %r"]).stdout
        return shown.strip() == "PENDING BeginTime"

    wait_for(waits, "the job in the queue", 20)
    assert "it waits for at least 30s" in run.job_log.read_text()
    stopped = typed(cluster, tmp_path, "stop", "other")
    assert stopped.returncode == 0, stopped.stderr
    assert len(of_kind(run, "started")) == 4
