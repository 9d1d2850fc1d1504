"""Bad nodes, in a list that all runs of a runs directory share.

A node is marked bad with a measurement or an observation. The next starts exclude it until the user
clears it or its time is over. A job excludes a node only if its partition has enough others.

The node of a rank that died of a hardware error is marked bad (docs/bad-nodes.md). Only what a
library or the kernel says about hardware counts: a program's own exception, an error that a wrong
kernel causes too, and the loss of a peer point to no node.
"""

import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterddp import files, log, polling
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
"""It failed or did not answer a check before the tasks or the first step."""
BY_LOSS = "lost"
"""It was lost while tasks ran there."""
BY_LAUNCH = "launch"
"""Slurm could not start a task there."""
BY_HARDWARE = "hardware"
"""A rank there died of a hardware error (`named_hardware`)."""
BY_REPETITION = "repetition"
"""Ranks crashed there repeatedly but got further elsewhere."""
BY_STRAGGLING = "straggling"
"""Several ranks were slow there, and nowhere else."""

FILE_NAME = "bad-nodes.jsonl"
_MODE = 0o666
"""Limited by the umask: users can share a runs directory."""
_SAME_SECONDS = 1.0
"""Longest time between a run's event and the line of the list for it."""
_NODE_OPTIONS = {
    *("batch", "constraint", "contiguous", "cores-per-socket", "cpus-per-gpu", "exclude"),
    *("extra-node-info", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"),
    *("licenses", "mem", "mem-per-cpu", "mem-per-gpu", "mincpus", "nodefile", "nodelist", "nodes"),
    *("ntasks-per-gpu", "partition", "prefer", "reservation", "sockets-per-node"),
    *("threads-per-core", "tmp"),
}
"""Further options of sbatch that decide which nodes can serve a job."""


@dataclass(frozen=True)
class BadNode:
    """Node that jobs exclude; with `expires` 0, a node that was cleared."""

    host: str
    reason: str = ""
    by: str = ""
    """Kind of the reason: BY_PREFLIGHT, BY_LOSS and so on."""
    run: str = ""
    """Name of the run that marked it."""
    job_id: str = ""
    attempt: int | None = None
    time: float = 0.0
    """Seconds since the epoch."""
    expires: float = 0.0


def mark_bad(
    attempt: Attempt, job_id: str, nodes: Mapping[str, str], by: str, *, is_remark: bool = False
) -> None:
    """Record nodes as bad, in the run's events and in the runs directory. Raises OSError.

    nodes: measurements or observations by node name. is_remark: the attempt continues, so the
    event names no attempt and does not affect its result.
    """
    if not nodes:
        return
    run, now = attempt.run, time.time()
    number = None if is_remark else attempt.number
    events.add(run.events, events.NodesMarkedBad(job_id=job_id, attempt=number, nodes=nodes, by=by))
    expires = now + (run.read_spec() or JobSpec).avoid_bad_nodes_for
    for host, reason in nodes.items():
        node = BadNode(host, reason, by, run.name, job_id, attempt.number, now, expires)
        files.append_json_line(run.path.parent / FILE_NAME, vars(node), _MODE)


def clear(root: Path, hosts: Collection[str]) -> None:
    """Remove nodes from the list of a runs directory. Raises OSError."""
    for host in hosts:
        files.append_json_line(root / FILE_NAME, vars(BadNode(host, time=time.time())), _MODE)


def read(root: Path) -> dict[str, BadNode]:
    """Return the nodes of a runs directory that are bad now, by name. Raises OSError."""
    now = time.time()
    return {host: node for host, node in _latest(root).items() if node.expires > now}


def read_for(history: History) -> dict[str, BadNode]:
    """Return the nodes that a run avoids: those of the list, and those that it marked itself."""
    now = time.time()
    return {host: node for host, node in _latest_for(history).items() if node.expires > now}


def known_to(history: History) -> set[str]:
    """Return every node that was ever marked bad in a run's runs directory or by the run."""
    return set(_latest_for(history))


def _latest_for(history: History) -> dict[str, BadNode]:
    """Merge the list with the run's events, because the list may not be readable or writable."""
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
    """Bad nodes that a job excludes, and remarks on those that it cannot exclude."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    """Reasons by name, the node that was marked last first."""
    remarks: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Line that names the excluded nodes; empty without any."""
        named = "; ".join(f"{host} ({reason})" for host, reason in self.nodes.items())
        return f"excluded as bad: {named}. 'clusterddp bad-nodes' lists them" if named else ""


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
    """Choose the bad nodes that a job can exclude; runs sinfo at most once.

    count: nodes that the job needs, if not the request's. partition: the job's; a pending job with
    several can start in any of them, but a running one shows only its own (seen on 22.05).
    others: further sbatch options of the request. seconds: timeout of sinfo. history: of the run
    whose own marks count too. If usable nodes cannot be determined, none is excluded, and a remark
    says why.
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
        why = f"it is not known which nodes reservation {asked.reservation} has"
    elif deciding := sorted(_NODE_OPTIONS & {*others}):
        why = f"it is not known which nodes can serve --{deciding[0]}"
    if why:
        return Choice(remarks=(f"{names} cannot be excluded: {why}",))
    if partition and "," in asked.partition:
        partition = f"{partition},{asked.partition}"
    try:
        nodes = site.nodes(partition or asked.partition, environ, seconds)
    except SlurmError as error:
        return Choice(remarks=(f"{names} cannot be excluded: {error}",))
    return select_excluded(bad, asked, nodes, count or asked.nodes + asked.spare_nodes)


def choose_for_submission(spec: JobSpec) -> Choice:
    """Choose the bad nodes that a new job excludes, and log them and those that it cannot.

    The script does not change: sbatch gets the nodes as an argument, because they expire.
    """
    root, sbatch = Path(spec.run_dir).parent, dict(spec.sbatch)
    if "exclude" in spec.omit_directives or "clusters" in sbatch:
        return Choice()
    seconds = polling.SINFO_SECONDS * 5
    choice = choose(root, spec.resources, os.environ, others=sbatch, seconds=seconds)
    for remark in choice.remarks:
        log.warning(coded(remark, "CD1303"))
    if choice.nodes:
        log.info(choice.line)
    return choice


def select_excluded(
    bad: Mapping[str, BadNode], asked: Resources, nodes: Sequence[Node], count: int
) -> Choice:
    """Choose the bad nodes to exclude, the node that was marked last first.

    In each partition, enough usable nodes must remain. A bad node that is down now can be excluded
    too, since it may come back.
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
            continue  # Slurm would not assign it, and rejects unknown names
        if node.host in demanded:
            remarks.append(f"{node.host} is bad ({node.reason}), but --nodelist requires it")
        elif tight := [p for p in here[node.host] if room[p] < (node.host in fitting[p])]:
            where = f" in {min(tight)}" if len(room) > 1 else ""
            remarks.append(
                f"{node.host} is bad ({node.reason}), but is not excluded: of "
                f"{len(fitting[min(tight)])} nodes that fit{where}, the job needs {count}"
            )
        else:
            for partition in here[node.host]:
                room[partition] -= node.host in fitting[partition]
            chosen[node.host] = node.reason
    return Choice(chosen, tuple(remarks))


def reject_bad_nodelist(root: Path, asked: Resources) -> None:
    """Reject a request whose --nodelist requires a bad node. Raises OptionError."""
    try:
        bad = read(root) if asked.nodelist else {}
    except OSError:
        return
    demanded = [node for host in hosts_of(asked.nodelist) if (node := bad.get(host))]
    if demanded:
        why = "; ".join(f"{node.host} is excluded as bad: {node.reason}" for node in demanded)
        names = " ".join(node.host for node in demanded)
        raise OptionError(
            f"--nodelist {asked.nodelist}",
            f": {why}. Take it off the list with 'clusterddp bad-nodes clear {names}', or ask for "
            "others. [CD1303]",
        )


def merge_excludes(
    asked: Resources, before: Sequence[str], chosen: Collection[str], known: Collection[str]
) -> list[str]:
    """Return all nodes that a job excludes: the user's, those set elsewhere, and the bad ones.

    before: nodes that the job excludes so far. known: all that were ever marked bad; of these, the
    ones that are no longer bad are dropped.
    """
    own = hosts_of(asked.exclude)
    return list(dict.fromkeys([*own, *[host for host in before if host not in known], *chosen]))


def find_repeat_offender(starts: Sequence[PastAttempt]) -> str:
    """Return the node on which ranks crash repeatedly but get further elsewhere; empty without one.

    In the last two attempts on it, the first failure was there, and both had other nodes too. An
    attempt without the node got further than both. Only possible hardware failures count
    (`may_be_hardware`): a program's exception says nothing about a node.
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


def find_slow_nodes(starts: Sequence[PastAttempt]) -> dict[str, str]:
    """Return the nodes that are slow whatever rank runs there, with the observation.

    Either several ranks of the node were slow until the last attempt's end, or one was slow in it
    and another one in an earlier attempt. One attempt is enough: each epoch gives its ranks new
    random shares of the data, and the next attempt may place the same ranks there. A rank that was
    slow on several nodes does not count, and no node counts if more than half have slow ranks.
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
                f"{min(slow.relative_speed for slow in now):.0%} of the other ranks' median speed"
            )
    return nodes


def _fits(node: Node, asked: Resources) -> bool:
    """Return whether a node can serve the request now, according to sinfo."""
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
    """Return the memory per node that --mem asks for; 0 without a value."""
    if not size:
        return 0
    number, unit = (size[:-1], size[-1].upper()) if size[-1].isalpha() else (size, "M")
    return int(number) * {"K": 1, "M": 1 << 10, "G": 1 << 20, "T": 1 << 30}[unit] >> 10


@dataclass(frozen=True)
class Sign:
    """Pattern of an error that names hardware, with its source."""

    name: str
    pattern: re.Pattern[str]
    source: str


_TORCH_ERRORS = re.compile(
    r"RuntimeError|(?:torch\.)?AcceleratorError|(?:torch\.distributed\.)?Dist\w+"
)
"""Exceptions with which torch passes on errors of CUDA and NCCL."""
_CUDA = r"\A(?:CUDA error|NCCL error|Cuda failure)\b.*?"
_ENUM = "CUDA Runtime API, enum cudaError"
TORCH_SIGNS = (
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
"""Errors in torch's exceptions. A plain ncclSystemError also follows from a lost peer."""
LOG_SIGNS = (
    Sign(
        "Xid",
        re.compile(
            r"^.*NVRM: Xid \(PCI:[0-9a-fA-F:.]+\): (?:48|64|74|79|94|95|119|120|140),.*$",
            re.MULTILINE,
        ),
        "NVIDIA, XID Errors: those attributed to hardware, not to the application",
    ),
)
"""Kernel messages at the end of a rank's log, if a program or a site prints them there."""
# On usual sites these paths are local to the node; /scratch and /home are often shared.
_LOCAL_EIO = re.compile(
    r"\[Errno 5\] Input/output error: (?P<path>b?['\"]/(?:tmp|var/tmp|local|localscratch)/.*)"
)


def named_hardware(error: TaskError | None, exit_code: int | None, log: str) -> str:
    """Return the hardware error of which a rank died; empty without one.

    error: as its parent recorded it. exit_code: the rank's, as a shell gives it. log: end of its
    log.
    """
    if exit_code == 128 + signal.SIGBUS:
        return "killed by SIGBUS"
    if exit_code in (None, 0):
        return ""
    if error and error.type == "OSError":
        local = _LOCAL_EIO.search(error.message)
        return f"I/O error of the local disk: {local['path'][:200]}" if local else ""
    if error and error.type and not _TORCH_ERRORS.fullmatch(error.type):
        return ""  # an error of the program
    if error and error.type:
        sign = next((each for each in TORCH_SIGNS if each.pattern.search(error.message)), None)
        if sign:
            return f"{sign.name}: {error.message.splitlines()[0][:200]}"
    for sign in LOG_SIGNS:
        if line := sign.pattern.search(log):
            return f"{sign.name}: {line[0].strip()[:200]}"
    return ""


_CRASHES = {128 + getattr(signal, f"SIG{name}") for name in ("SEGV", "ABRT", "ILL", "FPE", "BUS")}
_DEVICE_ERROR = re.compile(r"(?:RuntimeError|(?:torch\.)?AcceleratorError): (?:CUDA|cuDNN) error\b")


def may_be_hardware(reason: str, exit_code: int | None) -> bool:
    """Return whether hardware may have caused a failure, so that its repetition is evidence.

    reason: as recorded. Crash signals and errors of the device count; exceptions of the program,
    its own exit codes and kills do not.
    """
    return exit_code in _CRASHES or _DEVICE_ERROR.match(reason) is not None
