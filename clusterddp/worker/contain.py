"""The small parent of a task in a container: on the host, so that it sees every end.

It makes sure of what the runtime will need, starts it, and holds the other end of the container's
lifeline: with this process the task ends, however this one does. The parent inside records how the
task ended; this one does where that one could not.
"""

import ctypes
import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from clusterddp import log
from clusterddp.errors import EXIT_FAILED, TrainingError
from clusterddp.processes import container
from clusterddp.processes.container import APPTAINER, AUTO, LABEL, PODMAN, Container
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import IMAGE_VARIABLE, OWN_PIDS_VARIABLE, is_rehearsal
from clusterddp.run.outcome import is_signalled
from clusterddp.run.records import TaskError
from clusterddp.worker.supervise import supervise

LEAST_PYTHON = (3, 10)
_PR_SET_CHILD_SUBREAPER = 36
_SMALL_SHARED_MEMORY = 256 << 20
_PROBE_SECONDS = 60.0
_REMOVAL_SECONDS = 10.0
_PROBE = "import sys; print(*sys.version_info[:2])"


def contain(
    run_dir: Path,
    env: DistEnv,
    start: "Start",
    task: Sequence[str],
    become: Callable[[Sequence[str], Mapping[str, str]], NoReturn],
    *,
    attempt: int | None = None,
    own_log: bool = False,
) -> int:
    """Run a task in a container, and record its outcome where the task itself could not.

    task: the command in the container.
    become: replaces the process by a command.

    Returns and raises what `supervise` does. Linux only.
    """
    if env.local_rank == 0:
        _tell(start)
    reader, writer = os.pipe()  # the lifeline
    code_reader, code_writer = os.pipe()
    os.set_blocking(code_reader, False)
    said = b""

    def child() -> int:
        start.check()
        command, variables = start.words(task)
        # The numbers that podman passes on. The later pipe's own cannot be the first of them.
        for number, descriptor in ((3, reader), (4, code_writer)):
            os.dup2(descriptor, number)
            os.set_inheritable(number, True)
        become(command, variables)

    def settle(status: int) -> int:
        nonlocal said
        with suppress(BlockingIOError):
            said = os.read(code_reader, 16).strip()
        if said.isdigit():
            return int(said) << 8
        return status or signal.SIGTERM  # it was told to end before there was a container

    _adopt()
    code = EXIT_FAILED
    try:
        code = supervise(
            run_dir,
            env,
            child,
            attempt=attempt,
            own_log=own_log,
            explain=start.explain,
            settle=settle,
        )
    finally:
        for descriptor in (writer, reader, code_reader, code_writer):
            os.close(descriptor)
        if start.runtime == PODMAN and start.program and not said:  # podman was ended itself
            _remove(start.program, start.name)
    return code


@dataclass(frozen=True)
class Start:
    """All that it takes to start a task's container on this node."""

    box: Container
    runtime: str
    program: str | None
    """The runtime's; None where this node has none."""
    name: str
    node: str
    python: str
    """Interpreter that the task needs in the container."""
    environ: Mapping[str, str]
    wanted: Collection[str]
    """Names of variables that are passed on whatever they are."""

    @classmethod
    def of(
        cls,
        run_dir: Path,
        rank: int,
        box: Container,
        runtime: str,
        *,
        python: str,
        wanted: Collection[str] = (),
        own_code: bool = False,
    ) -> "Start":
        """Add what a run needs: its directory, and its code.

        runtime: `auto` is what this node has, but for pyxis, which srun would have.
        own_code: this folder holds the user's code; the task starts in it.
        """
        environ = {**os.environ, IMAGE_VARIABLE: box.image}
        node = environ.get("SLURMD_NODENAME") or os.uname().nodename
        path = environ.get("PATH")
        if runtime == AUTO:
            with suppress(TrainingError):  # which `check` raises once it can be recorded
                runtime = container.choose(runtime, box.image, path, "", node)
        if runtime == PODMAN:
            environ[OWN_PIDS_VARIABLE] = "1"
        return cls(
            box.for_run(str(run_dir), str(Path.cwd()) if own_code else ""),
            runtime,
            None if runtime == AUTO else container.program(runtime, path),
            # Each start of a rank has the same, and so replaces what a killed one has left.
            f"{LABEL}-{hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]}-{rank}",
            node,
            python,
            environ,
            wanted,
        )

    def check(self) -> None:
        """Raise TrainingError for a runtime, an image or a mount that this node does not have."""
        if self.program is None:
            wanted = [APPTAINER, PODMAN] if self.runtime == AUTO else [self.runtime]
            raise container.none_there(wanted, self.box.image, self.node)
        if container.is_file(self.box.image) and not Path(self.box.image).exists():
            raise TrainingError(
                f"{self.node} has no image {self.box.image}. Put it there, or on a file system "
                "that all nodes share, or leave the node out with --exclude."
            )
        for mount in self.box.mounts:
            if not Path(mount.source).exists():
                raise TrainingError(
                    f"{self.node} has no {mount.source}, which is to be mounted in the container "
                    f"of {self.box.image}. Make it there, correct the mount, or leave the node "
                    "out with --exclude."
                )

    def explain(self, status: int) -> TaskError | None:
        """Return the error behind a wait status, where the container itself is to blame."""
        code = os.waitstatus_to_exitcode(status)
        sentence = ""
        if code > 0 and not is_signalled(code):
            with suppress(OSError, subprocess.TimeoutExpired, TrainingError):
                sentence = _reason(self)
        if sentence:
            log.info(sentence)
        return TaskError("", sentence) if sentence else None

    def words(
        self, task: Sequence[str], *, probe: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts the container, and its variables.

        probe: beside the rank's own container, and with no lifeline.
        """
        in_step = "SLURM_STEP_ID" in self.environ and not is_rehearsal(self.environ)
        return container.words(
            self.runtime,
            self.box,
            task,
            self.environ,
            program=self.program or self.runtime,
            name=f"{self.name}-probe" if probe else self.name,
            uid=os.getuid(),
            wanted=self.wanted,
            lifeline=not probe,
            pass_on=self.runtime == PODMAN and not in_step,
        )


def _adopt() -> None:
    """Let what podman leaves behind become a child of this process: Slurm finds it in the step."""
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


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


def _tell(start: Start) -> None:
    """Say what of the host is kept out, and where ranks have little memory to share."""
    if names := container.kept_out(start.environ, start.wanted):
        log.info(
            f"kept out of the container, as they are the host's: {', '.join(names)} "
            "(--env NAME=VALUE passes one on)"
        )
    with suppress(OSError):
        shared = os.statvfs("/dev/shm")
        if (size := shared.f_blocks * shared.f_frsize) < _SMALL_SHARED_MEMORY:
            log.info(
                f"/dev/shm on {start.node} has {size >> 20} MB; where a DataLoader's workers "
                "end with a bus error, it is too small for their batches"
            )


def _reason(start: Start) -> str:
    """Find out, by another container, why one ended without a record; empty where it works now.

    Raises OSError and subprocess.TimeoutExpired.
    """
    python = start.python
    command, variables = start.words([python, "-c", _PROBE], probe=True)
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
            f"{python} in the image {start.box.image} on {start.node} is Python "
            f"{'.'.join(version)}, and {'.'.join(map(str, LEAST_PYTHON))} or later is needed. Use "
            "another image, or name another interpreter in it with --python."
        )
    if done.returncode < 0:  # somebody ends the step
        return ""
    if done.returncode in (126, 127):
        return (
            f"the image {start.box.image} on {start.node} has no {python} that runs: {last}. Use "
            "an image with Python, or name its interpreter with --python."
        )
    return (
        f"{start.runtime} on {start.node} cannot start the image {start.box.image}: {last}. "
        "Correct the image or the mounts, or choose another --container-runtime."
    )
