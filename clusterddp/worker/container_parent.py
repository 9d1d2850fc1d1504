"""Small parent, on the host, of a task in a container.

It checks what the runtime needs, starts it, and holds the other end of the container's lifeline:
the task ends with this process, whatever ends it. The parent inside the container records how the
task ended; this process does so if the inner one could not.
"""

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from clusterddp import log
from clusterddp.errors import TrainingError, coded
from clusterddp.processes.container import (
    PODMAN,
    PROGRAMS,
    Container,
    ContainerStart,
    find_program,
    is_file,
    list_command,
    monitor_command,
    remove_command,
    runtimes,
    withheld,
)
from clusterddp.processes.signals import set_subreaper
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import IMAGE_VARIABLE, OWN_PIDS_VARIABLE, host_name, is_rehearsal
from clusterddp.run.outcome import is_signalled, read_outcomes_of
from clusterddp.run.records import TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.command import become
from clusterddp.worker.supervise import supervise
from clusterddp.worker.task_record import TaskRecord

MIN_PYTHON = (3, 10)
_SMALL_SHARED_MEMORY = 256 << 20
_PROBE_SECONDS = 60.0
_RECORDS_SECONDS = 10.0
_PROBE = """\
import shutil, sys
print(*sys.version_info[:2], *[name for name in sys.argv[1:] if not shutil.which(name)])"""


def run_contained(
    run_dir: Path,
    env: DistEnv,
    container: Container,
    task: Sequence[str],
    *,
    attempt: int | None = None,
    own_log: bool = False,
) -> int:
    """Run a task in a container, and record its outcome if the parent inside could not.

    task: the command in the container; an agent counts as the first of its ranks.

    Returns and raises as `supervise`. Linux only.
    """
    ranks = container.ranks
    env = replace(
        env,
        rank=env.rank * ranks,
        world_size=env.world_size * ranks,
        local_world_size=env.local_world_size * ranks,
    )
    start = _start(run_dir, env.rank, container)
    set_subreaper()  # keeps podman's orphans in the Slurm step
    if env.local_rank == 0:
        _log_limits(start)
        _remove_abandoned(start)
    reader, writer = os.pipe()  # the lifeline
    code_reader, code_writer = os.pipe()
    os.set_blocking(code_reader, False)

    def child() -> int:
        _check(start)
        command, variables = start.command(task)
        # The descriptors that podman passes on. The second pipe's cannot be descriptor 3.
        for number, descriptor in ((3, reader), (4, code_writer)):
            os.dup2(descriptor, number)
            os.set_inheritable(number, True)
        become(command, variables)

    record = _OutsideRecord(RunDir(run_dir), env, attempt, code_reader)
    try:
        return supervise(
            run_dir,
            env,
            child,
            attempt=attempt,
            own_log=own_log,
            explain=lambda status: _explain(start, task, status),
            record=record,
        )
    finally:
        for descriptor in (writer, reader, code_reader, code_writer):
            os.close(descriptor)
        if start.runtime == PODMAN and start.program and not record.is_good:
            _lines(remove_command(start.program, start.name))


class _OutsideRecord(TaskRecord):
    """Outcome of a task in a container, recorded only if the parent inside has not."""

    def __init__(self, run: RunDir, env: DistEnv, attempt: int | None, code_reader: int) -> None:
        """Take the pipe with the exit code from the first program in the container."""
        super().__init__(run, env, attempt)
        self._node = None  # the parents inside share the node's record
        self._code_reader = code_reader
        self.is_good = False
        """True if both task and runtime exited with 0, so that no container remains.

        podman leaves a container in its records if a signal ends podman during the removal.
        """

    def record_end(self, status: int, error: Callable[[int], TaskError | None]) -> int:
        code = b""
        with suppress(BlockingIOError):
            code = os.read(self._code_reader, 16).strip()
        has_code = code.isdigit()
        self.is_good = has_code and status == int(code) == 0
        if has_code:
            status = int(code) << 8
        elif status == 0:  # podman was terminated before the container started
            status = signal.SIGTERM
        if is_signalled(os.waitstatus_to_exitcode(status)):  # a shell's 128 + N
            status = (status >> 8) - 128
        of_host = read_outcomes_of(self._folder, str(self._fields["host"]))
        inside = next((each for each in of_host if each.rank == self._fields["rank"]), None)
        began = float(str(self._fields["started"]))
        if inside is None or inside.ended is None or inside.ended < began:
            super().record_end(status, error)
        return status

    def _write(self) -> None:
        if "ended" in self._fields:  # until then, the parent inside writes the record
            super()._write()


def _start(run_dir: Path, rank: int, container: Container) -> ContainerStart:
    """Collect the parameters to start a task's container on this node."""
    environ = {**os.environ, IMAGE_VARIABLE: container.image}
    names = runtimes(container.runtime, container.image)
    runtime, program = find_program(names, environ.get("PATH"))
    if runtime == PODMAN:
        environ[OWN_PIDS_VARIABLE] = "1"
    # The same name for each start of a rank, so that it replaces a leftover of a killed start.
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    node = host_name(environ)
    return ContainerStart(
        container.for_run(str(run_dir), str(Path.cwd())),
        runtime,
        program,
        name=f"clusterddp-{digest}-{rank}",
        # Nodes can share podman's records, and jobs can have their own PID namespaces.
        label=f"clusterddp={node} {Path('/proc/self/ns/pid').readlink()}",
        node=node,
        environ=environ,
        signals_podman=runtime == PODMAN and is_rehearsal(environ),
        as_root=os.getuid() == 0,
    )


def _log_limits(start: ContainerStart) -> None:
    """Log which host variables are withheld, and whether shared memory is small."""
    if names := withheld(start.environ, start.container.variables):
        log.info(
            f"host variables not passed to the container: {', '.join(names)} "
            "(to pass one: --env NAME=VALUE)"
        )
    with suppress(OSError):
        shared = os.statvfs("/dev/shm")
        if (size := shared.f_blocks * shared.f_frsize) < _SMALL_SHARED_MEMORY:
            log.info(
                f"/dev/shm on {start.node} has {size >> 20} MB. If DataLoader workers end with a "
                "bus error, it is too small for their batches: use --num-workers 0, or ask the "
                "administrators for a larger one."
            )


def _check(start: ContainerStart) -> None:
    """Raise TrainingError for a runtime, an image or a mount that this node does not have."""
    image = start.container.image
    if start.program is None:
        names = runtimes(start.container.runtime, image)
        programs = [program for name in names for program in PROGRAMS[name]]
        raise TrainingError(
            f"{start.node} has no {' or '.join(programs)} on PATH to run the image {image}. Load "
            "its module with --module, request other nodes, or choose another "
            "--container-runtime with a suitable image. [CD1001]"
        )
    if is_file(image) and not Path(image).exists():
        raise TrainingError(
            f"{start.node} has no image {image}. Put it there or on a shared file system, or "
            "avoid the node with --exclude. [CD1002]"
        )
    for mount in start.container.mounts:
        if not Path(mount.source).exists():
            raise TrainingError(
                f"{start.node} has no {mount.source} to mount in the container of {image}. "
                "Create it there, correct the mount, or avoid the node with --exclude. [CD1003]"
            )


def _explain(start: ContainerStart, task: Sequence[str], status: int) -> TaskError | None:
    """Return the error that caused a wait status if the container is at fault, else None."""
    code = os.waitstatus_to_exitcode(status)
    if code <= 0:
        return None
    error = None
    with suppress(TrainingError):  # already reported by the task's process
        _check(start)
        error = _reason(start, task)
    if error is None:
        return None
    log.info(coded(error))
    return TaskError("", str(error), code=error.code)


def _reason(start: ContainerStart, task: Sequence[str]) -> TrainingError | None:
    """Find why a container ended without a record, with a second one; None if that one works."""
    python, image = start.container.python, f"the image {start.container.image} on {start.node}"
    command, variables = start.probe([python, "-c", _PROBE, task[0]])
    done = _run(command, env=variables, timeout=_PROBE_SECONDS)
    if start.runtime == PODMAN and start.program:  # --rm keeps one that never started
        _lines(remove_command(start.program, f"{start.name}-probe"))
    if done is None or done.returncode < 0:  # the step is ending
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    of_runtime = [line for line in lines if line.startswith(("Error: ", "FATAL: "))]
    if done.returncode == 0 and not done.stdout.strip():  # it was terminated
        return None
    if done.returncode == 0:
        major, minor, *missing = done.stdout.splitlines()[-1].split()  # a site's hook may print
        if (int(major), int(minor)) < MIN_PYTHON:
            return TrainingError(
                f"{python} in {image} is Python {major}.{minor}, but "
                f"{'.'.join(map(str, MIN_PYTHON))} or later is needed. Use another image, or "
                "name another interpreter in it with --python. [CD1006]"
            )
        if missing:
            return TrainingError(
                f"{image} has no {missing[0]}, which starts the task. Use an image that has it. "
                "[CD1006]"
            )
        return None
    if done.returncode in (126, 127) and not of_runtime:
        return TrainingError(
            f"{image} has no working {python}: {last}. Use an image with Python, or name its "
            "interpreter with --python. [CD1006]"
        )
    return TrainingError(
        f"{start.runtime} cannot start {image}: {[*of_runtime, last][0]}. Correct the image or the "
        "mounts, or choose another --container-runtime. [CD1007]"
    )


def _remove_abandoned(start: ContainerStart) -> None:
    """Remove containers from podman's records that were killed together with their podman.

    A container that is being created has no monitor process yet and is kept.
    """
    if start.runtime != PODMAN or start.program is None:
        return
    ids = _lines(list_command(start.program, start.label))
    lines = _lines(monitor_command(start.program, ids)) if ids else []
    gone = [
        identity
        for identity, pid in map(str.split, lines)
        if int(pid) and not Path(f"/proc/{pid}").exists()
    ]
    if gone:
        _lines(remove_command(start.program, *gone))


def _lines(command: Sequence[str]) -> list[str]:
    """Run a podman command on its records; return its output lines, none on failure."""
    done = _run(command, timeout=_RECORDS_SECONDS)
    return done.stdout.splitlines() if done else []


def _run(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str] | None":
    """Run a runtime's command to its end; None if it does not start, or takes too long."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    return None
