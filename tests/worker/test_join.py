"""The GPU that each rank takes, however its host shows them; what two ranks open when they start,
counted by a hook of Python's own in each of them; and what ranks ask of torch's process group."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterddp.data import mnist
from clusterddp.distributed import agreement, rendezvous
from clusterddp.distributed.agreement import RankInfo
from clusterddp.errors import TrainingError
from clusterddp.ranks.dist_env import DistEnv, local_ranks
from clusterddp.ranks.variables import own_mig_device
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import Agreement
from clusterddp.run.run_dir import RunDir
from clusterddp.worker import join
from clusterddp.worker.join import JoinResult
from clusterddp.worker.workstation import free_port
from tests.waiting import dying_with_us

FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
EIGHT = (*FOUR, "GPU-e", "GPU-f", "GPU-g", "GPU-h")
PAIRS = (EIGHT[:2], EIGHT[2:4], EIGHT[4:6], EIGHT[6:])
PARTS = ("MIG-a", "MIG-b", "MIG-c")


@dataclass(frozen=True)
class Host:
    """A host's GPUs, and what of them its tasks are shown."""

    shown: tuple[str | None, ...]
    """CUDA_VISIBLE_DEVICES of each task."""
    gpus: tuple[tuple[str, ...], ...]
    """GPUs that each task finds, by number; a cgroup can hide the others."""

    def enumerated(self, task: int, shown: str | None) -> list[str]:
        """The GPUs that CUDA gives a task, by the rules of NVIDIA's guides."""
        found = self.gpus[task]
        names = found if shown is None else shown.split(",")
        if names[0].startswith("MIG-"):
            return [FOUR[0]]  # the first part alone, and it may be the whole GPU's name
        return [name if name.startswith("GPU-") else found[int(name)] for name in names]


def alike(tasks: int, shown: str | None, gpus: tuple[str, ...] = FOUR) -> Host:
    return Host((shown,) * tasks, (gpus,) * tasks)


def meet(
    host: Host, monkeypatch: pytest.MonkeyPatch, config: TrainConfig,
    nccl: tuple[int, ...] = (2, 30, 7), **environ: str,
) -> tuple[list[str], Agreement]:  # fmt: skip
    """The GPU of each rank of the host, and what its ranks agree on."""
    infos = []
    for task, env in enumerate(local_ranks(len(host.shown), 29500)):
        shown = host.shown[task]
        own = {"CUDA_VISIBLE_DEVICES": shown} if shown is not None else {}
        own |= own_mig_device(own, env.local_rank, env.local_world_size)
        gpus = host.enumerated(task, own.get("CUDA_VISIBLE_DEVICES"))
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda gpus=gpus: len(gpus),
            "set_device": lambda index, gpus=gpus: gpus[index],
            "get_device_properties": lambda index, gpus=gpus: SimpleNamespace(uuid=gpus[index]),
            "get_device_capability": lambda: (9, 0),
            "nccl.version": lambda: nccl,
        }.items():
            monkeypatch.setattr(f"torch.cuda.{name}", value)
        infos.append(
            join.describe_rank(config, env, {"SLURM_CPUS_PER_TASK": "8", **environ, **own})
        )
    placed = agreement.assign_gpus(infos)
    for task, info in enumerate(placed):  # what the identifier says is what the number leads to
        if not info.gpu.startswith("MIG-"):
            own = host.enumerated(task, host.shown[task])
            assert own[int(info.device.removeprefix("cuda:"))] == info.gpu
    return [info.gpu for info in placed], agreement.decide(config, placed)


@pytest.mark.parametrize(
    ("host", "gpus"),
    [
        (alike(4, "0,1,2,3"), FOUR),
        (alike(4, None), FOUR),
        (alike(4, "4,5,6,7", EIGHT), EIGHT[4:]),
        (alike(4, "GPU-d,GPU-c,GPU-b,GPU-a"), FOUR[::-1]),
        (alike(2, "0,1,2,3"), FOUR[:2]),
        (Host(("0",) * 4, tuple((gpu,) for gpu in FOUR)), FOUR),
        (Host(("0", "1", "2", "3"), (FOUR,) * 4), FOUR),
        (Host(("0,1",) * 4, PAIRS), ("GPU-a", "GPU-d", "GPU-e", "GPU-h")),
        (Host(("0,1", "2,3", "4,5", "6,7"), (EIGHT,) * 4), ("GPU-a", "GPU-d", "GPU-e", "GPU-h")),
        (Host(("0,1", "0,1", "2,3", "2,3"), (FOUR,) * 4), FOUR),
        (Host(("0,1", "2,3") * 2, (FOUR,) * 4), ("GPU-a", "GPU-d", "GPU-b", "GPU-c")),
        (Host(("0,1", "0", "1,2", "2,3"), (FOUR,) * 4), ("GPU-b", "GPU-a", "GPU-c", "GPU-d")),
        (alike(3, "MIG-a,MIG-b,MIG-c"), PARTS),
        (Host(PARTS, (FOUR,) * 3), PARTS),
        (alike(1, "MIG-a,MIG-b,MIG-c"), PARTS[:1]),
    ],
    ids=[
        "numbered anew", "no variable", "absolute", "identifiers", "fewer tasks than GPUs",
        "one each, alone", "one each, by absolute number", "two each, alone",
        "two each, by absolute number", "two for the tasks of a socket", "of sockets in turn",
        "sets that overlap", "MIG, all to each task",
        "MIG, one each", "MIG, one task",
    ],
)  # fmt: skip
def test_every_rank_has_a_gpu_of_its_own_however_the_host_shows_them(
    host: Host, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, agreed = meet(host, monkeypatch, TrainConfig())
    assert tuple(found) == gpus
    assert (agreed.world_size, agreed.warnings) == (len(gpus), ())


@pytest.mark.parametrize(
    ("config", "environ", "nccl", "backend"),
    [
        (TrainConfig(), {}, (2, 30, 7), ""),
        (TrainConfig(backend="nccl"), {}, (2, 30, 7), ""),
        (TrainConfig(backend="gloo"), {}, (2, 27), "gloo"),
        (TrainConfig(), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, (2, 30, 7), "nccl"),
        (TrainConfig(), {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, (2, 30, 7), ""),
        (TrainConfig(), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, (2, 29, 2), ""),
    ],
)
def test_ranks_share_a_gpu_where_that_is_asked_for_and_can_be(
    config: TrainConfig, environ: dict[str, str], nccl: tuple[int, ...], backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    host = alike(4, "0,1")
    if not backend:
        with pytest.raises(TrainingError, match=r"rank 0 and rank 2 are on one GPU.*GPU-a.*2\.30"):
            meet(host, monkeypatch, config, nccl, **environ)
        return
    found, agreed = meet(host, monkeypatch, config, nccl, **environ)
    assert found == ["GPU-a", "GPU-b", "GPU-a", "GPU-b"]
    assert agreed.backend == backend
    first, second = agreed.warnings
    assert (
        "ranks 0, 2 share the time and memory of a GPU (GPU-a)" in first and "ranks 1, 3" in second
    )


def test_a_gpu_rank_with_one_cpu_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    host = alike(2, "0,1")
    _, agreed = meet(host, monkeypatch, TrainConfig(), SLURM_CPUS_PER_TASK="1")
    (warning,) = agreed.warnings
    assert "a GPU rank has one CPU" in warning and "--cpus-per-task 4" in warning
    assert not meet(host, monkeypatch, TrainConfig(), SLURM_CPUS_PER_TASK="2")[1].warnings


def test_a_rank_on_the_cpu_does_not_even_ask_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", asked)
    (env,) = local_ranks(1, 0)
    assert join.describe_rank(TrainConfig(device="cpu"), env, {}).device == "cpu"
    with pytest.raises(AssertionError, match="driver was asked"):
        join.describe_rank(TrainConfig(), env, {})


# Notes what this process opens below the two directories, where it listens, and what it imports of
# torch; by a descriptor that was open before the hook was.
HOOK = """
import json, os, sys
_folders = tuple(os.environ["WATCHED"].split(":"))
_log = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def _hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if path.startswith(_folders):
            writes = bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
            _note([event, path, writes])
    elif event == "socket.bind":
        _note([event, str(arguments[1]), False])
    elif event == "import" and arguments[0] in ("torch", "torchvision"):
        _note([event, arguments[0], False])
def _note(what):
    os.write(_log, (json.dumps([os.environ.get("RANK", ""), *what]) + chr(10)).encode())
sys.addaudithook(_hook)
"""


class Ranks:
    """Starts of one run by two ranks on this host."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data, self.run = folder, data, folder / "run"
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(HOOK)
        self.starts = 0

    def train(self, *options: str) -> list[list[Any]]:
        """What they noted: rank, event, path or name, whether to write; in order."""
        self.starts += 1
        notes = self.folder / f"notes-{self.starts}"
        port = free_port()
        environ = {
            **os.environ, "WATCHED": f"{self.data}:{self.run}", "NOTES": str(notes),
            "PYTHONPATH": f"{self.folder / 'hook'}:{Path(__file__).parents[2]}",
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        started = [
            subprocess.Popen(
                [
                    sys.executable, "-m", "clusterddp", "train", f"--run-dir={self.run}",
                    "--dataset=synthetic", f"--data-dir={self.data}", "--threads=1",
                    "--device=cpu", *options,
                ],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
            )
            for rank in (0, 1)
        ]  # fmt: skip
        for rank in started:
            said, _ = rank.communicate(timeout=200)
            assert rank.returncode == 0, said
        return [json.loads(line) for line in notes.read_text().splitlines()]


@pytest.fixture
def ranks(tmp_path: Path, synthetic_dir: Path) -> Ranks:
    return Ranks(tmp_path, synthetic_dir)


@pytest.mark.slow
def test_one_rank_of_a_node_reads_and_each_writes_what_is_its_own(ranks: Ranks) -> None:
    first = ranks.train("--max-steps=2")
    events = [event for who, event, _, _ in first if who == "0" and event != "open"]
    assert events.index("socket.bind") < events.index("import"), "it listens before torch is there"
    assert {name for _, event, name, _ in first if event == "import"} == {"torch"}
    again = ranks.train("--max-steps=4")
    assert json.loads((ranks.run / "report.json").read_text())["steps"] == 4
    for notes in (first, again):
        opened = {
            rank: [Path(path) for who, event, path, _ in notes if (who, event) == (rank, "open")]
            for rank in ("0", "1")
        }
        by_first = [path.name for path in opened["0"]]
        assert all(by_first.count(name) >= 1 for name in mnist.FILES)
        ours = [path for path in opened["1"] if not path.is_relative_to(ranks.run)]
        assert not ours, "rank 1 maps what rank 0 has read"
        assert not [path for path in opened["1"] if ".pt" in path.name], "rank 0 reads checkpoints"
        written = {
            path
            for who, event, path, writes in notes
            if (who, event, writes) == ("1", "open", True)
        }
        assert written and all("rank-1.json" in path for path in written), written
    resumed = [path for who, _, path, writes in again if path.endswith(".pt") and not writes]
    assert resumed, "the second start went on from a checkpoint"


def joined(backend: str, world_size: int = 2) -> JoinResult:
    info = RankInfo(0, world_size, 0, "h01", 7, "cpu", "cpu", "", 1, torch.__version__)
    agreed = Agreement(
        backend=backend, kind="cpu", threads=1, world_size=world_size, run_dir="/jobs/a", attempt=3
    )
    return JoinResult(info, agreed, torch.device("cpu"))


@pytest.mark.parametrize(
    ("backend", "watchdog", "seconds"), [("gloo", 60, 600), ("nccl", 60, 660), ("nccl", 0, 600)]
)
def test_nccl_waits_longer_than_our_own_watchdog_does(
    backend: str, watchdog: int, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **more: asked.update(more))
    config = TrainConfig(hang_timeout=watchdog)
    store = rendezvous.RunStore(dist.HashStore(), rendezvous.Identity("", ""))
    join._init_group(config, joined(backend), DistEnv.from_environ({}), store)
    assert asked["timeout"].total_seconds() == seconds


def test_a_rank_is_bound_where_that_is_asked_for_and_one_on_a_cpu_says_that_it_is_not(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    bound = list[tuple[str, torch.device]]()

    def enter(mode: str) -> None:
        store = rendezvous.RunStore(dist.HashStore(), rendezvous.Identity("", ""))
        config = TrainConfig(numa_binding=mode)
        join._init_group(config, joined("gloo"), DistEnv.from_environ({}), store)

    enter("none")
    assert logged == []
    enter("node")
    excluded = "--numa-binding node has no effect: this rank computes on the CPU"
    assert logged == [f"warning: {excluded} [CD0824]"]
    monkeypatch.setattr(join.devices, "bind_to_numa", lambda *asked: bound.append(asked) or "")
    enter("none")
    enter("socket")
    assert bound == [("socket", torch.device("cpu"))] and len(logged) == 1


def test_nccls_flight_recorder_is_dumped_into_the_attempt() -> None:
    variables = join._variables(TrainConfig(), joined("nccl"), "")
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        assert variables[name] == "/jobs/a/attempts/0003/nccl-trace-"
    for other in (joined("gloo"), joined("nccl", 1)):
        names = join._variables(TrainConfig(), other, "")
        assert not any(name.startswith("TORCH_") for name in names)


def test_a_dump_of_the_flight_recorder_is_one_that_torch_reads(tmp_path: Path) -> None:
    if not hasattr(torch._C._distributed_c10d, "_dump_nccl_trace"):
        pytest.skip("this torch has no NCCL")
    dump = Attempt(RunDir(tmp_path), 3).nccl_trace(1)
    dump.parent.mkdir(parents=True)
    rendezvous.dump_flight_recorder(dump)
    assert "entries" in pickle.loads(dump.read_bytes())


def test_a_flight_recorder_that_fails_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    def hang() -> bytes:
        raise RuntimeError("CUDA hangs")

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", hang, raising=False)
    rendezvous.dump_flight_recorder(tmp_path / "nccl-trace-0")
    assert logged == ["NCCL's flight recorder: CUDA hangs"]
