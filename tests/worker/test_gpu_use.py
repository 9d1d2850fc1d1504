"""How busy a COMMAND's GPUs are, asked of a stand-in for NVML's library."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clusterddp.files import read
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.run.records import GpuUse
from clusterddp.worker import gpu_use
from tests.waiting import wait_for

# Four GPUs: number N is busy for 10 (N + 1) percent of the time, draws 100 (N + 1) W, and has N
# bytes more than 10 GiB in use.
NVML = """
typedef struct { unsigned gpu, memory; } rates;
typedef struct { unsigned long long total, free, used; } bytes;
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
int nvmlDeviceGetMemoryInfo(void *device, bytes *answer) {
    answer->total = 99ull << 30;
    answer->used = (10ull << 30) + *(int *)device;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    *milliwatts = 100000 * (*(int *)device + 1);
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
    ("environ", "gpus", "share", "last"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, 0.25, 3),
        ({"SLURM_STEP_GPUS": "0,2", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, 0.2, 2),
        ({"SLURM_JOB_GPUS": "2-3"}, 2, 0.35, 3),
        ({"SLURM_STEP_GPUS": "0-3", "SLURM_JOB_GPUS": "0-7"}, 4, 0.25, 3),
        ({"SLURM_STEP_GPUS": "GPU-1a,x[1"}, 4, 0.25, 3),
    ],
)
def test_the_granted_gpus_are_sampled(
    tmp_path: Path, node: DistEnv, environ: dict[str, str], gpus: int, share: float, last: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_use, "FIRST_RECORD_SECONDS", 0.0)
    whole = {"SLURMD_NODENAME": "h02", **environ}
    end = gpu_use.watch(tmp_path, node, whole, library(tmp_path))
    path = tmp_path / "gpus-2.json"
    wait_for(path.exists, "a sample")
    end()
    assert read(GpuUse, path) == GpuUse("h02", gpus, 1, share, 1000 * share, (10 << 30) + last)


def test_hours_of_samples_are_seldom_written_and_never_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of nodes share the directory of the records."""
    written = list[int]()
    write = gpu_use.write_record

    def counted(path: Path, use: GpuUse, **options: bool) -> None:
        written.append(use.samples)
        write(path, use, **options)

    monkeypatch.setattr(gpu_use, "write_record", counted)
    monkeypatch.setattr(os, "fsync", None)
    samples = gpu_use._Samples(tmp_path / "gpus-0.json", "h01")
    monkeypatch.setattr(samples._ended, "wait", lambda _: False)
    for number in range(720):  # an hour
        samples.add([gpu_use._Gpu(number % 2, 1 << 30, 300.0)])
        assert samples.wait()
    assert 9 <= len(written) <= 16 and 9 <= written[0] <= 16
    samples.end()
    assert read(GpuUse, tmp_path / "gpus-0.json") == GpuUse("h01", 1, 720, 0.5, 300.0, 1 << 30)


def test_a_short_command_has_its_samples_recorded_at_its_end(tmp_path: Path) -> None:
    samples = gpu_use._Samples(tmp_path / "gpus-0.json", "h01")
    samples.end()
    assert not (tmp_path / "gpus-0.json").exists()
    samples.add([gpu_use._Gpu(0.5, 0, 0.0)])
    samples.end()
    assert read(GpuUse, tmp_path / "gpus-0.json") == GpuUse("h01", 1, 1, 0.5)


def test_without_a_driver_or_its_answer_nothing_is_recorded(tmp_path: Path, node: DistEnv) -> None:
    granted = {"SLURM_JOB_GPUS": "0"}
    for path in (
        str(tmp_path / "absent.so"), library(tmp_path, init=9), library(tmp_path, rates=3)
    ):  # fmt: skip
        samples = gpu_use._Samples(tmp_path / "gpus-2.json", "h01")
        gpu_use._sample(samples, granted, path)
        samples.end()
    assert not (tmp_path / "gpus-2.json").exists()


def test_a_task_without_gpus_does_not_look(
    tmp_path: Path, node: DistEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_use.threading, "Thread", None)
    gpu_use.watch(tmp_path, node, {"CUDA_VISIBLE_DEVICES": ""})
