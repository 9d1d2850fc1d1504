"""Checks a node's NVIDIA GPUs through NVML, the driver's library, without CUDA or torch.

Names, numbers and structures come from nvml.h (NVIDIA's NVML API Reference Guide). Never run on a
GPU: the tests use a fake library.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

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
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError as error:
        return -1, f"no NVML: {error}"
    if code := nvml.nvmlInit_v2():
        return -1, f"NVML does not start (nvmlInit_v2: {code})"
    try:
        count = ctypes.c_uint()
        if code := nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return -1, f"NVML counts no GPUs (nvmlDeviceGetCount_v2: {code})"
        names = [str(number) for number in range(count.value)]
        if count.value > granted or any(name.startswith("MIG-") for name in visible):
            uuids = [name for name in visible if name.startswith(("GPU-", "MIG-"))]
            names = [name for name in names if name in visible] + uuids
            if not names:
                return granted, ""
        faults = [(name, _fault(nvml, name)) for name in names]
        lost = sum(fault.startswith("does not answer") for _, fault in faults)
        return len(names) - lost, "; ".join(f"GPU {n} {fault}" for n, fault in faults if fault)
    finally:
        nvml.nvmlShutdown()


def _fault(nvml: Any, name: str) -> str:
    """Return the faults of a GPU; queries that it does not support are skipped.

    name: its number or UUID. For a UUID, only NOT_FOUND concerns this GPU: NVML reports a lost GPU
    (15) for any GPU on the node, and may not know a part of a GPU or a shortened UUID.
    """
    device = ctypes.c_void_p()
    if name.isdigit():
        if code := nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device)):
            return f"does not answer (NVML {code})"  # 15: it fell off the bus
    elif code := nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device)):
        is_gone = code == _NOT_FOUND and name.startswith("GPU-") and len(name) == _WHOLE_UUID
        return f"does not answer (NVML {code})" if is_gone else ""
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
