import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from clusterddp.cli.debug import free_port
from clusterddp.cli.train_options import TRAIN_OPTION_NAMES, config_from, train_options
from clusterddp.outcome import first_failure, read_outcomes
from clusterddp.run_dir import RunDir
from clusterddp.train_config import TrainConfig

PATIENCE = 90
# Fails on rank 1 at its second batch, before an exchange that rank 0 then waits in.
FAILING_RANK = """
import os, sys
import clusterddp.supervise
fork = clusterddp.supervise.supervise
def supervise(run_dir, env, child):
    def failing():
        from clusterddp.training.images import Images
        batch, seen = Images.batch, []
        def fail(self, indices):
            seen.append(1)
            if env.rank == 1 and len(seen) == 2:
                raise RuntimeError("boom")
            return batch(self, indices)
        Images.batch = fail
        return child()
    return fork(run_dir, env, failing)
clusterddp.supervise.supervise = supervise
from clusterddp.__main__ import main
main()
"""


@pytest.fixture
def start() -> Iterator[Any]:
    """Starts ranks by hand; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_one(argv: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                argv,
                env={**os.environ, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ranks(world_size: int, port: int) -> list[dict[str, str]]:
    return [
        {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(world_size)
    ]  # fmt: skip


def train_argv(synthetic_dir: Path, run_dir: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "clusterddp", "train", "--dataset=synthetic", "--threads=1",
        f"--data-dir={synthetic_dir}", f"--run-dir={run_dir}", *more,
    ]  # fmt: skip


def report_of(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return content


def test_two_hand_started_ranks_train_to_the_weights_that_torchrun_gives(
    start: Any, synthetic_dir: Path, tmp_path: Path
) -> None:
    argv = train_argv(synthetic_dir, tmp_path / "hand", "--max-steps=5")
    processes = [start(argv, env) for env in ranks(2, free_port())]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    host = socket.gethostname()
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2 on {host} (local rank {rank}): cpu, 1 thread, gloo" in output
    assert "x 2 (linear)" in outputs[0] and "batch 64 x 2 = 128" in outputs[0]
    run = RunDir(tmp_path / "hand")
    assert [outcome.exit_code for outcome in read_outcomes(run)] == [0, 0]
    assert report_of(run.path)["world_size"] == 2

    agent = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--no-python",
    ]  # fmt: skip
    argv = train_argv(synthetic_dir, tmp_path / "agent", "--max-steps=5", "--own-log")
    process = start([*agent, *argv], {"OMP_NUM_THREADS": "1"})
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0, output
    agent_run = RunDir(tmp_path / "agent")
    assert "test accuracy" in agent_run.rank_log(0).read_text()
    assert "rank 1 of 2" in agent_run.rank_log(1).read_text()
    assert report_of(agent_run.path)["weights_sha256"] == report_of(run.path)["weights_sha256"]


def test_a_failing_rank_ends_the_others_and_is_named(
    start: Any, synthetic_dir: Path, tmp_path: Path
) -> None:
    argv = train_argv(synthetic_dir, tmp_path)
    argv[1:3] = ["-c", FAILING_RANK]
    processes = [start(argv, env) for env in ranks(2, free_port())]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert "RuntimeError: boom" in outputs[1] and "Traceback" in outputs[1]
    assert "lost another rank" in outputs[0]
    failure = first_failure(read_outcomes(RunDir(tmp_path)))
    assert failure is not None
    assert (failure.rank, failure.reason) == (1, "RuntimeError: boom")


def test_a_port_in_use_is_one_clear_message(
    start: Any, synthetic_dir: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = ranks(2, taken.getsockname()[1])[0]
        process = start(train_argv(synthetic_dir, tmp_path), first)
        output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1
    assert "in use" in output and "Traceback" not in output


def test_a_wrong_request_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for argv, env in (
        (["--epochs=0"], {}),
        (["--lr=nan"], {}),
        (["--save-every=often"], {}),
        (["--model=resnet"], {}),
        ([], {"RANK": "0"}),
    ):
        process = subprocess.run(
            [sys.executable, "-m", "clusterddp", "train", f"--run-dir={tmp_path / 'run'}", *argv],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert process.returncode == (1 if env else 2), process.stderr
        assert "Traceback" not in process.stderr
        assert not (tmp_path / "run").exists()


def test_help_shows_every_default_and_imports_no_torch() -> None:
    program = (
        "import sys; from clusterddp.cli.main import cli; "
        "cli.main(['train', '--help'], standalone_mode=False); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'torchvision', 'numpy')))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    text = " ".join(process.stdout.split())
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')} " in text
        shown = field.default if field.name != "resume" else "(none)"
        assert f"[default: {shown}]" in text


def options_command(settings: bool) -> click.Command:
    def run(**params: Any) -> TrainConfig:
        return config_from({**params, "nodes": 2})

    return click.command()(train_options(run, settings=settings))


def test_options_become_the_configuration_and_its_argv_the_options() -> None:
    given = TrainConfig(
        dataset="synthetic", data_dir="my data", lr=0.25, epochs=3, resume="jobs/x", device="cpu"
    )
    command = options_command(settings=False)
    assert command.main(given.to_argv(), standalone_mode=False) == given
    assert command.main([], standalone_mode=False) == TrainConfig()
    assert set(TRAIN_OPTION_NAMES) == {field.name for field in dataclasses.fields(TrainConfig)}


def test_only_commands_that_a_person_types_read_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERDDP_BATCH_SIZE", "7")
    for settings, batch_size in ((True, 7), (False, TrainConfig().batch_size)):
        config = options_command(settings).main([], standalone_mode=False)
        assert config.batch_size == batch_size
