"""Judges the nodes of a job by what their ranks have measured inside a training's processes.

Pure, and by the principles of `verdict`: what is in doubt blames nobody. A wrong product is never
in doubt. Speeds are compared between GPUs of one name, all-reduces between ranks of one local rank,
which have the same place in their nodes.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from clusterddp.preflight.measurements import RankMeasurements
from clusterddp.preflight.verdict import (
    QUICK_BYTES_PER_SECOND,
    SLOW_SHARE,
    Blames,
    Flow,
    Verdict,
    culprits,
    shown_rate,
)

SLOW_PRODUCT = 3.0
"""Times slower than the others' median that a rank multiplies, and its node fails."""
QUICK_BETWEEN_GPUS = 5e9
"""Bytes per second between GPUs over NCCL from which on an all-reduce is not slow."""


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


def judge(ranks: Sequence[RankMeasurements], *, nccl: bool) -> Verdict:
    """Judge the nodes by all their ranks' measurements; nccl: that is what they exchange by."""
    blames = Blames(len({each.host for each in ranks}))
    blames.add(_wrong(ranks), "wrong products")
    comparisons = blames.add(_slow(ranks), "slow products")
    flows = [*_flows(ranks, QUICK_BETWEEN_GPUS if nccl else QUICK_BYTES_PER_SECOND)]
    comparisons = blames.add(_slow_pairs(ranks, flows), "slow all-reduces") or comparisons
    return blames.verdict([*_unexplained(flows, blames.failed)], comparisons)


def better(former: RankMeasurements, latter: RankMeasurements) -> RankMeasurements:
    """Return of two measurements of a rank the better figures; a wrong product stays wrong."""
    return dataclasses.replace(
        latter,
        fault=former.fault or latter.fault,
        speed=max(former.speed, latter.speed),
        pairs={
            other: max(rate, former.pairs.get(other, -1.0)) for other, rate in latter.pairs.items()
        },
    )


def table(ranks: Sequence[RankMeasurements], failed: Mapping[str, str]) -> list[tuple[str, ...]]:
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


def _wrong(ranks: Sequence[RankMeasurements]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for each in ranks:
        if each.fault:
            where = f"rank {each.rank} on {_processor(each)}"
            found.setdefault(each.host, []).append(f"{where} multiplies wrongly: {each.fault}")
    return {host: "; ".join(reasons) for host, reasons in found.items()}


def _slow(ranks: Sequence[RankMeasurements]) -> dict[str, str]:
    """Return nodes with a rank that multiplies slowly, against others' nodes or, alone, its own."""
    is_alone = len({each.host for each in ranks}) == 1
    found: dict[str, list[str]] = {}
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
            usual = _speed(statistics.median(others))
            found.setdefault(each.host, []).append(
                f"rank {each.rank} on {_processor(each)} multiplies at {_speed(each.speed)}, "
                f"where {usual} is usual"
            )
    return {host: "; ".join(reasons) for host, reasons in found.items()}


def _flows(ranks: Sequence[RankMeasurements], quick: float) -> Iterator[tuple[int, Flow]]:
    """Yield all-reduces, once from each end, each with its local rank."""
    for local_rank, own in _by_local_rank(ranks).items():
        floor = min(SLOW_SHARE * _usual(own), quick)
        for each in own:
            for other, rate in each.pairs.items():
                yield local_rank, Flow(each.host, ranks[other].host, rate, rate >= floor)


def _by_local_rank(ranks: Sequence[RankMeasurements]) -> dict[int, list[RankMeasurements]]:
    groups: dict[int, list[RankMeasurements]] = {}
    for each in ranks:
        groups.setdefault(each.local_rank, []).append(each)
    return groups


def _usual(ranks: Sequence[RankMeasurements]) -> float:
    """Return the median of the ranks' best: of three nodes one slow one is in most of the pairs."""
    return statistics.median([max(each.pairs.values()) for each in ranks if each.pairs] or [0.0])


def _slow_pairs(
    ranks: Sequence[RankMeasurements], flows: Sequence[tuple[int, Flow]]
) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    groups = _by_local_rank(ranks)
    for local_rank, own in groups.items():
        usual = shown_rate(_usual(own))
        which = f" (local rank {local_rank})" if len(groups) > 1 else ""
        of_group = [flow for each, flow in flows if each == local_rank]
        for host, (_, count, rate) in culprits(of_group):
            found.setdefault(host, []).append(
                f"all-reduces with {count} other nodes{which} reach {shown_rate(rate)} at most, "
                f"where {usual} is usual"
            )
    return {host: "; ".join(reasons) for host, reasons in found.items()}


def _unexplained(flows: Sequence[tuple[int, Flow]], failed: Mapping[str, object]) -> Iterator[str]:
    """Name pairs that are slow, where neither node is blamed; once each."""
    for _, flow in flows:
        ends = {flow.source, flow.target}
        if not flow.is_good and flow.source < flow.target and not ends & {*failed}:
            yield f"{flow.source} and {flow.target} alone all-reduce at {shown_rate(flow.rate)}"


def _processor(rank: RankMeasurements) -> str:
    return f"{rank.device} ({rank.model})" if rank.model else rank.device


def _speed(operations: float) -> str:
    return "-" if operations < 0 else f"{operations / 1e9:,.1f} GFLOP/s"
