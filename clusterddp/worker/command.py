"""Task that runs a COMMAND, by exec or under a small parent that records its outcome.

Modules that only the parent needs are imported late, so that a direct exec stays cheap.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from clusterddp.errors import ClusterDDPError
from clusterddp.ranks.dist_env import DistEnv

if TYPE_CHECKING:
    from clusterddp.run.attempt import Attempt
    from clusterddp.run.records import TaskError
    from clusterddp.worker.task_record import TaskRecord

_Ended = Callable[[], None]
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class CommandNotFound(ClusterDDPError):
    """Raised if COMMAND or the interpreter in its first line does not exist (a shell's 127)."""

    exit_code = 127
    code = "CD0316"


class CommandNotExecutable(ClusterDDPError):
    """Raised if COMMAND exists but cannot be run (a shell's 126)."""

    exit_code = 126
    code = "CD0316"


def run_command(
    run_dir: Path,
    env: DistEnv,
    argv: Sequence[str],
    environ: dict[str, str],
    attempt: int | None,
    *,
    own_log: bool,
    report_to: str = "",
) -> int:
    """Run COMMAND under a small parent that records its outcome; return as `supervise` does.

    environ: variables of COMMAND; those that identify its attempt are added.
    report_to: comma-separated trackers in which rank 0 continues one run.
    """
    from clusterddp.run import flight_recorder
    from clusterddp.run.attempt import Attempt, expose_loop
    from clusterddp.run.run_dir import RunDir
    from clusterddp.worker.supervise import ERROR_FILE_VARIABLE, supervise

    own = Attempt(RunDir(run_dir), attempt) if attempt is not None else None
    if own:  # an agent sets its own file, and reads it
        environ.setdefault(ERROR_FILE_VARIABLE, str(own.error_file(env.rank)))
        environ.update(flight_recorder.variables(own, environ))
        expose_loop(environ, own)
        if env.rank == 0 and report_to:
            from clusterddp.worker.tracking import expose_tracker

            expose_tracker(environ, own.run, report_to.split(","), argv)

    def child() -> int:
        try:
            become(argv, environ)
        except CommandNotFound:
            if "/" not in argv[0]:  # only in the rank's log: too long for the run's status
                print(f"clusterddp: PATH={environ.get('PATH', '')}", file=sys.stderr)
            raise

    explain, began = _callbacks(env, environ, own)
    return supervise(
        run_dir,
        env,
        child,
        attempt=attempt,
        own_log=own_log,
        explain=explain,
        began=began,
        is_command=True,
        environ=environ,
    )


def _callbacks(
    env: DistEnv, environ: MutableMapping[str, str], own: "Attempt | None"
) -> "tuple[Callable[[int], TaskError | None], Callable[[int, TaskRecord], _Ended]]":
    """Return two callbacks: one explains COMMAND's end; one starts to watch it."""
    from clusterddp.processes import table
    from clusterddp.processes.table import RendezvousWatch
    from clusterddp.request import nested_launcher
    from clusterddp.run.records import NestedWorld
    from clusterddp.worker import gpu_use
    from clusterddp.worker.nccl_log import NcclLog
    from clusterddp.worker.supervise import ERROR_FILE_VARIABLE, Traces

    error_file = environ.get(ERROR_FILE_VARIABLE)
    traces = Traces(Path(error_file) if error_file else None)
    watches: list[RendezvousWatch] = []
    nccl = NcclLog(environ, env, own)

    def explain(status: int) -> "TaskError | None":
        for watch in watches:
            watch.check()
        return traces.error(status)

    def began(pid: int, record: "TaskRecord") -> _Ended:
        def found(world: table.World) -> None:
            launcher = nested_launcher.find(world.launcher)
            record.record_nested_world(NestedWorld(world.size, launcher.name if launcher else ""))

        table.watch_for_world(pid, environ, found)
        port = environ.get("MASTER_PORT", "")
        if env.rank == 0 and env.world_size > 1 and port.isdecimal():
            watches.append(RendezvousWatch(pid, int(port), record.record_listening))
        end_nccl = nccl.began()
        end_samples = gpu_use.watch(own.outcomes, env, environ) if own else None

        def ended() -> None:
            end_nccl()
            if end_samples:
                end_samples()

        return ended

    return explain, began


def become(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by argv, looked up on the PATH of `environ`.

    Raises CommandNotFound or CommandNotExecutable, which have a shell's exit codes.
    """
    program = argv[0]
    if not program:
        raise CommandNotFound("the command is empty. Put a program after '--'.")
    try:
        with _default_signals():
            os.execvpe(program, list(argv), dict(environ))
    except (FileNotFoundError, NotADirectoryError) as error:
        if "/" in program and Path(program).exists():
            raise CommandNotFound(
                f"{program!r} exists, but the interpreter in its first line does not. "
                "Correct the #! line, or name the interpreter: python SCRIPT."
            ) from error
        missing = "was not found" if "/" in program else "is not on PATH"
        raise CommandNotFound(
            f"{program!r} {missing}. Give a program's name or path, with arguments as "
            "separate words."
        ) from error
    except OSError as error:
        raise CommandNotExecutable(
            f"{program!r} cannot be run: {error.strerror}. It must be a binary, or start with #!, "
            "and have execute permission. For a Python script: python SCRIPT."
        ) from error


@contextmanager
def _default_signals() -> Iterator[None]:
    """Restore the default actions of signals that Python ignores: an exec keeps ignored signals.

    If the exec fails, this process ignores them again: its error message may meet a closed pipe.
    """
    ignored = {each: signal.signal(each, signal.SIG_DFL) for each in _IGNORED_BY_PYTHON}
    try:
        yield
    finally:
        for each, handler in ignored.items():
            signal.signal(each, handler)
