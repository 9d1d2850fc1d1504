"""The Slurm client and the commands on runs, against a real Slurm without accounting."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.slurm.states import HELD
from tests.on_slurm.cluster import SlurmCluster
from tests.waiting import PATIENCE, wait_for

CLUSTERDDP = [sys.executable, "-m", "clusterddp"]


def script(*lines: str, comment: str = "") -> str:
    comments = [f"#SBATCH --comment={comment}"] if comment else []
    return "\n".join(["#!/bin/bash", "#SBATCH --output=/dev/null", *comments, *lines, ""])


def client(cluster: SlurmCluster, code: str, *arguments: str, **env: str) -> Any:
    """What `code` (an expression on modules of `slurm`, `args` and `os`) gives on a login host."""
    program = (
        "import dataclasses, json, os, sys\n"
        "from clusterddp.slurm import client\n"
        "args = sys.argv[1:]\n"
        f"print(json.dumps({code}, default=dataclasses.asdict))\n"
    )
    got = cluster.run([sys.executable, "-c", program, *arguments], env=env, check=True)
    return json.loads(got.stdout)


def query(cluster: SlurmCluster, *job_ids: str, **env: str) -> dict[str, dict[str, Any]]:
    answer: dict[str, dict[str, Any]] = client(cluster, "client.query(args)", *job_ids, **env)
    return answer


def wait_state(cluster: SlurmCluster, job_id: str, state: str, timeout: float = PATIENCE) -> None:
    deadline = time.monotonic() + timeout
    while cluster.job_state(job_id) != state:
        assert time.monotonic() < deadline, cluster.job_state(job_id)
        time.sleep(0.1)


def test_states_of_real_jobs(cluster: SlurmCluster) -> None:
    done = cluster.sbatch(script("exit 0"))
    # The name of a job cannot forge its state, and a person's settings of squeue hide no job.
    failed = cluster.sbatch(script("exit 3"), "--job-name=x JobState=COMPLETED Reason=None")
    killed = cluster.sbatch(script("kill -9 $$"))
    step_killed = cluster.sbatch(script("srun -n1 bash -c 'kill -9 $$'"))
    running = cluster.sbatch(script("sleep 300"))
    cancelled = cluster.sbatch(script("sleep 300"))
    held = cluster.sbatch(script("true"), "--hold")
    dropped = cluster.sbatch(script("true"), "--hold")
    for job_id in (done, failed, killed, step_killed):
        cluster.wait_job(job_id)
    wait_state(cluster, running, "RUNNING")
    wait_state(cluster, cancelled, "RUNNING")
    client(cluster, "[client.cancel(a) for a in args]", cancelled, dropped)
    cluster.wait_job(cancelled)
    going_on = (running, held)
    ended = (done, failed, killed, step_killed, cancelled, dropped)
    own = {"SQUEUE_PARTITION": "high", "SQUEUE_FORMAT": "%j", "SQUEUE_STATES": "R"}
    seen = query(cluster, *going_on, *ended, "999", **own)
    states = {job_id: (answer["state"], answer["exit_code"]) for job_id, answer in seen.items()}
    assert states == {
        done: ("done", 0),
        failed: ("failed", 3),
        killed: ("failed", 137),
        step_killed: ("failed", 137),
        running: ("running", None),
        cancelled: ("cancelled", states[cancelled][1]),
        held: ("pending", None),
        dropped: ("cancelled", states[dropped][1]),
        "999": ("unknown", None),
    }
    assert seen[held]["reason"] == "JobHeldUser"
    assert seen["999"]["problem"] == ""


def test_a_job_is_put_back_behind_others_or_is_held_until_it_is_released(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    other = cluster.sbatch(script("true"), "--hold")
    program = tmp_path / "requeue.py"
    program.write_text(
        "import os, sys\nfrom clusterddp.slurm import client\n"
        "own = os.environ['SLURM_JOB_ID']\n"
        "try:\n    client.requeue_with_dependency(own, sys.argv[1].replace('OWN', own))\n"
        "except client.StillHeld as error:\n    print(error)\n"
    )
    seen = {}
    for name, dependency in (("behind", f"afterany:{other}"), ("refused", "afterany:OWN")):
        again = f'[ -z "$SLURM_RESTART_COUNT" ] || exec touch {tmp_path}/{name}.again'
        put = f"{sys.executable} {program} {dependency} >{tmp_path}/{name}.said"
        seen[name] = cluster.sbatch(script("trap '' TERM", again, put), "--no-requeue")

    def reason(name: str) -> str:
        return str(query(cluster, seen[name])[seen[name]]["reason"])

    wait_for(lambda: reason("behind") == "Dependency", "the job that waits for another one")
    wait_for(lambda: reason("refused") == HELD, "the job that cannot wait for itself")
    said = tmp_path / "refused.said"
    wait_for(lambda: "dependency problem" in said.read_text(), "the refusal")
    assert reason("refused") == HELD
    client(cluster, "[client.release(a) for a in args]", seen["refused"], other)
    for name, job_id in seen.items():
        assert cluster.wait_job(job_id) == "COMPLETED"
        assert (tmp_path / f"{name}.again").exists()


def test_a_lost_submission_is_found_by_its_comment(cluster: SlurmCluster) -> None:
    mine = cluster.sbatch(script("true", comment="clusterddp:a|b"), "--hold")
    cluster.sbatch(script("true", comment="clusterddp:other"), "--hold")
    code = "client._lost('sbatch said nothing', os.environ, args[0], float(args[1]))"
    assert client(cluster, code, "clusterddp:a|b", str(time.time())) == mine


@pytest.mark.slow  # a command that meets no slurmctld tries for some ten seconds
def test_a_controller_that_is_down_is_named(cluster: SlurmCluster) -> None:
    job_id = cluster.sbatch(script("true"), "--hold")
    cluster.kill_slurmctld()
    try:
        seen = query(cluster, job_id)[job_id]
    finally:
        cluster.start_slurmctld()
    assert seen["state"] == "unknown"
    assert "squeue" in seen["problem"]


@pytest.mark.slow
def test_submission_from_inside_a_job_is_as_from_a_login_shell(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    child = script(f"env -0 >{tmp_path}/$SLURM_JOB_NAME.env")
    program = (
        "import os, sys\nfrom clusterddp.slurm.client import sbatch\n"
        "print(sbatch(open(sys.argv[1]).read(), os.environ, comment='c'))\n"
    )
    for name in ("outside", "inside"):
        text = child.replace("#!/bin/bash", f"#!/bin/bash\n#SBATCH --job-name={name}")
        (tmp_path / f"{name}.sh").write_text(text)
    outside = cluster.run([sys.executable, "-c", program, tmp_path / "outside.sh"], check=True)
    (tmp_path / "submit.py").write_text(program)
    parent = script(
        "export RANK=3 WORLD_SIZE=8 MASTER_PORT=1 SBATCH_PARTITION=high SLURM_CPU_BIND=none",
        f"srun --ntasks=1 {sys.executable} {tmp_path}/submit.py {tmp_path}/inside.sh "
        f">{tmp_path}/inside.id",
    )
    parent_id = cluster.sbatch(parent, "--gpus-per-node=2", "--ntasks=4")
    assert cluster.wait_job(parent_id) == "COMPLETED"
    inside = (tmp_path / "inside.id").read_text().strip()
    assert cluster.wait_job(outside.stdout.strip()) == "COMPLETED"
    assert cluster.wait_job(inside) == "COMPLETED"
    from_login, from_job = (
        dict(
            item.split("=", 1)
            for item in (tmp_path / f"{name}.env").read_text().split("\0")
            if "=" in item
        )
        for name in ("outside", "inside")
    )
    differing = {
        name
        for name in from_login.keys() | from_job.keys()
        if from_login.get(name) != from_job.get(name)
    }
    assert differing <= {
        # of the job itself, and of where sbatch was called
        *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME", "SLURM_TASK_PID", "SLURM_SUBMIT_HOST"),
        *("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR"),
        *("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"),  # set from 23.02 on
        # what a batch shell has in any case
        *("HOSTNAME", "SHLVL", "OLDPWD", "TMPDIR", "ENVIRONMENT", "_"),
    }
    assert from_job["SLURM_JOB_PARTITION"] == "main"


# -- the commands on runs --------------------------------------------------------------------


def clusterddp(cluster: SlurmCluster, root: Path, *argv: str) -> tuple[int, str, str]:
    got = cluster.run([*CLUSTERDDP, argv[0], "--runs-dir", str(root), *argv[1:]], timeout=120)
    return got.returncode, got.stdout, got.stderr


def states(cluster: SlurmCluster, root: Path) -> dict[str, str]:
    code, out, err = clusterddp(cluster, root, "runs", "--json")
    assert code == 0, err
    return {status["name"]: status["state"] for status in json.loads(out)}


def test_runs_live_and_end_as_jobs_and_cancel_say(cluster: SlurmCluster, tmp_path: Path) -> None:
    jobs = {}
    for name, options, command in (
        ("done", [], "exit 0"), ("failed", [], "exit 3"), ("running", [], "sleep 300"),
        ("queued", ["hold"], ""), ("by-hand", ["hold"], ""),
    ):  # fmt: skip
        asked = ["--run-name", name, "--json", *(f"--sbatch={option}" for option in options)]
        code, out, err = clusterddp(cluster, tmp_path, "submit", *asked, "--", "sh", "-c", command)
        assert code == 0, err
        jobs[name] = json.loads(out)["job_id"]
    cluster.wait_job(jobs["done"])
    cluster.wait_job(jobs["failed"])
    cluster.run(["scancel", jobs["by-hand"]], check=True)
    wait_for((tmp_path / "running/logs/rank-0.log").exists, "the command")
    before = {"done": "done", "failed": "failed", "queued": "queued", "by-hand": "cancelled"}
    assert states(cluster, tmp_path) == {**before, "running": "running"}
    code, out, err = clusterddp(cluster, tmp_path, "cancel", "running", "queued", "done")
    assert code == 0, err
    assert "asked Slurm" in out
    assert "done has already ended: done" in out
    cluster.wait_job(jobs["running"])
    cancelled = {"queued": "cancelled", "running": "cancelled"}
    assert states(cluster, tmp_path) == {**before, **cancelled}


@pytest.mark.slow
def test_elements_of_an_array_are_runs_that_live_and_are_cancelled_one_by_one(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    argv = ["submit", "--run-name", "a", "--dry-run", "--", "sleep", "300"]
    _, script, _ = clusterddp(cluster, tmp_path, *argv)
    array = cluster.sbatch(script, "--array=0-2", cwd=tmp_path)
    runs = [f"a-{index}" for index in range(3)]
    wait_for(lambda: len(list(tmp_path.glob("a-*/logs/rank-0.log"))) == 3, "each has started")
    assert states(cluster, tmp_path) == dict.fromkeys(runs, "running")

    def left() -> set[str]:
        answer = cluster.run(["squeue", "-h", "-t", "RUNNING", "-o", "%i"], check=True)
        return set(answer.stdout.split())

    # The raw id of the last element is the array's: it must not take all of them with it.
    for index, others in ((0, {f"{array}_1", f"{array}_2"}), (2, {f"{array}_1"})):
        code, out, err = clusterddp(cluster, tmp_path, "cancel", f"{array}_{index}")
        assert code == 0, err
        assert f"(job {array}_{index})" in out
        wait_for(lambda others=others: left() <= others, "the element has left the queue")
        assert left() == others
    assert states(cluster, tmp_path)["a-1"] == "running"
