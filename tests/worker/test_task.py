import dataclasses
import gc
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterddp.checkpoints.catalog import name_of
from clusterddp.distributed import agreement, rendezvous, tcp_store
from clusterddp.distributed.agreement import RankInfo
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    DataError,
    PeerError,
    TrainingError,
)
from clusterddp.files import read_json
from clusterddp.processes import hardware
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import IMAGE_VARIABLE
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.training import cuda_graph, stop
from clusterddp.training.learner import Learner
from clusterddp.training.metrics import Journal
from clusterddp.worker import join, supervise, task
from clusterddp.worker.join import usable_threads
from clusterddp.worker.task import run_task
from tests.training.capturing import Captures


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """run_task exports to os.environ and sets torch's threads; both are put back."""
    environ, threads = dict(os.environ), torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(threads)
    assert not dist.is_initialized()


@pytest.fixture
def config(synthetic_dir: Path) -> TrainConfig:
    return make_config(synthetic_dir)


def make_config(synthetic_dir: Path, **fields: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"dataset": "synthetic", "threads": 1, "max_steps": 3}
    return TrainConfig(data_dir=str(synthetic_dir), **{**defaults, **fields})


def test_a_single_process_trains_and_reports(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_task(config, tmp_path / "run") == 0
    run = RunDir(tmp_path / "run")
    report = read_json(run.report)
    assert report is not None
    assert set(report) == {
        "accuracy", "loss", "train_seconds", "total_seconds", "images_per_second", "world_size",
        "num_nodes", "hosts", "backend", "device", "threads", "model", "dataset", "parameters",
        "steps", "epochs", "train_images", "test_images", "versions", "warnings", "weights_sha256",
        "resumed_from", "attempt", "num_attempts", "repeated_steps", "lost_seconds", "attempts",
        "saving", "job_id", "restart", "finished", "precision", "cuda_graph", "strategy",
        "capture_seconds",
        "peak_memory_bytes", "ranks", "usage",
    }  # fmt: skip
    [rank] = report["ranks"]
    assert (rank["rank"], rank["host"]) == (0, socket.gethostname())
    assert rank["images_per_second"] > 0
    assert report["peak_memory_bytes"] == rank["peak_memory_bytes"] > 10_000_000
    evaluation = read_json(run.evaluation)
    assert evaluation is not None
    assert evaluation["step"] == 3
    assert sum(map(sum, evaluation["confusion"])) == report["test_images"] == 500
    right = sum(row[digit] for digit, row in enumerate(evaluation["confusion"]))
    assert right / 500 == report["accuracy"]
    assert all(one["label"] != one["predicted"] for one in evaluation["worst"][:3])
    assert report["hosts"] == [socket.gethostname()]
    assert (report["parameters"], report["steps"], report["world_size"]) == (28_938, 3, 1)
    assert report["total_seconds"] > report["train_seconds"] > 0
    usage = report[
        "usage"
    ]  # to the hundredth of a second; started by hand, from when ranks had met
    trained = 3600 * (usage["computing"] + usage["waiting"])
    assert trained == pytest.approx(report["train_seconds"], abs=0.01)
    assert 0 < usage["computing"] < usage["node_hours"] < report["total_seconds"] / 3600
    assert read_json(run.current / "alive")["spent"]["first_step"] > 0  # type: ignore[index]
    assert report["resumed_from"] is None
    out = capsys.readouterr().out
    host = socket.gethostname()
    assert f"rank 0 of 1 on {host} (local rank 0): cpu, 1 thread, gloo" in out
    assert (
        f"lr {config.lr:g} x 1 (linear) = {config.lr:g}, warmup 100 steps; batch 64 x 1 = 64" in out
    )
    resolved = read_json(run.resolved)
    assert resolved is not None
    assert (resolved["backend"], resolved["threads"], resolved["global_batch_size"]) == (
        "gloo", 1, 64,
    )  # fmt: skip


def test_a_task_shows_its_parent_that_python_runs_while_the_watchdog_is_on(
    synthetic_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for watchdog, shown in ((60, True), (0, False)):
        beats = list[float]()
        monkeypatch.setattr(supervise, "gil_watch", SimpleNamespace(beat=beats.append))
        config = make_config(synthetic_dir, hang_timeout=watchdog)
        assert run_task(config, tmp_path / f"run-{watchdog}") == 0
        assert bool(beats) is shown
        assert not shown or (beats[0] > 60 and beats[-1] == 0)


def test_batch_sizes_are_tried_instead_of_training(
    synthetic_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = make_config(
        synthetic_dir, model="mlp", find_batch_size=True, batch_size=1000, precision="fp32"
    )
    assert run_task(asked, tmp_path) == 0
    run = RunDir(tmp_path)
    rows = json.loads(run.batch_sizes.read_text())
    assert set(rows[0]) == {"batch_size", "images_per_second", "memory_bytes", "note"}
    assert rows[-1]["batch_size"] <= 2000 and all(row["images_per_second"] > 0 for row in rows)
    assert re.search(r"^use: --batch-size \d+", capsys.readouterr().out, re.MULTILINE)
    assert not run.report.exists() and not list(Attempt(run, 1).checkpoints.iterdir())
    end = read_json(Attempt(run, 1).end)
    assert end is not None and end["cause"] == "done"


def test_a_rank_that_is_profiled_and_a_board_leave_their_files(
    synthetic_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    asked = make_config(synthetic_dir, profile="0", tensorboard=True, max_steps=16)
    assert run_task(asked, tmp_path) == 0
    attempt = Attempt(RunDir(tmp_path), 1).path
    assert (attempt / "profile" / "rank-0.trace.json.gz").stat().st_size > 1000
    assert list((attempt / "tensorboard").glob("events.out.tfevents.*"))
    assert "rank-0.trace.json.gz" in capsys.readouterr().out


def test_a_run_that_is_done_says_that_nothing_was_left_to_train(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_task(config, tmp_path)
    capsys.readouterr()
    assert run_task(config, tmp_path) == 0
    assert "done: nothing left to train after 3 steps" in capsys.readouterr().out


def test_a_run_goes_on_from_its_own_newest_checkpoint(
    config: TrainConfig, synthetic_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_task(config, tmp_path)
    run_task(make_config(synthetic_dir, max_steps=5, threads=0), tmp_path)
    newest = Attempt(RunDir(tmp_path), 2).checkpoints / "step-00000003.pt"
    report = read_json(RunDir(tmp_path).report)
    assert report is not None
    assert (report["steps"], report["resumed_from"]) == (5, str(newest))
    assert report["threads"] == 1, "the decision of the first start"
    assert f"resuming from {newest}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (signal.SIGUSR1, EXIT_STOPPED, "signal"),
        (signal.SIGTERM, EXIT_STOPPED, "SIGTERM"),
        (signal.SIGINT, EXIT_INTERRUPTED, "interrupt"),
    ],
)
def test_a_signal_has_it_save_leave_and_go_on_another_time(
    number: int, code: int, reason: str, synthetic_dir: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def step(_: Journal) -> None:
        if not sent:
            os.kill(os.getpid(), sent.append(number) or number)

    sent: list[int] = []
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(Journal, "step", step)
    assert run_task(make_config(synthetic_dir, max_steps=0, epochs=50), tmp_path) == code
    first = Attempt(RunDir(tmp_path), 1)
    end = json.loads(first.end.read_text())
    assert (end["cause"], end["reason"]) == ("stopped", reason)
    assert (first.checkpoints / name_of(end["step"])).exists()
    assert not (tmp_path / "report.json").exists()
    said = capsys.readouterr().out
    assert (
        f"stopped at step {end['step']} ({reason}). The next attempt continues from there" in said
    )
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers

    more = make_config(synthetic_dir, max_steps=end["step"] + 1, epochs=50)
    assert run_task(more, tmp_path) == EXIT_DONE, "what was asked of the first is forgotten"
    assert json.loads(Attempt(RunDir(tmp_path), 2).end.read_text()) == {
        "cause": "done", "reason": "", "step": end["step"] + 1, "saved": end["step"] + 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "version", "least"),
    [("torch", "2.3.1+cu121", "2.4"), ("torch", "1.13.0", "2.4"), ("numpy", "1.23.5", "1.24")],
)
def test_a_package_that_is_too_old_is_named_in_a_sentence(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, name: str, version: str, least: str
) -> None:
    monkeypatch.setattr(sys.modules[name], "__version__", version)
    wanted = f"{name} {least} or later is needed, but {sys.executable} has {version} on "
    with pytest.raises(TrainingError, match=re.escape(wanted)) as caught:
        run_task(config, None)
    assert f"-m pip install '{name}>={least}'" in str(caught.value)
    monkeypatch.setenv(IMAGE_VARIABLE, "torch.sif")
    with pytest.raises(TrainingError, match=r"in the image torch\.sif on .*--python"):
        run_task(config, None)


@pytest.mark.parametrize("version", ["2.10.0a0+git1", "3.0", "built by hand"])
def test_a_version_that_is_no_older_is_taken(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert run_task(config, tmp_path / "run") == EXIT_DONE


def test_a_package_that_is_broken_says_why(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "numpy.py").write_text("raise OSError('libblas.so.3: cannot open it')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numpy")
    wanted = "numpy cannot be imported by .* \\(OSError: libblas.so.3: cannot open it\\) on "
    with pytest.raises(TrainingError, match=wanted):
        run_task(config, None)


def test_the_packages_that_are_checked_are_those_that_are_installed() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, least in task._PACKAGES.items():
        assert f'"{name}>={".".join(map(str, least))}",' in project


def test_a_signal_before_the_training_begins_is_noted_and_loses_nothing(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "_require_packages", lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_task(config, tmp_path) == EXIT_STOPPED
    first = Attempt(RunDir(tmp_path), 1)
    assert json.loads(first.end.read_text())["step"] == 0
    assert [path.name for path in first.checkpoints.glob("*.pt")] == [name_of(0)]
    monkeypatch.undo()
    assert run_task(config, tmp_path) == EXIT_DONE


def test_ctrl_c_before_the_training_begins_ends_at_once(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "log_settings", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run_task(config, tmp_path)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_request_in_the_attempts_folder_stops_it(
    synthetic_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(_: Journal) -> None:
        if not first.stop.exists():
            first.ask_to_stop("stop")

    first = Attempt(RunDir(tmp_path), 1)
    monkeypatch.setattr(stop, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(Journal, "step", step)
    assert run_task(make_config(synthetic_dir, max_steps=0, epochs=5000), tmp_path) == EXIT_STOPPED
    assert json.loads(first.end.read_text())["reason"] == "stop"


def test_the_job_is_over_in_time_without_a_signal(
    synthetic_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(slurm, "seconds_left", lambda job_id: {"17": 8.0}[job_id])
    assert run_task(make_config(synthetic_dir, max_steps=0, epochs=5000), tmp_path) == EXIT_STOPPED
    assert json.loads(Attempt(RunDir(tmp_path), 1).end.read_text())["reason"] == "time limit"


def test_resume_starts_a_new_run_from_another_ones_checkpoint(
    config: TrainConfig, synthetic_dir: Path, tmp_path: Path
) -> None:
    run_task(config, tmp_path / "old")
    new = make_config(synthetic_dir, max_steps=5, init_from=str(tmp_path / "old"))
    run_task(new, tmp_path / "new")
    assert (tmp_path / "new" / "checkpoints" / "step-00000005.pt").exists()
    assert not (tmp_path / "old" / "checkpoints" / "step-00000005.pt").exists()


def test_the_environment_is_exported_once_and_whole(config: TrainConfig, tmp_path: Path) -> None:
    run_task(config, tmp_path)
    expected = DistEnv.from_environ({}).to_environ()
    assert {name: os.environ[name] for name in expected} == expected


def test_the_garbage_collector_is_as_it_was(config: TrainConfig, tmp_path: Path) -> None:
    run_task(config, tmp_path)
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:
        run_task(config, tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_missing_dataset_names_the_ways_to_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="clusterddp data fetch"):
        run_task(TrainConfig(data_dir=str(tmp_path / "none")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_absent_torch_is_named_with_host_and_interpreter(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(TrainingError) as caught:
        run_task(config, tmp_path)
    for word in (sys.executable, socket.gethostname(), "pip install 'torch>=2.4'"):
        assert word in str(caught.value)


def test_granted_gpus_that_torch_does_not_see_are_in_log_and_report(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", (tmp_path / "none", tmp_path / "driver"))
    run_task(config, tmp_path / "run")
    said = "2 GPUs were granted, but torch sees none: training on the CPU"
    assert f"warning: {socket.gethostname()}: {said}" in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["warnings"] == [f"{socket.gethostname()}: {said}"]

    (tmp_path / "driver").touch()
    with pytest.raises(TrainingError, match="CPU-only build"):
        run_task(config, tmp_path / "other")


def test_a_rank_is_shown_its_own_mig_device_before_cuda_starts(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        """Ends the task ahead of torch's import."""

    def bind(*_: object) -> None:
        raise Begun

    monkeypatch.setattr(tcp_store, "bind", bind)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    env = dataclasses.replace(
        DistEnv.from_environ({}), rank=1, local_rank=1, world_size=2, local_world_size=2,
        master_port=29500,
    )  # fmt: skip
    with pytest.raises(Begun):
        run_task(config, tmp_path, env)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-b"


def test_a_rank_computes_on_the_device_that_rank_0_gives_it(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def assign_gpus(infos: Sequence[RankInfo]) -> list[RankInfo]:
        return [dataclasses.replace(info, device="cpu:0") for info in infos]

    monkeypatch.setattr(agreement, "assign_gpus", assign_gpus)
    run_task(config, tmp_path / "run")
    assert "(local rank 0): cpu:0, 1 thread" in capsys.readouterr().out


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_the_process_group_is_gone_after_every_error(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        assert dist.is_initialized()
        raise error

    monkeypatch.setattr(join, "log_settings", fail)
    with pytest.raises(type(error)):
        run_task(config, tmp_path)
    assert not dist.is_initialized()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Every step is captured, by a stand-in for CUDA graphs."""
    captures = Captures()
    monkeypatch.setattr(cuda_graph, "capture", captures)
    monkeypatch.setattr(agreement, "_wants_graph", lambda *_: True)
    return captures


@pytest.mark.parametrize("end", ["done", "stopped", "failed"])
def test_a_graph_is_released_before_the_process_group_is_left(
    end: str, config: TrainConfig, tmp_path: Path, captures: Captures,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """NCCL waits in the destroy for all graphs that hold an exchange of its, and for ever."""
    alive_as_it_is_left: list[int] = []
    leave, step = dist.destroy_process_group, Journal.step

    def left() -> None:
        alive_as_it_is_left.append(len(captures.alive))
        leave()

    def stepped(journal: Journal) -> None:
        step(journal)
        assert captures.alive
        if end == "failed":
            raise RuntimeError("boom")
        if end == "stopped":
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(dist, "destroy_process_group", left)
    monkeypatch.setattr(Journal, "step", stepped)
    if end == "failed":
        with pytest.raises(RuntimeError, match="boom"):
            run_task(config, tmp_path)
    else:
        assert run_task(config, tmp_path) == (EXIT_DONE if end == "done" else EXIT_STOPPED)
    assert (captures.made, alive_as_it_is_left) == (1, [0])
    if end == "done":
        report = read_json(RunDir(tmp_path).report)
        assert report is not None
        assert report["cuda_graph"] and report["capture_seconds"] > 0
        assert re.search(
            r"test loss [\d.]+, [\d.]+ s of capture, [\d.]+ s of training", capsys.readouterr().out
        )


def test_a_task_that_is_done_is_ended_by_nobody_else(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog is told before the group is left, which may take a while."""
    left, endings = list[bool](), list[task._Ending]()
    made = task._Ending.__init__

    def init(ending: task._Ending, env: DistEnv) -> None:
        made(ending, env)
        endings.append(ending)

    def part() -> None:
        [ending] = endings
        watchdog = threading.Thread(target=ending.leave, args=(Attempt(RunDir(tmp_path), 1), ""))
        watchdog.start()
        watchdog.join()
        really_part()

    really_part = rendezvous.leave_group
    monkeypatch.setattr(supervise, "report", lambda _: None)
    monkeypatch.setattr(task._Ending, "__init__", init)
    monkeypatch.setattr(os, "_exit", lambda _: left.append(True))
    monkeypatch.setattr(rendezvous, "leave_group", part)
    assert run_task(config, tmp_path) == EXIT_DONE
    assert not left


def test_a_process_group_that_is_never_left_keeps_no_rank_that_is_done(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    leave, over, is_left = dist.destroy_process_group, threading.Event(), threading.Event()

    def hangs() -> None:
        over.wait()
        leave()
        is_left.set()

    monkeypatch.setattr(dist, "destroy_process_group", hangs)
    monkeypatch.setattr(rendezvous, "_PART_SECONDS", 0.01)
    assert run_task(config, tmp_path) == EXIT_DONE
    assert "cannot leave the process group: it did not respond" in capsys.readouterr().out
    assert RunDir(tmp_path).report.exists()
    over.set()
    assert is_left.wait(60)


def test_a_run_directory_that_cannot_be_written_is_one_clear_error(
    config: TrainConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match="cannot write the run directory"):
        run_task(config, tmp_path / "file" / "run")


def test_memory_that_runs_out_in_training_is_one_clear_error(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(Learner, "learn", learn)
    expected = (
        rf"cpu of {socket.gethostname()} has too little memory .* with 64 images .*: CUDA out of "
        r"memory\. Tried to allocate 2 GiB\. Lower --batch-size, .*--find-batch-size"
    )
    with pytest.raises(TrainingError, match=expected):
        run_task(config, tmp_path / "run")


def test_without_a_run_directory_one_is_made_below_jobs(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_task(config, None)
    (made,) = (tmp_path / "jobs").iterdir()
    assert made.name.startswith("train-") and (made / "report.json").exists()


@pytest.mark.parametrize(
    ("environ", "ranks", "threads"),
    [
        ({"SLURM_CPUS_PER_TASK": "6"}, 4, 6),
        ({}, 1, len(os.sched_getaffinity(0))),
        ({}, 1000, 1),
        ({"SLURM_CPUS_PER_TASK": ""}, 1000, 1),
        ({"SLURM_CPUS_PER_TASK": "8", "TORCHELASTIC_RUN_ID": "77"}, 4, 2),  # an agent's
        ({"SLURM_CPUS_PER_TASK": "2", "TORCHELASTIC_RUN_ID": "77"}, 4, 1),
    ],
)
def test_threads_are_the_cpus_of_the_task_or_its_share_of_the_hosts(
    environ: dict[str, str], ranks: int, threads: int
) -> None:
    assert usable_threads(environ, ranks) == threads


class LeftBehind:
    """A task that waits in an exchange while its watchdog's thread ends it."""

    def __init__(self, attempt: Attempt, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ending = task._Ending(DistEnv.from_environ({"RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}))  # fmt: skip
        self.done = list[str]()
        self.reported = list[BaseException]()
        monkeypatch.setattr(supervise, "report", self.reported.append)
        monkeypatch.setattr(os, "_exit", lambda code: self.done.append(f"exit {code}"))
        monkeypatch.setattr(task.time, "sleep", lambda s: self.done.append(f"waits {s:.0f} s"))
        monkeypatch.setattr(
            task, "_finish_save", lambda training: self.done.append(f"saves {training}")
        )
        monkeypatch.setattr(
            rendezvous, "dump_flight_recorder", lambda path: self.done.append(path.name)
        )
        self.attempt = attempt

    def leave(self) -> None:
        """As the watchdog's thread does; waits for its end."""
        why = "rank 0 on h01 has not moved for 10m00s: rank 1 on h02 does not respond"
        thread = threading.Thread(target=self.ending.leave, args=(self.attempt, why))
        thread.start()
        thread.join()


@pytest.mark.parametrize(
    ("rank", "done"),
    [
        (0, ["saves training", "nccl-trace-0", "exit 1"]),
        (1, ["saves training", "nccl-trace-1", "waits 20 s", "exit 1"]),
    ],
)
def test_a_step_that_is_stuck_is_reported_saved_and_left(
    rank: int, done: list[str], attempt: Attempt, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The checkpoint first: a flight recorder that hangs stops every thread."""
    left = LeftBehind(attempt, rank, monkeypatch)
    left.ending.training = "training"  # type: ignore[assignment]
    left.leave()
    assert left.done == done
    [error] = left.reported
    assert isinstance(error, PeerError)
    assert str(error).startswith("rank 0 on h01 has not moved for 10m00s: rank 1 on h02 does not")
    assert capfd.readouterr().err == f"clusterddp: {error} [CD0909]\n"


def test_a_task_that_fails_by_itself_is_left_alone(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = LeftBehind(attempt, 0, monkeypatch)
    left.ending.claim()
    left.leave()
    assert not left.done and not left.reported
    left.ending.claim()  # of the same thread, on its way out
