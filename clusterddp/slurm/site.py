"""Queries about a site: slurm.conf, partitions and nodes, array limits, accounting."""

import contextlib
import grp
import os
import pwd
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from clusterddp import polling
from clusterddp.errors import SlurmError
from clusterddp.slurm.client import ask, output_of, slurm_conf
from clusterddp.slurm.forms import gpus_of, time_seconds

_LINE = re.compile(r"^(\w+)\s*=[ \t]*(.*?)\s*$", re.MULTILINE)
_FIELD = re.compile(r"(?:^| )([A-Za-z]+)=(\S*)")


def configuration() -> dict[str, str]:
    """Return slurmctld's slurm.conf by key. Raises SlurmError if it does not answer.

    scontrol ends with a ping; its exit code does not invalidate the preceding output.
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
    """Return ClusterName of slurm.conf; empty without Slurm or an answer."""
    if name := environ.get("SLURM_CLUSTER_NAME"):  # set in a job
        return name
    try:
        return configuration().get("ClusterName", "")
    except SlurmError:
        return ""


def partition_settings() -> dict[str, dict[str, str]]:
    """Return the fields of `scontrol show partition` by partition, including hidden ones.

    Raises SlurmError if it fails or does not answer.
    """
    answer = ask(["scontrol", "-a", "-o", "show", "partition"])
    if answer.returncode:
        raise SlurmError(f"scontrol: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    records = (dict(_FIELD.findall(line)) for line in answer.stdout.splitlines())
    return {record["PartitionName"]: record for record in records if "PartitionName" in record}


def why_closed(
    partition: Mapping[str, str], groups: Collection[str], accounts: Collection[str]
) -> str:
    """Return why a partition's settings exclude a user's jobs; empty if they do not.

    groups, accounts: the user's; empty if unknown. sbatch does not always refuse such a job: seen
    on 24.11 with EnforcePartLimits=NO, a job of a user outside AllowGroups is queued and waits
    indefinitely. 22.05 refuses it.
    """
    for key, users in (("AllowGroups", groups), ("AllowAccounts", accounts)):
        allowed = partition.get(key, "ALL")
        if users and not {"ALL", *users} & set(allowed.split(",")):
            return f"{key}={allowed}: none of these is yours"
    return ""


def groups() -> set[str]:
    """Return the names of this user's groups; none for root, whom no partition excludes."""
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
    """Raise SlurmError with sacct's message if it cannot show ended jobs."""
    answer = ask(["sacct", "-P", "-n", "-X", "-S", "now", "-o", "JobIDRaw"])
    if answer.returncode:
        raise SlurmError(answer.stderr.strip() or f"sacct: exit code {answer.returncode}")


def accounts() -> list[str]:
    """Return the accounts that this user can charge; none without accounting."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        argv = ["sacctmgr", "-n", "-P", "show", "associations", f"user={user}", "format=Account"]
        answer = ask(argv)
    except (KeyError, SlurmError):
        return []
    return [] if answer.returncode else list(dict.fromkeys(answer.stdout.split()))


@dataclass(frozen=True)
class ArrayLimits:
    """Limits of a job array in Slurm's settings; None if unset or unknown."""

    size: int | None = None
    """MaxArraySize of slurm.conf; indices must be lower."""
    tasks: int | None = None
    """max_array_tasks of SchedulerParameters."""
    jobs: int | None = None
    """MaxJobCount of slurm.conf: limit of slurmctld's jobs, all users together."""
    submitted: int | None = None
    """MaxSubmitJobs of the user's associations and QOS: limit of queued and running jobs."""
    present: int = 0
    """The user's queued and running jobs, each array task counted."""


def array_limits(account: str = "") -> ArrayLimits:
    """Return the limits of an array submitted now; `submitted` only if the site enforces it.

    account: account to charge; the user's default if empty.
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
        submitted = max(bounds, default=None)  # unknown which of several accounts is charged
        if bounds:
            present = len(output_of(["squeue", "-h", "-r", "--me", "-o", "%i"]).split())
    return ArrayLimits(
        number.get("MaxArraySize"),
        int(tasks[1]) if tasks else None,
        number.get("MaxJobCount"),
        submitted,
        present,
    )


# Exact (-e): one line per combination of CPUs and GPUs. Hidden partitions (-a), too.
_SINFO = ["sinfo", "-h", "-a", "-e", "-o", "%P|%l|%c|%D|%G"]
# All partitions: only -a shows hidden ones, and it excludes -p (22.05).
_SINFO_NODES = ["sinfo", "-h", "-a", "-N", "-o", "%N|%P|%T|%c|%G|%f|%m"]
# States and state suffixes of nodes that Slurm does not allocate now: sinfo(1), NODE STATE CODES.
# It does allocate nodes that are powered off (~), powering up (#), completing (+) or planned (-).
_NOT_GIVEN = (
    *("drain", "fail", "error", "unk", "future", "inval", "maint", "reboot", "reserved"),
    *("power_down", "powering_down", "blocked", "perfctrs", "no_respond"),
)
_MARKS_NOT_GIVEN = ("!", "%", "$", "@", "^")
_FEATURE = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Partition:
    """A partition with the maximum of each resource over its nodes."""

    name: str
    is_default: bool = False
    limit_seconds: int | None = None
    """Longest time of a job; None without a limit."""
    limit: str = ""
    """Time limit in Slurm's format."""
    nodes: int = 0
    cpus: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Highest number of GPUs per node by type; their total under an empty type."""


class Question:
    """Query for the partitions in a thread, for at most a second from construction."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ, self._partitions = environ, dict[str, Partition]()
        self._deadline = time.monotonic() + polling.SINFO_SECONDS
        self._asking = threading.Thread(target=self._ask, daemon=True)
        self._asking.start()

    def answer(self) -> dict[str, Partition]:
        """Return the partitions by name; none if Slurm has not answered in time."""
        self._asking.join(max(self._deadline - time.monotonic(), 0.0))
        return self._partitions

    def _ask(self) -> None:
        with contextlib.suppress(SlurmError):
            self._partitions = read_partitions(self._environ, polling.SINFO_SECONDS)


def read_partitions(
    environ: Mapping[str, str] | None = None, seconds: float | None = None
) -> dict[str, Partition]:
    """Return sinfo's partitions by name; see `ask` for the defaults.

    Raises SlurmError if it fails or does not answer.
    """
    answer = ask(_SINFO, environ, seconds)
    if answer.returncode:
        raise SlurmError(f"sinfo: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    return parse_partitions(answer.stdout.splitlines())


def parse_partitions(lines: Iterable[str]) -> dict[str, Partition]:
    """Parse sinfo's lines, one per kind of node in a partition."""
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
    """A node of a partition, from sinfo."""

    name: str
    state: str = "idle"
    """sinfo's state; `*` marks a node that does not answer, as in `down*`."""
    cpus: int = 0
    gpus: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    memory: int = 0
    """Megabytes."""
    partition: str = ""

    @property
    def is_lost(self) -> bool:
        """True if the node is down or does not answer."""
        return self.state.startswith("down") or self.state.endswith("*")

    @property
    def is_usable(self) -> bool:
        """True if Slurm allocates the node to jobs."""
        is_given = not self.state.startswith(_NOT_GIVEN)
        return is_given and not self.is_lost and not self.state.endswith(_MARKS_NOT_GIVEN)


def nodes(names: str, environ: Mapping[str, str], seconds: float | None = None) -> list[Node]:
    """Return the nodes of some partitions; a node in several of them occurs several times.

    names: `gpu,long`; empty for the default partition. seconds: timeout. Raises SlurmError.
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
    """Return all features in a constraint, whatever its operators: a node with all of them fits."""
    return frozenset(word for word in _FEATURE.findall(constraint) if not word.isdecimal())
