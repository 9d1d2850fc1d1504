"""Processors of this machine: the number of GPUs to train on, and the models' names."""

import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

_NVIDIA = Path("/proc/driver/nvidia")
NVIDIA_DRIVER = (_NVIDIA / "version", Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files of which a host with an NVIDIA driver has one: a sandbox such as gVisor can have the device
alone, and WSL 2 the library of the driver that Windows has."""
AMD_DEVICE = Path("/dev/kfd")
_CPUS = Path("/proc/cpuinfo")


def has_nvidia_driver() -> bool:
    """Return whether this host has an NVIDIA driver."""
    return any(path.exists() for path in NVIDIA_DRIVER)


def gpu_driver(root: Path = Path("/")) -> str:
    """Return whose GPUs this host has a driver for: NVIDIA, AMD, Intel, or empty for nobody's.

    root: of the file system to read for AMD's and Intel's.
    """
    if has_nvidia_driver():
        return "NVIDIA"
    if (root / AMD_DEVICE.relative_to("/")).exists():
        return "AMD"
    for vendor in (root / "sys/class/drm").glob("renderD*/device/vendor"):
        with suppress(OSError):
            if vendor.read_text().strip() == "0x8086":  # PCI's number of Intel
                return "Intel"
    return ""


def visible_gpus() -> int:
    """Count the GPUs that torch sees, in a process of its own, where there is a driver."""
    if not has_nvidia_driver():
        return 0
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return int(answer) if answer.isdigit() else 0


def described(kind: str) -> str:
    """Give `2 x Intel(R) Xeon(R) Gold 6330`, for kind `cpu` or `cuda`; empty where unknown."""
    if kind == "cuda":
        infos = _NVIDIA.glob("gpus/*/information")
        return ", ".join(
            f"{count} x {name}" for name, count in Counter(map(_model, infos)).items() if name
        )
    name = _model(_CPUS)
    return f"{len(os.sched_getaffinity(0))} x {name}" if name else ""


def _model(path: Path) -> str:
    """Read the first `model name : …` or `Model: …` of a file of /proc."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, colon, value = line.partition(":")
        if colon and key.strip() in ("model name", "Model"):
            return value.strip()
    return ""
