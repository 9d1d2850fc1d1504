"""The main job and a requeue as an ordinary user, as on a site; the daemons are root's as there."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.files import read_json
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import DEFAULT_ROOT, SlurmCluster
from tests.on_slurm.held import Hold
from tests.on_slurm.test_bad_nodes import typed
from tests.on_slurm.test_cluster import NOBODY
from tests.on_slurm.test_life import train_to
from tests.on_slurm.test_submit import CLUSTERDDP
from tests.training.trainings import weights_in_one_piece

# CI has a user's COMMAND that is requeued (test_bad_nodes.py), a user's training whose files are
# all the user's (test_containers.py), and requeues to the same weights (test_signals.py).
pytestmark = [pytest.mark.slow, pytest.mark.release]

SAVED_AT, HELD_AT = 50, 60
TRAINING = [
    "--nodes", "2", "--dataset", "synthetic", "--threads", "1",
    "--batch-size", "8", "--warmup-steps", "2", "--epochs", "100", "--max-steps", "200",
    "--save-every", f"{SAVED_AT}steps", "--log-every", "50", "--eval-every", "1000epochs",
]  # fmt: skip


@pytest.fixture
def home(synthetic_dir: Path) -> Iterator[Path]:
    """The user's directory with a dataset in it; pytest's directories are closed to other users."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(synthetic_dir, folder / "data")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        yield folder


@pytest.mark.timeout(600)  # a job that starts twice
def test_an_ordinary_users_run_trains_and_goes_on_after_a_requeue_to_the_same_weights(
    slurm_available: None, home: Path, tmp_path: Path, synthetic_dir: Path
) -> None:
    # This Python and the tree can lie where only root may enter: not on such a cluster.
    with SlurmCluster(hosts=2, root=DEFAULT_ROOT or Path("/")) as cluster:
        hold = Hold(home, HELD_AT, until_told=True)
        for path in (hold.folder, *hold.folder.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        options = [*TRAINING, "--data-dir", str(home / "data"), *hold.options]
        typed(cluster, home, *CLUSTERDDP, "submit", *options, "--run-name", "requeued")
        run = RunDir(home / "jobs/requeued")
        job = str(next(e["job_id"] for e in read_events(run) if e["event"] == "submitted"))
        hold.wait(2)
        train_to(run.path, SAVED_AT)
        typed(cluster, home, "scontrol", "requeue", job)
        hold.release_after_requeue(run)
        assert cluster.wait_job(job) == "COMPLETED", cluster.log_tail()
        report = read_json(run.report)
        assert report is not None
        assert report["weights_sha256"] == weights_in_one_piece(
            tmp_path, synthetic_dir, 2, batch_size=8, max_steps=200, eval_every="1000epochs"
        )
        assert [event["event"] for event in read_events(run)].count("started") == 2
        shown = cluster.run(["scontrol", "show", "job", job], check=True).stdout
        assert f"({NOBODY})" in shown.partition("GroupId")[0]
    assert {path.stat().st_uid for path in home.rglob("*")} == {NOBODY}
