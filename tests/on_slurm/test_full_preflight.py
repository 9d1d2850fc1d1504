"""Nodes that the ranks of a training check before its first step, on a real Slurm of four hosts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run import bad_nodes
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import read_json
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP, submit

BAD = "h03"
TRAINING = [
    "--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--max-steps", "4",
    "--eval-every", "1000epochs", "--no-snapshot", "--no-requeue", "--wait", "--run-name", "a",
    "--preflight", "full",
]  # fmt: skip
# Python imports it in every process below: here torch's products are wrong on one host, in one
# element, as of a processor that computes wrongly.
WRONG = f"""
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "clusterddp.training.preflight" and os.uname().nodename == "{BAD}":
            import torch
            plain = torch.mm
            def mm(*args, **more):
                product = plain(*args, **more)
                product[17, 4] += 1
                return product
            torch.mm = mm

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def four(slurm_available: None) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts=4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def idle(four: SlurmCluster) -> Iterator[None]:
    yield
    four.cancel_all()


def hooked(folder: Path, hook: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(hook)
    return {"PYTHONPATH": f"{folder}:{Path.cwd()}"}


def trained(
    cluster: SlurmCluster, folder: Path, data: Path, *args: str, **more: Any
) -> tuple[RunDir, dict[str, Any]]:
    """A training, and its status."""
    submit(cluster, folder, *TRAINING, "--data-dir", str(data), *args, **more)
    answer = cluster.run([*CLUSTERDDP, "status", "a", "--json"], cwd=folder, check=True)
    return RunDir(folder / "jobs/a"), json.loads(answer.stdout)


def blamed(run: RunDir) -> dict[str, str]:
    return {host: node.reason for host, node in bad_nodes.read(run.path.parent).items()}


def causes(run: RunDir) -> list[str]:
    return [event["cause"] for event in read_events(run) if event["event"] == "ended"]


def test_a_node_that_multiplies_wrongly_is_replaced_by_a_spare_in_the_same_job(
    four: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    env = hooked(tmp_path, WRONG)
    run, status = trained(
        four, tmp_path, synthetic_dir, "--nodes", "3", "--spare-nodes", "1", env=env
    )
    said = run.job_log.read_text()
    assert causes(run) == ["preflight", "done"], said
    started = [event for event in read_events(run) if event["event"] == "started"]
    assert [event["nodelist"] for event in started] == ["h01,h02,h03", "h01,h02,h04"]
    [(host, reason)] = blamed(run).items()
    assert host == BAD
    assert reason == "rank 2 on cpu multiplies wrongly: 1 of 262,144 elements are wrong"
    assert f"preflight: {BAD} failed: {reason}" in said
    first = read_json(Attempt(run, 1).full_preflight)
    assert first is not None
    assert [rank["host"] for rank in first["ranks"]] == ["h01", "h02", "h03"]
    assert status["state"] == "done"
    assert "; full: 3 nodes passed in " in status["preflight"]
    assert [event for event in read_events(run) if event.get("first_failure")] == []
