"""Checks a node's AMD GPUs through the files of the amdgpu driver, which rocm-smi reads, too.

The driver shows a process only the GPUs that its device cgroup permits. Files: topology/nodes/N of
/sys/class/kfd/kfd, proc/PID/vram_GPU there, and /sys/class/drm/renderDN/device (Linux,
Documentation/gpu/amdgpu). Tested only with a copy of these files, never on a GPU.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from clusterddp.preflight.gpu_state import Reading

_KFD = "sys/class/kfd/kfd"


def check(granted: int, root: Path = Path("/")) -> tuple[int, str]:
    """Return how many GPUs the driver shows, and the faults of the job's GPUs.

    granted: the job's GPUs on this node. If more are shown, none is checked, because it may belong
    to another job. root: root of the file system.
    """
    devices = [device for _, device in _gpus(root)]
    if len(devices) > granted:
        return granted, ""
    faults = []
    for name, device in enumerate(devices):
        if errors := re.search(r"^ue: *([1-9]\d*)", _text(device / "ras/umc_err_count"), re.M):
            faults.append(f"GPU {name} has {errors[1]} uncorrected ECC errors")
    return len(devices), "; ".join(faults)


def inspect(granted: int, root: Path = Path("/")) -> dict[str, Reading]:
    """Return the figures of the job's GPUs, as `check` chooses them, by their numbers."""
    shown = list(_gpus(root))
    if len(shown) > granted:
        return {}
    return {
        str(name): Reading(
            _number(device / "mem_info_vram_used"),
            tuple(_processes(root, gpu)),
            _number(device / "current_link_width"),
            _number(device / "max_link_width"),
        )
        for name, (gpu, device) in enumerate(shown)
    }


def _gpus(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the driver's id of each GPU, and its directory of the PCI device."""
    nodes = sorted((root / _KFD / "topology/nodes").glob("[0-9]*"), key=lambda node: int(node.name))
    for node in nodes:
        gpu = _text(node / "gpu_id")
        minor = re.search(r"^drm_render_minor (\d+)$", _text(node / "properties"), re.M)
        if gpu not in ("", "0") and minor:  # 0 is a CPU
            yield gpu, root / f"sys/class/drm/renderD{minor[1]}/device"


def _processes(root: Path, gpu: str) -> Iterator[tuple[int, int]]:
    """Yield the id and the bytes of each process that uses memory of a GPU."""
    for path in (root / _KFD / "proc").glob(f"[0-9]*/vram_{gpu}"):
        if (used := _number(path)) > 0:
            yield int(path.parent.name), used


def _number(path: Path) -> int:
    """Read a number; -1 without one."""
    text = _text(path)
    return int(text) if text.isdigit() else -1


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
