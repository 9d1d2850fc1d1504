"""A slow node and the usage of a run, on a real Slurm."""

import json
import sys
from pathlib import Path

import pytest

from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir
from tests.event_lines import kinds
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_notify import program, told
from tests.on_slurm.test_submit import CLUSTERDDP, submit

pytestmark = pytest.mark.slow

# The clock of a rank shows what its passes and the waits after them take on an idle machine, so
# that a busy one makes no rank slow; it is never ahead of the true one. h02 is slow for as many
# steps as SLOW_STEPS says, by three times what the others take.
MODEL = """
import os, time
from clusterddp.training import paces
from torch import nn

clock = wait = 0.0

class Paced(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.passes = nn.Linear(784, 10), 0
        self.slow_passes = int(os.environ["SLOW_STEPS"])
        self.is_slow = os.environ["SLURMD_NODENAME"] == "h02"
        time.perf_counter = lambda: clock

    def forward(self, images):
        global clock, wait
        self.passes += self.training
        slowest = 0.09 if self.training and self.passes <= self.slow_passes else 0.03
        own = slowest if self.is_slow else 0.03
        time.sleep(own)
        clock, wait = clock + own, slowest - own
        return self.layer(images.flatten(1))

def done(self, plain=paces.ExchangeWait.done):
    global clock
    clock += wait
    plain(self)

paces.ExchangeWait.done = done
"""
STEPS = 180
TRAINING = [
    "--nodes", "2", "--tasks-per-node", "2", "--dataset", "synthetic", "--threads", "1",
    "--batch-size", "32", "--warmup-steps", "2", "--epochs", "100", "--max-steps", str(STEPS),
    "--log-every", "5", "--straggler-window", "2s", "--eval-every", "1000epochs",
    "--save-every", "1000epochs", "--model", "paced:Paced", "--wait",
]  # fmt: skip


def trained(
    cluster: SlurmCluster, folder: Path, data_dir: Path, name: str, slow_steps: int, *more: str
) -> tuple[RunDir, str]:
    (folder / "paced.py").write_text(MODEL)
    done = submit(
        cluster, folder, *TRAINING, "--data-dir", str(data_dir), "--run-name", name,
        "--env", f"SLOW_STEPS={slow_steps}", *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(folder / "jobs" / name)
    return run, (run.logs / "rank-0.log").read_text()


def test_ranks_of_a_slow_node_are_named_with_it_until_it_keeps_up_again(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    run, log = trained(cluster, tmp_path, synthetic_dir, "slow", 80)
    named = [line for line in log.splitlines() if "straggler: " in line]
    assert len(named) == 4, log
    for rank, line in zip((2, 3), sorted(named[:2]), strict=True):
        assert line.startswith(f"warning: straggler: rank {rank} on h02 has computed at ")
    assert all(" on h02 has been back to normal speed for " in line for line in named[2:])
    assert "nodes_blamed" not in kinds(run)  # it was a moment's load
    [summary] = History.read(run).summaries()
    slow = sorted(summary.stragglers, key=lambda each: each.rank)
    assert [(each.rank, each.host) for each in slow] == [(2, "h02"), (3, "h02")]
    assert all(0.2 < each.relative_speed < 0.8 and each.until for each in slow)
    shown = cluster.run([*CLUSTERDDP, "report", "slow", "--json"], cwd=tmp_path, check=True)
    [report] = json.loads(shown.stdout)
    [attempt] = report["attempts"]
    assert [each["host"] for each in attempt["stragglers"]] == ["h02", "h02"]
    usage = report["usage"]
    parts = ("computing", "waiting", "startup", "saving", "repeated", "other")
    assert sum(usage[part] for part in parts) == pytest.approx(usage["node_hours"], abs=1e-5)
    assert all(usage[part] >= 0 for part in parts)
    # Two of four ranks wait for 60 ms of each of 80 steps; that is 2.4 s of both nodes.
    assert usage["waiting"] == pytest.approx(2.4 * 2 / 3600, rel=0.05)
    assert usage["computing"] == pytest.approx((STEPS * 0.03 + 2.4) * 2 / 3600, rel=0.05)


def test_a_node_that_is_slow_with_all_its_ranks_is_left_out_of_the_next_start(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    run, log = trained(cluster, tmp_path, synthetic_dir, "slow", STEPS, "--max-steps", "100")
    assert log.count("straggler: ") == 2, log
    [node] = json.loads(
        cluster.run([*CLUSTERDDP, "bad-nodes", "--json"], cwd=tmp_path, check=True).stdout
    )
    assert (node["host"], node["by"], node["run"]) == ("h02", "straggling", "slow")
    assert node["reason"].startswith("slow with ranks 2, 3, in the last attempt at ")
    assert f"clusterddp: node h02 is bad: {node['reason']}\n" in run.job_log.read_text()
    next_one = submit(cluster, tmp_path, "--run-name", "next", "--wait", "--", "true")
    assert "excluded as bad: h02 (slow with ranks 2, 3" in next_one.stderr
    assert next_one.returncode == 0, next_one.stderr


# Ten minutes are a second here, the ranks exchange their paces often, and every batch after the
# 100th is read slowly. Only the reading takes time by this clock: a busy machine changes nothing.
BECOMES_SLOW = """
import time, torch
import torch.distributed as dist
from clusterddp.distributed import agreement
from clusterddp.loop import Loop
from clusterddp.training.paces import Slowdown

agreement.POLL_SECONDS, Slowdown.PATIENCE, clock = 0.1, 1.0, 0.0
time.perf_counter = lambda: clock
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def batches():
    global clock
    for took in [0.01] * 100 + [0.1] * 100:
        time.sleep(took)
        clock += took
        yield torch.ones(2, 4)

loop = Loop(model=ddp, optimizer=optimizer, save_every="1000steps")
for epoch in loop.epochs(1):
    for batch in loop.batches(batches()):
        ddp(batch).sum().backward()
        optimizer.step()
        loop.step()
dist.destroy_process_group()
"""


def test_a_run_whose_data_arrives_slowly_is_named_wherever_a_user_looks(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(BECOMES_SLOW)
    done = submit(cluster, tmp_path, "--run-name", "late", "--nodes", "2", "--wait",
                  "--notify", program(tmp_path), "--", sys.executable, "slow.py")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "jobs/late")
    log = (run.logs / "rank-0.log").read_text()
    assert log.count("warning: slow run: ") == 1, log
    [summary] = History.read(run).summaries()
    [slow] = summary.slowdowns
    assert ": loading data 0." in slow.changes
    line = f"slow run: {slow.describe()} [CD0825]"
    assert told(tmp_path)[0]["warnings"] == [line]
    for command in ("status", "report"):
        shown = cluster.run([*CLUSTERDDP, command, "late"], cwd=tmp_path, check=True).stdout
        assert "of its best rate for" in " ".join(shown.split()), shown
