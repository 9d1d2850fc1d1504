"""Runs a task: find out who it is, meet the others, agree, train, tidy up."""

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
    EXIT_PAUSED,
    PeerError,
    TrainingError,
    coded,
)
from clusterddp.files import write_record
from clusterddp.processes import change_environment
from clusterddp.processes.stacks import armed
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import IMAGE_VARIABLE, own_mig_device
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.training import stop
from clusterddp.training.stop import Deadline, Presence, poll_time_limit
from clusterddp.worker import supervise
from clusterddp.worker.supervise import is_peer_loss

if TYPE_CHECKING:
    from clusterddp.data.user_dataset import OwnSets
    from clusterddp.distributed.heartbeat import Progress
    from clusterddp.distributed.rendezvous import RunStore
    from clusterddp.distributed.watchdog import Watchdog
    from clusterddp.training.loop import Training
    from clusterddp.worker.join import Joined
    from clusterddp.worker.start import Sets

    _Reading = mnist.Reading | OwnSets

# For a checkpoint under way when a rank has failed: Slurm kills KillWait (30 s) after its TERM.
_SAVE_SECONDS = 20.0
_PACKAGES = {"torch": (2, 4), "numpy": (1, 24)}
"""Packages that every training imports, with their least versions (as in pyproject.toml)."""


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
    attempt: the number that the starting side has made; without it rank 0 makes one.
    signal_lead: seconds ahead of the time limit at which Slurm was asked for a signal.

    Raises ClusterDDPError (a TrainingError with `peer_lost` where another rank is to blame) and
    KeyboardInterrupt; the process group is gone in every case.
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
    """Everything that a task was started with."""

    config: TrainConfig
    run_dir: Path | None
    env: DistEnv
    attempt: int | None
    deadline: Deadline
    began: float
    """Seconds of the epoch."""


def _run(task: _Task) -> int:
    config, env = task.config, task.env
    own_device = own_mig_device(os.environ, env.local_rank, env.local_world_size)
    change_environment({**env.to_environ(), **own_device})  # CUDA reads it once, when it starts
    bound = tcp_store.bind(env, os.environ)  # first of all, so that no rank has to ask again
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
        _breaking_off(env, lambda: watchdog.suspect if watchdog else "", ending),
    ):
        store = rendezvous.open_store(
            env,
            os.environ,
            config.rendezvous_timeout,
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
        if config.watchdog:
            watchdog = at_end.enter_context(_watchdog(config, env, joined, progress, ending))
        reason = _train(task, joined, store, reading, progress, ending)
        dist.barrier()
        ending.claim()
    rendezvous.part()
    rendezvous.leave(store, env)
    return {"": EXIT_DONE, "interrupt": EXIT_INTERRUPTED}.get(reason, EXIT_PAUSED)


def _require_packages() -> None:
    """Raise TrainingError where the interpreter lacks what every training imports."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise _unfit(absent, f"{' and '.join(absent)} cannot be imported by {sys.executable}")


def _import_package(name: str) -> None:
    """Import torch or numpy; raises TrainingError where it is broken or too old."""
    try:
        module = __import__(name)
    except Exception as error:  # a library that it was built with is not there, for one
        what = f"{name} cannot be imported by {sys.executable} ({type(error).__name__}: {error})"
        raise _unfit([name], what) from error
    least, version = _PACKAGES[name], str(getattr(module, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < least:
        wanted = f"{name} {least[0]}.{least[1]} or later is needed"
        raise _unfit([name], f"{wanted}, and {sys.executable} has {version}")


def _unfit(packages: Sequence[str], what: str) -> TrainingError:
    """Say where a package is missing, and what to do."""
    image = os.environ.get(IMAGE_VARIABLE)
    if image:
        return TrainingError(
            f"{what} in the image {image} on {socket.gethostname()}. Use an image that has it, or "
            "name another interpreter in it with --python. [CD1006]"
        )
    wanted = " ".join(f"'{name}>={'.'.join(map(str, _PACKAGES[name]))}'" for name in packages)
    return TrainingError(
        f"{what} on {socket.gethostname()}. Install it there: {sys.executable} -m pip install "
        f"{wanted}; or choose another interpreter with --python. [CD0803]"
    )


def _begin_reading(config: TrainConfig, env: DistEnv) -> mnist.Reading | None:
    """Begin to read MNIST's files beside the imports, on the first rank of a node."""
    is_own, is_first = is_reference(config.dataset), 0 in (env.local_rank, env.rank)
    if config.data_pipeline == "memory" and is_first and not is_own:
        return mnist.Reading(config.dataset, config.data_dir, digest=env.rank == 0)
    return None


def _import_torch() -> None:
    """Import torch without collecting garbage, then or later: what modules make stays.

    Collecting time and again is a fifth of what importing torch takes.
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

        # The first optimizer imports as much again (torch._dynamo, sympy: some 900 modules). Here,
        # so that ranks which are slow at it are waited for once: when all meet.
        torch.optim.SGD([torch.zeros(())])
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


@contextmanager
def _breaking_off(env: DistEnv, suspect: Callable[[], str], ending: "_Ending") -> Iterator[None]:
    """Leave the process group where the body fails; blame another rank that is the cause.

    suspect: returns whom the watchdog holds to be the cause, or nothing.
    """
    from clusterddp.distributed import rendezvous

    try:
        yield
    except BaseException as error:
        ending.claim()
        hint = f" ({suspected})" if (suspected := suspect()) else ""
        rendezvous.break_off(env)
        if not is_peer_loss(error):
            raise
        raise PeerError(
            f"rank {env.rank} on {socket.gethostname()} lost another rank{hint}: "
            f"{str(error).splitlines()[0]}. The log of the rank that failed first says "
            "why. [CD0909]"
        ) from error


class _Ending:
    """End of a task that fails: by its own exception or by the watchdog, whichever comes first."""

    def __init__(self, env: DistEnv) -> None:
        self.training: Training | None = None
        self._env, self._claimed = env, threading.RLock()

    def claim(self) -> None:
        """Have the calling thread end the task; does not return where the watchdog does already."""
        self._claimed.acquire()

    def leave(self, attempt: Attempt, why: str) -> None:
        """End this process, whose training waits in NCCL for a rank that does not come.

        A thread of the watchdog's calls it: the waiting one cannot be woken. NCCL's own time-out
        follows, so what is known comes first, and its flight recorder, which can hang this process,
        after the checkpoint.
        """
        from clusterddp.distributed import rendezvous

        if not self._claimed.acquire(blocking=False):
            return
        error = PeerError(f"{why}. The log of the rank that failed first says why. [CD0909]")
        supervise.report(error)
        with suppress(OSError):  # past the locks of sys.stderr, which the waiting thread may hold
            os.write(2, f"clusterddp: {coded(error)}\n".encode(errors="replace"))
        if self.training:
            _let_save_end(self.training)
        rendezvous.dump_flight_recorder(attempt.nccl_trace(self._env.rank))
        if self._env.rank:
            time.sleep(_SAVE_SECONDS)  # rank 0 saves: NCCL would end it once this one has gone
        os._exit(error.exit_code)


def _watchdog(
    config: TrainConfig, env: DistEnv, joined: "Joined", progress: "Progress", ending: _Ending
) -> "Watchdog":
    from clusterddp.distributed.watchdog import Watchdog, noting

    return Watchdog.of_ranks(
        env,
        progress,
        silent_seconds=config.watchdog,
        group_seconds=config.process_group_timeout,
        host=joined.hello.host,
        note=noting(joined.attempt.outcomes),
        beat=supervise.gil_watch.beat if supervise.gil_watch else lambda _: None,
        leave=partial(ending.leave, joined.attempt) if joined.agreed.backend == "nccl" else None,
        leave_seconds=config.process_group_timeout,
    )


def _train(
    task: _Task,
    joined: "Joined",
    store: "RunStore",
    reading: "_Reading | None",
    progress: "Progress",
    ending: _Ending,
) -> str:
    """Train; returns the reason where the ranks have stopped early, for rank 0 to have noted."""
    from clusterddp.training import batch_size, preflight, report
    from clusterddp.training.learner import check_fit
    from clusterddp.training.loop import train
    from clusterddp.worker import start

    config, env, deadline = task.config, task.env, task.deadline
    attempt, agreed, device = joined.attempt, joined.agreed, joined.device
    request = stop.requested
    presence = Presence(attempt, request)
    with presence if env.rank == 0 else nullcontext():
        if env.rank == 0:
            poll_time_limit(deadline, os.environ)
        if joined.checks_nodes and not preflight.nodes_pass(
            joined.hello, attempt, device, agreed.precision, progress
        ):
            return preflight.FAILED
        sets, held = start.obtain(
            config, env, store, reading, device, data_sha256=agreed.data_sha256
        )
        if config.find_batch_size:
            return _find_batch_size(task, joined, sets, progress)
        training = _begin_training(task, joined, sets, progress)
        ending.training = training
        if config.own_functions:
            check_fit(config, training.model, *sets)
        if held:
            held.close()  # DDP has begun on every rank, so all of them have mapped it
            held = None  # a GPU has the set in its own memory
        presence.sign = training.sign_of_life
        try:
            reason = train(training)
        except BaseException as error:
            ending.claim()
            _let_save_end(training)
            if batch_size.is_out_of_memory(error):
                raise _too_large(joined, error) from error
            raise
        if training.saver and not reason:  # on rank 0
            last_saved = f"Its last checkpoint is that of step {training.saver.last_step}."
            with start.writing(f"how the training ended to {attempt.run.path}", last_saved):
                log.info(report.write(training, env, task.began, os.environ))
                training.note_end("")
    return reason


def _begin_training(
    task: _Task, joined: "Joined", sets: "Sets", progress: "Progress"
) -> "Training":
    """Build the training, or what its checkpoint holds of it; collective."""
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


def _too_large(joined: "Joined", error: BaseException) -> TrainingError:
    size, said = joined.agreed.batch_size, (str(error).splitlines() or [type(error).__name__])[0]
    return TrainingError(
        f"{joined.hello.device} of {joined.hello.host} has no memory for this model at {size:,} "
        f"images per rank and step: {said} Lower --batch-size, or take "
        "--gradient-accumulation-steps for the same step in parts; --find-batch-size shows what "
        "fits. [CD0811]"
    )


def _let_save_end(training: "Training") -> None:
    """Give a checkpoint that is being written a few seconds when another rank fails, and the
    curves too."""
    from clusterddp.distributed.tcp_store import bounded

    saver = training.saver
    if saver:
        for end, seconds in ((saver.wait, _SAVE_SECONDS), (training.journal.close, 5.0)):
            with suppress(Exception):  # the training's own failure is the one reported
                bounded(end, seconds)


def _find_batch_size(task: _Task, joined: "Joined", sets: "Sets", progress: "Progress") -> str:
    """Try batch sizes instead of training; returns as `_train` does."""
    from clusterddp.models import nets
    from clusterddp.training import batch_size
    from clusterddp.training.learner import check_fit
    from clusterddp.training.resumable import note_end
    from clusterddp.worker import start

    config, run = task.config, joined.attempt.run
    if config.own_functions:
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
