"""Chains on a real Slurm: a run waits for another one as a run, whichever jobs that takes."""

import json
from pathlib import Path
from typing import Any

from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.waiting import wait_for

AWAITED = """
cd "$1"
echo "$SLURM_JOB_ID" >> starts
trap 'exit 75' USR1 TERM
until [ -e go ]; do sleep 0.05; done
exit "$(cat go)"
"""
"""A program that ends with what the file `go` says, and with 75 when it is asked to leave."""


def typed(cluster: SlurmCluster, folder: Path, *argv: str) -> Any:
    return cluster.run([*CLUSTERDDP, *argv], cwd=folder, timeout=200)


def told(cluster: SlurmCluster, folder: Path, name: str) -> dict[str, Any]:
    """What `status --json` says."""
    answer = typed(cluster, folder, "status", name, "--json")
    assert answer.returncode == 0, answer.stderr
    status: dict[str, Any] = json.loads(answer.stdout)
    return status


def submit_awaited(cluster: SlurmCluster, folder: Path, *options: str) -> RunDir:
    """Submit the run `a`, and wait until its program runs."""
    (folder / "awaited.sh").write_text(AWAITED)
    done = submit(cluster, folder, "--run-name", "a", "--no-snapshot", *options, "--",
                  "bash", "awaited.sh", str(folder))  # fmt: skip
    assert done.returncode == 0, done.stderr
    wait_for((folder / "starts").exists, "the start of a")
    return RunDir(folder / "jobs/a")


def submit_waiting(
    cluster: SlurmCluster, folder: Path, after: str, name: str = "b", *options: str
) -> RunDir:
    """Submit a run that notes what it finds of `a` when it begins."""
    note = f"cp jobs/a/events.jsonl {name}.seen"
    done = submit(cluster, folder, "--run-name", name, "--no-snapshot", "--after", after, *options,
                  "--", "bash", "-c", note)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "jobs" / name)


def kinds(run: RunDir) -> list[str]:
    return [event["event"] for event in read_events(run)]


def test_a_run_waits_for_another_one_over_requeue_stop_and_resubmission(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    awaited = submit_awaited(cluster, tmp_path, "--requeue")
    waiting = submit_waiting(cluster, tmp_path, "a")
    status = told(cluster, tmp_path, "b")
    assert (status["state"], status["detail"]) == ("queued", "waits for a")
    assert status["waits_for"] == ["a"]
    assert " waits for a" in typed(cluster, tmp_path, "jobs").stdout
    job = told(cluster, tmp_path, "a")["job_id"]

    cluster.run(["scontrol", "requeue", job], check=True)
    starts = tmp_path / "starts"
    wait_for(lambda: len(starts.read_text().split()) == 2, "the requeued start of a")
    assert told(cluster, tmp_path, "b")["detail"] == "waits for a"

    stopped = typed(cluster, tmp_path, "stop", "a", "--wait")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_for(lambda: kinds(waiting)[-1] == "waits" and kinds(waiting).count("waits") == 2,
             "b, which starts and waits again")  # fmt: skip
    wait_for(lambda: "held" in cluster.run(["squeue", "-h", "-o", "%r"]).stdout, "the hold")
    status = told(cluster, tmp_path, "b")
    assert status["state"] == "queued", status
    assert status["detail"].startswith("waits for a (stopped: "), status

    again = typed(cluster, tmp_path, "resubmit", "a")
    assert again.returncode == 0, again.stderr
    assert "b (job " in again.stderr
    wait_for(lambda: len(starts.read_text().split()) == 3, "the third start of a")
    assert told(cluster, tmp_path, "b")["detail"] == "waits for a"
    (tmp_path / "go").write_text("0")
    assert cluster.wait_job(told(cluster, tmp_path, "b")["job_id"]) == "COMPLETED"
    assert told(cluster, tmp_path, "a")["state"] == "done"
    assert told(cluster, tmp_path, "b")["state"] == "done"
    seen = [json.loads(line) for line in (tmp_path / "b.seen").read_text().splitlines()]
    assert (seen[-1]["event"], seen[-1]["cause"]) == ("ended", "done")
    assert kinds(waiting).count("started") == 1
    assert [path.name for path in sorted(waiting.attempts.iterdir())] == ["0001"]
    assert kinds(awaited).count("awaited_by") == 1
