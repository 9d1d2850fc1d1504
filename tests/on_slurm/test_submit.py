"""The main job on a real Slurm, typed as a user would type it."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.files import read_json_lines
from tests.hostile import CARRIED
from tests.on_slurm.cluster import SlurmCluster

CLUSTERDDP = [sys.executable, "-m", "clusterddp"]
# What each task prints of itself in the tests that run a command.
WHO = "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}))"


def submit(cluster: SlurmCluster, folder: Path, *args: str, **kwargs: Any) -> Any:
    return cluster.run([*CLUSTERDDP, "submit", *args], cwd=folder, timeout=240, **kwargs)


def told(run: Path, rank: int) -> dict[str, Any]:
    """What a task running WHO printed."""
    line = (run / "logs" / f"rank-{rank}.log").read_text().splitlines()[-1]
    value: dict[str, Any] = json.loads(line)
    return value


def test_the_main_job_trains_on_eight_ranks_of_two_hosts(
    cluster: SlurmCluster, tmp_path: Path, synthetic_dir: Path
) -> None:
    done = submit(
        cluster, tmp_path, "--nodes", "2", "--gpus-per-node", "4", "--run-name", "main", "--wait",
        "--dataset", "synthetic", "--data-dir", str(synthetic_dir), "--threads", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "jobs/main"
    report = json.loads((run / "report.json").read_text())
    assert (report["world_size"], report["hosts"]) == (8, ["h01", "h02"])
    assert report["backend"] == "gloo"
    assert "warning: each GPU rank gets one CPU" in done.stderr
    assert "4 GPUs were granted" in report["warnings"][0]
    assert sorted(p.name for p in (run / "logs").iterdir()) == [
        "job.log", *(f"rank-{rank}.log" for rank in range(8)),
    ]  # fmt: skip
    kinds = {line["kind"] for line in read_json_lines(run / "metrics.jsonl")}
    assert kinds == {"train", "eval"}
    assert list((run / "checkpoints").glob("*.pt"))
    assert "rank 5 of 8 on h02 (local rank 1): cpu" in (run / "logs/rank-5.log").read_text()
    events = [line["event"] for line in read_json_lines(run / "events.jsonl")]
    assert sorted(events) == ["ended", "started", "submitted"]
    assert "test accuracy" in (run / "logs/job.log").read_text()
    status = cluster.run([*CLUSTERDDP, "status", "main", "--json"], cwd=tmp_path)
    assert json.loads(status.stdout)["state"] == "done"


def test_a_dry_runs_output_works_in_sbatch_by_hand(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "site.cfg").write_text("[environment]\nFROM_SITE = yes\n")
    script = submit(
        cluster, tmp_path, "--nodes", "2", "--run-name", "hand", "--dry-run",
        "--", sys.executable, "-c", WHO,
    ).stdout  # fmt: skip
    (tmp_path / "site.cfg").write_text("[defaults]\nnonsense = 1\n")  # a task does not read it
    job = cluster.run(
        ["bash", "-c", "sbatch --parsable <<<\"$1\"", "bash", script], cwd=tmp_path,
        env={"CLUSTERDDP_NODES": "9", "RANK": "3", "WORLD_SIZE": "7"},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert cluster.wait_job(job.stdout.strip()) == "COMPLETED"
    run = tmp_path / "jobs/hand"
    assert run.stat().st_mode & 0o777 == 0o700
    assert (run / "script.sbatch").read_text().rstrip("\n") == script.rstrip("\n")
    assert json.loads((run / "spec.json").read_text())["run_name"] == "hand"
    assert told(run, 1)["env"]["FROM_SITE"] == "yes"
    assert told(run, 1)["env"]["RANK"] == "1"
    state = cluster.run([*CLUSTERDDP, "status", "hand", "--json"], cwd=tmp_path)
    assert state.returncode == 2  # the site.cfg of this directory is broken …
    (tmp_path / "site.cfg").unlink()
    state = cluster.run([*CLUSTERDDP, "status", "hand", "--json"], cwd=tmp_path)
    assert json.loads(state.stdout)["state"] == "done"


@pytest.mark.parametrize(
    "options",
    [
        ["--launcher", "sbatch"],
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                ["--launcher", "sbatch", "--template", "torchrun.sbatch.j2"],
                ["--launcher", "submitit"],
            )
        ),
        *(  # the very scripts of sbatch
            pytest.param(options, marks=[pytest.mark.slow, pytest.mark.release])
            for options in (
                ["--launcher", "local"],
                ["--launcher", "local", "--template", "torchrun.sbatch.j2"],
            )
        ),
    ],
    ids=" ".join,
)
def test_every_value_reaches_the_task_as_it_was_typed(
    cluster: SlurmCluster, tmp_path: Path, options: list[str]
) -> None:
    environment = {f"HOSTILE_{i}": value for i, value in enumerate(CARRIED)}
    prefix = ["env", *(f"PREFIX_{key}={value}" for key, value in environment.items())]
    name = 'it\'s "a" \\ job, #1 $(touch pwned) `touch pwned`'
    root = tmp_path / 'it\'s a $(touch pwned) "root"; #x'
    done = submit(
        cluster, tmp_path, *options, "--nodes", "2", "--run-name", "a", "--wait",
        "--runs-dir", str(root), "--job-name", name, "--setup", "export FROM_SETUP=$((1 + 1))",
        *(word for k, v in environment.items() for word in ("--env", f"{k}={v}")),
        "--wrapper", shlex.join(prefix),
        "--", sys.executable, "-c", WHO, *CARRIED,
    )  # fmt: skip
    run = root / "a"
    assert done.returncode == 0, done.stdout + done.stderr + (run / "logs/job.log").read_text()
    for rank in (0, 1):
        seen = told(run, rank)
        assert seen["argv"] == CARRIED
        assert {key: seen["env"][key] for key in environment} == environment
        assert seen["env"]["RANK"] == str(rank)
        assert seen["env"]["FROM_SETUP"] == "2"
        prefixed = {key: seen["env"][f"PREFIX_{key}"] for key in environment}
        assert prefixed == environment
        if "local" not in options:
            assert seen["env"]["SLURM_JOB_NAME"] == name
    assert not list(tmp_path.rglob("pwned"))


def test_one_log_per_node_has_every_ranks_output(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import glob, os, time\n"
        "rank = os.environ['RANK']\n"
        "print('rank', rank, end='', flush=True)\n"
        "print(' in one line', flush=True)\n"
        "open(f'printed-{rank}', 'w').close()\n"
        "if rank == '2':\n"  # its end ends the others
        "    while len(glob.glob('printed-*')) < 4: time.sleep(0.05)\n"
        "    raise ValueError('boom')\n"
    )
    done = submit(
        cluster, tmp_path, "--nodes", "2", "--tasks-per-node", "2", "--log-per", "node",
        "--run-name", "a", "--wait", "--", sys.executable, "train.py",
    )  # fmt: skip
    run = tmp_path / "jobs/a"
    assert done.returncode == 1, done.stdout + done.stderr
    assert "(logs/node-1.log)" in done.stderr
    logs = sorted(path.name for path in (run / "logs").iterdir())
    assert logs == ["job.log", "node-0.log", "node-1.log"]
    end_of_log = (
        (run / "logs/job.log").read_text().partition("--- last lines of logs/node-1.log")[2]
    )
    assert "ValueError: boom" in end_of_log
    for rank in range(4):
        shown = cluster.run([*CLUSTERDDP, "logs", "a", "--rank", str(rank)], cwd=tmp_path).stdout
        assert shown.startswith(f"rank {rank} in one line\n")
        assert ("ValueError: boom" in shown) == (rank == 2)


EITHER_LAUNCHER = pytest.mark.parametrize(
    "launcher", ["sbatch", pytest.param("submitit", marks=pytest.mark.slow)]
)


def test_slurm_reads_directives_as_they_were_typed(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in CARRIED:
        argv = ["submit", "--dry-run", f"--job-name={value or 'x'}", "--sbatch", "hold"]
        rendered = CliRunner().invoke(cli, [*argv, "--sbatch", f"comment={value}", "--", "true"])
        assert rendered.exit_code == 0, rendered.stderr
        job = cluster.run(["sbatch", "--parsable"], input=rendered.stdout, cwd=tmp_path)
        assert job.returncode == 0, job.stderr
        lines = cluster.run(["scontrol", "show", "job", job.stdout.strip()]).stdout.split("\n")
        assert [line.strip() for line in lines if line.strip().startswith("Comment=")] == [
            f"Comment={value}".strip()
        ]
        assert lines[0].partition("JobName=")[2] == (value or "x")


@EITHER_LAUNCHER
def test_without_the_shells_variables_only_those_named_arrive(
    cluster: SlurmCluster, tmp_path: Path, launcher: str
) -> None:
    done = submit(
        cluster, tmp_path, "--launcher", launcher, "--export", "NONE", "--env", "NAMED",
        "--env", "SET=a b", "--run-name", "a", "--wait", "--", sys.executable, "-c", WHO,
        env={"NAMED": "it's, here", "OTHER": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    seen = told(tmp_path / "jobs/a", 0)["env"]
    assert (seen["NAMED"], seen["SET"], "OTHER" in seen) == ("it's, here", "a b", False)
    assert "it's, here" not in (tmp_path / "jobs/a/script.sbatch").read_text()


# However busy this machine is, Slurm's answer is waited for.
PATIENT = """
from clusterddp import polling
polling.SINFO_SECONDS = 60.0
from clusterddp.__main__ import main
main()
"""


def submit_patiently(cluster: SlurmCluster, folder: Path, *args: str) -> Any:
    return cluster.run([sys.executable, "-c", PATIENT, "submit", *args], cwd=folder)


def test_what_no_node_has_is_refused_and_sbatch_decides_where_a_person_insists(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    long = ("--run-name", "long", "--time", "900-0", "--json")
    done = submit_patiently(cluster, tmp_path, *long, "--", "true")
    assert done.returncode == 2
    assert "--time 900-0: the limit of partition main is 7-00:00:00" in done.stderr
    one = ("--force", "--tasks-per-node", "1", "--gpus-per-node", "64")
    done = submit_patiently(cluster, tmp_path, *one, "--", "true")
    assert done.returncode == 2
    assert "no node of partition main has more than 4 GPUs (from sinfo)" in done.stderr
    assert "sbatch refused the job: " in done.stderr
    done = submit_patiently(cluster, tmp_path, *long, "--force", "--", "true")
    assert done.returncode == 0, done.stderr
    cluster.run(["scancel", json.loads(done.stdout)["job_id"]], check=True)


def test_a_test_queues_nothing_and_leaves_nothing(cluster: SlurmCluster, tmp_path: Path) -> None:
    typed = ("--test-only", "--run-name", "tested", "--json")
    done = submit(cluster, tmp_path, *typed, "--nodes", "2", "--", "true")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert re.match(r"to start at 20\d\d-.* on nodes h\[01-02\]", told["forecast"])
    assert told["run_dir"] == str(tmp_path / "jobs/tested")
    done = submit(cluster, tmp_path, *typed, "--constraint", "nowhere", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Slurm refuses the job: Invalid feature specification" in done.stderr
    assert cluster.run(["squeue", "-h", "-t", "all", "-n", "tested"]).stdout == ""
    assert list(tmp_path.iterdir()) == []
