"""Local ranks without Slurm: trainings, functions, and requests to stop."""

import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from clusterddp import log, polling, version
from clusterddp.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    RequestError,
    TrainingError,
    coded,
    is_debuggers_quit,
)
from clusterddp.processes import start_methods
from clusterddp.processes.container import Container
from clusterddp.processes.group import TaskGroup
from clusterddp.processes.hardware import AMD_DEVICE, has_nvidia_driver
from clusterddp.processes.signals import Relay, held_back, send
from clusterddp.ranks import dist_env
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run import attempt as attempts
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, write_attempt_dividers
from clusterddp.run.events import Failure
from clusterddp.run.outcome import first_failure, read_outcomes
from clusterddp.run.run_dir import RunDir
from clusterddp.status import end_codes

T = TypeVar("T")

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time from a request to stop until the remaining ranks are killed.
_SAVING_SECONDS = 60.0
_ON_REQUEST = (
    b"clusterddp: asked the ranks to save a checkpoint and exit; Ctrl-C again ends them at once\n"
)


def request(path: str, config: TrainConfig, procs: int, **more: Any) -> JobSpec:
    """Return the request of a local run, with additional fields."""
    resources = Resources(tasks_per_node=procs)
    return JobSpec(Path(path).name, path, resources, train=config, launcher="local", **more)


@contextmanager
def recorded(spec: JobSpec, *, may_exist: bool) -> Iterator[tuple[RunDir, Callable[..., None]]]:
    """Create the run's directory and the records that `runs` and `status` read.

    Yields the directory and a function that records the exit code and the first Failure, if any.
    Raises RequestError if the run exists and `may_exist` is False.
    """
    path = Path(spec.run_dir)
    job_id = str(os.getpid())

    def record(code: int, failure: Failure | None = None) -> None:
        events.add(run.events, events.Ended(job_id=job_id, exit_code=code, first_failure=failure))

    goes_on = may_exist and path.is_dir()
    known = nullcontext(RunDir(path)) if goes_on else RunDir.create(spec, None)
    with known as run:
        host, pid = os.uname().nodename, os.getpid()
        events.add(
            run.events, events.Submitted(job_id=job_id, launcher="local", pid=pid, host=host)
        )
        events.add(run.events, events.Started(job_id=job_id, nodelist="localhost"))
        try:
            yield run, record
        except (Exception, KeyboardInterrupt) as error:
            left = isinstance(error, KeyboardInterrupt) or is_debuggers_quit(error)
            record(EXIT_INTERRUPTED if left else getattr(error, "exit_code", EXIT_FAILED))
            raise


def train(
    config: TrainConfig,
    run: RunDir,
    procs: int,
    start_method: str,
    container: Container | None = None,
) -> tuple[int, Failure | None]:
    """Train in `procs` processes; each rank writes its log, rank 0 also prints here.

    start_method: one of START_METHODS.
    container: if given, each rank runs in its own container, with this clusterddp and this
        machine's GPUs.

    Returns the exit code, and the rank that failed first, if any. Raises RequestError if the start
    method is not possible here.
    """
    start_methods.get_ready(start_method)
    if container:
        from clusterddp.submission import bundle  # most runs have no container

        bundle.bundle_into(run)
        gpus = config.device != "cpu" and (has_nvidia_driver() or AMD_DEVICE.exists())
        container = replace(container, gpus=gpus)
    run.make(run.logs)
    attempts.wait_until_inactive(
        run, "", config.rendezvous_timeout or polling.OTHER_ATTEMPT_SECONDS
    )
    attempt = attempts.begin(run)
    write_attempt_dividers(attempt, "")
    with TaskGroup() as group, _stopping(group, attempt, by_mark=bool(container)) as relay:
        for env in dist_env.local_ranks(procs, free_port()):
            _start_rank(group, start_method, config, attempt, env, container)
        relay.listen()
        statuses = group.wait()
    if not any(statuses):
        return 0, None
    # Also without a signal to this process: `clusterddp stop` asks the ranks directly.
    if attempt.end.exists() and set(statuses) <= {0, EXIT_STOPPED, EXIT_INTERRUPTED}:
        return max(statuses), None
    if relay.number:
        log.info(f"ended before it had saved; the logs are in {run.logs}")
        return 128 + relay.number, None
    outcomes = read_outcomes(attempt.outcomes)
    failure = first_failure(outcomes)
    if failure is None:
        rank = group.first_failed or 0
        words = f"rank {rank} failed first; see {run.rank_log(rank)}"
        log.info(coded(words, end_codes.UNEXPLAINED))
        return EXIT_FAILED, None
    log.info(coded(failure.describe(), end_codes.code_of_failure(failure, outcomes)))
    log.info(f"the logs are in {run.logs}")
    return EXIT_FAILED, failure


def _start_rank(
    group: TaskGroup,
    start_method: str,
    config: TrainConfig,
    attempt: Attempt,
    env: DistEnv,
    container: Container | None,
) -> None:
    run = attempt.run
    rank_log, tee = run.rank_log(env.rank), env.rank == 0
    environ = rank_environment(env)
    if start_method == "exec":
        argv, where = version.command(), [f"--run-dir={run.path}", f"--attempt={attempt.number}"]
        if container:
            argv += ["exec", *where, f"--container={container.to_json()}", "--"]
            argv += [container.python, str(run.bundle)]
        argv += ["train", *config.to_argv(), *where]
        group.start(argv, environ, rank_log, tee=tee)
    else:
        group.call(start_method, _rank, (config, attempt, env), environ, rank_log, tee=tee)


def _rank(config: TrainConfig, attempt: Attempt, env: DistEnv) -> None:
    """Run a rank as `clusterddp train` does, in a process of multiprocessing."""
    from clusterddp.training import stop
    from clusterddp.worker.supervise import supervise

    path = attempt.run.path

    def child() -> int:
        from clusterddp.worker.task import run_task

        return run_task(config, path, env, attempt=attempt.number)

    sys.exit(supervise(path, env, child, attempt=attempt.number, listen=stop.requested.listen))


def rank_environment(env: DistEnv) -> dict[str, str]:
    """Return the environment of a local rank, without the variables of a Slurm job."""
    foreign = dist_env.foreign_variables(os.environ)
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**inherited, **env.to_environ(), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Find a port below the kernel's ephemeral range that is currently free."""
    for port in random.SystemRandom().sample(range(12000, 32000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise TrainingError("no free port was found from 12000 to 31999 on 127.0.0.1. [CD0905]")


@contextmanager
def _stopping(group: TaskGroup, attempt: Attempt, *, by_mark: bool) -> Iterator[Relay]:
    """Forward a request to stop to the ranks, and kill those that do not exit in time.

    by_mark: ask with the stop file, because a container runtime does not forward every signal.
    """

    def end(*_: object) -> None:
        group.signal_all(signal.SIGKILL)

    def pass_on(number: int, earlier: int) -> None:
        if number == earlier == signal.SIGINT or not attempt.record.exists():
            end()  # the second Ctrl-C, or before the rendezvous
            return
        # A rank that exits is not a failure now: the others exit too.
        group.kill_on_bad_exit = False
        if not earlier:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _ON_REQUEST)  # print is unsafe in a signal handler
            alarm.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, end))
            alarm.callback(signal.setitimer, signal.ITIMER_REAL, 0.0)
            signal.setitimer(signal.ITIMER_REAL, _SAVING_SECONDS)
        if by_mark:
            with suppress(OSError):  # on a full disk, fall back to the signal
                attempt.ask_to_stop("stop")
                return
        send(number, group.pids)  # to the small parents, which forward it to their ranks

    with ExitStack() as alarm, Relay(_ASKING, pass_on) as relay:
        yield relay


def call_on_ranks(
    function: Callable[..., T], arguments: Sequence[object], procs: int, start_method: str
) -> list[T]:
    """Call a function in `procs` processes, with rank variables in os.environ; return the results.

    All processes share this one's output. If one fails, the others are ended. Raises
    TrainingError with the traceback of the rank that failed first, and RequestError if the function
    cannot be sent to other processes with this start method.
    """
    forked = start_method == "fork"
    called = (function, tuple(arguments)) if forked else _pickled(function, arguments)
    start_methods.get_ready(start_method)
    ranks = dist_env.local_ranks(procs, free_port())
    with tempfile.TemporaryDirectory(prefix="clusterddp-launch-") as name, TaskGroup() as group:
        folder = Path(name)
        with held_back({signal.SIGINT}):  # else a rank that is being started would keep running
            for env in ranks:
                call = (called, folder, env.rank)
                group.call(start_method, _call, call, rank_environment(env), tee=True)
        statuses = group.wait()
        if any(statuses):
            raise TrainingError(_first_failure(folder, statuses, group.first_failed), code="CD0817")
        return [_read_result(folder, rank) for rank in range(procs)]


def _pickled(function: Callable[..., object], arguments: Sequence[object]) -> bytes:
    """Pickle the function by its name, for a process that imports it again."""
    try:
        main = sys.modules["__main__"]
        if function.__module__ == "__main__" and not hasattr(main, "__file__"):
            raise pickle.PicklingError("it is defined in a notebook's cell or at a prompt")
        return pickle.dumps((function, tuple(arguments)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RequestError(
            f"{getattr(function, '__qualname__', function)} cannot be sent to another process: "
            f"{error}. Use start_method='fork', or a function of a module, and arguments that can "
            "be pickled. [CD0817]"
        ) from None


def _call(
    called: tuple[Callable[..., object], tuple[object, ...]] | bytes, folder: Path, rank: int
) -> None:
    """Unpickle and call the function, with the rank's environment set: imports may read it."""
    try:
        function, arguments = pickle.loads(called) if isinstance(called, bytes) else called
        value = function(*arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code:
            lines = traceback.format_exception(error)
            del lines[1:2]  # the frame of this function
            _fail(folder, rank, "".join(lines).rstrip())
        value = None
    try:
        content = pickle.dumps(value)
    except Exception as error:  # a value's own __reduce__ can raise anything
        words = f"{type(error).__name__}: {error}"
        _fail(folder, rank, f"the result of rank {rank} cannot be pickled: {words}")
    (folder / f"result-{rank}").write_bytes(content)


def _fail(folder: Path, rank: int, words: str) -> NoReturn:
    # Atomic: the rank may be killed at any moment after another has failed.
    draft = folder / f".failure-{rank}"
    draft.write_bytes(pickle.dumps((time.time(), rank, words)))
    draft.replace(folder / f"failure-{rank}")
    sys.stdout.flush()
    # Skips exit handlers of libraries: a process group may hang there after the loss of a peer.
    os._exit(EXIT_FAILED)


def _read_result(folder: Path, rank: int) -> Any:
    try:
        return pickle.loads((folder / f"result-{rank}").read_bytes())
    except FileNotFoundError:
        raise TrainingError(
            f"rank {rank} exited with 0 before the function returned. [CD0817]"
        ) from None
    except Exception as error:  # unpickling can raise anything
        raise TrainingError(
            f"the result of rank {rank} cannot be unpickled here: {type(error).__name__}: "
            f"{error} [CD0817]"
        ) from error


def _first_failure(folder: Path, statuses: Sequence[int], first: int | None) -> str:
    """Return a message with the rank that failed first and its traceback.

    first: the rank whose process ended first; another rank may have raised earlier.
    """
    failures = [pickle.loads(path.read_bytes()) for path in folder.glob("failure-*")]
    if first is None or first in [rank for _, rank, _ in failures]:
        _, first, words = min(failures)
        return f"rank {first} of {len(statuses)} failed first:\n{words}"
    status = statuses[first]
    words = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
    return f"rank {first} of {len(statuses)} failed first: {words}."
