"""Execution of a training task: rank, rendezvous, common settings, training, cleanup."""

import gc
import importlib.util
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import log
from clusterddp.data import mnist
from clusterddp.distributed import tcp_store
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    PeerError,
    TrainingError,
    coded,
)
from clusterddp.files import write_record
from clusterddp.processes import change_environment
from clusterddp.processes.stacks import armed
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import IMAGE_VARIABLE, own_gloo_interfaces, own_mig_device
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.training import stop
from clusterddp.training.stop import Deadline, LivenessWriter, poll_time_limit
from clusterddp.worker import supervise
from clusterddp.worker.supervise import is_peer_loss

if TYPE_CHECKING:
    from clusterddp.data.user_dataset import OwnSets
    from clusterddp.distributed.heartbeat import Progress
    from clusterddp.distributed.rendezvous import RunStore
    from clusterddp.distributed.watchdog import Watchdog
    from clusterddp.training.loop import Training
    from clusterddp.worker.join import JoinResult
    from clusterddp.worker.start import Sets

    _Reading = mnist.Reading | OwnSets

# For a checkpoint being saved when a rank fails: Slurm kills KillWait (30 s) after its TERM.
_SAVE_SECONDS = 20.0
_PACKAGES = {"torch": (2, 4), "numpy": (1, 24)}
"""Packages that every training imports, with minimum versions (as in pyproject.toml)."""


def run_task(
    config: TrainConfig,
    run_dir: Path | None,
    env: DistEnv | None = None,
    *,
    attempt: int | None = None,
    signal_lead: int = 0,
) -> int:
    """Train as one rank; return 0, EXIT_STOPPED or EXIT_INTERRUPTED.

    env: derived from os.environ if None.
    run_dir: if None, rank 0 chooses one, named after the time.
    attempt: the number from the launcher; if None, rank 0 creates an attempt.
    signal_lead: seconds before the time limit at which Slurm sends its signal.

    Raises ClusterDDPError (with `peer_lost` if another rank is the cause) and KeyboardInterrupt;
    the process group is destroyed in every case.
    """
    began = time.time()
    restore = stop.requested.listen()
    try:
        _require_packages()
        env = env or DistEnv.from_environ(os.environ)
        with log.to(log.to_stdout), armed():
            return _run(_Task(config, run_dir, env, attempt, Deadline(signal_lead), began))
    finally:
        restore()
        stop.requested.forget()
        gc.unfreeze()


@dataclass(frozen=True)
class _Task:
    """Arguments of a task."""

    config: TrainConfig
    run_dir: Path | None
    env: DistEnv
    attempt: int | None
    deadline: Deadline
    began: float
    """Start time in seconds since the epoch."""


def _run(task: _Task) -> int:
    config, env = task.config, task.env
    own_device = own_mig_device(os.environ, env.local_rank, env.local_world_size)
    own = {**env.to_environ(), **own_device, **own_gloo_interfaces(os.environ, env.world_size)}
    change_environment(own)  # CUDA reads it only once
    bound = tcp_store.bind(env, os.environ)  # first, so that no rank must retry
    reading: _Reading | None = _begin_reading(config, env)
    lookups = tcp_store.Lookups(env) if env.world_size > 1 else None
    _import_torch()

    import torch.distributed as dist

    from clusterddp.data.user_dataset import OwnSets
    from clusterddp.distributed import rendezvous
    from clusterddp.distributed.heartbeat import Progress
    from clusterddp.worker import join, start

    if is_reference(config.dataset):
        reading = OwnSets(config)
    progress, watchdog, ending = Progress(), None, _Ending(env)
    with (
        ExitStack() as at_end,
        _aborting_group(env, lambda: watchdog.suspect if watchdog else "", ending),
    ):
        store = rendezvous.open_store(
            env,
            os.environ,
            config.rendezvous_seconds(env.num_nodes),
            bound=bound,
            answered=lambda: lookups is None or lookups.master_answered,
        )
        settle = partial(
            start.settle_attempt,
            config,
            task.run_dir,
            task.attempt,
            os.environ,
            fingerprint=reading.fingerprint if reading else None,
        )
        joined = join.join(config, env, store, os.environ, settle, lookups)
        if config.hang_timeout:
            watchdog = at_end.enter_context(_watchdog(config, env, joined, progress, ending))
        reason = _train(task, joined, store, reading, progress, ending)
        dist.barrier()
        ending.claim()
    rendezvous.leave_group()
    rendezvous.leave(store, env)
    return {"": EXIT_DONE, "interrupt": EXIT_INTERRUPTED}.get(reason, EXIT_STOPPED)


def _require_packages() -> None:
    """Raise TrainingError if the interpreter lacks a required package."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise _package_error(
            absent, f"{' and '.join(absent)} cannot be imported by {sys.executable}"
        )


def _import_package(name: str) -> None:
    """Import torch or numpy; raises TrainingError if it is broken or too old."""
    try:
        module = __import__(name)
    except Exception as error:  # for example a missing shared library
        what = f"{name} cannot be imported by {sys.executable} ({type(error).__name__}: {error})"
        raise _package_error([name], what) from error
    least, version = _PACKAGES[name], str(getattr(module, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < least:
        wanted = f"{name} {least[0]}.{least[1]} or later is needed"
        raise _package_error([name], f"{wanted}, but {sys.executable} has {version}")


def _package_error(packages: Sequence[str], what: str) -> TrainingError:
    """Return the error for missing packages, with a remedy."""
    image = os.environ.get(IMAGE_VARIABLE)
    if image:
        return TrainingError(
            f"{what} in the image {image} on {socket.gethostname()}. Use an image that has it, or "
            "choose another interpreter in it with --python. [CD1006]"
        )
    wanted = " ".join(f"'{name}>={'.'.join(map(str, _PACKAGES[name]))}'" for name in packages)
    return TrainingError(
        f"{what} on {socket.gethostname()}. Install it there: {sys.executable} -m pip install "
        f"{wanted}; or choose another interpreter with --python. [CD0803]"
    )


def _begin_reading(config: TrainConfig, env: DistEnv) -> mnist.Reading | None:
    """Start to read MNIST's files during the imports, on the first rank of a node."""
    is_own, is_first = is_reference(config.dataset), 0 in (env.local_rank, env.rank)
    if config.data_pipeline == "memory" and is_first and not is_own:
        return mnist.Reading(config.dataset, config.data_dir, digest=env.rank == 0)
    return None


def _import_torch() -> None:
    """Import torch without garbage collection, and freeze its objects.

    Repeated collections take a fifth of torch's import time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        for name in _PACKAGES:
            _import_package(name)
        import torch

        import clusterddp.distributed.watchdog
        import clusterddp.worker.join
        import clusterddp.worker.start  # noqa: F401

        # The first optimizer imports another 900 modules (torch._dynamo, sympy). Done here, before
        # the rendezvous, so that the ranks wait only once for the slowest import.
        torch.optim.SGD([torch.zeros(())])
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


@contextmanager
def _aborting_group(env: DistEnv, suspect: Callable[[], str], ending: "_Ending") -> Iterator[None]:
    """Abort the process group if the body fails; raise PeerError if another rank is the cause.

    suspect: returns the watchdog's description of the cause, or an empty string.
    """
    from clusterddp.distributed import rendezvous

    try:
        yield
    except BaseException as error:
        ending.claim()
        hint = f" ({suspected})" if (suspected := suspect()) else ""
        rendezvous.abort_group(env)
        if not is_peer_loss(error):
            raise
        raise PeerError(
            f"rank {env.rank} on {socket.gethostname()} lost another rank{hint}: "
            f"{str(error).splitlines()[0]}. See the log of the rank that failed "
            "first. [CD0909]"
        ) from error


class _Ending:
    """End of a failing task: its own exception or the watchdog, whichever comes first."""

    def __init__(self, env: DistEnv) -> None:
        self.training: Training | None = None
        self._env, self._claimed = env, threading.RLock()

    def claim(self) -> None:
        """Let the calling thread end the task; does not return if the watchdog already ends it."""
        self._claimed.acquire()

    def leave(self, attempt: Attempt, why: str) -> None:
        """End this process, whose training waits in NCCL for a lost rank.

        Called by the watchdog's thread, because the waiting thread cannot be interrupted. NCCL's
        own timeout follows soon, so the error is reported first. The flight recorder, which can
        hang, is dumped after the checkpoint.
        """
        from clusterddp.distributed import rendezvous

        if not self._claimed.acquire(blocking=False):
            return
        error = PeerError(f"{why}. See the log of the rank that failed first. [CD0909]")
        supervise.report(error)
        with suppress(OSError):  # not sys.stderr: the waiting thread may hold its lock
            os.write(2, f"clusterddp: {coded(error)}\n".encode(errors="replace"))
        if self.training:
            _finish_save(self.training)
        rendezvous.dump_flight_recorder(attempt.nccl_trace(self._env.rank))
        if self._env.rank:
            time.sleep(_SAVE_SECONDS)  # while rank 0 saves: NCCL ends it when this process exits
        os._exit(error.exit_code)


def _watchdog(
    config: TrainConfig, env: DistEnv, joined: "JoinResult", progress: "Progress", ending: _Ending
) -> "Watchdog":
    from clusterddp.distributed.watchdog import Watchdog, noting

    return Watchdog.of_ranks(
        env,
        progress,
        silent_seconds=config.hang_timeout,
        group_seconds=config.process_group_timeout,
        host=joined.info.host,
        note=noting(joined.attempt.outcomes),
        beat=supervise.gil_watch.beat if supervise.gil_watch else lambda _: None,
        leave=partial(ending.leave, joined.attempt) if joined.agreed.backend == "nccl" else None,
        leave_seconds=config.process_group_timeout,
    )


def _train(
    task: _Task,
    joined: "JoinResult",
    store: "RunStore",
    reading: "_Reading | None",
    progress: "Progress",
    ending: _Ending,
) -> str:
    """Train; return the reason for an early stop, which rank 0 records, or an empty string."""
    from clusterddp.training import batch_size, preflight, report
    from clusterddp.training.learner import check_fit
    from clusterddp.training.loop import train
    from clusterddp.worker import start

    config, env, deadline = task.config, task.env, task.deadline
    attempt, agreed, device = joined.attempt, joined.agreed, joined.device
    liveness_writer = LivenessWriter(attempt, stop.requested)
    with liveness_writer if env.rank == 0 else nullcontext():
        if env.rank == 0:
            poll_time_limit(deadline, os.environ)
        if joined.checks_nodes and not preflight.nodes_pass(
            joined.info, attempt, device, agreed.precision, progress
        ):
            return preflight.FAILED
        sets, shared = start.load_datasets(
            config, env, store, reading, device, data_sha256=agreed.data_sha256
        )
        if config.find_batch_size:
            return _find_batch_size(task, joined, sets, progress)
        training = _begin_training(task, joined, sets, progress)
        ending.training = training
        if config.user_functions:
            check_fit(config, training.model, *sets)
        if shared:
            shared.close()  # DDP has started on every rank, so all have mapped it
            shared = None  # a GPU has its own copy
        liveness_writer.sign = training.sign_of_life
        try:
            reason = train(training)
        except BaseException as error:
            ending.claim()
            _finish_save(training)
            if batch_size.is_out_of_memory(error):
                raise _too_large(joined, error) from error
            raise
        if training.saver and not reason:  # on rank 0
            last_saved = f"The last checkpoint is at step {training.saver.last_step}."
            with start.writing(f"the report to {attempt.run.path}", last_saved):
                log.info(report.write(training, env, task.began, os.environ))
                training.note_end("")
    return reason


def _begin_training(
    task: _Task, joined: "JoinResult", sets: "Sets", progress: "Progress"
) -> "Training":
    """Build the training, from its checkpoint if there is one; collective."""
    from clusterddp.checkpoints import state
    from clusterddp.training.loop import Training

    resume = joined.agreed.resume
    return Training(
        task.config,
        joined.agreed,
        joined.device,
        *sets,
        joined.attempt,
        stop.requested,
        deadline=task.deadline,
        progress=progress,
        resume_content=state.load_together(Path(resume)) if resume else None,
    )


def _too_large(joined: "JoinResult", error: BaseException) -> TrainingError:
    size, said = joined.agreed.batch_size, (str(error).splitlines() or [type(error).__name__])[0]
    return TrainingError(
        f"{joined.info.device} of {joined.info.host} has too little memory for this model with "
        f"{size:,} images per rank and step: {said} Lower --batch-size, or split the step with "
        "--gradient-accumulation-steps; --find-batch-size finds the largest size. [CD0811]"
    )


def _finish_save(training: "Training") -> None:
    """Wait a few seconds for a checkpoint and metrics that are being written."""
    from clusterddp.distributed.tcp_store import bounded

    saver = training.saver
    if saver:
        for end, seconds in ((saver.wait, _SAVE_SECONDS), (training.journal.close, 5.0)):
            with suppress(Exception):  # the training's own failure is the one reported
                bounded(end, seconds)


def _find_batch_size(task: _Task, joined: "JoinResult", sets: "Sets", progress: "Progress") -> str:
    """Try batch sizes instead of training; return as `_train` does."""
    from clusterddp.models import nets
    from clusterddp.training import batch_size
    from clusterddp.training.learner import check_fit
    from clusterddp.training.resumable import note_end
    from clusterddp.worker import start

    config, run = task.config, joined.attempt.run
    if config.user_functions:
        check_fit(config, nets.build(config.model).to(joined.device), *sets)
    rows, reason = batch_size.find(
        config,
        joined.agreed,
        rank=task.env.rank,
        train_set=sets[0],
        device=joined.device,
        mark=progress.mark,
        request=stop.requested,
    )
    if task.env.rank == 0:
        with start.writing(f"the batch sizes to {run.path}"):
            write_record(run.batch_sizes, rows, indent=2)
            note_end(joined.attempt, reason, 0)
    return reason
