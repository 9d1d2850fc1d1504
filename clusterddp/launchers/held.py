"""Launch inside an allocation that the user holds: one of salloc, or a hold of `clusterddp hold`.

The script runs at once. Its #SBATCH lines are comments there, so its srun lines name their nodes,
CPUs, GPUs and memory. A keeper (`keep` in a separate process) takes the place of slurmctld: it
enforces the time limit and sends the signal before it, and it reads from the run's events that the
user stops or cancels the run. The allocation remains.
"""

import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from clusterddp import log, polling
from clusterddp.errors import RequestError, SlurmError
from clusterddp.launchers import SentJob, local
from clusterddp.launchers.local import KeptJob, Limit
from clusterddp.launchers.srun import KILL_WAIT_SECONDS, signal_session, variables
from clusterddp.processes.signals import die_with_parent
from clusterddp.processes.table import processes
from clusterddp.ranks.variables import HELD_VARIABLE
from clusterddp.request.spec import JobSpec
from clusterddp.run import bad_nodes, events, hold
from clusterddp.run.attempt import latest
from clusterddp.run.events import Cause, RunInHold
from clusterddp.run.history import History, withdrawal_cause
from clusterddp.run.hold import Room
from clusterddp.run.outcome import step_name
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import allocation
from clusterddp.slurm import client as slurm
from clusterddp.slurm.client import Ending
from clusterddp.slurm.forms import hosts_of, in_salloc_shell
from clusterddp.status import chain
from clusterddp.status.find import find_run
from clusterddp.status.state import RunState
from clusterddp.status.status import statuses

_KEPT = "PARTITION CLUSTER_NAME USER UID GID ACCOUNT QOS NAME"
"""Variables SLURM_JOB_* of the allocation that also hold for a run in it."""
_LOGIN = "PATH HOME USER LOGNAME SHELL LANG TMPDIR"
"""Variables of a login shell, which a run has even with --export NONE."""
_ANSWER_SECONDS = 20.0
prepare = local.prepare


def submit(spec: JobSpec, script: str, run: RunDir) -> SentJob:  # noqa: ARG001 -- the run has it
    """Start the run in the allocation of this shell of salloc, or in a hold."""
    if spec.after:
        chain.check(chain.check_awaited(spec), has_queue=False)
    held_by, job_id = find_allocation(spec)
    request, nodes = _checked(spec, run, job_id)
    if held_by:
        return _submit_to_hold(spec, held_by, job_id, request)
    parent = os.getpid()
    with _alone():
        try:
            chosen = Room(nodes, (), _runs_of(job_id)).choose(request)
        except RequestError as error:
            raise RequestError(
                f"this shell holds job {job_id}: {error}. Wait for a run to end, request fewer "
                "nodes, or use --launcher sbatch. [CD0419]"
            ) from None
        keeper = subprocess.Popen(
            hold.keeper_command(run, chosen),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to us, and becomes an orderly stop
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509 -- no threads yet
        )
    log.info(
        f"this shell holds job {job_id}: the run starts there at once, on {', '.join(chosen)}, and "
        "is not requeued. --launcher sbatch would submit a job"
    )
    here, host = str(Path.cwd()), socket.gethostname()
    sent = events.Submitted(
        job_id=job_id, launcher=spec.launcher, pid=keeper.pid, host=host, folder=here
    )
    events.add(run.events, sent)
    return SentJob(job_id, partial(_stop, keeper))


def find_allocation(spec: JobSpec) -> tuple[RunDir | None, str]:
    """Return the hold that a request names, and the job. Raises RequestError if there is none."""
    if not spec.hold and in_salloc_shell(os.environ):
        return None, os.environ["SLURM_JOB_ID"]
    if not spec.hold:
        raise RequestError(
            "--launcher held: this shell is not one of salloc, which would hold an allocation. "
            "Start one with salloc, name a hold with --in, or use --launcher sbatch. [CD0418]"
        )
    held_by = find_run(Path(spec.run_dir).parent, spec.hold)
    [status] = statuses([held_by])
    if not hold.is_hold(held_by) or status.state != RunState.RUNNING or not status.hosts:
        what = f"is {status.state}" if hold.is_hold(held_by) else "is a run, not a hold"
        raise RequestError(
            f"--in {spec.hold}: {what}. Start a hold with 'clusterddp hold', see 'clusterddp "
            "runs', or use --launcher sbatch. [CD0419]"
        )
    return held_by, status.job_id


def _checked(spec: JobSpec, run: RunDir, job_id: str) -> tuple[hold.Request, tuple[str, ...]]:
    """Return the request for a run, and the nodes of the allocation.

    Excluded and bad nodes are left out. Raises RequestError if the allocation cannot serve it.
    """
    try:
        shares, left = allocation.allocated(job_id), slurm.seconds_left(job_id) or None
    except SlurmError as error:
        raise RequestError(
            f"{error}. Nothing was started. If SLURM_JOB_ID of this shell names a job that has "
            "ended, unset it, or submit with --launcher sbatch. [CD0418]"
        ) from None
    asked = spec.resources
    wanted = {
        "nodes": asked.nodes,
        "gpus": asked.gpus_per_node,
        "cpus": (asked.cpus_per_task or 1) * asked.tasks_per_node,
        "mem": asked.mem,
        "time": asked.time,
    }
    bad = {} if "exclude" in spec.omit_directives else bad_nodes.read_for(History.read(run))
    unwanted = {
        **{host: f"bad: {node.reason}" for host, node in bad.items()},
        **dict.fromkeys(hosts_of(asked.exclude), "--exclude"),
    }
    named = [*dict.fromkeys(hosts_of(asked.nodelist))]
    usable = allocation.usable(
        shares, left, wanted, f"job {job_id}", named=named, unwanted=unwanted
    )
    here = str(Path.cwd())
    request = hold.Request(str(run.path), asked.nodes, asked.nodelist, tuple(usable), here)
    return request, tuple(shares)


def _submit_to_hold(spec: JobSpec, held_by: RunDir, job_id: str, request: hold.Request) -> SentJob:
    """Request the run's start from a hold, and wait for its answer."""
    environ = slurm.submission_environment(os.environ)
    if spec.export == "NONE":
        names = {*spec.pass_environment, *_LOGIN.split()}
        environ = {name: value for name, value in environ.items() if name in names}
    name = hold.ask(held_by, replace(request, environ=environ))
    try:
        if _is_accepted(spec, held_by, name, job_id):
            return SentJob(job_id)
    except (KeyboardInterrupt, OSError):
        hold.withdraw(held_by, name)  # else it may start what the user has given up
        raise
    if hold.withdraw(held_by, name):
        raise RequestError(
            f"--in {spec.hold}: no answer for {_ANSWER_SECONDS:g} s; the request is withdrawn. "
            f"See 'clusterddp status {spec.hold}'. [CD0421]"
        )
    raise SlurmError(
        f"{spec.hold} has not answered for {_ANSWER_SECONDS:g} s, so it may still start the run. "
        f"See: clusterddp status {RunDir(Path(request.run)).cli_name} [CD0421]"
    )


def _is_accepted(spec: JobSpec, held_by: RunDir, name: str, job_id: str) -> bool:
    """Wait for a hold's answer; return False without one. Raises RequestError if it refuses."""
    for _ in polling.poll(_ANSWER_SECONDS, every=polling.RECORDS_POLL_SECONDS):
        with suppress(SlurmError):  # asked again
            slurm.signal_script(job_id)
        for _ in polling.poll(2.0, every=0.1):
            of_run = [
                event
                for event in events.read(held_by.events)
                if isinstance(event, events.RunInHold) and event.request == name
            ]
            if of_run and of_run[0].nodelist:
                log.info(f"{spec.hold} starts it at once on {of_run[0].nodelist}; no requeue there")
                return True
            if of_run:
                raise RequestError(f"--in {spec.hold}: {of_run[0].why}. [CD0419]")
    return False


@contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock of the user's, so that two runs of a shell do not choose the same nodes."""
    with ExitStack() as stack:
        with suppress(OSError):  # no home, or a file system without locks
            lock = os.open(Path.home(), os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _runs_of(job_id: str) -> dict[str, RunInHold]:
    """Return the active runs of an allocation, by directory, from their keepers on this host."""
    keepers = [each for each in processes().values() if each.argv[2:3] == ["held"]]
    paths = [k.argv[3:] for k in keepers if k.environ.get("SLURM_JOB_ID") == job_id]
    return {each[0]: RunInHold(run=each[0], nodelist=each[1]) for each in paths if len(each) == 2}


def _stop(keeper: "subprocess.Popen[bytes]") -> None:
    if keeper.poll() is None:
        keeper.send_signal(signal.SIGTERM)
    keeper.wait()


def keep(run: RunDir, nodes: Sequence[str]) -> int:
    """Run the script on these nodes of the job to its end. Return its exit code."""
    script, job_id = run.script.read_text("utf-8"), os.environ["SLURM_JOB_ID"]
    # After its limit Slurm may let the allocation be.
    limit = Limit.of(script, slurm.seconds_left(job_id) or None)
    job = _HeldJob(run, limit, job_id)
    tasks = len(nodes) * run.load_spec().resources.tasks_per_node
    until = "" if limit.seconds is None else f"{time.time() + limit.seconds:.0f}"
    environ = {
        **slurm.submission_environment(os.environ),
        **{k: v for k, v in os.environ.items() if k.removeprefix("SLURM_JOB_") in _KEPT.split()},
        **variables(
            {
                "SLURM_JOBID SLURM_JOB_ID": job_id,
                "SLURM_JOB_NODELIST SLURM_NODELIST": ",".join(nodes),
                "SLURM_JOB_NUM_NODES SLURM_NNODES": len(nodes),
                "SLURM_NPROCS SLURM_NTASKS": tasks,
                "SLURM_SUBMIT_DIR": Path.cwd(),
                HELD_VARIABLE: until,
            }
        ),
    }
    if own := os.environ.get("SLURMD_NODENAME"):  # in a hold, not in a shell on the login host
        environ["SLURMD_NODENAME"] = own
    code = job.run(["bash", str(run.script)], environ, Path())
    hold.record_end(run, job_id, code)
    return code


class _HeldJob(KeptJob):
    """A run inside a job: its tasks are a step, which scancel signals."""

    _next_look, _is_stopped, _is_killed = 0.0, False, False

    def __init__(self, run: RunDir, limit: Limit, job_id: str) -> None:
        super().__init__(run, limit, job_id)
        self._before = latest(run)

    def keep_time(self, script: int, elapsed: float) -> None:
        """Also look, every second, whether the user stops or cancels the run."""
        if elapsed >= self._next_look:
            self._next_look = elapsed + 1.0
            with suppress(OSError):
                asked = withdrawal_cause(History.read(self._run).latest, self._job_id)
                self._is_recorded = asked == Cause.CANCELLED
                self._cancelled = self._cancelled or self._is_recorded
                if asked == Cause.STOPPED and not self._is_stopped:
                    self._is_stopped = True
                    os.kill(script, signal.SIGUSR1)
        if self._cancelled and not self._is_recorded and self._kill_at is None:
            # Slurm also sends TERM at the end of the allocation, which no user asked for.
            by_slurm = Ending.PREEMPTED, Ending.TIME_LIMIT, Ending.REQUEUED
            self._is_recorded = slurm.ending(self._job_id, 0) in by_slurm
        super().keep_time(script, elapsed)

    def signal_all(self, script: int, *numbers: int) -> None:
        """Signal the tasks, and the controller except by KILL: it records the result."""
        step = self._step()
        for number in numbers:
            self.signal_tasks(number)
            if number == signal.SIGKILL and step and not self._is_killed:
                self._is_killed = True
                self._kill_at = time.monotonic() + KILL_WAIT_SECONDS
            elif step and number != signal.SIGKILL:
                os.kill(script, number)
            else:  # lines before the step, or a controller that does not end
                signal_session(script, number)

    def signal_tasks(self, *numbers: int) -> None:
        if step := self._step():
            for number in numbers:
                with suppress(SlurmError):  # it has ended
                    slurm.signal_step(step, signal.Signals(number).name[3:])

    def end_rest(self, script: int) -> None:
        signal_session(script, signal.SIGKILL)

    def _step(self) -> str:
        """Return the name of this start's step; empty before it has one."""
        attempt = latest(self._run)
        if attempt is None or attempt == self._before:
            return ""  # an earlier one's step may have been that of another job
        return step_name(attempt.outcomes, self._job_id)
