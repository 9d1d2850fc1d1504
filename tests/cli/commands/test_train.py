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

from clusterddp.checkpoints.catalog import step_of
from clusterddp.cli.options import given_by, options
from clusterddp.request.spec import OPTIONS
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.run.attempt import begin
from clusterddp.run.outcome import first_failure, read_outcomes
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.workstation import free_port
from tests.waiting import dying_with_us, wait_until

PATIENCE = 90
# Fails on rank 1 at its second batch, before an exchange that rank 0 then waits in.
FAILING_RANK = """
import os, sys
import clusterddp.worker.supervise
fork = clusterddp.worker.supervise.supervise
def supervise(run_dir, env, child, **more):
    def failing():
        from clusterddp.data.loader import Images
        batches, seen = Images.batches, []
        def failing_batches(self, *order):
            for batch in batches(self, *order):
                seen.append(1)
                if env.rank == 1 and len(seen) == 3:  # the first is that before the first step
                    raise RuntimeError("boom")
                yield batch
        Images.batches = failing_batches
        return child()
    return fork(run_dir, env, failing, **more)
clusterddp.worker.supervise.supervise = supervise
from clusterddp.__main__ import main
main()
"""


# Waits for ever in an exchange, as NCCL does, where gloo would raise an error. Rank 1 hangs at its
# fourth batch; rank 0 is saving then, and cannot go on with that before it may.
WAITING_RANKS = """
import os, sys
import clusterddp.worker.supervise
fork = clusterddp.worker.supervise.supervise
def supervise(run_dir, env, child, **more):
    def waiting():
        import dataclasses, time
        from clusterddp.checkpoints.writer import Saver
        from clusterddp.data.loader import Images
        from clusterddp.worker import join, task
        enter, joins = join._init_group, join.join
        batches, publish = Images.batches, Saver._publish
        def enters(config, *more):
            enter(dataclasses.replace(config, process_group_timeout=3600), *more)
        def as_over_nccl(*arguments):
            joined = joins(*arguments)
            agreed = dataclasses.replace(joined.agreed, backend="nccl")
            return dataclasses.replace(joined, agreed=agreed)
        def batches_until_it_hangs(self, *order):
            for number, batch in enumerate(batches(self, *order)):
                yield batch
                if env.rank == 1 and number == 2:
                    time.sleep(3600)
        def publish_when_it_may(self, *what):
            while not (run_dir / "may-save").exists():
                time.sleep(0.02)
            return publish(self, *what)
        join._init_group, join.join = enters, as_over_nccl
        Images.batches, Saver._publish = batches_until_it_hangs, publish_when_it_may
        if env.rank:
            task._SAVE_SECONDS = 0.1
        return child()
    return fork(run_dir, env, waiting, **more)
clusterddp.worker.supervise.supervise = supervise
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
                preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# Variables of a step, and of ranks of another training, as a surrounding shell may have them.
SHELL_OF_A_JOB = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "3", "RANK": "3",
    "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1",
}  # fmt: skip


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
    # The last rank first, by flags in the shell of a Slurm job; then rank 0, by variables.
    argv = train_argv(synthetic_dir, tmp_path / "hand", "--max-steps=5")
    port = free_port()
    flags = ["--rank=1", "--world-size=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    second = start([*argv, *flags], SHELL_OF_A_JOB)
    wait_until(second, f"rank 1 waits up to 5m for all 2 at 127.0.0.1:{port}")
    processes = [start(argv, ranks(2, port)[0]), second]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    host = socket.gethostname()
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 2 on {host} (local rank {rank}): cpu, 1 thread, gloo" in output
    assert "x 2 (linear)" in outputs[0] and "batch 64 x 2 = 128" in outputs[0]
    run = RunDir(tmp_path / "hand")
    outcomes = read_outcomes(run.outcomes)
    assert [(outcome.exit_code, outcome.job_id) for outcome in outcomes] == [(0, ""), (0, "")]
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


@pytest.mark.slow
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
    failure = first_failure(read_outcomes(RunDir(tmp_path).outcomes))
    assert failure is not None
    assert (failure.rank, failure.reason) == (1, "RuntimeError: boom")


@pytest.mark.slow
def test_ranks_that_wait_in_nccl_save_and_leave_and_name_the_one_that_hangs(
    start: Any, synthetic_dir: Path, tmp_path: Path
) -> None:
    attempt = begin(RunDir(tmp_path))
    argv = train_argv(
        synthetic_dir, tmp_path, "--attempt=1", "--save-every=2steps", "--hang-timeout=1s",
        "--process-group-timeout=6s",
    )  # fmt: skip
    argv[1:3] = ["-c", WAITING_RANKS]
    processes = [start(argv, env) for env in ranks(2, free_port())]
    shown = wait_until(processes[0], "clusterddp: rank 0 on")
    assert "rank 0 on" in shown.partition("clusterddp: rank 0 on")[0]  # the watchdog's verdict
    assert not list(attempt.checkpoints.glob("step-*.pt"))
    (tmp_path / "may-save").touch()
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], outputs
    assert [path.name for path in attempt.checkpoints.glob("step-*.pt")] == ["step-00000002.pt"]
    outcomes = read_outcomes(attempt.outcomes)
    assert [outcome.peer_lost for outcome in outcomes] == [True, True]
    failure = first_failure(outcomes)
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (1, 1)
    assert failure.reason.startswith("hung: fetching the batch of step 4, while others are")


# Longer than any test waits.
LONG = ("--epochs=5000", "--log-every=20")


@pytest.mark.slow
def test_of_two_starts_the_second_is_refused_and_one_that_was_overtaken_ends(
    start: Any, synthetic_dir: Path, tmp_path: Path
) -> None:
    argv = train_argv(synthetic_dir, tmp_path, *LONG, "--save-every=1steps")
    first = start(argv)
    wait_until(first)
    second = start([*argv, "--rendezvous-timeout=1s"])
    output = second.communicate(timeout=PATIENCE)[0]
    assert second.returncode == 1
    who = f"attempt 1 of {tmp_path.name} is still trained by job (none) on {socket.gethostname()}"
    assert f"{who}; waiting up to 1s" in output
    assert f"{who}: rank 0 was active" in output and "Traceback" not in output
    assert first.poll() is None
    assert not (tmp_path / "attempts/0002").exists()

    checkpoints = tmp_path / "attempts/0001/checkpoints"
    (tmp_path / "attempts/0002").mkdir()  # as another host's start does
    last = max(map(step_of, checkpoints.iterdir()))
    output = first.communicate(timeout=PATIENCE)[0]
    assert first.returncode == 1
    assert "attempt 1 ends: superseded: attempt 2 of the run has started" in output
    # One may have been on its way; those of the seconds after it are not there.
    assert max(map(step_of, checkpoints.iterdir())) <= last + 2
    assert not (tmp_path / "attempts/0001/end.json").exists()


def test_a_port_in_use_is_a_clear_message(start: Any, synthetic_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = start(train_argv(synthetic_dir, tmp_path), ranks(2, taken.getsockname()[1])[0])
        output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1
    assert "uses the port" in output and "Traceback" not in output


def test_a_wrong_request_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for argv, env in (
        (["--epochs=0"], {}),
        (["--lr=nan"], {}),
        (["--save-every=often"], {}),
        (["--model=resnet"], {}),
        (["--rank=0", "--world-size=2"], {}),
        (["--rank=2", "--world-size=2", "--master-port=7"], {}),
        ([], {"RANK": "0"}),
    ):
        process = subprocess.run(
            [sys.executable, "-m", "clusterddp", "train", f"--run-dir={tmp_path / 'run'}", *argv],
            env={**os.environ, **env}, capture_output=True, text=True, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
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
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE,
        check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    text = " ".join(process.stdout.split())
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')} " in text
        row = OPTIONS[field.metadata.get("option", {}).get("name") or field.name.replace("_", "-")]
        shown = row.text(field.default) if field.default != "" else "none"
        if row.name in ("hang-timeout", "rendezvous-timeout"):
            shown = row.shown
        elif isinstance(field.default, float):
            shown = f"{field.default:g}"
        assert field.type is bool or f"[default: {shown}]" in text


def options_command(settings: bool) -> click.Command:
    @click.pass_context
    def run(ctx: click.Context, **_params: Any) -> TrainConfig:
        return TrainConfig.of(given_by(ctx))

    other = click.option("--nodes", default=2)
    rows = [*TRAINING, OPTIONS["hang-timeout"]]
    return click.command()(other(options(rows, settings=settings)(run)))


def test_options_become_the_configuration_and_its_argv_the_options() -> None:
    given = TrainConfig(
        dataset="synthetic", data_dir="my data", lr=0.25, epochs=3, init_from="jobs/x", device="cpu"
    )
    command = options_command(settings=False)
    assert command.main(given.to_argv(), standalone_mode=False) == given
    assert command.main([], standalone_mode=False) == TrainConfig()
    assert {*(row.parameter for row in TRAINING), "hang_timeout"} == {
        field.name for field in dataclasses.fields(TrainConfig)
    }


def test_only_commands_that_a_person_types_read_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERDDP_BATCH_SIZE", "7")
    for settings, batch_size in ((True, 7), (False, TrainConfig().batch_size)):
        assert options_command(settings).main([], standalone_mode=False).batch_size == batch_size
