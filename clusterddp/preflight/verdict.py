"""Judges the nodes of a job by what they, or their ranks, have measured.

Each is held against the others, and by floors. Pure. A false blame costs a good node, a miss costs
what it cost before: so a comparison blames only what stands far apart, a link only where it is slow
with two others which are quick between themselves, and a check that most of the nodes fail blames
none of them. A wrong product is never in doubt. Products are compared between GPUs of one name,
all-reduces between ranks of one local rank, which have the same place in their nodes.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

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
_OF_A_MOMENT = {
    *("foreign work", "not reached", "slow transfers", "slow products", "slow all-reduces")
}
"""Checks by comparison that a moment's load can make a node fail."""
_MOST_REMARKS = 10
_FEW = 5
SLOW_PRODUCT = 3.0
"""Times slower than the others' median that a rank multiplies, and its node fails."""
QUICK_BETWEEN_GPUS = 5e9
"""Bytes per second between GPUs over NCCL from which on an all-reduce is not slow."""


@dataclass(frozen=True)
class NodeMeasurements:
    """Measurements of a node by itself; a number below 0 is not known."""

    gpus_granted: int = 0
    gpus_seen: int = -1
    """GPUs that NVML reaches; -1 without NVML."""
    gpu_fault: str = ""
    """GPU that has fallen off, or that counts errors or is slowed down."""
    memory: float = -1.0
    """Bytes that can be had: available ones, within the limits of its control groups."""
    memory_asked: float = -1.0
    """Bytes that the job has asked for on the node."""
    disk: str = ""
    """Folder of the local disk."""
    disk_free: float = -1.0
    disk_fault: str = ""
    """Error with which a small file could not be written there."""
    shm_free: float = -1.0
    """Bytes free in /dev/shm."""
    shm_fault: str = ""
    clock: float = 0.0
    """Seconds by which its clock is ahead of the batch host's."""
    round_trip: float = -1.0
    """Seconds to the batch host and back, the least of some."""


@dataclass(frozen=True)
class LoadMeasurements:
    """Measurements of a node at the same time as the others."""

    spin: float = -1.0
    """Seconds that a fixed loop took."""
    interface: str = ""
    """Network interface that leads to the others."""
    link_state: str = ""
    """Its state, as in /sys/class/net/NAME/operstate."""
    link_speed: float = -1.0
    """Its speed in Mbit/s, as there."""


@dataclass(frozen=True)
class Pair:
    """Exchange of a node with another one, to which it connects."""

    to: int = -1
    """The other's number."""
    sent: float = -1.0
    """Bytes per second to the other; below 0 where none arrived."""
    received: float = -1.0
    error: str = ""
    """Reason for which there was no connection."""


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of a rank inside a training's own process."""

    rank: int
    local_rank: int
    host: str
    device: str = "cpu"
    """`cuda:1` or `cpu`."""
    model: str = ""
    """Name of its GPU; only those of one name are compared."""
    fault: str = ""
    """Fault in a matrix product whose result is known."""
    speed: float = -1.0
    """Floating-point operations per second in such products; below 0 where unknown."""
    pairs: Mapping[int, float] = field(default_factory=dict)
    """Bytes per second in all-reduces with one rank of another node each, by its rank."""


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
    """Failed nodes that are slower than the others, and nothing worse."""


@dataclass(frozen=True)
class _Flow:
    """Transfer from one node to another, or a connection."""

    source: str
    target: str
    rate: float
    is_good: bool


def judge(nodes: Sequence[Node], silent: Mapping[str, str]) -> Verdict:
    """Judge the nodes; silent: those that have not answered, each with what is known of it."""
    found: dict[str, Iterable[tuple[str, str]]] = {"no answer": _silent(nodes, silent)}
    for what, check in _CHECKS.items():
        found[what] = [(node.host, why) for node in nodes if (why := check(node, nodes))]
    found |= {"not reached": _unreached(nodes), "slow transfers": _slow(nodes)}
    return _verdict(len(nodes) + len(silent), found, partial(_unexplained, nodes))


def judge_ranks(ranks: Sequence[RankMeasurements], *, nccl: bool) -> Verdict:
    """Judge the nodes by all their ranks' measurements; nccl: that is what they exchange by."""
    flows = [*_all_reduces(ranks, QUICK_BETWEEN_GPUS if nccl else QUICK_BYTES_PER_SECOND)]
    found = {
        "wrong products": _wrong(ranks),
        "slow products": _slow_products(ranks),
        "slow all-reduces": _slow_all_reduces(ranks, flows),
    }
    hosts = {each.host for each in ranks}
    return _verdict(len(hosts), found, partial(_unexplained_all_reduces, flows))


def _verdict(
    total: int,
    found: Mapping[str, Iterable[tuple[str, str]]],
    unexplained: Callable[[Collection[str]], Iterator[str]],
) -> Verdict:
    """Blame nodes for the checks that they fail; one that most of them fail blames none.

    total: nodes that are judged. found: nodes that fail each check, and why; one more than once,
    perhaps.
    unexplained: yields the pairs that stand apart where none of the blamed nodes takes part.
    """
    failed: dict[str, list[str]] = {}
    unfit, remarks, comparisons = set[str](), list[str](), False
    for what, failures in found.items():
        reasons: dict[str, list[str]] = {}
        for host, reason in failures:
            reasons.setdefault(host, []).append(reason)
        if 2 * len(reasons) > total > 1:
            first = next(iter(reasons))
            remarks.append(
                f"{len(reasons)} of {total} nodes: {what}, so no one of them is blamed "
                f"({first}: {'; '.join(reasons[first])})"
            )
            continue
        for host, several in reasons.items():
            failed.setdefault(host, []).extend(several)
        unfit |= set() if what in _SLOWNESS else reasons.keys()
        comparisons = comparisons or (bool(reasons) and what in _OF_A_MOMENT)
    pairs = [*unexplained(failed)]
    remarks += pairs[:_MOST_REMARKS]
    if len(pairs) > _MOST_REMARKS:
        remarks.append(f"{len(pairs) - _MOST_REMARKS} more pairs are like that")
    named = {host: "; ".join(reasons) for host, reasons in failed.items()}
    slow = tuple(host for host in failed if host not in unfit)
    return Verdict(named, tuple(remarks), comparisons, slow)


def better_of_rank(former: RankMeasurements, latter: RankMeasurements) -> RankMeasurements:
    """Return of two measurements of a rank the better figures; a wrong product stays wrong."""
    return dataclasses.replace(
        latter,
        fault=former.fault or latter.fault,
        speed=max(former.speed, latter.speed),
        pairs={
            other: max(rate, former.pairs.get(other, -1.0)) for other, rate in latter.pairs.items()
        },
    )


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


def rank_table(
    ranks: Sequence[RankMeasurements], failed: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return the rows of a table, a node each, the head first; of its ranks the slowest counts."""
    rows: list[tuple[str, ...]] = [("node", "ranks", "on", "product", "speed", "pairs", "")]
    for host in dict.fromkeys(each.host for each in ranks):
        own = [each for each in ranks if each.host == host]
        wrong = [str(each.rank) for each in own if each.fault]
        pairs = [statistics.median(each.pairs.values()) for each in own if each.pairs]
        rows.append(
            (
                host,
                f"{own[0].rank}-{own[-1].rank}" if len(own) > 1 else str(own[0].rank),
                own[0].model or own[0].device,
                f"wrong on rank {', '.join(wrong)}" if wrong else "right",
                _speed(min(each.speed for each in own)),
                shown_rate(min(pairs, default=-1.0)),
                "failed" if host in failed else "",
            )
        )
    return rows


def schedule(places: Sequence[tuple[str, int]]) -> list[dict[int, int]]:
    """Pair ranks of different nodes, in rounds in which each rank has one partner at most.

    places: host and local rank of each rank. Partners have the same local rank. Of N nodes each
    meets about log2 N others, two at least where there are three nodes, by the circle method of
    tournaments. Returns the partner of each rank by round; both ways.
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


def _silent(nodes: Sequence[Node], silent: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return those that a lack of answers tells of: others reach the batch host, which may be one.

    Where no other node than this has answered, nobody may be able to reach it.
    """
    alone = len(nodes) <= 1
    return [each for each in silent.items() if not (alone and each[1].startswith(NO_ANSWER))]


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


def _loaded(node: Node, nodes: Sequence[Node]) -> str:
    others, spin = _others(node, nodes, lambda each: each.load.spin), node.load.spin
    if not others or spin <= SPIN_FACTOR * (usual := statistics.median(others)):
        return ""
    return (
        f"a fixed loop takes {spin * 1000:.0f} ms, on the others {usual * 1000:.0f} ms: other work "
        "holds its processor, or it is throttled"
    )


_CHECKS: dict[str, Callable[[Node, Sequence[Node]], str]] = {
    "GPUs": _gpus,
    "memory": _memory,
    "local disk": _disk,
    "/dev/shm": _shm,
    "clock": _clock,
    "link speed": _interface,
    "foreign work": _loaded,
}


def _unreached(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    pairs = [(node.host, other, pair.error) for node in nodes for other, pair in node.pairs.items()]
    flows = [_Flow(source, target, 0.0, not error) for source, target, error in pairs]
    words = " or ".join(sorted({error for *_, error in pairs if error}))
    for host, outwards, count, _ in _culprits(flows):
        to, by = f"cannot reach {count} other nodes", f"{count} other nodes cannot connect to it"
        yield host, f"{to if outwards else by} ({words})"


def _slow(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    flows = _flows(nodes)
    usual = shown_rate(_usual([flow.rate for flow in flows], nodes))
    for host, outwards, count, rate in _culprits(flows):
        most = f"{'sends' if outwards else 'receives'} at most {shown_rate(rate)}"
        yield host, f"{most} with {count} other nodes, where {usual} is usual"


def _culprits(flows: Sequence[_Flow]) -> Iterator[tuple[str, bool, int, float]]:
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
                yield host, outwards, len(others), max(flow.rate for flow in own)
                break


def _flows(nodes: Sequence[Node]) -> list[_Flow]:
    """Return all transfers, each from its sender's side."""
    rates: list[tuple[str, str, float]] = []
    for node in nodes:
        for other, pair in node.pairs.items():
            if not pair.error:
                rates += (node.host, other, pair.sent), (other, node.host, pair.received)
    usual = _usual([rate for *_, rate in rates], nodes)
    floor = min(SLOW_SHARE * usual, QUICK_BYTES_PER_SECOND)
    return [_Flow(source, target, rate, rate >= floor) for source, target, rate in rates]


def _usual(rates: Sequence[float], nodes: Sequence[Node]) -> float:
    """Return the usual rate, of which one slow node tells nothing.

    That is the median. Of three or four nodes one is part of half of the transfers or more: there
    it is what a quarter of them reach.
    """
    share = 0.75 if len(nodes) < _FEW else 0.5
    return sorted(rates)[int(share * len(rates))] if rates else 0.0


def _unexplained(nodes: Sequence[Node], failed: Collection[str]) -> Iterator[str]:
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


def _circle(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of each round: one stands still, the others turn around it."""
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
            yield each.host, f"{_shown(each)} multiplies wrongly: {each.fault}"


def _slow_products(ranks: Sequence[RankMeasurements]) -> Iterator[tuple[str, str]]:
    """Yield nodes with a rank that multiplies slowly, against others' nodes or, alone, its own."""
    is_alone = len({each.host for each in ranks}) == 1
    for each in ranks:
        others = [
            other.speed
            for other in ranks
            if other is not each
            and (is_alone or other.host != each.host)
            and other.model == each.model
            and other.speed >= 0
        ]
        if each.speed >= 0 and others and SLOW_PRODUCT * each.speed < statistics.median(others):
            own, usual = _speed(each.speed), _speed(statistics.median(others))
            yield each.host, f"{_shown(each)} multiplies at {own}, where {usual} is usual"


def _all_reduces(ranks: Sequence[RankMeasurements], quick: float) -> Iterator[tuple[int, _Flow]]:
    """Yield all-reduces, once from each end, each with its local rank."""
    for local_rank, own in _by_local_rank(ranks).items():
        floor = min(SLOW_SHARE * _usual_all_reduce(own), quick)
        for each in own:
            for other, rate in each.pairs.items():
                yield local_rank, _Flow(each.host, ranks[other].host, rate, rate >= floor)


def _by_local_rank(ranks: Sequence[RankMeasurements]) -> dict[int, list[RankMeasurements]]:
    groups: dict[int, list[RankMeasurements]] = {}
    for each in ranks:
        groups.setdefault(each.local_rank, []).append(each)
    return groups


def _usual_all_reduce(ranks: Sequence[RankMeasurements]) -> float:
    """Return the median of the ranks' best: of three nodes one slow one is in most of the pairs."""
    return statistics.median([max(each.pairs.values()) for each in ranks if each.pairs] or [0.0])


def _slow_all_reduces(
    ranks: Sequence[RankMeasurements], flows: Sequence[tuple[int, _Flow]]
) -> Iterator[tuple[str, str]]:
    groups = _by_local_rank(ranks)
    for local_rank, own in groups.items():
        usual = shown_rate(_usual_all_reduce(own))
        which = f" (local rank {local_rank})" if len(groups) > 1 else ""
        of_group = [flow for each, flow in flows if each == local_rank]
        for host, _, count, rate in _culprits(of_group):
            most = f"reach {shown_rate(rate)} at most, where {usual} is usual"
            yield host, f"all-reduces with {count} other nodes{which} {most}"


def _unexplained_all_reduces(
    flows: Sequence[tuple[int, _Flow]], failed: Collection[str]
) -> Iterator[str]:
    """Name pairs that are slow, where neither node is blamed; once each."""
    for _, flow in flows:
        ends = {flow.source, flow.target}
        if not flow.is_good and flow.source < flow.target and not ends & {*failed}:
            yield f"{flow.source} and {flow.target} alone all-reduce at {shown_rate(flow.rate)}"


def _shown(rank: RankMeasurements) -> str:
    return f"rank {rank.rank} on {rank.device}{f' ({rank.model})' if rank.model else ''}"


def _speed(operations: float) -> str:
    return "-" if operations < 0 else f"{operations / 1e9:,.1f} GFLOP/s"
