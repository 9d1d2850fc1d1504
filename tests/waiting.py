"""Waiting for processes and for what they do, each wait with a bound."""

import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from clusterddp.processes.signals import die_with_parent

PATIENCE = 150


def wait_for(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def wait_until(process: "subprocess.Popen[str]", shown: str = "images/s") -> str:
    """Read what a process prints until it has printed `shown`. Return all of it."""
    assert process.stdout
    text = ""
    while shown not in text:
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        assert ready, f"it has not said {shown!r}: {text}"
        chunk = os.read(process.stdout.fileno(), 1 << 16)  # past Python's buffer
        assert chunk, f"it has ended: {text}{process.stderr.read() if process.stderr else ''}"
        text += chunk.decode()
    return text


def dying_with_us() -> Callable[[], None]:
    """For Popen's preexec_fn: a test run that is killed leaves no training behind."""
    own = os.getpid()
    return lambda: die_with_parent(own)


def has_gone(pid: int) -> bool:
    """Whether a process has gone, or goes within the time that a test waits."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], PATIENCE)[0])
    finally:
        os.close(handle)


def processes_in(folder: Path) -> list[str]:
    """The processes whose working directory it is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found
