"""Calls of Slurm's commands: the program that is meant, its environment, its bound."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from clusterddp.errors import SlurmError
from clusterddp.slurm.submission_env import submission_environment

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


def ask(
    argv: Sequence[str], environ: Mapping[str, str], seconds: float, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that shows, tries or cancels jobs; SlurmError when it is missing or silent."""
    import subprocess

    # A person's own SQUEUE_PARTITION, say, would hide jobs from us: seen on 22.05.
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


def _program(name: str, environ: Mapping[str, str]) -> str:
    """The program's path on the given environment's PATH, not on this process's."""
    import shutil

    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    if found is None:
        raise FileNotFoundError(name)
    return found
