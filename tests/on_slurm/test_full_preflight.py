"""Nodes that the ranks of a training check before its first step, on a real Slurm of four hosts."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import read_json
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.event_lines import read_events
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_preflight import marked_bad
from tests.on_slurm.test_submit import CLUSTERDDP, submit
from tests.waiting import wait_for

BAD = "h03"
CORE = max(os.sched_getaffinity(0))
TRAINING = [
    "--dataset", "synthetic", "--threads", "1", "--batch-size", "32", "--max-steps", "4",
    "--eval-every", "1000epochs", "--no-snapshot", "--no-requeue", "--run-name", "a",
    "--preflight", "full",
]  # fmt: skip
# Python imports it in every process below, and calls `begin` on one host once the ranks have met
# and are about to check their nodes.
HOOK = f"""
import os, pathlib, subprocess, sys, time

HERE = pathlib.Path(__file__).parent

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "clusterddp.training.preflight" and os.uname().nodename == "{BAD}":
            import torch
            begin(torch)

sys.meta_path.insert(0, Finder())

def alter(torch, after):
    plain = torch.mm
    def mm(*args, **more):
        product = plain(*args, **more)
        after(product)
        return product
    torch.mm = mm

def begin(torch):
    """
# One element is wrong, as of a processor that computes wrongly.
WRONG = """
    def one_more(product):
        product[17, 4] += 1
    alter(torch, one_more)
"""
HANGS = """
    alter(torch, lambda product: time.sleep(600))
"""
# Waits until the test has put a fault in; other work on the rank's core begins from here.
WAITS = f"""
    (HERE / "waits").touch()
    until = time.monotonic() + 240
    while not (HERE / "goes").exists() and time.monotonic() < until:
        time.sleep(0.01)
    if (HERE / "busy").exists():
        for task in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(task), {{{CORE}}})
        spin = f"import os; os.nice(-10)\\nwhile os.getppid() == {{os.getpid()}}: pass"
        for _ in range(8):
            subprocess.Popen([sys.executable, "-S", "-c", spin])
"""


LONG = 240
"""Seconds for several ranks that import torch, on a machine that others use as well."""


@pytest.fixture(scope="module")
def four(slurm_available: None) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts=4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def idle(four: SlurmCluster) -> Iterator[None]:
    yield
    four.cancel_all()


def hooked(folder: Path, hook: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(HOOK.rstrip(" ") + hook.lstrip("\n"))
    return {"PYTHONPATH": f"{folder}:{Path.cwd()}"}


def submitted(cluster: SlurmCluster, folder: Path, data: Path, *args: str, **more: Any) -> RunDir:
    done = submit(cluster, folder, *TRAINING, "--data-dir", str(data), *args, **more)
    assert "submitted" in done.stdout + done.stderr, done.stdout + done.stderr
    return RunDir(folder / "jobs/a")


def trained(
    cluster: SlurmCluster, folder: Path, data: Path, *args: str, **more: Any
) -> tuple[RunDir, dict[str, Any]]:
    """A training, and its status."""
    submitted(cluster, folder, data, "--wait", *args, **more)
    answer = cluster.run([*CLUSTERDDP, "status", "a", "--json"], cwd=folder, check=True)
    return RunDir(folder / "jobs/a"), json.loads(answer.stdout)


def causes(run: RunDir) -> list[str]:
    return [event["cause"] for event in read_events(run) if event["event"] == "ended"]


@pytest.mark.slow  # training/test_preflight.py has ranks that check their nodes
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
    [(host, reason)] = marked_bad(run).items()
    assert host == BAD
    assert reason == "rank 2 on cpu computes wrong matrix products: 1 of 262,144 elements are wrong"
    assert f"preflight: {BAD} failed: {reason}" in said
    first = read_json(Attempt(run, 1).full_preflight)
    assert first is not None
    assert [rank["host"] for rank in first["ranks"]] == ["h01", "h02", "h03"]
    assert status["state"] == "done"
    assert "; full: 3 nodes passed in " in status["preflight"]
    assert [event for event in read_events(run) if event.get("first_failure")] == []


def busy_processor(_: SlurmCluster, folder: Path) -> Callable[[], object]:
    (folder / "busy").touch()
    return lambda: None


def slow_link(cluster: SlurmCluster, _: Path) -> Callable[[], object]:
    device = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf"]
    cluster.run_on(
        BAD, [*device, "rate", "20mbit", "burst", "64kb", "latency", "400ms"], check=True
    )
    return lambda: cluster.run_on(BAD, ["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)


@pytest.mark.slow
@pytest.mark.release  # full checks: above; the evaluation: preflight/test_rank_evaluation.py
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        # Where this machine's own load slows the others too, the exchange alone stands apart.
        (
            busy_processor,
            "rank 2 on cpu multiplies matrices at |all-reduces with 2 other nodes reach ",
        ),
        (slow_link, "all-reduces with 2 other nodes reach "),
    ],
)
def test_what_begins_after_quick_checks_is_found_by_full_ones(
    fault: Callable[[SlurmCluster, Path], Callable[[], object]], reason: str, four: SlurmCluster,
    tmp_path: Path, synthetic_dir: Path,
) -> None:  # fmt: skip
    run = submitted(four, tmp_path, synthetic_dir, "--nodes", "3", env=hooked(tmp_path, WAITS))
    wait_for((tmp_path / "waits").exists, "ranks that have met", LONG)
    undo = fault(four, tmp_path)
    try:
        (tmp_path / "goes").touch()
        wait_for(lambda: causes(run), "the end", LONG)
    finally:
        undo()
    assert list(marked_bad(run)) == [BAD], run.job_log.read_text()
    assert re.match(reason, marked_bad(run)[BAD])
    assert causes(run) == ["preflight"]
    [ended] = [event for event in read_events(run) if event["event"] == "ended"]
    assert ended.get("first_failure") is None
    [job] = [event["job_id"] for event in read_events(run) if event["event"] == "started"]
    assert four.wait_job(job) == "FAILED"
    assert "ExitCode=1:0" in four.run(["scontrol", "show", "job", "-o", job], check=True).stdout
    quick = read_json(Attempt(run, 1).preflight)
    assert quick is not None
    assert quick["failed"] == {}
    assert not list(run.checkpoints.glob("*.pt"))


@pytest.mark.slow
def test_a_rank_that_hangs_in_the_checks_is_named(
    four: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    limits = ["--hang-timeout", "2s", "--process-group-timeout", "16s"]
    run, status = trained(
        four, tmp_path, synthetic_dir, "--nodes", "3", *limits, env=hooked(tmp_path, HANGS)
    )
    assert causes(run) == ["failed"]
    found = f"rank 2 on {BAD} failed first: hung: multiplying matrices in its preflight, while"
    assert found in run.job_log.read_text()
    assert found in status["first_failure"]
