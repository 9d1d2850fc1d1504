"""Scripts of frameworks with the lines of an integration: stopped, they end in the same weights.

Each script of `frameworks` trains on two hosts of two ranks and compares its weights with those of
a training without the lines. tests.on_slurm.campaign does the rest to the same scripts.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest

from clusterddp.run.run_dir import RunDir
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.frameworks.__main__ import train

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
    release = f"import {package}\nprint('with', {package}.__version__)\n"
    (tmp_path / "train.py").write_text(SCRIPTS[package].read_text() + release)
    step = train(cluster, tmp_path, ["train.py"], 8, LONG)
    assert step is not None
    assert 8 <= step < 48
    for rank in range(4):
        log = RunDir(tmp_path / "jobs/own").rank_log(rank).read_text()
        assert log.count("trained on to step") == 1, "what follows has not run in the first attempt"
        assert "trained on to step 48" in log
        assert "the weights are equal" in log
        assert f"with {importlib.metadata.version(package)}" in log
