"""What every task runs: find out who it is, meet the others, agree, train, tidy up.

The only writer of os.environ in a task.
"""

import importlib.util
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterddp import slurm, stop
from clusterddp.attempt import Attempt
from clusterddp.dist_env import DistEnv
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PAUSED,
    ClusterDDPError,
    TrainingError,
)
from clusterddp.run_dir import RunDir, write_atomically
from clusterddp.slurm import is_rehearsal
from clusterddp.train_config import TrainConfig
from clusterddp.training.deadline import Deadline

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from clusterddp.training.agreement import Agreement, Hello
    from clusterddp.training.loop import Training
    from clusterddp.training.watchdog import Progress

# For a checkpoint under way when a rank has failed: Slurm kills KillWait (30 s) after its TERM.
_SAVE_SECONDS = 20.0
# Between two questions after the time limit, which an administrator can move.
_LIMIT_SECONDS = 600.0
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


def run_task(
    config: TrainConfig,
    run_dir: Path | None,
    env: DistEnv | None = None,
    *,
    attempt: int | None = None,
    signal_lead: int = 0,
) -> int:
    """Train as one rank; returns 0, EXIT_PAUSED or EXIT_INTERRUPTED, and raises what went wrong.

    env: derived from os.environ when not given.
    run_dir: without it rank 0 chooses one, named by the time.
    attempt: the start of the run that the starting side has made; without it rank 0 makes one.
    signal_lead: seconds ahead of the time limit at which Slurm was asked for a signal.

    Raises ClusterDDPError (a TrainingError with `peer_lost` where another rank is to blame) and
    KeyboardInterrupt; the process group is gone in every case.
    """
    began = time.time()
    give_back = stop.requested.listen()
    _require_torch()
    env = env or DistEnv.from_environ(os.environ)
    os.environ.update(env.to_environ())

    import torch.distributed as dist

    from clusterddp.training import rendezvous
    from clusterddp.training.watchdog import Progress, Watchdog, connect

    store = dog = None
    progress = Progress()
    try:
        store = rendezvous.open_store(env, os.environ, config.rendezvous_timeout)
        start = _meet(config, run_dir, attempt, env, store)
        if config.watchdog:
            dog = Watchdog(
                connect(env, os.environ, 10.0), env, progress,
                silent_seconds=config.watchdog, say=_say, host=start.hello.host,
            )  # fmt: skip
            dog.start()
        reason = _train(config, start, env, progress, Deadline(signal_lead), began)
        dist.barrier()
    except ClusterDDPError:
        _break_off(env)
        raise
    except BaseException as error:
        suspect = dog.latest_suspect() if dog else ""
        _break_off(env)
        if _blames_a_peer(error):
            seen = f" ({suspect})" if suspect else ""
            raise rendezvous.PeerError(
                f"rank {env.rank} on {socket.gethostname()} lost another rank{seen}: "
                f"{str(error).splitlines()[0]}. The log of the rank that failed first says why."
            ) from error
        raise
    finally:
        if dog:
            dog.stop()
        give_back()
        stop.requested.forget()
    dist.destroy_process_group()
    rendezvous.leave(store, env)
    if not reason:
        return EXIT_DONE
    return EXIT_INTERRUPTED if reason == "interrupt" else EXIT_PAUSED


@dataclass(frozen=True)
class _Start:
    """What a rank knows once all have met."""

    hello: "Hello"
    agreed: "Agreement"
    device: "torch.device"

    @property
    def attempt(self) -> Attempt:
        return Attempt(RunDir(Path(self.agreed.run_dir)), self.agreed.attempt)


def _require_torch() -> None:
    for name in ("torch", "torchvision"):
        if importlib.util.find_spec(name) is None:
            raise TrainingError(
                f"{name} is not installed for {sys.executable} on {socket.gethostname()}. "
                f"Install it there: {sys.executable} -m pip install torch torchvision; or choose "
                "another interpreter with --python."
            )


def _meet(
    config: TrainConfig, run_dir: Path | None, attempt: int | None, env: DistEnv, store: "Store"
) -> _Start:
    """Introduce this rank, learn what was agreed on, and join the process group."""
    import torch

    from clusterddp.training import rendezvous, start
    from clusterddp.training.agreement import Agreement

    try:
        hello = _introduce(config, env, os.environ)
    except ClusterDDPError as error:
        rendezvous.decline(store, env, error)
        raise
    verdict = rendezvous.agree(
        store,
        env,
        hello.__dict__,
        lambda hellos: start.decide(
            config, run_dir, attempt, hellos, _identity(os.environ), _say
        ).to_dict(),
        config.rendezvous_timeout,
    )
    agreed = Agreement.from_dict(verdict)
    device = torch.device(hello.device)
    _settle(agreed, device, deterministic=config.deterministic)
    _start_group(config, agreed, env, store, device)
    _announce(config, agreed, hello, env)
    return _Start(hello, agreed, device)


def _identity(environ: Mapping[str, str]) -> dict[str, Any]:
    return {
        "job_id": environ.get("SLURM_JOB_ID", ""),
        "restart": int(environ.get("SLURM_RESTART_COUNT") or 0),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def _train(
    config: TrainConfig,
    start: _Start,
    env: DistEnv,
    progress: "Progress",
    deadline: "Deadline",
    began: float,
) -> str:
    """Train; returns the reason where the ranks have stopped early, for rank 0 to have noted."""
    import torch.distributed as dist

    from clusterddp.training import data, report
    from clusterddp.training.images import Images
    from clusterddp.training.loop import Training
    from clusterddp.training.presence import Presence

    attempt = start.attempt
    presence = Presence(attempt, stop.requested)
    with presence if env.rank == 0 else nullcontext():
        if env.rank == 0:
            _learn_time_limit(deadline)
        elif env.local_rank == 0:
            data.ensure(config.dataset, config.data_dir, progress=_say, may_fetch=False)
        dist.barrier()
        training = Training(
            config,
            start.agreed,
            rank=env.rank,
            device=start.device,
            train_set=Images(*data.load(config.dataset, config.data_dir, train=True), start.device),
            test_set=Images(*data.load(config.dataset, config.data_dir, train=False), start.device),
            attempt=attempt,
            request=stop.requested,
            progress=progress,
            deadline=deadline,
        )
        presence.step = lambda: training.position.step
        try:
            reason = training.run()
        except BaseException:
            _let_save_end(training)
            raise
        if env.rank == 0:
            try:
                if not reason:
                    _say(report.write(config, start.agreed, env, training, began, os.environ))
                _note_end(attempt, reason, training)
            except OSError as error:
                raise TrainingError(
                    f"rank 0 on {socket.gethostname()} cannot write how the training ended to "
                    f"{attempt.run.path}: {error.strerror}. Its last checkpoint is that of step "
                    f"{training.saver.last_step if training.saver else None}."
                ) from None
    return reason


def _let_save_end(training: "Training") -> None:
    """A checkpoint that is being written when another rank fails is worth a few seconds."""
    from clusterddp.training import rendezvous

    if training.saver:
        with suppress(Exception):  # the training's own failure is what is told
            rendezvous.bounded(training.saver.wait, _SAVE_SECONDS)


def _note_end(attempt: Attempt, reason: str, training: "Training") -> None:
    """By this the batch script knows how the ranks left; srun's exit code could not tell."""
    step, saver = training.position.step, training.saver
    if reason:
        _say(f"stopped at step {step} ({reason}); start the run again to go on from there")
    saved = saver.last_step if saver else None
    end = {
        "cause": "stopped" if reason else "done", "reason": reason, "step": step, "saved": saved,
    }  # fmt: skip
    write_atomically(attempt.end, json.dumps(end).encode())


def _learn_time_limit(deadline: "Deadline") -> None:
    """Ask Slurm in a thread: a controller that is away takes its time to answer."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    if job_id:
        threading.Thread(target=lambda: _keep_learning(deadline, job_id), daemon=True).start()


def _keep_learning(deadline: "Deadline", job_id: str) -> None:
    while True:
        deadline.set(_seconds_left(job_id, os.environ))
        time.sleep(_LIMIT_SECONDS)


def _seconds_left(job_id: str, environ: Mapping[str, str]) -> float | None:
    """By the controller's clock; by this host's own where squeue does not answer from here."""
    left = None if is_rehearsal(environ) else slurm.seconds_left(slurm.own_name(environ, job_id))
    end = environ.get("SLURM_JOB_END_TIME", "")  # set by newer versions
    return int(end) - time.time() if left is None and end.isdigit() else left


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


def _settle(agreed: "Agreement", device: "torch.device", *, deterministic: bool) -> None:
    import torch

    torch.set_num_threads(agreed.threads)
    if deterministic:
        # cuBLAS repeats itself only with a fixed workspace (torch.use_deterministic_algorithms).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
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
        timeout=timedelta(seconds=config.process_group_timeout),
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
    peak = optimizer.peak_lr(config, agreed.reference_world_size)
    _say(
        f"lr {config.lr:g} x {peak / config.lr:g} ({config.lr_scaling}) = {peak:g}, warm-up "
        f"{config.warmup_steps} steps; batch {agreed.batch_size} x {env.world_size} = "
        f"{agreed.global_batch_size}"
    )
    _say(f"attempt {agreed.attempt} of the run")
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
    with suppress(OSError):  # a log on a full disk costs its lines, never the training
        print(line, flush=True)  # noqa: T201 -- the task's own log
