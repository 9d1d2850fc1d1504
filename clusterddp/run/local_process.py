"""Whether the process that controls a run on a workstation is still there."""

import os
from pathlib import Path

from clusterddp.run.submission import Submission


def process_alive(submission: Submission) -> bool | None:
    """Whether the process that controls a local run is there; None for another machine's."""
    return is_alive(submission.pid, submission.host, submission.submitted)


def is_alive(pid: int | None, host: str | None, since: float | None) -> bool | None:
    """Return whether a process of this machine is there; None for another machine's.

    since: when it was there for certain, in seconds of the epoch; one that started later has only
    inherited the number.
    """
    import socket

    if pid is None or host not in (None, socket.gethostname()):
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
        return _answers_signal(pid)  # no /proc: macOS
    except OSError:
        return False  # it ended while being read
    if fields[0] in "ZX":
        return False
    started = _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # The clock can have been set since; a number comes round again only after a long while.
    return since is None or started <= since + 60


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def _answers_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody's process, at least
    return True
