"""The small parent of a task: starts the task, outlives it, and records how it ended.

It stays free of torch, so that it costs a few megabytes and survives what kills the task. What
the records mean for the whole run is left to `outcome`.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from clusterddp import files, log, patience
from clusterddp.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PAUSED,
    ClusterDDPError,
    TrainingError,
    coded,
    is_debuggers_quit,
)
from clusterddp.processes.signals import Pulse, Relay, die_with_parent, send
from clusterddp.processes.table import hears
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name
from clusterddp.run import logs
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import LONGEST_MESSAGE, TaskRecord, Traces
from clusterddp.run.records import TaskError
from clusterddp.run.run_dir import RunDir

# Signals that Slurm, an agent or a user sends to a task, and that must not end its parent.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


pulse: Pulse | None = None
"""Shows the parent of this task that Python runs in it; None where it has no such parent."""
_reports: int | None = None
"""Pipe to the parent of this task, for the error that ends it."""


def supervise(
    run_dir: Path,
    env: DistEnv,
    child: Callable[[], int],
    *,
    attempt: int | None = None,
    own_log: bool = False,
    listen: Callable[[], object] | None = None,
    explain: Callable[[int], TaskError | None] | None = None,
    record: TaskRecord | None = None,
    began: Callable[[int, TaskRecord], None] | None = None,
    is_command: bool = False,
) -> int:
    """Run `child` in a forked process, wait for it and record its outcome in the run directory.

    attempt: the number of the attempt to which this task belongs, where the starting side made it.
    own_log: send what is printed to the rank's own log.
    listen: installs the child's signal handlers, before any signal can reach it.
    explain: the error behind a wait status, where the child has execed and reports none itself;
        by default the words of NCCL's watchdog, which ends a process without asking Python.
    record: takes the outcome in place of a TaskRecord of this task.
    began: is called with the child's process and its record once it runs; may start threads.
    is_command: exit code 0 alone does not say that it is done, so a signal that reaches the child
        first, and this process only once the child has ended, is recorded as well.

    Returns the child's exit code, or 128 + N when signal N ended it; 0 for EXIT_PAUSED where Slurm
    or an agent started the task, as either would end the other ranks for it. `child` may exec.
    Call it before anything that starts threads is imported: it forks. Raises TrainingError when the
    log cannot be written.
    """
    if own_log:
        _redirect_output(run_dir, env)
    explain = explain or Traces().abort
    global pulse
    run, pulse = RunDir(run_dir), Pulse()
    record, own = record or TaskRecord(run, env, attempt), attempt and Attempt(run, attempt)
    if own:
        _divide_log(own)
    task = _Task(child, listen, own.stop if own and is_command else None, record)
    with Relay(SIGNALS, task.pass_on) as relay:
        task.fork(relay)
        record.started(task.pid)
        if began:
            began(task.pid, record)
        status = record.ended(
            _await_end(task.pid, env, record, waits_for_signal=is_command and not task.forwards),
            lambda status: task.reported() or explain(status),
        )
        code = os.waitstatus_to_exitcode(status)
        if code not in (0, EXIT_PAUSED) and own:
            from clusterddp.worker import lost_script  # seldom needed

            lost_script.put_back(own, env)
    if code == EXIT_PAUSED and not task.forwards:
        return 0
    return code if code >= 0 else 128 - code


def _redirect_output(run_dir: Path, env: DistEnv) -> None:
    """Send what this rank prints to its own log, as srun does; a torchrun agent does not.

    Raises TrainingError when the log cannot be written.
    """
    run = RunDir(run_dir)
    try:
        run.make(run.logs)
        descriptor = os.open(run.rank_log(env.rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise TrainingError(
            f"rank {env.rank} on {os.uname().nodename} cannot write its log "
            f"{run.rank_log(env.rank)}: {error.strerror}. Choose an output root that every host "
            "can write. [CD0504]"
        ) from None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _divide_log(attempt: Attempt) -> None:
    """Begin a part of the log where an agent starts the task again within its attempt."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if restarts.isdigit() and int(restarts):
        logs.divide_own(attempt.number, os.environ.get("SLURM_JOB_ID", ""), int(restarts))


def forwards_signals(environ: Mapping[str, str]) -> bool:
    """Return whether a signal to a task's parent has to be passed on to the task.

    Slurm signals every process of a step, and torchrun the process group of a worker, so there
    the task has it already; what a user started by hand is signalled alone.
    """
    return "SLURM_STEP_ID" not in environ and "TORCHELASTIC_RUN_ID" not in environ


def _await_end(pid: int, env: DistEnv, record: TaskRecord, *, waits_for_signal: bool) -> int:
    """Wait for the child, and return its status; log when somebody stops it, as it cannot.

    waits_for_signal: `record` takes a signal that comes shortly after an end with exit code 0.

    Processes that this one has adopted are reaped: podman waits for the end of the one above its
    container, and takes it to live while it is a zombie.
    """
    while True:
        seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)
        assert seen  # only WNOHANG returns without one
        is_success = seen.si_code == os.CLD_EXITED and seen.si_status == 0
        if (
            waits_for_signal and is_success and seen.si_pid == pid
        ):  # not reaped: what it ignores is known
            patience.wait_until(
                lambda: record.is_told, patience.LATE_SIGNAL, every=patience.CHILD_PAUSE
            )
        changed, status = os.waitpid(seen.si_pid, os.WUNTRACED | os.WCONTINUED)
        if changed != pid:
            continue
        if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
            return status
        change = "continues after a stop"
        if os.WIFSTOPPED(status):
            change = "is stopped (SIGSTOP); kill -CONT lets it continue"
        else:
            record.continued()
        host = host_name(os.environ)
        log.info(f"process {pid}, rank {env.rank} on {host}, {change}")


class _Task:
    """The forked process of a task, with a pipe on which it waits and one on which it reports."""

    def __init__(
        self,
        child: Callable[[], int],
        listen: Callable[[], object] | None,
        stop: Path | None,
        record: TaskRecord,
    ) -> None:
        """Take what the process does, which handlers it has, and what keeps it from beginning.

        stop: file that is there where a COMMAND was asked to stop before there was one. The signal
        for that has reached srun alone then, or would end what has not even begun.
        """
        self._child, self._listen, self._stop, self._record = child, listen, stop, record
        self.forwards = forwards_signals(os.environ)
        self._mask: set[int] = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        self._reports = os.pipe()  # closed on exec, as all of Python's descriptors
        self._go = os.pipe()
        self.pid = 0

    def fork(self, relay: Relay) -> None:
        """Begin the process: it continues once both sides have their handlers.

        Until then no signal ends this side, and none is lost to the other.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reports[0])
            os.close(self._go[1])
            self._begin(parent)
        os.close(self._reports[1])
        os.close(self._go[0])
        if pulse:
            pulse.watch(self.pid)
        relay.hand_over(self.pid)
        relay.listen()
        os.close(self._go[1])  # the child continues

    def pass_on(self, number: int, _earlier: int) -> None:
        """Note a signal, and send it to the process where it has not got it by itself."""
        if hears(self.pid, number):
            self._record.told(number)
        if self.forwards and not (number == signal.SIGINT and _in_foreground()):
            send(number, [self.pid])

    def reported(self) -> TaskError | None:
        """Read the error that ended it; not awaited, as a grandchild may still hold the pipe."""
        reader = self._reports[0]
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError, ValueError), os.fdopen(reader, "rb") as file:
            return files.load(TaskError, json.loads(file.read() or b"null"))
        return None

    def _begin(self, parent: int) -> NoReturn:
        """The child's side of the fork: default signals, run, report, leave without clean-up."""
        code = EXIT_FAILED
        try:
            for number in SIGNALS:
                # An ignored SIGHUP is nohup's doing and meant; Python's SIGINT becomes Ctrl-C
                # again.
                if number == signal.SIGINT:
                    signal.signal(number, signal.default_int_handler)
                elif number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            if self._listen:
                self._listen()
            die_with_parent(parent)
            os.read(self._go[0], 1)
            os.close(self._go[0])
            global _reports  # noqa: PLW0603 -- a process has one parent
            _reports = self._reports[1]
            is_stopped = self._stop is not None and self._stop.exists()
            code = EXIT_PAUSED if is_stopped else _run(self._child, self._mask)
            sys.stdout.flush()
            sys.stderr.flush()
        except KeyboardInterrupt:  # a second one, while the first was answered
            code = EXIT_INTERRUPTED
        finally:
            # The parent's exit handlers are not the child's, and a process group that has lost a
            # peer may hang in its destructor.
            os._exit(code)


def _run(child: Callable[[], int], mask: set[int]) -> int:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return child()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return EXIT_FAILED
    except ClusterDDPError as error:
        print(f"clusterddp: {coded(error)}", file=sys.stderr)
        report(error)
        return error.exit_code
    except BaseException as error:
        if is_debuggers_quit(error):
            return EXIT_INTERRUPTED
        traceback.print_exc()
        report(error)
        return EXIT_FAILED


def report(error: BaseException) -> None:
    """Report the error that ends this task to its parent, if it has one; once, from any thread."""
    if _reports is None:
        return
    # It has to fit into the pipe's buffer, or the task would wait for a parent that waits.
    message = str(error)[:LONGEST_MESSAGE]
    peer_lost = bool(getattr(error, "peer_lost", False))
    # Our own errors are clear by themselves; of others the type is half the message.
    kind, code = type(error).__name__, ""
    if isinstance(error, ClusterDDPError):
        kind, code = "", error.code
    os.write(_reports, json.dumps(vars(TaskError(kind, message, peer_lost, code=code))).encode())


def _in_foreground() -> bool:
    """Return whether a Ctrl-C reaches the child by itself: its group is the terminal's."""
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
