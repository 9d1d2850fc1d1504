"""Cleaning runs on a real Slurm: one that is done, and one that is at work, which goes on."""

import json
from pathlib import Path

import pytest

from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.held import LONG, Hold
from tests.on_slurm.test_life import told, train_to, typed
from tests.on_slurm.test_submit import submit
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # three jobs, and many commands

TRAINING = [
    "--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--warmup-steps", "2",
    "--epochs", "100", "--max-steps", "120", "--save-every", "10steps", "--keep-last", "9",
    "--log-every", "5", "--eval-every", "1000epochs",
]  # fmt: skip


def test_a_run_goes_on_after_it_was_cleaned(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    data = ["--data-dir", str(synthetic_dir)]
    hold = Hold(tmp_path, 45, until_told=True)
    submit(cluster, tmp_path, *TRAINING, *data, "--run-name", "one", env=hold.env)
    run = RunDir(tmp_path / "jobs/one")
    train_to(run.path, 40)
    # Rank 0's sign of life is of up to two seconds ago.
    wait_for(lambda: told(cluster, tmp_path, "one")["seconds_left"], "the time left", LONG)
    status = told(cluster, tmp_path, "one")
    assert (status["state"], status["steps_planned"]) == ("running", 120)
    assert "skipped: 1 running" in typed(cluster, tmp_path, "clean", "--yes").stderr
    at_work = typed(cluster, tmp_path, "clean", "one", "--yes")  # all is its present attempt's
    assert "nothing to remove" in at_work.stderr
    assert typed(cluster, tmp_path, "stop", "one").returncode == 0
    wait_for(lambda: told(cluster, tmp_path, "one")["state"] == "stopped", "the stop", LONG)
    assert "stopped, can resume" in typed(cluster, tmp_path, "clean", "--yes").stderr
    [cleaned] = json.loads(typed(cluster, tmp_path, "clean", "one", "--yes", "--json").stdout)
    assert len([item for item in cleaned["items"] if item["kind"] == "checkpoint"]) >= 3
    assert len(list(run.attempts.rglob("*.pt"))) == 1
    done = typed(cluster, tmp_path, "resume", "one", "--wait")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumes from step" in done.stdout
    assert typed(cluster, tmp_path, "clean", "--yes").returncode == 0
    status = told(cluster, tmp_path, "one")
    assert (status["state"], status["step"], status["percent_done"]) == ("done", 120, 100.0)
    assert "its clusterddp" in status["cleaned"]
    assert not run.bundle.exists()
    listed = typed(cluster, tmp_path, "checkpoints", "one")
    assert listed.stdout.splitlines()[-1].split()[-1] == "verified"
    assert "removed by 'clusterddp clean'" in listed.stderr
    assert "test accuracy" in typed(cluster, tmp_path, "report", "one").stdout
    more = typed(cluster, tmp_path, "resume", "one", "--max-steps", "130", "--wait")
    assert more.returncode == 0, more.stdout + more.stderr
    assert told(cluster, tmp_path, "one")["step"] == 130
    assert [e["event"] for e in read_events(run)].count("cleaned") == 2
