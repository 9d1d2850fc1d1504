"""Slurm's account of a site: slurm.conf, settings of its partitions, bounds of arrays, accounting.

The number of nodes and GPUs of a partition is sinfo's to say (`slurm.partitions`).
"""

import contextlib
import grp
import os
import pwd
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from clusterddp.errors import SlurmError
from clusterddp.slurm.client import ask, output_of, slurm_conf

_LINE = re.compile(r"^(\w+)\s*=[ \t]*(.*?)\s*$", re.MULTILINE)
_FIELD = re.compile(r"(?:^| )([A-Za-z]+)=(\S*)")


def configuration() -> dict[str, str]:
    """Return slurm.conf as slurmctld has it, by key. Raises SlurmError where it does not answer.

    scontrol's exit code is that of a ping at the end, and says nothing of what it printed before.
    """
    answer = ask(["scontrol", "show", "config"])
    settings: dict[str, str] = {}
    for key, value in _LINE.findall(answer.stdout):
        settings.setdefault(key, "" if value == "(null)" else value)
    if "SLURM_VERSION" not in settings:
        words = answer.stderr.strip() or f"exit code {answer.returncode}"
        raise SlurmError(f"scontrol show config: {words}")
    return settings


def cluster_name(environ: Mapping[str, str]) -> str:
    """Return ClusterName of slurm.conf; empty where there is no Slurm, or it does not answer."""
    if name := environ.get("SLURM_CLUSTER_NAME"):  # a job has it
        return name
    try:
        return configuration().get("ClusterName", "")
    except SlurmError:
        return ""


def partition_settings() -> dict[str, dict[str, str]]:
    """Return the fields of `scontrol show partition` by the partition's name, hidden ones too.

    Raises SlurmError where it does not answer, or fails.
    """
    answer = ask(["scontrol", "-a", "-o", "show", "partition"])
    if answer.returncode:
        raise SlurmError(f"scontrol: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    records = (dict(_FIELD.findall(line)) for line in answer.stdout.splitlines())
    return {record["PartitionName"]: record for record in records if "PartitionName" in record}


def why_closed(
    partition: Mapping[str, str], groups: Collection[str], accounts: Collection[str]
) -> str:
    """Return why a partition takes no job of a user, by its settings; empty where it may.

    groups, accounts: the user's; none where they are not known. sbatch does not always refuse such
    a job: seen on 24.11 with EnforcePartLimits=NO, where one of a user who is in none of
    AllowGroups is queued, and waits for ever. 22.05 refuses it.
    """
    for key, own in (("AllowGroups", groups), ("AllowAccounts", accounts)):
        allowed = partition.get(key, "ALL")
        if own and not {"ALL", *own} & set(allowed.split(",")):
            return f"{key}={allowed}: none of these is yours"
    return ""


def groups() -> set[str]:
    """Return the names of this user's groups; none of root's, whom no partition keeps out."""
    names = set[str]()
    if os.getuid() == 0:
        return names
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.getuid())
        for group in os.getgrouplist(user.pw_name, user.pw_gid):
            with contextlib.suppress(KeyError):
                names.add(grp.getgrgid(group).gr_name)
    return names


def check_accounting() -> None:
    """Raise SlurmError, with sacct's words, where it cannot show jobs that have ended."""
    answer = ask(["sacct", "-P", "-n", "-X", "-S", "now", "-o", "JobIDRaw"])
    if answer.returncode:
        raise SlurmError(answer.stderr.strip() or f"sacct: exit code {answer.returncode}")


def accounts() -> list[str]:
    """Return the accounts that this user can charge; none where there is no accounting."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        argv = ["sacctmgr", "-n", "-P", "show", "associations", f"user={user}", "format=Account"]
        answer = ask(argv)
    except (KeyError, SlurmError):
        return []
    return [] if answer.returncode else list(dict.fromkeys(answer.stdout.split()))


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
