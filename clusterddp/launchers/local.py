"""The local launcher: rehearses a run on this workstation, with the very script of the cluster.

`submit` starts a controller, this module run as a program, which plays the part of Slurm's: it
gives the script the variables of a job, puts the stand-in of `srun.py` first on its PATH, and
signals the tasks as scancel does. The hosts are 127.0.0.1, 127.0.0.2, …
"""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from clusterddp import slurm
from clusterddp.errors import RequestError
from clusterddp.launchers import Submission, sbatch
from clusterddp.launchers.srun import (
    CANCELLED,
    KILL_WAIT_SECONDS,
    STEPS_VARIABLE,
    signal_session,
)
from clusterddp.run_dir import RunDir
from clusterddp.spec import JobSpec
from clusterddp.supervise import die_with_parent

MOST_HOSTS = 250
prepare = sbatch.prepare  # the very script that sbatch would get


def submit(spec: JobSpec, script: str, run: RunDir) -> Submission:  # noqa: ARG001 -- the run has it
    """Start the run's controller; the job's id is its process id."""
    if spec.resources.nodes > MOST_HOSTS:
        raise RequestError(
            f"--nodes {spec.resources.nodes}: a rehearsal has at most {MOST_HOSTS} hosts."
        )
    own = os.getpid()
    controller = subprocess.Popen(
        [sys.executable, "-m", "clusterddp.launchers.local", str(run.path)],
        env=slurm.submission_environment(os.environ),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # the terminal's Ctrl-C is ours: it becomes an orderly cancel
        preexec_fn=lambda: die_with_parent(own, signal.SIGTERM),  # noqa: PLW1509 -- no threads yet
    )
    job_id = str(controller.pid)
    run.add_event(
        "submitted", job_id=job_id, launcher="local", pid=controller.pid, host=socket.gethostname()
    )
    # Reaped as soon as it ends, so that nobody takes the dead process for a living one.
    reaper = threading.Thread(target=controller.wait, daemon=True)
    reaper.start()

    def stop() -> None:
        if reaper.is_alive():
            controller.send_signal(signal.SIGTERM)
        reaper.join()

    return Submission(job_id, stop)


def main() -> None:
    """Run the script of a run directory to its end; exits as the script does."""
    run = RunDir(Path(sys.argv[1]))
    job = _Job(run)
    with tempfile.TemporaryDirectory(prefix="clusterddp-local-") as folder:
        environ = {
            **os.environ,
            **job_environment(run.script.read_text(), os.getpid(), Path.cwd()),
            **_stand_in(Path(folder), os.environ),
        }
        sys.exit(job.run(["bash", str(run.script)], environ, Path(folder) / "steps"))


def job_environment(script: str, job_id: int, folder: Path) -> dict[str, str]:
    """The variables that a batch script finds, from the directives that size the job."""
    asked = _directives(script)
    nodes = int(asked.get("nodes", "1"))
    tasks_per_node = int(asked.get("ntasks-per-node", "1"))
    tasks = int(asked.get("ntasks", nodes * tasks_per_node))
    cpus = int(asked.get("cpus-per-task", "1"))
    hosts = "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]"
    each = f"(x{nodes})" if nodes > 1 else ""
    environ = {
        "SLURMD_NODENAME": "127.0.0.1",
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_CPUS_ON_NODE": str(cpus * tasks_per_node),
        "SLURM_GTIDS": "0",
        "SLURM_JOBID": str(job_id),
        "SLURM_JOB_CPUS_PER_NODE": f"{cpus * tasks_per_node}{each}",
        "SLURM_JOB_GID": str(os.getgid()),
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NAME": asked.get("job-name", ""),
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_PARTITION": asked.get("partition", "local"),
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_USER": os.environ.get("USER", str(os.getuid())),
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": str(nodes),
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": hosts,
        "SLURM_NPROCS": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        "SLURM_PROCID": "0",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_SUBMIT_HOST": socket.gethostname(),
        "SLURM_TASKS_PER_NODE": f"{tasks_per_node}{each}",
        "SLURM_TASK_PID": str(job_id),
    }
    if "cpus-per-task" in asked:
        environ["SLURM_CPUS_PER_TASK"] = str(cpus)
    per_task = int(asked.get("gpus-per-task", "0").rpartition(":")[2])
    gres = re.findall(r"(?:^|,)gpu(?::[^:,]*)?:(\d+)", asked.get("gres", ""))
    per_node = (
        per_task * tasks_per_node
        or int(asked.get("gpus-per-node", "0").rpartition(":")[2])
        or sum(map(int, gres))
    )
    if per_node:
        environ["SLURM_GPUS_ON_NODE"] = str(per_node)
        environ["SLURM_JOB_GPUS"] = ",".join(map(str, range(per_node)))
        environ["CUDA_VISIBLE_DEVICES"] = environ["SLURM_JOB_GPUS"]
    if per_task:
        environ["SLURM_GPUS_PER_TASK"] = str(per_task)
    elif "gpus-per-node" in asked:
        environ["SLURM_GPUS_PER_NODE"] = str(per_node)
    return environ


class _Job:
    """The batch script and the tasks of its steps; a TERM to this process cancels them all."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._cancelled = False

    def run(self, argv: list[str], environ: Mapping[str, str], steps: Path) -> int:
        signal.signal(signal.SIGTERM, self._cancel)
        signal.signal(signal.SIGINT, self._cancel)
        own = os.getpid()
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(own),  # noqa: PLW1509 -- no threads here
        )
        deadline = None
        while True:
            try:
                # A signal does not end the wait by itself, so look again every so often.
                code = process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                pass
            if self._cancelled and deadline is None:
                deadline = time.monotonic() + KILL_WAIT_SECONDS
                self._run.add_event("cancelled", job_id=str(os.getpid()))
                self._signal(process.pid, steps, signal.SIGCONT, signal.SIGTERM)
            elif deadline and time.monotonic() > deadline:
                self._signal(process.pid, steps, signal.SIGKILL)
        self._signal(process.pid, steps, signal.SIGKILL)  # what the script left behind
        return code if code >= 0 else 128 - code

    def _cancel(self, *_: object) -> None:
        self._cancelled = True

    def _signal(self, script: int, steps: Path, *numbers: int) -> None:
        """As scancel: the tasks, the batch shell and what it has started, but not srun."""
        (steps / CANCELLED).touch()
        tasks = [int(pid) for note in steps.glob("[0-9]*") for pid in _read(note).split()]
        for number in numbers:
            for pid in tasks:
                signal_session(pid, number)
            signal_session(script, number)


def _read(note: Path) -> str:
    try:
        return note.read_text()
    except FileNotFoundError:
        return ""  # the step has just ended


def _stand_in(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Put an `srun` first on the PATH; returns the variables that lead to it."""
    binaries, steps = folder / "bin", folder / "steps"
    binaries.mkdir()
    steps.mkdir()
    stand_in = binaries / "srun"
    stand_in.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m clusterddp.launchers.srun "$@"\n'
    )
    stand_in.chmod(0o700)
    path = environ.get("PATH", os.defpath)
    return {"PATH": f"{binaries}{os.pathsep}{path}", STEPS_VARIABLE: str(steps)}


def _directives(script: str) -> dict[str, str]:
    """The directives that have a value, unquoted as far as numbers need it."""
    found = re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE)
    return {name: value.strip('"') for name, value in found}


if __name__ == "__main__":
    main()
