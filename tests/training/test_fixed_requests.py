"""Fixed requests train to the weights that are kept, bit for bit on the machine that made them.

On another torch or processor the loss alone is compared.
"""

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.files import read_json
from clusterddp.worker.workstation import free_port
from tests.waiting import dying_with_us

_OPTIONS = [
    "--dataset=mnist", "--data-dir=data", "--device=cpu", "--threads=1", "--batch-size=32",
    "--epochs=1", "--warmup-steps=5",
]  # fmt: skip
pytestmark = pytest.mark.slow

KEPT = Path(__file__).parents[1] / "golden/weights.json"
REQUESTS = {
    "convnet, fp32, one rank": (1, ["--precision=fp32"]),
    "convnet, bf16, two ranks": (2, ["--precision=bf16"]),
    "mlp, fp32, two ranks": (2, ["--model=mlp", "--precision=fp32"]),
}
"""By name: the number of ranks, and what differs."""


@pytest.mark.parametrize("name", REQUESTS)
def test_fixed_requests_train_to_the_kept_weights(tmp_path: Path, name: str) -> None:
    kept, report = json.loads(KEPT.read_text()), train(name, tmp_path)
    assert report["loss"] == pytest.approx(kept[name]["loss"], rel=0.02)
    if machine() == kept["machine"]:
        assert report["weights_sha256"] == kept[name]["weights_sha256"]


def machine() -> dict[str, str]:
    """What decides how a sum is rounded: torch's version and the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return {
        "torch": torch.__version__.partition("+")[0],
        "processor": f"{model}, {torch.backends.cpu.get_cpu_capability()}",
    }


def train(name: str, folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Train a request in a directory, its data too; returns its report."""
    ranks, options = REQUESTS[name]
    _write_digits(folder / "data/MNIST/raw")
    port = free_port()
    run = [sys.executable, "-m", "clusterddp", "train", "--run-dir=run", *_OPTIONS, *options]
    processes = []
    for rank in range(ranks):
        own = {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        process = subprocess.Popen(
            run, cwd=folder, env={**environ, **own}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
        )  # fmt: skip
        processes.append(process)
    logs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(logs)
    report = read_json(folder / "run/report.json")
    assert report is not None
    return report


def _write_digits(raw: Path) -> None:
    """Write files of MNIST's form: noise, with a bright row for the label; the same for good."""
    raw.mkdir(parents=True)
    for name, count in {"train": 1_000, "t10k": 200}.items():
        drawn = hashlib.shake_256(name.encode()).digest(count * 785)
        labels = bytes(byte % 10 for byte in drawn[-count:])
        pixels = bytearray(byte // 2 for byte in drawn[:-count])
        for index, label in enumerate(labels):
            begin = index * 784 + (2 * label + 4) * 28
            pixels[begin : begin + 28] = b"\xff" * 28
        header = struct.pack(">4I", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + pixels)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels)
