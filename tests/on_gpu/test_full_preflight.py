"""The checks of nodes by the ranks of a training, on GPUs and over NCCL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.files import read_json
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import FULL_PREFLIGHT_VARIABLE
from tests.waiting import dying_with_us

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu2)]
)
def test_gpus_multiply_rightly_and_all_reduce(
    ranks: int, gpu_digits: tuple[str, str], tmp_path: Path
) -> None:
    dataset, data_dir = gpu_digits
    done = subprocess.run(
        [
            *(sys.executable, "-m", "clusterddp", "debug", f"--run-dir={tmp_path / 'run'}"),
            *(f"--dataset={dataset}", f"--data-dir={data_dir}", "--max-steps=2"),
            *(f"--procs={ranks}", "--device=cuda"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), FULL_PREFLIGHT_VARIABLE: "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
        preexec_fn=dying_with_us(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    kept = read_json(Attempt(RunDir(tmp_path / "run"), 1).full_preflight)
    assert kept is not None
    assert kept["failed"] == {}
    assert [rank["device"] for rank in kept["ranks"]] == [f"cuda:{n}" for n in range(ranks)]
    assert all(rank["model"] and not rank["fault"] for rank in kept["ranks"])
    assert all(rank["speed"] > 1e11 for rank in kept["ranks"]), "slower than a processor"
    assert (kept["all_reduce"] is None) == (ranks == 1)
