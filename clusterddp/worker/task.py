"""What every task runs: find out who it is, meet the others, agree, train, tidy up.

The only writer of os.environ in a task.
"""

import gc
import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import log
from clusterddp.data import shared_memory, user_dataset
from clusterddp.distributed import name_lookups, tcp_store
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PAUSED,
    ClusterDDPError,
    PeerError,
    TrainingError,
)
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request import user_functions
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import note_hung
from clusterddp.run.task_error import is_peer_loss
from clusterddp.training import stop
from clusterddp.training.deadline import Deadline
from clusterddp.worker import time_limit

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from clusterddp.checkpoints.writer import Saver
    from clusterddp.data.in_memory import Images
    from clusterddp.data.loader import Loaded
    from clusterddp.distributed.heartbeat import Progress
    from clusterddp.distributed.watchdog import Verdict
    from clusterddp.training.loop import Training
    from clusterddp.worker.join import Joined

# For a checkpoint under way when a rank has failed: Slurm kills KillWait (30 s) after its TERM.
_SAVE_SECONDS = 20.0


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
    try:
        with log.to(log.to_stdout):
            return _run(config, run_dir, env, attempt, Deadline(signal_lead), began)
    finally:
        give_back()
        stop.requested.forget()
        gc.unfreeze()


def _run(
    config: TrainConfig,
    run_dir: Path | None,
    env: DistEnv | None,
    attempt: int | None,
    deadline: Deadline,
    began: float,
) -> int:
    _require_torch()
    env = env or DistEnv.from_environ(os.environ)
    os.environ.update(env.to_environ())
    bound = tcp_store.bind(env, os.environ)  # first of all, so that no rank has to ask again
    reading: shared_memory.Reading | user_dataset.OwnSets | None = None
    if user_functions.is_reference(config.dataset):
        reading = user_dataset.OwnSets(config)
    elif config.data_pipeline == "memory" and 0 in (env.local_rank, env.rank):
        reading = shared_memory.Reading(config.dataset, config.data_dir, digest=env.rank == 0)
    asked = name_lookups.Lookups(env) if env.world_size > 1 else None

    with _imports():
        import torch
        import torch.distributed as dist

        from clusterddp.distributed import heartbeat, rendezvous
        from clusterddp.distributed.heartbeat import Progress
        from clusterddp.distributed.watchdog import Watchdog, periods
        from clusterddp.worker import join

        # The first optimizer imports as much again (torch._dynamo, sympy: some 900 modules). Here,
        # so that ranks which are slow at it are waited for once: when all meet.
        torch.optim.SGD([torch.zeros(())])

    store = dog = None
    progress = Progress()
    try:
        store = rendezvous.open_store(
            env, os.environ, config.rendezvous_timeout,
            bound=bound, answered=lambda: asked is None or asked.master_answered,
        )  # fmt: skip
        joined = join.join(
            config, run_dir, attempt, env, store, os.environ,
            fingerprint=reading.fingerprint if reading else None, asked=asked,
        )  # fmt: skip
        if config.watchdog:
            silent, beat = periods(config.watchdog, config.process_group_timeout, env.world_size)
            dog = Watchdog(
                heartbeat.connect(env, os.environ, 10.0), env, progress,
                silent_seconds=silent, beat_seconds=beat, host=joined.hello.host,
                note=partial(_note_hung, joined.attempt),
            )  # fmt: skip
            dog.start()
        reason = _train(config, joined, env, store, reading, progress, deadline, began)
        dist.barrier()
    except ClusterDDPError:
        rendezvous.break_off(env)
        raise
    except BaseException as error:
        suspect = dog.latest_suspect() if dog else ""
        rendezvous.break_off(env)
        if is_peer_loss(error):
            seen = f" ({suspect})" if suspect else ""
            raise PeerError(
                f"rank {env.rank} on {socket.gethostname()} lost another rank{seen}: "
                f"{str(error).splitlines()[0]}. The log of the rank that failed first says why."
            ) from error
        raise
    finally:
        if dog:
            dog.stop()
    dist.destroy_process_group()
    rendezvous.leave(store, env)
    if not reason:
        return EXIT_DONE
    return EXIT_INTERRUPTED if reason == "interrupt" else EXIT_PAUSED


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise TrainingError(
            f"torch is not installed for {sys.executable} on {socket.gethostname()}. "
            f"Install it there: {sys.executable} -m pip install torch; or choose another "
            "interpreter with --python."
        )


@contextmanager
def _imports() -> Iterator[None]:
    """Import without looking for garbage, then or later: what modules make stays.

    To look through it time and again is a fifth of what importing torch takes.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()


def _train(
    config: TrainConfig,
    joined: "Joined",
    env: DistEnv,
    store: "Store",
    reading: shared_memory.Reading | user_dataset.OwnSets | None,
    progress: "Progress",
    deadline: Deadline,
    began: float,
) -> str:
    """Train; returns the reason where the ranks have stopped early, for rank 0 to have noted."""
    from clusterddp.checkpoints import state
    from clusterddp.training import fit, report
    from clusterddp.training.loop import Training
    from clusterddp.worker import datasets
    from clusterddp.worker.presence import Presence

    attempt, agreed = joined.attempt, joined.agreed
    presence = Presence(attempt, stop.requested)
    with presence if env.rank == 0 else nullcontext():
        if env.rank == 0:
            time_limit.keep_asking(deadline, os.environ)
        train_set, test_set, held = datasets.obtain(
            config, env, store, reading, joined.device, data_sha256=agreed.data_sha256
        )
        if config.find_batch_size:
            reason = _find_batch_size(config, joined, env, (train_set, test_set), progress)
            if held:
                held.close()  # the ranks have exchanged, so all of them have mapped it
            return reason
        training = Training(
            config,
            agreed,
            rank=env.rank,
            device=joined.device,
            train_set=train_set,
            test_set=test_set,
            resume_content=state.load_together(Path(agreed.resume), joined.device)
            if agreed.resume
            else None,
            attempt=attempt,
            request=stop.requested,
            progress=progress,
            deadline=deadline,
        )
        if config.own_functions:
            fit.check(config, training.model, train_set, test_set)
        if held:
            held.close()  # DDP has begun on every rank, so all of them have mapped it
            held = None  # a GPU has the set in its own memory
        presence.step = lambda: training.position.step
        presence.saved = lambda: training.saver.last_step if training.saver else None
        try:
            reason = training.run()
        except BaseException:
            _let_save_end(training)
            raise
        if env.rank == 0:
            try:
                if not reason:
                    log.info(report.write(config, agreed, env, training, began, os.environ))
                _note_end(attempt, reason, training.position.step, training.saver)
            except OSError as error:
                raise TrainingError(
                    f"rank 0 on {socket.gethostname()} cannot write how the training ended to "
                    f"{attempt.run.path}: {error.strerror}. Its last checkpoint is that of step "
                    f"{training.saver.last_step if training.saver else None}."
                ) from None
    return reason


def _let_save_end(training: "Training") -> None:
    """A checkpoint that is being written when another rank fails is worth a few seconds, and so
    are the curves."""
    from clusterddp.distributed.tcp_store import bounded

    if training.saver:
        for ending, seconds in (
            (training.saver.wait, _SAVE_SECONDS),
            (training.journal.close, 5.0),
        ):
            with suppress(Exception):  # the training's own failure is what is told
                bounded(ending, seconds)


def _find_batch_size(
    config: TrainConfig,
    joined: "Joined",
    env: DistEnv,
    sets: "tuple[Images | Loaded, Images | Loaded]",
    progress: "Progress",
) -> str:
    """Instead of training, with one of its two sets; returns as `_train` does."""
    from clusterddp.models import registry
    from clusterddp.training import batch_size, fit

    if config.own_functions:
        fit.check(config, registry.build(config.model).to(joined.device), *sets)
    rows, reason = batch_size.find(
        config, joined.agreed, rank=env.rank, train_set=sets[0], device=joined.device,
        mark=progress.mark, request=stop.requested,
    )  # fmt: skip
    if env.rank == 0:
        run = joined.attempt.run
        try:
            batch_size.write(run.batch_sizes, rows)
            _note_end(joined.attempt, reason, 0)
        except OSError as error:
            raise TrainingError(
                f"rank 0 on {socket.gethostname()} cannot write what it found to {run.path}: "
                f"{error.strerror}."
            ) from None
    return reason


def _note_hung(attempt: Attempt, verdict: "Verdict | None") -> None:
    """Notes which rank hangs: the verdict then names it before those that gave up waiting."""
    if verdict and verdict.kind == "alone":
        return  # a rank that sees no other
    with suppress(OSError):
        if verdict and verdict.reason:
            note_hung(attempt.outcomes, verdict.ranks, verdict.reason)
        else:
            note_hung(attempt.outcomes, (), "")


def _note_end(attempt: Attempt, reason: str, step: int, saver: "Saver | None" = None) -> None:
    """By this the batch script knows how the ranks left; srun's exit code could not tell.

    Raises OSError where a training that is done cannot note it: one that was asked to stop leaves
    in any case, and the script looks at the disk itself.
    """
    if reason:
        log.info(f"stopped at step {step} ({reason}); start the run again to go on from there")
    end = {
        "cause": "stopped" if reason else "done",
        "reason": reason,
        "step": step,
        "saved": saver.last_step if saver else None,
    }
    if saver and saver.trouble:
        end["trouble"] = saver.trouble
    try:
        attempt.write_last_word(attempt.end, json.dumps(end).encode())
    except OSError as error:
        if not reason:
            raise
        log.warning(f"{attempt.end} cannot be written: {error.strerror}")
