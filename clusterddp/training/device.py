"""Chooses the device of a rank, and reads the memory of its task and host.

Under Slurm CUDA_VISIBLE_DEVICES holds the GPUs of the node, of the task or of its socket, and CUDA
numbers the visible ones from 0. The variable does not show which case applies: the ranks compare
their GPUs' identifiers when they meet. Imports without torch.
"""

import ctypes
import inspect
import re
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterddp.errors import TrainingError
from clusterddp.ranks.variables import VISIBLE_GPUS, named_gpus

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MAX_MMAP_THRESHOLD = 32 << 20  # glibc's maximum on 64 bits (HEAP_MAX_SIZE / 2)


@dataclass(frozen=True)
class ChosenDevice:
    """Device of a rank, and a warning for the user."""

    kind: str
    """`cuda` or `cpu`."""
    index: int = 0
    """Number among the visible GPUs."""
    warning: str = ""

    @property
    def name(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"


def choose(
    wanted: str, *, visible: int, local_rank: int, granted: int, driver: str, build: str = "torch"
) -> ChosenDevice:
    """Choose for `--device wanted` from the GPUs that torch sees (`visible`) and Slurm `granted`.

    driver: vendor of the host's GPU driver, from `hardware.gpu_driver`. build: torch's, with its
    version. Raises TrainingError if
    CUDA is wanted and absent, or if GPUs were granted on a host with a driver but torch sees none:
    a CPU run would waste them.
    """
    if wanted == "cpu":
        return ChosenDevice("cpu", warning=_unused(granted, "--device cpu leaves them idle"))
    if visible == 0:
        if wanted == "cuda":
            given = f"{_gpus(granted)} granted, but " if granted else ""
            ask = "" if granted else "Ask Slurm for GPUs (--gpus-per-node), install "
            raise TrainingError(
                f"--device cuda: {given}{build} sees no GPU here. {ask or 'Install '}a CUDA build "
                "of torch that matches the driver, or use --device cpu. [CD0804]"
            )
        if granted and driver not in ("", "NVIDIA"):
            way = (
                "Install a ROCm build of torch for this interpreter"
                if driver == "AMD"
                else ("clusterddp trains only on NVIDIA and AMD GPUs: ask for a node with those")
            )
            raise TrainingError(
                f"{_gpus(granted)} granted and {driver}'s driver is installed, but {build} sees "
                f"none: this build does not support them. {way}, or train on the CPU with "
                "--device cpu. [CD0804]"
            )
        if granted and driver:
            raise TrainingError(
                f"{_gpus(granted)} granted and the NVIDIA driver is installed, but {build} sees "
                "none: it is a CPU-only build, it does not match the driver, or "
                "CUDA_VISIBLE_DEVICES names a GPU twice or a missing one. Install a CUDA build of "
                "torch for this interpreter, or train on the CPU with --device cpu. [CD0804]"
            )
        return ChosenDevice("cpu", warning=_unused(granted, "torch sees none: training on the CPU"))
    # More ranks than GPUs are valid if each task sees only its own GPU.
    return ChosenDevice("cuda", local_rank % visible)


def torch_build() -> str:
    """Describe torch's build: `torch 2.8.0 (built for CUDA 12.8)`."""
    import torch

    # A ROCm build has no CUDA version, and a CPU-only build has neither.
    cuda, rocm = torch.version.cuda, torch.version.hip
    built = f"for CUDA {cuda}" if cuda else f"for ROCm {rocm}" if rocm else "for CPUs only"
    return f"torch {torch.__version__} (built {built})"


def bind_to_numa(mode: str, device: "torch.device") -> str:
    """Bind this process to the CPUs near its GPU, as torchrun's --numa-binding does.

    mode: one of torch's AffinityMode, for example `node`. Returns a warning on a CPU and if torch
    cannot bind a running process.
    """
    if device.type != "cuda":
        return f"--numa-binding {mode} has no effect: this rank computes on the CPU"
    import torch

    try:
        from torch.numa import binding

        # What torch does to its own processes, in 2.15, without asking for the numactl command:
        # only the programs that it starts need that. Older releases name the GPU's index otherwise.
        find, bind = (
            binding._get_logical_cpus_to_bind_to,
            binding._bind_all_threads_in_current_process_to_logical_cpus,
        )
        name = next(iter(inspect.signature(find).parameters))
        options = binding.NumaOptions(binding.AffinityMode(mode))
        cpus = find(**{name: device.index}, numa_options=options)
        if not cpus:
            return f"--numa-binding {mode} has no effect: the task has no CPU near its GPU"
        bind(logical_cpu_indices=cpus)
    except (ImportError, AttributeError):
        return f"--numa-binding {mode}: torch {torch.__version__} cannot bind a running process"
    except Exception as error:  # no /sys, GPUs of more kinds than torch expects …
        return f"--numa-binding {mode} has no effect: {error}"
    return ""


def computes_in_bf16(kind: str) -> bool:
    """Return whether the device has instructions for bf16; emulation is slow."""
    import torch

    if kind == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)  # Ampere, the first with bf16 cores
    # Only newer versions of torch report it; with an older one auto stays at fp32.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def granted_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that Slurm gave this task, from its variables."""
    if VISIBLE_GPUS in environ:
        return len(named_gpus(environ[VISIBLE_GPUS]))
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name):
            return sum(_length(part) for part in environ[name].split(","))
    count = environ.get("SLURM_GPUS_ON_NODE", "0")
    return int(count) if count.isdigit() else 0


def _length(part: str) -> int:
    span = re.fullmatch(r"(\d+)-(\d+)", part)
    return int(span[2]) - int(span[1]) + 1 if span else 1


def _unused(granted: int, why: str) -> str:
    return f"{_gpus(granted)} granted, but {why}" if granted else ""


def _gpus(count: int) -> str:
    return "1 GPU was" if count == 1 else f"{count} GPUs were"


def keep_freed() -> None:
    """Make the C library keep freed memory instead of returning it to the kernel.

    A step frees and allocates the same megabytes again. By default they are unmapped and mapped
    again, and each page is zeroed at its first touch: thousands of page faults per step, a fifth
    of its time. All threads share one heap, because separate heaps of every thread that ever saved
    a checkpoint would add up. Uses mallopt(3); without it (musl, macOS) this does nothing.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_ARENA_MAX, 1)


def peak_bytes(device: "torch.device") -> int:
    """Return this process's peak memory in bytes.

    On GPUs that is torch's allocated memory, on a CPU the resident set including libraries
    (getrusage(2), in KiB on Linux).
    """
    if device.type == "cuda":
        import torch

        # DataParallel has several GPUs; their sum is an upper bound, and an unused one counts 0.
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
