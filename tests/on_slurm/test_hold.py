"""Runs inside an allocation on a real Slurm: a shell of salloc, and a hold."""

import os
import signal
from pathlib import Path

import pytest

from clusterddp.processes.table import processes
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import CLUSTERDDP
from tests.waiting import wait_for

SCRIPT = """\
import os, sys, time
from pathlib import Path
print("rank", os.environ["RANK"], "on", os.uname().nodename, flush=True)
deadline = time.monotonic() + 200
while not Path(sys.argv[1]).exists() and time.monotonic() < deadline:
    time.sleep(0.1)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a script that waits for a file, and ends with a code."""
    (tmp_path / "wait.py").write_text(SCRIPT)
    return tmp_path


def clusterddp(cluster: SlurmCluster, folder: Path, *argv: str, code: int = 0) -> str:
    done = cluster.run([*CLUSTERDDP, *argv], cwd=folder, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return str(done.stdout + done.stderr)


def submit_in(cluster: SlurmCluster, folder: Path, name: str, *more: str, code: int = 0) -> str:
    argv = ["submit", "--in", "lab", "--no-snapshot", "--run-name", name, *more]
    waits = ["--", "python3", "wait.py", f"end-{name}", "0"]
    return clusterddp(cluster, folder, *argv, *waits, code=code)


def wait_for_rank(folder: Path, name: str) -> str:
    """Wait until rank 0 has printed its line, and return it."""
    log = folder / "jobs" / name / "logs/rank-0.log"
    wait_for(lambda: log.exists() and "rank 0" in log.read_text(), f"rank 0 of {name}")
    return log.read_text().strip()


def state(cluster: SlurmCluster, folder: Path, name: str) -> str:
    lines = clusterddp(cluster, folder, "status", name).splitlines()
    return next(line for line in lines if line.startswith("state")).split(maxsplit=1)[1]


def keeper_of(folder: Path, name: str) -> int:
    """Return the process that keeps a run of a hold."""
    words = ["held", os.fspath(folder / "jobs" / name)]
    found = [pid for pid, each in processes().items() if each.argv[2:4] == words]
    return min(found)  # not one that it has just forked


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_shell_of_salloc_runs_a_script_at_once(cluster: SlurmCluster, folder: Path) -> None:
    """Its records and exit codes are a job's, and a request beyond the allocation is refused."""
    command = " ".join(CLUSTERDDP)
    lines = f"""
        submit() {{ {command} submit --no-snapshot --run-name "$@"; echo "$1 ends with $?"; }}
        touch end
        submit good --nodes 2 --gpus-per-node 1 -- python3 wait.py end 0
        submit bad -- python3 wait.py end 3
        submit large --nodes 3 -- python3 wait.py end 0
        submit greedy --gpus-per-node 3 -- python3 wait.py end 0
        {command} resume bad -- python3 wait.py end 0; echo "again ends with $?"
    """
    asked = ["salloc", "-N2", "--gpus-per-node=2", "--time=10", "bash", "-c", lines]
    done = cluster.run(asked, cwd=folder, timeout=350, check=False)
    said = done.stdout + done.stderr
    for line in ("good ends with 0", "bad ends with 1", "large ends with 2", "greedy ends with 2",
                 "again ends with 0", "--nodes: 3 requested, but job"):  # fmt: skip
        assert line in said, said
    assert "this shell holds job" in said
    assert not (folder / "jobs/large").exists()
    good, bad = (read_events(RunDir(folder / "jobs" / name)) for name in ("good", "bad"))
    assert [event["event"] for event in good] == ["submitted", "started", "ended"]
    assert {event["job_id"] for event in good} == {bad[0]["job_id"]}
    ends = [event for event in bad if event["event"] == "ended"]
    assert [(end["attempt"], end["cause"]) for end in ends] == [(1, "failed"), (2, "done")]
    assert ends[0]["exit_code"] == 3


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_hold_runs_scripts_side_by_side_and_one_after_another(
    cluster: SlurmCluster, folder: Path
) -> None:
    """Its own end, and the end of a run by `cancel`, are separate."""
    said = clusterddp(cluster, folder, "hold", "--nodes", "2", "--run-name", "lab", "--time", "20")
    assert f"lab holds {', '.join(cluster.hosts)} as job" in said
    submit_in(cluster, folder, "a")
    submit_in(cluster, folder, "b")
    first, second = (wait_for_rank(folder, name) for name in ("a", "b"))
    assert {first, second} == {f"rank 0 on {host}" for host in cluster.hosts}
    assert "no node is free" in submit_in(cluster, folder, "c", code=2)
    assert not (folder / "jobs/c").exists()
    assert "lab has runs: a, b" in clusterddp(cluster, folder, "release", "lab", code=2)
    clusterddp(cluster, folder, "cancel", "b")
    wait_for(lambda: state(cluster, folder, "b").startswith("cancelled"), "the end of b")
    submit_in(cluster, folder, "e")
    wait_for_rank(folder, "e")
    assert "no node is free" in clusterddp(cluster, folder, "resume", "b", code=2)
    assert state(cluster, folder, "b").startswith("cancelled")
    os.kill(keeper_of(folder, "e"), signal.SIGKILL)
    wait_for(lambda: state(cluster, folder, "e").startswith("failed"), "the end of e")
    (folder / "end-a").touch()
    wait_for(lambda: state(cluster, folder, "a").startswith("done"), "the end of a")
    (folder / "end-d").touch()
    submit_in(cluster, folder, "d", "--nodes", "2", "--wait")
    wait_for(lambda: "idle" in state(cluster, folder, "lab"), "the hold to be idle")
    clusterddp(cluster, folder, "release", "lab")
    wait_for(lambda: state(cluster, folder, "lab").startswith("stopped"), "the end of the hold")
    assert "by 'clusterddp release'" in state(cluster, folder, "lab")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_idle_hold_ends(cluster: SlurmCluster, folder: Path) -> None:
    clusterddp(cluster, folder, "hold", "--run-name", "lab", "--idle", "20s", "--time", "20")
    wait_for(lambda: state(cluster, folder, "lab").startswith("stopped"), "the end of the hold")
    assert "by being idle for 20s" in state(cluster, folder, "lab")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hold_keeps_its_other_node_after_a_loss(cluster: SlurmCluster, folder: Path) -> None:
    first, lost = cluster.hosts
    clusterddp(cluster, folder, "hold", "--nodes", "2", "--run-name", "lab", "--time", "20")
    submit_in(cluster, folder, "a", "--nodelist", lost)
    wait_for_rank(folder, "a")
    cluster.run(["scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test"], check=True)
    wait_for(lambda: f"lost: {lost}" in state(cluster, folder, "lab"), "the loss to be seen")
    wait_for(lambda: state(cluster, folder, "a").startswith("failed"), "the end of a")
    (folder / "end-b").touch()
    submit_in(cluster, folder, "b", "--wait")
    assert wait_for_rank(folder, "b") == f"rank 0 on {first}"
    assert "a ends with it" in (folder / "jobs/lab/logs/job.log").read_text()
    cluster.run(["scontrol", "update", f"NodeName={lost}", "State=RESUME"])
