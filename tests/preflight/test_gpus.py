"""GPUs through a stand-in for NVML: no GPU is here."""

import ctypes
from typing import Any

import pytest

from clusterddp.preflight import gpus


class Nvml:
    """NVML with two healthy GPUs, but for what a test changes."""

    def __init__(self, **values: Any) -> None:
        self.values = {"count": 2, "lost": (), "ecc": 0, "rows": (0, 0, 0, 0), "reasons": 1}
        self.values |= {"xid": 0, "init": 0, "uuids": {}, "code": 6, **values}

    def nvmlInit_v2(self) -> int:
        return int(self.values["init"])

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.values["count"]
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, device: Any) -> int:
        device._obj.value = number + 1
        return 15 if number in self.values["lost"] else 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        names = self.values["uuids"]
        device._obj.value = names.get(uuid.decode(), 0) + 1
        return 0 if uuid.decode() in names else int(self.values["code"])

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: int, counter: int, out: Any) -> int:
        assert (kind, counter) == (1, 0)
        if self.values["ecc"] is None:
            return 3  # not supported
        out._obj.value = self.values["ecc"] if device.value == 2 else 0
        return 0

    def nvmlDeviceGetRemappedRows(self, device: Any, *counters: Any) -> int:
        for counter, value in zip(counters, self.values["rows"], strict=True):
            counter._obj.value = value
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, reasons: Any) -> int:
        reasons._obj.value = self.values["reasons"]
        return 0

    def nvmlEventSetCreate(self, events: Any) -> int:
        return 0

    def nvmlDeviceRegisterEvents(self, device: Any, kinds: ctypes.c_ulonglong, events: Any) -> int:
        assert kinds.value == 8
        return 0

    def nvmlEventSetWait_v2(self, events: Any, event: Any, milliseconds: int) -> int:
        event._obj.data = self.values["xid"]
        return 0 if self.values["xid"] else 10

    def nvmlEventSetFree(self, events: Any) -> int:
        return 0


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ({}, (2, "")),
        ({"ecc": None}, (2, "")),
        ({"count": 1}, (1, "")),
        ({"lost": (1,)}, (1, "GPU 1 does not answer (NVML 15)")),
        ({"ecc": 7}, (2, "GPU 1 has 7 uncorrected ECC errors")),
        ({"rows": (9, 0, 0, 0)}, (2, "")),
        ({"count": 1, "rows": (0, 1, 1, 0)}, (1, "GPU 0 needs a reset to remap a memory row")),
        ({"count": 1, "rows": (0, 1, 1, 1)}, (1, "GPU 0 failed to remap a memory row")),
        ({"count": 1, "reasons": 0x48}, (1, "GPU 0 reports hardware slowdown, reports thermal "
                                            "slowdown")),
        ({"count": 1, "xid": 79}, (1, "GPU 0 raised Xid 79")),
        ({"init": 9}, (-1, "NVML does not start (nvmlInit_v2: 9)")),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_gpu(values: dict[str, Any], answer: tuple[int, str]) -> None:
    assert gpus.check(2, ["0", "1"], Nvml(**values)) == answer


def test_of_more_gpus_than_were_granted_the_jobs_are_looked_at() -> None:
    assert gpus.check(2, ["6", "7"], Nvml(count=8, lost=(0, 1, 2, 3, 4, 5))) == (2, "")


FIRST, SECOND = (f"GPU-0123456{n}-89ab-cdef-0123-456789abcdef" for n in (0, 1))


@pytest.mark.parametrize(
    ("values", "visible", "answer"),
    [
        ({"uuids": {FIRST: 4, SECOND: 5}}, [FIRST, SECOND], (2, "")),
        ({"uuids": {FIRST: 0, SECOND: 1}, "ecc": 7}, [FIRST, SECOND],
         (2, f"GPU {SECOND} has 7 uncorrected ECC errors")),
        ({"uuids": {FIRST: 4}}, [FIRST, SECOND], (1, f"GPU {SECOND} does not answer (NVML 6)")),
        # Another job's may be the lost one; a shortened UUID and a part of a GPU may be unknown.
        ({"uuids": {FIRST: 4}, "code": 15}, [FIRST, SECOND], (2, "")),
        ({"uuids": {FIRST: 4}}, [FIRST, SECOND[:12]], (2, "")),
        ({"uuids": {}, "code": 2}, ["MIG-a", "MIG-b"], (2, "")),
        ({"count": 1, "uuids": {"MIG-a": 0}, "ecc": 7}, ["MIG-a", "MIG-b"], (2, "")),
        # Nobody says which are the job's.
        ({}, [""], (2, "")),
        ({}, ["NoDevFiles"], (2, "")),
    ],
)  # fmt: skip
def test_of_gpus_named_by_uuid_or_not_at_all_no_other_jobs_is_looked_at(
    values: dict[str, Any], visible: list[str], answer: tuple[int, str]
) -> None:
    assert gpus.check(2, visible, Nvml(**{"count": 8, "lost": range(8), **values})) == answer


def test_without_granted_gpus_nothing_is_looked_at() -> None:
    assert gpus.check(0, [], object()) == (-1, "")


def test_without_the_library_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "LIBRARY", "libnothing-of-this-name.so.1")
    seen, fault = gpus.check(1, [])
    assert seen == -1
    assert fault.startswith("no NVML: ")
