"""AMD's GPUs, from a copy of the files that the amdgpu driver shows."""

from pathlib import Path

import pytest

from clusterddp.preflight import amd_gpus, probe
from clusterddp.preflight.gpu_state import Reading
from clusterddp.processes import hardware

KFD = "sys/class/kfd/kfd"


def write(root: Path, **files: object) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node with a CPU, two GPUs that are shown and one of another job, which is not."""
    nodes = {0: (0, 0), 1: (15209, 128), 2: (17126, 136), 10: (None, 144)}
    for node, (gpu, minor) in nodes.items():
        directory = tmp_path / KFD / f"topology/nodes/{node}"
        if gpu is None:
            directory.mkdir(parents=True)  # its files answer EPERM
            continue
        write(directory, gpu_id=gpu, properties=f"cpu_cores_count 0\ndrm_render_minor {minor}\n")
        if gpu:
            device = tmp_path / f"sys/class/drm/renderD{minor}/device"
            write(
                device, mem_info_vram_used=4 << 30 if minor == 136 else 300 << 20,
                current_link_width=8 if minor == 128 else 16, max_link_width=16,
                ras__umc_err_count="ue: 0\nce: 7",
            )  # fmt: skip
    write(tmp_path / KFD / "proc/4711", vram_15209=0, vram_17126=3 << 30, pasid=32769)
    write(tmp_path / "dev", kfd="")
    return tmp_path


def test_the_figures_of_the_shown_gpus_are_read(root: Path) -> None:
    assert amd_gpus.check(2, root) == (2, "")
    assert amd_gpus.inspect(2, root) == {
        "0": Reading(300 << 20, lanes=8, max_lanes=16),
        "1": Reading(4 << 30, ((4711, 3 << 30),), lanes=16, max_lanes=16),
    }


def test_of_more_gpus_than_were_granted_none_is_looked_at(root: Path) -> None:
    assert amd_gpus.check(1, root) == (1, "")
    assert amd_gpus.inspect(1, root) == {}


def test_a_missing_gpu_and_uncorrected_errors_are_faults(root: Path, tmp_path: Path) -> None:
    device = root / "sys/class/drm/renderD136/device"
    write(device, ras__umc_err_count="ue: 12\nce: 0")
    assert amd_gpus.check(4, root) == (2, "GPU 1 has 12 uncorrected ECC errors")
    assert amd_gpus.check(4, tmp_path / "none") == (0, "")


def test_the_probe_asks_the_driver_that_the_node_has(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", ())
    monkeypatch.setattr(probe.polling, "GPU_RELEASE_SECONDS", 0.0)
    found = probe.measure_gpus({"SLURM_JOB_ID": "78"}, 2, root)
    assert (found.gpus_seen, found.gpu_fault, found.nvlinks) == (2, "", -1)
    assert found.memory_fault == "GPU 1: 4.0 GiB in use, by process 4711"
    assert found.link_fault == "GPU 0: 8 of 16 PCIe lanes"
