"""The run of docs/tutorial.md, from its submission to the report."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP
from tests.test_tutorial import SCRIPT, STEPS
from tests.waiting import PATIENCE, wait_for


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_run_of_the_tutorial_is_requeued_and_ends(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    script = SCRIPT.replace("250steps", "20steps").replace("sleep(0.05)", "sleep(0.01)")
    (tmp_path / "train.py").write_text(script)

    def typed(line: str) -> str:
        words = [sys.executable if word == "python" else word for word in shlex.split(line)]
        words = ["2" if word == "12" else word for word in words]  # epochs
        done = cluster.run([*CLUSTERDDP, *words], cwd=tmp_path, timeout=4 * PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    [submission] = STEPS["6"]
    job = re.findall(r"submitted spirals as job (\d+)", typed(submission))[0]
    checkpoints = tmp_path / "jobs/spirals/attempts/0001/checkpoints"
    wait_for(lambda: any(checkpoints.glob("*.pt")), "a checkpoint")
    cluster.run(["scontrol", "requeue", job], check=True)
    in_job, follow = STEPS["8"]
    assert "resuming from step" in typed(follow)
    assert f"job {job} got SIGTERM" in typed(in_job)
    status, report = STEPS["9"]
    assert "(1 restart: requeued by Slurm)" in typed(status)
    assert re.search(r"attempts   2, 0 steps repeated", typed(report))
    [clean] = STEPS["10"]
    assert "bundled clusterddp" in typed(clean)
