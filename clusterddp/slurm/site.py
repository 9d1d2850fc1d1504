"""Slurm's account of a site: its slurm.conf, its partitions' settings, accounting.

The number of nodes and GPUs of a partition is sinfo's to say (`slurm.partitions`).
"""

import os
import pwd
import re

from clusterddp.errors import SlurmError
from clusterddp.slurm.client import ask

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


def partition_settings() -> dict[str, dict[str, str]]:
    """Return the fields of `scontrol show partition` by the partition's name, hidden ones too.

    Raises SlurmError where it does not answer, or fails.
    """
    answer = ask(["scontrol", "-a", "-o", "show", "partition"])
    if answer.returncode:
        raise SlurmError(f"scontrol: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    records = (dict(_FIELD.findall(line)) for line in answer.stdout.splitlines())
    return {record["PartitionName"]: record for record in records if "PartitionName" in record}


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
