"""Evaluates the measurements of a job's nodes or ranks. Pure functions.

Each node is compared with the others and with absolute floors. A false positive costs a good node;
a miss costs no more than having no checks. Therefore a comparison fails only clear outliers, a slow
link counts only if two of its peers are fast with each other, and a check that most nodes fail
fails none. A wrong product always counts. Products are compared between GPUs of the same name,
all-reduces between equal local ranks, which have the same position in their nodes. The work grows
with the number of nodes, or that times its logarithm.
"""

import dataclasses
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from clusterddp.formatting import join_limited
from clusterddp.processes import hardware

T = TypeVar("T")
K = TypeVar("K")

MIN_MEMORY_BYTES = 1 << 30
MEMORY_SHARE = 0.25
"""Share of the others' median: a node below this share and the bytes above fails. So does a node
below half of the job's memory per node and half of the others' median."""
MIN_FREE_BYTES = 64 << 20
"""Space on the local disk; /dev/shm must hold one megabyte."""
SPIN_FACTOR = 3.0
"""Factor over the others' median loop time that indicates a busy CPU."""
LINK_SPEED_SHARE = 0.25
"""Share of the others' median speed at which an interface fails: 25 instead of 100 Gbit/s."""
SLOW_SHARE = 0.2
"""Share of the usual rate below which a transfer is slow."""
QUICK_BYTES_PER_SECOND = 250e6
"""Rate above which a transfer is never slow."""
CLOCK_SECONDS = 5.0
"""Limit of a clock's difference from the median of at least three clocks."""
NO_ANSWER = "no answer"
"""Prefix of the reason for a node that never answered."""
_SLOWNESS = {*("other load", "link speed", "GPU links", "InfiniBand", "slow transfers")}
"""Checks whose failure slows a training down but does not break it."""
_TRANSIENT = {
    *("other load", "unreachable", "slow transfers"),
    *("slow products", "slow all-reduces", "slow within the node"),
}
"""Checks that a node can fail because of a short burst of load."""
_MAX_REMARKS = 10
_FEW = 5
SLOW_PRODUCT = 3.0
"""Factor below the others' median speed of matrix products at which a rank's node fails."""
QUICK_BETWEEN_GPUS = 5e9
"""Bytes per second between GPUs over NCCL at which an all-reduce is never slow."""


@dataclass(frozen=True)
class NodeMeasurements:
    """Measurements of one node; negative numbers mean unknown."""

    gpus_granted: int = 0
    gpus_seen: int = -1
    """GPUs that NVML reaches; -1 without NVML."""
    gpu_fault: str = ""
    """Fault of a GPU: no answer, errors or a slowdown."""
    memory_fault: str = ""
    """GPUs whose memory is in use before the job."""
    fabric_fault: str = ""
    """GPUs that are not registered with their NVSwitches."""
    link_fault: str = ""
    """GPUs with fewer PCIe lanes than possible, or fewer NVLinks than the node's other GPUs."""
    nvlinks: float = -1.0
    """Smallest number of NVLinks that are up on a GPU that has any."""
    max_nvlinks: float = -1.0
    """NVLinks of such a GPU."""
    memory: float = -1.0
    """Available bytes, within the limits of its control groups."""
    memory_asked: float = -1.0
    """Bytes that the job requested on the node."""
    disk: str = ""
    """Directory on the local disk."""
    disk_free: float = -1.0
    disk_fault: str = ""
    """Error of writing a small file there."""
    shm_free: float = -1.0
    """Bytes free in /dev/shm."""
    shm_fault: str = ""
    clock: float = 0.0
    """Seconds that its clock shows beyond the batch host's."""
    round_trip: float = -1.0
    """Shortest round trip to the batch host, in seconds."""
    open_files: float = -1.0
    """Hard limit of open files, at most 65,536."""
    locked_bytes: float = -1.0
    """Soft limit of locked memory on a node with InfiniBand; -1 without InfiniBand or limit."""
    ports: Mapping[str, float] = field(default_factory=dict)
    """Rate of each InfiniBand port in Gbit/s, 0 if it is not active."""
    port_states: Mapping[str, str] = field(default_factory=dict)
    """States of the ports that are not active."""
    switch: str = ""
    """Leaf switch of the node in Slurm's topology; empty if unknown."""


@dataclass(frozen=True)
class LoadMeasurements:
    """Measurements of a node while the other nodes measure, too."""

    spin: float = -1.0
    """Duration of a fixed loop, in seconds."""
    interface: str = ""
    """Network interface towards the other nodes."""
    link_state: str = ""
    """State from /sys/class/net/NAME/operstate."""
    link_speed: float = -1.0
    """Speed in Mbit/s from /sys/class/net/NAME/speed."""


@dataclass(frozen=True)
class Pair:
    """Exchange with another node, seen from the node that connects."""

    to: int = -1
    """Number of the other node."""
    sent: float = -1.0
    """Bytes per second to the other; negative if none arrived."""
    received: float = -1.0
    error: str = ""
    """Error of the connection."""


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of a rank in the training's process."""

    rank: int
    local_rank: int
    host: str
    device: str = "cpu"
    """`cuda:1` or `cpu`."""
    model: str = ""
    """Name of its GPU; only GPUs of the same name are compared."""
    fault: str = ""
    """Error in a matrix product whose result is known."""
    speed: float = -1.0
    """Floating-point operations per second in matrix products; negative if unknown."""
    pairs: Mapping[int, float] = field(default_factory=dict)
    """Bytes per second of the all-reduce with each partner, by the partner's rank."""
    within: float = -1.0
    """Bus bandwidth of the all-reduce with all ranks of its node, in bytes per second."""
    across: float = -1.0
    """The same with the ranks of its local rank on all nodes, while all local ranks do so."""


@dataclass(frozen=True)
class Node:
    """Measurements of a node that answered."""

    host: str
    own: NodeMeasurements
    load: LoadMeasurements
    pairs: Mapping[str, Pair] = field(default_factory=dict)
    """Exchanges that it started, by the other node's name."""


@dataclass(frozen=True)
class Result:
    """Failed nodes, with the reasons."""

    failed: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    """Findings that cannot be attributed to one node."""
    is_transient: bool = False
    """True if a short burst of load can explain a failure."""
    slow: tuple[str, ...] = ()
    """Failed nodes that are only slow."""


@dataclass(frozen=True)
class _Flow:
    """A transfer or connection from one node to another."""

    source: str
    target: str
    rate: float
    is_good: bool


def evaluate(nodes: Sequence[Node], unresponsive: Mapping[str, str]) -> Result:
    """Evaluate the nodes. unresponsive: the reason for each node that did not answer."""
    found: dict[str, Iterable[tuple[str, str]]] = {"no answer": _unresponsive(nodes, unresponsive)}
    all_nodes = _All.of(nodes)
    for what, check in _CHECKS.items():
        found[what] = [(node.host, why) for node in nodes if (why := check(node, all_nodes))]
    found |= {"unreachable": _unreachable(nodes), "slow transfers": _slow(nodes)}
    found |= {"GPU links": _gpu_links(nodes), "InfiniBand": _infiniband(nodes)}
    return _result(len(nodes) + len(unresponsive), found, partial(_unexplained, nodes))


def low_limits(nodes: Sequence[Node], ranks: int) -> tuple[str, ...]:
    """Return a remark on each limit that is too low for a job of `ranks`, and on slow ports.

    No node fails by them.
    """
    hosts: dict[str, list[str]] = {}
    for node in nodes:
        for text in (
            hardware.too_few_files(node.own.open_files, ranks),
            hardware.too_little_locked(node.own.locked_bytes),
        ):
            hosts.setdefault(text, []).append(node.host)
    for node, port, rate, usual in _below(nodes, lambda each: each.ports):
        if rate > LINK_SPEED_SHARE * usual:
            hosts.setdefault(_port(node, port, usual), []).append(node.host)
    return tuple(
        f"{join_limited(named, _FEW, ', ')}: {text}" for text, named in hosts.items() if text
    )


def nodes_of_switches(nodes: Sequence[Node]) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each known leaf switch."""
    known = _grouped((node for node in nodes if node.own.switch), lambda node: node.own.switch)
    return {switch: tuple(node.host for node in of) for switch, of in known.items()}


def evaluate_ranks(ranks: Sequence[RankMeasurements], *, nccl: bool) -> Result:
    """Evaluate the nodes by their ranks' measurements. nccl: whether they exchange over NCCL."""
    flows = [*_all_reduces(ranks, QUICK_BETWEEN_GPUS if nccl else QUICK_BYTES_PER_SECOND)]
    found = {
        "wrong products": _wrong(ranks),
        "slow products": _slow_products(ranks),
        "slow all-reduces": _slow_all_reduces(ranks, flows),
        "slow within the node": _slow_within(ranks, math.inf if nccl else QUICK_BYTES_PER_SECOND),
    }
    hosts = {each.host for each in ranks}
    return _result(len(hosts), found, partial(_unexplained_all_reduces, flows))


def _result(
    total: int,
    found: Mapping[str, Iterable[tuple[str, str]]],
    unexplained: Callable[[Collection[str]], Iterator[str]],
) -> Result:
    """Fail nodes for their failed checks, except for checks that most nodes fail.

    total: number of nodes. found: nodes that fail each check, with reasons; a node may occur more
    than once. unexplained: yields the bad pairs that involve none of the failed nodes.
    """
    failed: dict[str, list[str]] = {}
    unfit, remarks, is_transient = set[str](), list[str](), False
    for what, failures in found.items():
        reasons: dict[str, list[str]] = {}
        for host, reason in failures:
            reasons.setdefault(host, []).append(reason)
        if 2 * len(reasons) > total > 1:
            first = next(iter(reasons))
            remarks.append(
                f"{len(reasons)} of {total} nodes fail the same check ({what}), so none is marked "
                f"bad. {first}: {'; '.join(reasons[first])}"
            )
            continue
        for host, several in reasons.items():
            failed.setdefault(host, []).extend(several)
        unfit |= set() if what in _SLOWNESS else reasons.keys()
        is_transient = is_transient or (bool(reasons) and what in _TRANSIENT)
    pairs = [*unexplained(failed)]
    remarks += pairs[:_MAX_REMARKS]
    if len(pairs) > _MAX_REMARKS:
        remarks.append(f"and {len(pairs) - _MAX_REMARKS} more pairs")
    named = {host: "; ".join(reasons) for host, reasons in failed.items()}
    slow = tuple(host for host in failed if host not in unfit)
    return Result(named, tuple(remarks), is_transient, slow)


def best_of_rank(former: RankMeasurements, latter: RankMeasurements) -> RankMeasurements:
    """Return the better figures of two measurements of a rank; a wrong product stays wrong."""
    return dataclasses.replace(
        latter,
        fault=former.fault or latter.fault,
        speed=max(former.speed, latter.speed),
        within=max(former.within, latter.within),
        across=max(former.across, latter.across),
        pairs={
            other: max(rate, former.pairs.get(other, -1.0)) for other, rate in latter.pairs.items()
        },
    )


def best_pairs(former: Mapping[str, Pair], latter: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return the better figures of exchanges with the same node, and the other latter ones."""
    best = dict(latter)
    for host in former.keys() & latter.keys():
        before, after = former[host], latter[host]
        best[host] = dataclasses.replace(
            after if before.error else before,
            sent=max(after.sent, before.sent),
            received=max(after.received, before.received),
        )
    return best


def less_loaded(former: LoadMeasurements | None, latter: LoadMeasurements) -> LoadMeasurements:
    """Return the measurements with the shorter loop."""
    return former if former and former.spin < latter.spin else latter


def table(
    nodes: Sequence[Node], unresponsive: Mapping[str, str], result: Result
) -> list[tuple[str, ...]]:
    """Return a table with a header and one row per node."""
    rows: list[tuple[str, ...]] = [
        ("node", "GPUs", "memory", "disk", "shm", "loop", "link", "sent", "received", "clock", "")
    ]
    flows = _flows(nodes)
    of_source, of_target = _grouped(flows, lambda f: f.source), _grouped(flows, lambda f: f.target)
    for node in nodes:
        own, seen = node.own, node.load
        sent, received = (_median_rate(of.get(node.host, ())) for of in (of_source, of_target))
        speed = f" {seen.link_speed / 1000:g} Gbit/s" if seen.link_speed > 0 else ""
        gpus = f"{max(own.gpus_seen, 0)}/{own.gpus_granted}" if own.gpus_granted else "-"
        rows.append(
            (
                node.host,
                gpus,
                _bytes(own.memory),
                own.disk_fault or _bytes(own.disk_free),
                own.shm_fault or _bytes(own.shm_free),
                f"{seen.spin * 1000:.0f} ms" if seen.spin >= 0 else "-",
                f"{seen.interface}{speed}" or "-",
                format_rate(sent),
                format_rate(received),
                f"{own.clock:+.3f} s",
                "failed" if node.host in result.failed else "",
            )
        )
    rows += [(host, *(("-",) * (len(rows[0]) - 2)), "no answer") for host in unresponsive]
    return rows


def rank_table(
    ranks: Sequence[RankMeasurements], failed: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return a table with a header and one row per node, with its slowest rank's figures."""
    rows: list[tuple[str, ...]] = [
        ("node", "ranks", "on", "product", "speed", "within", "pairs", "")
    ]
    for host, own in _grouped(ranks, lambda each: each.host).items():
        wrong = [str(each.rank) for each in own if each.fault]
        pairs = [statistics.median(each.pairs.values()) for each in own if each.pairs]
        rows.append(
            (
                host,
                f"{own[0].rank}-{own[-1].rank}" if len(own) > 1 else str(own[0].rank),
                own[0].model or own[0].device,
                f"wrong on rank {', '.join(wrong)}" if wrong else "right",
                _speed(min(each.speed for each in own)),
                format_rate(min(each.within for each in own)),
                format_rate(min(pairs, default=-1.0)),
                "failed" if host in failed else "",
            )
        )
    return rows


def schedule(places: Sequence[tuple[str, int]]) -> list[dict[int, int]]:
    """Pair ranks of different nodes in rounds; each rank has at most one partner per round.

    places: host and local rank of each rank. Partners have the same local rank. With N nodes, each
    meets about log2 N others, and at least two if there are three nodes, by the circle method for
    tournaments. Returns the partner of each rank, by round, in both directions.
    """
    by_local_rank: dict[int, list[int]] = {}
    for rank, (_, local_rank) in enumerate(places):
        by_local_rank.setdefault(local_rank, []).append(rank)
    rounds: list[dict[int, int]] = []
    for ranks in by_local_rank.values():
        for number, pairs in enumerate(_circle(ranks)):
            if number == len(rounds):
                rounds.append({})
            for one, other in pairs:
                rounds[number] |= {one: other, other: one}
    return rounds


def _unresponsive(nodes: Sequence[Node], unresponsive: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the nodes that count as failed because they did not answer.

    If at most one node, perhaps the batch host itself, has answered, no node may reach the host.
    """
    is_single = len(nodes) <= 1
    return [
        each for each in unresponsive.items() if not (is_single and each[1].startswith(NO_ANSWER))
    ]


class _Known:
    """Known measurements of all nodes or ranks; one of them is compared with the others."""

    def __init__(self, values: Iterable[float]) -> None:
        """values: negative ones are unknown."""
        self._values = sorted(value for value in values if value >= 0)

    def without(self, *own: float) -> tuple[int, float]:
        """Return the number and the median of the values besides some; NaN without any."""
        left_out: list[int] = []
        for value in sorted(each for each in own if each >= 0):
            left_out.append(bisect_left(self._values, value, left_out[-1] + 1 if left_out else 0))
        count = len(self._values) - len(left_out)

        def at(place: int) -> float:
            for each in left_out:
                place += place >= each
            return self._values[place]

        return count, (at((count - 1) // 2) + at(count // 2)) / 2 if count else math.nan


@dataclass(frozen=True)
class _All:
    """Measurements of all nodes together, with which each node is compared."""

    gpus_seen: _Known
    memory: _Known
    link_speed: _Known
    spin: _Known
    clock: float
    """Median of the clocks; NaN of fewer than three."""

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> "_All":
        return cls(
            _Known(node.own.gpus_seen for node in nodes),
            _Known(node.own.memory for node in nodes),
            _Known(node.load.link_speed for node in nodes),
            _Known(node.load.spin for node in nodes),
            statistics.median(node.own.clock for node in nodes) if len(nodes) > 2 else math.nan,
        )


def _gpus(node: Node, nodes: _All) -> str:
    own = node.own
    if own.gpus_seen < 0:  # with GPUs of Intel no node has NVML
        return own.gpu_fault if nodes.gpus_seen.without()[0] else ""
    if 0 <= own.gpus_seen < own.gpus_granted:
        seen = f"{own.gpus_seen} of {own.gpus_granted} GPUs answer"
        return f"{seen}: {own.gpu_fault}" if own.gpu_fault else seen
    return own.gpu_fault


def _gpu_memory(node: Node, _: _All) -> str:
    return node.own.memory_fault


def _gpu_fabric(node: Node, _: _All) -> str:
    return node.own.fabric_fault


def _memory(node: Node, nodes: _All) -> str:
    own, asked = node.own.memory, node.own.memory_asked
    others, usual = nodes.memory.without(own)
    if own < 0 or not others:
        return ""
    is_low = own < MIN_MEMORY_BYTES and own < MEMORY_SHARE * usual
    if is_low or (asked > 0 and own < asked / 2 and own < usual / 2):
        return f"{_bytes(own)} of memory available; median of the others: {_bytes(usual)}"
    return ""


def _disk(node: Node, _: _All) -> str:
    own = node.own
    if own.disk_fault:
        return f"local disk {own.disk}: {own.disk_fault}"
    if 0 <= own.disk_free < MIN_FREE_BYTES:
        return f"local disk {own.disk}: {_bytes(own.disk_free)} free"
    return ""


def _shm(node: Node, _: _All) -> str:
    return f"/dev/shm: {node.own.shm_fault}" if node.own.shm_fault else ""


def _clock(node: Node, nodes: _All) -> str:
    ahead = node.own.clock - nodes.clock
    if not abs(ahead) > CLOCK_SECONDS:  # or not a number
        return ""
    return f"clock {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others'"


def _interface(node: Node, nodes: _All) -> str:
    own = node.load.link_speed
    others, usual = nodes.link_speed.without(own)
    if own < 0 or others < 2 or own > LINK_SPEED_SHARE * usual:
        return ""
    return f"{node.load.interface} runs at {own:g} Mbit/s; median of the others: {usual:g}"


def _loaded(node: Node, nodes: _All) -> str:
    spin = node.load.spin
    others, usual = nodes.spin.without(spin)
    if not others or spin <= SPIN_FACTOR * usual:
        return ""
    return (
        f"a fixed loop takes {spin * 1000:.0f} ms; median of the others: {usual * 1000:.0f} ms: "
        "other processes use its CPU, or it is throttled"
    )


_CHECKS: dict[str, Callable[[Node, _All], str]] = {
    "GPUs": _gpus,
    "GPU memory": _gpu_memory,
    "GPU fabric": _gpu_fabric,
    "memory": _memory,
    "local disk": _disk,
    "/dev/shm": _shm,
    "clock": _clock,
    "link speed": _interface,
    "other load": _loaded,
}


def _gpu_links(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Yield faults of GPUs' links, and GPUs with fewer NVLinks than such GPUs on other nodes."""
    for node in nodes:
        if node.own.link_fault:
            yield node.host, node.own.link_fault
    for node, _, up, usual in _below(nodes, lambda each: {each.max_nvlinks: each.nvlinks}):
        yield node.host, f"a GPU has {up:g} NVLinks up; on other nodes: {usual:g}"


def _infiniband(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Yield the ports that are down, or have a quarter of other nodes' rate or less."""
    for node, port, rate, usual in _below(nodes, lambda each: each.ports):
        if rate <= LINK_SPEED_SHARE * usual:
            yield node.host, _port(node, port, usual)


def _port(node: Node, port: str, usual: float) -> str:
    rate = node.own.ports[port]
    state = f"{rate:g} Gbit/s" if rate else node.own.port_states.get(port, "down")
    return f"InfiniBand port {port}: {state}; on other nodes: {usual:g} Gbit/s"


def _below(
    nodes: Sequence[Node], measure: Callable[[NodeMeasurements], Mapping[K, float]]
) -> Iterator[tuple[Node, K, float, float]]:
    """Yield node, name, value and usual value if the value is below that of most nodes.

    measure: values of a node by name, such as a port, which is the same on all nodes. With two
    nodes, the lower value is the usual one.
    """
    values: dict[K, list[float]] = {}
    for node in nodes:
        for name, value in measure(node.own).items():
            values.setdefault(name, []).append(value)
    usual = {name: statistics.median_low(each) for name, each in values.items()}
    for node in nodes:
        for name, value in measure(node.own).items():
            if value < usual[name]:
                yield node, name, value, usual[name]


def _unreachable(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    pairs = [(node.host, other, pair.error) for node in nodes for other, pair in node.pairs.items()]
    flows = [_Flow(source, target, 0.0, not error) for source, target, error in pairs]
    words = " or ".join(sorted({error for *_, error in pairs if error}))
    for host, outwards, count, _ in _outliers(flows):
        to, by = f"cannot reach {count} other nodes", f"{count} other nodes cannot connect to it"
        yield host, f"{to if outwards else by} ({words})"


def _slow(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    flows = _flows(nodes)
    usual = format_rate(_usual([flow.rate for flow in flows], nodes))
    for host, outwards, count, rate in _outliers(flows):
        verb, towards = ("sends", "to") if outwards else ("receives", "from")
        most = f"{verb} at most {format_rate(rate)} {towards} {count} other nodes"
        yield host, f"{most}; usual: {usual}"


def _outliers(flows: Sequence[_Flow]) -> Iterator[tuple[str, bool, int, float]]:
    """Yield the nodes whose flows in one direction are all bad.

    At least two of their peers must have good flows with third nodes, so that the fault is not the
    peers'. Yields the node, whether the direction is outwards, the number of peers, the best rate.
    """
    of_source, of_target = _grouped(flows, lambda f: f.source), _grouped(flows, lambda f: f.target)
    good: dict[str, set[str]] = {}
    for flow in flows:
        if flow.is_good:
            good.setdefault(flow.source, set()).add(flow.target)
            good.setdefault(flow.target, set()).add(flow.source)
    for host in dict.fromkeys(host for flow in flows for host in (flow.source, flow.target)):
        for outwards in (True, False):
            own = (of_source if outwards else of_target).get(host, ())
            others = {f.target if outwards else f.source for f in own}
            if any(flow.is_good for flow in own):
                continue
            if sum(not good.get(other, set()) <= {host} for other in others) >= 2:
                yield host, outwards, len(others), max(flow.rate for flow in own)
                break


def _flows(nodes: Sequence[Node]) -> list[_Flow]:
    """Return all transfers from sender to receiver."""
    rates: list[tuple[str, str, float]] = []
    for node in nodes:
        for other, pair in node.pairs.items():
            if not pair.error:
                rates += (node.host, other, pair.sent), (other, node.host, pair.received)
    floor = min(SLOW_SHARE * _usual([rate for *_, rate in rates], nodes), QUICK_BYTES_PER_SECOND)
    return [_Flow(source, target, rate, rate >= floor) for source, target, rate in rates]


def _usual(rates: Sequence[float], nodes: Sequence[Node]) -> float:
    """Return the usual rate, robust against one slow node.

    This is the median. Among three or four nodes, a single one takes part in at least half of the
    transfers: there it is the rate that the fastest quarter reaches.
    """
    return sorted(rates)[int((0.75 if len(nodes) < _FEW else 0.5) * len(rates))] if rates else 0.0


def _unexplained(nodes: Sequence[Node], failed: Collection[str]) -> Iterator[str]:
    """Yield a remark on each slow or unconnected pair without a failed node."""
    known = {*failed}
    for node in nodes:
        for other, pair in node.pairs.items():
            if pair.error and known.isdisjoint((node.host, other)):
                yield f"{node.host} cannot connect to {other}: {pair.error}"
    for flow in _flows(nodes):
        if not flow.is_good and known.isdisjoint((flow.source, flow.target)):
            yield f"{flow.source} sends to {flow.target} at only {format_rate(flow.rate)}"


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by a key, in the order in which each key is first met."""
    groups: dict[K, list[T]] = {}
    for each in items:
        groups.setdefault(key(each), []).append(each)
    return groups


def _median_rate(flows: Sequence[_Flow]) -> float:
    """Return the median rate of transfers; negative without any."""
    return statistics.median([flow.rate for flow in flows] or [-1.0])


def _bytes(count: float) -> str:
    if count < 0:
        return "-"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def format_rate(bytes_per_second: float) -> str:
    """Format a rate, `1,582.6 MB/s`; a negative one is unknown."""
    return "-" if bytes_per_second < 0 else f"{bytes_per_second / 1e6:,.1f} MB/s"


def _circle(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round: one rank is fixed, the others rotate around it."""
    count = len(ranks)
    if count < 2:
        return
    ring: list[int | None] = [*ranks, *([None] if count % 2 else [])]
    most = max(math.ceil(math.log2(count)), 3 if count % 2 else 1)
    for _ in range(min(most, len(ring) - 1)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _wrong(ranks: Sequence[RankMeasurements]) -> Iterator[tuple[str, str]]:
    for each in ranks:
        if each.fault:
            yield each.host, f"{_label(each)} computes wrong matrix products: {each.fault}"


def _slow_products(ranks: Sequence[RankMeasurements]) -> Iterator[tuple[str, str]]:
    """Yield nodes with a rank of slow products; a single node's ranks are compared directly."""
    is_single = len({each.host for each in ranks}) == 1
    of_models = _grouped(ranks, lambda each: each.model)
    known = {model: _Known(each.speed for each in alike) for model, alike in of_models.items()}
    of_nodes = _grouped(ranks, lambda each: (each.host, each.model))
    for each in ranks:
        own = [each] if is_single else of_nodes[each.host, each.model]
        others, usual = known[each.model].without(*(one.speed for one in own))
        if each.speed >= 0 and others and SLOW_PRODUCT * each.speed < usual:
            speeds = f"{_speed(each.speed)}; usual: {_speed(usual)}"
            yield each.host, f"{_label(each)} multiplies matrices at {speeds}"


def _all_reduces(ranks: Sequence[RankMeasurements], quick: float) -> Iterator[tuple[int, _Flow]]:
    """Yield the local rank and flow of each all-reduce, once from each end."""
    for local_rank, own in _grouped(ranks, lambda each: each.local_rank).items():
        floor = min(SLOW_SHARE * _usual_all_reduce(own), quick)
        for each in own:
            for other, rate in each.pairs.items():
                yield local_rank, _Flow(each.host, ranks[other].host, rate, rate >= floor)


def _usual_all_reduce(ranks: Sequence[RankMeasurements]) -> float:
    """Return the median of the ranks' best rates; one slow node of three is in most pairs."""
    return statistics.median([max(each.pairs.values()) for each in ranks if each.pairs] or [0.0])


def _slow_all_reduces(
    ranks: Sequence[RankMeasurements], flows: Sequence[tuple[int, _Flow]]
) -> Iterator[tuple[str, str]]:
    groups, of_groups = (
        _grouped(ranks, lambda each: each.local_rank),
        _grouped(flows, lambda f: f[0]),
    )
    for local_rank, own in groups.items():
        usual = format_rate(_usual_all_reduce(own))
        which = f" (local rank {local_rank})" if len(groups) > 1 else ""
        of_group = [flow for _, flow in of_groups.get(local_rank, ())]
        for host, _, count, rate in _outliers(of_group):
            most = f"reach at most {format_rate(rate)}; usual: {usual}"
            yield host, f"all-reduces with {count} other nodes{which} {most}"


def _slow_within(ranks: Sequence[RankMeasurements], quick: float) -> Iterator[tuple[str, str]]:
    """Yield nodes whose ranks all-reduce slowly with each other; only such nodes are compared.

    quick: rate above which none is slow. GPUs have none: a node without NVLink is still fast.
    """
    nodes = [(own[0], len(own)) for own in _grouped(ranks, lambda each: each.host).values()]
    alike = _grouped(nodes, lambda node: (node[0].model, node[1]))
    for group in alike.values():
        known = _Known(each.within for each, _ in group)
        for each, count in group:
            others, usual = known.without(each.within)
            if others and 0 <= each.within < min(SLOW_SHARE * usual, quick):
                rates = f"{format_rate(each.within)}; usual: {format_rate(usual)}"
                yield each.host, f"its {count} ranks all-reduce with each other at {rates}"


def _unexplained_all_reduces(
    flows: Sequence[tuple[int, _Flow]], failed: Collection[str]
) -> Iterator[str]:
    """Yield a remark on each slow pair without a failed node."""
    known = {*failed}
    for _, flow in flows:
        is_known = not known.isdisjoint((flow.source, flow.target))
        if not flow.is_good and flow.source < flow.target and not is_known:
            yield f"{flow.source} and {flow.target} all-reduce at only {format_rate(flow.rate)}"


def _label(rank: RankMeasurements) -> str:
    return f"rank {rank.rank} on {rank.device}{f' ({rank.model})' if rank.model else ''}"


def _speed(operations: float) -> str:
    return "-" if operations < 0 else f"{operations / 1e9:,.1f} GFLOP/s"
