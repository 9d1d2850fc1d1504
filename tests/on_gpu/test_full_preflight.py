"""The checks of nodes by the ranks of a training, on GPUs and over NCCL."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from clusterddp.distributed.agreement import RankInfo
from clusterddp.distributed.heartbeat import Progress
from clusterddp.files import read_json
from clusterddp.preflight import evaluation
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import FULL_PREFLIGHT_VARIABLE
from clusterddp.training import preflight
from tests.on_gpu.hand_started import SHARE, skip_without_sharing
from tests.training.ranks import run_ranks
from tests.waiting import dying_with_us

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu2)]
)
def test_gpus_multiply_rightly_and_all_reduce(
    ranks: int, gpu_digits: tuple[str, str], tmp_path: Path
) -> None:
    dataset, data_dir = gpu_digits
    done = subprocess.run(
        [
            *(sys.executable, "-m", "clusterddp", "debug", f"--run-dir={tmp_path / 'run'}"),
            *(f"--dataset={dataset}", f"--data-dir={data_dir}", "--max-steps=2"),
            *(f"--procs={ranks}", "--device=cuda"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), FULL_PREFLIGHT_VARIABLE: "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False,
        preexec_fn=dying_with_us(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    kept = read_json(Attempt(RunDir(tmp_path / "run"), 1).full_preflight)
    assert kept is not None
    assert kept["failed"] == {}
    assert [rank["device"] for rank in kept["ranks"]] == [f"cuda:{n}" for n in range(ranks)]
    assert all(rank["model"] and not rank["fault"] for rank in kept["ranks"])
    assert all(rank["speed"] > 1e11 for rank in kept["ranks"]), "slower than a processor"
    assert (kept["all_reduce"] is None) == (ranks == 1)


def checked(rank: int, world_size: int, folder: str, environ: dict[str, str]) -> bool:
    """Check two nodes of two ranks each, all on the first GPU, over NCCL."""
    os.environ.update(environ)
    dist.destroy_process_group()
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=dist.FileStore(f"{folder}/nccl", world_size), rank=rank,
        world_size=world_size, device_id=device,
    )  # fmt: skip
    evaluation.SLOW_PRODUCT, evaluation.SLOW_SHARE = float("inf"), 0.0  # they share a GPU
    info = cast(
        RankInfo,
        SimpleNamespace(rank=rank, local_rank=rank % 2, host=f"h{rank // 2}", device="cuda:0"),
    )
    attempt = Attempt(RunDir(Path(folder)), 1)
    return preflight.nodes_pass(info, attempt, device, "fp32", Progress())


@pytest.mark.gpu
def test_nccl_makes_the_groups_of_all_nodes_at_once(tmp_path: Path) -> None:
    skip_without_sharing()
    begin(RunDir(tmp_path))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    environ = {SHARE: "1", "CUDA_VISIBLE_DEVICES": shown}
    assert run_ranks(4, checked, str(tmp_path), environ) == [True] * 4
    kept = read_json(Attempt(RunDir(tmp_path), 1).full_preflight)
    assert kept is not None
    assert min(min(each["within"], each["across"]) for each in kept["ranks"]) > 0
    assert "within nodes at least " in kept["summary"]
