"""The batch process of a job, which a batch script becomes; the script's lines are its child.

It makes the run's directory and records, begins the attempt, checks the nodes, chooses the port
and the nonce, has the script's lines set up, start the tasks and tear down, passes signals on, and
gives the verdict, or the next attempt. Signals that came while Python started were blocked, and
are pending: none is lost.
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

from clusterddp import files, formatting, log, patience, version
from clusterddp.batch import finish, spares, step_watch
from clusterddp.batch.begin import begin_attempt
from clusterddp.batch.job import JobStart
from clusterddp.batch.step_watch import Step
from clusterddp.errors import (
    EXIT_FAILED,
    EXIT_PAUSED,
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
from clusterddp.ranks.variables import host_name, is_rehearsal, slurm_job_name
from clusterddp.request.program import FULL_PREFLIGHT, NO_PREFLIGHT
from clusterddp.request.spec import JobSpec
from clusterddp.run import bad_nodes, events, preflight
from clusterddp.run.attempt import ALIVE_SECONDS, Attempt, print_to_job_log
from clusterddp.run.history import History, Policy
from clusterddp.run.records import PreflightRecord
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.forms import (
    ATTEMPT_VARIABLE,
    BATCH_VARIABLE,
    CODE_OF_VARIABLE,
    CODE_VARIABLE,
    FULL_PREFLIGHT_VARIABLE,
    NODES_VARIABLE,
    NONCE_VARIABLE,
    RANK_VARIABLES,
    SPARES_VARIABLE,
    expand_nodelist,
    hosts_of,
)
from clusterddp.status import notify

EXIT_NO_RUN = 73
"""EX_CANTCREAT of sysexits.h: the run's directory cannot be made, or was removed."""
SIGNALS = ("TERM", "USR1", "USR2", "HUP", "INT")
"""Signals that are passed on. Slurm sends TERM to the step itself."""
_LOOK_SECONDS = 0.05
"""Time between two looks for what starts the tasks."""
_HELD = [signal.Signals[f"SIG{name}"] for name in SIGNALS]
_NUMBERS = [*_HELD, signal.SIGCHLD]
_SLURMS_FILE = re.compile(r"slurm-\d+(_\d+)?\.out")
_WATCHES_SECONDS = 5.0
"""Time for the threads of an attempt to see that it is over, which they look for every 2 s."""

P = ParamSpec("P")

_OF_RANKS, _OF_PREFLIGHT = range(5), range(20, 25)
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
    """Be the process of a batch script, from an attempt's start to its verdict.

    script: its file, which says what was asked, of which the run keeps a copy, and whose lines run
    as a child of this process. The others are as of `Controller.run`. Returns the job's exit code;
    raises NoRunDirectory, and RequestError where the script says nothing that can be read.
    """
    signals = Signals()
    index = os.environ.get("SLURM_ARRAY_TASK_ID")  # each element is a run, of one request
    asked = str(run_dir).removesuffix(f"-{index}") if index else str(run_dir)
    spec = JobSpec.from_script(script.read_text("utf-8", "surrogateescape"), asked)
    if spec.sweep:
        spec = _point(spec, index)
    if spec.slurm_folder and not shutil.which("scontrol"):  # a module may bring them later on
        path = f"{os.environ.get('PATH', os.defpath)}:{spec.slurm_folder}"
        change_environment({"PATH": path})
    run = RunDir(run_dir)
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) and not run_dir.is_dir():
        raise NoRunDirectory(
            f"{run_dir} is gone, so the run cannot resume. Submit it anew. [CD0512]"
        )
    try:
        make_records(run, spec, script)
        job_log = run.job_log.open("ab")
    except OSError as error:
        raise NoRunDirectory(
            f"cannot make the run directory {run_dir}: {error.strerror}. Make room there, or "
            "choose another --runs-dir. [CD0504]"
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


def _point(spec: JobSpec, index: str | None) -> JobSpec:
    """Return the request of the array's element; raises RequestError where the sweep has none."""
    try:
        return spec.element(int(index or ""))
    except (ValueError, IndexError):
        raise RequestError(
            f"the sweep {spec.run_name} has no point {index!r}: its indices are 0 to "
            f"{len(spec.sweep) - 1}. Start it with sbatch --array=INDEX. [CD1104]"
        ) from None


class Signals:
    """Signals to this process, which Python writes into a pipe; the end of a child is one, too."""

    def __init__(self) -> None:
        """Take those that have come since the script began, which it has blocked."""
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer)
        for number in _NUMBERS:
            signal.signal(number, lambda *_: None)
        # Programs that this process starts inherit the mask: a signal that Slurm sends to all in
        # the job does not end a scontrol that puts it back into the queue.
        before = signal.pthread_sigmask(signal.SIG_SETMASK, _HELD)
        self.were_held = signal.SIGUSR1 in before
        """False where earlier ones are lost, as `env` could not block them."""
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        """Take them in a thread of its own, from which nothing is started."""
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        threading.Event().wait()

    def wait(self, seconds: float | None) -> None:
        """Wait until one comes, for so long at most."""
        select.select([self._reader], [], [], seconds)

    def take(self) -> list[str]:
        """Return the names of those that have come, as of SIGNALS."""
        try:
            numbers = os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(n).name[3:] for n in numbers if n != signal.SIGCHLD]


class ScriptOutput:
    """Slurm's file slurm-JOBID.out: of what is printed until the run has a log.

    What it holds goes to that log, and it is removed at the end; any other file is left alone.
    """

    def __init__(self, descriptor: int, job_log: int) -> None:
        """Take the descriptors of standard error, as the script was given it, and of the log."""
        self._descriptor, self._job_log = descriptor, job_log
        self._taken = 0
        self._file: Path | None = None
        with contextlib.suppress(OSError):
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if _SLURMS_FILE.fullmatch(path.name):
                self._file = path

    def take(self) -> None:
        """Copy to the job's log what was printed since, as far as that takes it."""
        if self._file:
            with contextlib.suppress(OSError), self._file.open("rb") as file:
                file.seek(self._taken)
                while text := file.read(1 << 16):
                    self._taken += os.write(self._job_log, text)
                    file.seek(self._taken)

    def print_line(self, line: str) -> None:
        """Print a line where Slurm's users look first, as the run has no log any more."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, f"clusterddp: {line}\n".encode())
        self._file = None  # and it stays

    def remove(self) -> None:
        """Remove the file where the job's log has all of it."""
        self.take()
        if self._file:
            with contextlib.suppress(OSError):
                if self._file.stat().st_size == self._taken:
                    self._file.unlink()


def make_records(run: RunDir, spec: JobSpec, script: Path) -> None:
    """Make the run's directory with its records, as far as they are not there. Raises OSError."""
    run.make(run.logs)
    with run.job_log.open("ab"):
        pass  # it can be written
    if not run.script.exists():
        write_atomically(run.script, script.read_bytes())
    if not run.spec.exists():
        write_atomically(run.spec, spec.to_json().encode())


class Controller:
    """One attempt at work."""

    def __init__(
        self, spec: JobSpec, run: RunDir, script: Path, signals: Signals, output: ScriptOutput
    ) -> None:
        self._spec, self._run, self._script = spec, run, script
        self._signals, self._output = signals, output
        self._job_id = os.environ["SLURM_JOB_ID"]
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._attempt: Attempt | None = None
        self._allocation: spares.Allocation | None = None
        """The job's nodes, where it has some to spare."""
        if spec.resources.spare_nodes:
            nodelist = os.environ.get("SLURM_JOB_NODELIST", "")
            self._allocation = spares.Allocation(nodelist, spec.resources.nodes)
        self._nodes: list[str] = []
        """Nodes of the step, where they are chosen."""
        self._starts = 0
        """Attempts that have ended in this start of the job."""
        self._noting_lost = threading.Lock()
        self._watches: list[threading.Thread] = []
        self._signals_seen = False
        self._unsent: list[str] = []
        """Signals for srun, which may not listen yet."""
        self._is_ending = False
        """True where Slurm has begun to end the job while its nodes were checked."""
        self._is_stopped = False
        """True where a person has interrupted the script, by INT or HUP."""

    def run(
        self,
        code_changes: Callable[[RunDir], Sequence[str]],
        carry: Callable[[RunDir], None],
    ) -> int:
        """Run one attempt from its number to its verdict; returns the job's exit code.

        code_changes: as `begin` takes it. carry: has the run keep this clusterddp, where it keeps
        none. Exceptions of the attempt's refusal are logged.
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
        """Run what `_begin` has begun, with its exit code, to the verdict."""
        hosts = os.environ.get("SLURM_JOB_NODELIST", "")
        # From this line on the log is of this start of the job.
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
            except Exception:  # a fault of ours costs the step, and not the verdict
                log.info(traceback.format_exc())
                code = EXIT_FAILED
        return self._finish(self._attempt, code) if self._attempt else code

    def _renew_liveness(self, over: threading.Event) -> None:
        """Renew the sign of life, for whoever asks whether this process was lost with its host."""
        while True:
            attempt = self._attempt
            if attempt:
                with contextlib.suppress(OSError):  # the run may be gone, or the disk full
                    attempt.controller.touch()
            if over.wait(ALIVE_SECONDS):
                return

    def _begin(self, code_changes: Callable[[RunDir], Sequence[str]]) -> int:
        """Begin the next attempt; returns the job's exit code where it is refused, else 0.

        What refuses it is logged.
        """
        spec, nodelist = self._spec, os.environ.get("SLURM_JOB_NODELIST", "")
        idle: list[str] = []
        if self._allocation:
            self._nodes = self._nodes or self._allocation.choose_first(spares.bad(self._run))
            nodelist = ",".join(self._nodes)
            idle = [node for node in self._allocation.left if node not in self._nodes]
        self._attempt = None
        try:
            self._attempt = begin_attempt(
                JobStart(self._run, self._job_id, self._restart, nodelist),
                spec.max_requeues,
                spec.program.options.get("rendezvous_timeout", patience.OTHER_ATTEMPT),
                code_changes,
                idle,
                spec.resources.nodes if self._allocation else 0,
            )
        except ClusterDDPError as error:
            log.info(coded(error))
            return error.exit_code
        return 0

    def _start(self, attempt: Attempt) -> int:
        """Check the nodes and run the script's lines; returns their exit code."""
        self._await_watches()
        nodes = self._nodes
        if self._allocation:  # a spare that was blamed before would only take its time again
            bad = spares.bad(self._run)
            nodes = [n for n in self._allocation.left if n in self._nodes or n not in bad]
        if not nodes:
            with contextlib.suppress(ClusterDDPError):  # a list that nobody can read is not checked
                nodes = expand_nodelist(os.environ.get("SLURM_JOB_NODELIST", ""))
        if self._preflight(attempt, nodes):
            return EXIT_FAILED
        code = self._run_lines(attempt)
        return EXIT_FAILED if self._full_preflight(attempt) else code

    def _resumes_in_job(self, code: int) -> bool:
        """Choose the nodes of another attempt in this job, and record the end of this one.

        code: srun's. Returns False, with no end recorded, where the attempt ends as any other: no
        node was lost or blamed, too few good ones are left, or the job itself is to end.
        """
        attempt, allocation = self._attempt, self._allocation
        if not (attempt and allocation) or self._signals_seen:
            return False
        name = slurm_job_name(os.environ, self._job_id)
        if attempt.is_superseded or slurm.ending(name, self._restart) is not slurm.Ending.NONE:
            return False  # the nodes are those of a later start, or about to be nobody's
        with self._noting_lost:  # a watch that has seen a loss has recorded it
            others = [node for node in self._others() if node not in allocation.lost]
        self._note_lost(attempt, spares.find_lost(attempt, others, code, self._idle()))

        def choose() -> list[str]:
            nodes = allocation.choose(spares.bad(self._run))
            if not nodes:
                log.info("too few good nodes are left in the job to go on in it")
            return nodes

        policy = Policy.of(self._spec)
        nodes = finish.resume_in_job(self._start_of_job, attempt, code, policy, choose)
        if not nodes:
            return False
        self._nodes, self._starts = list(nodes), self._starts + 1
        return True

    def _note_lost(self, attempt: Attempt, lost: Mapping[str, str]) -> None:
        """Record nodes as lost, and give them back; from any thread, not for a later start."""
        assert self._allocation
        if attempt.is_superseded:
            return
        with self._noting_lost:
            fresh = {node: why for node, why in lost.items() if node not in self._allocation.lost}
            self._allocation.lost |= fresh.keys()
            if fresh:
                spares.mark_lost(attempt, self._job_id, fresh, self._nodes)
                spares.release_nodes(slurm_job_name(os.environ, self._job_id), self._allocation)

    def _others(self) -> list[str]:
        """Return the nodes of the step but for this one, which does not lose itself."""
        return [node for node in self._nodes if node != os.environ.get("SLURMD_NODENAME")]

    def _idle(self) -> list[str]:
        """Return the nodes of the job that have no tasks, but for this one and the lost."""
        left = self._allocation.left if self._allocation else []
        own = os.environ.get("SLURMD_NODENAME")
        return [node for node in left if node not in self._nodes and node != own]

    def _name_set_up(self, code: int) -> None:
        """Log that the script's lines ahead of the step have failed, and which these are."""
        lines = [*(f"module load {name}" for name in self._spec.modules), *self._spec.setup]
        which = "its line of set-up" if len(lines) == 1 else "one of its lines of set-up"
        named = "; ".join(formatting.line(line) for line in lines)
        where = f"{which}: {named}" if lines else "see what it printed above"
        log.info(f"the script ended with exit code {code} before it came to its step: {where}")

    def _compare_version(self) -> None:
        """Log where another version rendered the script, whose defaults may have been others."""
        script = ""
        with contextlib.suppress(OSError):
            script = self._run.script.read_text("utf-8", "replace")
        rendered_by = version.of_script(script)
        if rendered_by not in ("", version.__version__):
            log.info(
                f"its script is of clusterddp {rendered_by}; what that leaves out is as in this one"
            )

    @property
    def _start_of_job(self) -> JobStart:
        return JobStart(self._run, self._job_id, self._restart)

    def _finish(self, attempt: Attempt, code: int) -> int:
        finish.go_to_submission_folder()
        if not self._run.path.is_dir():
            self._output.print_line(
                f"{self._run.path} was removed while the run was at work: nothing is left to "
                "resume from"
            )
            return EXIT_NO_RUN
        policy = Policy.of(self._spec)
        return finish.finish(self._start_of_job, attempt, code, policy)

    def _preflight(self, attempt: Attempt, nodes: Sequence[str]) -> dict[str, str]:
        """Check the nodes ahead of the tasks; returns those of the step that fail, and the reason.

        These are blamed, and idle spares that fail too. Where the checks cannot run, or the job is
        being ended meanwhile, there are none.
        """
        if self._spec.node_checks == NO_PREFLIGHT or not nodes or is_rehearsal(os.environ):
            return {}
        own = self._run.bundle
        program = [sys.executable, *([str(own)] if own.exists() else ["-m", "clusterddp"])]
        names = (host_name(os.environ), os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""))
        gpus = self._spec.resources.gpus_per_node
        try:
            ports = preflight_ports(int(self._job_id), self._restart, self._starts)
            record = preflight.check(
                attempt, nodes, program, names, gpus, _dying_with_this(), ports, self._hear_of_end
            )
        except Exception:  # a fault of ours costs the checks alone
            log.info(traceback.format_exc())
            return {}
        if self._hear_of_end() or not record.failed:
            return {}
        known = spares.bad(self._run)
        of_step = {*(self._nodes or nodes)}
        idle = {host: why for host, why in record.failed.items() if host not in of_step}
        failed = {host: why for host, why in record.failed.items() if host in of_step}
        self._blame(attempt, idle, is_remark=True)
        if not failed:
            return {}
        why_used = self._why_used(failed, record, known)
        fresh = {host: why for host, why in failed.items() if not why_used or host not in known}
        self._blame(attempt, fresh, is_remark=bool(why_used))
        if why_used:
            used = f"{why_used}, and used all the same: {', '.join(failed)}"
            log.info(used)
            preflight.note(attempt, used)
            return {}
        return failed

    def _why_used(
        self, failed: Mapping[str, str], record: PreflightRecord, known: Collection[str]
    ) -> str:
        """Say why the tasks start on nodes that have failed; empty where they do not."""
        if {*failed} <= {*known}:
            return "known as bad"  # Slurm has given them all the same: the request needs them
        if self._allocation:
            return ""
        if {*failed} <= {*known, *hosts_of(self._spec.resources.nodelist)}:
            return "demanded by --nodelist"
        if {*failed} <= {*record.slow} and not self._spec.requeue:
            return "slow, with requeue off and no spare"
        return ""

    def _hear_of_end(self) -> bool:
        """Take the signals that have come; returns whether the job is ending."""
        signals = self._signals.take()
        self._is_ending = self._is_ending or "TERM" in signals
        self._handle(signals)
        return self._is_ending or self._is_stopped

    def _full_preflight(self, attempt: Attempt) -> bool:
        """Blame the nodes for which the ranks have left before they trained; True with some."""
        record = files.read(PreflightRecord, attempt.full_preflight)
        if not record or not record.failed:
            return False
        preflight.log_record(record)
        self._blame(attempt, record.failed)
        return True

    def _blame(
        self, attempt: Attempt, failed: Mapping[str, str], *, is_remark: bool = False
    ) -> None:
        by = bad_nodes.BY_PREFLIGHT
        try:
            bad_nodes.mark_bad(attempt, self._job_id, failed, by, is_remark=is_remark)
        except OSError as error:
            log.warning(f"cannot record the nodes that have failed: {error.strerror} [CD1302]")

    def _run_lines(self, attempt: Attempt) -> int:
        """Run the script's lines, which start the tasks; returns their exit code."""
        if not self._signals.were_held and self._is_due():
            self._handle(["USR1"])
        self._hear_of_end()
        if self._is_ending:
            return 128 + signal.SIGTERM
        if self._is_stopped or (self._unsent and not self._spec.program.sees_marks):
            return EXIT_PAUSED  # asked before there was anything to stop
        lines = subprocess.Popen(
            [*_interpreter(self._script), str(self._script)],
            env=self._environment(attempt),
            stdin=subprocess.DEVNULL,
            preexec_fn=_dying_with_this(),  # noqa: PLW1509 -- threads only wait then
        )
        step = Step(lines.pid, attempt)
        try:
            if not is_rehearsal(os.environ):
                self._watch_step(attempt, step)
                if self._allocation:
                    self._watch_nodes(attempt, step)
            if self._spec.silence:
                self._watch_output(attempt, step)
            code = self._await(lines, step)
        finally:
            if lines.poll() is None:  # a fault of ours: no verdict stands beside living tasks
                step.signal(signal.SIGTERM)
                lines.wait()
        if step.process():  # started in the background
            log.info("the script's lines have ended before its tasks, which end with them")
            step.signal(signal.SIGTERM)
            return code or EXIT_FAILED
        if code and not step.has_begun:
            self._name_set_up(code)
        return code

    def _is_due(self) -> bool:
        """Return whether Slurm's signal ahead of the time limit may have come before Python."""
        if not (self._spec.signal or "").startswith("B:") or is_rehearsal(os.environ):
            return False
        try:
            left = slurm.seconds_left(slurm_job_name(os.environ, self._job_id))
        except SlurmError:
            return False
        return left is not None and left <= self._spec.signal_lead

    def _environment(self, attempt: Attempt) -> dict[str, str]:
        """Return the variables of the script's lines, and so of the tasks."""
        environ = {
            "PYTHONUNBUFFERED": "1",  # what a rank prints reaches its log line by line
            **os.environ,
            BATCH_VARIABLE: self._job_id,
            # Lets the ranks of this attempt recognise each other: torch's store is open to all.
            NONCE_VARIABLE: secrets.token_hex(16),
            ATTEMPT_VARIABLE: str(attempt.number),
            **self._place_of_code(),
        }
        # Ranks of a job from inside which this one was submitted are not ours, nor is its CPU
        # binding; bash in POSIX mode would know less of what people write.
        others = {*RANK_VARIABLES, "POSIXLY_CORRECT"}
        for name in environ.copy():
            if name in others or name.startswith(("TORCHELASTIC_", "SLURM_CPU_BIND")):
                del environ[name]
        port = free_master_port(int(self._job_id), self._restart, self._starts)
        environ["MASTER_PORT"] = str(port)
        if self._spec.node_checks == FULL_PREFLIGHT:
            environ[FULL_PREFLIGHT_VARIABLE] = "1"
        if self._allocation:
            environ[SPARES_VARIABLE] = str(self._spec.resources.spare_nodes)
            environ[NODES_VARIABLE] = ",".join(self._nodes)
        return environ

    def _place_of_code(self) -> dict[str, str]:
        """Return the variables by which a COMMAND's Python imports the copy of what it is of."""
        nothing = {CODE_VARIABLE: "", CODE_OF_VARIABLE: ""}  # not another job's, which submitted it
        folder = History.read(self._run).folder or os.environ.get("SLURM_SUBMIT_DIR", "")
        if not (self._run.code.is_dir() and folder):
            return nothing
        try:
            top = self._run.top_of_code(Path(folder))
        except IndexError:  # given to sbatch by hand, from a folder that is no such
            return nothing
        return {CODE_VARIABLE: os.path.realpath(self._run.code), CODE_OF_VARIABLE: str(top)}

    def _await(self, lines: "subprocess.Popen[bytes]", step: Step) -> int:
        while (code := lines.poll()) is None:
            has_begun = step.has_begun or step.process() is not None
            self._signals.wait(None if has_begun and not self._unsent else _LOOK_SECONDS)
            self._handle(self._signals.take())
            if self._unsent and step.process():
                for name in self._unsent.copy():
                    number = signal.Signals[f"SIG{name}"]
                    if step.listens(number):
                        step.signal(number)
                        self._unsent.remove(name)
        return code if code >= 0 else 128 - code

    def _handle(self, names: list[str]) -> None:
        """Take signals: the ranks learn of them by a mark, a COMMAND by the signal itself."""
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
                name = "USR1"  # noqa: PLW2901 -- srun itself takes the other two
            marked = self._attempt is not None and _mark(self._attempt.stop)
            if not (marked and self._spec.program.sees_marks):
                self._unsent.append(name)

    def _stop(self, by: str) -> None:
        """Record that a person ends the run by a signal to the script, as by 'clusterddp stop'."""
        self._is_stopped = True
        number = self._attempt.number if self._attempt else None
        with contextlib.suppress(OSError):
            events.add(
                self._run.events, events.StopAsked(job_id=self._job_id, attempt=number, by=by)
            )
            if self._attempt:
                self._attempt.ask_to_stop("stop")

    def _watch_step(self, attempt: Attempt, step: Step) -> None:
        """End the step where srun waits for a message that was lost, from a thread of its own."""
        spec = self._spec
        job = slurm_job_name(os.environ, self._job_id)
        grace = patience.STEP_OF_AGENTS_ENDS if spec.max_restarts else patience.STEP_ENDS
        self._watch(step_watch.watch, attempt, job, spec.world_size, step.srun, grace)

    def _watch_nodes(self, attempt: Attempt, step: Step) -> None:
        """End the step once it has lost a node, and note lost spares; from a thread of its own."""
        of_step = {*self._nodes}
        nodes = spares.NodeWatch(attempt, self._others(), self._idle())

        def watch() -> None:
            while lost := spares.await_loss(nodes, step.may_run):
                self._note_lost(attempt, lost)
                if of_step.intersection(lost):
                    job = slurm_job_name(os.environ, self._job_id)
                    spares.end_step(attempt, job, lost, step.srun)
                    return

        self._watch(watch)

    def _watch_output(self, attempt: Attempt, step: Step) -> None:
        """Print the ranks' stacks once they print nothing, from a thread of its own."""
        spec = self._spec

        def end() -> None:
            name = step_watch.step_name(attempt, slurm_job_name(os.environ, self._job_id))
            if is_rehearsal(os.environ) or not name:
                step.signal(signal.SIGTERM)
            else:  # its tasks have KillWait to end
                slurm.cancel(name)

        ending = end if spec.end_silent else None
        self._watch(
            step_watch.watch_output, attempt, spec.world_size, (spec.silence or 0) * 60, ending
        )

    def _watch(self, watch: Callable[P, object], *args: P.args, **more: P.kwargs) -> None:
        """Run a watch of the attempt in a thread of its own."""
        self._watches.append(threading.Thread(target=watch, args=args, kwargs=more, daemon=True))
        self._watches[-1].start()

    def _await_watches(self) -> None:
        """Wait for the threads of the attempt before, which end as it is superseded by now.

        A process is forked with Python's code ahead of its program: no thread should hold a lock.
        """
        deadline = time.monotonic() + _WATCHES_SECONDS
        while self._watches:
            self._watches.pop().join(max(0.0, deadline - time.monotonic()))


def _dying_with_this() -> Callable[[], None]:
    """Return what has a child begin without ignored signals, and end with this process.

    Whoever started the script may ignore some as well, as a shell has what it starts by & do.
    """
    parent = os.getpid()
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}

    def begin() -> None:
        for number in numbers:  # what is ignored from the start stays so in bash
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)

    return begin


def _interpreter(script: Path) -> list[str]:
    """Return the words of a script's first line, as the kernel reads them: one or two."""
    with script.open(errors="surrogateescape") as file:
        return file.readline().removeprefix("#!").strip().split(maxsplit=1) or ["/bin/bash"]


def _mark(path: Path) -> bool:
    """Make a file, or return False."""
    try:
        if not path.exists():
            path.touch()
    except OSError:
        return False
    return True


def preflight_ports(job_id: int, restart: int, starts: int = 0) -> list[int]:
    """Return the ports on which the batch host and the probes may listen ahead of the tasks.

    Of those that a site opens for the ranks, but none that these may take.
    """
    return [master_port(job_id, starts, restart, candidate) for candidate in _OF_PREFLIGHT]


def free_master_port(job_id: int, restart: int, starts: int = 0) -> int:
    """Choose the port on which rank 0 will listen: jobs that share a node get different ones.

    starts: attempts that this start of the job has begun before.
    From the job id, and moved on while somebody listens there.
    """
    listening = listening_ports()
    ports = [master_port(job_id, starts, restart, candidate) for candidate in _OF_RANKS]
    return next((port for port in ports if port not in listening), ports[-1])
