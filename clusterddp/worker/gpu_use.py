"""Use of a node's GPUs while a COMMAND runs, for programs that report no steps.

Uses NVML in the small parent of the node's first task: no torch, and no context on a GPU. Tested
only with a replacement of the NVML library, never on a GPU.
"""

import ctypes
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from clusterddp.errors import RequestError
from clusterddp.files import write_record
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import VISIBLE_GPUS, host_name
from clusterddp.run.records import GpuUse
from clusterddp.slurm.forms import expand_nodelist

SAMPLE_SECONDS = 5.0
FIRST_RECORD_SECONDS, RECORD_SECONDS = 60.0, 300.0
"""Time until the record is first written, and then again; about a fifth more or less."""
LIBRARY = "libnvidia-ml.so.1"
_GRANTED = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


class _Rates(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sampling period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def watch(
    folder: Path, env: DistEnv, environ: Mapping[str, str], library: str = LIBRARY
) -> Callable[[], None]:
    """Sample the node's GPUs in a thread, if this task is its first one and was granted GPUs.

    folder: directory of the record. Without a driver nothing is recorded. Returns a function that
    ends the samples and records them.
    """
    if env.local_rank or not any(environ.get(name) for name in (VISIBLE_GPUS, *_GRANTED)):
        return lambda: None
    samples = _Samples(folder / f"gpus-{env.rank}.json", host_name(environ))
    target = partial(_sample, samples, environ, library)
    threading.Thread(target=target, name="gpu-use", daemon=True).start()
    return samples.end


class _Samples:
    """Samples of a node's GPUs, kept in memory; the record is written seldom and not synced.

    Hundreds of nodes share its directory, so each waits for a different time.
    """

    def __init__(self, path: Path, host: str) -> None:
        self._path, self._use = path, GpuUse(host)
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._seconds, self._due = 0.0, FIRST_RECORD_SECONDS * random.uniform(0.8, 1.2)

    def add(self, gpus: Sequence["_Gpu"]) -> None:
        """Add a sample of all GPUs."""
        use, count = self._use, self._use.samples

        def mean(before: float, now: Iterable[float]) -> float:
            return round((before * count + fmean(now)) / (count + 1), 4)

        self._use = replace(
            use,
            gpus=len(gpus),
            samples=count + 1,
            utilization=mean(use.utilization, (each.busy for each in gpus)),
            watts=mean(use.watts, (each.watts for each in gpus)),
            peak_memory_bytes=max(use.peak_memory_bytes, *(each.memory for each in gpus)),
        )

    def wait(self) -> bool:
        """Write the record if it is due, then wait for the next sample; False at the end."""
        if self._seconds >= self._due:
            self._due = self._seconds + RECORD_SECONDS * random.uniform(0.8, 1.2)
            with self._writing:
                if not self._ended.is_set():
                    self._write()
        self._seconds += SAMPLE_SECONDS
        return not self._ended.wait(SAMPLE_SECONDS)

    def end(self) -> None:
        """End the samples, and write the record if there are any."""
        self._ended.set()
        with self._writing:
            if self._use.samples:
                self._write()

    def _write(self) -> None:
        with suppress(OSError):  # a full disk: the samples are optional
            write_record(self._path, self._use, sync=False)


def _sample(samples: _Samples, environ: Mapping[str, str], library: str) -> None:
    with suppress(OSError, AttributeError):  # no driver, an old driver
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2():
            return
        devices = list(_devices(nvml, environ))
        while gpus := [gpu for device in devices if (gpu := _read(nvml, device))]:
            samples.add(gpus)
            if not samples.wait():
                return


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


class _Gpu(NamedTuple):
    """Sample of one GPU."""

    busy: float
    """Share of time in which a kernel ran."""
    memory: int
    """Bytes in use; 0 if unknown."""
    watts: float
    """Power draw; 0 if unknown."""


def _read(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> _Gpu | None:
    """Return a sample; None if NVML has no utilization (MIG)."""
    rates, memory, milliwatts = _Rates(), _Memory(), ctypes.c_uint()
    if nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)):
        return None
    nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    nvml.nvmlDeviceGetPowerUsage(device, ctypes.byref(milliwatts))
    return _Gpu(rates.gpu / 100, memory.used, milliwatts.value / 1000)
