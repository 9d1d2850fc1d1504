"""Stopping a run and going on with it, on a real Slurm, typed as a user would type it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import read_json
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.held import LONG, Hold
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.on_slurm.versions import SKIPPED_FOR_VERSION
from tests.training.trainings import weights_in_one_piece
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # starts of jobs, and trainings

STEPS = 150
# Where a first job waits for a request, which so comes in the middle and after a checkpoint.
SAVED_AT, HELD_AT = 50, 60
TRAINING = [
    "--nodes", "1", "--tasks-per-node", "2", "--dataset", "synthetic", "--threads", "1",
    "--batch-size", "32", "--warmup-steps", "2", "--epochs", "100", "--max-steps", str(STEPS),
    "--save-every", f"{SAVED_AT}steps", "--log-every", "50", "--eval-every", "1000epochs",
]  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: Any, synthetic_dir: Path) -> str:
    """The weights that the training ends with when nothing happens to it."""
    return weights_in_one_piece(
        tmp_path_factory.mktemp("uninterrupted"), synthetic_dir, 2, batch_size=32,
        max_steps=STEPS, eval_every="1000epochs",
    )  # fmt: skip


def weights(run: Path) -> str:
    report = read_json(run / "report.json")
    assert report is not None
    assert report["steps"] == STEPS
    return str(report["weights_sha256"])


def typed(cluster: SlurmCluster, folder: Path, *argv: str, **kwargs: Any) -> Any:
    return cluster.run([*CLUSTERDDP, *argv], cwd=folder, timeout=200, **kwargs)


def told(cluster: SlurmCluster, folder: Path, name: str) -> dict[str, Any]:
    """What `status --json` says."""
    answer = typed(cluster, folder, "status", name, "--json")
    assert answer.returncode == 0, answer.stderr
    status: dict[str, Any] = json.loads(answer.stdout)
    return status


def train_to(run: Path, step: int) -> None:
    """Wait until the run has saved that step."""
    wait_for((run / f"checkpoints/step-{step:08d}.pt").exists, f"step {step}", LONG)


def wait_held(hold: Hold, run: Path) -> None:
    """Wait until both ranks are held, and the checkpoint before that is there."""
    hold.wait(2)
    train_to(run, SAVED_AT)


def test_a_stopped_run_stays_stopped_until_it_is_resumed(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path, uninterrupted: str
) -> None:
    data = ["--data-dir", str(synthetic_dir)]
    hold = Hold(tmp_path, HELD_AT, until_told=True)
    submit(cluster, tmp_path, *TRAINING, *data, "--run-name", "life", env=hold.env)
    run = tmp_path / "jobs/life"
    wait_held(hold, run)
    twice = typed(cluster, tmp_path, "resume", "life")
    assert twice.returncode == 2
    assert "life is already running" in twice.stderr

    stopped = typed(cluster, tmp_path, "stop", "life", "--wait")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "asked attempt 1 to save a checkpoint and exit" in stopped.stdout
    status = told(cluster, tmp_path, "life")
    assert (status["state"], status["next_command"]) == ("stopped", "clusterddp resume life")
    assert HELD_AT <= status["checkpoint_step"] < STEPS
    assert cluster.run(["squeue", "-h"]).stdout == ""

    refused = typed(cluster, tmp_path, "resume", "life", "--lr", "0.5")
    assert refused.returncode == 2
    assert "--lr 0.001, now 0.5" in refused.stderr

    again = typed(cluster, tmp_path, "resume", "life", "--time", "5", "--wait")
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resumes from step {status['checkpoint_step']}" in again.stdout
    assert "#SBATCH --time=5\n" in (run / "script.sbatch").read_text()
    assert "--time" not in (run / "script-1.sbatch").read_text().partition("set -o")[0]
    assert weights(run) == uninterrupted
    assert told(cluster, tmp_path, "life")["attempt"] == 2


def test_where_requeue_is_refused_the_next_job_goes_on_and_is_followed(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path, uninterrupted: str
) -> None:
    data = ["--data-dir", str(synthetic_dir)]
    hold, next_hold = Hold(tmp_path, HELD_AT, until_told=True), Hold(tmp_path, STEPS - 10)
    submit(cluster, tmp_path, *TRAINING, *data, "--run-name", "next", env=hold.env)
    run = RunDir(tmp_path / "jobs/next")
    [job_id] = [e["job_id"] for e in read_events(run) if e["event"] == "submitted"]
    follows = tmp_path / "follows"
    with follows.open("w") as stderr:
        follower = cluster.popen(
            [*CLUSTERDDP, "logs", "-f", "next"], cwd=tmp_path, stdout=-3, stderr=stderr
        )
    wait_held(hold, run.path)
    wait_for(lambda: "next: running on h0" in follows.read_text(), "the first look", LONG)
    cluster.run(["scontrol", "update", f"JobId={job_id}", "Requeue=0"], check=True)
    cluster.run(["scancel", "--batch", "--signal=USR1", job_id], check=True)
    wait_for(lambda: "attempt 2" in follows.read_text(), "the second attempt, as followed", LONG)
    next_hold.release()
    assert follower.wait(200) == 0, follows.read_text()
    said = follows.read_text()
    assert weights(run.path) == uninterrupted
    status = told(cluster, tmp_path, "next")
    assert (status["state"], status["attempt"], status["restarts"]) == ("done", 2, 1)
    assert status["job_id"] != job_id
    assert status["restart_reasons"] == ["signal"]
    lines = [line.removeprefix("clusterddp: next: ") for line in said.splitlines()]
    assert "requeued: signal" in lines
    assert any(line.startswith("running on h0") and "attempt 2" in line for line in lines)
    assert lines[-1].startswith("done"), said


def test_an_expedited_requeue_is_slurms_own_or_refused_with_the_version(
    slurm_available: None, tmp_path: Path, synthetic_dir: Path, uninterrupted: str
) -> None:
    conf = {"SlurmctldParameters": "enable_expedited_requeue", "SlurmdTimeout": "5"}
    with SlurmCluster(hosts=2, conf=conf) as cluster:
        hold = Hold(tmp_path, HELD_AT)
        done = submit(cluster, tmp_path, *TRAINING, "--data-dir", str(synthetic_dir),
                      "--run-name", "life", "--requeue=expedite", env=hold.env)  # fmt: skip
        if cluster.release < (25, 11):
            assert done.returncode == 2
            release = "{}.{:02}".format(*cluster.release)
            assert (
                f"--requeue=expedite came with Slurm 25.11; this is Slurm {release}" in done.stderr
            )
            assert not (tmp_path / "jobs/life").exists()
            return
        assert done.returncode == 0, done.stderr
        run = RunDir(tmp_path / "jobs/life")
        wait_held(hold, run.path)
        host, job = (told(cluster, tmp_path, "life")[name] for name in ("hosts", "job_id"))
        cluster.kill_host(host[0])  # another is idle: it goes on there
        hold.release()
        assert cluster.wait_job(job) == "COMPLETED"
        assert weights(run.path) == uninterrupted
        assert [e["event"] for e in read_events(run)].count("requeued") == 0
        status = told(cluster, tmp_path, "life")
        assert (status["state"], status["attempt"]) == ("done", 2)


def test_a_stopped_run_is_not_held_by_an_expedited_requeue(
    slurm_available: None, tmp_path: Path, synthetic_dir: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    cluster = SlurmCluster(hosts=1, conf={"SlurmctldParameters": "enable_expedited_requeue"})
    if cluster.release < (25, 11):
        record_property(SKIPPED_FOR_VERSION, True)
        pytest.skip("this Slurm is older than 25.11: refused, as the test above shows")
    with cluster:
        hold = Hold(tmp_path, HELD_AT, until_told=True)
        submit(cluster, tmp_path, *TRAINING, "--data-dir", str(synthetic_dir),
               "--run-name", "life", "--requeue=expedite", env=hold.env)  # fmt: skip
        wait_held(hold, tmp_path / "jobs/life")
        stopped = typed(cluster, tmp_path, "stop", "life", "--wait")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert cluster.wait_job(told(cluster, tmp_path, "life")["job_id"]) in (
            "FAILED",
            "COMPLETED",
        )
        assert told(cluster, tmp_path, "life")["state"] == "stopped"


def test_stop_reaches_a_run_that_waits_to_be_requeued(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = "trap 'exit 75' USR1; touch up; while :; do sleep 0.1; done"
    submit(cluster, tmp_path, "--run-name", "waits", "--requeue", "--no-snapshot", "--",
           "bash", "-c", program)  # fmt: skip
    run = RunDir(tmp_path / "jobs/waits")
    wait_for((tmp_path / "up").exists, "the command to start")
    job_id = told(cluster, tmp_path, "waits")["job_id"]
    # Nothing starts until it is up again: a requeued job's wait is short.
    cluster.run(["scontrol", "update", "PartitionName=main", "State=DOWN"], check=True)
    try:
        cluster.run(["scancel", "--batch", "--signal=USR1", job_id], check=True)
        wait_for(lambda: read_events(run)[-1]["event"] == "requeued", "the requeue", LONG)
        wait_for(lambda: cluster.job_state(job_id) == "PENDING", "the job's end")
        status = told(cluster, tmp_path, "waits")
        assert (status["state"], status["pending_restart_reason"]) == ("queued", "signal"), status
        assert "had not started: cancelled" in typed(cluster, tmp_path, "stop", "waits").stdout
        assert cluster.wait_job(job_id) == "CANCELLED"
    finally:
        cluster.run(["scontrol", "update", "PartitionName=main", "State=UP"], check=True)
    status = told(cluster, tmp_path, "waits")
    assert (status["state"], status["next_command"]) == ("cancelled", "clusterddp resume waits")
    assert [e["event"] for e in read_events(run)].count("started") == 1


def test_a_command_gets_the_signal_and_is_not_started_again(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = "trap 'echo asked; exit 75' USR1; touch up; while :; do sleep 0.1; done"
    submit(cluster, tmp_path, "--run-name", "own", "--requeue", "--no-snapshot", "--",
           "bash", "-c", program)  # fmt: skip
    wait_for((tmp_path / "up").exists, "the command to start")
    stopped = typed(cluster, tmp_path, "stop", "own", "--wait")
    assert "sent SIGUSR1 to its command" in stopped.stdout, stopped.stderr
    assert "asked" in (tmp_path / "jobs/own/logs/rank-0.log").read_text()
    status = told(cluster, tmp_path, "own")
    assert status["state"] == "stopped", status
    assert cluster.run(["squeue", "-h"]).stdout == ""


def test_mended_code_is_taken_and_of_three_resumes_one_is_queued(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    program = tmp_path / "own.py"
    program.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n    raise LookupError('boom')\n"
        "time.sleep(99)\n"
    )
    first = submit(cluster, tmp_path, "--nodes", "2", "--run-name", "mended", "--wait", "--",
                   sys.executable, "own.py")  # fmt: skip
    named = "rank 1 on h02 failed first: LookupError: boom (logs/rank-1.log)"
    assert first.returncode == 1
    assert named in first.stderr
    assert told(cluster, tmp_path, "mended")["first_failure"] == named

    program.write_text("print('mended')\n")
    assert "changed own.py" in typed(cluster, tmp_path, "resume", "mended", "--dry-run").stderr
    argv = [*CLUSTERDDP, "resume", "mended", "--refresh-code", "--wait"]
    several = [cluster.popen(argv, cwd=tmp_path, stdout=-1, stderr=-1) for _ in range(3)]
    said = [process.communicate(timeout=200) for process in several]
    assert sorted(process.returncode for process in several) == [0, 2, 2], said
    run = RunDir(tmp_path / "jobs/mended")
    jobs = [event["job_id"] for event in read_events(run) if event["event"] == "submitted"]
    assert len(jobs) == 2
    assert len(cluster.run(["squeue", "-h", "-t", "all", "-n", "mended"]).stdout.splitlines()) == 2
    *former, divider, last = run.rank_log(1).read_text().splitlines()
    assert former[-1] == "LookupError: boom"
    assert divider.startswith(f"--- attempt 2, job {jobs[1]}, ")
    assert last == "mended"


def test_a_run_of_submitit_is_resumed_through_submitit(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    once = "[ -f jobs/own/again ] || { touch jobs/own/again; exit 3; }; echo went on"
    first = submit(cluster, tmp_path, "--launcher", "submitit", "--run-name", "own", "--wait",
                   "--no-snapshot", "--", "bash", "-c", once)  # fmt: skip
    assert first.returncode == 1, first.stdout + first.stderr
    assert told(cluster, tmp_path, "own")["state"] == "failed"
    again = typed(cluster, tmp_path, "resume", "own", "--wait")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "went on" in (tmp_path / "jobs/own/logs/rank-0.log").read_text()
    status = told(cluster, tmp_path, "own")
    assert (status["state"], status["launcher"], status["attempt"]) == ("done", "submitit", 2)
