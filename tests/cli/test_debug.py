import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp.cli.debug import free_port
from clusterddp.run_dir import RunDir
from tests.processes import has_gone

PATIENCE = 90
# A model whose construction stops as a breakpoint does: it asks the person who typed the command.
ASKING_MODEL = """
import os, sys
import clusterddp.training.models as models
convnet = models.MODELS["convnet"]
def asking():
    print("in process", os.getpid(), "asked for", input(), flush=True)
    return convnet()
models.MODELS["convnet"] = asking
from clusterddp.__main__ import main
main()
"""


@pytest.fixture
def debug(synthetic_dir: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(
        *argv: str,
        program: tuple[str, ...] = ("-m", "clusterddp"),
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [
                    sys.executable, *program, "debug", "--dataset=synthetic", "--threads=1",
                    f"--data-dir={synthetic_dir}", f"--run-dir={tmp_path / 'run'}", *argv,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until_training(process: "subprocess.Popen[str]") -> None:
    assert process.stdout
    while True:
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        assert ready, "it has not started to train"
        line = process.stdout.readline()
        assert line, process.stderr and process.stderr.read()
        if "images/s" in line:
            return


def rank_pids(run: RunDir) -> list[int]:
    return [json.loads(run.outcome(rank).read_text())["pid"] for rank in (0, 1)]


def test_one_process_is_this_very_process_with_its_input(debug: Any) -> None:
    process = debug("--max-steps=2", program=("-c", ASKING_MODEL))
    out, err = process.communicate("the loss\n", timeout=PATIENCE)
    assert process.returncode == 0, err
    assert f"in process {process.pid} asked for the loss" in out
    assert "done: test accuracy" in out


def test_ranks_of_a_surrounding_job_do_not_matter(debug: Any) -> None:
    job = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "8",
        "RANK": "3", "WORLD_SIZE": "8",
    }  # fmt: skip
    process = debug("--max-steps=1", env=job)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "rank 0 of 1" in out


def test_several_processes_train_together_and_each_has_its_log(debug: Any, tmp_path: Path) -> None:
    process = debug("--procs=2", "--max-steps=3", env={"SLURM_STEP_ID": "0", "RANK": "3"})
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    run = RunDir(tmp_path / "run")
    assert json.loads(run.report.read_text())["world_size"] == 2
    assert run.rank_log(0).read_text() == out
    assert "rank 1 of 2" in run.rank_log(1).read_text() and "rank 1 of 2" not in out


def test_ctrl_c_leaves_no_process_behind(debug: Any, tmp_path: Path) -> None:
    process = debug("--procs=2", "--epochs=1000", "--log-every=1")
    wait_until_training(process)
    pids = rank_pids(RunDir(tmp_path / "run"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert all(has_gone(pid) for pid in pids)


def test_term_leaves_no_process_behind(debug: Any, tmp_path: Path) -> None:
    process = debug("--procs=2", "--epochs=1000", "--log-every=1")
    wait_until_training(process)
    pids = rank_pids(RunDir(tmp_path / "run"))
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert all(has_gone(pid) for pid in pids)


def test_a_rank_that_dies_ends_the_others_and_is_named(debug: Any, tmp_path: Path) -> None:
    process = debug("--procs=2", "--epochs=1000", "--log-every=1")
    wait_until_training(process)
    os.kill(rank_pids(RunDir(tmp_path / "run"))[1], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    named = f"rank 1 on {socket.gethostname()} failed first: killed by SIGKILL (logs/rank-1.log)"
    assert named in err


def test_a_wrong_request_starts_nothing(debug: Any, tmp_path: Path) -> None:
    for argv in (["--procs=0"], ["--epochs=-1"], ["--run-name=x"]):
        process = debug(*argv)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2, err
        assert not (tmp_path / "run").exists()


def test_a_free_port_lies_below_the_ephemeral_range() -> None:
    with socket.socket() as probe:
        port = free_port()
        assert 12000 <= port < 32000
        probe.bind(("127.0.0.1", port))


def test_a_debug_run_is_known_to_the_other_commands(synthetic_dir: Path, tmp_path: Path) -> None:
    def clusterddp(*argv: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "clusterddp", *argv],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip

    train = ["debug", "--dataset=synthetic", f"--data-dir={synthetic_dir}", "--max-steps=1"]
    first = clusterddp(*train, "--run-name=one")
    assert first.returncode == 0, first.stderr
    status = json.loads(clusterddp("status", "one", "--json").stdout)
    assert (status["state"], status["world_size"], status["step"]) == ("done", 1, 1)
    assert (tmp_path / "jobs/one").stat().st_mode & 0o777 == 0o700
    again = clusterddp(*train, "--run-name=one")
    assert again.returncode == 2
    assert "exists already" in again.stderr
    broken = clusterddp("debug", "--dataset=mnist", "--data-dir=none", "--run-name=two")
    assert broken.returncode == 2
    assert not (tmp_path / "jobs/two").exists()
