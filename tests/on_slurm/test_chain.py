"""Chains on a real Slurm: a run waits for another one as a run, whichever jobs that takes."""

import json
from functools import partial
from pathlib import Path

import pytest

from clusterddp.run.run_dir import RunDir
from tests.event_lines import kinds, read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_life import told, typed
from tests.on_slurm.test_submit import submit
from tests.waiting import wait_for as wait_briefly

# Several jobs in a row, on a machine that others use as well.
wait_for = partial(wait_briefly, seconds=240)

AWAITED = """
trap 'exit 75' USR1 TERM
cd "$1/jobs/a"
echo "$SLURM_JOB_ID" >> starts
until [ -e go ]; do sleep 0.05; done
code=$(cat go); rm go
exit "$code"
"""
"""A program that ends once with what the file `go` says, and with 75 when it is asked to leave.

Its files lie beside the runs' records: in the submission's directory they would be code that has
changed.
"""


def submit_awaited(cluster: SlurmCluster, folder: Path, *options: str) -> RunDir:
    """Submit the run `a`, and wait until its program runs."""
    (folder / "awaited.sh").write_text(AWAITED)
    done = submit(cluster, folder, "--run-name", "a", "--no-snapshot", *options, "--",
                  "bash", "awaited.sh", str(folder))  # fmt: skip
    assert done.returncode == 0, done.stderr
    wait_for((folder / "jobs/a/starts").exists, "the start of a")
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


def go(folder: Path, code: int) -> None:
    """Have the program of `a` end; the file is there whole or not at all."""
    new = folder / "jobs/a/new"
    new.write_text(str(code))
    new.replace(new.with_name("go"))


def test_a_run_waits_for_another_one_over_requeue_stop_and_resume(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    awaited = submit_awaited(cluster, tmp_path, "--requeue")
    waiting = submit_waiting(cluster, tmp_path, "a", "b", "--no-requeue")
    status = told(cluster, tmp_path, "b")
    assert (status["state"], status["detail"]) == ("queued", "waits for a")
    assert status["dependencies"] == ["a"]
    assert " waits for a" in typed(cluster, tmp_path, "runs").stdout
    job = told(cluster, tmp_path, "a")["job_id"]

    cluster.run(["scontrol", "requeue", job], check=True)
    starts = tmp_path / "jobs/a/starts"
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

    refused = typed(cluster, tmp_path, "resume", "a", "--after", "b")
    assert refused.returncode == 2
    assert "b waits for a, so a would wait for itself" in refused.stderr
    again = typed(cluster, tmp_path, "resume", "a")
    assert again.returncode == 0, again.stderr
    assert "b (job " in again.stderr
    wait_for(lambda: len(starts.read_text().split()) == 3, "the third start of a")
    assert told(cluster, tmp_path, "b")["detail"] == "waits for a"
    go(tmp_path, 0)
    assert cluster.wait_job(told(cluster, tmp_path, "b")["job_id"]) == "COMPLETED"
    assert told(cluster, tmp_path, "a")["state"] == "done"
    assert told(cluster, tmp_path, "b")["state"] == "done"
    seen = [json.loads(line) for line in (tmp_path / "b.seen").read_text().splitlines()]
    assert (seen[-1]["event"], seen[-1]["cause"]) == ("ended", "done")
    assert kinds(waiting).count("started") == 1
    assert [path.name for path in sorted(waiting.attempts.iterdir())] == ["0001"]
    assert kinds(awaited).count("dependent_added") == 1


@pytest.mark.slow
def test_a_failure_begins_what_waits_for_it_and_ends_or_refuses_what_waits_for_success(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    submit_awaited(cluster, tmp_path)
    waiting = submit_waiting(cluster, tmp_path, "a")
    submit_waiting(cluster, tmp_path, "a:failed", "c")
    submit_waiting(cluster, tmp_path, "./jobs/a:any", "d")
    submit_waiting(cluster, tmp_path, "b", "e")
    job = told(cluster, tmp_path, "b")["job_id"]
    go(tmp_path, 3)
    assert cluster.wait_job(job) == "FAILED"
    for name in "cd":
        wait_for((tmp_path / f"{name}.seen").exists, f"the end of {name}")
    assert cluster.wait_job(told(cluster, tmp_path, "e")["job_id"]) == "FAILED"
    status = told(cluster, tmp_path, "b")
    assert (status["state"], status["exit_code"]) == ("cancelled", 1)
    assert status["detail"].startswith("not started, because it waits for a: a (failed"), status
    assert status["next_command"] == "clusterddp resume b"
    assert not (tmp_path / "b.seen").exists()
    assert list(waiting.attempts.glob("*")) == []
    ended = told(cluster, tmp_path, "e")["detail"]
    assert ended == "not started, because it waits for b: b (cancelled)"

    refused = typed(cluster, tmp_path, "resume", "b")
    assert refused.returncode == 2
    assert "--after a: a (failed" in refused.stderr
    for after, words in (
        ("a", "--after a: a (failed: "),
        ("a:done", "'done' is not one of ok, any, failed"),
        ("x", "there is no run 'x'"),
    ):
        done = submit(cluster, tmp_path, "--run-name", "f", "--after", after, "--", "true")
        assert done.returncode == 2
        assert words in done.stderr, done.stderr
        assert not (tmp_path / "jobs/f").exists()
    submit_waiting(cluster, tmp_path, "a:any", "f")
    wait_for((tmp_path / "f.seen").exists, "f, for which a has ended already")
    again = typed(cluster, tmp_path, "resume", "a")
    assert "b waited for a and was not started" in again.stderr, again.stderr
    again = typed(cluster, tmp_path, "resume", "b")
    assert again.returncode == 0, again.stderr
    status = told(cluster, tmp_path, "b")
    assert status["dependencies"] == ["a"], status
    dropped = typed(cluster, tmp_path, "resume", "e", "--after", "", "--after", "a:any")
    assert dropped.returncode == 0, dropped.stderr
    assert told(cluster, tmp_path, "e")["dependencies"] == ["a:any"]
    go(tmp_path, 0)
    for name in "be":
        wait_for((tmp_path / f"{name}.seen").exists, f"the end of {name}")


@pytest.mark.slow
def test_a_run_waits_for_the_job_in_place_of_another_one_and_for_several_runs(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    awaited = submit_awaited(cluster, tmp_path, "--retries", "1")
    [job] = [event["job_id"] for event in read_events(awaited) if event["event"] == "submitted"]
    held = cluster.sbatch("#!/bin/sh\nexit 0\n", "--hold", cwd=tmp_path)
    submit(cluster, tmp_path, "--run-name", "z", "--no-snapshot", "--dependency",
           f"afterok:{held}", "--", "true")  # fmt: skip
    waiting = submit_waiting(cluster, tmp_path, "a", "b", "--after", "z:any", "--dependency",
                             f"afterany:{held}")  # fmt: skip
    own = told(cluster, tmp_path, "b")["job_id"]
    cluster.run(["scontrol", "update", f"JobId={job}", "Requeue=0"], check=True)
    go(tmp_path, 3)
    wait_for(lambda: kinds(waiting).count("waits") == 2, "b, which waits for the next job of a")
    shown = cluster.run(["squeue", "-h", "-j", own, "-o", "%E"]).stdout
    [*_, following] = [e["job_id"] for e in read_events(awaited) if e["event"] == "submitted"]
    assert following != job
    others = told(cluster, tmp_path, "z")["job_id"]
    assert {item.partition("(")[0] for item in shown.strip().split(",")} == {
        f"afterany:{held}", f"afterany:{following}", f"afterany:{others}",
    }  # fmt: skip
    assert told(cluster, tmp_path, "b")["dependencies"] == ["a", "z:any"]
    cluster.run(["scontrol", "release", held], check=True)
    go(tmp_path, 0)
    assert cluster.wait_job(own) == "COMPLETED"
    assert kinds(waiting).count("started") == 1
    assert told(cluster, tmp_path, "a")["state"] == "done"


@pytest.mark.slow
def test_resume_of_a_run_that_goes_on_waits_for_it(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    training = ["--dataset", "synthetic", "--threads", "1",
                "--batch-size", "32", "--data-dir", str(synthetic_dir)]  # fmt: skip
    held = cluster.sbatch("#!/bin/sh\nexit 0\n", "--hold", cwd=tmp_path)
    for name, steps, more in (
        ("a", "6", ["--dependency", f"afterok:{held}"]),
        ("b", "9", ["--init-from", "a"]),
    ):
        done = submit(cluster, tmp_path, *training, "--run-name", name, "--max-steps", steps, *more)
        assert done.returncode == 0, done.stderr
    assert "starts from the newest checkpoint of a after that run ends" in done.stderr
    assert told(cluster, tmp_path, "b")["detail"] == "waits for a:any"
    cluster.run(["scontrol", "release", held], check=True)
    assert cluster.wait_job(told(cluster, tmp_path, "b")["job_id"]) == "COMPLETED"
    report = json.loads((tmp_path / "jobs/b/report.json").read_text())
    assert report["steps"] == 9
    assert "a/attempts/0001/checkpoints/step-00000006.pt" in report["resumed_from"]
