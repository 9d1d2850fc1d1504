"""Launch locally: rehearse a run on this workstation with the script of the cluster.

`submit` starts a stand-in for slurmctld, which is this module run as a program. It sets the
variables of a job, puts the stand-in of `srun.py` first on the script's PATH, enforces the time
limit and the signal before it, and signals the tasks as scancel does. It has no queue, so it cannot
requeue a job. The hosts are 127.0.0.1, 127.0.0.2, …
"""

import fcntl
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.launchers import SentJob
from clusterddp.launchers.srun import CANCELLED, KILL_WAIT_SECONDS, signal_session, variables
from clusterddp.processes.signals import die_with_parent
from clusterddp.ranks.variables import REHEARSAL_VARIABLE, VISIBLE_GPUS, named_gpus
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import is_array
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import forms
from clusterddp.slurm.client import submission_environment

MAX_HOSTS = 250
# sbatch(1), --signal=[{R|B}:]<sig_num>[@sig_time]
_SIGNAL = re.compile(
    r"(?:(?P<flags>[RB]+):)?(?:SIG)?(?:(?P<name>[A-Z]+[0-9]?)|(?P<number>\d+))(?:@(?P<lead>\d+))?"
)
_SLURMS_LEAD_SECONDS = 60
# Named by host, because not all shared file systems share locks between hosts.
_FOLDER = f"clusterddp-local-{socket.gethostname()}@"
_ALIVE = "alive"


def prepare(spec: JobSpec, template_folder: Path | None) -> str:
    """Render the same script that sbatch would get."""
    from clusterddp.launchers import sbatch  # imports jinja2, which a run's bundle lacks

    return sbatch.prepare(spec, template_folder)


def submit(spec: JobSpec, script: str, run: RunDir) -> SentJob:  # noqa: ARG001 -- the run has it
    """Start the stand-in; the job's id is its process id."""
    spec.refuse_pyxis()
    if spec.after:
        from clusterddp.status import chain  # few runs wait

        chain.check(chain.check_awaited(spec), has_queue=False)
    if spec.resources.nodes > MAX_HOSTS:
        raise RequestError(
            f"--nodes {spec.resources.nodes}: a rehearsal has at most {MAX_HOSTS} hosts. [CD1305]"
        )
    environ = submission_environment(os.environ)
    wants_gpus = spec.resources.gpus_per_node > 0
    if wants_gpus and (gpus := own_gpus(os.environ)) is not None:
        _check_gpus(spec, gpus)
        environ[VISIBLE_GPUS] = ",".join(gpus)
    if spec.retries:
        log.warning(
            f"--retries {spec.retries} has no effect here: a rehearsal is not requeued. [CD0103]"
        )
    in_image = spec.wrapper or spec.container_image
    if not in_image and not shutil.which(spec.python):
        log.warning(
            f"--python {spec.python}: there is no such interpreter on this workstation; unless the "
            "setup provides it, no task can start. [CD0310]"
        )
    parent = os.getpid()
    stand_in = subprocess.Popen(
        [sys.executable, "-m", "clusterddp.launchers.local", str(run.path)],
        env=environ,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal goes to us, and becomes an orderly cancel
        preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509 -- no threads yet
    )
    job_id = str(stand_in.pid)
    events.add(
        run.events,
        events.Submitted(
            job_id=job_id,
            launcher="local",
            pid=stand_in.pid,
            host=socket.gethostname(),
            folder=str(Path.cwd()),
        ),
    )
    # Reaped as soon as it ends, so that its process id does not seem to be alive.
    reaper = threading.Thread(target=stand_in.wait, daemon=True)
    reaper.start()

    def stop() -> None:
        if reaper.is_alive():
            stand_in.send_signal(signal.SIGTERM)
        reaper.join()

    return SentJob(job_id, stop)


def own_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> list[str] | None:
    """Return the GPUs that a rehearsal may use: those that its shell was given, or all there are.

    None if neither is known, e.g. on a workstation without GPUs: tasks then see only numbers.
    Raises RequestError for a value that names GPUs but with which CUDA shows none.
    """
    shown = environ.get(VISIBLE_GPUS)
    if shown is None:
        files = (file.name.removeprefix("nvidia") for file in devices.glob("nvidia*"))
        return [str(index) for index, _ in enumerate(filter(str.isdigit, files))] or None
    gpus = named_gpus(shown)
    if len(set(gpus)) < len(gpus):
        raise RequestError(
            f"{VISIBLE_GPUS}={shown} names a GPU twice, so CUDA shows none. Name each once, or "
            "unset it. [CD0804]"
        )
    return gpus


def _check_gpus(spec: JobSpec, gpus: list[str]) -> None:
    """Reject more GPUs than this workstation has, unless ranks may share them.

    If all GPUs are hidden or not wanted, the ranks compute on CPUs.
    """
    nodes, each = spec.resources.nodes, spec.resources.gpus_per_node
    options = spec.program.options
    instead = ", train with --device cpu" if "device" in options else ""
    if options.get("device") == "cpu":
        return
    if not gpus:
        log.warning(
            f"{VISIBLE_GPUS}={os.environ.get(VISIBLE_GPUS, '')} hides all GPUs: the ranks compute "
            "on CPUs. [CD0804]"
        )
    if not gpus or nodes * each <= len(gpus):
        return
    counts = f"the rehearsal needs {nodes * each} GPUs, this machine has {len(gpus)}"
    if VISIBLE_GPUS in os.environ:
        counts += f" ({VISIBLE_GPUS}={os.environ[VISIBLE_GPUS]})"
    if not spec.shares_gpus:
        raise RequestError(
            f"--nodes {nodes} and --gpus-per-node {each}: {counts}. Request fewer{instead}, or "
            f"let ranks share a GPU: {spec.sharing_options}. [CD1305]"
        )
    log.warning(f"{counts}: the hosts share them. [CD1305]")


def main() -> None:
    """Run the script of a run directory to its end, and exit with its code."""
    run = RunDir(Path(sys.argv[1]))
    script = run.script.read_text("utf-8")
    limit = Limit.of(script)
    job = KeptJob(
        run, limit, str(os.getpid())
    )  # before the directory, which would remain after a signal
    _remove_abandoned_folders()
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder, _kept(Path(folder)):
        environ = {
            **os.environ,
            **job_environment(script, os.getpid(), Path.cwd(), os.environ.get(VISIBLE_GPUS)),
            **limit.environment(time.time()),
            **_element(run, script),
            **_stand_in(Path(folder), os.environ),
        }
        sys.exit(job.run(["bash", str(run.script)], environ, Path(folder) / "steps"))


def _element(run: RunDir, script: str) -> dict[str, str]:
    """Return the array index of a trial that has its sweep's script; empty otherwise."""
    is_of_all = run.sweep and is_array(script)
    return {"SLURM_ARRAY_TASK_ID": run.name.rpartition("-")[2]} if is_of_all else {}


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Lock a mark in the directory, which shows that its process is alive, even in a container.

    The mark gets its name once it is locked, so the directory never looks abandoned.
    """
    with (folder / "locking").open("w") as mark:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(mark, fcntl.LOCK_EX)
            Path(mark.name).rename(folder / _ALIVE)
        yield


def _remove_abandoned_folders() -> None:
    """Remove the directories of this user's rehearsals whose process was killed."""
    for mark in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*/{_ALIVE}"):
        # An OSError: its process lives and holds the lock, or another rehearsal removes it.
        with suppress(OSError):
            if mark.parent.lstat().st_uid != os.getuid():
                continue  # before it is opened, because it can be a pipe
            with mark.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(mark.parent)


@dataclass(frozen=True)
class Limit:
    """Time limit of a job, and the signal that it requests before it."""

    seconds: int | None = None
    signal: int | None = None
    lead_seconds: int = 0
    to_script: bool = False
    """True if the signal goes to the batch shell, False if it goes to the tasks."""

    @classmethod
    def of(cls, script: str, most: float | None = None) -> "Limit":
        """Read the limit from the script's directives; without one there is no signal.

        most: seconds until the end of the allocation, if there is one.
        """
        directives = _directives(script)
        limits = [forms.limit_seconds(directives.get("time", "")), most]
        seconds = min((int(each) for each in limits if each is not None), default=None)
        parts = _SIGNAL.fullmatch(directives.get("signal", ""))
        if seconds is None or not parts:
            return cls(seconds)
        number = getattr(signal, f"SIG{parts['name']}", None) or int(parts["number"] or 0)
        lead = int(parts["lead"] or _SLURMS_LEAD_SECONDS)
        return cls(seconds, number or None, lead, "B" in (parts["flags"] or ""))

    def environment(self, now: float) -> dict[str, str]:
        """Return the variables in which newer versions of Slurm pass a job its limit."""
        if self.seconds is None:
            return {}
        end = int(now + self.seconds)
        return variables({"SLURM_JOB_START_TIME": int(now), "SLURM_JOB_END_TIME": end})


def job_environment(
    script: str, job_id: int, folder: Path, gpus: str | None = None
) -> dict[str, str]:
    """Return the variables of a batch script, from the directives that size the job.

    gpus: names of the GPUs that its hosts share; None for numbers from 0.
    """
    directives = _directives(script)
    nodes = int(directives.get("nodes", "1"))
    tasks_per_node = int(directives.get("ntasks-per-node", "1"))
    tasks = int(directives.get("ntasks", nodes * tasks_per_node))
    cpus = int(directives.get("cpus-per-task", "1"))
    hosts = "127.0.0.1" if nodes == 1 else f"127.0.0.[1-{nodes}]"
    each = f"(x{nodes})" if nodes > 1 else ""
    environ = variables(
        {
            "SLURMD_NODENAME": "127.0.0.1",
            "SLURM_CLUSTER_NAME": "local",
            "SLURM_CPUS_ON_NODE": cpus * tasks_per_node,
            "SLURM_GTIDS SLURM_LOCALID SLURM_NODEID SLURM_PROCID": 0,
            "SLURM_JOBID SLURM_JOB_ID SLURM_TASK_PID": job_id,
            "SLURM_JOB_CPUS_PER_NODE": f"{cpus * tasks_per_node}{each}",
            "SLURM_JOB_GID": os.getgid(),
            "SLURM_JOB_NAME": directives.get("job-name", ""),
            "SLURM_JOB_NODELIST SLURM_NODELIST": hosts,
            "SLURM_JOB_NUM_NODES SLURM_NNODES": nodes,
            "SLURM_JOB_PARTITION": directives.get("partition", "local"),
            "SLURM_JOB_UID": os.getuid(),
            "SLURM_JOB_USER": os.environ.get("USER", os.getuid()),
            "SLURM_NPROCS SLURM_NTASKS": tasks,
            "SLURM_NTASKS_PER_NODE": tasks_per_node,
            "SLURM_SUBMIT_DIR": folder,
            "SLURM_SUBMIT_HOST": socket.gethostname(),
            "SLURM_TASKS_PER_NODE": f"{tasks_per_node}{each}",
        }
    )
    if "cpus-per-task" in directives:
        environ["SLURM_CPUS_PER_TASK"] = str(cpus)
    per_task, per_node = (
        forms.gpu_count(name, directives.get(name, "0"))[1]
        for name in ("gpus-per-task", "gpus-per-node")
    )
    per_node = (
        per_task * tasks_per_node
        or per_node
        or forms.gpus_of(directives.get("gres", "")).get("", 0)
    )
    if per_node:
        environ["SLURM_GPUS_ON_NODE"] = str(per_node)
        environ["SLURM_JOB_GPUS"] = ",".join(map(str, range(per_node)))
        numbers = ",".join(map(str, range(nodes * per_node)))
        environ[VISIBLE_GPUS] = numbers if gpus is None else gpus
    if per_task:
        environ["SLURM_GPUS_PER_TASK"] = str(per_task)
    elif "gpus-per-node" in directives:
        environ["SLURM_GPUS_PER_NODE"] = str(per_node)
    return environ


class KeptJob:
    """Local stand-in for a Slurm job: a batch script and its steps' tasks.

    SIGTERM and SIGINT to this process cancel it.
    """

    def __init__(self, run: RunDir, limit: Limit, job_id: str) -> None:
        self._run, self._limit, self._job_id = run, limit, job_id
        self._steps = Path()
        self._cancelled = False
        self._is_recorded = False
        """True if the cause is known already: the run's events, or Slurm, have it."""
        self._warned = False
        self._kill_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._cancel)

    def run(self, argv: list[str], environ: Mapping[str, str], steps: Path) -> int:
        """Run the script to its exit code. Each step records its tasks in the directory `steps`."""
        self._steps = steps
        parent = os.getpid()
        with _script_output() as output:
            process = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 -- no threads here
            )
        began = time.monotonic()
        while True:
            try:
                # A signal does not interrupt the wait, so poll.
                code = process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                self.keep_time(process.pid, time.monotonic() - began)
        self.end_rest(process.pid)
        return code if code >= 0 else 128 - code

    def _cancel(self, *_: object) -> None:
        self._cancelled = True

    def keep_time(self, script: int, elapsed: float) -> None:
        """Send what is due after `elapsed` seconds: before the limit, at it, after KillWait."""
        limit = self._limit
        left = limit.seconds - elapsed if limit.seconds is not None else math.inf
        if self._kill_at is not None:
            if time.monotonic() > self._kill_at:
                self.signal_all(script, signal.SIGKILL)
        elif self._cancelled or left <= 0:
            self._kill_at = time.monotonic() + KILL_WAIT_SECONDS
            event = events.CancelRequested if self._cancelled else events.TimeLimitReached
            with suppress(OSError):  # a full disk costs only the record
                if not (self._has_ended() or self._is_recorded):
                    events.add(self._run.events, event(job_id=self._job_id))
            self.signal_all(script, signal.SIGCONT, signal.SIGTERM)
        elif limit.signal and left <= limit.lead_seconds and not self._warned:
            self._warned = True
            if limit.to_script:
                os.kill(script, signal.SIGCONT)
                os.kill(script, limit.signal)
            else:
                self.signal_tasks(limit.signal, signal.SIGCONT)

    def end_rest(self, script: int) -> None:
        """Kill the processes that the script left."""
        self.signal_all(script, signal.SIGKILL)

    def _has_ended(self) -> bool:
        """Return whether the result is recorded, after which Ctrl-C must not cancel anything."""
        starts_and_ends = (
            isinstance(event, events.Ended)
            for event in reversed(events.read(self._run.events))
            if isinstance(event, events.Started | events.Ended)
        )
        return next(starts_and_ends, False)

    def signal_all(self, script: int, *numbers: int) -> None:
        """Signal, as scancel does, the tasks, the batch shell and its children, but not srun."""
        (self._steps / CANCELLED).touch()
        for number in numbers:
            self.signal_tasks(number)
            signal_session(script, number)

    def signal_tasks(self, *numbers: int) -> None:
        """Signal the tasks of all steps."""
        tasks: list[int] = []
        for note in self._steps.glob("[0-9]*"):
            with suppress(FileNotFoundError):  # the step has just ended
                tasks += map(int, note.read_text().split())
        for number in numbers:
            for pid in tasks:
                signal_session(pid, number)


def _script_output() -> IO[bytes]:
    """Open the script's output file, like Slurm's default --output."""
    try:
        return Path(f"slurm-{os.getpid()}.out").open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _stand_in(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Put an `srun` first on the PATH. Return the variables for it."""
    binaries, steps = folder / "bin", folder / "steps"
    binaries.mkdir()
    steps.mkdir()
    stand_in = binaries / "srun"
    stand_in.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m clusterddp.launchers.srun "$@"\n'
    )
    stand_in.chmod(0o700)
    path = environ.get("PATH", os.defpath)
    return {"PATH": f"{binaries}{os.pathsep}{path}", REHEARSAL_VARIABLE: str(steps)}


def _directives(script: str) -> dict[str, str]:
    """Read the directives with a value, unquoted enough for numbers."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE)
    return {name: value.strip('"') for name, value in lines}


if __name__ == "__main__":
    main()
