"""A person's own model and dataset on two hosts: found there as they were when submitted."""

import json
from pathlib import Path

import pytest

from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, submit

NETS = """
from torch import nn

def build():
    print("the net as submitted")
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
"""
SETS = """
import torch
from pathlib import Path

def make(data_dir, train):
    labels = torch.tensor([int(n) for n in (Path(data_dir) / "labels").read_text().split()] * 50)
    return torch.eye(3)[labels].repeat(1, 4), labels
"""


@pytest.mark.slow
def test_an_edit_while_the_job_waits_does_not_reach_it(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/sets.py").write_text(SETS)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/labels").write_text("0 1 2")
    done = submit(
        cluster, tmp_path, "--nodes", "2", "--run-name", "own",
        "--model", "nets:build", "--dataset", "pkg.sets:make", "--data-dir", "data",
        "--lr", "0.05", "--warmup-steps", "0", "--batch-size", "8", "--epochs", "5",
        "--sbatch", "hold", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("nets.py", "pkg/sets.py"):
        (tmp_path / name).write_text("raise RuntimeError('edited since')\n")
    run = tmp_path / "jobs/own"
    assert start(cluster, done.stdout) == "COMPLETED", (run / "logs/job.log").read_text()
    report = json.loads((run / "report.json").read_text())
    assert (report["world_size"], report["hosts"]) == (2, ["h01", "h02"])
    assert (report["model"], report["dataset"]) == ("nets:build", "pkg.sets:make")
    assert (report["train_images"], report["accuracy"]) == (150, 1.0)
    for rank in range(2):
        assert "the net as submitted" in (run / f"logs/rank-{rank}.log").read_text()

    # The copy also starts again, though what it was made of is gone; the set must be the same.
    (tmp_path / "nets.py").unlink()
    (tmp_path / "data/labels").write_text("0 1 1")
    again = cluster.run(
        [*CLUSTERDDP, "resume", "own", "--epochs", "6", "--allow-config-change", "--json"],
        cwd=tmp_path,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"model: nets:build of {run}/code/nets.py" in again.stderr
    assert start(cluster, again.stdout) == "FAILED"
    log = (run / "logs/job.log").read_text()
    assert "failed first: the pkg.sets:make dataset at" in log
    assert "has changed since this run first started" in log


def start(cluster: SlurmCluster, answer: str) -> str:
    """Let a job go that was submitted with --hold; returns Slurm's word for how it ended."""
    job_id = json.loads(answer)["job_id"]
    assert cluster.run(["scontrol", "release", job_id]).returncode == 0
    return cluster.wait_job(job_id)
