"""How busy a COMMAND's GPUs are, asked of a stand-in for NVML's library."""

import shutil
import subprocess
from pathlib import Path

import pytest

from clusterddp.files import read
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.records import GpuUse
from clusterddp.worker import gpu_use
from tests.waiting import wait_for

# Four GPUs: number N is busy for 10 (N + 1) percent of the time.
NVML = """
typedef struct { unsigned gpu, memory; } rates;
static int known[4] = {0, 1, 2, 3};
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index > 3) return 2;
    *device = &known[index];
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, rates *answer) {
    if (RATES) return RATES;
    answer->gpu = 10 * (*(int *)device + 1);
    answer->memory = 99;
    return 0;
}
"""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> DistEnv:
    monkeypatch.setattr(gpu_use, "SAMPLE_SECONDS", 3600.0)  # one sample
    return DistEnv.from_environ(
        {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "h01", "MASTER_PORT": "29500"}
    )  # fmt: skip


def library(folder: Path, init: int = 0, rates: int = 0) -> str:
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("there is no C compiler")
    source, made = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(NVML)
    values = [f"-DINIT={init}", f"-DRATES={rates}"]
    argv = [compiler, "-shared", "-fPIC", *values, "-o", str(made), str(source)]
    subprocess.run(argv, check=True, timeout=60)
    return str(made)


@pytest.mark.parametrize(
    ("environ", "gpus", "share"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, 0.25),
        ({"SLURM_STEP_GPUS": "1,3", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, 0.3),
        ({"SLURM_JOB_GPUS": "2-3"}, 2, 0.35),
        ({"SLURM_STEP_GPUS": "0-3", "SLURM_JOB_GPUS": "0-7"}, 4, 0.25),
        ({"SLURM_STEP_GPUS": "GPU-1a,x[1"}, 4, 0.25),
    ],
)
def test_the_granted_gpus_are_sampled(
    tmp_path: Path, node: DistEnv, environ: dict[str, str], gpus: int, share: float
) -> None:
    whole = {"SLURMD_NODENAME": "h02", **environ}
    gpu_use.watch(tmp_path, node, whole, library(tmp_path))
    path = tmp_path / "gpus-2.json"
    wait_for(path.exists, "a sample")
    assert read(GpuUse, path) == GpuUse("h02", gpus, 1, share)


def test_without_a_driver_or_its_answer_nothing_is_recorded(tmp_path: Path, node: DistEnv) -> None:
    granted = {"SLURM_JOB_GPUS": "0"}
    for path in (
        str(tmp_path / "absent.so"), library(tmp_path, init=9), library(tmp_path, rates=3)
    ):  # fmt: skip
        gpu_use._sample(tmp_path / "gpus-2.json", granted, path)
    assert not (tmp_path / "gpus-2.json").exists()


def test_a_task_without_gpus_does_not_look(
    tmp_path: Path, node: DistEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_use.threading, "Thread", None)
    gpu_use.watch(tmp_path, node, {"CUDA_VISIBLE_DEVICES": ""})
