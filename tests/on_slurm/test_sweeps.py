"""Sweeps on a real Slurm, typed as a user would type them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, WHO, submit, told
from tests.waiting import wait_for

SMALL = [
    "--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--max-steps", "20",
    "--warmup-steps", "2", "--eval-every", "1000epochs",
]  # fmt: skip


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
