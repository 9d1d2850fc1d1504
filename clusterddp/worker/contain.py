"""The small parent of a task in a container: on the host, so that it sees every end.

It makes sure of what the runtime will need, starts it, and holds the other end of the container's
lifeline: with this process the task ends, however this one does. The parent inside records how the
task ended; this one does where that one could not.
"""

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from clusterddp import log
from clusterddp.errors import EXIT_FAILED, TrainingError
from clusterddp.processes import container
from clusterddp.processes.container import LABEL, PODMAN, Container, Mount
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import IMAGE_VARIABLE, OWN_PIDS_VARIABLE, is_rehearsal
from clusterddp.run.outcome import is_signalled
from clusterddp.run.records import TaskError
from clusterddp.worker.supervise import supervise

LEAST_PYTHON = (3, 10)
_LIFELINE = 3
_PR_SET_CHILD_SUBREAPER = 36
_SMALL_SHARED_MEMORY = 256 << 20
_PROBE_SECONDS = 60.0
_REMOVAL_SECONDS = 10.0
_PROBE = "import sys; print(*sys.version_info[:2])"


def contain(
    run_dir: Path,
    env: DistEnv,
    box: Container,
    runtime: str,
    task: Sequence[str],
    become: Callable[[Sequence[str], dict[str, str]], int],
    *,
    attempt: int | None = None,
    own_log: bool = False,
    wanted: Collection[str] = (),
    own_code: bool = False,
) -> int:
    """Run a task in a container, and record its outcome where the task itself could not.

    task: the command in the container; its first word is the Python there.
    become: replaces the process by a command.
    wanted: names of variables that are passed on whatever they are.
    own_code: this folder holds the user's code; the task starts in it.

    Returns and raises what `supervise` does. Linux only.
    """
    environ = {**os.environ, IMAGE_VARIABLE: box.image}
    if runtime == PODMAN:
        environ[OWN_PIDS_VARIABLE] = "1"
    node = environ.get("SLURMD_NODENAME") or os.uname().nodename
    name = _name(run_dir, env.rank)
    folder = Path.cwd() if own_code else run_dir
    mounts = [Mount(str(folder), str(folder)), Mount(str(run_dir), str(run_dir))]
    if (snapshot := run_dir / "code").is_dir():
        mounts.append(Mount(str(snapshot), str(snapshot), read_only=True))
    box = replace(box, mounts=(*mounts, *box.mounts), workdir=box.workdir or str(folder))
    if env.local_rank == 0:
        _tell(environ, wanted, node)
    reader, writer = os.pipe()

    in_step = "SLURM_STEP_ID" in environ and not is_rehearsal(environ)
    program = container.program(runtime, environ.get("PATH"))

    def start(command: Sequence[str], *, lifeline: bool) -> tuple[list[str], dict[str, str]]:
        if program is None:
            raise container.none_there([runtime], box.image, node)
        return container.words(
            runtime,
            box,
            command,
            environ,
            program=program,
            name=name if lifeline else f"{name}-probe",
            uid=os.getuid(),
            wanted=wanted,
            lifeline=lifeline,
            pass_on=runtime == PODMAN and not in_step,
        )

    def child() -> int:
        _check(box, node)
        command, variables = start(task, lifeline=True)
        os.dup2(reader, _LIFELINE)  # the number that podman passes on
        os.set_inheritable(_LIFELINE, True)
        return become(command, variables)

    def explain(status: int) -> TaskError | None:
        sentence = ""
        code = os.waitstatus_to_exitcode(status)
        if code > 0 and not is_signalled(code):
            with suppress(OSError, subprocess.TimeoutExpired, TrainingError):
                sentence = _reason(box, runtime, task[0], node, partial(start, lifeline=False))
        if sentence:
            log.info(sentence)
        return TaskError("", sentence) if sentence else None

    # What podman leaves behind becomes a child of this process, so Slurm finds it in the step.
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    code = EXIT_FAILED
    try:
        code = supervise(
            run_dir, env, child, attempt=attempt, own_log=own_log, explain=explain, outside=True
        )
    finally:
        os.close(writer)
        os.close(reader)
        if code and runtime == PODMAN and program:  # which may have been killed itself
            _remove(program, name)
    return code


def _remove(program: str, name: str) -> None:
    """Remove what is left of podman's container, as where podman was killed itself."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            container.removal(program, name),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_REMOVAL_SECONDS,
            check=False,
        )


def _name(run_dir: Path, rank: int) -> str:
    """Name podman's container of a rank: each start has the same, and so replaces the last one."""
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    return f"{LABEL}-{digest}-{rank}"


def _tell(environ: dict[str, str], wanted: Collection[str], node: str) -> None:
    """Say what of the host is kept out, and where ranks have little memory to share."""
    if names := container.kept_out(environ, wanted):
        log.info(
            f"kept out of the container, as they are the host's: {', '.join(names)} "
            "(--env NAME=VALUE passes one on)"
        )
    with suppress(OSError):
        shared = os.statvfs("/dev/shm")
        if (size := shared.f_blocks * shared.f_frsize) < _SMALL_SHARED_MEMORY:
            log.info(
                f"/dev/shm on {node} has {size >> 20} MB; where a DataLoader's workers "
                "end with a bus error, it is too small for their batches"
            )


def _check(box: Container, node: str) -> None:
    """Raise TrainingError for an image or a mount that this node does not have."""
    if container.is_file(box.image) and not Path(box.image).exists():
        raise TrainingError(
            f"{node} has no image {box.image}. Put it there, or on a file system that all nodes "
            "share, or leave the node out with --exclude."
        )
    for mount in box.mounts:
        if not Path(mount.source).exists():
            raise TrainingError(
                f"{node} has no {mount.source}, which is to be mounted in the container of "
                f"{box.image}. Make it there, correct the mount, or leave the node out "
                "with --exclude."
            )


def _reason(
    box: Container,
    runtime: str,
    python: str,
    node: str,
    start: Callable[[Sequence[str]], tuple[list[str], dict[str, str]]],
) -> str:
    """Find out, by another container, why one ended without a record; empty where it works now.

    Raises OSError and subprocess.TimeoutExpired.
    """
    command, variables = start([python, "-c", _PROBE])
    done = subprocess.run(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_PROBE_SECONDS,
        check=False,
    )
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {done.returncode}"
    last = next((line for line in lines if line.startswith(("Error: ", "FATAL: "))), last)
    version = done.stdout.split()[-2:]  # a site's hook may print more
    if done.returncode == 0:
        if tuple(map(int, version)) >= LEAST_PYTHON:
            return ""
        return (
            f"{python} in the image {box.image} on {node} is Python {'.'.join(version)}, and "
            f"{'.'.join(map(str, LEAST_PYTHON))} or later is needed. Use another image, or name "
            "another interpreter in it with --python."
        )
    if done.returncode < 0:  # somebody ends the step
        return ""
    if done.returncode in (126, 127):
        return (
            f"the image {box.image} on {node} has no {python} that runs: {last}. Use an image "
            "with Python, or name its interpreter with --python."
        )
    return (
        f"{runtime} on {node} cannot start the image {box.image}: {last}. Correct the image or "
        "the mounts, or choose another --container-runtime."
    )
