"""Checks a node's NVIDIA GPUs through NVML, the driver's library, without CUDA or torch.

Names, numbers and structures come from nvml.h (NVIDIA's NVML API Reference Guide). Never run on a
GPU: the tests use a fake library.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from clusterddp.preflight import gpu_state
from clusterddp.preflight.gpu_state import Reading

LIBRARY = "libnvidia-ml.so.1"
_NOT_FOUND = 6
"""NVML_ERROR_NOT_FOUND."""
_WHOLE_UUID = len("GPU-01234567-89ab-cdef-0123-456789abcdef")
_XID_EVENT = 0x8
"""nvmlEventTypeXidCriticalError."""
_UNCORRECTED, _VOLATILE = 1, 0
"""nvmlMemoryErrorType_t, nvmlEccCounterType_t: errors since the driver was loaded."""
_SLOWED = {0x8: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
"""Bits of nvmlClocksThrottleReason* that no healthy idle GPU sets."""


class _Event(ctypes.Structure):
    """nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def check(granted: int, visible: Sequence[str], library: Any = None) -> tuple[int, str]:
    """Return how many GPUs answer (-1 without NVML), and the faults of the job's GPUs.

    granted: the job's GPUs on this node; with 0, nothing is checked. visible: the numbers and UUIDs
    in CUDA_VISIBLE_DEVICES. They select the job's GPUs if the node shows more, or if they are parts
    of GPUs (MIG); without them none is checked, because it may belong to another job.
    """
    if not granted:
        return -1, ""
    try:
        with _started(library) as (nvml, count):
            names = _names(count, granted, visible)
            if not names:
                return granted, ""
            faults = [(name, _fault(nvml, name)) for name in names]
    except OSError as error:
        return -1, str(error)
    lost = sum(fault.startswith("does not answer") for _, fault in faults)
    return len(names) - lost, "; ".join(f"GPU {n} {fault}" for n, fault in faults if fault)


def inspect(granted: int, visible: Sequence[str], library: Any = None) -> dict[str, Reading]:
    """Return the figures of the job's GPUs that answer, as `check` chooses them, by their names."""
    readings = {}
    with contextlib.suppress(OSError), _started(library) as (nvml, count):
        for name in _names(count, granted, visible):
            device, code = _device(nvml, name)
            if not code:
                readings[name] = gpu_state.read(nvml, device)
    return readings


@contextlib.contextmanager
def _started(library: Any) -> Iterator[tuple[Any, int]]:
    """Start NVML and yield it with its number of GPUs. Raises OSError with the reason if absent."""
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise OSError(f"no NVML: {error}") from None
    if code := nvml.nvmlInit_v2():
        raise OSError(f"NVML does not start (nvmlInit_v2: {code})")
    try:
        count = ctypes.c_uint()
        if code := nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            raise OSError(f"NVML counts no GPUs (nvmlDeviceGetCount_v2: {code})")
        yield nvml, count.value
    finally:
        nvml.nvmlShutdown()


def _names(count: int, granted: int, visible: Sequence[str]) -> list[str]:
    """Return the numbers or UUIDs of the job's GPUs; none if unknown. count: GPUs that NVML has."""
    names = [str(number) for number in range(count)]
    if count > granted or any(name.startswith("MIG-") for name in visible):
        uuids = [name for name in visible if name.startswith(("GPU-", "MIG-"))]
        return [name for name in names if name in visible] + uuids
    return names


def _device(nvml: Any, name: str) -> tuple[ctypes.c_void_p, int]:
    """Return NVML's handle of a GPU, and NVML's error. name: its number or UUID."""
    device = ctypes.c_void_p()
    if name.isdigit():
        return device, nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device))
    return device, nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))


def _fault(nvml: Any, name: str) -> str:
    """Return the faults of a GPU; queries that it does not support are skipped.

    For a UUID, only NOT_FOUND concerns this GPU: NVML reports a lost GPU (15) for any GPU on the
    node, and may not know a part of a GPU or a shortened UUID.
    """
    device, code = _device(nvml, name)
    if code:
        is_gone = code == _NOT_FOUND and name.startswith("GPU-") and len(name) == _WHOLE_UUID
        # 15: it fell off the bus
        return f"does not answer (NVML {code})" if name.isdigit() or is_gone else ""
    faults = []
    errors = ctypes.c_ulonglong()
    failed = nvml.nvmlDeviceGetTotalEccErrors(device, _UNCORRECTED, _VOLATILE, ctypes.byref(errors))
    if not failed and errors.value:
        faults.append(f"has {errors.value} uncorrected ECC errors")
    corrected, uncorrected, pending, broken = (ctypes.c_uint() for _ in range(4))
    counters = map(ctypes.byref, (corrected, uncorrected, pending, broken))
    if not nvml.nvmlDeviceGetRemappedRows(device, *counters):
        if broken.value:
            faults.append("failed to remap a memory row")
        elif pending.value:
            faults.append("needs a reset to remap a memory row")
    reasons = ctypes.c_ulonglong()
    if not nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(reasons)):
        faults += [f"reports {name}" for bit, name in _SLOWED.items() if reasons.value & bit]
    if xid := _xid(nvml, device):
        faults.append(f"raised Xid {xid}")
    return ", ".join(faults)


def _xid(nvml: Any, device: ctypes.c_void_p) -> int:
    """Return the Xid that a GPU raises during the check, or 0."""
    events, event = ctypes.c_void_p(), _Event()
    if nvml.nvmlEventSetCreate(ctypes.byref(events)):
        return 0
    try:
        if nvml.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(_XID_EVENT), events):
            return 0
        silent = nvml.nvmlEventSetWait_v2(events, ctypes.byref(event), 10)  # ms
        return 0 if silent else int(event.data)
    finally:
        nvml.nvmlEventSetFree(events)
