"""Scripts of frameworks with the lines of an integration: stopped, they end in the same weights.

Each script of `frameworks` trains on two hosts of two ranks and compares its weights with those of
a training without the lines. tests.on_slurm.campaign does the rest to the same scripts.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.waiting import wait_for

HERE = Path(__file__).parent
SCRIPTS = {
    "lightning": HERE / "frameworks/train_lightning.py",
    "transformers": HERE / "frameworks/train_transformers.py",
    "accelerate": HERE / "frameworks/train_accelerate.py",
    "torch": HERE / "frameworks/train_iterations.py",
}
"""By the package that a script needs."""
LONG = 240.0


def need(package: str) -> None:
    """Skip without a framework; fail instead where CI wants every test."""
    if importlib.util.find_spec(package):
        return
    message = f"{package} is missing: pip install -e '.[frameworks]'"
    if os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", SCRIPTS)
def test_a_stopped_training_resumes_and_ends_in_the_same_weights(
    cluster: SlurmCluster, tmp_path: Path, package: str
) -> None:
    need(package)
    folder, holds = tmp_path / "work", tmp_path / "holds"
    folder.mkdir()
    holds.mkdir()
    release = f"import {package}\nprint('with', {package}.__version__)\n"
    (folder / "train.py").write_text(SCRIPTS[package].read_text() + release)
    (holds / "want-step-8").write_text("until told")
    hooks = str(HERE / "campaign/hooks")
    paths = os.pathsep.join(filter(None, [hooks, os.environ.get("PYTHONPATH")]))
    done = submit(
        cluster, folder, "--nodes", "2", "--tasks-per-node", "2", "--run-name", "own",
        "--partition", "main", "--no-snapshot", "--json",
        "--env", f"PYTHONPATH={paths}", "--env", f"CAMPAIGN_HOLDS={holds}",
        "--env", "CHECK=1", "--env", "OMP_NUM_THREADS=1",
        "--", sys.executable, "train.py",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(folder / "jobs/own")
    wait_for(lambda: len(list(holds.glob("held-step-8.*"))) == 4, "four ranks at a step", LONG)
    stopped = cluster.run([*CLUSTERDDP, "stop", "own"], cwd=folder, timeout=LONG)
    job_id = json.loads(done.stdout)["job_id"]
    cluster.wait_job(job_id, LONG)
    log = run.job_log.read_text() + run.rank_log(0).read_text()
    [end] = [event for event in read_events(run) if event["event"] == "ended"]
    assert (end["cause"], end["exit_code"], stopped.returncode) == ("stopped", 75, 0), log
    assert "trained on" not in log  # what comes after the training has not run
    again = cluster.run([*CLUSTERDDP, "resume", "own", "--json"], cwd=folder, timeout=LONG)
    assert again.returncode == 0, again.stderr
    assert cluster.wait_job(json.loads(again.stdout)["job_id"], LONG) == "COMPLETED"
    for rank in range(4):
        log = run.rank_log(rank).read_text()
        assert "trained on to step 48" in log
        assert "the weights are equal" in log
        assert f"with {importlib.metadata.version(package)}" in log
    assert 8 <= end["step"] < 48
