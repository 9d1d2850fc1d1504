"""`clusterddp debug`: the training entrypoint on this workstation, in one process or several."""

import dataclasses
import functools
import os
import random
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from clusterddp import attempt as attempts
from clusterddp.attempt import Attempt
from clusterddp.cli.inputs import make_sure
from clusterddp.cli.settings import SettingsCommand
from clusterddp.cli.train_options import TRAIN_OPTION_NAMES, config_from, train_options
from clusterddp.dist_env import DistEnv
from clusterddp.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PAUSED,
    RequestError,
    TrainingError,
)
from clusterddp.outcome import Failure, first_failure, read_outcomes
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec, Resources
from clusterddp.train_config import TrainConfig

if TYPE_CHECKING:
    from clusterddp.launchers.processes import TaskGroup

# A surrounding job's or agent's variables, which would tell the ranks that they are its tasks.
_FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "TORCHELASTIC_", "PMI", "MASTER_")
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# From a request to stop until ranks that have not saved and left by then are killed.
_SAVING_SECONDS = 60.0
_ON_REQUEST = (
    b"clusterddp: passed on to the ranks, which save and leave; Ctrl-C again ends them at once\n"
)


@click.command(cls=SettingsCommand, groups={"What it trains": list(TRAIN_OPTION_NAMES)})
@functools.partial(train_options, settings=True)
@click.option(
    "--procs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    envvar="CLUSTERDDP_PROCS",
    help="Processes to train in; with 1 it is this very process, where breakpoints work.",
)
@click.option(
    "--run-name", metavar="NAME", show_default="debug-<time>", help="Name of the run's directory."
)
@click.option(
    "--output-root",
    metavar="DIR",
    default="jobs",
    show_default=True,
    envvar="CLUSTERDDP_OUTPUT_ROOT",
    help="Folder in which runs are kept.",
)
@click.option(
    "--run-dir",
    metavar="DIR",
    show_default="OUTPUT_ROOT/RUN_NAME",
    help="The run's directory itself; one that holds checkpoints is gone on with.",
)
def command(
    procs: int, run_name: str | None, output_root: str, run_dir: str | None, **options: Any
) -> int:
    """Train here and now, without Slurm.

    \b
    clusterddp debug                 in this process: a breakpoint in the model stops there
    clusterddp debug --procs 2       two ranks; rank 0 prints here, each has its log
    """
    config = config_from(options, click.get_current_context())
    if run_dir and run_name:
        raise RequestError("--run-dir and --run-name both name the run's directory; give one.")
    name = run_name or time.strftime("debug-%Y%m%d-%H%M%S")
    path = os.path.abspath(run_dir or f"{output_root}/{name}")
    make_sure(config, may_fetch=False)
    with _recorded(path, config, procs, may_exist=bool(run_dir)) as (run, record):
        if procs > 1:
            code, failure = _run_processes(config, run, procs)
        else:
            from clusterddp.worker import run_task

            code, failure = run_task(config, run.path, DistEnv.from_environ({})), None
        record(code, failure)
        made = attempts.latest(run)
        if code in (EXIT_PAUSED, EXIT_INTERRUPTED) and made and made.end.exists():
            click.echo(f"clusterddp: go on with: {_again(config, run, procs)}", err=True)
        return code


def _again(config: TrainConfig, run: RunDir, procs: int) -> str:
    """The command that goes on with a run from its newest checkpoint."""
    usual = TrainConfig().to_argv()
    more = [word for word in config.to_argv() if word not in usual]
    shown = os.path.relpath(run.path)
    path = shown if not shown.startswith("..") else str(run.path)
    ranks = [f"--procs={procs}"] if procs > 1 else []
    return shlex.join(["clusterddp", "debug", *ranks, *more, f"--run-dir={path}"])


@contextmanager
def _recorded(
    path: str, config: TrainConfig, procs: int, *, may_exist: bool
) -> Iterator[tuple[RunDir, Callable[..., int]]]:
    """The run's directory with the records by which `jobs` and `status` know it.

    Gives the directory and a function that records the exit code, which it returns.
    """
    spec = JobSpec(
        run_name=Path(path).name,
        run_dir=path,
        resources=Resources(tasks_per_node=procs),
        python=sys.executable,
        train=config,
        launcher="local",
    )
    job_id = str(os.getpid())

    def record(code: int, failure: Failure | None = None) -> int:
        first = dataclasses.asdict(failure) if failure else None
        run.add_event("ended", job_id=job_id, exit_code=code, first_failure=first)
        return code

    goes_on = may_exist and Path(path).is_dir()
    known = nullcontext(RunDir(Path(path))) if goes_on else RunDir.create(spec, None)
    with known as run:
        run.add_event(
            "submitted", job_id=job_id, launcher="local", pid=os.getpid(), host=os.uname().nodename
        )
        run.add_event("started", job_id=job_id, nodelist="localhost")
        try:
            yield run, record
        except KeyboardInterrupt:
            record(EXIT_INTERRUPTED)
            raise
        except Exception as error:
            record(getattr(error, "exit_code", EXIT_FAILED))
            raise


def _run_processes(config: TrainConfig, run: RunDir, procs: int) -> tuple[int, Failure | None]:
    """Returns the exit code and the rank that failed first."""
    from clusterddp.launchers.processes import TaskGroup

    run.make(run.logs)
    attempts.await_silence(
        run, "", config.rendezvous_timeout, lambda line: click.echo(line, err=True)
    )
    attempt = attempts.begin(run)
    argv = [
        sys.executable, "-m", "clusterddp", "train", *config.to_argv(), f"--run-dir={run.path}",
        f"--attempt={attempt.number}",
    ]  # fmt: skip
    port = free_port()
    with TaskGroup() as group:
        stopping = _Stopping(group, attempt)
        with stopping:
            for rank in range(procs):
                group.start(
                    argv, _environment(rank, procs, port), run.rank_log(rank), tee=rank == 0
                )
            stopping.listen()
            statuses = group.wait()
    if not any(statuses):
        return 0, None
    # Also where nobody asked this process: `clusterddp stop` asks the ranks themselves.
    if attempt.end.exists() and set(statuses) <= {0, EXIT_PAUSED, EXIT_INTERRUPTED}:
        return max(statuses), None
    if stopping.number:
        click.echo(f"clusterddp: ended before it had saved; the logs are in {run.logs}", err=True)
        return 128 + stopping.number, None
    failure = first_failure(read_outcomes(attempt.outcomes))
    if failure is None:
        rank = group.first_failed or 0
        click.echo(f"clusterddp: rank {rank} failed first; see {run.rank_log(rank)}", err=True)
        return EXIT_FAILED, None
    click.echo(f"clusterddp: {failure.describe()}", err=True)
    click.echo(f"clusterddp: the logs are in {run.logs}", err=True)
    return EXIT_FAILED, failure


class _Stopping:
    """Passes a request to stop on to the ranks, and sees to it that they have gone after a while.

    A context: outside it signals have their former meaning. They are held back until `listen`, so
    that no rank misses one.
    """

    def __init__(self, group: "TaskGroup", attempt: Attempt) -> None:
        self.number = 0
        """The signal that asked; a Ctrl-C counts above the others."""
        self._group, self._attempt = group, attempt
        self._before: dict[int, Any] = {}
        self._mask: set[int] = set()

    def __enter__(self) -> None:
        self._mask = set(signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING))
        for number in _ASKING:
            # An ignored SIGHUP is nohup's doing and meant.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)

    def listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self.listen()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self.number == signal.SIGINT == number or not self._attempt.record.exists():
            self.number = number
            self._end()  # the second Ctrl-C, or the ranks have not even met
            return
        first = not self.number
        self.number = signal.SIGINT if signal.SIGINT in (number, self.number) else number
        # One rank that leaves is no failure now: the others are about to.
        self._group.kill_on_bad_exit = False
        if first:
            with suppress(OSError):
                os.write(sys.stderr.fileno(), _ON_REQUEST)  # print is not for a signal's handler
            signal.setitimer(signal.ITIMER_REAL, _SAVING_SECONDS)
        for pid in self._group.pids:  # the small parents, which pass it on to their ranks
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self, *_: object) -> None:
        self._group.signal_all(signal.SIGKILL)


def _environment(rank: int, procs: int, port: int) -> dict[str, str]:
    env = DistEnv(
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=procs,
        local_world_size=procs,
        num_nodes=1,
        master_addr="127.0.0.1",
        master_port=port,
        hostnames=("localhost",),
        origin="torch",
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**own, **env.to_environ(), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port below the kernel's ephemeral range on which nobody listens at this moment."""
    for port in random.sample(range(12000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise TrainingError("no free port was found from 12000 to 31999 on 127.0.0.1.")
