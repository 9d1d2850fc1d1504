"""The environment of the tasks on a real Slurm: each node's tasks run from its copy."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_own import start
from tests.staging.test_environment import Made

_TRAIN = """
import json, os, subprocess, sys, own
tool = subprocess.run(["tool"], capture_output=True, text=True, check=True).stdout.strip()
print(json.dumps([sys.executable, tool, own.__file__, os.environ["VIRTUAL_ENV"]]))
"""


@pytest.fixture
def made(tmp_path: Path) -> Made:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text(_TRAIN)
    return Made(tmp_path)


def submitted(cluster: SlurmCluster, made: Made, folder: Path, *options: str) -> RunDir:
    argv = [sys.executable, "-m", "clusterddp", "submit", "--nodes", "2", "--sbatch", "hold"]
    argv += ["--python", made.python, "--json", *options, "--", "python", "train.py"]
    environ = {"VIRTUAL_ENV": str(made.path)}
    done = cluster.run(argv, cwd=folder / "project", timeout=240, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    start(cluster, done.stdout)
    return RunDir(Path(json.loads(done.stdout)["run_dir"]))


def said(run: RunDir) -> list[Any]:
    return [json.loads(run.rank_log(rank).read_text().splitlines()[-1]) for rank in range(2)]


def test_the_tasks_run_from_a_copy_that_a_later_job_uses_again(
    cluster: SlurmCluster, made: Made, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    first = submitted(cluster, made, tmp_path, "--run-name", "a", "--stage-env", str(disk))
    [copy] = disk.glob("clusterddp-*/*/env")
    python = str(copy / "bin/python")
    shared = str(made.path.parent / "source/own.py")
    assert said(first) == [[python, python, shared, str(copy)]] * 2, first.job_log.read_text()
    second = submitted(cluster, made, tmp_path, "--run-name", "b", "--stage-env", str(disk))
    assert said(second) == said(first)
    assert "; 0 unpacked it" in second.job_log.read_text()


def test_a_disk_that_is_full_on_all_nodes_ends_the_run_before_its_tasks(
    cluster: SlurmCluster, made: Made, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)]
    for host in cluster.hosts:
        cluster.run_on(host, small, check=True)
    try:
        run = submitted(cluster, made, tmp_path, "--stage-env", str(disk), "--requeue")
    finally:
        for host in cluster.hosts:
            left = cluster.run_on(host, ["ls", f"{disk}/clusterddp-0"]).stdout.split()
            assert [name for name in left if not name.startswith("clusterddp-")] == ["lock"]
            cluster.run_on(host, ["umount", str(disk)], check=True)
    [ended] = [event for event in read_events(run) if event["event"] == "ended"]
    assert ended["code"] == "CD0322" and " free, and the environment needs " in ended["remark"]
    assert not list(run.logs.glob("rank-*.log"))


def test_one_node_with_a_full_disk_is_marked_bad_and_replaced(
    cluster: SlurmCluster, made: Made, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    full, free = cluster.hosts
    cluster.run_on(full, ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
    try:
        run = submitted(
            cluster, made, tmp_path, "--nodes", "1", "--spare-nodes", "1",
            "--stage-env", str(disk), "--run-name", "a",
        )  # fmt: skip
    finally:
        cluster.run_on(full, ["umount", str(disk)], check=True)
    text = run.job_log.read_text()
    assert re.search(rf"a node failed its checks. {full}: .* free, and the environment needs", text)
    assert f"on {free}, restarts within this job" in text
    [[python, *_]] = [json.loads(run.rank_log(0).read_text().splitlines()[-1])]
    assert python.startswith(str(disk))
