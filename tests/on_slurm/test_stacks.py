"""`clusterddp stacks` on a real Slurm of two hosts: a step beside the job's own looks at each."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.run_dir import RunDir
from tests.cli.commands.test_stacks import HOOKS, JUMPS, PACKAGE, SCRIPT
from tests.event_lines import read_events
from tests.on_slurm.cluster import DEFAULT_ROOT, SlurmCluster
from tests.on_slurm.held import LONG
from tests.on_slurm.test_cluster import AS_NOBODY, NOBODY
from tests.on_slurm.test_signals import job_of
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.on_slurm.test_user import home
from tests.waiting import wait_for

__all__ = ["home"]
pytestmark = pytest.mark.timeout(600)  # a start of a job, and several steps beside it
# `release` is for 22.05 alone: CI runs all of this file on Slurm 24.11 (.ci/run, `--check stacks`).

ASKED = ["--nodes", "2", "--tasks-per-node", "2", "--no-snapshot", "--run-name", "a"]
AT_THEIR_PLACES = "3 of 4 (ranks 0, 2-3) in waits (train.py:3)"


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """The pipe to which somebody writes for the ranks to go on; they do at the test's end."""
    path = tmp_path / "go"
    os.mkfifo(path)
    yield path
    os.close(os.open(path, os.O_RDWR))


def stacks(cluster: SlurmCluster, folder: Path, *options: str) -> Any:
    return cluster.run([*CLUSTERDDP, "stacks", "a", *options], cwd=folder, timeout=LONG)


def started(cluster: SlurmCluster, folder: Path, *argv: str, **kwargs: Any) -> RunDir:
    """A run whose four ranks wait for `go`."""
    done = submit(cluster, folder, *ASKED, *argv, **kwargs)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: len(list(folder.glob("up-*"))) == 4, "all ranks", LONG)
    return RunDir(folder / "jobs/a")


def test_the_ranks_of_both_hosts_are_shown_and_go_on(
    cluster: SlurmCluster, tmp_path: Path, go: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    # The whole of each node is the step's own: the look at it takes none of that.
    run = started(
        cluster, tmp_path, "--gpus-per-node", "4", "--exclusive",
        "--", sys.executable, "train.py",
    )  # fmt: skip
    wait_for(lambda: AT_THEIR_PLACES in stacks(cluster, tmp_path).stdout, AT_THEIR_PLACES, LONG)
    told = stacks(cluster, tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr
    lines = told.stdout.splitlines()
    assert lines[0] == "a: 4 ranks on 2 hosts"
    assert lines[1].startswith(AT_THEIR_PLACES)
    assert any(line.startswith("rank 1 on h01 in loads (train.py:5)") for line in lines)
    one = stacks(cluster, tmp_path, "--rank", "3")
    assert "rank 3 on h02, process" in one.stdout
    assert "rank 1" not in one.stdout
    writer = os.open(go, os.O_RDWR)
    assert cluster.wait_job(job_of(run)) == "COMPLETED"
    os.close(writer)
    assert read_events(run)[-1]["cause"] == "done"


@pytest.mark.slow
@pytest.mark.release
def test_an_ordinary_user_sees_eight_ranks_beside_a_sites_sitecustomize(
    slurm_available: None, home: Path
) -> None:
    """Nothing was asked for ahead of the hang."""
    site = home / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.of_the_site = True\n")
    (home / "train.py").write_text(f"import sys\nassert sys.of_the_site\n{SCRIPT}")
    os.mkfifo(home / "go")
    for path in (site, site / "sitecustomize.py", home / "train.py", home / "go"):
        os.chown(path, NOBODY, NOBODY)
    # This Python and the tree can lie where only root may enter: not on such a cluster.
    with SlurmCluster(hosts=2, root=DEFAULT_ROOT or Path("/")) as cluster:
        env = {"PYTHONPATH": f"{site}:{PACKAGE}", "HOME": str(home), "USER": None, "LOGNAME": None}

        def typed(*words: str) -> Any:
            return cluster.run([*AS_NOBODY, *CLUSTERDDP, *words], cwd=home, env=env, timeout=LONG)

        done = typed(
            "submit", "--nodes", "2", "--tasks-per-node", "4", "--no-snapshot", "--preflight",
            "none", "--run-name", "a", "--", sys.executable, "train.py",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        run = RunDir(home / "jobs/a")
        wait_for(lambda: len(list(home.glob("up-*"))) == 8, "all ranks", LONG / 4)
        wanted = "7 of 8 (ranks 0, 2-7) in waits (train.py:5)"
        wait_for(lambda: wanted in typed("stacks", "a").stdout, wanted, LONG)
        told = typed("stacks", "a")
        assert told.returncode == 0, told.stdout + told.stderr
        assert "rank 1 on h01 in loads (train.py:7)" in told.stdout
        writer = os.open(home / "go", os.O_RDWR)
        assert cluster.wait_job(job_of(run)) == "COMPLETED"
        os.close(writer)


@pytest.mark.slow
@pytest.mark.release
def test_a_silent_command_is_ended_when_asked_and_the_odd_rank_is_named(
    cluster: SlurmCluster, tmp_path: Path, go: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hooks, quiet = tmp_path / "hooks", tmp_path / "quiet"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(JUMPS.format(quiet=str(quiet)))
    run = started(
        cluster, tmp_path, "--on-hang", "end", "--", sys.executable, "train.py",
        env={"PYTHONPATH": f"{hooks}:{PACKAGE}"},
    )  # fmt: skip
    wait_for(lambda: AT_THEIR_PLACES in stacks(cluster, tmp_path).stdout, AT_THEIR_PLACES, LONG)
    quiet.touch()
    assert cluster.wait_job(job_of(run)) == "FAILED"
    log = run.job_log.read_text()
    assert "no rank has printed anything for 30m" in log
    assert "rank 1 on h01 in loads (train.py:5)" in log
    last = read_events(run)[-1]
    assert (last["cause"], last["exit_code"]) == ("failed", 1)
    assert last["first_failure"]["reason"].startswith("hung: no rank printed anything"), last
    assert last["first_failure"]["rank"] == 1


LOOP = """\
import threading
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from clusterddp.loop import Loop
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
loop = Loop(model=model)
def prints():
    while True:
        print("still here", flush=True)
        time.sleep(1)
threading.Thread(target=prints, daemon=True).start()
for _ in loop.epochs(1):
    for inputs in loop.batches([torch.ones(2, 4)] * 9):
        model(inputs).sum().backward()
        loop.step()
"""


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("program", ["training", "loop"])
def test_a_hang_that_the_watchdog_finds_ends_the_job_when_asked(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path, program: str
) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    holds = tmp_path / "holds"
    holds.mkdir()
    (holds / "want-step-3.1").touch()
    timeout = "8s" if program == "training" else "60s"  # from the start of the tasks, for the loop
    training = ["--dataset", "synthetic", "--data-dir", str(synthetic_dir), "--max-steps", "9"]
    done = submit(
        cluster, tmp_path, *ASKED, "--hang-timeout", timeout, "--on-hang", "end",
        *(training if program == "training" else ["--", sys.executable, "train.py"]),
        env={"PYTHONPATH": f"{HOOKS}:{PACKAGE}", "CAMPAIGN_HOLDS": str(holds)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs/a")
    assert cluster.wait_job(job_of(run)) == "FAILED"
    log = run.job_log.read_text()
    assert "ending the job because of --on-hang end" in log
    last = read_events(run)[-1]
    assert (last["cause"], last["exit_code"]) == ("failed", 1)
    # The training's ranks wait for rank 1 after the same step, if they agree there whether to stop.
    if program == "loop" or "all 4 ranks are at the same position" not in log:
        assert "\nclusterddp: rank 1 hangs: " in log
        assert last["first_failure"]["rank"] == 1
        assert last["first_failure"]["reason"].startswith("hung: "), last
