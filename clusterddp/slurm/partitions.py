"""The cluster's partitions, as one call of sinfo shows them: nodes, CPUs, GPUs, time limits."""

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from clusterddp.errors import SlurmError
from clusterddp.slurm.client import ask
from clusterddp.slurm.forms import gpus_of, time_seconds

PATIENCE_SECONDS = 1.0
"""Time that a submission has for the answer, from the moment of the question."""
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
        self._deadline = time.monotonic() + PATIENCE_SECONDS
        self._asking = threading.Thread(target=self._ask, daemon=True)
        self._asking.start()

    def answer(self) -> dict[str, Partition]:
        """Return the partitions by name; none where no Slurm has answered in time."""
        self._asking.join(max(self._deadline - time.monotonic(), 0.0))
        return self._partitions

    def _ask(self) -> None:
        with contextlib.suppress(SlurmError):
            self._partitions = read(self._environ, PATIENCE_SECONDS)


def read(
    environ: Mapping[str, str] | None = None, seconds: float | None = None
) -> dict[str, Partition]:
    """Return the partitions by name, as sinfo shows them; see `ask` for the defaults.

    Raises SlurmError where it does not answer, or fails.
    """
    answer = ask(_SINFO, environ, seconds)
    if answer.returncode:
        raise SlurmError(f"sinfo: {answer.stderr.strip() or f'exit code {answer.returncode}'}")
    return parse(answer.stdout.splitlines())


def parse(lines: Iterable[str]) -> dict[str, Partition]:
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
