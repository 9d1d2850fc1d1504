"""Small parent of a task: starts the task, outlives it, and records how it ended.

It does not import torch, so it needs only a few megabytes and survives what kills the task.
`outcome` interprets the records for the whole run.

If a task reports no error itself, its error is taken from torch's error file, a traceback, or the
messages of NCCL's watchdog. Errors caused by the loss of another rank are distinguished from the
rank's own errors.
"""

import contextlib
import json
import os
import re
import resource
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from clusterddp import files, log, polling
from clusterddp.errors import (
    CODE_AT_END,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    ClusterDDPError,
    TrainingError,
    coded,
    is_debuggers_quit,
)
from clusterddp.formatting import clean
from clusterddp.processes.hardware import MAX_FILES
from clusterddp.processes.signals import GilWatch, Relay, die_with_parent, send
from clusterddp.processes.table import accepts_signal
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.ranks.variables import host_name
from clusterddp.run.attempt import Attempt, write_restart_divider
from clusterddp.run.records import TaskError, announced
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.memory_keeper import MemoryKeeper
from clusterddp.worker.task_record import TaskRecord

# Signals that Slurm, an agent or a user sends to a task; they must not end its parent.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


gil_watch: GilWatch | None = None
"""Watch of this task by its parent; None without such a parent."""
_reports: int | None = None
"""Pipe to this task's parent, for the error that ends the task."""


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
    began: Callable[[int, TaskRecord], Callable[[], object]] | None = None,
    is_command: bool = False,
    environ: MutableMapping[str, str] = os.environ,
) -> int:
    """Run `child` in a forked process, wait for it and record its outcome in the run directory.

    attempt: the number of this task's attempt, if the launcher created it.
    own_log: redirect the output to the rank's own log.
    listen: installs the child's signal handlers, before any signal can reach it.
    explain: returns the error for a wait status, if the child has execed and reports no error;
        by default from NCCL's watchdog, which ends a process without asking Python.
    record: receives the outcome instead of a TaskRecord of this task.
    began: called with the child's process id and its record when it runs; may start threads. The
        function that it returns is called when the child's end is recorded.
    is_command: exit code 0 does not imply success, so a signal is recorded as well that reaches the
        child first, and this process only after the child's end.
    environ: variables of the child, which names the memory for its snapshots.

    Returns the child's exit code, 128 + N for signal N, and 0 for EXIT_STOPPED under Slurm or an
    agent, which would otherwise end the other ranks. `child` may exec. Import nothing that starts
    threads before: it forks. Raises TrainingError if the log is not writable.
    """
    if own_log:
        _redirect_output(run_dir, env)
    raise_open_files()
    explain = explain or Traces().abort
    global gil_watch
    run, gil_watch = RunDir(run_dir), GilWatch()
    record, own = record or TaskRecord(run, env, attempt), attempt and Attempt(run, attempt)
    if own:
        _begin_again(own, env.rank)
    memory = MemoryKeeper(environ)
    task = _Forked(child, listen, own.stop if own and is_command else None, record, memory)
    with Relay(SIGNALS, task.pass_on) as relay:
        task.fork(relay)
        record.record_start(task.pid)
        ended = began(task.pid, record) if began else None
        status = _await_end(task.pid, env, record, is_command and not task.forwards)
        record.note_step(memory.end())
        error = task.reported()
        status = record.record_end(status, lambda status: error or explain(status))
        if ended:  # here, because a signal could end this process later
            ended()
        code = os.waitstatus_to_exitcode(status)
        memory.close(code, error.code if error else "")
        if (failed := code not in (0, EXIT_STOPPED)) and own:
            _requeue_if_lost(own, env)
        record.close(failed)
    code = 0 if code == EXIT_STOPPED and not task.forwards else code
    return code if code >= 0 else 128 - code


def _requeue_if_lost(attempt: Attempt, env: DistEnv) -> None:
    from clusterddp.worker import lost_script  # seldom needed

    lost_script.requeue_if_lost(attempt, env)


def raise_open_files() -> None:
    """Raise the soft limit of open files, usually 1,024; see setrlimit(2).

    Rank 0's store has two connections per rank.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _redirect_output(run_dir: Path, env: DistEnv) -> None:
    """Redirect this rank's output to its own log, which srun does but a torchrun agent does not.

    Raises TrainingError if the log cannot be written.
    """
    run = RunDir(run_dir)
    try:
        run.make(run.logs)
        descriptor = os.open(run.rank_log(env.rank), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise TrainingError(
            f"rank {env.rank} on {os.uname().nodename} cannot write its log "
            f"{run.rank_log(env.rank)}: {error.strerror}. Choose a --runs-dir that every host "
            "can write. [CD0504]"
        ) from None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


def _begin_again(attempt: Attempt, rank: int) -> None:
    """Divide the log if an agent has restarted the task within its attempt; remove its old dump."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    if restarts.isdigit() and int(restarts):
        write_restart_divider(attempt.number, os.environ.get("SLURM_JOB_ID", ""), int(restarts))
        with suppress(OSError):
            attempt.nccl_trace(rank).unlink(missing_ok=True)


def forwards_signals(environ: Mapping[str, str]) -> bool:
    """Return whether the parent must forward signals to the task.

    Slurm signals every process of a step, and torchrun the process group of a worker, so there the
    task receives the signal itself. Otherwise only the parent is signalled.
    """
    return "SLURM_STEP_ID" not in environ and "TORCHELASTIC_RUN_ID" not in environ


def _await_end(pid: int, env: DistEnv, record: TaskRecord, waits_for_signal: bool) -> int:
    """Wait for the child, and return its status; log when it is stopped or continued.

    waits_for_signal: after exit code 0, wait briefly for a signal to record.

    Adopted orphans are reaped: podman waits for its container's monitor process, and a zombie still
    counts as running.
    """
    while True:
        seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)
        assert seen  # only WNOHANG returns without one
        is_success = seen.si_code == os.CLD_EXITED and seen.si_status == 0
        if (
            waits_for_signal and is_success and seen.si_pid == pid
        ):  # before reaping: its ignored signals can still be read
            polling.wait_until(
                lambda: record.has_signal, polling.SIGNAL_SECONDS, every=polling.CHILD_POLL_SECONDS
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
    """Forked process of a task, with a pipe to start it and a pipe for its error."""

    def __init__(
        self,
        child: Callable[[], int],
        listen: Callable[[], object] | None,
        stop: Path | None,
        record: TaskRecord,
        memory: MemoryKeeper,
    ) -> None:
        """Take the child's function, its signal handlers, its record and its memory.

        stop: file that exists if a COMMAND was asked to stop before its start. The signal has then
        reached only srun, or would kill the COMMAND at its start.
        """
        self._child, self._listen, self._stop, self._record = child, listen, stop, record
        self._memory = memory
        self.forwards = forwards_signals(os.environ)
        self._mask: set[int] = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        self._reports = os.pipe()  # closed on exec, as all of Python's descriptors
        self._go = os.pipe()
        self.pid = 0

    def fork(self, relay: Relay) -> None:
        """Fork the process; it continues when both sides have their handlers.

        Until then no signal ends this process, and the child loses none.
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
        """Record a signal, and forward it if the process has not received it directly."""
        if accepts_signal(self.pid, number):
            self._record.note_signal(number)
        if number == signal.SIGTERM:
            self._memory.note_term()
        if self.forwards and not (number == signal.SIGINT and _in_foreground()):
            send(number, [self.pid])

    def reported(self) -> TaskError | None:
        """Read the reported error without blocking: a grandchild may still hold the pipe."""
        reader = self._reports[0]
        os.set_blocking(reader, False)
        with contextlib.suppress(BlockingIOError, ValueError), os.fdopen(reader, "rb") as file:
            return files.load(TaskError, json.loads(file.read() or b"null"))
        return None

    def _begin(self, parent: int) -> NoReturn:
        """Run the child's side of the fork: reset signals, run, report, exit without cleanup."""
        code = EXIT_FAILED
        try:
            for number in SIGNALS:
                # SIGHUP stays ignored if nohup ignores it; SIGINT raises KeyboardInterrupt again.
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
            code = EXIT_STOPPED if is_stopped else _run(self._child, self._mask)
            sys.stdout.flush()
            sys.stderr.flush()
        except KeyboardInterrupt:  # a second one, during the handling of the first
            code = EXIT_INTERRUPTED
        finally:
            # Skips the parent's exit handlers, and destructors of a process group, which may hang
            # after the loss of a peer.
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
    """Report the error that ends this task to its parent, if any; call it once, in any thread."""
    if _reports is None:
        return
    # It must fit into the pipe's buffer: the parent reads only after the task's end.
    message = str(error)[:MAX_MESSAGE]
    peer_lost = bool(getattr(error, "peer_lost", False))
    # clusterddp's errors need no type; for others the type is half the message.
    kind, code = type(error).__name__, ""
    if isinstance(error, ClusterDDPError):
        kind, code = "", error.code
    os.write(_reports, json.dumps(vars(TaskError(kind, message, peer_lost, code=code))).encode())


def _in_foreground() -> bool:
    """Return whether a Ctrl-C reaches the child directly, in the terminal's foreground group."""
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file to which torch's `record` writes (torch 2.15, elastic/multiprocessing/errors)."""
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
"""Messages of torch when a peer is lost: gloo finds its sockets reset or closed, NCCL aborts or
times out, or the store does not answer while a communicator is set up (torch 2.4 to 2.15)."""
# NCCL's message for a cause on this host, which follows the system error.
_OWN_FAULTS = ("shared memory segment",)
MAX_MESSAGE = 4000
_MAX_TYPE = 200
_MAX_FILE_BYTES = 1 << 20
_LOG_TAIL_BYTES = 1 << 18
# torch raises RuntimeError and its own classes; a ConnectionResetError may come from a download.
_TORCHS_ERROR = re.compile(r"RuntimeError|(?:torch\.distributed\.)?Dist\w*Error")
_HEADER = "Traceback (most recent call last):"
_ANOTHER = "During handling of the above exception, another exception occurred:"
_MAX_TRACEBACKS = 100
# Prefix of each line by torch's excepthook while there is a process group.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"(?P<type>[^\W\d][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)
# ProcessGroupNCCL's messages when it gives up (torch 2.4 to 2.15). It always prints the second
# one, and the first only if it throws.
_NCCL_WATCHDOG = (
    re.compile(r"watchdog thread terminated with exception: (?:\[Rank \d+\] )?(.+)"),
    re.compile(r"Terminating the process after attempting to dump debug info, due to (.+)"),
)
# A syntax error in Python's main file: it never ran, so there is no traceback.
_NO_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): .*")
# `python -m` of a missing module (runpy): a single line without a traceback.
_NO_MODULE = re.compile(
    r"\S*python\S*: (?:Error while finding module specification for .+"
    r" \(ModuleNotFoundError: (?P<package>.+)\)|(?P<module>No module named .+))"
)


class Traces:
    """Sources of the error that ends a command; created before the command starts."""

    def __init__(self, error_file: Path | None = None, log: int = 2) -> None:
        """Remove an old `error_file` of torch's `record`; `log` is the descriptor of stderr."""
        self._error_file, self._log = error_file, log
        self._log_start: int | None = None
        if error_file:
            try:
                error_file.unlink(missing_ok=True)
            except OSError:
                self._error_file = None
        with suppress(OSError):
            status = os.fstat(log)
            if stat.S_ISREG(status.st_mode):  # as with srun, submitit and agents
                self._log_start = status.st_size

    def error(self, status: int) -> TaskError | None:
        """Return the error that led to the command's wait status; None if none is found."""
        code = os.waitstatus_to_exitcode(status)
        if code in (0, EXIT_STOPPED):
            return None
        error = parse_error_file(self._error_file) if self._error_file else None
        if error or code != EXIT_FAILED:
            return error or self.abort(status, of_command=True)
        # Exit code 1 of a Python program: ended by an exception.
        return parse_traceback(self._tail())

    def abort(self, status: int, *, of_command: bool = False) -> TaskError | None:
        """Return why NCCL's watchdog ended the process; None if something else did."""
        if os.waitstatus_to_exitcode(status) != -signal.SIGABRT:
            return None
        return parse_abort(self._tail(), of_command=of_command)

    def _tail(self) -> str:
        if self._log_start is None:
            return ""
        log = Path(f"/proc/self/fd/{self._log}")
        return files.read_tail(log, _LOG_TAIL_BYTES, since=self._log_start).decode(errors="replace")


def is_peer_loss(error: BaseException) -> bool:
    """Return whether torch failed because it lost another rank."""
    return isinstance(error, RuntimeError) and _names_lost_peer(str(error))


def _names_lost_peer(message: str) -> bool:
    if any(fault in message for fault in _OWN_FAULTS):
        return False
    return any(mark in message for mark in PEER_LOST)


def parse_error_file(path: Path) -> TaskError | None:
    """Parse the file of torch's `record`; None if it is missing or has another content."""
    try:
        # The command controls this path: follow no link, and do not block on a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
                return None
            content: object = json.loads(file.read(_MAX_FILE_BYTES))
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

    If it is a launcher's, which only reports a failed child, use the child's error above it.
    """
    lines = [_RANK.sub("", line) for line in log.splitlines()]
    headers = [number for number, line in enumerate(lines) if line == _HEADER][-_MAX_TRACEBACKS:]
    error = _exception(lines, headers[-1]) if headers else _startup_error(lines)
    if error is None or not _is_of_launcher(error):
        return error
    while headers and lines[max(headers[-1] - 2, 0)] == _ANOTHER:  # the launcher's
        headers.pop()
    above = [*(_exception(lines, header) for header in headers[:-1]), _startup_error(lines)]
    causes = [each for each in above if each and not _is_of_launcher(each)]
    first = [each for each in causes if not each.peer_lost]
    return (first or causes or [error])[-1]


def _exception(lines: Sequence[str], header: int) -> TaskError | None:
    """Parse the exception after a traceback's header."""
    # Frames are indented, and the exception is the first line that is not.
    below = range(header + 1, len(lines))
    first = next((at for at in below if lines[at] and lines[at][0] not in " \t"), None)
    text = "" if first is None else "\n".join(announced(lines[first:]))
    exception = _EXCEPTION.fullmatch(text)
    return _error(exception["type"], exception["message"]) if exception else None


def _startup_error(lines: Sequence[str]) -> TaskError | None:
    """Parse an error of Python's startup, which has no traceback."""
    if refused := [line for line in lines if _NO_SYNTAX.fullmatch(line)]:
        return _exception(refused, len(refused) - 2)
    missing = [found for line in lines if (found := _NO_MODULE.fullmatch(line))]
    if not missing:
        return None
    return _error("ModuleNotFoundError", missing[-1]["package"] or missing[-1]["module"])


def _is_of_launcher(error: TaskError) -> bool:
    """Return whether an exception comes from a launcher whose child has failed."""
    name = error.type.rpartition(".")[2]
    of_python = name == "CalledProcessError" and re.search(r"python|torchrun", error.message)
    return name == "ChildFailedError" or bool(of_python)


def parse_abort(log: str, *, of_command: bool = False) -> TaskError | None:
    """Parse the exception with which NCCL's watchdog ended the process; None without one.

    The watchdog is a thread of torch. It ends the process by SIGABRT if a collective times out or
    loses a peer, but also after an error of this rank's own GPU.
    """
    said = next((lines for words in _NCCL_WATCHDOG if (lines := words.findall(log))), None)
    if not said:
        return None
    text = clean(said[-1])[:MAX_MESSAGE]
    return TaskError("NCCL's watchdog", text, _names_lost_peer(text), of_command)


def _error(kind: str, message: str | None) -> TaskError:
    whole = clean(message or "")
    ours = CODE_AT_END.search(whole) if kind.startswith("clusterddp.") else None
    text = whole[: min(MAX_MESSAGE, ours.start() if ours else MAX_MESSAGE)]
    lost = bool(_TORCHS_ERROR.fullmatch(kind)) and _names_lost_peer(text)
    code = ours[1] if ours else ""
    return TaskError(clean(kind)[:_MAX_TYPE], text, lost, of_command=True, code=code)
