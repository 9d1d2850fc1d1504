"""What a COMMAND over NCCL leaves: its flight recorder after a timeout, its log at the start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.run.attempt import begin
from clusterddp.run.flight_recorder import find_absent
from clusterddp.run.outcome import read_outcomes
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.workstation import free_port
from tests.gpu import machine
from tests.on_gpu.hand_started import END_SECONDS, START_SECONDS, skip_without_sharing

pytestmark = pytest.mark.gpu
TIMEOUT = 20
# Rank 1 makes four calls, rank 0 five, and NCCL's watchdog ends both.
PROGRAM = f"""
import datetime, os, time
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds={TIMEOUT}))

def step():
    dist.all_reduce(torch.ones(8, device="cuda"))

for number in range(4):
    step()
torch.cuda.synchronize()
if rank == 0:
    step()
torch.cuda.synchronize()
time.sleep(3600)
"""


def test_the_rank_that_did_not_join_a_call_is_named_after_a_timeout(tmp_path: Path) -> None:
    if machine().gpus < 2:
        skip_without_sharing()
    attempt = begin(RunDir(tmp_path))
    (tmp_path / "train.py").write_text(PROGRAM)
    argv = [
        sys.executable, "-m", "clusterddp", "exec", f"--run-dir={tmp_path}", "--attempt=1", "--",
        sys.executable, str(tmp_path / "train.py"),
    ]  # fmt: skip
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            argv,
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            },
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for each in ranks:
            assert each.wait(START_SECONDS + TIMEOUT + 60 + END_SECONDS) != 0
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert re.fullmatch(
        r"rank 1 did not join call \d+ of NCCL's group 0 \(default_pg\), all_reduce Float "
        r"\[\[8\]\] in step \(train.py:\d+\), where rank 0 waited",
        find_absent(read_outcomes(attempt.outcomes)),
    )
    kept = (attempt.outcomes / "nccl-0.log").read_text()
    assert "NCCL version" in kept
    assert re.search("[Uu]sing network|NET plugin", kept), kept
