"""What earlier versions have rendered, queued and saved goes on with this one; see README.md."""

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from clusterddp.data.synthetic import synthesise
from clusterddp.files import read_json
from clusterddp.launchers.local import job_environment
from clusterddp.run.run_dir import RunDir
from tests.kept import requests
from tests.kept.places import FOLDER, PYTHON, relocate
from tests.waiting import dying_with_us

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
COMMITS = ["46dae3b", "4029daf"]
JOB_ID = 7


def unpacked(folder: Path, commit: str, name: str) -> None:
    """What was kept, a script or an archive, with this machine's paths in it."""
    kept = HERE / commit / name
    if kept.name.endswith(".tar.xz"):
        with tarfile.open(kept) as archive:
            archive.extractall(folder / "jobs", filter="data")
    else:
        run = folder / "jobs" / kept.stem
        run.mkdir(parents=True)
        (run / "script.sbatch").write_bytes(kept.read_bytes())
    relocate(folder, {FOLDER: str(folder), PYTHON: sys.executable})
    (folder / "digits.py").write_bytes((HERE / "digits.py").read_bytes())


def typed(folder: Path, *argv: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, timeout=200,
        check=False, preexec_fn=dying_with_us(),
    )  # fmt: skip


def ran(folder: Path, *argv: str, **more: str) -> str:
    """Standard error of a command, which must exit with 0."""
    done = typed(folder, *argv, **more)
    logs = "\n".join(log.read_text() for log in folder.rglob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    return done.stderr


def rehearsed(folder: Path, name: str) -> RunDir:
    """The run whose script was carried out as the local launcher's controller does it."""
    run = RunDir(folder / "jobs" / name)
    ran(folder, sys.executable, "-m", "clusterddp.launchers.local", str(run.path))
    return run


def cause(run: RunDir) -> str:
    """How the run's last attempt ended, as its events have it."""
    return str(json.loads(run.events.read_text().splitlines()[-1])["cause"])


def check_weights(commit: str, name: str, report: dict[str, Any] | None) -> None:
    """Hold a report to what was kept: bit for bit on the same torch and processor."""
    kept = json.loads((HERE / commit / "weights.json").read_text())
    assert report is not None
    assert report["loss"] == pytest.approx(kept[name]["loss"], rel=0.02)
    if requests.machine() == kept["machine"]:
        assert report["weights_sha256"] == kept[name]["weights_sha256"]


@pytest.mark.parametrize("commit", COMMITS)
def test_a_rendered_script_trains_to_its_verdict(tmp_path: Path, commit: str) -> None:
    unpacked(tmp_path, commit, "training.sbatch")
    run = rehearsed(tmp_path, "training")
    assert "done: test accuracy" in run.job_log.read_text()
    assert cause(run) == "done"
    check_weights(commit, "training", read_json(run.report))


@pytest.mark.parametrize("commit", COMMITS)
def test_a_rendered_script_of_a_command_runs_to_its_verdict(tmp_path: Path, commit: str) -> None:
    unpacked(tmp_path, commit, "command.sbatch")
    run = rehearsed(tmp_path, "command")
    logs = [run.rank_log(rank).read_text() for rank in (0, 1)]
    assert logs == [f"rank {rank} of 2: it's $HOME\n" for rank in (0, 1)]
    assert "done: every task ended with exit code 0" in run.job_log.read_text()


@pytest.mark.parametrize("commit", COMMITS)
def test_a_pickled_job_of_submitit_runs(tmp_path: Path, commit: str) -> None:
    """submitit's own script and task, on the rehearsal's srun; the job is unpickled by its task."""
    unpacked(tmp_path, commit, "queued.tar.xz")
    run = RunDir(tmp_path / "jobs/queued")
    script = run.path / f"submitit/{JOB_ID}_submission.sh"
    binaries, steps = tmp_path / "bin", tmp_path / "steps"
    binaries.mkdir()
    steps.mkdir()
    stand_in = binaries / "srun"
    # The rehearsal's srun has no --error: `srun --unbuffered --output OUT --error ERR …`.
    stand_in.write_text(
        f'#!/bin/sh\nshift 5\nexec {sys.executable} -m clusterddp.launchers.srun "$@"\n'
    )
    stand_in.chmod(0o755)
    job = job_environment(script.read_text(), JOB_ID, tmp_path)
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    ran(tmp_path, "bash", str(script), **job, PATH=path, CLUSTERDDP_LOCAL_STEPS=str(steps))
    assert cause(run) == "done"
    check_weights(commit, "training", read_json(run.report))


@pytest.mark.parametrize("commit", COMMITS)
def test_a_pickled_job_keeps_its_policy_of_further_starts(tmp_path: Path, commit: str) -> None:
    unpacked(tmp_path, commit, "queued.tar.xz")
    pickled = tmp_path / f"jobs/queued/submitit/{JOB_ID}_submitted.pkl"
    show = f"""
from clusterddp.run.restart_policy import FAILED, SIGNAL, Start, decide
from submitit.core.utils import DelayedSubmission
policy = DelayedSubmission.load({str(pickled)!r}).function.policy
ends = [decide(policy, cause, [Start(1, cause, 10)]).go_on for cause in (SIGNAL, FAILED)]
assert ends == [True, False], ends
"""
    ran(tmp_path, sys.executable, "-c", show)


def test_a_run_on_synthetic_digits_rendered_anew_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    unpacked(tmp_path, "46dae3b", "synthetic.tar.xz")
    synthesise(str(tmp_path / "data"), train_images=256, test_images=64)
    done = typed(tmp_path, sys.executable, "-m", "clusterddp.launchers.local", "jobs/synthetic")
    assert done.returncode
    verdict = RunDir(tmp_path / "jobs/synthetic").job_log.read_text()
    assert re.search(
        "rank 0 on 127.0.0.1 failed first: the synthetic dataset at .* has changed since this run "
        "first started .* rendered other digits",
        verdict,
    )


@pytest.mark.parametrize("name", requests.REQUESTS)
def test_fixed_requests_train_to_the_kept_weights(tmp_path: Path, name: str) -> None:
    check_weights("4029daf", name, requests.train(name, tmp_path))
