"""`clusterddp debug`: the training entrypoint on this workstation, in one process or several."""

import dataclasses
import functools
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from clusterddp.attempt import await_silence, begin
from clusterddp.cli.inputs import make_sure
from clusterddp.cli.settings import SettingsCommand
from clusterddp.cli.train_options import TRAIN_OPTION_NAMES, config_from, train_options
from clusterddp.dist_env import DistEnv
from clusterddp.errors import EXIT_FAILED, EXIT_INTERRUPTED, RequestError, TrainingError
from clusterddp.outcome import Failure, first_failure, read_outcomes
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec, Resources
from clusterddp.train_config import TrainConfig

# A surrounding job's or agent's variables, which would tell the ranks that they are its tasks.
_FOREIGN = ("SLURM_", "SLURMD_", "SRUN_", "TORCHELASTIC_", "PMI", "MASTER_")


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
    config = config_from(options)
    if run_dir and run_name:
        raise RequestError("--run-dir and --run-name both name the run's directory; give one.")
    name = run_name or time.strftime("debug-%Y%m%d-%H%M%S")
    path = os.path.abspath(run_dir or f"{output_root}/{name}")
    make_sure(config, may_fetch=False)
    with _recorded(path, config, procs, may_exist=bool(run_dir)) as (run, record):
        if procs > 1:
            return record(*_run_processes(config, run, procs))
        from clusterddp.worker import run_task

        return record(run_task(config, run.path, DistEnv.from_environ({})))


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
        except SystemExit as leaving:  # TERM or HUP, see _leave
            record(leaving.code if isinstance(leaving.code, int) else EXIT_FAILED)
            raise
        except Exception as error:
            record(getattr(error, "exit_code", EXIT_FAILED))
            raise


def _run_processes(config: TrainConfig, run: RunDir, procs: int) -> tuple[int, Failure | None]:
    """Returns the exit code and the rank that failed first."""
    from clusterddp.launchers.processes import TaskGroup

    run.make(run.logs)
    await_silence(run, "", config.rendezvous_timeout, lambda line: click.echo(line, err=True))
    attempt = begin(run)
    argv = [
        sys.executable, "-m", "clusterddp", "train", *config.to_argv(), f"--run-dir={run.path}",
        f"--attempt={attempt.number}",
    ]  # fmt: skip
    port = free_port()
    # The end of this command is the end of its tasks, whoever asks for it.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with TaskGroup() as group:
        for rank in range(procs):
            group.start(argv, _environment(rank, procs, port), run.rank_log(rank), tee=rank == 0)
        statuses = group.wait()
    if not any(statuses):
        return 0, None
    failure = first_failure(read_outcomes(attempt.outcomes))
    if failure is None:
        rank = group.first_failed or 0
        click.echo(f"clusterddp: rank {rank} failed first; see {run.rank_log(rank)}", err=True)
        return EXIT_FAILED, None
    click.echo(f"clusterddp: {failure.describe()}", err=True)
    click.echo(f"clusterddp: the logs are in {run.logs}", err=True)
    return EXIT_FAILED, failure


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


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
