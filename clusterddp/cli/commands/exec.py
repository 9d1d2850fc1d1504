"""`clusterddp exec`: derives the distributed environment, exports it and becomes COMMAND.

For a person's own srun line. Under `submit -- COMMAND` a small parent stays (`--run-dir`), which
records the outcome.
"""

import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from clusterddp.errors import ClusterDDPError
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import JOB_ID, own_mig_device, shown_value
from clusterddp.slurm.forms import ARM_VARIABLE, ATTEMPT_VARIABLE, CODE_VARIABLE
from clusterddp.version import armed_path

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class CommandNotFound(ClusterDDPError):
    """COMMAND, or the interpreter in its first line, does not exist; a shell exits 127 too."""

    exit_code = 127
    code = "CD0316"


class CommandNotExecutable(ClusterDDPError):
    """COMMAND exists and cannot be run; a shell exits 126 too."""

    exit_code = 126
    code = "CD0316"


@click.command(name="exec", context_settings={"allow_interspersed_args": False})
@click.option("--run-dir", type=click.Path(path_type=Path), hidden=True)
@click.option("--own-log", is_flag=True, hidden=True)
@click.option("--attempt", type=int, hidden=True, envvar=ATTEMPT_VARIABLE)
@click.option("--container", hidden=True)
@click.option("--arm-stacks/--no-arm-stacks", default=True, hidden=True)
@click.argument(
    "argv", metavar="-- COMMAND [ARGUMENT]...", nargs=-1, required=True, type=click.UNPROCESSED
)
def command(
    run_dir: Path | None,
    own_log: bool,
    attempt: int | None,
    container: str | None,
    arm_stacks: bool,
    argv: tuple[str, ...],
) -> int:
    """Derive the distributed environment, export it and become COMMAND.

    \b
    srun clusterddp exec -- python train.py --lr 0.1

    Exports RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NODE_RANK,
    GROUP_* and ROLE_*, as torchrun does; 'clusterddp env' shows their values. Outside a Slurm step
    and without torch's variables it is rank 0 of 1, with MASTER_PORT=0 (any free port) unless
    MASTER_PORT is set; within a job, as in the shell of salloc, it says so.

    Exit codes: COMMAND's own; 126 it cannot be run, 127 it was not found, 1 the variables
    contradict each other, 2 a wrong request.
    """
    env = DistEnv.from_environ(os.environ)
    own_device = own_mig_device(os.environ, env.local_rank, env.local_world_size)
    environ = {**os.environ, **env.to_environ(), **own_device}
    environ.pop(ATTEMPT_VARIABLE, None)  # COMMAND may start a training of its own
    if run_dir is not None and (arm_stacks or environ.get(CODE_VARIABLE)):
        # Not of a person's own srun line, which has no `clusterddp stacks` and no copy of the code.
        environ["PYTHONPATH"] = armed_path(environ.get("PYTHONPATH", ""))
        environ[ARM_VARIABLE] = str(int(arm_stacks))
    job = next((os.environ[name] for name in JOB_ID if os.environ.get(name)), "")
    if env.origin == "single" and job:
        click.echo(
            f"clusterddp: warning: this shell is in Slurm's job {shown_value(job)}, but in no step "
            "of it: COMMAND is rank 0 of a world of one. For a rank in every task: "
            f"srun clusterddp exec -- {shlex.join(argv)} [CD0801]",
            err=True,
        )
    if run_dir is None:
        become(argv, environ)

    # Imported where they are used: only runs of `submit -- COMMAND` need a parent that stays.
    if container:
        from clusterddp.processes.container import Container
        from clusterddp.worker.container_parent import run_contained

        return run_contained(
            run_dir.absolute(),
            env,
            Container.from_json(container),
            argv,
            become,
            attempt=attempt,
            own_log=own_log,
        )

    return _supervised(run_dir.absolute(), env, argv, environ, attempt, own_log=own_log)


def _supervised(
    run_dir: Path,
    env: DistEnv,
    argv: Sequence[str],
    environ: dict[str, str],
    attempt: int | None,
    *,
    own_log: bool,
) -> int:
    """Run COMMAND below the small parent that records its outcome."""
    # Imported here: only runs of `submit -- COMMAND` need the parent that stays.
    from clusterddp.processes import worlds
    from clusterddp.processes.worlds import Meeting
    from clusterddp.request import nested_launcher
    from clusterddp.run.attempt import Attempt
    from clusterddp.run.loop_variables import show_loop
    from clusterddp.run.outcome import ERROR_FILE_VARIABLE, TaskRecord, Traces
    from clusterddp.run.records import OwnWorld, TaskError
    from clusterddp.run.run_dir import RunDir
    from clusterddp.worker import gpu_use
    from clusterddp.worker.supervise import supervise

    if attempt is not None:  # an agent's own file is left to the agent, which reads it
        own = Attempt(RunDir(run_dir), attempt)
        environ.setdefault(ERROR_FILE_VARIABLE, str(own.error_file(env.rank)))
        show_loop(environ, own)
        if env.rank == 0 and (spec := own.run.read_spec()) and spec.tracker:
            from clusterddp.worker.tracking import show_tracker

            show_tracker(environ, own.run, spec.tracker.split(","), argv)
    error_file = environ.get(ERROR_FILE_VARIABLE)
    traces = Traces(Path(error_file) if error_file else None)

    def child() -> int:
        try:
            become(argv, environ)
        except CommandNotFound:
            if "/" not in argv[0]:  # for the rank's log: too long for a list of runs
                click.echo(f"clusterddp: PATH={environ.get('PATH', '')}", err=True)
            raise

    met: list[Meeting] = []

    def explain(status: int) -> TaskError | None:
        for meeting in met:
            meeting.look()
        return traces.error(status)

    def began(pid: int, record: TaskRecord) -> None:
        def found(world: worlds.World) -> None:
            launcher = nested_launcher.find(world.launcher)
            record.found(OwnWorld(world.size, launcher.name if launcher else ""))

        worlds.watch(pid, environ, found)
        port = environ.get("MASTER_PORT", "")
        if env.rank == 0 and env.world_size > 1 and port.isdecimal():
            met.append(Meeting(pid, int(port), record.met))
        if attempt is not None:
            gpu_use.watch(Attempt(RunDir(run_dir), attempt).outcomes, env, environ)

    return supervise(
        run_dir,
        env,
        child,
        attempt=attempt,
        own_log=own_log,
        explain=explain,
        began=began,
        is_command=True,
    )


def become(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by argv, looked up on the PATH of `environ`.

    Raises CommandNotFound or CommandNotExecutable, which carry a shell's exit codes.
    """
    program = argv[0]
    if not program:
        raise CommandNotFound("the command to run is empty: expected a program after '--'.")
    try:
        with _usual_signals():
            os.execvpe(program, list(argv), dict(environ))
    except (FileNotFoundError, NotADirectoryError) as error:
        if "/" in program and Path(program).exists():
            raise CommandNotFound(
                f"{program!r} exists, but the interpreter in its first line does not; "
                "correct the #! line, or name the interpreter: python SCRIPT."
            ) from error
        missing = "was not found" if "/" in program else "is not on PATH"
        raise CommandNotFound(
            f"{program!r} {missing}; give the name of a program or its path, and "
            "arguments as separate words."
        ) from error
    except OSError as error:
        raise CommandNotExecutable(
            f"{program!r} cannot be run: {error.strerror}; expected a file with execute "
            "permission that starts with #! or is a binary. For a script: python SCRIPT."
        ) from error


@contextmanager
def _usual_signals() -> Iterator[None]:
    """Have the new program take the two that Python ignores: an ignored signal stays so in it.

    Where there is none after all, this process ignores them again: its message may meet a closed
    pipe.
    """
    ignored = {each: signal.signal(each, signal.SIG_DFL) for each in _IGNORED_BY_PYTHON}
    try:
        yield
    finally:
        for each, handler in ignored.items():
            signal.signal(each, handler)
