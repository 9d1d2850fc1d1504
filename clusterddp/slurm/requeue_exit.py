"""slurm.conf's RequeueExit and RequeueExitHold: exit codes for which Slurm requeues a job."""

import os
import re
from collections.abc import Mapping

from clusterddp.slurm.command import QUERY_SECONDS, ask

_SETTING = re.compile(r"^(RequeueExit(?:Hold)?)\s*=\s*([\d,-]+)\s*$", re.MULTILINE)


def settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """The settings that this cluster has, as slurm.conf writes them: `RequeueExit=1-9,18`.

    Raises SlurmError where Slurm could not be asked.
    """
    environ = os.environ if environ is None else environ
    answer = ask(["scontrol", "show", "config"], environ, QUERY_SECONDS)
    return [f"{name}={codes}" for name, codes in _SETTING.findall(answer.stdout)]


def names(setting: str, exit_code: int) -> bool:
    """Return whether a setting lists that exit code: `RequeueExit=1-9,18` has 3 and 18."""
    for part in setting.partition("=")[2].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and int(first) <= exit_code <= int(last or first):
            return True
    return False
