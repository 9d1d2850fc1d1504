"""State of a GPU before a job: memory in use, fabric, NVLinks and PCIe lanes.

Names, numbers and structures come from nvml.h (NVIDIA's NVML API Reference Guide). If the driver or
the GPU does not support a query, its figures are unknown and not a fault.
"""

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp.formatting import join_limited, line, memory

HELD_BYTES = 1 << 30
"""Memory in use above which a GPU is not free: more than a driver or a daemon of the site uses."""
_MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS."""
_MAX_PROCESSES = 64
_UNKNOWN_BYTES = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE."""
_COMPLETED = 3
"""NVML_GPU_FABRIC_STATE_COMPLETED."""
_INCOMPLETE = {1: "has not started", 2: "is in progress"}
"""NVML_GPU_FABRIC_STATE_NOT_STARTED and _IN_PROGRESS."""
_UNHEALTHY = {0: "reduced bandwidth", 4: "an unhealthy route"}
"""Shifts in NVML_GPU_FABRIC_HEALTH_MASK_*, two bits each, of which 1 means true."""
_CONFIGURED, _CONFIGURED_MASK = 8, 0xF
"""Shift and mask of the same for an incorrect configuration: 2 and more are its reasons."""
_MAX_NAMED = 2


@dataclass(frozen=True)
class Reading:
    """Figures of a GPU, whole or a part of one (MIG); -1 means unknown."""

    used_bytes: int = -1
    """Memory in use, without what the driver reserves."""
    processes: tuple[tuple[int, int], ...] = ()
    """Id and bytes of each process that the driver names."""
    lanes: int = -1
    """PCIe lanes in use. Their speed is not read, because an idle GPU lowers it."""
    max_lanes: int = -1
    """PCIe lanes of the GPU and its slot."""
    nvlinks: int = -1
    """NVLinks that are up."""
    max_nvlinks: int = -1
    fabric_state: int = 0
    """Registration with the NVSwitches; 0 without any."""
    fabric_status: int = 0
    """NVML's error of a completed registration."""
    fabric_health: int = 0


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: bytes."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Fabric(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t. After its version it begins like nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


def read(nvml: Any, device: ctypes.c_void_p) -> Reading:
    """Read a GPU's figures. nvml: the loaded library, started. device: NVML's handle.

    With MIG several jobs share a GPU: its figures as a whole stay unknown.
    """
    mig, pending = ctypes.c_uint(), ctypes.c_uint()
    _ask(nvml, "nvmlDeviceGetMigMode", device, ctypes.byref(mig), ctypes.byref(pending))
    if mig.value:
        return Reading()
    used, processes = _memory(nvml, device)
    nvlinks, max_nvlinks = _nvlinks(nvml, device)
    fabric = _fabric(nvml, device)
    return Reading(
        used,
        processes,
        _number(nvml, "nvmlDeviceGetCurrPcieLinkWidth", device),
        _number(nvml, "nvmlDeviceGetMaxPcieLinkWidth", device),
        nvlinks,
        max_nvlinks,
        fabric.state,
        fabric.status,
        fabric.health,
    )


def held_memory(gpus: Mapping[str, Reading], job: str, root: Path = Path("/")) -> str:
    """Return a sentence on GPUs whose memory is in use by others than this job; else empty.

    gpus: by number or UUID. job: this job's id. root: root of the file system with /proc.
    """
    held = []
    for name, gpu in gpus.items():
        others = [(pid, used) for pid, used in gpu.processes if _job(pid, root) != job or not job]
        own = sum(used for _, used in {*gpu.processes} - {*others} if used != _UNKNOWN_BYTES)
        if gpu.used_bytes - own > HELD_BYTES:
            users = join_limited([_owner(pid, root) for pid, _ in others], _MAX_NAMED, ", ")
            by = f"by {users}" if users else "but no process is named"
            held.append(f"GPU {name}: {memory(gpu.used_bytes - own)} in use, {by}")
    return join_limited(held, _MAX_NAMED, "; ")


def fabric_fault(gpus: Mapping[str, Reading]) -> str:
    """Return a sentence on GPUs that are not registered with their NVSwitches; else empty."""
    return _by_fault({name: _fabric_of(gpu) for name, gpu in gpus.items()})


def link_fault(gpus: Mapping[str, Reading]) -> str:
    """Return a sentence on GPUs with fewer PCIe lanes than possible, or fewer NVLinks than others.

    A GPU without any NVLink up may have no bridge, so it passes.
    """
    most = max((gpu.nvlinks for gpu in gpus.values()), default=-1)
    faults = {}
    for name, gpu in gpus.items():
        found = []
        if 0 < gpu.lanes < gpu.max_lanes:
            found.append(f"{gpu.lanes} of {gpu.max_lanes} PCIe lanes")
        if 0 < gpu.nvlinks < most:
            found.append(f"{gpu.nvlinks} NVLinks up, {most} on other GPUs")
        faults[name] = ", ".join(found)
    return _by_fault(faults)


def _by_fault(faults: Mapping[str, str]) -> str:
    """Join faults, `GPU 0, 1: …; GPU 2: …`; empty ones are left out."""
    named: dict[str, list[str]] = {}
    for name, fault in faults.items():
        named.setdefault(fault, []).append(name)
    return "; ".join(
        f"GPU {join_limited(names, _MAX_NAMED, ', ')}: {fault}"
        for fault, names in named.items()
        if fault
    )


def _fabric_of(gpu: Reading) -> str:
    if gpu.fabric_state in _INCOMPLETE:
        return f"its registration with the NVLink fabric {_INCOMPLETE[gpu.fabric_state]}"
    if gpu.fabric_state != _COMPLETED:
        return ""
    if gpu.fabric_status:
        return f"its registration with the NVLink fabric failed (NVML {gpu.fabric_status})"
    health = gpu.fabric_health
    found = [text for shift, text in _UNHEALTHY.items() if health >> shift & 3 == 1]
    if (reason := health >> _CONFIGURED & _CONFIGURED_MASK) > 1:
        found.append(f"an incorrect configuration (reason {reason})")
    return f"its NVLink fabric reports {', '.join(found)}" if found else ""


def _memory(nvml: Any, device: ctypes.c_void_p) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the bytes in use, -1 if unknown, and the processes that use them.

    Unknown too if the kernel manages the memory (GH200, GB200): it keeps pages of ended processes.
    """
    known = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
    if _number(nvml, "nvmlDeviceGetNumaNodeId", device) >= 0:
        return -1, ()
    if not _ask(nvml, "nvmlDeviceGetMemoryInfo_v2", device, ctypes.byref(known)):
        return -1, ()
    count, processes = ctypes.c_uint(_MAX_PROCESSES), (_Process * _MAX_PROCESSES)()
    name = "nvmlDeviceGetComputeRunningProcesses_v3"
    if not _ask(nvml, name, device, ctypes.byref(count), processes):
        return known.used, ()
    return known.used, tuple((each.pid, each.used) for each in processes[: count.value])


def _nvlinks(nvml: Any, device: ctypes.c_void_p) -> tuple[int, int]:
    """Return the numbers of NVLinks that are up and of all; -1 without any."""
    states = [_number(nvml, "nvmlDeviceGetNvLinkState", device, link) for link in range(_MAX_LINKS)]
    known = [state for state in states if state >= 0]
    return (sum(known), len(known)) if known else (-1, -1)


def _fabric(nvml: Any, device: ctypes.c_void_p) -> _Fabric:
    fabric = _Fabric(version=ctypes.sizeof(_Fabric) | 2 << 24)
    if not _ask(nvml, "nvmlDeviceGetGpuFabricInfoV", device, ctypes.byref(fabric)):
        # A driver older than R550 knows only the structure without a version.
        start = _Fabric.cluster.offset
        _ask(nvml, "nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(fabric, start))
    return fabric


def _number(nvml: Any, name: str, *arguments: object) -> int:
    """Return the unsigned number that a query answers; -1 if unknown."""
    answer = ctypes.c_uint()
    return answer.value if _ask(nvml, name, *arguments, ctypes.byref(answer)) else -1


def _ask(nvml: Any, name: str, *arguments: object) -> bool:
    """Return whether the driver has a query and the query succeeds."""
    query = getattr(nvml, name, None)
    return query is not None and not query(*arguments)


def _owner(pid: int, root: Path) -> str:
    """Name a process, `process 4711 (python) of job 1234`; parts not in /proc are left out."""
    name = next(_lines(root / f"proc/{pid}/comm"), "")
    job = _job(pid, root)
    return f"process {pid}{f' ({line(name)})' if name else ''}{f' of job {job}' if job else ''}"


def _job(pid: int, root: Path) -> str:
    """Return the Slurm job of a process by its control group; empty if unknown."""
    for each in _lines(root / f"proc/{pid}/cgroup"):
        if found := re.search(r"/job_(\d+)(/|$)", each):
            return found[1]
    return ""


def _lines(path: Path) -> Iterator[str]:
    with suppress(OSError):
        yield from path.read_text(errors="replace").splitlines()
