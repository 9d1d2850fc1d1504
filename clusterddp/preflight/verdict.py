"""Judges the nodes of a job by what they have measured: each against the others, and by floors.

Pure. A false blame costs a good node, a miss costs what it cost before: so a comparison blames only
what stands far apart, a link only where it is slow with two others which are quick between
themselves, and a check that most of the nodes fail blames none of them.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from clusterddp.preflight.measurements import LoadMeasurements, NodeMeasurements, Pair

LEAST_MEMORY_BYTES = 1 << 30
MEMORY_SHARE = 0.25
"""Share of the others' median: with less than this, and than the bytes above, a node fails. With
half of what the job asked for per node, and half of the others' median, as well."""
LEAST_FREE_BYTES = 64 << 20
"""Room on the local disk; in /dev/shm a megabyte has to fit."""
SPIN_FACTOR = 3.0
"""Times the others' median that the loop takes where other work holds the processor."""
LINK_SPEED_SHARE = 0.25
"""Share of the others' median speed at which an interface fails: 100 Gbit/s that came up as 25."""
SLOW_SHARE = 0.2
"""Share of the median of all transfers, below which one is slow …"""
QUICK_BYTES_PER_SECOND = 250e6
"""… unless it is quicker than this."""
CLOCK_SECONDS = 5.0
"""Difference from the median of at least three clocks."""
NO_ANSWER = "no answer"
"""Beginning of what is known of a node that has not answered at all."""
_SLOWNESS = {"foreign work", "link speed", "slow transfers"}
"""Checks by comparison: with a node that fails these alone a training is slow, and no more."""
_MOST_REMARKS = 10
_FEW = 5


@dataclass(frozen=True)
class Node:
    """Measurements of a node that has answered."""

    host: str
    own: NodeMeasurements
    load: LoadMeasurements
    pairs: Mapping[str, Pair] = field(default_factory=dict)
    """Exchanges that it began, by the other's name."""


@dataclass(frozen=True)
class Verdict:
    """Nodes that have failed, and what was measured there."""

    failed: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    """Findings that are no fault of one node."""
    comparisons: bool = False
    """True where a node failed by what a moment's load can do."""
    slow: tuple[str, ...] = ()
    """Of those that have failed the ones that are slower than the others, and nothing worse."""


@dataclass(frozen=True)
class Flow:
    """Transfer from one node to another, or a connection."""

    source: str
    target: str
    rate: float
    is_good: bool


def judge(nodes: Sequence[Node], silent: Mapping[str, str]) -> Verdict:
    """Judge the nodes; silent: those that have not answered, each with what is known of it."""
    blames = Blames(len(nodes) + len(silent))
    comparisons = False
    blames.add(_silent(nodes, silent), "no answer")
    for what, check in _CHECKS.items():
        blames.add({node.host: why for node in nodes if (why := check(node, nodes))}, what)
    for what, blamed in (
        ("foreign work", _loaded(nodes)),
        ("not reached", _unreached(nodes)),
        ("slow transfers", _slow(nodes)),
    ):
        comparisons = blames.add(blamed, what) or comparisons
    return blames.verdict([*_unexplained(nodes, blames.failed)], comparisons)


class Blames:
    """Nodes that fail checks, and what it was; a check that most of them fail blames none."""

    def __init__(self, total: int) -> None:
        """total: nodes that are judged."""
        self.failed: dict[str, list[str]] = {}
        self._total, self._remarks = total, list[str]()
        self._unfit: set[str] = set()

    def add(self, found: Mapping[str, str], what: str) -> bool:
        """Blame nodes for failing a check; returns whether it blames any.

        found: what was measured, by the node's name. what: the check.
        """
        if 2 * len(found) > self._total > 1:
            first, reason = next(iter(found.items()))
            self._remarks.append(
                f"{len(found)} of {self._total} nodes: {what}, so no one of them is blamed "
                f"({first}: {reason})"
            )
            return False
        for host, reason in found.items():
            self.failed.setdefault(host, []).append(reason)
        if what not in _SLOWNESS:
            self._unfit |= found.keys()
        return bool(found)

    def verdict(self, unexplained: Sequence[str], comparisons: bool) -> Verdict:
        """Sum up; unexplained: pairs that stand apart where neither node is blamed."""
        remarks = [*self._remarks, *unexplained[:_MOST_REMARKS]]
        if len(unexplained) > _MOST_REMARKS:
            remarks.append(f"{len(unexplained) - _MOST_REMARKS} more pairs are like that")
        failed = {host: "; ".join(reasons) for host, reasons in self.failed.items()}
        slow = tuple(host for host in failed if host not in self._unfit)
        return Verdict(failed, tuple(remarks), comparisons, slow)


def better(former: Mapping[str, Pair], latter: Mapping[str, Pair]) -> dict[str, Pair]:
    """Return of two exchanges with the same node the better figures; of others the latter."""
    best = dict(latter)
    for host in former.keys() & latter.keys():
        before, after = former[host], latter[host]
        best[host] = dataclasses.replace(
            after if before.error else before,
            sent=max(after.sent, before.sent),
            received=max(after.received, before.received),
        )
    return best


def quieter(former: LoadMeasurements | None, latter: LoadMeasurements) -> LoadMeasurements:
    """Return the measurements with the shorter of two loops."""
    return former if former and former.spin < latter.spin else latter


def table(
    nodes: Sequence[Node], silent: Mapping[str, str], verdict: Verdict
) -> list[tuple[str, ...]]:
    """Return the rows of a table, a node each, the head first."""
    rows: list[tuple[str, ...]] = [
        ("node", "GPUs", "memory", "disk", "shm", "loop", "link", "sent", "received", "clock", "")
    ]
    for node in nodes:
        own, seen = node.own, node.load
        sent, received = _rates(nodes, node.host)
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
                shown_rate(sent),
                shown_rate(received),
                f"{own.clock:+.3f} s",
                "failed" if node.host in verdict.failed else "",
            )
        )
    none = ("-",) * (len(rows[0]) - 2)
    rows += [(host, *none, "silent") for host in silent]
    return rows


def _silent(nodes: Sequence[Node], silent: Mapping[str, str]) -> Mapping[str, str]:
    """Return those that a lack of answers tells of: others reach the batch host, which may be one.

    Where no other node than this has answered, nobody may be able to reach it.
    """
    if len(nodes) > 1:
        return silent
    return {host: why for host, why in silent.items() if not why.startswith(NO_ANSWER)}


def _gpus(node: Node, nodes: Sequence[Node]) -> str:
    own = node.own
    if own.gpus_seen < 0:  # with AMD's there is NVML nowhere
        return own.gpu_fault if _others(node, nodes, lambda each: each.own.gpus_seen) else ""
    if 0 <= own.gpus_seen < own.gpus_granted:
        seen = f"{own.gpus_seen} of {own.gpus_granted} GPUs answer"
        return f"{seen}: {own.gpu_fault}" if own.gpu_fault else seen
    return own.gpu_fault


def _memory(node: Node, nodes: Sequence[Node]) -> str:
    others = _others(node, nodes, lambda each: each.own.memory)
    own, asked = node.own.memory, node.own.memory_asked
    if own < 0 or not others:
        return ""
    usual = statistics.median(others)
    is_low = own < LEAST_MEMORY_BYTES and own < MEMORY_SHARE * usual
    if is_low or (asked > 0 and own < asked / 2 and own < usual / 2):
        return f"{_bytes(own)} of memory can be had, the others have {_bytes(usual)}"
    return ""


def _disk(node: Node, _: Sequence[Node]) -> str:
    own = node.own
    if own.disk_fault:
        return f"local disk {own.disk}: {own.disk_fault}"
    if 0 <= own.disk_free < LEAST_FREE_BYTES:
        return f"local disk {own.disk}: {_bytes(own.disk_free)} free"
    return ""


def _shm(node: Node, _: Sequence[Node]) -> str:
    return f"/dev/shm: {node.own.shm_fault}" if node.own.shm_fault else ""


def _clock(node: Node, nodes: Sequence[Node]) -> str:
    if len(nodes) < 3:
        return ""
    ahead = node.own.clock - statistics.median(each.own.clock for each in nodes)
    if abs(ahead) <= CLOCK_SECONDS:
        return ""
    return f"clock {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others'"


def _interface(node: Node, nodes: Sequence[Node]) -> str:
    others = _others(node, nodes, lambda each: each.load.link_speed)
    own = node.load.link_speed
    if own < 0 or len(others) < 2 or own > LINK_SPEED_SHARE * statistics.median(others):
        return ""
    usual = statistics.median(others)
    return f"{node.load.interface} has {own:g} Mbit/s, the others' {usual:g}"


_CHECKS: dict[str, Callable[[Node, Sequence[Node]], str]] = {
    "GPUs": _gpus,
    "memory": _memory,
    "local disk": _disk,
    "/dev/shm": _shm,
    "clock": _clock,
    "link speed": _interface,
}


def _loaded(nodes: Sequence[Node]) -> dict[str, str]:
    loaded = {}
    for node in nodes:
        others = _others(node, nodes, lambda each: each.load.spin)
        if others and node.load.spin > SPIN_FACTOR * (usual := statistics.median(others)):
            loaded[node.host] = (
                f"a fixed loop takes {node.load.spin * 1000:.0f} ms, on the others "
                f"{usual * 1000:.0f} ms: other work holds its processor, or it is throttled"
            )
    return loaded


def _unreached(nodes: Sequence[Node]) -> dict[str, str]:
    flows = [
        Flow(node.host, other, 0.0, not pair.error)
        for node in nodes
        for other, pair in node.pairs.items()
    ]
    errors = {pair.error for node in nodes for pair in node.pairs.values() if pair.error}
    words = " or ".join(sorted(errors))
    return {
        host: f"cannot reach {count} other nodes ({words})"
        if outwards
        else f"{count} other nodes cannot connect to it ({words})"
        for host, (outwards, count, _) in culprits(flows)
    }


def _slow(nodes: Sequence[Node]) -> dict[str, str]:
    flows = _flows(nodes)
    usual = _usual([flow.rate for flow in flows], nodes)
    return {
        host: f"{'sends' if outwards else 'receives'} at most {shown_rate(rate)} with {count} "
        f"other nodes, where {shown_rate(usual)} is usual"
        for host, (outwards, count, rate) in culprits(flows)
    }


def culprits(flows: Sequence[Flow]) -> Iterator[tuple[str, tuple[bool, int, float]]]:
    """Yield the nodes of which every flow in one direction is bad, with two others at least.

    Of these others two at least have good flows elsewhere, so that it is not theirs. With each:
    whether the direction is outwards, with how many others, and the best rate.
    """
    for host in dict.fromkeys(host for flow in flows for host in (flow.source, flow.target)):
        for outwards in (True, False):
            own = [f for f in flows if host == (f.source if outwards else f.target)]
            others = {f.target if outwards else f.source for f in own}
            if any(flow.is_good for flow in own):
                continue
            elsewhere = {
                each
                for flow in flows
                if flow.is_good and host not in (flow.source, flow.target)
                for each in (flow.source, flow.target)
            }
            if len(others & elsewhere) >= 2:
                yield host, (outwards, len(others), max(flow.rate for flow in own))
                break


def _flows(nodes: Sequence[Node]) -> list[Flow]:
    """Return all transfers, each from its sender's side."""
    rates = [
        (source, target, rate)
        for node in nodes
        for other, pair in node.pairs.items()
        if not pair.error
        for source, target, rate in (
            (node.host, other, pair.sent),
            (other, node.host, pair.received),
        )
    ]
    usual = _usual([rate for *_, rate in rates], nodes)
    floor = min(SLOW_SHARE * usual, QUICK_BYTES_PER_SECOND)
    return [Flow(source, target, rate, rate >= floor) for source, target, rate in rates]


def _usual(rates: Sequence[float], nodes: Sequence[Node]) -> float:
    """Return the usual rate, of which one slow node tells nothing.

    That is the median. Of three or four nodes one is part of half of the transfers or more: there
    it is what a quarter of them reach.
    """
    share = 0.75 if len(nodes) < _FEW else 0.5
    return sorted(rates)[int(share * len(rates))] if rates else 0.0


def _unexplained(nodes: Sequence[Node], failed: Mapping[str, object]) -> Iterator[str]:
    """Name pairs that are slow or have no connection, where neither node is blamed."""
    for node in nodes:
        for other, pair in node.pairs.items():
            if pair.error and not {node.host, other} & {*failed}:
                yield f"{node.host} cannot connect to {other}: {pair.error}"
    for flow in _flows(nodes):
        if not flow.is_good and not {flow.source, flow.target} & {*failed}:
            yield f"{flow.source} sends to {flow.target} at {shown_rate(flow.rate)} alone"


def _others(node: Node, nodes: Sequence[Node], measure: Callable[[Node], float]) -> list[float]:
    """Return what the other nodes have measured, as far as it is known."""
    return [value for each in nodes if each is not node and (value := measure(each)) >= 0]


def _rates(nodes: Sequence[Node], host: str) -> tuple[float, float]:
    """Return the medians of what a node sends and receives; below 0 where unknown."""
    flows = _flows(nodes)
    sent = [flow.rate for flow in flows if flow.source == host]
    received = [flow.rate for flow in flows if flow.target == host]
    return statistics.median(sent or [-1.0]), statistics.median(received or [-1.0])


def _bytes(count: float) -> str:
    if count < 0:
        return "-"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def shown_rate(bytes_per_second: float) -> str:
    """Format a rate, `1,582.6 MB/s`; one below 0 is not known."""
    return "-" if bytes_per_second < 0 else f"{bytes_per_second / 1e6:,.1f} MB/s"
