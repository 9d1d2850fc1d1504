"""Scripts that earlier versions have rendered run on a real Slurm as well; see tests/kept."""

from pathlib import Path

import pytest

from clusterddp.files import read_json
from clusterddp.run.run_dir import RunDir
from tests.kept.test_kept import COMMITS, cause, check_weights, unpacked
from tests.on_slurm.cluster import SlurmCluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("commit", COMMITS)
def test_a_rendered_script_trains_to_its_verdict(
    cluster: SlurmCluster, tmp_path: Path, commit: str
) -> None:
    unpacked(tmp_path, commit, "training.sbatch")
    run = RunDir(tmp_path / "jobs/training")
    sent = cluster.run(["sbatch", "--parsable", run.script], cwd=tmp_path, check=True)
    assert cluster.wait_job(sent.stdout.strip()) == "COMPLETED", run.job_log.read_text()
    assert cause(run) == "done"
    check_weights(commit, "training", read_json(run.report))
