"""What every test starts from: no settings or ranks of the surrounding shell, and datasets."""

import importlib.util
import os
from pathlib import Path

import pytest

# Before absl, which TensorBoard brings along: as it sets logging up, submitit closes all handlers,
# and absl's one would close the stream that pytest captures.
import submitit  # noqa: F401

from clusterddp.forms import RANK_VARIABLES
from clusterddp.training.synthetic import synthesise

_SETTINGS = ("CLUSTERDDP_", "SBATCH_", "SLURM_", "SRUN_", "SALLOC_", "PMI_", "TORCHELASTIC_")
_MNIST = "CLUSTERDDP_TEST_MNIST"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell in which nothing was set up, also when the tests run inside a Slurm job."""
    for name in list(os.environ):
        if name in RANK_VARIABLES or (
            name.startswith(_SETTINGS) and not name.startswith("CLUSTERDDP_TEST")
        ):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """A data folder with the real MNIST; skips where there is none."""
    default = Path(__file__).parents[2] / "shared" / "data"
    path = Path(os.environ.get(_MNIST) or default)
    if not (path / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        pytest.skip(f"no MNIST at {path}; name a folder that holds MNIST/raw in {_MNIST}")
    return path


@pytest.fixture(scope="session")
def synthetic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with 2,000 and 500 synthetic digits; not to be written to."""
    path = tmp_path_factory.mktemp("data")
    synthesise(str(path), train_images=2_000, test_images=500, progress=print)
    return path


@pytest.fixture(scope="session")
def keras_installed() -> None:
    """Skips where Keras is not installed; fails instead where nothing may be skipped, as in CI."""
    if importlib.util.find_spec("keras"):
        return
    message = "Keras is not installed. To run these tests: pip install 'clusterddp[keras]'"
    if os.environ.get("CLUSTERDDP_REQUIRE_SLURM") == "1":
        pytest.fail(message)
    pytest.skip(message)
