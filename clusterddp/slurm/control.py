"""Changes what becomes of a job: cancels it, signals its script, requeues it."""

import subprocess
from collections.abc import Mapping, Sequence

from clusterddp.errors import SlurmError
from clusterddp.slurm.command import ask


class RequeueRefused(SlurmError):
    """This cluster, or this job, allows no requeue; carries scontrol's words."""


def cancel(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Cancel a job. One that Slurm has forgotten is passed over, as scancel itself does.

    Raises SlurmError with scancel's own words.
    """
    argv = ["scancel", job_id]
    answer = ask(argv, environ)
    if answer.returncode:
        raise _refusal(argv, answer)


def signal_script(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Send USR1 to a job's batch script alone. Raises SlurmError with scancel's own words."""
    argv = ["scancel", "--batch", "--signal=USR1", job_id]
    answer = ask(argv, environ)
    # For a job that does not run, scancel complains and may yet exit with 0.
    if answer.returncode or "error" in answer.stderr.lower():
        raise _refusal(argv, answer)


def forbid_requeue(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Forbid Slurm to requeue a job. Raises SlurmError with scontrol's own words."""
    argv = ["scontrol", "update", f"JobId={job_id}", "Requeue=0"]
    answer = ask(argv, environ)
    if answer.returncode:
        raise _refusal(argv, answer)


def requeue(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Put a job back into the queue; one that is there already stays.

    Raises RequeueRefused where that is not allowed, SlurmError where Slurm does not answer.
    """
    answer = ask(["scontrol", "requeue", job_id], environ)
    words = f"{answer.stdout} {answer.stderr}".strip()
    if answer.returncode and "pending execution" not in words:
        raise RequeueRefused(words or f"scontrol requeue: exit code {answer.returncode}")


def _refusal(argv: Sequence[str], answer: "subprocess.CompletedProcess[str]") -> SlurmError:
    words = answer.stderr.strip() or f"exit code {answer.returncode}"
    return SlurmError(f"{' '.join(argv)}: {words}")
