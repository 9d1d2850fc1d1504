"""The error with which a task's own command ended, as far as the command has left word of it.

Either in torch's error file, which `torch.distributed.elastic.multiprocessing.errors.record`
writes, or as the traceback with which Python ends. All of it is the command's text: bounded, and
made printable.
"""

import json
import os
import re
import stat
from pathlib import Path

from clusterddp.errors import EXIT_FAILED, EXIT_PAUSED
from clusterddp.run.records import TaskError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Tells torch's `record` where to write (torch 2.15, elastic/multiprocessing/errors)."""
PEER_LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "communicator was aborted",
    "Socket Timeout",
    "failed to recv, got 0 bytes",
)
"""Messages of torch when the other end of an exchange has gone: gloo finds its sockets reset or
closed, NCCL aborts or times out."""
LONGEST_MESSAGE = 4000
_LONGEST_TYPE = 200
_MOST_FILE_BYTES = 1 << 20
_LOG_TAIL_BYTES = 1 << 18
# torch raises RuntimeError and classes of its own; a ConnectionResetError can be a download's.
_TORCHS_ERROR = re.compile(r"RuntimeError|(?:torch\.distributed\.)?Dist\w*Error")
_HEADER = "Traceback (most recent call last):"
# torch's excepthook puts it before each line once there is a process group.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_EXCEPTION = re.compile(r"(?P<type>[^\W\d][\w.]*)(?:: (?P<message>.*))?", re.DOTALL)
# Of the file that Python was given: it never ran, so there is no traceback.
_NO_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): .*")


class Traces:
    """Sources that tell of the error that ends a command; made before the command starts."""

    def __init__(self, error_file: Path | None, log: int = 2) -> None:
        """error_file: for torch's `record`; a former one is removed. log: descriptor of stderr."""
        self._error_file, self._log = error_file, log
        self._log_start: int | None = None
        if error_file:
            try:
                error_file.unlink(missing_ok=True)
            except OSError:
                self._error_file = None
        try:
            seen = os.fstat(log)
        except OSError:
            return
        if stat.S_ISREG(seen.st_mode):  # under srun, submitit and agents alike
            self._log_start = seen.st_size

    def error(self, status: int) -> TaskError | None:
        """The error behind the command's wait status; None where nothing tells of one."""
        code = os.waitstatus_to_exitcode(status)
        if code in (0, EXIT_PAUSED):
            return None
        error = parse_error_file(self._error_file) if self._error_file else None
        if error is None and code == EXIT_FAILED:  # as of a Python that an exception has ended
            error = parse_traceback(self._read_log())
        return error

    def _read_log(self) -> str:
        """The end of what the command has printed, if that went to a file."""
        if self._log_start is None:
            return ""
        try:
            with Path(f"/proc/self/fd/{self._log}").open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, end - _LOG_TAIL_BYTES))
                return file.read(_LOG_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""


def is_peer_loss(error: BaseException) -> bool:
    """Return whether torch failed because another rank had gone."""
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in PEER_LOST)


def parse_error_file(path: Path) -> TaskError | None:
    """Parse what torch's `record` wrote; None where there is nothing, or something else."""
    try:
        # Whatever lies there is the command's: no link is followed, and no pipe waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            seen = os.fstat(descriptor)
            if not stat.S_ISREG(seen.st_mode) or seen.st_size > _MOST_FILE_BYTES:
                return None
            content: object = json.loads(file.read(_MOST_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    message = content.get("message") if isinstance(content, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    if not isinstance(message, str) or not message.strip():
        return None
    found = _EXCEPTION.fullmatch(message.strip())
    return _error(found["type"], found["message"]) if found else _error("", message)


def parse_traceback(log: str) -> TaskError | None:
    """The exception of a log's last traceback; None without one."""
    lines = [_RANK.sub("", line) for line in log.splitlines()]
    headers = [number for number, line in enumerate(lines) if line == _HEADER]
    if not headers:
        candidates = [line for line in lines if _NO_SYNTAX.fullmatch(line)][-1:]
    else:
        # Frames are indented, and the exception is the first line that is not.
        candidates = [line for line in lines[headers[-1] + 1 :] if line and line[0] not in " \t"][
            :1
        ]
    found = _EXCEPTION.fullmatch(candidates[0]) if candidates else None
    return _error(found["type"], found["message"]) if found else None


def _error(kind: str, message: str | None) -> TaskError:
    text = _printable(message or "")[:LONGEST_MESSAGE]
    lost = bool(_TORCHS_ERROR.fullmatch(kind)) and any(mark in text for mark in PEER_LOST)
    return TaskError(_printable(kind)[:_LONGEST_TYPE], text, lost, of_command=True)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)
