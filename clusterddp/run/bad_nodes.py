"""Bad nodes, in a file of the output root that all its runs share.

A node is blamed with what was measured or seen, and is left out of the next starts until a person
clears it or its time is over. It is left out of a job only as far as the partition has enough other
nodes for the request.

The node of a rank that died of an error that names hardware is one (docs/bad-nodes.md). Only what a
library or the kernel says of the hardware counts. A program's own exception, an error that a wrong
kernel gives as well, and the loss of a peer name no node.
"""

import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp import files, log, patience
from clusterddp.errors import OptionError, SlurmError, coded
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.run import events
from clusterddp.run.attempt import Attempt
from clusterddp.run.history import History, PastAttempt
from clusterddp.run.records import TaskError
from clusterddp.slurm import site
from clusterddp.slurm.forms import hosts_of
from clusterddp.slurm.site import Node, features_of

BY_PREFLIGHT = "preflight"
"""It failed a check ahead of the tasks or of the first step, or answered none."""
BY_LOSS = "lost"
"""It was lost while tasks ran there."""
BY_HARDWARE = "hardware"
"""A rank there died of something that names hardware (`hardware`)."""
BY_REPETITION = "repetition"
"""Ranks crashed there again that got further elsewhere."""
BY_STRAGGLING = "straggling"
"""It was slow with several ranks, which were slow nowhere else."""

FILE_NAME = "bad-nodes.jsonl"
_MODE = 0o666
"""Less the umask: people can share an output root."""
_SAME_SECONDS = 1.0
"""Most between a run's event and the line of the list that was written with it."""
_DECIDING = {
    *("batch", "constraint", "contiguous", "cores-per-socket", "cpus-per-gpu", "exclude"),
    *("extra-node-info", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"),
    *("licenses", "mem", "mem-per-cpu", "mem-per-gpu", "mincpus", "nodefile", "nodelist", "nodes"),
    *("ntasks-per-gpu", "partition", "prefer", "reservation", "sockets-per-node", "switches"),
    *("threads-per-core", "tmp"),
}
"""Options of sbatch that decide which nodes can serve a job, besides those that are looked at."""


@dataclass(frozen=True)
class BadNode:
    """Node that is left out, or, with `expires` 0, that was cleared."""

    host: str
    reason: str = ""
    by: str = ""
    run: str = ""
    job_id: str = ""
    attempt: int | None = None
    time: float = 0.0
    expires: float = 0.0


def mark_bad(
    attempt: Attempt, job_id: str, nodes: Mapping[str, str], by: str, *, is_remark: bool = False
) -> None:
    """Record nodes as bad, in the run's events and in the output root. Raises OSError.

    nodes: what was measured or seen, by the node's name. is_remark: the attempt goes on all
    the same, so that its verdict has nothing to do with them, and the event names no attempt.
    """
    if not nodes:
        return
    run, now = attempt.run, time.time()
    number = None if is_remark else attempt.number
    events.add(run.events, events.NodesMarkedBad(job_id=job_id, attempt=number, nodes=nodes, by=by))
    spec = run.read_spec()
    expires = now + (spec or JobSpec).avoid_bad_nodes_for
    for host, reason in nodes.items():
        node = BadNode(host, reason, by, run.name, job_id, attempt.number, now, expires)
        files.append_json_line(run.path.parent / FILE_NAME, vars(node), _MODE)


def clear(root: Path, hosts: Collection[str]) -> None:
    """Take nodes off the list of an output root. Raises OSError."""
    for host in hosts:
        files.append_json_line(root / FILE_NAME, vars(BadNode(host, time=time.time())), _MODE)


def read(root: Path) -> dict[str, BadNode]:
    """Return the nodes of an output root that are bad now, by name. Raises OSError."""
    now = time.time()
    return {host: node for host, node in _latest(root).items() if node.expires > now}


def known(root: Path) -> set[str]:
    """Return every node that was ever blamed in an output root. Raises OSError."""
    return set(_latest(root))


def read_for(history: History) -> dict[str, BadNode]:
    """Return the nodes that a run avoids: the list's, and those that it has blamed itself."""
    now = time.time()
    return {host: node for host, node in _latest_for(history).items() if node.expires > now}


def known_to(history: History) -> set[str]:
    """Return every node that was ever blamed in a run's output root, or by the run."""
    return set(_latest_for(history))


def _latest_for(history: History) -> dict[str, BadNode]:
    """Join the list and the run's own events, for the list may take no line, or not be readable."""
    latest: dict[str, BadNode] = {}
    try:
        latest = _latest(history.run.path.parent)
    except OSError as error:
        log.info(f"the list of bad nodes cannot be read: {error}")
    run, spec = history.run, history.spec
    seconds = (spec or JobSpec).avoid_bad_nodes_for
    for event in history.every(events.NodesMarkedBad):
        when = event.time or 0.0
        for host, reason in event.nodes.items():
            if host not in latest or when > latest[host].time + _SAME_SECONDS:
                latest[host] = BadNode(
                    host, reason, event.by, run.name, event.job_id, event.attempt, when,
                    when + seconds,
                )  # fmt: skip
    return latest


def _latest(root: Path) -> dict[str, BadNode]:
    return {node.host: node for node in files.read_lines(BadNode, root / FILE_NAME)}


@dataclass(frozen=True)
class Choice:
    """Bad nodes that a job is to leave out, and remarks on those that it cannot."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    """Reasons by name, the latest blamed first."""
    remarks: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Return the line that says what is left out; empty where nothing is."""
        named = "; ".join(f"{host} ({reason})" for host, reason in self.nodes.items())
        return f"left out as bad: {named}. 'clusterddp bad-nodes' lists them" if named else ""


def choose(
    root: Path,
    asked: Resources,
    environ: Mapping[str, str],
    *,
    count: int = 0,
    partition: str = "",
    others: Collection[str] = (),
    seconds: float | None = None,
    history: History | None = None,
) -> Choice:
    """Choose the bad nodes of an output root that a job can leave out; asks sinfo once, if at all.

    count: nodes that the job needs, if other than asked for. partition: of the job; one that asks
    for several can start in any of these next, and names one alone while it runs (seen on 22.05).
    others: sbatch's further options in the request. seconds: bound on sinfo. history: of the run
    whose own blames count too. Where nothing can be told, nothing is left out, and a remark says
    so.
    """
    try:
        bad = read_for(history) if history else read(root)
    except OSError as error:
        return Choice(remarks=(f"bad nodes cannot be read: {error}",))
    if not bad:
        return Choice()
    names = ", ".join(bad)
    why = ""
    if asked.reservation:
        why = f"which nodes reservation {asked.reservation} has is not known"
    elif deciding := sorted(_DECIDING & {*others}):
        why = f"which nodes can serve --{deciding[0]} is not known"
    if why:
        return Choice(remarks=(f"{names} cannot be left out: {why}",))
    if partition and "," in asked.partition:
        partition = f"{partition},{asked.partition}"
    try:
        nodes = site.nodes(partition or asked.partition, environ, seconds)
    except SlurmError as error:
        return Choice(remarks=(f"{names} cannot be left out: {error}",))
    return select_excluded(bad, asked, nodes, count or asked.nodes + asked.spare_nodes)


def choose_for_submission(spec: JobSpec) -> Choice:
    """Choose the bad nodes that a new job leaves out, and log what is, and what cannot be.

    The script stays as asked for: sbatch gets the nodes as an argument, as their time is limited.
    """
    root = Path(spec.run_dir).parent
    if "exclude" in spec.omit_directives or "clusters" in dict(spec.sbatch):
        return Choice()
    choice = choose(
        root, spec.resources, os.environ, others=dict(spec.sbatch), seconds=patience.PARTITIONS * 5
    )
    for remark in choice.remarks:
        log.warning(coded(remark, "CD1303"))
    if choice.nodes:
        log.info(choice.line)
    return choice


def select_excluded(
    bad: Mapping[str, BadNode], asked: Resources, nodes: Sequence[Node], count: int
) -> Choice:
    """Choose, of the nodes of partitions, the bad ones to leave out, the latest blamed first.

    In each partition enough others stay that Slurm can give now: one that is down may be needed
    once it is back.
    """
    demanded, unwanted = set(hosts_of(asked.nodelist)), set(hosts_of(asked.exclude))
    here: dict[str, set[str]] = defaultdict(set)
    fitting: dict[str, set[str]] = defaultdict(set)
    for each in nodes:
        here[each.name].add(each.partition)
        if _fits(each, asked) and each.name not in unwanted:
            fitting[each.partition].add(each.name)
    room = {each.partition: len(fitting[each.partition]) - count for each in nodes}
    chosen: dict[str, str] = {}
    remarks: list[str] = []
    for node in sorted(bad.values(), key=lambda node: node.time, reverse=True):
        if node.host not in here or node.host in unwanted:
            continue  # Slurm would not give it anyway; an unknown name it refuses
        if node.host in demanded:
            remarks.append(f"{node.host} is bad ({node.reason}), but --nodelist demands it")
        elif tight := [p for p in here[node.host] if room[p] < (node.host in fitting[p])]:
            where = f" in {min(tight)}" if len(room) > 1 else ""
            remarks.append(
                f"{node.host} is bad ({node.reason}), but is not left out: of "
                f"{len(fitting[min(tight)])} nodes that fit{where}, the job needs {count}"
            )
        else:
            for partition in here[node.host]:
                room[partition] -= node.host in fitting[partition]
            chosen[node.host] = node.reason
    return Choice(chosen, tuple(remarks))


def reject_bad_nodelist(root: Path, asked: Resources) -> None:
    """Refuse a request whose --nodelist demands a bad node. Raises OptionError."""
    try:
        bad = read(root) if asked.nodelist else {}
    except OSError:
        return
    demanded = [node for host in hosts_of(asked.nodelist) if (node := bad.get(host))]
    if demanded:
        why = "; ".join(f"{node.host} is left out as bad: {node.reason}" for node in demanded)
        names = " ".join(node.host for node in demanded)
        raise OptionError(
            f"--nodelist {asked.nodelist}",
            f": {why}. Take it off the list with 'clusterddp bad-nodes clear {names}', or ask for "
            "others. [CD1303]",
        )


def merge_excludes(
    asked: Resources, before: Sequence[str], chosen: Collection[str], known: Collection[str]
) -> list[str]:
    """Return all nodes that a job is to leave out: the person's, those from elsewhere, the bad.

    before: what the job leaves out so far. known: all that were ever blamed; of these the ones that
    are bad no longer come back.
    """
    own = hosts_of(asked.exclude)
    others = [host for host in before if host not in known]
    return list(dict.fromkeys([*own, *others, *chosen]))


def find_repeat_offender(starts: Sequence[PastAttempt]) -> str:
    """Return the node on which ranks crash that got further elsewhere; empty without one.

    The first failure was there in the last two attempts on it, both had other nodes too, and an
    attempt without it came further than both. Only what can be the hardware's counts
    (`may_be`): an exception of the program says nothing of a node.
    """
    crashed = next((t for t in reversed(starts) if t.failure and t.failure.host in t.nodes), None)
    host = crashed.failure.host if crashed and crashed.failure else ""
    there = [start for start in starts if host and host in start.nodes][-2:]
    if len(there) < 2 or not all(
        start.failure
        and start.failure.host == host
        and len(set(start.nodes)) > 1
        and start.reached is not None
        and may_be_hardware(start.failure.reason, start.failure.exit_code)
        for start in there
    ):
        return ""
    furthest = max(start.reached or 0 for start in there)
    elsewhere = [start.reached or 0 for start in starts if host not in start.nodes]
    return host if max(elsewhere, default=0) > furthest else ""


def straggling(starts: Sequence[PastAttempt]) -> dict[str, str]:
    """Return the nodes that are slow, whatever rank runs there, each with what was seen.

    In the last attempt several ranks of the node were slow to its end, or one was and in an earlier
    attempt another one. One attempt is enough: its ranks are dealt new random shares of the data
    at each epoch, and the next one may well have the same ranks there. A rank that was slow on
    several nodes brings it along, and counts for none; nor does any where more than half of the
    nodes have slow ranks.
    """
    last = starts[-1] if starts else PastAttempt(0)
    if 2 * len({slow.host for slow in last.slow}) > len(set(last.nodes)):
        return {}
    places: dict[int, set[str]] = defaultdict(set)
    for slow in (slow for start in starts for slow in start.slow):
        places[slow.rank].add(slow.host)
    nodes = {}
    for host in dict.fromkeys(slow.host for slow in last.slow if slow.host in last.nodes):
        *earlier, now = (
            [slow for slow in start.slow if slow.host == host and places[slow.rank] == {host}]
            for start in starts
        )
        before = {slow.rank for several in earlier for slow in several}
        lasting = {slow.rank for slow in now if slow.until is None}
        if len(lasting) > 1 or any(before - {slow.rank} for slow in now):
            ranks = sorted(before | {slow.rank for slow in now})
            nodes[host] = (
                f"slow with ranks {', '.join(map(str, ranks))}, in the last attempt at "
                f"{min(slow.share for slow in now):.0%} of the other ranks' median speed"
            )
    return nodes


def _fits(node: Node, asked: Resources) -> bool:
    """Return whether a node can serve the request now, as far as sinfo tells."""
    cpus = (asked.cpus_per_task or 1) * asked.tasks_per_node
    wanted = features_of(asked.constraint)
    return (
        node.is_usable
        and node.cpus >= cpus
        and node.memory >= _megabytes(asked.mem)
        and node.gpus.get(asked.gpu_type, 0) >= asked.gpus_per_node
        and wanted <= node.features
    )


def _megabytes(size: str) -> int:
    """Return the memory of a node that --mem asks for; 0 where it says nothing."""
    if not size:
        return 0
    number, unit = (size[:-1], size[-1].upper()) if size[-1].isalpha() else (size, "M")
    return int(number) * {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}[unit] >> 10


@dataclass(frozen=True)
class Sign:
    """Words that name hardware, and who says so."""

    name: str
    pattern: re.Pattern[str]
    source: str


_TORCHS = re.compile(r"RuntimeError|(?:torch\.)?AcceleratorError|(?:torch\.distributed\.)?Dist\w+")
"""Exceptions by which torch passes on what CUDA and NCCL say."""
_CUDA = r"\A(?:CUDA error|NCCL error|Cuda failure)\b.*?"
_ENUM = "CUDA Runtime API, enum cudaError"
OF_TORCH = (
    Sign(
        "uncorrectable ECC error",
        re.compile(rf"{_CUDA}uncorrectable ECC error encountered", re.DOTALL),
        f"{_ENUM}: cudaErrorECCUncorrectable (214)",
    ),
    Sign(
        "uncorrectable NVLink error",
        re.compile(rf"{_CUDA}uncorrectable NVLink error detected", re.DOTALL | re.IGNORECASE),
        f"{_ENUM}: cudaErrorNvlinkUncorrectable (220)",
    ),
    Sign(
        "GPU system not initialized",
        re.compile(r"\ACUDA error: system not yet initialized"),
        f"{_ENUM}: cudaErrorSystemNotReady (802)",
    ),
    Sign(
        "NCCL system error of the InfiniBand adapter",
        re.compile(
            r"\ANCCL error.*(?:ncclSystemError|unhandled system error).*"
            r"(?:\bibv_\w+ failed|Got async event : (?:local|port|device) )",
            re.DOTALL,
        ),
        "NCCL, src/misc/ibvwrap.cc and src/transport/net_ib.cc",
    ),
)
"""Words of torch's exceptions. A plain ncclSystemError is what a lost peer gives as well."""
OF_LOG = (
    Sign(
        "Xid",
        re.compile(
            r"^.*NVRM: Xid \(PCI:[0-9a-fA-F:.]+\): (?:48|64|74|79|94|95|119|120|140),.*$",
            re.MULTILINE,
        ),
        "NVIDIA, XID Errors: those that it lays to hardware, not to the application",
    ),
)
"""The kernel's words at the end of a rank's log, where a program or a site prints them there."""
# Below these a path is of the node itself on usual sites; /scratch and /home are often shared.
_LOCAL_EIO = re.compile(
    r"\[Errno 5\] Input/output error: (?P<path>b?['\"]/(?:tmp|var/tmp|local|localscratch)/.*)"
)


def named_hardware(error: TaskError | None, exit_code: int | None, log: str) -> str:
    """Name the hardware of which a rank died; empty where nothing names any.

    error: what its parent recorded. exit_code: its own, as a shell gives it. log: the end of its
    log.
    """
    if exit_code == 128 + signal.SIGBUS:
        return "killed by SIGBUS"
    if exit_code in (None, 0):
        return ""
    if error and error.type == "OSError":
        local = _LOCAL_EIO.search(error.message)
        return f"I/O error of the local disk: {local['path'][:200]}" if local else ""
    if error and error.type and not _TORCHS.fullmatch(error.type):
        return ""  # the program's own
    if error and error.type:
        sign = next((each for each in OF_TORCH if each.pattern.search(error.message)), None)
        if sign:
            return f"{sign.name}: {error.message.splitlines()[0][:200]}"
    for sign in OF_LOG:
        if line := sign.pattern.search(log):
            return f"{sign.name}: {line[0].strip()[:200]}"
    return ""


_CRASHES = {128 + getattr(signal, f"SIG{name}") for name in ("SEGV", "ABRT", "ILL", "FPE", "BUS")}
_OF_DEVICE = re.compile(r"(?:RuntimeError|(?:torch\.)?AcceleratorError): (?:CUDA|cuDNN) error\b")


def may_be_hardware(reason: str, exit_code: int | None) -> bool:
    """Return whether a failure can be the hardware's, so that its repetition says something.

    reason: the failure's, as recorded. A signal of a crash and an error of the device can; an
    exception of the program, an exit code of its own and a kill cannot.
    """
    return exit_code in _CRASHES or _OF_DEVICE.match(reason) is not None
