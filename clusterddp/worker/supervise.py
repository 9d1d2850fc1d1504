"""The small parent of a task: starts the task, outlives it, and records how it ended.

It stays free of torch, so that it costs a few megabytes and survives what kills the task. What
the records mean for the whole run is left to `outcome`.

The error of a task that reports none itself is read from what it has left: torch's error file, a
traceback, the words of NCCL's watchdog. Errors that only follow from another rank's end are told
apart from those of a rank's own.
"""

import contextlib
import json
import os
import re
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from clusterddp.formatting import clean
from clusterddp.processes.signals import GilWatch, Relay, die_with_parent, send
from clusterddp.processes.table import accepts_signal
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name
from clusterddp.run.attempt import Attempt, write_restart_divider
from clusterddp.run.outcome import TaskRecord
from clusterddp.run.records import TaskError, announced
from clusterddp.run.run_dir import RunDir

# Signals that Slurm, an agent or a user sends to a task, and that must not end its parent.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


gil_watch: GilWatch | None = None
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
    global gil_watch
    run, gil_watch = RunDir(run_dir), GilWatch()
    record, own = record or TaskRecord(run, env, attempt), attempt and Attempt(run, attempt)
    if own:
        _divide_log(own)
    task = _Forked(child, listen, own.stop if own and is_command else None, record)
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

            lost_script.requeue_if_lost(own, env)
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
        write_restart_divider(attempt.number, os.environ.get("SLURM_JOB_ID", ""), int(restarts))


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
                lambda: record.has_signal, patience.LATE_SIGNAL, every=patience.CHILD_PAUSE
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
            record.note_continued()
        host = host_name(os.environ)
        log.info(f"process {pid}, rank {env.rank} on {host}, {change}")


class _Forked:
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
        if gil_watch:
            gil_watch.watch(self.pid)
        relay.hand_over(self.pid)
        relay.listen()
        os.close(self._go[1])  # the child continues

    def pass_on(self, number: int, _earlier: int) -> None:
        """Note a signal, and send it to the process where it has not got it by itself."""
        if accepts_signal(self.pid, number):
            self._record.note_signal(number)
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


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Tells torch's `record` where to write (torch 2.15, elastic/multiprocessing/errors)."""
PEER_LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Timed out waiting",
    "wait timeout after",
    "remote process exited",
    "communicator was aborted",
    "Socket Timeout",
    "failed to recv, got 0 bytes",
    "Watchdog caught collective operation timeout",
    "collective timeout or exception",
    "watchdog hang",
    "timed out in blocking wait",
    "remote error detected from rank",
    "NCCL timeout when waiting for nonblocking call",
    "ncclRemoteError",
    "ncclSystemError",
    "unhandled system error",
)
"""Messages of torch when the other end of an exchange has gone: gloo finds its sockets reset or
closed, NCCL aborts or times out, and a communicator is set up through a store in which nobody
answers (torch 2.4 to 2.15)."""
# NCCL's words for a cause of this host's own, below the system error that it leads to.
_OWN_FAULTS = ("shared memory segment",)
LONGEST_MESSAGE = 4000
_LONGEST_TYPE = 200
_MOST_FILE_BYTES = 1 << 20
_LOG_TAIL_BYTES = 1 << 18
# torch raises RuntimeError and classes of its own; a ConnectionResetError can be a download's.
_TORCHS_ERROR = re.compile(r"RuntimeError|(?:torch\.distributed\.)?Dist\w*Error")
_HEADER = "Traceback (most recent call last):"
_ANOTHER = "During handling of the above exception, another exception occurred:"
_MOST_TRACEBACKS = 100
# torch's excepthook puts it before each line once there is a process group.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"(?P<type>[^\W\d][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)
# ProcessGroupNCCL's words as it gives up, logged and printed again by C++ (torch 2.4 to 2.15); the
# latter alone where it does not throw, and of any exception the same.
_NCCL_WATCHDOG = (
    re.compile(r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(.+)"),
    re.compile(r"Terminating the process after attempting to dump debug info, due to (.+)"),
)
# Of the file that Python was given: it never ran, so there is no traceback.
_NO_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): .*")
# Of `python -m`, whose module is not there (runpy): in a line of its own, without a traceback.
_NO_MODULE = re.compile(
    r"\S*python\S*: (?:Error while finding module specification for .+"
    r" \(ModuleNotFoundError: (?P<package>.+)\)|(?P<module>No module named .+))"
)


class Traces:
    """Sources that tell of the error that ends a command; made before the command starts."""

    def __init__(self, error_file: Path | None = None, log: int = 2) -> None:
        """error_file: for torch's `record`; a former one is removed. log: descriptor of stderr."""
        self._error_file, self._log = error_file, log
        self._log_start: int | None = None
        if error_file:
            try:
                error_file.unlink(missing_ok=True)
            except OSError:
                self._error_file = None
        with suppress(OSError):
            status = os.fstat(log)
            if stat.S_ISREG(status.st_mode):  # under srun, submitit and agents alike
                self._log_start = status.st_size

    def error(self, status: int) -> TaskError | None:
        """Find the error behind the command's wait status; None where nothing tells of one."""
        code = os.waitstatus_to_exitcode(status)
        if code in (0, EXIT_PAUSED):
            return None
        error = parse_error_file(self._error_file) if self._error_file else None
        if error or code != EXIT_FAILED:
            return error or self.abort(status, of_command=True)
        # As of a Python that an exception has ended, whose output went to a file.
        return parse_traceback(self._tail())

    def abort(self, status: int, *, of_command: bool = False) -> TaskError | None:
        """Find why NCCL's watchdog has ended the process; None where something else has."""
        if os.waitstatus_to_exitcode(status) != -signal.SIGABRT:
            return None
        return parse_abort(self._tail(), of_command=of_command)

    def _tail(self) -> str:
        if self._log_start is None:
            return ""
        log = Path(f"/proc/self/fd/{self._log}")
        tail = files.read_tail(log, _LOG_TAIL_BYTES, since=self._log_start)
        return tail.decode(errors="replace")


def is_peer_loss(error: BaseException) -> bool:
    """Return whether torch failed because another rank had gone."""
    return isinstance(error, RuntimeError) and _blames_a_peer(str(error))


def _blames_a_peer(message: str) -> bool:
    if any(fault in message for fault in _OWN_FAULTS):
        return False
    return any(mark in message for mark in PEER_LOST)


def parse_error_file(path: Path) -> TaskError | None:
    """Parse what torch's `record` wrote; None where there is nothing, or something else."""
    try:
        # Whatever lies there is the command's: no link is followed, and no pipe waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_FILE_BYTES:
                return None
            content: object = json.loads(file.read(_MOST_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str) or not message.strip():
        return None
    exception = _EXCEPTION.fullmatch(message.strip())
    return _error(exception["type"], exception["message"]) if exception else _error("", message)


def parse_traceback(log: str) -> TaskError | None:
    """Parse the exception of a log's last traceback; None without one.

    A launcher's own says no more than that a child of it has failed, whose error stands above it.
    """
    lines = [_RANK.sub("", line) for line in log.splitlines()]
    headers = [number for number, line in enumerate(lines) if line == _HEADER][-_MOST_TRACEBACKS:]
    error = _exception(lines, headers[-1]) if headers else _never_ran(lines)
    if error is None or not _is_of_launcher(error):
        return error
    while headers and lines[max(headers[-1] - 2, 0)] == _ANOTHER:  # of the launcher itself
        headers.pop()
    above = [*(_exception(lines, header) for header in headers[:-1]), _never_ran(lines)]
    causes = [each for each in above if each and not _is_of_launcher(each)]
    first = [each for each in causes if not each.peer_lost]
    return (first or causes or [error])[-1]


def _exception(lines: Sequence[str], header: int) -> TaskError | None:
    """Parse the exception below a traceback's header."""
    # Frames are indented, and the exception is the first line that is not.
    below = range(header + 1, len(lines))
    first = next((at for at in below if lines[at] and lines[at][0] not in " \t"), None)
    text = "" if first is None else "\n".join(announced(lines[first:]))
    exception = _EXCEPTION.fullmatch(text)
    return _error(exception["type"], exception["message"]) if exception else None


def _never_ran(lines: Sequence[str]) -> TaskError | None:
    """Parse why Python did not start what it was given, which it says without a traceback."""
    if refused := [line for line in lines if _NO_SYNTAX.fullmatch(line)]:
        return _exception(refused, len(refused) - 2)
    missing = [found for line in lines if (found := _NO_MODULE.fullmatch(line))]
    if not missing:
        return None
    return _error("ModuleNotFoundError", missing[-1]["package"] or missing[-1]["module"])


def _is_of_launcher(error: TaskError) -> bool:
    """Return whether an exception is that of a launcher whose child has failed."""
    name = error.type.rpartition(".")[2]
    of_python = name == "CalledProcessError" and re.search(r"python|torchrun", error.message)
    return name == "ChildFailedError" or bool(of_python)


def parse_abort(log: str, *, of_command: bool = False) -> TaskError | None:
    """Parse the exception with which NCCL's watchdog has ended its process; None without one.

    That thread of torch's ends the whole process by SIGABRT: where an exchange has timed out or
    lost its other end, but also for an error of this rank's own GPU.
    """
    said = next((lines for words in _NCCL_WATCHDOG if (lines := words.findall(log))), None)
    if not said:
        return None
    text = clean(said[-1])[:LONGEST_MESSAGE]
    return TaskError("NCCL's watchdog", text, _blames_a_peer(text), of_command)


def _error(kind: str, message: str | None) -> TaskError:
    text = clean(message or "")[:LONGEST_MESSAGE]
    lost = bool(_TORCHS_ERROR.fullmatch(kind)) and _blames_a_peer(text)
    return TaskError(clean(kind)[:_LONGEST_TYPE], text, lost, of_command=True)
