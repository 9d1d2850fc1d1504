"""What docs/start.md has a person type on a cluster, on a real Slurm."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from clusterddp.data.synthetic import synthesise
from clusterddp.errors import EXIT_PAUSED
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP
from tests.test_start_page import SECTIONS
from tests.waiting import wait_for

SMALL = "--epochs 10000 --batch-size 32 --threads 1 --eval-every 1000epochs"


@pytest.mark.slow
def test_a_run_is_submitted_followed_stopped_and_resumed(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    synthesise(str(tmp_path / "data"), train_images=2_000, test_images=100)

    def typed(line: str, code: int = 0) -> str:
        line = line.replace("--data-dir /shared/data", "--dataset synthetic")
        line = line.replace(
            "--dataset synthetic", f"{SMALL} --data-dir {tmp_path}/data --dataset synthetic"
        )
        line = line.replace("--gpus-per-node 4 --cpus-per-task 8", "--gpus-per-node 1")
        argv = [*CLUSTERDDP, *shlex.split(line)[1:]]
        done: Any = cluster.run(argv, cwd=tmp_path, timeout=280)
        assert done.returncode == code, done.stdout + done.stderr
        return str(done.stdout)

    def state() -> Any:
        return json.loads(typed("clusterddp status third --json"))

    doctor, first, follow, status, dry_run, _, submit, stop, resubmit, site = SECTIONS[
        "On a cluster"
    ]
    assert re.search("^good +slurm", typed(doctor), re.M)
    typed(first)
    assert "step 200: test accuracy" in typed(follow)
    done = typed(status)
    assert "state       done\nhosts" in re.sub("\n(job|asked) .*", "", done)
    assert "progress    step 200 of 200 (100%), epoch 7, training loss" in done
    assert "#SBATCH --nodes=2\n" in typed(dry_run)
    typed(submit)
    wait_for(lambda: state()["step"], "it trains")
    assert "state       running" in typed(status.replace("second", "third"))
    typed(stop)
    assert "stopped at step" in typed(follow.replace("second", "third"), code=EXIT_PAUSED)
    assert state()["state"] == "stopped"
    assert "resumes from step" in typed(resubmit)
    assert state()["state"] in ("queued", "running")
    typed("clusterddp cancel third")
    assert "site.cfg: none found" in typed(site)
