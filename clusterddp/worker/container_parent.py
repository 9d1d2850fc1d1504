"""The small parent of a task in a container: on the host, so that it sees every end.

It makes sure of what the runtime will need, starts it, and holds the other end of the container's
lifeline: with this process the task ends, however this one does. The parent inside records how the
task ended; this one does where that one could not.
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
from clusterddp.run.outcome import TaskRecord, is_signalled, read_outcome
from clusterddp.run.records import TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.command import become
from clusterddp.worker.supervise import supervise

LEAST_PYTHON = (3, 10)
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
    """Run a task in a container, and record its outcome where the task itself could not.

    task: the command in the container; an agent there stands for the first of its ranks.

    Returns and raises what `supervise` does. Linux only.
    """
    ranks = container.ranks
    env = replace(
        env,
        rank=env.rank * ranks,
        world_size=env.world_size * ranks,
        local_world_size=env.local_world_size * ranks,
    )
    start = _start(run_dir, env.rank, container)
    set_subreaper()  # what podman leaves behind: Slurm finds it in the step
    if env.local_rank == 0:
        _log_limits(start)
        _remove_abandoned(start)
    reader, writer = os.pipe()  # the lifeline
    code_reader, code_writer = os.pipe()
    os.set_blocking(code_reader, False)

    def child() -> int:
        _check(start)
        command, variables = start.command(task)
        # The numbers that podman passes on. The later pipe's own cannot be the first of them.
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
    """Record of a task in a container, whose own parent there records the same where it can."""

    def __init__(self, run: RunDir, env: DistEnv, attempt: int | None, code_reader: int) -> None:
        """code_reader: gives the exit code that the first program in the container has seen."""
        super().__init__(run, env, attempt)
        self._code_reader = code_reader
        self.is_good = False
        """True where task and runtime have both ended with 0, so that nothing of it is left.

        podman that is told to end while it removes a container leaves it in its records, with
        whatever exit code.
        """

    def ended(self, status: int, error: Callable[[int], TaskError | None]) -> int:
        code = b""
        with suppress(BlockingIOError):
            code = os.read(self._code_reader, 16).strip()
        has_code = code.isdigit()
        self.is_good = has_code and status == int(code) == 0
        if has_code:
            status = int(code) << 8
        elif status == 0:  # podman was told to end before there was a container
            status = signal.SIGTERM
        if is_signalled(os.waitstatus_to_exitcode(status)):  # a shell's, for a task's signal
            status = (status >> 8) - 128
        inside = read_outcome(self._folder, int(str(self._fields["rank"])))
        began = float(str(self._fields["started"]))
        if inside is None or inside.ended is None or inside.ended < began:
            super().ended(status, error)
        return status

    def _write(self) -> None:
        if "ended" in self._fields:  # before, the parent in the container has the word
            super()._write()


def _start(run_dir: Path, rank: int, container: Container) -> ContainerStart:
    """Return all that it takes to start a task's container here."""
    environ = {**os.environ, IMAGE_VARIABLE: container.image}
    names = runtimes(container.runtime, container.image)
    runtime, program = find_program(names, environ.get("PATH"))
    if runtime == PODMAN:
        environ[OWN_PIDS_VARIABLE] = "1"
    # Each start of a rank has the same name, and so replaces what a killed one has left.
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    node = host_name(environ)
    return ContainerStart(
        container.for_run(str(run_dir), str(Path.cwd())),
        runtime,
        program,
        name=f"clusterddp-{digest}-{rank}",
        # Nodes can share podman's records, and jobs can have numbers of their own for processes.
        label=f"clusterddp={node} {Path('/proc/self/ns/pid').readlink()}",
        node=node,
        environ=environ,
        signals_podman=runtime == PODMAN and is_rehearsal(environ),
        as_root=os.getuid() == 0,
    )


def _log_limits(start: ContainerStart) -> None:
    """Log what of the host is kept out, and where ranks have little memory to share."""
    if names := withheld(start.environ, start.container.variables):
        log.info(
            f"kept out of the container, as they are the host's: {', '.join(names)} "
            "(--env NAME=VALUE passes one on)"
        )
    with suppress(OSError):
        shared = os.statvfs("/dev/shm")
        if (size := shared.f_blocks * shared.f_frsize) < _SMALL_SHARED_MEMORY:
            log.info(
                f"/dev/shm on {start.node} has {size >> 20} MB; where a DataLoader's workers "
                "end with a bus error, it is too small for their batches. Use --workers 0, or ask "
                "the site for a larger one."
            )


def _check(start: ContainerStart) -> None:
    """Raise TrainingError for a runtime, an image or a mount that this node does not have."""
    image = start.container.image
    if start.program is None:
        names = runtimes(start.container.runtime, image)
        programs = [program for name in names for program in PROGRAMS[name]]
        raise TrainingError(
            f"{start.node} has no {' or '.join(programs)} on PATH to run the image {image}. Load "
            "its module with --module, ask for other nodes, or choose another "
            "--container-runtime, and an image that it reads. [CD1001]"
        )
    if is_file(image) and not Path(image).exists():
        raise TrainingError(
            f"{start.node} has no image {image}. Put it there, or on a file system that all nodes "
            "share, or leave the node out with --exclude. [CD1002]"
        )
    for mount in start.container.mounts:
        if not Path(mount.source).exists():
            raise TrainingError(
                f"{start.node} has no {mount.source}, which is to be mounted in the container of "
                f"{image}. Make it there, correct the mount, or leave the node out with "
                "--exclude. [CD1003]"
            )


def _explain(start: ContainerStart, task: Sequence[str], status: int) -> TaskError | None:
    """Return the error behind a wait status, where the container itself is to blame."""
    code = os.waitstatus_to_exitcode(status)
    if code <= 0:
        return None
    error = None
    with suppress(TrainingError):  # which the task's own process has reported
        _check(start)
        error = _reason(start, task)
    if error is None:
        return None
    log.info(coded(error))
    return TaskError("", str(error), code=error.code)


def _reason(start: ContainerStart, task: Sequence[str]) -> TrainingError | None:
    """Find out, by another container, why one ended without a record; None where it works now."""
    python, image = start.container.python, f"the image {start.container.image} on {start.node}"
    command, variables = start.probe([python, "-c", _PROBE, task[0]])
    done = _run(command, env=variables, timeout=_PROBE_SECONDS)
    if start.runtime == PODMAN and start.program:  # --rm leaves one that never began
        _lines(remove_command(start.program, f"{start.name}-probe"))
    if done is None or done.returncode < 0:  # somebody ends the step
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    of_runtime = [line for line in lines if line.startswith(("Error: ", "FATAL: "))]
    if done.returncode == 0 and not done.stdout.strip():  # it was ended meanwhile
        return None
    if done.returncode == 0:
        major, minor, *missing = done.stdout.splitlines()[-1].split()  # a site's hook may print
        if (int(major), int(minor)) < LEAST_PYTHON:
            return TrainingError(
                f"{python} in {image} is Python {major}.{minor}, and "
                f"{'.'.join(map(str, LEAST_PYTHON))} or later is needed. Use another image, or "
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
            f"{image} has no {python} that runs: {last}. Use an image with Python, or name its "
            "interpreter with --python. [CD1006]"
        )
    return TrainingError(
        f"{start.runtime} cannot start {image}: {[*of_runtime, last][0]}. Correct the image or the "
        "mounts, or choose another --container-runtime. [CD1007]"
    )


def _remove_abandoned(start: ContainerStart) -> None:
    """Remove from podman's records the containers that were killed together with their podman.

    One whose podman still makes it has no process above it yet.
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
    """Return the lines that podman prints on what it keeps; none where it fails."""
    done = _run(command, timeout=_RECORDS_SECONDS)
    return done.stdout.splitlines() if done else []


def _run(
    command: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str] | None":
    """Run a runtime's command to its end; None where it does not start, or takes too long."""
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
