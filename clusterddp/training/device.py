"""The processor that a rank computes on, chosen purely, and the memory of its task and host.

Under Slurm CUDA_VISIBLE_DEVICES holds the GPUs of the node, of the task alone or of its socket, and
CUDA numbers from 0 what it shows. Nothing there tells which: the ranks compare their GPUs' own
identifiers when they meet. Imports without torch.
"""

import ctypes
import logging
import re
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.errors import TrainingError
from clusterddp.ranks.variables import VISIBLE_GPUS, named_gpus

if TYPE_CHECKING:
    import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more on 64 bits (HEAP_MAX_SIZE / 2)
# Controller -> limit, usage, and what of the usage is file cache that the kernel gives up at need
# (cgroups(7): the unified hierarchy has no controller's name in /proc/self/cgroup).
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class Processor:
    """The processor that a rank computes on, and a warning for the user."""

    kind: str
    """`cuda` or `cpu`."""
    index: int = 0
    """Among the visible GPUs."""
    warning: str = ""

    @property
    def name(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"


def choose(wanted: str, *, visible: int, local_rank: int, granted: int, driver: str) -> Processor:
    """Choose for `--device wanted` from what torch sees (`visible`) and Slurm `granted`.

    driver: whose GPUs the host has a driver for, as `hardware.gpu_driver` says. Raises
    TrainingError when CUDA is wanted and absent, and when GPUs were granted on a host with a driver
    but torch sees none: a CPU run would waste them.
    """
    if wanted == "cpu":
        return Processor("cpu", warning=_unused(granted, "--device cpu leaves them idle"))
    if visible == 0:
        if wanted == "cuda":
            given = f"{_gpus(granted)} granted, but " if granted else ""
            ask = "" if granted else "Ask Slurm for GPUs (--gpus-per-node), install "
            raise TrainingError(
                f"--device cuda: {given}torch sees no GPU here. {ask or 'Install '}a CUDA build of "
                "torch that fits the driver, or use --device cpu. [CD0804]"
            )
        if granted and driver not in ("", "NVIDIA"):
            way = (
                "Install a ROCm build of torch for this interpreter"
                if driver == "AMD"
                else (
                    "clusterddp trains on NVIDIA's and AMD's alone: ask for a node with such GPUs"
                )
            )
            raise TrainingError(
                f"{_gpus(granted)} granted and {driver}'s driver is there, but torch sees none: "
                f"this build of it has no support for them. {way}, or train on the CPU on purpose "
                "with --device cpu. [CD0804]"
            )
        if granted and driver:
            raise TrainingError(
                f"{_gpus(granted)} granted and the NVIDIA driver is there, but torch sees none: "
                "it is a CPU-only build or does not fit the driver, or CUDA_VISIBLE_DEVICES names "
                "a GPU twice or one that is not there. Install a CUDA build of torch for this "
                "interpreter, or train on the CPU on purpose with --device cpu. [CD0804]"
            )
        return Processor("cpu", warning=_unused(granted, "torch sees none: training on the CPU"))
    # More ranks than GPUs are in order where each task is shown its own.
    return Processor("cuda", local_rank % visible)


def bind_to_numa(mode: str, device: "torch.device") -> str:
    """Bind this process to the CPUs near its GPU, as torchrun's --numa-binding does.

    mode: one of torch's AffinityMode, such as `node`. Returns a warning where that cannot be, as
    with a torch that offers it to programs it starts alone, or to none; and on a CPU.
    """
    if device.type != "cuda":
        return f"--numa-binding {mode} left out: this rank computes on the CPU"
    import torch

    talk = logging.getLogger("torch.numa.binding")
    was, talk.disabled = talk.disabled, True  # it prints the traceback of what is told here
    try:
        from torch.numa import binding

        # Seen in torch 2.15; its own counterpart for what it starts is this very function.
        binding._maybe_apply_numa_binding_to_current_process(
            device_index=device.index, numa_options=binding.NumaOptions(binding.AffinityMode(mode))
        )
    except (ImportError, AttributeError):
        return f"--numa-binding {mode}: torch {torch.__version__} cannot bind a running process"
    except Exception as error:  # no numactl, no such CPU among those of the task, no /sys …
        return f"--numa-binding {mode} left out: {error}"
    finally:
        talk.disabled = was
    return ""


def computes_in_bf16(kind: str) -> bool:
    """Return whether the processor has instructions for bf16; an emulation is slow."""
    import torch

    if kind == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)  # Ampere, the first with bf16 cores
    # Of newer versions of torch; by an older one, auto stays at fp32.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def granted_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that Slurm gave this task, by its variables."""
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
    """Have the C library keep what is freed rather than give it back to the kernel.

    A step frees and asks for the same megabytes again; by default they are unmapped and mapped
    anew, each page zeroed at its first touch: thousands of page faults a step, a fifth of its time.
    All threads share one heap: what is kept in a heap of its own for every thread that ever saved a
    checkpoint would add up. mallopt(3); where there is none (musl, macOS) nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_ARENA_MAX, 1)


def peak_bytes(device: "torch.device") -> int:
    """Return the most bytes that this process has held.

    Those that torch allocated on its GPUs, or the resident set of the process on a CPU, its
    libraries included (getrusage(2), in KiB on Linux).
    """
    if device.type == "cuda":
        import torch

        # DataParallel has several, which are not at their peaks at once; what is unused counts 0.
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that the host has available, or fewer where a cgroup allows fewer.

    None where it is not known (not on Linux). root: of the file system to read.
    """
    available = _number(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        return None
    return min([available * 1024, *_left_in_cgroups(root)])


def _left_in_cgroups(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    left = []
    for line in lines:
        _, controller, path = line.split(":", 2)
        if controller not in _FILES:
            continue
        top = root / "sys/fs/cgroup" / controller
        group = top / path.lstrip("/")
        limit, usage, cache = _FILES[controller]
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            allowed, used = _number(folder / limit), _number(folder / usage)
            if allowed is not None and used is not None:
                given_up = _number(folder / "memory.stat", cache) or 0
                left.append(max(allowed - used + given_up, 0))
    return left


def _number(path: Path, name: str = "") -> int | None:
    """Read the number that follows `name` in a file, or that the file holds, if there is one.

    A limit of `max` is none.
    """
    try:
        words = path.read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None
