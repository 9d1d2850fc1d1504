"""Slurm's account of a site: slurm.conf, its partitions and nodes, bounds of arrays, accounting."""

import contextlib
import grp
import os
import pwd
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from clusterddp import patience
from clusterddp.errors import SlurmError
from clusterddp.slurm.client import ask, output_of, slurm_conf
from clusterddp.slurm.forms import gpus_of, time_seconds

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


# Exact (-e): nodes of different CPUs or GPUs stand on lines of their own. Hidden ones (-a) too.
_SINFO = ["sinfo", "-h", "-a", "-e", "-o", "%P|%l|%c|%D|%G"]
# All partitions, of which hidden ones show with -a alone, which goes with no -p (22.05).
_SINFO_NODES = ["sinfo", "-h", "-a", "-N", "-o", "%N|%P|%T|%c|%G|%f|%m"]
# States, and marks behind them, of nodes that Slurm gives to no job now: sinfo(1), NODE STATE
# CODES. It does give those that are powered off (~) or up (#), completing (+) or planned (-).
_NOT_GIVEN = (
    *("drain", "fail", "error", "unk", "future", "inval", "maint", "reboot", "reserved"),
    *("power_down", "powering_down", "blocked", "perfctrs", "no_respond"),
)
_MARKS_NOT_GIVEN = ("!", "%", "$", "@", "^")
_FEATURE = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Partition:
    """Partition, with the most that one of its nodes has; None where that is not known."""

    name: str
    is_default: bool = False
    limit_seconds: int | None = None
    """Longest time of a job; None without a limit."""
    limit: str = ""
    """The same in Slurm's words."""
    nodes: int = 0
    cpus: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Most GPUs of a node by their type; the type is empty for those of all types together."""


class Question:
    """Asks for the partitions beside other work: from its making, for at most a second."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ, self._partitions = environ, dict[str, Partition]()
        self._deadline = time.monotonic() + patience.PARTITIONS
        self._asking = threading.Thread(target=self._ask, daemon=True)
        self._asking.start()

    def answer(self) -> dict[str, Partition]:
        """Return the partitions by name; none where no Slurm has answered in time."""
        self._asking.join(max(self._deadline - time.monotonic(), 0.0))
        return self._partitions

    def _ask(self) -> None:
        with contextlib.suppress(SlurmError):
            self._partitions = read_partitions(self._environ, patience.PARTITIONS)


def read_partitions(
    environ: Mapping[str, str] | None = None, seconds: float | None = None
) -> dict[str, Partition]:
    """Return the partitions by name, as sinfo shows them; see `ask` for the defaults.

    Raises SlurmError where it does not answer, or fails.
    """
    answer = ask(_SINFO, environ, seconds)
    if answer.returncode:
        raise SlurmError(f"sinfo: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    return parse_partitions(answer.stdout.splitlines())


def parse_partitions(lines: Iterable[str]) -> dict[str, Partition]:
    """Read sinfo's lines, one for each kind of node of a partition."""
    partitions: dict[str, Partition] = {}
    for line in lines:
        fields = line.strip().split("|")
        if len(fields) != 5 or not all(number.isdecimal() for number in fields[2:4]):
            continue  # `CLUSTER: name`, or a site's remark
        name, limit, cpus, nodes, gres = fields
        before = partitions.get(name.rstrip("*"), Partition(""))
        gpus = {**before.gpus}
        of_node = gpus_of(gres)
        for kind, count in of_node.items():
            gpus[kind] = max(gpus.get(kind, 0), count)
        partitions[name.rstrip("*")] = Partition(
            name.rstrip("*"),
            name.endswith("*"),
            time_seconds(limit) or None,
            limit,
            before.nodes + int(nodes),
            max(before.cpus, int(cpus)),
            gpus,
        )
    return partitions


@dataclass(frozen=True)
class Node:
    """Node of a partition, as sinfo shows it."""

    name: str
    state: str = "idle"
    """In sinfo's words, `down*` say: the sign of a node that does not answer."""
    cpus: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    memory: int = 0
    """Megabytes."""
    partition: str = ""

    @property
    def is_lost(self) -> bool:
        """Return whether it is down or does not answer."""
        return self.state.startswith("down") or self.state.endswith("*")

    @property
    def is_usable(self) -> bool:
        """Return whether Slurm gives it to jobs."""
        is_given = not self.state.startswith(_NOT_GIVEN)
        return is_given and not self.is_lost and not self.state.endswith(_MARKS_NOT_GIVEN)


def nodes(names: str, environ: Mapping[str, str], seconds: float | None = None) -> list[Node]:
    """Return the nodes of some partitions, or of the default one, once for each that has them.

    names: `gpu,long`; empty for the default. seconds: bound on sinfo's answer. Raises SlurmError.
    """
    answer = ask(_SINFO_NODES, environ, seconds)
    if answer.returncode:
        raise SlurmError(f"sinfo: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    asked, found = names.split(","), list[Node]()
    for line in answer.stdout.splitlines():
        values = line.strip().split("|")
        if len(values) != 7 or not values[3].isdecimal():
            continue  # `CLUSTER: name`, or a site's remark
        name, partition, state, cpus, gres, features, memory = values
        if partition.rstrip("*") in asked or (not names and partition.endswith("*")):
            words = frozenset(features.split(","))
            size = int(memory) if memory.isdecimal() else 0
            found.append(
                Node(name, state, int(cpus), gpus_of(gres), words, size, partition.rstrip("*"))
            )
    return found


def features_of(constraint: str) -> frozenset[str]:
    """Return all features that a constraint names, whatever joins them: a node with all fits."""
    return frozenset(word for word in _FEATURE.findall(constraint) if not word.isdecimal())
