"""Lines for the job's log, from a process of the batch script, on a disk that may take none."""

import contextlib
import os
import sys
from pathlib import Path


def say(line: str, *, err: bool = False) -> None:
    """Print a line of the job's log.

    Where the log cannot be written, what follows goes to the file in which Slurm's users look
    first, slurm-JOBID.out in the folder of the submission; a line that fits nowhere is lost.
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
    """Let the descriptor that was refused, and those of the same file, lead there."""
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
