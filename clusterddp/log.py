"""Log lines of tasks and commands, through the logger `clusterddp`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging


def info(line: str) -> None:
    """Log a line."""
    _logger().info("%s", line, stacklevel=2)


def warning(line: str) -> None:
    """Log a line with the prefix `warning: `; `line` ends with its code, [CD0123]."""
    _logger().warning("%s", line, stacklevel=2)


@contextmanager
def to(write: Callable[[str], object]) -> Iterator[None]:
    """Pass each line to `write` while the context is open; by default lines go to stderr."""
    global _write  # noqa: PLW0603 -- a process has one log
    before, _write = _write, write
    try:
        yield
    finally:
        _write = before


@contextmanager
def worded(change: Callable[[str], str]) -> Iterator[None]:
    """Change each line before it is written, while the context is open."""
    write = _write
    with to(lambda line: write(change(line))):
        yield


def to_stdout(line: str) -> None:
    """Print a line to a task's log without buffering."""
    print(line, flush=True)  # noqa: T201


def _to_stderr(line: str) -> None:
    text = f"clusterddp: {line}\n"
    stream = sys.__stderr__
    if stream is None or sys.stderr is not stream:  # a notebook's, or a test's
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201
        return
    # Bypass the stream: with a full disk, it would retry at exit, and Python would exit with 120.
    stream.flush()
    os.write(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))


_write: Callable[[str], object] = _to_stderr


@cache
def _logger() -> "logging.Logger":
    """Return the logger with its only handler."""
    import logging  # 5 ms, which a dry run with nothing to log does without

    class Lines(logging.Handler):
        """Handler that drops a line if the disk is full or the log is closed."""

        def emit(self, record: logging.LogRecord) -> None:
            severity = "warning: " if record.levelno >= logging.WARNING else ""
            with suppress(OSError, ValueError):
                _write(f"{severity}{record.getMessage()}")

    logger = logging.getLogger("clusterddp")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(Lines())
    return logger
