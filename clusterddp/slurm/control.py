"""Changes to a queued or running job: cancel, signal its script, requeue."""

import os
from collections.abc import Mapping

from clusterddp.errors import SlurmError
from clusterddp.slurm.command import QUERY_SECONDS, ask


class RequeueRefused(SlurmError):
    """This cluster, or this job, allows no requeue; carries scontrol's words."""


def cancel(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Cancel a job. One that Slurm has forgotten is passed over, as scancel itself does.

    Raises SlurmError with scancel's own words.
    """
    environ = os.environ if environ is None else environ
    answer = ask(["scancel", job_id], environ, QUERY_SECONDS)
    if answer.returncode:
        words = answer.stderr.strip() or f"exit code {answer.returncode}"
        raise SlurmError(f"scancel {job_id}: {words}")


def signal_script(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Send USR1 to a job's batch script alone. Raises SlurmError with scancel's own words."""
    environ = os.environ if environ is None else environ
    answer = ask(["scancel", "--batch", "--signal=USR1", job_id], environ, QUERY_SECONDS)
    # For a job that does not run, scancel complains and may yet exit with 0.
    if answer.returncode or "error" in answer.stderr.lower():
        words = answer.stderr.strip() or f"exit code {answer.returncode}"
        raise SlurmError(f"scancel --batch --signal=USR1 {job_id}: {words}")


def forbid_requeue(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Take a job's leave to be requeued away. Raises SlurmError with scontrol's own words."""
    environ = os.environ if environ is None else environ
    answer = ask(["scontrol", "update", f"JobId={job_id}", "Requeue=0"], environ, QUERY_SECONDS)
    if answer.returncode:
        words = answer.stderr.strip() or f"exit code {answer.returncode}"
        raise SlurmError(f"scontrol update JobId={job_id} Requeue=0: {words}")


def requeue(job_id: str, environ: Mapping[str, str] | None = None) -> None:
    """Put a job back into the queue; one that is there already stays.

    Raises RequeueRefused where that is not allowed, SlurmError where Slurm does not answer.
    """
    environ = os.environ if environ is None else environ
    answer = ask(["scontrol", "requeue", job_id], environ, QUERY_SECONDS)
    words = f"{answer.stdout} {answer.stderr}".strip()
    if answer.returncode and "pending execution" not in words:
        raise RequeueRefused(words or f"scontrol requeue: exit code {answer.returncode}")
