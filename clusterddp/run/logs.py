"""Logs of a run: written on a disk that may be full, and divided into attempts.

Every log is appended to by all attempts. The start of an attempt puts a line into each log that
is there, before any of its tasks can write.
"""

import contextlib
import os
import re
import sys
import time
from pathlib import Path

from clusterddp import files
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir

_DIVIDER = re.compile(r"^--- attempt (\d{1,9}), job [^\n]* ---$", re.MULTILINE)
_TAIL_BYTES = 1 << 20


def printed(run: RunDir) -> int:
    """Return how many bytes the ranks, and agents above them, have printed."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(run.logs) as entries:
        for entry in entries:
            if entry.name != run.job_log.name:
                with contextlib.suppress(OSError):
                    total += entry.stat().st_size
    return total


def divide(attempt: Attempt, job_id: str) -> None:
    """Write the line that begins an attempt into the existing logs.

    A log that cannot be written goes without: it must not cost the start.
    """
    if attempt.number == 1:
        return
    line = _divider(attempt.number, job_id)
    with contextlib.suppress(OSError):
        for log in sorted(attempt.run.logs.glob("*.log")):
            with contextlib.suppress(OSError):
                files.append_line(log, line, os.O_NOFOLLOW | os.O_NONBLOCK)


def divide_own(number: int, job_id: str, restarts: int) -> None:
    """Begin a task that its agent has started again within the job, in the log of the task."""
    with contextlib.suppress(OSError):
        line = _divider(number, job_id, f"start {restarts + 1} in it")
        print(line, file=sys.stderr, flush=True)  # noqa: T201 -- the task's own log


def of_attempt(log: Path, number: int) -> str:
    """Read one attempt's part of a log, its last megabyte at most; empty without such a log."""
    text = files.read_tail(log, _TAIL_BYTES).decode(errors="replace")
    begin, end = 0, len(text)
    for divider in _DIVIDER.finditer(text):
        if int(divider[1]) > number:
            end = divider.start()
            break
        begin = divider.end() + 1
    return text[begin:end]


def print_to_job_log(line: str, *, err: bool = False) -> None:
    """Print a line of the job's log, from a process of the batch script.

    Where the disk takes no more, this line and those after it go to slurm-JOBID.out in the folder
    of the submission, where Slurm's users look first; a line that fits nowhere is lost.
    """
    stream = sys.stderr if err else sys.stdout
    data = f"{line}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        stream.flush()
        try:
            while data:
                data = data[os.write(stream.fileno(), data) :]
        except OSError as error:
            _turn_to_submission_folder(stream.fileno(), error)
            os.write(stream.fileno(), data)


def _turn_to_submission_folder(refused: int, error: OSError) -> None:
    """Redirect the descriptor that was refused, and those of the same file, to that folder."""
    job_id = os.environ.get("SLURM_JOB_ID")
    path = Path(os.environ.get("SLURM_SUBMIT_DIR") or ".", f"slurm-{job_id}.out")
    same = [number for number in (1, 2) if os.path.sameopenfile(number, refused)]
    try:
        if not job_id:
            raise FileNotFoundError
        other = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(other, f"clusterddp: the job's log takes no more: {error.strerror}\n".encode())
    except OSError:
        other = os.open(os.devnull, os.O_WRONLY)
    for number in same:
        os.dup2(other, number)
    os.close(other)


def _divider(number: int, job_id: str, start: str = "") -> str:
    words = [f"attempt {number}", f"job {job_id or '(none)'}", start]
    return f"--- {', '.join(filter(None, words))}, {time.strftime('%Y-%m-%d %H:%M')} ---"
