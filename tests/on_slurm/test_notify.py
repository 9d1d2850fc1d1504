"""The program that is told a run's end, on a real Slurm: each way to an end, once."""

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.run_dir import RunDir
from clusterddp.status.status import run_status
from tests.event_lines import read_events
from tests.hostile import CARRIED
from tests.on_slurm.cluster import SlurmCluster
from tests.on_slurm.test_submit import submit
from tests.waiting import wait_for

TELL = [
    "import json, os, sys", "verdict = json.load(sys.stdin)",
    "number = len([n for n in os.listdir('.') if n.startswith('told')])",
    "content = [verdict, sys.argv[1:], os.getcwd()]",
    "open(f'told-{number}.tmp', 'w').write(json.dumps(content))",
    "os.rename(f'told-{number}.tmp', f'told-{number}.json')", "print('told it')",
]  # fmt: skip

LONG = 240
"""Seconds for several jobs in a row, on a machine that others use as well."""


def program(folder: Path, *lines: str) -> str:
    """A program that writes what it is told, and what it is called with."""
    path = folder / "tell.py"
    path.write_text("\n".join([*TELL, *lines]))
    return f"{sys.executable} tell.py"


def told(folder: Path, number: int = 0) -> Any:
    path = folder / f"told-{number}.json"
    wait_for(path.exists, f"notice {number}", LONG)
    return json.loads(path.read_text())


def job_of(run: RunDir) -> str:
    return str([e for e in read_events(run) if e["event"] == "submitted"][-1]["job_id"])


def notice_job_is_gone(cluster: SlurmCluster, run: RunDir) -> None:
    wait_for(
        lambda: "-notify" not in cluster.run(["squeue", "-h", "-o", "%j"]).stdout,
        "the notice job",
        LONG,
    )
    assert len(list(run.path.glob("notified-*.json"))) >= 1


def test_a_run_that_is_cancelled_in_the_queue_is_told_by_the_job_that_waits(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    submit(cluster, tmp_path, "--run-name", "held", "--notify", program(tmp_path),
           "--sbatch", "hold", "--", "true")  # fmt: skip
    run = RunDir(tmp_path / "jobs/held")
    cluster.run(["scancel", job_of(run)], check=True)
    verdict, _, _ = told(tmp_path)
    assert (verdict["state"], verdict["notified_by"]) == ("cancelled", "dependent job")
    notice_job_is_gone(cluster, run)
    assert not (tmp_path / "told-1.json").exists()
    assert run_status(run, {}).state == "cancelled"  # without a word of Slurm's


@pytest.mark.slow
def test_every_other_ending_is_told_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    """All at once: a good end, failures, a cancellation, a killed controller, a next job."""
    names = ("ok", "fail", "setup", "cancel", "kill", "next", "bad")
    folders = {name: tmp_path / name for name in names}
    waits = "touch {0}/up; until [ -e {0}/go ]; do sleep 0.1; done; {1}"
    scripts = {
        "ok": ("true", []),
        "fail": ("exit 3", []),
        "setup": ("true", ["--setup", "false && true; exit 4"]),
        "cancel": (waits.format(folders["cancel"], ""), []),
        "kill": (waits.format(folders["kill"], ""), ["--no-requeue"]),
        "next": (
            f"[ -e {folders['next']}/go ] && exit 0; {waits.format(folders['next'], 'exit 75')}",
            ["--requeue"],
        ),
        "bad": ("true", []),
    }
    runs = {}
    for name, (script, options) in scripts.items():
        folder = folders[name]
        folder.mkdir()
        tell = program(folder, "sys.exit(9)") if name == "bad" else program(folder)
        tell += f" {shlex.join(CARRIED)}" if name == "ok" else ""
        done = submit(cluster, folder, "--run-name", name, "--notify", tell, *options,
                      "--", "sh", "-c", script)  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs[name] = RunDir(folder / f"jobs/{name}")
    for name in ("cancel", "kill", "next"):
        wait_for((folders[name] / "up").exists, f"{name} to start")
    cluster.run(["scancel", job_of(runs["cancel"])], check=True)
    [controller] = [
        pid
        for host in cluster.hosts
        for pid, line in cluster.processes(host).items()
        if f" batch {runs['kill'].path} " in line
    ]
    os.kill(controller, signal.SIGKILL)
    cluster.run(["scontrol", "update", f"JobId={job_of(runs['next'])}", "Requeue=0"], check=True)
    (folders["next"] / "go").touch()
    seen = {name: told(folder)[0] for name, folder in folders.items()}
    assert {name: (v["state"], v["exit_code"], v["notified_by"]) for name, v in seen.items()} == {
        "ok": ("done", 0, "script"),
        "fail": ("failed", 3, "script"),
        "setup": ("failed", 4, "script"),
        "cancel": ("cancelled", 143, "script"),
        "kill": ("failed", 137, "dependent job"),
        "next": ("done", 0, "script"),
        "bad": ("done", 0, "script"),
    }
    assert "exit code 3" in seen["fail"]["first_failure"]
    for run in runs.values():
        notice_job_is_gone(cluster, run)
    assert not list(tmp_path.glob("*/told-1.json"))
    _, argv, folder_seen = told(folders["ok"])
    assert (argv, folder_seen) == (CARRIED, str(folders["ok"]))
    assert "told it" in runs["ok"].notify_log.read_text()
    assert " exited with 0; output in " in runs["ok"].job_log.read_text()
    queued = [e["job_id"] for e in read_events(runs["next"]) if e["event"] == "notice_queued"]
    jobs = [e["job_id"] for e in read_events(runs["next"]) if e["event"] == "submitted"]
    assert len(jobs) == 2
    assert set(queued) <= set(jobs)
    # A program that fails takes nothing from the job.
    assert cluster.wait_job(job_of(runs["bad"])) == "COMPLETED"
    [mark] = runs["bad"].path.glob("notified-*.json")
    wait_for(lambda: json.loads(mark.read_text()).get("exit_code") == 9, "the program's end")
