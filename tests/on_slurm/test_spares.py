"""Jobs with spare nodes, on a real Slurm that takes a node for lost after 300 s."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempt import Attempt
from clusterddp.run.files import read_json
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_life import HOOKS, PACED, told, train_to
from tests.on_slurm.test_submit import submit
from tests.waiting import wait_for

STEPS = 150
ENV = {**PACED, "PYTHONPATH": f"{HOOKS}:{Path(__file__).parents[2]}"}
TRAINING = [
    "--nodes", "2", "--dataset", "synthetic", "--threads", "1", "--batch-size", "32",
    "--warmup-steps", "2", "--epochs", "100", "--max-steps", str(STEPS),
    "--save-every", "50steps", "--log-every", "50", "--eval-every", "1000epochs",
]  # fmt: skip


@pytest.fixture(scope="module")
def four_hosts(slurm_available: None) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts=4, conf={"SlurmdTimeout": "300"}) as booted:
        yield booted


@pytest.fixture
def hosts(four_hosts: SlurmCluster) -> Iterator[SlurmCluster]:
    yield four_hosts
    four_hosts.cancel_all()


@pytest.fixture(scope="module")
def undisturbed(
    four_hosts: SlurmCluster, tmp_path_factory: pytest.TempPathFactory, synthetic_dir: Path
) -> str:
    """The weights that the training ends with when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = submit(four_hosts, folder, *TRAINING, "--data-dir", str(synthetic_dir),
                  "--run-name", "a", "--launcher", "local", "--wait")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(RunDir(folder / "jobs/a"))


def weights(run: RunDir) -> str:
    report = read_json(run.report)
    assert report is not None
    assert report["steps"] == STEPS
    return str(report["weights_sha256"])


def of_kind(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == kind]


def wait_done(run: RunDir, count: int) -> None:
    wait_for(lambda: len(of_kind(run, "ended")) >= count, f"{count} ends")


def test_a_killed_node_is_replaced_in_the_same_job(
    hosts: SlurmCluster, tmp_path: Path, synthetic_dir: Path, undisturbed: str
) -> None:
    done = submit(hosts, tmp_path, *TRAINING, "--data-dir", str(synthetic_dir), "--run-name",
                  "spare", "--spare-nodes", "1", env=ENV)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "jobs/spare")
    train_to(run.path, 50)
    [first] = of_kind(run, "started")
    batch, lost = first["nodelist"].split(",")
    [spare] = first["spares"]
    hosts.kill_host(lost)
    struck = time.time()
    wait_for(Attempt(run, 2).read_record, "a second attempt")
    resumed = time.time() - struck
    wait_done(run, 2)

    log = run.job_log.read_text()
    assert weights(run) == undisturbed, log
    ended = of_kind(run, "ended")
    assert [(end["cause"], end["job_id"], end["restart"]) for end in ended] == [
        ("node lost", first["job_id"], 0),
        ("done", first["job_id"], 0),
    ]
    assert resumed < 60, log
    second = of_kind(run, "started")[1]
    assert (second["nodelist"], second["spares"]) == (",".join(sorted([batch, spare])), [lost])
    assert list(of_kind(run, "nodes_blamed")[0]["nodes"]) == [lost]
    assert of_kind(run, "requeued") == []
    status = told(hosts, tmp_path, "spare")
    assert (status["state"], status["attempt"], status["hosts"]) == ("done", 2, [batch, spare])
    print(f"ranks met {resumed:.1f} s after the kill")
