import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from clusterddp.errors import TrainingError
from clusterddp.processes.hardware import free_bytes
from clusterddp.request.train_config import TrainConfig
from clusterddp.training.device import (
    ChosenDevice,
    bind_to_numa,
    choose,
    granted_gpus,
    peak_bytes,
    torch_build,
)

# wanted, visible, local rank, granted, driver -> device or words of the error
CASES = [
    ("auto", 4, 0, 4, "NVIDIA", "cuda:0"),
    ("auto", 4, 3, 4, "NVIDIA", "cuda:3"),
    ("cuda", 4, 2, 4, "NVIDIA", "cuda:2"),
    ("auto", 1, 3, 1, "NVIDIA", "cuda:0"),  # each task is shown its own
    ("auto", 2, 3, 2, "NVIDIA", "cuda:1"),  # or its own two of eight, or the two of its socket
    ("auto", 0, 0, 0, "NVIDIA", "cpu"),
    ("auto", 0, 0, 0, "", "cpu"),
    ("cpu", 4, 1, 4, "NVIDIA", "cpu"),
    ("cpu", 0, 1, 0, "", "cpu"),
    ("cuda", 0, 0, 0, "", "torch sees no GPU"),
    ("cuda", 0, 0, 2, "", "2 GPUs were granted, but torch sees no GPU here. Install a CUDA"),
    ("auto", 0, 0, 2, "NVIDIA", "2 GPUs were granted.*--device cpu"),
    ("auto", 0, 0, 2, "", "cpu"),
    ("auto", 0, 0, 2, "AMD", "2 GPUs were granted and AMD.*a ROCm build.*--device cpu"),
    ("auto", 0, 0, 1, "Intel", "1 GPU was granted and Intel.*--device cpu"),
    ("auto", 0, 0, 0, "Intel", "cpu"),  # the display of a workstation
    ("cpu", 0, 0, 2, "AMD", "cpu"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_device_follows_from_what_is_visible(case: tuple[str, int, int, int, str, str]) -> None:
    wanted, visible, local_rank, granted, driver, expected = case

    def chosen() -> ChosenDevice:
        return choose(
            wanted, visible=visible, local_rank=local_rank, granted=granted, driver=driver
        )

    if expected.startswith(("cuda:", "cpu")):
        assert chosen().name == expected
    else:
        with pytest.raises(TrainingError, match=expected):
            chosen()


@pytest.fixture
def binding() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch.numa.binding", reason="this torch has none")
    return module


def test_a_process_is_bound_to_the_cpus_near_its_gpu(
    binding: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    one = min(os.sched_getaffinity(0))
    monkeypatch.setattr(shutil, "which", lambda _: None)  # torch itself looks for numactl
    monkeypatch.setattr(binding, "_get_numa_node_index_for_device_index", lambda **_: 0)
    monkeypatch.setattr(binding, "_get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED",
                        lambda **_: {one, 100_000})  # fmt: skip
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(cpus))
    assert bind_to_numa("node", torch.device("cuda:0")) == ""
    assert bound and all(cpus == {one} for cpus in bound)


def test_a_process_that_cannot_be_bound_goes_on_with_a_warning(
    binding: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find(*, gpu_index: int, numa_options: object) -> set[int]:  # as in an older torch
        return set()

    with monkeypatch.context() as patched:
        patched.setattr(binding, "_get_logical_cpus_to_bind_to", find)
        assert "the task has no CPU near its GPU" in bind_to_numa("node", torch.device("cuda:0"))
        patched.setattr(binding, "_get_logical_cpus_to_bind_to", lambda **_: {10**6})
        assert "has no effect: [Errno 22]" in bind_to_numa("node", torch.device("cuda:0"))
    assert not caplog.records, "torch's traceback, a rank"
    monkeypatch.delattr(binding, "_get_logical_cpus_to_bind_to")
    assert "cannot bind a running process" in bind_to_numa("node", torch.device("cuda:0"))
    monkeypatch.setitem(sys.modules, "torch.numa", None)  # as in torch 2.4
    assert "cannot bind a running process" in bind_to_numa("node", torch.device("cuda:0"))


def test_a_binding_is_one_of_torchs(binding: ModuleType) -> None:
    """A private part of torch, seen in 2.15."""
    for name in ("_get_logical_cpus_to_bind_to",
                 "_bind_all_threads_in_current_process_to_logical_cpus"):  # fmt: skip
        assert hasattr(binding, name), torch.__version__
    for mode in binding.AffinityMode:
        assert TrainConfig(numa_binding=mode.value).to_argv().count(f"--numa-binding={mode.value}")


@pytest.mark.parametrize(
    ("cuda", "hip", "said"),
    [
        ("12.8", None, "for CUDA 12.8"),
        (None, "6.4.1", "for ROCm 6.4.1"),
        (None, None, "for CPUs only"),
    ],
)
def test_the_build_of_torch_is_in_the_refusal(
    cuda: str | None, hip: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    build = f"torch {torch.__version__} (built {said})"
    assert torch_build() == build
    for wanted, driver in (("auto", "AMD"), ("auto", "NVIDIA"), ("cuda", "")):
        with pytest.raises(TrainingError, match=f"{re.escape(build)} sees no"):
            choose(wanted, visible=0, local_rank=0, granted=2, driver=driver, build=build)


def test_granted_gpus_that_stay_idle_are_a_warning() -> None:
    place = {"visible": 0, "local_rank": 0}
    unseen = choose("auto", granted=2, driver="", **place)
    assert unseen.warning == "2 GPUs were granted, but torch sees none: training on the CPU"
    chosen = choose("cpu", granted=1, driver="NVIDIA", **place)
    assert chosen.warning == "1 GPU was granted, but --device cpu leaves them idle"
    assert choose("auto", granted=0, driver="NVIDIA", **place).warning == ""


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f3e"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "0,1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),  # CUDA stops at what is no GPU
        ({"CUDA_VISIBLE_DEVICES": "none"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "MIG-4a1f,MIG-77b2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"SLURM_JOB_GPUS": "0-3,6"}, 5),
        ({"SLURM_STEP_GPUS": "2", "SLURM_JOB_GPUS": "0-3"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": ""}, 0),
    ],
)
def test_granted_gpus_are_counted_from_slurms_variables(
    environ: dict[str, str], count: int
) -> None:
    assert granted_gpus(environ) == count


# A process of its own, as the setting stays: 80 MB asked for and freed, again and again.
_PROGRAM = """
import ctypes, resource, sys
from clusterddp.training import device
if sys.argv[1] == "keep":
    device.keep_freed()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    blocks = [libc.malloc(20 << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)
use(), use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="no glibc")
def test_memory_that_is_freed_and_asked_for_again_costs_no_page_faults() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, mode], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("keep") < 500
    assert faults("give back") > 10_000


MIB = 1 << 20


def host(root: Path, files: dict[str, str]) -> Path:
    """A host with 1,000 MiB available, and these files."""
    meminfo = "MemTotal: 9999999 kB\nMemFree: 5 kB\nMemAvailable: 1024000 kB\n"
    for path, content in {"proc/meminfo": meminfo, **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def limit(folder: str, allowed: str, used: int, cache: int = 0) -> dict[str, str]:
    """Of the unified hierarchy."""
    return {
        f"sys/fs/cgroup/{folder}/memory.max": f"{allowed}\n",
        f"sys/fs/cgroup/{folder}/memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}/memory.stat": (
            f"anon 5\ninactive_file {cache // 2}\nactive_file {cache // 2}\n"
        ),
    }


def test_without_a_limit_it_is_what_the_host_has(tmp_path: Path) -> None:
    assert free_bytes(host(tmp_path, {})) == 1000 * MIB
    assert free_bytes(host(tmp_path, {"proc/self/cgroup": "0::/\n"})) == 1000 * MIB


def test_a_host_that_does_not_tell(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None


def test_the_tightest_limit_above_the_process_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
        **limit("slurm/job_7", str(300 * MIB), 200 * MIB, cache=50 * MIB),
        **limit("slurm/job_7/step_0", "max", 200 * MIB),
        **limit("slurm", str(900 * MIB), 200 * MIB),
        **limit("elsewhere", str(MIB), 0),
    }
    assert free_bytes(host(tmp_path, files)) == 150 * MIB


@pytest.mark.parametrize("controllers", ["memory", "hugetlb,memory"])
def test_a_limit_of_the_older_hierarchy(tmp_path: Path, controllers: str) -> None:
    files = {
        "proc/self/cgroup": f"9:cpu,cpuacct:/job\n4:{controllers}:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(100 * MIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(90 * MIB),
        "sys/fs/cgroup/memory/job/memory.stat": "cache 1\ntotal_inactive_file 1048576\n",
    }
    assert free_bytes(host(tmp_path, files)) == 11 * MIB


@pytest.mark.parametrize("used", [100, 400])
def test_what_is_used_up_leaves_nothing(tmp_path: Path, used: int) -> None:
    files = {"proc/self/cgroup": "0::/job\n", **limit("job", str(100 * MIB), used * MIB)}
    assert free_bytes(host(tmp_path, files)) == 0


def test_the_peak_of_a_process_with_several_gpus_is_that_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {0: 700, 1: 300, 2: 0}.__getitem__)
    assert peak_bytes(torch.device("cuda", 0)) == 1000
