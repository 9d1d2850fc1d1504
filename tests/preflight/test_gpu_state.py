"""A GPU's state before a job, from a C library with the structures of nvml.h, and from figures."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clusterddp.preflight import gpu_state, gpus
from clusterddp.preflight.gpu_state import Reading

# Two GPUs. The structures are spelled as in nvml.h, so that the compiler lays them out.
NVML = """
#include <string.h>
#include <unistd.h>
/* No such processes: the kernel has fewer ids. */
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_v2;
typedef struct {
    unsigned char uuid[16]; int status; unsigned clique; unsigned char state;
} fabric_v1;
typedef struct {
    unsigned version; unsigned char uuid[16]; int status; unsigned clique; unsigned char state;
    unsigned health;
} fabric_v2;
#define VERSION(type) (unsigned)(sizeof(type) | 2u << 24)
static int known[2] = {0, 1};
#define SECOND(device) (*(int *)(device) == 1)
static int busy(void) {
    char name[64] = "";
    return !*HOST || (!gethostname(name, sizeof name) && !strcmp(name, HOST));
}
int nvmlDeviceGetTotalEccErrors() { return 3; }
int nvmlDeviceGetRemappedRows() { return 3; }
int nvmlDeviceGetCurrentClocksThrottleReasons() { return 3; }
int nvmlEventSetCreate() { return 3; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &known[index];
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2 *memory) {
    if (memory->version != VERSION(memory_v2)) return 25;
    memory->reserved = 1;
    memory->used = SECOND(device) && busy() ? 3ull << 30 : 5;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_v2 *processes) {
    if (*count < 2) return 7;
    memset(processes, 255, 2 * sizeof(process_v2));
    processes[0] = (process_v2){99999991, 2ull << 30, ~0u, ~0u};
    processes[1] = (process_v2){99999992, 1ull << 30, ~0u, ~0u};
    *count = SECOND(device) ? 2 : 0;
    return 0;
}
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *lanes) { *lanes = 8; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *lanes) { *lanes = 16; return 0; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *state) {
    if (link > 17) return 2;
    *state = !(SECOND(device) && link == 3);
    return 0;
}
#ifdef OLD
int nvmlDeviceGetGpuFabricInfo(void *device, fabric_v1 *fabric) {
    fabric->state = 3; fabric->status = SECOND(device) ? 15 : 0;
    return 0;
}
#else
int nvmlDeviceGetNumaNodeId(void *device, unsigned *node) { return 3; }
int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    *current = *pending = MIG;
    return 0;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, fabric_v2 *fabric) {
    if (fabric->version != VERSION(fabric_v2)) return 25;
    memset(fabric->uuid, 255, 16);
    fabric->clique = ~0u;
    fabric->state = 3; fabric->status = 15; fabric->health = 0x1552;
    return 0;
}
#endif
"""


def compiled(folder: Path, *options: str, host: str = "") -> Path:
    """The library; memory is in use only on this host, if one is named."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("there is no C compiler")
    source, made = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(NVML)
    named = f'-DHOST="{host}"'
    argv = [compiler, "-shared", "-fPIC", named, *options, "-o", str(made), str(source)]
    subprocess.run(argv, check=True, timeout=60)
    return made


def library(folder: Path, *options: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled(folder, *options)))


def test_the_structures_are_laid_out_as_the_drivers(tmp_path: Path) -> None:
    read = gpus.inspect(2, [], library(tmp_path, "-DMIG=0"))
    same: dict[str, Any] = {"lanes": 8, "max_lanes": 16, "max_nvlinks": 18}
    same |= {"fabric_state": 3, "fabric_status": 15, "fabric_health": 0x1552}
    processes = ((99999991, 2 << 30), (99999992, 1 << 30))
    assert read == {
        "0": Reading(5, nvlinks=18, **same),
        "1": Reading(3 << 30, processes, nvlinks=17, **same),
    }


def test_an_older_driver_has_another_structure_and_fewer_queries(tmp_path: Path) -> None:
    read = gpus.inspect(2, [], library(tmp_path, "-DOLD"))
    assert [(gpu.fabric_state, gpu.fabric_status) for gpu in read.values()] == [(3, 0), (3, 15)]
    assert read["1"].used_bytes == 3 << 30


def test_of_a_gpu_that_mig_divides_nothing_is_read_as_a_whole(tmp_path: Path) -> None:
    assert gpus.inspect(2, [], library(tmp_path, "-DMIG=1")) == {"0": Reading(), "1": Reading()}


def test_memory_that_the_kernel_manages_is_unknown() -> None:
    class Nvml:
        def nvmlDeviceGetNumaNodeId(self, device: Any, node: Any) -> int:
            return 0

        def nvmlDeviceGetMemoryInfo_v2(self, device: Any, memory: Any) -> int:
            memory._obj.used = 1 << 40
            return 0

    assert gpu_state.read(Nvml(), ctypes.c_void_p()) == Reading()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with /proc: 4711 of job 77, 4712 of job 78, 4713 of none; 4714 is not shown."""
    groups = {
        4711: "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0",
        4712: "4:memory:/slurm/uid_1000/job_78/step_batch\n1:name=systemd:/user.slice",
        4713: "0::/user.slice/user-1000.slice",
    }
    for pid, group in groups.items():
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cgroup").write_text(f"{group}\n")
        (tmp_path / f"proc/{pid}/comm").write_text("py\x1b[31mthon\n")
    return tmp_path


@pytest.mark.parametrize(
    ("used", "processes", "said"),
    [
        (-1, (), ""),
        (1 << 30, (), ""),
        (4 << 30, (), "GPU 3: 4.0 GiB in use, but no process is named"),
        (4 << 30, ((4711, 3 << 29),), "GPU 3: 4.0 GiB in use, by process 4711 (py\\x1b[31mthon) "
                                      "of job 77"),
        (4 << 30, ((4713, 1 << 30), (4714, 1), (1, 1)), "GPU 3: 4.0 GiB in use, by process 4713 "
         "(py\\x1b[31mthon), process 4714 and 1 more"),
        # 78 is this job.
        (4 << 30, ((4712, 7 << 29),), ""),
        (9 << 30, ((4712, 7 << 29), (4714, 2**64 - 1)), "GPU 3: 5.5 GiB in use, by process 4714"),
    ],
)  # fmt: skip
def test_memory_in_use_before_the_job_is_said_with_its_users(
    root: Path, used: int, processes: tuple[tuple[int, int], ...], said: str
) -> None:
    assert gpu_state.held_memory({"3": Reading(used, processes)}, "78", root) == said


def test_without_a_job_of_its_own_nobody_is_left_out(root: Path) -> None:
    gpu = Reading(4 << 30, ((4713, 4 << 30),))
    assert "process 4713" in gpu_state.held_memory({"0": gpu}, "", root)


@pytest.mark.parametrize(
    ("state", "status", "health", "said"),
    [
        (0, 0, 0, ""),
        (3, 0, 0, ""),
        (3, 0, 0x21AA, ""),  # every mask says healthy
        (1, 0, 0, "its registration with the NVLink fabric has not started"),
        (2, 15, 0, "its registration with the NVLink fabric is in progress"),
        (3, 15, 0, "its registration with the NVLink fabric failed (NVML 15)"),
        (3, 0, 0x0011, "its NVLink fabric reports reduced bandwidth, an unhealthy route"),
        (3, 0, 0x0522, "its NVLink fabric reports an incorrect configuration (reason 5)"),
    ],
)
def test_a_fabric_that_is_not_complete_is_said(
    state: int, status: int, health: int, said: str
) -> None:
    gpu = Reading(fabric_state=state, fabric_status=status, fabric_health=health)
    expected = f"GPU 0, 1: {said}" if said else ""
    assert gpu_state.fabric_fault({"0": gpu, "1": gpu, "2": Reading(fabric_state=3)}) == expected


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({}, ""),
        ({"lanes": 16, "max_lanes": 16, "nvlinks": 18, "max_nvlinks": 18}, ""),
        ({"lanes": 8, "max_lanes": 16}, "GPU 0: 8 of 16 PCIe lanes"),
        ({"nvlinks": 17, "max_nvlinks": 18}, "GPU 0: 17 NVLinks up, 18 on other GPUs"),
        ({"nvlinks": 0, "max_nvlinks": 18}, ""),  # perhaps a GPU without a bridge
    ],
)
def test_a_gpu_with_fewer_lanes_or_links_is_named(figures: dict[str, int], said: str) -> None:
    others = Reading(lanes=16, max_lanes=16, nvlinks=18, max_nvlinks=18)
    assert gpu_state.link_fault({"0": Reading(**figures), "1": others}) == said


def test_links_that_are_down_on_all_gpus_are_left_to_the_other_nodes() -> None:
    gpu = Reading(nvlinks=10, max_nvlinks=12)
    assert gpu_state.link_fault({"0": gpu, "1": gpu}) == ""
