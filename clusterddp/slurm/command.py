"""Calls of Slurm's commands, within a bound on their time; those that change a job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from clusterddp.errors import SlurmError
from clusterddp.slurm.forms import NONCE_VARIABLE, RANK_VARIABLES

if TYPE_CHECKING:
    import subprocess

QUERY_SECONDS = 15.0
_QUERY_PREFIXES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SCONTROL_")
UNREACHABLE = re.compile(
    r"Socket timed out|Unable to contact|connect failure|connection (?:refused|timed out)"
    # What scontrol says of a job when its controller refuses the connection (22.05).
    r"|Unexpected message received"
    r"|Communication connection failure|Zero Bytes were transmitted|Slurm backup controller",
    re.IGNORECASE,
)
_CONFIGURATION = (
    "SLURM_CONF SLURM_CONF_SERVER SLURM_CLUSTERS SLURM_JWT SLURM_SACK_JWKS SLURM_SACK_KEY"
)
"""Variables that name the Slurm to speak to, and the key: a login shell has these as well."""
_JOB_PREFIXES = "SLURM_ SLURMD_ SBATCH_ SRUN_ SALLOC_ PMI TORCHELASTIC_ OMPI_COMM_WORLD_"
_DEVICES = "CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK"
"""Slurm sets them in a job that was given devices; elsewhere they are the user's own choice."""


class RequeueRefused(SlurmError):
    """This cluster, or this job, allows no requeue; carries scontrol's words."""


def ask(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    seconds: float | None = None,
    stdin: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command that shows, tries or cancels jobs.

    environ: os.environ by default. seconds: QUERY_SECONDS by default. Raises SlurmError when the
    command is missing or silent.
    """
    import subprocess

    environ = os.environ if environ is None else environ
    seconds = QUERY_SECONDS if seconds is None else seconds
    # A user's own SQUEUE_PARTITION, say, would hide jobs: seen on 22.05.
    plain = {n: v for n, v in environ.items() if not n.startswith(_QUERY_PREFIXES)}
    try:
        answer = call(argv, plain, seconds, stdin)
    except FileNotFoundError:
        raise SlurmError(f"no {argv[0]} on PATH: this machine has no Slurm") from None
    except OSError as error:
        raise SlurmError(f"{argv[0]} does not start: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(
            f"{argv[0]} gave no answer within {seconds:g} s: is the Slurm controller down? "
            "Try 'scontrol ping'"
        ) from None
    if answer.returncode and UNREACHABLE.search(answer.stderr):
        raise SlurmError(f"{argv[0]}: {answer.stderr.strip()}")
    return answer


def call(
    argv: Sequence[str], environ: Mapping[str, str], seconds: float, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as from a login shell; raises what subprocess.run does."""
    import subprocess

    return subprocess.run(
        [_program(argv[0], environ), *argv[1:]],
        env=submission_environment(environ),
        input=stdin if stdin is not None else "",
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )


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


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which sbatch runs, as a login shell would have it.

    SBATCH_* would override the script's directives, and the SLURM_* and rank variables of a
    surrounding job would reach the new one (an inherited SLURM_CPU_BIND crowds its tasks).
    """
    kept, prefixes = _CONFIGURATION.split(), tuple(_JOB_PREFIXES.split())
    dropped = {*RANK_VARIABLES, NONCE_VARIABLE}
    if "SLURM_JOB_ID" in environ:
        dropped.update(_DEVICES.split())
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not (name.startswith(prefixes) or name in dropped)
    }


def _program(name: str, environ: Mapping[str, str]) -> str:
    """Return the program's path on the given environment's PATH, not on this process's."""
    import shutil

    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    if path is None:
        raise FileNotFoundError(name)
    return path


def _refusal(argv: Sequence[str], answer: subprocess.CompletedProcess[str]) -> SlurmError:
    words = answer.stderr.strip() or f"exit code {answer.returncode}"
    return SlurmError(f"{' '.join(argv)}: {words}")
