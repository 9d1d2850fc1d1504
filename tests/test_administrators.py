"""The tables of docs/administrators.md: calls of Slurm's commands, counted by stand-ins on PATH."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from clusterddp import polling
from clusterddp.launchers import sbatch
from clusterddp.request.resources import Resources
from clusterddp.slurm import client
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace  # noqa: F401
from tests.request.test_spec import spec
from tests.waiting import PATIENCE, wait_for

TEXT = (Path(__file__).parents[1] / "docs" / "administrators.md").read_text()
ROWS = {
    label: [cell.strip() for cell in cells.split("|")]
    for label, cells in re.findall(r"^\| (.*?) \| (.*) \|$", TEXT, re.MULTILINE)
}
COUNTS = (1, 100, 1000)
SLOW = pytest.mark.slow
MANY = [SLOW, pytest.mark.release]


def calls_on_the_page(label: str, column: int = 0) -> dict[str, int]:
    cell = ROWS[label][column]
    if cell == "the same":
        return calls_on_the_page(label, column - 1)
    return {} if cell == "none" else {(w := c.split())[0]: int(w[1]) for c in cell.split(", ")}


@pytest.fixture
def site(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Workplace:  # noqa: F811
    """A Slurm that answers and is waited for; squeue says what stands in the file `queue`."""
    for module, seconds in ((polling, "SINFO_SECONDS"), (client, "QUERY_SECONDS")):
        monkeypatch.setattr(module, seconds, PATIENCE)
    workplace.command("sinfo", "echo 'gpu*|1-00:00:00|64|10|gpu:4'")
    workplace.command("sbatch", "while read -r _; do :; done; echo 9")
    workplace.command("scontrol", "echo 'SLURM_VERSION = 24.11.5'")
    workplace.command("squeue", 'while read -r line; do echo "$line"; done <queue')
    workplace.command("sacct", "exit 1")
    workplace.command("scancel", ":")
    (workplace.folder / "queue").write_text("")
    return workplace


def count(site: Workplace, *argv: str) -> dict[str, int]:
    (site.folder / "calls").unlink(missing_ok=True)
    got = site.invoke(*argv)
    assert got.code == 0, got.err
    return dict(Counter(line.split()[0] for line in site.calls))


def show(site: Workplace, state: str, *jobs: str) -> None:
    lines = [f"{job} {job.partition('_')[0]} N/A|{state}|None|(null)\n" for job in jobs]
    (site.folder / "queue").write_text("".join(lines))


@pytest.mark.timeout(900)  # a thousand directories, each synced: a busy disk takes minutes
@pytest.mark.parametrize("runs", [1, 100, pytest.param(1000, marks=MANY)])
def test_the_calls_for_many_runs(runs: int, site: Workplace) -> None:
    column = COUNTS.index(runs)
    jobs = [str(100_000 + number) for number in range(runs)]
    for job in jobs:
        site.run(f"r-{job}", submitted(job), started(job))
        site.run(f"done-{job}", submitted(job), started(job), ended(job, 0, cause="done"))
    site.sweep("sw", ("lr",), *[(str(number),) for number in range(runs)])
    counted = {}

    counted["`runs`, all done"] = count(site, "runs", "done-*")
    counted["`runs`, all forgotten by slurmctld"] = count(site, "runs", "r-*")
    show(site, "RUNNING", *jobs)
    counted["`runs`, all queued or running"] = count(site, "runs", "r-*")
    show(site, "FAILED", *jobs)
    counted["`runs`, all ended and known to slurmctld"] = count(site, "runs", "r-*")
    show(site, "RUNNING", *(f"7_{number}" for number in range(runs)))
    counted["`status` of a sweep"] = count(site, "status", "sw")
    counted["`cancel --yes` of a sweep"] = count(site, "cancel", "--yes", "sw")
    swept = ("--run-name", "new", "--sweep", f"lr=1..{runs}", "--", "/bin/true", "{lr}")
    counted["`submit` of a sweep with as many trials"] = count(site, "submit", *swept)

    assert counted == {label: calls_on_the_page(label, column) for label in counted}
    many = [label for label, cells in ROWS.items() if len(cells) == len(COUNTS) and " " in label]
    assert set(counted) == {label for label in many if label.startswith("`")}


def test_the_calls_for_one_run(site: Workplace) -> None:
    asked = ("--time", "10", "--", "/bin/true")
    counted = {
        "`submit`": count(site, "submit", "--run-name", "a", *asked),
        "`submit --test-only`": count(site, "submit", "--test-only", *asked),
        "`submit --dry-run`": count(site, "submit", "--dry-run", *asked),
        "`site`": count(site, "site"),
    }
    site.command("sbatch", "case $1 in --version) echo slurm 26.05.5;; *) echo 9;; esac")
    counted["`submit --requeue=expedite`"] = count(site, "submit", "--requeue=expedite", *asked)
    show(site, "RUNNING", "9")
    counted["`submit --after RUN`"] = count(site, "submit", "--after", "a", *asked)
    counted["`status`, queued or running"] = count(site, "status", "a")
    counted["`stop`, running"] = count(site, "stop", "a")
    counted["`cancel`"] = count(site, "cancel", "a")
    assert counted == {label: calls_on_the_page(label) for label in counted}
    assert set(counted) == {
        label for label, cells in ROWS.items() if len(cells) == 1 and label.startswith("`")
    } - {"`scancel --signal=USR1`, `--batch`, `--full`", "`scontrol requeue`"}


# -- in a job: the very script, with an srun that starts one task here ---------------------------

SRUN = """
while [ "$1" != -- ]; do shift; done; shift
export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=1
export SLURM_STEP_NODELIST=h01 SLURM_STEP_TASKS_PER_NODE=1
exec "$@"
"""
JOB = " JobId=17 {} Restarts=0 Partition=gpu Requeue=1 RunTime=00:00:01 TimeLimit=1:00:00 Command="
HELD = 'touch "$SLURM_SUBMIT_DIR/up"; until [ -e "$SLURM_SUBMIT_DIR/go" ]; do sleep 0.02; done; '


@pytest.mark.parametrize(
    ("label", "command", "state", "fields"),
    [
        ("the run is done", "true", "JobState=RUNNING", {}),
        pytest.param("a rank fails, and the run ends", "exit 3", "JobState=RUNNING", {},
         marks=SLOW),
        pytest.param("a rank fails, and the run is retried", "exit 3", "JobState=RUNNING",
         {"requeue": True, "retries": 1}, marks=SLOW),
        pytest.param("the ranks saved, and the job is requeued", "exit 75", "JobState=RUNNING",
         {"requeue": True}, marks=SLOW),
        pytest.param("the job is cancelled", f"{HELD}exit 143", "JobState=COMPLETING",
         {"requeue": True}, marks=SLOW),
        pytest.param("the job is preempted and requeued", f"{HELD}exit 75",
         "JobState=RUNNING PreemptTime=2026-03-02T14:20:00", {"requeue": True}, marks=SLOW),
    ],
    ids=lambda value: value if isinstance(value, str) and value in ROWS else "",
)  # fmt: skip
def test_the_calls_in_a_job(
    label: str, command: str, state: str, fields: dict[str, object], tmp_path: Path
) -> None:
    stand_in(tmp_path, "srun", SRUN)
    shown = shlex.quote(JOB.format(state))
    stand_in(
        tmp_path, "scontrol",
        f"case $2 in config) echo 'SLURM_VERSION = 24.11.5';; job) echo {shown};; esac",
    )  # fmt: skip
    for name in ("squeue", "sacct", "scancel", "sbatch", "sinfo"):
        stand_in(tmp_path, name, "exit 1")
    request = spec(
        run_name="a", run_dir=str(tmp_path / "jobs/a"), resources=Resources(nodes=1),
        python=sys.executable, controller_python=sys.executable,
        command=("sh", "-c", command), **fields,
    )  # fmt: skip
    (tmp_path / "script").write_text(sbatch.render(request))
    job = subprocess.Popen(
        ["bash", "script"], cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
        env={
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "17",
            "SLURM_JOB_NODELIST": "h01",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_SUBMIT_DIR": str(tmp_path),
        },
    )  # fmt: skip
    try:
        if command.startswith(HELD):
            wait_for((tmp_path / "up").exists, "the task")
            job.send_signal(signal.SIGTERM)
            log = tmp_path / "jobs/a/logs/job.log"
            wait_for(lambda: "got SIGTERM" in log.read_text(), "the signal")
            (tmp_path / "go").touch()
        job.wait(PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert dict(Counter((tmp_path / "calls").read_text().split())) == calls_on_the_page(label)


def stand_in(folder: Path, name: str, body: str) -> None:
    """Put a program on the job's PATH; its name is added to `calls` at each call."""
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\necho {name} >>{folder}/calls\n{body}\n")
    path.chmod(0o755)
