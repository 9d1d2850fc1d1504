"""Bad nodes on a real Slurm, as an ordinary user: left out after a loss, none by an exception."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import append_json_line
from clusterddp.run.run_dir import RunDir
from tests.event_lines import kinds, read_events
from tests.on_slurm.cluster import DEFAULT_ROOT, SlurmCluster
from tests.on_slurm.test_cluster import AS_NOBODY, NOBODY
from tests.on_slurm.test_submit import CLUSTERDDP
from tests.waiting import wait_for

pytestmark = pytest.mark.slow

# The first start waits to be interrupted; each later one says where it is, and is done.
WAITING = """
import os, pathlib, time
start, rank = os.environ.get("SLURM_RESTART_COUNT") or "0", os.environ["RANK"]
pathlib.Path(f"up-{start}-{rank}").touch()
if start == "0":
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def three(slurm_available: None) -> Iterator[SlurmCluster]:
    """Three hosts, a lost one of which is noticed within seconds.

    The script of a job that has lost one is ended, and has the time for its verdict.
    """
    conf = {"SlurmdTimeout": "5", "KillWait": "30"}
    with SlurmCluster(hosts=3, root=DEFAULT_ROOT or Path("/"), conf=conf) as cluster:
        yield cluster


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that an ordinary user may enter; pytest's are closed to them."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, NOBODY, NOBODY)
        yield Path(name)


def typed(cluster: SlurmCluster, home: Path, *argv: str, check: bool = True) -> Any:
    """Run a command as the ordinary user."""
    env = {"HOME": str(home), "USER": None, "LOGNAME": None}
    return cluster.run([*AS_NOBODY, *argv], cwd=home, env=env, timeout=200, check=check)


def submit(cluster: SlurmCluster, home: Path, name: str, program: str, *options: str) -> RunDir:
    (home / "program.py").write_text(program)
    typed(
        cluster, home, *CLUSTERDDP, "submit", "--run-name", name, "--no-snapshot",
        *options, "--", "python", "program.py",
    )  # fmt: skip
    return RunDir(home / "jobs" / name)


def job_of(run: RunDir) -> str:
    return str(next(e["job_id"] for e in read_events(run) if e["event"] == "submitted"))


@pytest.mark.timeout(600)
def test_a_lost_node_is_left_out_of_the_next_start_of_an_ordinary_users_job(
    three: SlurmCluster, home: Path
) -> None:
    run = submit(three, home, "lost", WAITING, "--nodes", "2", "--requeue")
    wait_for(lambda: len(list(home.glob("up-0-*"))) == 2, "both ranks")
    assert read_events(run)[-1]["nodelist"] == "h[01-02]"
    three.kill_host("h02")
    wait_for(lambda: "nodes_excluded" in kinds(run), "the verdict", 240)
    shown = json.loads(typed(three, home, *CLUSTERDDP, "status", "lost", "--json").stdout)
    assert shown["excluded_nodes"] == {"h02": "lost during attempt 1"}
    three.start_slurmd("h02")  # and it could be given again
    assert three.wait_job(job_of(run)) == "COMPLETED", run.job_log.read_text()
    started = [event["nodelist"] for event in read_events(run) if event["event"] == "started"]
    assert started == ["h[01-02]", "h[01,03]"]
    job = three.run(["scontrol", "show", "job", "-o", job_of(run)], check=True).stdout
    assert " ExcNodeList=h02 " in job

    [node] = json.loads(typed(three, home, *CLUSTERDDP, "bad-nodes", "--json").stdout)
    assert (node["host"], node["by"], node["run"]) == ("h02", "lost", "lost")

    # Another run of the same directory leaves it out from its submission on.
    other = submit(three, home, "other", "pass", "--nodes", "1", "--exclude", "h01")
    assert three.wait_job(job_of(other)) == "COMPLETED", other.job_log.read_text()
    assert [e["nodelist"] for e in read_events(other) if e["event"] == "started"] == ["h03"]
    assert "#SBATCH --exclude=h01\n" in other.script.read_text()
    demanding = ["submit", "--nodes", "2", "--nodelist", "h02", "--", "true"]
    refused = typed(three, home, *CLUSTERDDP, *demanding, check=False)
    assert refused.returncode == 2
    assert "'clusterddp bad-nodes clear h02'" in refused.stderr
    typed(three, home, *CLUSTERDDP, "bad-nodes", "clear", "h02")
    last = submit(three, home, "last", "pass", "--nodes", "1", "--nodelist", "h02")
    assert three.wait_job(job_of(last)) == "COMPLETED", last.job_log.read_text()


@pytest.mark.timeout(600)
def test_a_bad_node_that_slurm_gives_all_the_same_is_given_back_without_an_attempt(
    three: SlurmCluster, home: Path
) -> None:
    (home / "jobs").mkdir()
    os.chown(home / "jobs", NOBODY, NOBODY)
    # As a job that waited while another run blamed the node.
    three.run(["scontrol", "update", "PartitionName=main", "State=DOWN"], check=True)
    second = submit(three, home, "second", "pass", "--nodes", "1", "--requeue")
    line = {"host": "h01", "reason": "slow", "by": "preflight", "expires": 4e9, "time": 1.0}
    append_json_line(home / "jobs/bad-nodes.jsonl", line)
    os.chown(home / "jobs/bad-nodes.jsonl", NOBODY, NOBODY)
    three.run(["scontrol", "update", "PartitionName=main", "State=UP"], check=True)
    assert three.wait_job(job_of(second)) == "COMPLETED", second.job_log.read_text()
    events = read_events(second)
    assert [e["event"] for e in events] == [
        "submitted", "not_started", "requeued", "nodes_excluded", "started", "ended",
    ]  # fmt: skip
    assert (events[1]["nodelist"], events[4]["nodelist"]) == ("h01", "h02")
    assert events[4]["attempt"] == 1
