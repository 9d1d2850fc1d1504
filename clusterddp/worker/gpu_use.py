"""GPU utilization of a node while a COMMAND runs, for programs that report no steps.

Uses NVML in the small parent of the node's first task: no torch, and no context on a GPU. Tested
only with a replacement of the NVML library, never on a GPU.
"""

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from clusterddp.errors import RequestError
from clusterddp.files import write_record
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import VISIBLE_GPUS, host_name
from clusterddp.run.records import GpuUse
from clusterddp.slurm.forms import expand_nodelist

SAMPLE_SECONDS = 5.0
LIBRARY = "libnvidia-ml.so.1"
_GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


class _Rates(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def watch(folder: Path, env: DistEnv, environ: Mapping[str, str], library: str = LIBRARY) -> None:
    """Sample the node's GPUs in a thread, if this task is its first one and was granted GPUs.

    folder: directory of the record, which is rewritten with each sample. Without a driver nothing
    is recorded.
    """
    if env.local_rank == 0 and any(environ.get(name) for name in (VISIBLE_GPUS, *_GRANTED)):
        arguments = (folder / f"gpus-{env.rank}.json", environ, library)
        threading.Thread(target=_sample, args=arguments, name="gpu-use", daemon=True).start()


def _sample(path: Path, environ: Mapping[str, str], library: str) -> None:
    # No driver, an old driver, a full disk: the samples are optional.
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2():
            return
        devices = list(_devices(nvml, environ))
        samples, total = 0, 0.0
        while busy := [rate for device in devices if (rate := _busy(nvml, device)) is not None]:
            samples += 1
            total += sum(busy) / len(busy)
            share = round(total / samples, 4)
            write_record(path, GpuUse(host_name(environ), len(busy), samples, share))
            time.sleep(SAMPLE_SECONDS)


def _devices(nvml: ctypes.CDLL, environ: Mapping[str, str]) -> Iterator[ctypes.c_void_p]:
    """Yield NVML's handles of the GPUs that the job was granted on this node.

    With cgroups NVML shows only these. Otherwise Slurm's indices are NVML's indices, provided that
    Slurm detected the GPUs with NVML or in bus order.
    """
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return
    granted = next((environ[name] for name in _GRANTED if environ.get(name)), "")
    numbers = list(range(count.value))
    with suppress(RequestError, ValueError):
        named = [int(number) for number in expand_nodelist(f"[{granted}]")]
        if named and len(named) < len(numbers):
            numbers = [number for number in named if number < count.value]
    for number in numbers:
        device = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(device)):
            yield device


def _busy(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> float | None:
    """Return the share of time in which a kernel ran; None if NVML has no value (MIG)."""
    rates = _Rates()
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)):
        return None
    percent: int = rates.gpu
    return percent / 100
