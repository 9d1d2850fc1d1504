"""The batch controller of a job: the process that a batch script becomes with exec.

It creates the run's directory and records, begins the attempt, checks the nodes and chooses the
port and the nonce. The script's lines run as its child: setup, tasks, teardown. It forwards signals
and records the result, or begins the next attempt. Signals that arrive while Python starts are
blocked and stay pending, so none is lost.
"""

import contextlib
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec

from clusterddp import files, formatting, log, polling, version
from clusterddp.batch import finish, spares, stage, step_watch
from clusterddp.batch.begin import begin_attempt
from clusterddp.batch.job import JobStart
from clusterddp.batch.step_watch import SrunProcess
from clusterddp.errors import (
    EXIT_FAILED,
    EXIT_STOPPED,
    ClusterDDPError,
    RequestError,
    SlurmError,
    coded,
)
from clusterddp.files import write_atomically
from clusterddp.processes import change_environment
from clusterddp.processes.signals import die_with_parent
from clusterddp.processes.table import listening_ports
from clusterddp.ranks.dist_env import master_port
from clusterddp.ranks.variables import has_queue, host_name, is_held, is_rehearsal, slurm_job_name
from clusterddp.request.program import END, FULL_PREFLIGHT, NO_PREFLIGHT
from clusterddp.request.spec import JobSpec
from clusterddp.run import bad_nodes, events, preflight
from clusterddp.run.attempt import ALIVE_SECONDS, Attempt, print_to_job_log
from clusterddp.run.history import History, Policy
from clusterddp.run.outcome import step_name
from clusterddp.run.records import PreflightRecord
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.forms import (
    ATTEMPT_VARIABLE,
    BATCH_VARIABLE,
    CODE_OF_VARIABLE,
    CODE_VARIABLE,
    FULL_PREFLIGHT_VARIABLE,
    KILL_WAIT_VARIABLE,
    NODES_VARIABLE,
    NONCE_VARIABLE,
    RANK_VARIABLES,
    SPARES_VARIABLE,
    expand_nodelist,
    hosts_of,
)
from clusterddp.staging.environment import StagingError
from clusterddp.status import notify

EXIT_NO_RUN = 73
"""EX_CANTCREAT of sysexits.h: the run's directory cannot be created, or was removed."""
SIGNALS = ("TERM", "USR1", "USR2", "HUP", "INT")
"""Signals that the controller handles. USR1 and USR2 go to the step unless its ranks read the stop
file; HUP and INT count as USR1; TERM is only logged, because Slurm sends it to the step itself."""
_POLL_SECONDS = 0.05
"""Interval of the search for the process that starts the tasks."""
_BLOCKED = [signal.Signals[f"SIG{name}"] for name in SIGNALS]
_NUMBERS = [*_BLOCKED, signal.SIGCHLD]
_SLURM_OUTPUT = re.compile(r"slurm-\d+(_\d+)?\.out")
_WATCHES_SECONDS = 5.0
"""Time for an attempt's threads to notice its end, which they poll for every 2 s."""

P = ParamSpec("P")

_RANK_CANDIDATES, _PREFLIGHT_CANDIDATES = range(5), range(20, 25)
"""Candidates of `master_port`."""


class NoRunDirectory(ClusterDDPError):
    """The run's directory cannot be made, or was removed."""

    exit_code = EXIT_NO_RUN
    code = "CD0512"


def control(
    run_dir: Path,
    script: Path,
    code_changes: Callable[[RunDir], Sequence[str]],
    carry: Callable[[RunDir], None],
) -> int:
    """Control a batch job from the start of an attempt to its result.

    script: the batch script, which holds the request. The run keeps a copy, and its lines run as a
    child of this process. Other arguments: see `Controller.run`. Returns the job's exit code.
    Raises NoRunDirectory, and RequestError if the script's request cannot be read.
    """
    signals = Signals()
    index = os.environ.get("SLURM_ARRAY_TASK_ID")  # each array task is a run
    asked = str(run_dir).removesuffix(f"-{index}") if index else str(run_dir)
    spec = JobSpec.from_script(script.read_text("utf-8", "surrogateescape"), asked)
    if spec.sweep:
        spec = _trial(spec, index)
    if spec.slurm_folder and not shutil.which("scontrol"):  # a module may add it to PATH later
        change_environment({"PATH": f"{os.environ.get('PATH', os.defpath)}:{spec.slurm_folder}"})
    run = RunDir(run_dir)
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) and not run_dir.is_dir():
        raise NoRunDirectory(
            f"{run_dir} is gone, so the run cannot resume. Submit it again. [CD0512]"
        )
    try:
        make_records(run, spec, script)
        job_log = run.job_log.open("ab")
    except OSError as error:
        raise NoRunDirectory(
            f"cannot create the run directory {run_dir}: {error.strerror}. Free some disk space, "
            "or choose another --runs-dir. [CD0504]"
        ) from None
    output = ScriptOutput(os.dup(2), job_log.fileno())
    for descriptor in (1, 2):
        os.dup2(job_log.fileno(), descriptor)
    with log.to(lambda line: print_to_job_log(f"clusterddp: {line}")):
        code = Controller(spec, run, script.absolute(), signals, output).run(code_changes, carry)
        if spec.notify:
            notify.notify_at_end(run, spec)
        output.remove()
        return code


def _trial(spec: JobSpec, index: str | None) -> JobSpec:
    """Return the request of one array task. Raises RequestError if the sweep has no such index."""
    try:
        return spec.trial_spec(int(index or ""))
    except (ValueError, IndexError):
        raise RequestError(
            f"the sweep {spec.run_name} has no trial {index!r}: its indices are 0 to "
            f"{len(spec.sweep) - 1}. Start one with: sbatch --array=INDEX [CD1104]"
        ) from None


class Signals:
    """Signals to this process, SIGCHLD included, read from a wakeup pipe."""

    def __init__(self) -> None:
        """Install the handlers. Signals since the script began are blocked, and arrive now."""
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer)
        for number in _NUMBERS:
            signal.signal(number, lambda *_: None)
        # Child processes inherit the mask: a signal that Slurm sends to the whole job does not
        # kill the scontrol that requeues it.
        self.were_blocked = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED)
        """False if earlier signals are lost because `env` could not block them."""
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        """Receive signals in a thread that starts no processes."""
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        threading.Event().wait()

    def wait(self, seconds: float | None) -> None:
        """Wait until a signal arrives or `seconds` pass."""
        select.select([self._reader], [], [], seconds)

    def take(self) -> list[str]:
        """Return the names of the signals that have arrived (see SIGNALS)."""
        try:
            numbers = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(n).name[3:] for n in numbers if n != signal.SIGCHLD]


class ScriptOutput:
    """Slurm's file slurm-JOBID.out, which holds what is printed before the run has a log.

    Its content is appended to the job log, and the file is removed at the end. A file of any other
    name is not touched.
    """

    def __init__(self, descriptor: int, job_log: int) -> None:
        """descriptor: the script's standard error. job_log: descriptor of the job log."""
        self._descriptor, self._job_log = descriptor, job_log
        self._taken = 0
        self._file: Path | None = None
        with contextlib.suppress(OSError):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if _SLURM_OUTPUT.fullmatch(path.name):
                self._file = path

    def take(self) -> None:
        """Append new script output to the job log."""
        if self._file:
            with contextlib.suppress(OSError), self._file.open("rb") as file:
                file.seek(self._taken)
                while text := file.read(1 << 16):
                    self._taken += os.write(self._job_log, text)
                    file.seek(self._taken)

    def print_line(self, line: str) -> None:
        """Print a line to Slurm's file, because the run's log is gone."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, f"clusterddp: {line}\n".encode())
        self._file = None  # so that it is kept

    def remove(self) -> None:
        """Remove the file if the job log has all of it."""
        self.take()
        if self._file:
            with contextlib.suppress(OSError):
                if self._file.stat().st_size == self._taken:
                    self._file.unlink()


def make_records(run: RunDir, spec: JobSpec, script: Path) -> None:
    """Create the run's directory and the records that do not exist yet. Raises OSError."""
    run.make(run.logs)
    with run.job_log.open("ab"):
        pass  # checks that it is writable
    if not run.script.exists():
        write_atomically(run.script, script.read_bytes())
    if not run.spec.exists():
        write_atomically(run.spec, spec.to_json().encode())


class Controller:
    """Controller of the attempts of one start of a job."""

    def __init__(
        self, spec: JobSpec, run: RunDir, script: Path, signals: Signals, output: ScriptOutput
    ) -> None:
        self._spec, self._run, self._script = spec, run, script
        self._signals, self._output = signals, output
        self._job_id = os.environ["SLURM_JOB_ID"]
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._attempt: Attempt | None = None
        self._allocation: spares.Allocation | None = None
        """Nodes of the job, if it has spare ones."""
        if spec.resources.spare_nodes:
            nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
            self._allocation = spares.Allocation(nodelist, spec.resources.nodes)
        self._nodes: list[str] = []
        """Nodes of the step, if the controller chooses them."""
        self._staged: dict[str, str] = {}
        """Variables that name the copies of the tasks' environment, if it is staged."""
        self._starts = os.getpid() if is_held(os.environ) else 0
        """Number of attempts that have ended in this start of the job. Runs that share a job begin
        at different numbers, and so use different ports."""
        self._recording_lost = threading.Lock()
        self._watches: list[threading.Thread] = []
        self._signals_seen = False
        self._unsent: list[str] = []
        """Signals to send to srun once it has installed its handlers."""
        self._is_ending = False
        """True if Slurm began to end the job during the node checks."""
        self._is_stopped = False
        """True if the user interrupted the script with INT or HUP."""

    def run(
        self, code_changes: Callable[[RunDir], Sequence[str]], carry: Callable[[RunDir], None]
    ) -> int:
        """Run attempts until one ends the job. Return the job's exit code.

        code_changes: see `begin_attempt`. carry: copies clusterddp into the run, unless it has a
        copy. Errors that prevent an attempt are logged.
        """
        code = self._begin(code_changes)
        over = threading.Event()
        threading.Thread(target=self._renew_liveness, args=(over,), daemon=True).start()
        try:
            return self._run_to_end(code, code_changes, carry)
        finally:
            over.set()

    def _run_to_end(
        self,
        code: int,
        code_changes: Callable[[RunDir], Sequence[str]],
        carry: Callable[[RunDir], None],
    ) -> int:
        """Run the attempt that `_begin` made (code: its exit code) until the job ends."""
        hosts = os.environ.get("SLURM_JOB_NODELIST", "")
        # The log from this line on belongs to this start of the job.
        log.info(f"{self._run.name}, job {self._job_id} on {hosts}, {time.strftime('%c')}")
        self._output.take()
        log.info(f"this is clusterddp {version.described()}")
        self._compare_version()
        if self._attempt:
            try:
                carry(self._run)
                code = self._start(self._attempt)
                while self._resumes_in_job(code):
                    code = self._begin(code_changes)
                    if self._attempt:
                        code = self._start(self._attempt)
            except Exception:  # a bug here costs the step, but the result is still recorded
                log.info(traceback.format_exc())
                code = EXIT_FAILED
        return self._finish(self._attempt, code) if self._attempt else code

    def _renew_liveness(self, over: threading.Event) -> None:
        """Renew the controller's liveness file, which shows that its host is not lost."""
        while True:
            attempt = self._attempt
            if attempt:
                with contextlib.suppress(OSError):  # the run may be gone, or the disk full
                    attempt.controller.touch()
            if over.wait(ALIVE_SECONDS):
                return

    def _begin(self, code_changes: Callable[[RunDir], Sequence[str]]) -> int:
        """Begin the next attempt. Return 0, or the job's exit code if the attempt is refused.

        The reason for a refusal is logged.
        """
        spec, nodelist = self._spec, os.environ.get("SLURM_JOB_NODELIST", "")
        idle: list[str] = []
        if allocation := self._allocation:
            self._nodes = self._nodes or allocation.choose_first(spares.nodes_to_avoid(self._run))
            nodelist = ",".join(self._nodes)
            idle = [node for node in allocation.left if node not in self._nodes]
        self._attempt = None
        try:
            self._attempt = begin_attempt(
                JobStart(self._run, self._job_id, self._restart, nodelist),
                spec.max_requeues,
                spec.program.options.get("rendezvous_timeout") or polling.OTHER_ATTEMPT_SECONDS,
                code_changes,
                idle,
                spec.resources.nodes if self._allocation else 0,
            )
        except ClusterDDPError as error:
            log.info(coded(error))
            return error.exit_code
        return 0

    def _start(self, attempt: Attempt) -> int:
        """Check the nodes and run the script's lines. Return their exit code."""
        self._await_watches()
        nodes = self._nodes
        if self._allocation:  # a spare that is already marked bad is not worth another check
            bad = spares.nodes_to_avoid(self._run)
            nodes = [n for n in self._allocation.left if n in self._nodes or n not in bad]
        if not nodes:
            with contextlib.suppress(ClusterDDPError):  # an unreadable list is not checked
                nodes = expand_nodelist(os.environ.get("SLURM_JOB_NODELIST", ""))
        if self._preflight(attempt, nodes):
            return EXIT_FAILED
        if self._spec.stages and not self._stage(attempt, nodes):
            return EXIT_FAILED
        code = self._run_script(attempt)
        return EXIT_FAILED if self._full_preflight(attempt) else code

    def _resumes_in_job(self, code: int) -> bool:
        """Record the end of this attempt and choose nodes for another one in this job.

        code: srun's exit code. Returns False, with nothing recorded, if the attempt ends normally,
        no node was lost or marked bad, too few good nodes are left, or the job is about to end.
        """
        attempt, allocation = self._attempt, self._allocation
        if not (attempt and allocation) or self._signals_seen:
            return False
        name = slurm_job_name(os.environ, self._job_id)
        if attempt.is_superseded or slurm.ending(name, self._restart) is not slurm.Ending.NONE:
            return False  # the nodes belong to a later start, or are about to be released
        with self._recording_lost:  # waits for a watch that is recording a loss
            others = [node for node in self._others() if node not in allocation.lost]
        self._record_lost(attempt, spares.find_lost(attempt, others, code, self._idle()))

        def choose() -> list[str]:
            nodes = allocation.choose(spares.nodes_to_avoid(self._run))
            if not nodes:
                log.info("too few good nodes are left to continue in this job")
            return nodes

        policy = Policy.of(self._spec)
        job, pause = self._start_of_job, self._pause
        nodes = finish.resume_in_job(job, attempt, code, policy, choose, pause)
        if not nodes:
            return False
        self._nodes, self._starts = list(nodes), self._starts + 1
        return True

    def _pause(self, seconds: float) -> None:
        """Wait before an attempt in this job, until a signal or the user's withdrawal at most."""
        for _ in polling.poll(seconds, every=0.0):
            self._signals.wait(min(seconds, polling.RECORDS_POLL_SECONDS))
            if names := self._signals.take():
                for name in names:  # the next attempt handles them
                    os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
                return
            if self._start_of_job.withdrawal_cause(History.read(self._run)):
                return

    def _record_lost(self, attempt: Attempt, lost: Mapping[str, str]) -> None:
        """Record lost nodes and release them. Any thread may call it. No-op if superseded."""
        assert self._allocation
        if attempt.is_superseded:
            return
        with self._recording_lost:
            fresh = {node: why for node, why in lost.items() if node not in self._allocation.lost}
            self._allocation.lost |= fresh.keys()
            if fresh:
                spares.mark_lost(attempt, self._job_id, fresh, self._nodes)
                spares.release_nodes(slurm_job_name(os.environ, self._job_id), self._allocation)

    def _others(self) -> list[str]:
        """Return the nodes of the step without this one, which cannot see its own loss."""
        return [node for node in self._nodes if node != os.environ.get("SLURMD_NODENAME")]

    def _idle(self) -> list[str]:
        """Return the job's nodes that run no tasks, without this node and lost ones."""
        left = self._allocation.left if self._allocation else []
        own = os.environ.get("SLURMD_NODENAME")
        return [node for node in left if node not in self._nodes and node != own]

    def _log_failed_setup(self, code: int) -> None:
        """Log that the script's setup failed, and the setup lines."""
        lines = [*(f"module load {name}" for name in self._spec.modules), *self._spec.setup]
        which = "its setup line" if len(lines) == 1 else "one of its setup lines"
        named = "; ".join(formatting.line(line) for line in lines)
        where = f"{which}: {named}" if lines else "see what it printed above"
        log.info(f"the script ended with exit code {code} before it reached its step: {where}")

    def _compare_version(self) -> None:
        """Log if another version rendered the script, because its defaults may differ."""
        script = ""
        with contextlib.suppress(OSError):
            script = self._run.script.read_text("utf-8", "replace")
        rendered_by = version.of_script(script)
        if rendered_by not in ("", version.__version__):
            log.info(
                f"the script is from clusterddp {rendered_by}; it runs with this version's defaults"
            )

    @property
    def _start_of_job(self) -> JobStart:
        return JobStart(self._run, self._job_id, self._restart)

    def _finish(self, attempt: Attempt, code: int) -> int:
        finish.go_to_submission_folder()
        if not self._run.path.is_dir():
            self._output.print_line(
                f"{self._run.path} was removed while the run was active, so there is nothing to "
                "resume from"
            )
            return EXIT_NO_RUN
        policy = Policy.of(self._spec)
        if is_held(os.environ):
            policy = Policy(requeue=False, max_requeues=0, retries=0)
        return finish.finish(self._start_of_job, attempt, code, policy)

    def _preflight(self, attempt: Attempt, nodes: Sequence[str]) -> dict[str, str]:
        """Check the nodes before the tasks start. Return the step's failed nodes with the reasons.

        They are marked bad, and so are idle spares that fail. Returns an empty dictionary if the
        checks cannot run or the job is ending.
        """
        if self._spec.node_checks == NO_PREFLIGHT or not nodes or is_rehearsal(os.environ):
            return {}
        names = (host_name(os.environ), os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        gpus, ranks = self._spec.resources.gpus_per_node, self._spec.world_size
        try:
            ports = preflight_ports(int(self._job_id), self._restart, self._starts)
            record = preflight.check(
                attempt,
                nodes,
                self._program(),
                names,
                gpus,
                ranks,
                child_setup(),
                ports,
                self._is_job_ending,
            )
        except Exception:  # a bug here costs only the checks
            log.info(traceback.format_exc())
            return {}
        if self._is_job_ending() or not record.failed:
            return {}
        known = spares.nodes_to_avoid(self._run)
        of_step = {*(self._nodes or nodes)}
        idle = {host: why for host, why in record.failed.items() if host not in of_step}
        failed = {host: why for host, why in record.failed.items() if host in of_step}
        self._mark_bad(attempt, idle, is_remark=True)
        if not failed:
            return {}
        reason = self._reason_to_use(failed, record, known)
        fresh = {host: why for host, why in failed.items() if not reason or host not in known}
        self._mark_bad(attempt, fresh, is_remark=bool(reason))
        if reason:
            used = f"{reason}, used anyway: {', '.join(failed)}"
            log.info(used)
            preflight.note(attempt, used)
            return {}
        return failed

    def _stage(self, attempt: Attempt, nodes: Sequence[str]) -> bool:
        """Copy the tasks' environment to the nodes. Return False if a node of the step has none.

        If other nodes have a copy, such a node is marked bad, so that the next start excludes it.
        """
        spec, of_step = self._spec, {*(self._nodes or nodes)}
        try:
            staged = stage.stage(
                attempt,
                spec.python,
                spec.stage_env,
                nodes,
                self._program(),
                child_setup(),
                self._is_job_ending,
            )
            if staged is None or self._is_job_ending():
                return True  # the script is not run, either
            failed = {host: why for host, why in staged.failed.items() if host in of_step}
            required = hosts_of("" if self._allocation else spec.resources.nodelist)
            for host in {*failed} & {*required}:
                raise StagingError(f"{host}: {failed[host]}", code=stage.NO_COPY)
        except (OSError, StagingError) as error:
            stage.record_failure(attempt, error)
            return False
        self._staged = staged.variables
        idle = {host: why for host, why in staged.failed.items() if host not in of_step}
        self._mark_bad(attempt, idle, is_remark=True)
        self._mark_bad(attempt, failed)
        return not failed

    def _program(self) -> list[str]:
        """Return the command of clusterddp on the nodes."""
        own = self._run.bundle
        return [sys.executable, *([str(own)] if own.exists() else ["-m", "clusterddp"])]

    def _reason_to_use(
        self, failed: Mapping[str, str], record: PreflightRecord, known: Collection[str]
    ) -> str:
        """Return why the tasks start on failed nodes; empty if they do not."""
        if {*failed} <= {*known}:
            return "already marked bad"  # Slurm chose them anyway, so the request needs them
        if self._allocation:
            return ""
        if {*failed} <= {*known, *hosts_of(self._spec.resources.nodelist)}:
            return "required by --nodelist"
        if {*failed} <= {*record.slow} and not self._spec.requeue:
            return "slow, with requeue off and no spare"
        return ""

    def _is_job_ending(self) -> bool:
        """Handle the signals that have arrived. Return whether the job is ending."""
        signals = self._signals.take()
        self._is_ending = self._is_ending or "TERM" in signals
        self._handle(signals)
        return self._is_ending or self._is_stopped

    def _full_preflight(self, attempt: Attempt) -> bool:
        """Mark nodes bad that failed the ranks' own checks. Return True if there are any."""
        record = files.read(PreflightRecord, attempt.full_preflight)
        if not record or not record.failed:
            return False
        preflight.log_record(record)
        self._mark_bad(attempt, record.failed)
        return True

    def _mark_bad(
        self, attempt: Attempt, failed: Mapping[str, str], *, is_remark: bool = False
    ) -> None:
        by = bad_nodes.BY_PREFLIGHT
        try:
            bad_nodes.mark_bad(attempt, self._job_id, failed, by, is_remark=is_remark)
        except OSError as error:
            log.warning(f"cannot record the nodes that have failed: {error.strerror}. [CD1302]")

    def _run_script(self, attempt: Attempt) -> int:
        """Run the script's lines, which start the tasks. Return their exit code."""
        if not self._signals.were_blocked and self._may_be_past_signal():
            self._handle(["USR1"])
        self._is_job_ending()
        if self._is_ending:
            return 128 + signal.SIGTERM
        if self._is_stopped or (self._unsent and not self._spec.program.reads_stop_file):
            return EXIT_STOPPED  # asked to stop before any task started
        script = subprocess.Popen(
            [*_interpreter(self._script), str(self._script)],
            env=self._environment(attempt),
            stdin=subprocess.DEVNULL,
            preexec_fn=child_setup(),  # noqa: PLW1509 -- threads only wait then
        )
        step = SrunProcess(script.pid, attempt)
        try:
            if not is_rehearsal(os.environ):
                self._watch_step(attempt, step)
                if self._allocation:
                    self._watch_nodes(attempt, step)
            self._watch_hangs(attempt, step)
            code = self._await(script, step)
        finally:
            if script.poll() is None:  # a bug here: no result may be recorded while tasks run
                step.signal(signal.SIGTERM)
                script.wait()
        if step.process():  # started in the background
            log.info("the script's lines ended before the tasks that they started; ending these")
            step.signal(signal.SIGTERM)
            return code or EXIT_FAILED
        if code and not step.has_begun:
            self._log_failed_setup(code)
        return code

    def _may_be_past_signal(self) -> bool:
        """Return whether Slurm's time-limit signal may have arrived before Python started."""
        if not (self._spec.signal or "").startswith("B:") or not has_queue(os.environ):
            return False
        try:
            left = slurm.seconds_left(slurm_job_name(os.environ, self._job_id))
        except SlurmError:
            return False
        return left is not None and left <= self._spec.signal_lead

    def _environment(self, attempt: Attempt) -> dict[str, str]:
        """Return the environment of the script's lines and of the tasks."""
        environ = {
            "PYTHONUNBUFFERED": "1",  # output of a rank reaches its log line by line
            **os.environ,
            BATCH_VARIABLE: self._job_id,
            # Authenticates the ranks of this attempt to each other: torch's store is open to all.
            NONCE_VARIABLE: secrets.token_hex(16),
            ATTEMPT_VARIABLE: str(attempt.number),
            **self._code_variables(),
            **self._staged,
        }
        # If this job was submitted from inside another one, that job's ranks and CPU binding do
        # not apply; in POSIX mode, bash lacks features that user lines rely on.
        others = {*RANK_VARIABLES, "POSIXLY_CORRECT"}
        for name in environ.copy():
            if name in others or name.startswith(("TORCHELASTIC_", "SLURM_CPU_BIND")):
                del environ[name]
        port = free_master_port(int(self._job_id), self._restart, self._starts)
        environ["MASTER_PORT"] = str(port)
        if self._spec.node_checks == FULL_PREFLIGHT:
            environ[FULL_PREFLIGHT_VARIABLE] = "1"
        if not is_rehearsal(os.environ) and (seconds := slurm.kill_wait(os.environ)) is not None:
            environ[KILL_WAIT_VARIABLE] = str(seconds)
        if self._allocation:
            environ[SPARES_VARIABLE] = str(self._spec.resources.spare_nodes)
            environ[NODES_VARIABLE] = ",".join(self._nodes)
        if is_held(os.environ):
            environ[NODES_VARIABLE] = os.environ["SLURM_JOB_NODELIST"]
        return environ

    def _code_variables(self) -> dict[str, str]:
        """Return the variables that make a COMMAND's Python import the copied code."""
        nothing = {CODE_VARIABLE: "", CODE_OF_VARIABLE: ""}  # overrides a submitting job's values
        folder = History.read(self._run).folder or os.environ.get("SLURM_SUBMIT_DIR", "")
        if not (self._run.code.is_dir() and folder):
            return nothing
        try:
            top = self._run.top_of_code(Path(folder))
        except IndexError:  # submitted with plain sbatch from a directory that is not deep enough
            return nothing
        return {CODE_VARIABLE: os.path.realpath(self._run.code), CODE_OF_VARIABLE: str(top)}

    def _await(self, script: "subprocess.Popen[bytes]", step: SrunProcess) -> int:
        while (code := script.poll()) is None:
            has_begun = step.has_begun or step.process() is not None
            self._signals.wait(None if has_begun and not self._unsent else _POLL_SECONDS)
            self._handle(self._signals.take())
            if self._unsent and step.process():
                for name in self._unsent.copy():
                    number = signal.Signals[f"SIG{name}"]
                    if step.listens(number):
                        step.signal(number)
                        self._unsent.remove(name)
        return code if code >= 0 else 128 - code

    def _handle(self, names: list[str]) -> None:
        """Handle signals: the ranks see the stop file, a COMMAND gets the signal itself."""
        self._signals_seen = self._signals_seen or bool(names)
        for name in names:
            if name == "TERM":
                log.info(f"job {self._job_id} got SIGTERM (cancelled, time limit or preempted)")
                continue
            log.info(f"job {self._job_id} got SIG{name}, asking the ranks to stop")
            if name in ("HUP", "INT"):
                if self._is_stopped:
                    continue
                self._stop(f"SIG{name}")
                name = "USR1"  # noqa: PLW2901 -- srun handles the other two itself
            marked = self._attempt is not None and _create_if_missing(self._attempt.stop)
            if not (marked and self._spec.program.reads_stop_file):
                self._unsent.append(name)

    def _stop(self, by: str) -> None:
        """Record that the user stops the run with a signal, as with 'clusterddp stop'."""
        self._is_stopped = True
        number = self._attempt.number if self._attempt else None
        with contextlib.suppress(OSError):
            events.add(
                self._run.events, events.StopRequested(job_id=self._job_id, attempt=number, by=by)
            )
            if self._attempt:
                self._attempt.ask_to_stop("stop")

    def _watch_step(self, attempt: Attempt, step: SrunProcess) -> None:
        """Start a thread that ends the step when srun hangs on a lost task-exit message."""
        spec = self._spec
        job = slurm_job_name(os.environ, self._job_id)
        grace = polling.AGENT_STEP_EXIT_SECONDS if spec.max_restarts else polling.SRUN_EXIT_SECONDS
        self._watch(step_watch.watch, attempt, job, spec.world_size, step.srun, grace)

    def _watch_nodes(self, attempt: Attempt, step: SrunProcess) -> None:
        """Start a thread that ends the step after the loss of a node, and records lost spares."""
        of_step = {*self._nodes}
        nodes = spares.NodeWatch(attempt, self._others(), self._idle())

        def watch() -> None:
            while lost := spares.await_loss(nodes, step.may_run):
                self._record_lost(attempt, lost)
                if of_step.intersection(lost):
                    job = slurm_job_name(os.environ, self._job_id)
                    spares.end_step(attempt, job, lost, step.srun)
                    return

        self._watch(watch)

    def _watch_hangs(self, attempt: Attempt, step: SrunProcess) -> None:
        """Start the threads that report a hang or end the job for it."""
        spec = self._spec

        def end() -> None:
            name = step_name(attempt.outcomes, slurm_job_name(os.environ, self._job_id))
            if is_rehearsal(os.environ) or not name:
                step.signal(signal.SIGTERM)
            else:
                step_watch.end_tasks(attempt, name, step.process)

        ending = end if spec.on_hang == END else None
        if ending:
            self._watch(step_watch.watch_hung_ranks, attempt, ending)
        if spec.hang_timeout and spec.program.watches_output:
            self._watch(
                step_watch.watch_output, attempt, spec.world_size, spec.hang_timeout, ending
            )

    def _watch(self, watch: Callable[P, object], *args: P.args, **more: P.kwargs) -> None:
        """Run a watch of the attempt in its own thread."""
        self._watches.append(threading.Thread(target=watch, args=args, kwargs=more, daemon=True))
        self._watches[-1].start()

    def _await_watches(self) -> None:
        """Wait for the threads of the previous attempt, which end because it is superseded.

        The next child runs Python code between fork and exec, so no thread should hold a lock.
        """
        deadline = time.monotonic() + _WATCHES_SECONDS
        while self._watches:
            self._watches.pop().join(max(0.0, deadline - time.monotonic()))


def child_setup() -> Callable[[], None]:
    """Return a function for a child: reset ignored signals, and die with this process.

    The script can inherit ignored signals, for example from a shell that started it with `&`.
    """
    parent = os.getpid()
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}

    def begin() -> None:
        for number in numbers:  # bash cannot trap a signal that is ignored at its start
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)

    return begin


def _interpreter(script: Path) -> list[str]:
    """Return the interpreter of a script's #! line, split in two as the kernel does."""
    with script.open(errors="surrogateescape") as file:
        return file.readline().removeprefix("#!").strip().split(maxsplit=1) or ["/bin/bash"]


def _create_if_missing(path: Path) -> bool:
    """Create a file unless it exists. Return False if it cannot be created."""
    try:
        if not path.exists():
            path.touch()
    except OSError:
        return False
    return True


def preflight_ports(job_id: int, restart: int, starts: int = 0) -> list[int]:
    """Return the ports on which the batch host and the probes may listen before the tasks start.

    They are in the range that a site opens for the ranks, and differ from the ports of the ranks of
    this attempt.
    """
    return [master_port(job_id, starts, restart, candidate) for candidate in _PREFLIGHT_CANDIDATES]


def free_master_port(job_id: int, restart: int, starts: int = 0) -> int:
    """Choose the port for rank 0 from the job id, so that jobs on a node rarely get the same one.

    Ports in use are skipped; if all five candidates are in use, the last one is returned.
    starts: attempts that this start of the job began earlier.
    """
    listening = listening_ports()
    ports = [master_port(job_id, starts, restart, candidate) for candidate in _RANK_CANDIDATES]
    return next((port for port in ports if port not in listening), ports[-1])
