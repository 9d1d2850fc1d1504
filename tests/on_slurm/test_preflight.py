"""Nodes that are checked ahead of the tasks, on a real Slurm of four hosts, with faults put in."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.preflight import collector
from clusterddp.run import bad_nodes
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.host_faults import Undo, blocked_port, busy_core, full_disk, slow_link
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.preflight.test_gpu_state import compiled

BAD = "h03"
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")

# Stops the probe, as a disk that never answers would, once it has answered the batch host.
STOPS = f"""
import os, signal, sys
if "probe" in sys.orig_argv and os.uname().nodename == "{BAD}":
    os.statvfs = lambda directory: os.kill(os.getpid(), signal.SIGSTOP)
"""
# Slurm runs it ahead of each task, and takes over the variables that it prints.
PROLOG = f"""#!/bin/sh
if [ "$SLURMD_NODENAME" = {BAD} ] && [ -e "$0.on" ]; then
    echo export LD_PRELOAD={FAKETIME}
    echo export FAKETIME=+60s
fi
"""


@pytest.fixture(scope="module")
def four(slurm_available: None, tmp_path_factory: Any) -> Iterator[SlurmCluster]:
    prolog = tmp_path_factory.mktemp("prolog") / "prolog"
    prolog.write_text(PROLOG)
    prolog.chmod(0o755)
    conf = {"TaskProlog": str(prolog), "SrunPortRange": "50000-50999"}
    with SlurmCluster(hosts=4, conf=conf) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def idle(four: SlurmCluster) -> Iterator[None]:
    yield
    four.cancel_all()


def checked(cluster: SlurmCluster, folder: Path, *args: str, **more: Any) -> tuple[RunDir, Any]:
    """A run of four nodes without requeue, and its status."""
    submit(cluster, folder, "--nodes", "4", "--run-name", "a", "--no-snapshot", "--no-requeue",
           "--wait", "--preflight", "quick", *args, "--", "touch", "started", **more)  # fmt: skip
    answer = cluster.run([*CLUSTERDDP, "status", "a", "--json"], cwd=folder, check=True)
    return RunDir(folder / "jobs/a"), json.loads(answer.stdout)


def marked_bad(run: RunDir) -> dict[str, str]:
    return {host: node.reason for host, node in bad_nodes.read(run.path.parent).items()}


@pytest.mark.slow
def test_good_nodes_pass_and_the_tasks_start(four: SlurmCluster, tmp_path: Path) -> None:
    run, status = checked(four, tmp_path)
    assert status["state"] == "done", run.job_log.read_text()
    assert status["preflight"].startswith("4 nodes passed in ")
    assert (tmp_path / "started").exists()
    assert marked_bad(run) == {}


def skewed_clock(cluster: SlurmCluster, _: str) -> Undo:
    if not FAKETIME.exists() or cluster.root:
        pytest.skip("apt-get install faketime, on this machine")
    prolog = cluster.run(["scontrol", "show", "config"], check=True).stdout
    path = next(line.split()[-1] for line in prolog.splitlines() if line.startswith("TaskProlog"))
    mark = Path(f"{path}.on")
    mark.touch()
    return mark.unlink


FAULTS = [
    pytest.param(slow_link, "sends at most "),
    pytest.param(
        blocked_port,
        "2 other nodes cannot connect to it",
        marks=[pytest.mark.slow, pytest.mark.release],  # below, behind a firewall
    ),
    pytest.param(full_disk, "/dev/shm: No space left on device", marks=pytest.mark.slow),
    pytest.param(busy_core, "a fixed loop takes ", marks=[pytest.mark.slow, pytest.mark.alone]),
    pytest.param(skewed_clock, "clock 60.", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_fault_is_named_with_its_node_and_tasks_start_if_it_is_merely_slow(
    fault: Callable[[SlurmCluster, str], Undo], reason: str, four: SlurmCluster, tmp_path: Path
) -> None:
    if fault is blocked_port and four.run_on(BAD, ["sh", "-c", "command -v iptables"]).returncode:
        pytest.skip("apt-get install iptables")
    undo = fault(four, BAD)
    try:
        run, status = checked(four, tmp_path)
    finally:
        undo()
    said = run.job_log.read_text()
    assert list(marked_bad(run)) == [BAD], said
    assert reason in marked_bad(run)[BAD]
    assert f"preflight: {BAD} failed: " in said
    assert status["preflight"].startswith(f"failed: {BAD}; 3 nodes passed in ")
    is_slow = fault in (slow_link, busy_core)  # requeue is off: nothing else would go on
    assert status["state"] == ("done" if is_slow else "stopped")
    assert [event["cause"] for event in read_events(run) if event["event"] == "ended"] == [
        "done" if is_slow else "preflight"
    ]
    assert (tmp_path / "started").exists() == is_slow


@pytest.mark.slow
def test_a_gpu_whose_memory_is_in_use_costs_its_node_and_what_all_gpus_have_costs_none(
    four: SlurmCluster, tmp_path: Path
) -> None:
    compiled(tmp_path, "-DOLD", host=BAD)
    run, status = checked(
        four, tmp_path, "--gpus-per-node=2", env={"LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert status["state"] == "stopped", run.job_log.read_text()
    assert marked_bad(run) == {BAD: "GPU 1: 3.0 GiB in use, by process 99999991, process 99999992"}
    said = run.job_log.read_text()
    for what in ("GPU fabric", "GPU links"):
        assert (
            f"4 of 4 nodes fail the same check ({what}), so none is marked bad. h01: GPU " in said
        )


@pytest.mark.slow
def test_a_node_that_is_needed_and_fails_again_is_used_after_one_start(
    four: SlurmCluster, tmp_path: Path
) -> None:
    undo = full_disk(four, BAD)
    try:
        submit(four, tmp_path, "--nodes", "4", "--run-name", "a", "--no-snapshot", "--requeue",
               "--wait", "--preflight", "quick", "--", "touch", "started")  # fmt: skip
    finally:
        undo()
    run = RunDir(tmp_path / "jobs/a")
    log = run.job_log.read_text()
    happened = read_events(run)
    assert [each["cause"] for each in happened if each["event"] == "ended"] == [
        "preflight", "done",
    ], log  # fmt: skip
    assert f"{BAD} is bad (/dev/shm: No space left on device), but is not excluded" in log
    assert f"already marked bad, used anyway: {BAD}\n" in log
    assert "not_started" not in [each["event"] for each in happened]
    assert (tmp_path / "started").exists()


OPEN = "6817:6818,50000:50999"
"""Ports of Slurm itself: slurmctld's, slurmd's and srun's (SrunPortRange)."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ports", "said"),
    [
        pytest.param(
            f"{OPEN},12000:31999", "preflight: 4 nodes passed in ", marks=pytest.mark.release
        ),
        (OPEN, "preflight: could not run: h02 and 2 more cannot connect to port "),
    ],
)
def test_behind_a_firewall_that_drops_it_uses_the_ranks_ports_or_says_what_to_open(
    ports: str, said: str, four: SlurmCluster, tmp_path: Path
) -> None:
    if four.run_on(BAD, ["sh", "-c", "command -v iptables"]).returncode:
        pytest.skip("apt-get install iptables")
    rule = ["INPUT", "-i", "eth0", "-p", "tcp", "--syn", "-m", "multiport", "!", "--dports", ports]
    for host in four.hosts:
        four.run_on(host, ["iptables", "-A", *rule, "-j", "DROP"], check=True)
    try:
        run, status = checked(four, tmp_path)
    finally:
        for host in four.hosts:
            four.run_on(host, ["iptables", "-D", *rule, "-j", "DROP"], check=True)
    log = run.job_log.read_text()
    assert said in log
    assert (tmp_path / "started").exists()
    assert (status["state"], marked_bad(run)) == ("done", {})
    if ports == OPEN:
        assert "open ports 12000 to 31999 between the nodes" in log
        # It waits for the connections' 4 s, and for no deadline of its own.
        record = json.loads(Attempt(run, 1).preflight.read_text())
        assert record["seconds"] < collector.PATIENCE_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "causes"), [(BAD, ["preflight", "done"]), ("h04", ["done"])])
def test_a_spare_takes_the_place_of_a_node_that_fails_or_is_blamed_itself(
    four: SlurmCluster, tmp_path: Path, bad: str, causes: list[str]
) -> None:
    undo = full_disk(four, bad)
    try:
        submit(four, tmp_path, "--nodes", "3", "--spare-nodes", "1", "--run-name", "a",
               "--no-snapshot", "--no-requeue", "--wait", "--preflight", "quick", "--",
               "touch", "started")  # fmt: skip
    finally:
        undo()
    run = RunDir(tmp_path / "jobs/a")
    said, happened = run.job_log.read_text(), read_events(run)
    assert [each["cause"] for each in happened if each["event"] == "ended"] == causes, said
    started = [each for each in happened if each["event"] == "started"]
    assert len({(each["job_id"], each["restart"]) for each in started}) == 1
    if bad == BAD:
        assert [each["nodelist"] for each in started] == ["h01,h02,h03", "h01,h02,h04"]
    else:
        assert "preflight: failed: h04; 3 nodes passed in " in said
    assert list(marked_bad(run)) == [bad]


@pytest.mark.slow
def test_a_node_that_answers_and_then_does_nothing_is_named_with_what_it_was_at(
    four: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STOPS)
    run, _ = checked(four, tmp_path, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"})
    [(host, reason)] = marked_bad(run).items()
    assert host == BAD
    assert reason.startswith("stopped answering during the check of its local disk /")
    assert four.run(["squeue", "-h"]).stdout == ""


@pytest.mark.slow
def test_where_the_checks_cannot_run_the_tasks_start_all_the_same(
    four: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        'import sys\nif "probe" in sys.orig_argv:\n    sys.exit("too old")\n'
    )
    run, status = checked(four, tmp_path, env={"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"})
    assert status["state"] == "done"
    assert status["preflight"].startswith("could not run: no node answered")
    assert (tmp_path / "started").exists()
    assert marked_bad(run) == {}
