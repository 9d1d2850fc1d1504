"""What every task runs: find out who it is, meet the others, agree, train, tidy up.

The only writer of os.environ in a task.
"""

import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp.dist_env import DistEnv
from clusterddp.errors import ClusterDDPError, TrainingError
from clusterddp.run_dir import RunDir, read_json, write_atomically
from clusterddp.train_config import TrainConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from clusterddp.training.agreement import Agreement, Hello

# How long a rank waits in an exchange for one that does not answer; torch's own default of
# 30 minutes would keep a whole allocation waiting for a hanging rank.
_EXCHANGE_TIMEOUT_SECONDS = 600
# What torch says when the other end of an exchange has gone: gloo finds
# its sockets reset or closed, NCCL aborts or times out.
_PEER_LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "communicator was aborted",
    "Socket Timeout",
    "failed to recv, got 0 bytes",
)


def run_task(config: TrainConfig, run_dir: Path | None, env: DistEnv | None = None) -> int:
    """Train as one rank; returns 0 and raises what went wrong.

    `env` is derived from os.environ when not given. Without `run_dir` rank 0 chooses one, named
    by the time. Raises ClusterDDPError (a TrainingError with `peer_lost` where another rank is to
    blame) and KeyboardInterrupt; the process group is gone in every case.
    """
    began = time.time()
    _require_torch()
    env = env or DistEnv.from_environ(os.environ)
    os.environ.update(env.to_environ())

    import torch.distributed as dist

    from clusterddp.training import rendezvous

    store = None
    try:
        store = rendezvous.open_store(env, os.environ, config.rendezvous_timeout)
        _train(config, run_dir, env, store, began)
        dist.barrier()
    except ClusterDDPError:
        _break_off(env)
        raise
    except BaseException as error:
        _break_off(env)
        if _blames_a_peer(error):
            raise rendezvous.PeerError(
                f"rank {env.rank} on {socket.gethostname()} lost another rank: "
                f"{str(error).splitlines()[0]}. The log of the rank that failed first says why."
            ) from error
        raise
    dist.destroy_process_group()
    rendezvous.leave(store, env)
    return 0


def _require_torch() -> None:
    for name in ("torch", "torchvision"):
        if importlib.util.find_spec(name) is None:
            raise TrainingError(
                f"{name} is not installed for {sys.executable} on {socket.gethostname()}. "
                f"Install it there: {sys.executable} -m pip install torch torchvision; or choose "
                "another interpreter with --python."
            )


def _train(
    config: TrainConfig, run_dir: Path | None, env: DistEnv, store: "Store", began: float
) -> None:
    import torch
    import torch.distributed as dist

    from clusterddp.training import data, rendezvous, report
    from clusterddp.training.agreement import Agreement
    from clusterddp.training.images import Images
    from clusterddp.training.loop import Training

    try:
        hello = _introduce(config, env, os.environ)
    except ClusterDDPError as error:
        rendezvous.decline(store, env, error)
        raise
    verdict = rendezvous.agree(
        store,
        env,
        hello.__dict__,
        lambda hellos: _decide(config, run_dir, hellos).to_dict(),
        config.rendezvous_timeout,
    )
    agreed = Agreement.from_dict(verdict)
    device = torch.device(hello.device)
    _settle(agreed, device)
    _start_group(config, agreed, env, store, device)
    _announce(config, agreed, hello, env)

    if env.rank and env.local_rank == 0:
        data.ensure(config.dataset, config.data_dir, progress=_say, may_fetch=False)
    dist.barrier()
    training = Training(
        config,
        rank=env.rank,
        world_size=env.world_size,
        device=device,
        train_set=Images(data.load(config.dataset, config.data_dir, train=True), device),
        test_set=Images(data.load(config.dataset, config.data_dir, train=False), device),
        run=RunDir(Path(agreed.run_dir)),
        resume=Path(agreed.resume) if agreed.resume else None,
    )
    training.run()
    if env.rank == 0:
        _say(report.write(config, agreed, env, training, began, os.environ))


def _introduce(config: TrainConfig, env: DistEnv, environ: Mapping[str, str]) -> "Hello":
    import torch

    from clusterddp.training import device
    from clusterddp.training.agreement import Hello

    choice = device.choose(
        config.device,
        visible=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        granted=device.granted_gpus(environ),
        driver=device.NVIDIA_DRIVER.exists(),
    )
    gpu = ""
    if choice.kind == "cuda":
        # Absent in old versions of torch: then nobody notices two ranks on one GPU.
        gpu = str(getattr(torch.cuda.get_device_properties(choice.index), "uuid", ""))
    return Hello(
        rank=env.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        pid=os.getpid(),
        kind=choice.kind,
        device=choice.name,
        gpu=gpu,
        threads=usable_threads(environ, env.local_world_size),
        torch=torch.__version__,
        warning=choice.warning,
    )


def usable_threads(environ: Mapping[str, str], local_world_size: int) -> int:
    """The CPUs that Slurm gave this task, or its share of those that the process may run on."""
    given = environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isdigit() and int(given):
        return int(given)
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        usable = os.cpu_count() or 1
    return max(usable // local_world_size, 1)


def _decide(config: TrainConfig, run_dir: Path | None, hellos: list[dict[str, Any]]) -> "Agreement":
    """Rank 0's part: settle what is auto, make the run's folders, choose the checkpoint."""
    import dataclasses

    from clusterddp.training import agreement, checkpoint, checkpoint_file, data, optimizer

    run = RunDir((run_dir or Path("jobs", time.strftime("train-%Y%m%d-%H%M%S"))).resolve())
    agreed = agreement.decide(
        config, [agreement.Hello(**hello) for hello in hellos], read_json(run.resolved)
    )
    data.ensure(config.dataset, config.data_dir, progress=_say, may_fetch=False)
    try:
        run.make(run.checkpoints)
        checkpoint_file.remove_leftovers(run)
        resume = checkpoint_file.newest(run, _say)
        if resume is None and config.resume:
            resume = checkpoint_file.find(config.resume, _say)
        if resume is not None:
            checkpoint.check_fits(resume, checkpoint.load(resume), config)
        agreed = dataclasses.replace(
            agreed, run_dir=str(run.path), resume=str(resume.resolve()) if resume else ""
        )
        record = {
            **agreed.to_dict(),
            "lr": optimizer.peak_lr(config, agreed.world_size),
            "global_batch_size": config.batch_size * agreed.world_size,
        }
        write_atomically(run.resolved, (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise TrainingError(
            f"rank 0 on {socket.gethostname()} cannot write the run directory {run.path}: "
            f"{error.strerror}. Choose a folder that this host can write."
        ) from None
    return agreed


def _settle(agreed: "Agreement", device: "torch.device") -> None:
    import torch

    torch.set_num_threads(agreed.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Otherwise cuDNN may choose algorithms whose sums differ from run to run.
        torch.backends.cudnn.deterministic = True


def _start_group(
    config: TrainConfig,
    agreed: "Agreement",
    env: DistEnv,
    store: "Store",
    device: "torch.device",
) -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    dist.init_process_group(
        agreed.backend,
        store=PrefixStore("group", store),
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=max(_EXCHANGE_TIMEOUT_SECONDS, config.rendezvous_timeout)),
        device_id=device if device.type == "cuda" and agreed.backend == "nccl" else None,
    )


def _announce(config: TrainConfig, agreed: "Agreement", hello: "Hello", env: DistEnv) -> None:
    from clusterddp.training import optimizer

    _say(
        f"rank {env.rank} of {env.world_size} on {hello.host} (local rank {env.local_rank}): "
        f"{hello.device}, {agreed.threads} {'thread' if agreed.threads == 1 else 'threads'}, "
        f"{agreed.backend}"
    )
    if env.rank:
        return
    if env.world_size > 1:
        for line in agreed.where:
            _say(line)
    for warning in agreed.warnings:
        _say(f"warning: {warning}")
    world, peak = env.world_size, optimizer.peak_lr(config, env.world_size)
    _say(
        f"lr {config.lr:g} x {peak / config.lr:g} ({config.lr_scaling}) = {peak:g}, warm-up "
        f"{config.warmup_steps} steps; batch {config.batch_size} x {world} = "
        f"{config.batch_size * world}"
    )
    if agreed.resume:
        _say(f"resuming from {agreed.resume}")
    _say(f"run directory: {agreed.run_dir}")


def _break_off(env: DistEnv) -> None:
    """Leave the process group without waiting for ranks that may be gone.

    The process ends soon after and takes its sockets with it; a destructor that hangs must not
    keep it, so it gets a few seconds.
    """
    import torch.distributed as dist

    from clusterddp.training import rendezvous

    if not dist.is_initialized():
        return
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    leave = abort if dist.get_backend() == "nccl" else dist.destroy_process_group
    try:
        rendezvous.bounded(lambda: (leave(), True), 1.0 if env.world_size == 1 else 5.0)
    except Exception as error:
        _say(f"leaving the process group: {error or 'it did not answer'}")


def _blames_a_peer(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    return any(mark in str(error) for mark in _PEER_LOST)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 -- the task's own log
