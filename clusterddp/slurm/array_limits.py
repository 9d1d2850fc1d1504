"""Bounds that a site sets to job arrays."""

import re
from dataclasses import dataclass

from clusterddp.slurm.client import output_of, slurm_conf


@dataclass(frozen=True)
class ArrayLimits:
    """Bounds of a job array as Slurm's settings have them; None where there is none or no word."""

    size: int | None = None
    """MaxArraySize of slurm.conf: an index is below it."""
    tasks: int | None = None
    """max_array_tasks of SchedulerParameters."""
    jobs: int | None = None
    """MaxJobCount of slurm.conf: jobs that slurmctld can hold, of all users."""
    submitted: int | None = None
    """MaxSubmitJobs of the user's associations and their QOS: jobs queued and running at once."""
    present: int = 0
    """Jobs of this user that are queued and running, elements of arrays each."""


def array_limits(account: str = "") -> ArrayLimits:
    """Return the bounds of an array submitted now; `submitted` only where the site enforces it.

    account: the one to be charged; the user's default one where empty.
    """
    import getpass

    settings = dict(re.findall(r"^(\w+)\s*=\s*(\S+)", slurm_conf(), re.MULTILINE))
    number = {name: int(text) for name, text in settings.items() if text.isdecimal()}
    tasks = re.search(r"\bmax_array_tasks=(\d+)", settings.get("SchedulerParameters", ""))
    submitted, present = None, 0
    if {"limits", "safe"} & {*settings.get("AccountingStorageEnforce", "").lower().split(",")}:
        where = [f"user={getpass.getuser()}", *([f"account={account}"] if account else [])]
        shown = ["sacctmgr", "-n", "-P", "show", "assoc", *where, "format=MaxSubmitJobs"]
        bounds = [int(line) for line in output_of(shown).split() if line.isdecimal()]
        submitted = max(bounds, default=None)  # of several accounts, which one is not known here
        if bounds:
            present = len(output_of(["squeue", "-h", "-r", "--me", "-o", "%i"]).split())
    return ArrayLimits(
        number.get("MaxArraySize"),
        int(tasks[1]) if tasks else None,
        number.get("MaxJobCount"),
        submitted,
        present,
    )
