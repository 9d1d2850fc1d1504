"""Reads which release of Slurm answers here, and says it where Slurm lacks what was asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping

from clusterddp.errors import RequestError, SlurmError
from clusterddp.slurm.command import QUERY_SECONDS, ask

EXPEDITE_SINCE = (25, 11)
"""The first release whose sbatch takes --requeue=expedite (its release notes)."""
REQUEUE_AFTER_GRACE_SINCE = (24, 5)
"""The first that itself requeues a preempted job which ends within its grace (slurmctld's
proc_req.c, GRACE_PREEMPT; seen on 24.11.5)."""
# What getopt, and so sbatch, says of an option that another release has.
_NO_SUCH_OPTION = re.compile(r"unrecognized option|doesn't allow an argument|invalid option")


def version(environ: Mapping[str, str]) -> str:
    """The version of sbatch, `22.05.8`; empty where it cannot be told."""
    try:
        answer = ask(["sbatch", "--version"], environ, QUERY_SECONDS)
    except SlurmError:
        return ""
    found = re.search(r"\d+\.\d+(?:\.\d+)?", answer.stdout)
    return found[0] if found else ""


def reaches(version: str, first: tuple[int, int]) -> bool:
    """Return whether a version, such as `22.05.8`, is of that release or a later one."""
    year, month = version.split(".")[:2]
    return (int(year), int(month)) >= first


def check_expedite(environ: Mapping[str, str]) -> None:
    """Refuse --requeue=expedite where Slurm is too old for it; raises RequestError."""
    here = version(environ)
    if here and not reaches(here, EXPEDITE_SINCE):
        since = "{}.{:02}".format(*EXPEDITE_SINCE)
        raise RequestError(
            f"--requeue=expedite came with Slurm {since}; this is Slurm {here}. Use --requeue."
        )


def explained(words: str, script: str, environ: Mapping[str, str]) -> str:
    """sbatch's words with the cause, where they do not name it.

    An option that this release lacks gets the release; an expedited requeue that the site has
    switched off (seen on 26.05: "not supported on this system") the setting that allows it.
    """
    if _NO_SUCH_OPTION.search(words) and (here := version(environ)):
        return f"{words} (this is Slurm {here})"
    if "not supported on this system" in words and "--requeue=expedite" in script:
        return (
            f"{words} (--requeue=expedite needs SlurmctldParameters=enable_expedited_requeue in "
            "this site's slurm.conf; use --requeue)"
        )
    return words
