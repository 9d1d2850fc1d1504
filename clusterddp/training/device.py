"""Which processor a rank computes on: a pure choice, and what it is chosen from.

CUDA_VISIBLE_DEVICES is never changed: under Slurm it holds the GPUs of the node or of the task
alone, and both number what they show from 0.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterddp.errors import TrainingError


@dataclass(frozen=True)
class Choice:
    """What a rank computes on, and what the user should know about it."""

    kind: str
    """`cuda` or `cpu`."""
    index: int = 0
    """Among the visible GPUs."""
    warning: str = ""

    @property
    def name(self) -> str:
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"


def choose(
    wanted: str,
    *,
    visible: int,
    local_rank: int,
    local_world_size: int,
    granted: int = 0,
    driver: bool = False,
) -> Choice:
    """Choose for `--device wanted` from what torch sees (`visible`) and Slurm `granted`.

    `driver` says that the host has an NVIDIA driver. Raises TrainingError when the ranks of the
    host outnumber its visible GPUs, when CUDA is wanted and absent, and when GPUs were granted on
    a host with a driver but torch sees none: a CPU run would waste them.
    """
    if wanted == "cpu":
        return Choice("cpu", warning=_unused(granted, "--device cpu leaves them idle"))
    if visible == 0:
        if wanted == "cuda":
            raise TrainingError(
                "--device cuda: torch sees no GPU here. Ask Slurm for GPUs (--gpus-per-node), "
                "install a CUDA build of torch, or use --device cpu."
            )
        if granted and driver:
            raise TrainingError(
                f"{_gpus(granted)} granted and the NVIDIA driver is there, but torch sees none: "
                "it is a CPU-only build or does not fit the driver. Install a CUDA build of torch "
                "for this interpreter, or train on the CPU on purpose with --device cpu."
            )
        return Choice("cpu", warning=_unused(granted, "torch sees none: training on the CPU"))
    if visible == 1:
        # The task's own GPU. Were it shared, the ranks would find the same GPU twice.
        return Choice("cuda", 0)
    if local_world_size > visible:
        raise TrainingError(
            f"{local_world_size} ranks run on this host, but {visible} GPUs are visible to them. "
            f"Start at most {visible} tasks per node, or use --device cpu."
        )
    return Choice("cuda", local_rank)


def computes_in_bf16(kind: str) -> bool:
    """Whether this process's processor has instructions for bf16, of which emulations are slow."""
    import torch

    if kind == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)  # Ampere, the first with bf16 cores
    # Of newer versions of torch; by an older one, auto stays at fp32.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def granted_gpus(environ: Mapping[str, str]) -> int:
    """How many GPUs Slurm gave this task, by its variables; 0 where it gave none."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        # Set but empty, -1 or NoDevFiles: the GPUs were hidden on purpose.
        shown = environ["CUDA_VISIBLE_DEVICES"]
        return 0 if shown in ("", "-1", "NoDevFiles") else len(shown.split(","))
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(name):
            return sum(_length(part) for part in environ[name].split(","))
    count = environ.get("SLURM_GPUS_ON_NODE", "0")
    return int(count) if count.isdigit() else 0


def _length(part: str) -> int:
    found = re.fullmatch(r"(\d+)-(\d+)", part)
    return int(found[2]) - int(found[1]) + 1 if found else 1


def _unused(granted: int, why: str) -> str:
    return f"{_gpus(granted)} granted, but {why}" if granted else ""


def _gpus(count: int) -> str:
    return "1 GPU was" if count == 1 else f"{count} GPUs were"
