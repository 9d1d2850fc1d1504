"""Error that ends a task, from what it has left: torch's error file, a traceback, NCCL's words.

Errors that only follow from another rank's end are told apart from those of a rank's own.
"""

import json
import os
import re
import signal
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from clusterddp import files
from clusterddp.errors import EXIT_FAILED, EXIT_PAUSED
from clusterddp.formatting import clean
from clusterddp.run.records import TaskError, announced

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
