"""Sweeps on a real Slurm, typed as a user would type them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.run_dir import RunDir
from tests.on_slurm import test_notify as notices
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, WHO, submit, told
from tests.waiting import wait_for

SMALL = [
    "--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--max-steps", "20",
    "--warmup-steps", "2", "--eval-every", "1000epochs", "--lr", "0.01",
]  # fmt: skip
FAILS_ONCE = (
    "echo start {n}; if [ {n} = a ] || [ -e ok ]; then exit 0; fi; "
    "until [ -e go ]; do sleep 0.2; done; touch ok; exit 4"
)
UNTIL_GO = 'until [ -e "$0/go" ]; do sleep 0.1; done'


def typed(cluster: SlurmCluster, folder: Path, *argv: str, **kwargs: Any) -> Any:
    return cluster.run([*CLUSTERDDP, *argv], cwd=folder, timeout=200, **kwargs)


def status(cluster: SlurmCluster, folder: Path, name: str) -> Any:
    answer = typed(cluster, folder, "status", name, "--json")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_each_point_of_a_command_is_a_run_with_its_own_values(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    done = submit(
        cluster, tmp_path, "--run-name", "s", "--wait", "--sweep", "lr=0.1,it's $HOME",
        "--sweep", "seed=0..1", "--max-parallel", "2",
        "--", sys.executable, "-c", WHO, "--lr={lr}", "{seed}", "{other}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [tmp_path / f"jobs/s-{index}" for index in range(4)]
    points = [(lr, seed) for lr in ("0.1", "it's $HOME") for seed in "01"]
    for run, (lr, seed) in zip(runs, points, strict=True):
        task = told(run, 0)
        assert task["argv"] == [f"--lr={lr}", seed, "{other}"]
        assert task["env"]["SLURM_ARRAY_TASK_ID"] == run.name[-1]
    assert len({told(run, 0)["env"]["MASTER_PORT"] for run in runs}) == 4


def test_a_sweep_is_one_line_of_jobs_and_is_stopped_and_cancelled_as_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    submit(
        cluster, tmp_path, "--run-name", "s", "--sweep", "t=300,301,302,303,304",
        "--max-parallel", "2", "--", "sleep", "{t}", check=True,
    )  # fmt: skip
    wait_for(lambda: len([*tmp_path.glob("jobs/s-*/logs/rank-0.log")]) == 2, "two points run")
    row = typed(cluster, tmp_path, "jobs").stdout.splitlines()[1]
    assert row.split()[:2] == ["s", "running"]
    assert row.endswith("5 points: 3 queued, 2 running")
    assert len(typed(cluster, tmp_path, "jobs", "s-[0-3]").stdout.splitlines()) == 1 + 4
    one = typed(cluster, tmp_path, "cancel", "s-3")
    assert one.returncode == 0, one.stderr
    asked = typed(cluster, tmp_path, "cancel", "s")
    assert asked.returncode == 2
    assert "Cancel 4 runs (2 running, 2 queued)?" in asked.stderr
    done = typed(cluster, tmp_path, "cancel", "s", "--yes")
    assert done.returncode == 0, done.stderr
    assert "s-3 has already ended: cancelled" in done.stdout

    def left() -> str:
        return str(cluster.run(["squeue", "-h", "-r"], check=True).stdout)

    wait_for(lambda: not left(), "the queue is empty")
    assert not [*tmp_path.glob("jobs/s-[23]/logs/rank-0.log")]  # none began meanwhile
    assert status(cluster, tmp_path, "s")["counts"] == {"cancelled": 5}


def test_a_run_waits_for_all_points_and_a_sweep_for_that_run_and_the_end_is_told_once(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = f"[ {{n}} != b ] || [ -e {tmp_path}/mended ] || exit 3; {UNTIL_GO}"
    tell = notices.program(tmp_path)
    submit(
        cluster, tmp_path, "--run-name", "s", "--sweep", "n=a,b,c", "--no-snapshot",
        "--notify", tell, "--", "bash", "-c", script, str(tmp_path), check=True,
    )  # fmt: skip
    submit(cluster, tmp_path, "--run-name", "b", "--after", "s", "--", "true", check=True)
    submit(
        cluster, tmp_path, "--run-name", "t", "--after", "b", "--sweep", "x=1,2",
        "--", "touch", f"{tmp_path}/t-{{x}}", check=True,
    )  # fmt: skip
    assert status(cluster, tmp_path, "t-1")["detail"] == "waits for b"
    wait_for(lambda: status(cluster, tmp_path, "s-1")["state"] == "failed", "the failed point")
    assert status(cluster, tmp_path, "b")["detail"] == "waits for s"
    (tmp_path / "mended").touch()
    again = typed(cluster, tmp_path, "resubmit", "s-1")
    assert again.returncode == 0, again.stderr
    job = status(cluster, tmp_path, "b")["job_id"]
    assert f"b (job {job}) waits for it" in again.stderr
    [array] = status(cluster, tmp_path, "s")["job_ids"]
    own = status(cluster, tmp_path, "s-1")["array_element"]
    shown = cluster.run(["squeue", "-h", "-j", job, "-o", "%E"], check=True).stdout
    waits = {item.partition("(")[0] for item in shown.strip().split(",")}
    assert {item.removesuffix("_*") for item in waits} == {
        f"afterany:{array}", f"afterany:{own.partition('_')[0]}",
    }  # fmt: skip
    (tmp_path / "go").touch()
    wait_for(lambda: len([*tmp_path.glob("t-[12]")]) == 2, "both points that wait")
    assert status(cluster, tmp_path, "b")["state"] == "done"
    assert len([*(tmp_path / "jobs/b/attempts").iterdir()]) == 1
    verdict, _, _ = notices.told(tmp_path)
    assert (verdict["sweep"], verdict["counts"]) == ("s", {"done": 3})
    notices.notice_job_is_gone(cluster, RunDir(tmp_path / "jobs/s"))
    assert not (tmp_path / "told-1.json").exists()


@pytest.mark.slow
def test_a_sweep_that_has_started_too_early_is_held_and_let_go_as_a_whole(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = f"trap 'exit 75' USR1 TERM; {UNTIL_GO}"
    submit(cluster, tmp_path, "--run-name", "a", "--no-snapshot", "--", "bash", "-c", script,
           str(tmp_path), check=True)  # fmt: skip
    submit(
        cluster, tmp_path, "--run-name", "t", "--after", "a", "--sweep", "x=1..3", "--",
        "touch", f"{tmp_path}/t-{{x}}", check=True,
    )  # fmt: skip
    log = tmp_path / "jobs/a/logs/rank-0.log"
    wait_for(log.exists, "the start of a")
    stopped = typed(cluster, tmp_path, "stop", "a", "--wait")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr

    def reasons() -> list[str]:
        return str(cluster.run(["squeue", "-h", "-r", "-o", "%r"], check=True).stdout).split("\n")

    wait_for(lambda: sum("held" in reason.lower() for reason in reasons()) == 3, "the holds")
    told = status(cluster, tmp_path, "t-2")
    assert told["state"] == "queued"
    assert told["detail"].startswith("waits for a (stopped"), told
    again = typed(cluster, tmp_path, "resubmit", "a")
    assert again.returncode == 0, again.stderr
    [array] = status(cluster, tmp_path, "t")["job_ids"]
    assert f"t (job {array}_[0-2]) waits for it" in again.stderr
    assert status(cluster, tmp_path, "t-2")["detail"] == "waits for a"
    (tmp_path / "go").touch()
    wait_for(lambda: len([*tmp_path.glob("t-[123]")]) == 3, "all points")
    wait_for(lambda: status(cluster, tmp_path, "t")["counts"] == {"done": 3}, "all are done")
    assert not (tmp_path / "jobs/t-1/attempts/0002").exists()


@pytest.mark.slow
def test_a_point_whose_requeue_is_refused_goes_on_as_its_element_of_another_array(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    done = submit(
        cluster, tmp_path, "--run-name", "c", "--sweep", "n=a,b", "--restart-on-failure", "1",
        "--no-snapshot", "--", "bash", "-c", FAILS_ONCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = tmp_path / "jobs/c-1/logs/rank-0.log"
    wait_for(log.exists, "the point has started")
    [first] = status(cluster, tmp_path, "c")["job_ids"]
    cluster.run(["scontrol", "update", f"JobId={first}_1", "Requeue=0"], check=True)
    (tmp_path / "go").touch()
    wait_for(lambda: log.read_text().count("start b") == 2, "it has started again")
    wait_for(lambda: status(cluster, tmp_path, "c")["counts"] == {"done": 2}, "both are done")
    told = status(cluster, tmp_path, "c-1")
    assert (told["state"], told["restart_reasons"]) == ("done", ["failed"])
    assert told["array_element"].endswith("_1")
    assert not told["array_element"].startswith(f"{first}_")
    assert not (tmp_path / "jobs/c-0/attempts/0002").exists()


@pytest.mark.slow
def test_a_failed_point_is_submitted_again_and_others_are_added(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    words = ["--", "bash", "-c", f"echo at {{n}}; [ {{n}} != b ] || [ -e {tmp_path}/mended ]"]
    submit(cluster, tmp_path, "--run-name", "c", "--sweep", "n=a,b", "--wait", *words)
    assert status(cluster, tmp_path, "c")["counts"] == {"done": 1, "failed": 1}
    (tmp_path / "mended").touch()
    again = typed(cluster, tmp_path, "resubmit", "c", "--wait")
    assert again.returncode == 0, again.stderr
    more = typed(cluster, tmp_path, "resubmit", "c", "--sweep", "n=b,c,d", "--wait")
    assert more.returncode == 0, more.stderr
    assert status(cluster, tmp_path, "c")["counts"] == {"done": 4}
    logs = {i: (tmp_path / f"jobs/c-{i}/logs/rank-0.log").read_text() for i in range(4)}
    assert [text.count("at ") for text in logs.values()] == [1, 2, 1, 1]
    assert "at d" in logs[3]
    none = typed(cluster, tmp_path, "resubmit", "c")
    assert none.returncode == 2
    assert "every point of c is done, queued or running" in none.stderr


@pytest.mark.slow
def test_a_point_of_our_training_ends_with_the_weights_of_a_run_of_its_own(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    data = ["--data-dir", str(synthetic_dir)]
    both = submit(cluster, tmp_path, *SMALL, *data, "--run-name", "s", "--sweep", "seed=3,4",
                  "--wait")  # fmt: skip
    assert both.returncode == 0, both.stderr
    alone = submit(cluster, tmp_path, *SMALL, *data, "--run-name", "one", "--seed", "4", "--wait")
    assert alone.returncode == 0, alone.stderr
    weights = {
        name: json.loads((tmp_path / f"jobs/{name}/report.json").read_text())["weights_sha256"]
        for name in ("s-0", "s-1", "one")
    }
    assert weights["s-1"] == weights["one"] != weights["s-0"]


def test_a_sweep_that_slurm_cannot_hold_is_refused_with_the_figures(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    done = submit(cluster, tmp_path, "--sweep", "n=0..1001", "--", "sleep", "{n}")
    assert done.returncode == 2
    assert "1002 points, whose indices go up to 1001; MaxArraySize of this cluster is 1001" in (
        done.stderr
    )
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_report_of_a_sweep_takes_its_seeds_together(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    done = submit(
        cluster, tmp_path, "--run-name", "s", "--wait", *SMALL, "--data-dir", str(synthetic_dir),
        "--sweep", "weight-decay=0,0.1", "--sweep", "seed=0..1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    got = typed(cluster, tmp_path, "report", "s", "--json", check=True)
    report = json.loads(got.stdout)
    assert (report["state"], report["counts"], report["by"]) == ("done", {"done": 4}, "accuracy")
    for row in report["rows"]:
        runs = [row_run["run"] for row_run in row["runs"]]
        first, second = (
            json.loads((tmp_path / "jobs" / run / "report.json").read_text())["accuracy"]
            for run in runs
        )
        figures = row["figures"]["accuracy"]
        assert figures["mean"] == pytest.approx((first + second) / 2)
        assert figures["spread"] == pytest.approx(abs(first - second) / 2**0.5)
        assert figures["n"] == 2
    means = [row["figures"]["accuracy"]["mean"] for row in report["rows"]]
    assert means == sorted(means, reverse=True)
