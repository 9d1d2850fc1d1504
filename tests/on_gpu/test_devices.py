"""The GPUs that ranks take when they are real: shown, refused, shared, rehearsed and left alone."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clusterddp.run.run_dir import RunDir
from tests.on_gpu.hand_started import warnings_in
from tests.waiting import dying_with_us

ROOT = Path(__file__).parents[2]
# A model of which every rank shows its weights where it does not train.
SHOWN = """
import hashlib, os
from torch import nn
class Shown(nn.Sequential):
    def forward(self, images):
        if not self.training:
            bytes_ = b"".join(p.detach().cpu().numpy().tobytes() for p in self.parameters())
            rank = os.environ.get("RANK", "0")
            print(f"rank {rank} has {hashlib.sha256(bytes_).hexdigest()}", flush=True)
        return super().forward(images)
def net():
    return Shown(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12 * 12, 10))
"""
ALIKE = (
    *("--procs=2", "--precision=fp32", "--optimizer=sgd", "--cuda-graph=off"),
    *("--model=shown:net", "--epochs=100", "--eval-every=100epochs"),
)
Debug = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def debug(gpu_digits: tuple[str, str], tmp_path: Path) -> Debug:
    """`clusterddp debug` on the digits, and what it said; its run is in the directory `run`."""
    dataset, data_dir = gpu_digits

    def run(*options: str, run: str = "run", **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "clusterddp", "debug", f"--run-dir={tmp_path / run}"),
                *(f"--dataset={dataset}", f"--data-dir={data_dir}", "--max-steps=20", *options),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
            preexec_fn=dying_with_us(),
        )  # fmt: skip

    return run


def first_gpu() -> str:
    """Its identifier, from a process of its own: this one must not start CUDA."""
    show = "import torch; print(torch.cuda.get_device_properties(0).uuid)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    return f"GPU-{done.stdout.strip().removeprefix('GPU-')}"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shown", "device"), [("", "cpu"), ("0", "cuda:0"), ("UUID", "cuda:0"), ("0,0", "sees none")]
)
def test_a_rank_computes_on_what_cuda_is_told_to_show(
    shown: str, device: str, debug: Debug, tmp_path: Path
) -> None:
    names = first_gpu() if shown == "UUID" else shown
    done = debug("--numa-binding=node", CUDA_VISIBLE_DEVICES=names)  # done, or left out and said
    if " " in device:
        assert done.returncode == 1 and device in done.stdout
        return
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "run/report.json").read_text())["device"].startswith(device[:4])
    assert f"(local rank 0): {device}, " in done.stdout


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_are_refused_before_nccl_speaks(debug: Debug) -> None:
    done = debug("--procs=2", CUDA_VISIBLE_DEVICES="0", NCCL_MULTI_RANK_GPU_ENABLE="0")
    assert done.returncode == 1
    assert "rank 0 and rank 1 are on one GPU of" in done.stdout
    assert "Duplicate GPU" not in done.stdout and "Multiple Ranks" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_that_share_a_gpu_train_as_two_on_cpus_do(
    backend: str, debug: Debug, tmp_path: Path
) -> None:
    if backend == "nccl":
        show = "import torch; print(torch.cuda.nccl.version() >= (2, 30))"
        argv = [sys.executable, "-c", show]
        told = subprocess.run(argv, capture_output=True, text=True, check=True)
        if told.stdout.strip() != "True":
            pytest.skip("NCCL 2.30 or later is needed to share a GPU")
    (tmp_path / "shown.py").write_text(SHOWN)
    switch = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if backend == "nccl" else {}
    done = debug(*ALIKE, f"--backend={backend}", CUDA_VISIBLE_DEVICES="0", **switch)
    assert done.returncode == 0, done.stdout
    assert "ranks 0, 1 share the time and memory of a GPU" in done.stdout
    check_alike(tmp_path / "run", debug(*ALIKE, "--device=cpu", run="cpus"))


@pytest.mark.slow
def test_two_ranks_on_cpus_are_held_to_the_same(debug: Debug, tmp_path: Path) -> None:
    """What the test above asks, where every machine can answer it."""
    (tmp_path / "shown.py").write_text(SHOWN)
    alike = (*ALIKE, "--device=cpu")
    done = debug(*alike)
    assert done.returncode == 0, done.stdout
    check_alike(tmp_path / "run", debug(*alike, run="cpus"))


def check_alike(run: Path, on_cpus: subprocess.CompletedProcess[str]) -> None:
    """Compare two ranks with each other, and with two on CPUs: weights, and what all evaluated."""
    assert on_cpus.returncode == 0, on_cpus.stdout
    said = [RunDir(run).rank_log(rank).read_text() for rank in (0, 1)]
    assert [warnings_in(each) for each in said] == [[], []]
    shown = [set(re.findall(r"rank \d has (\w+)", each)) for each in said]
    assert len(shown[0]) == 2 and shown[0] == shown[1]  # before the first step, and at the end
    reports, weights = [], []
    for each in (run, run.parent / "cpus"):
        reports.append(json.loads((each / "report.json").read_text()))
        (path,) = (each / "checkpoints").glob("*20.pt")
        weights.append(torch.load(path, map_location="cpu", weights_only=True)["model"])
    assert reports[0]["loss"] == pytest.approx(reports[1]["loss"], rel=1e-2)
    assert reports[0]["accuracy"] == pytest.approx(reports[1]["accuracy"], abs=5e-3)
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_training_on_the_cpu_leaves_cuda_alone(
    gpu_digits: tuple[str, str], tmp_path: Path
) -> None:
    program = (
        "import sys, torch; from pathlib import Path\n"
        "from clusterddp.request.train_config import TrainConfig\n"
        "from clusterddp.worker.task import run_task\n"
        "config = TrainConfig(device='cpu', dataset=sys.argv[1], data_dir=sys.argv[2],\n"
        "                     max_steps=3)\n"
        "assert run_task(config, Path(sys.argv[3])) == 0\n"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *gpu_digits, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu2
def test_hosts_of_a_rehearsal_compute_on_the_gpus_of_its_shell(
    gpu_digits: tuple[str, str], tmp_path: Path
) -> None:
    dataset, data_dir = gpu_digits
    done = subprocess.run(
        [
            *(sys.executable, "-m", "clusterddp", "submit", "--launcher", "local", "--wait"),
            *("--nodes", "2", "--gpus-per-node", "1", "--run-name", "run", "--max-steps", "5"),
            *("--runs-dir", str(tmp_path), "--dataset", dataset, "--data-dir", data_dir),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "1,0",
        },
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert (report["world_size"], report["backend"], report["warnings"]) == (2, "nccl", [])
