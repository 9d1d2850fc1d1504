"""What the node checks read from NVML, beside what nvidia-smi says of the same GPUs."""

import subprocess

import pytest

from clusterddp.preflight import gpu_state, gpus

_ALL = 1 << 20
"""More GPUs than any machine has, so that all are looked at."""
_FIELDS = "memory.used,pcie.link.width.current,pcie.link.width.max"


def said(*argv: str) -> list[str]:
    answer = subprocess.run(
        ["nvidia-smi", *argv], capture_output=True, text=True, timeout=60, check=True
    )
    return answer.stdout.splitlines()


def number(cell: str) -> int:
    """The number in a cell, which is `[N/A]` where NVML does not support the query."""
    return int(cell) if cell.strip().isdigit() else -1


@pytest.mark.gpu
def test_nvml_is_read_as_nvidia_smi_reads_it() -> None:
    read = gpus.inspect(_ALL, [])
    rows = said(f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    assert len(read) == len(rows)
    for (name, gpu), row in zip(read.items(), rows, strict=True):
        used, lanes, most = map(number, row.split(","))
        assert (gpu.lanes, gpu.max_lanes) == (lanes, most), row
        assert gpu.used_bytes < 0 or abs(gpu.used_bytes / 2**20 - used) < 100, (gpu, row)
        links = [line for line in said("nvlink", "--status", "-i", name) if " Link " in line]
        up = [line for line in links if "GB/s" in line]
        assert (max(gpu.nvlinks, 0), max(gpu.max_nvlinks, 0)) == (len(up), len(links)), links


@pytest.mark.gpu
def test_a_healthy_gpu_has_no_fault() -> None:
    read = gpus.inspect(_ALL, [])
    assert (gpu_state.fabric_fault(read), gpu_state.link_fault(read)) == ("", ""), read
