"""The judgement on nodes, from what their ranks have measured inside a training."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from clusterddp.preflight.evaluation import (
    RankMeasurements,
    Result,
    best_of_rank,
    evaluate_ranks,
    rank_table,
    schedule,
)

USUAL = 1e9


def ranks(nodes: int = 4, each: int = 1, **fields: Any) -> list[RankMeasurements]:
    """Ranks of nodes without a fault, with the all-reduces that they have."""
    places = [(f"h{node}", local) for node in range(nodes) for local in range(each)]
    rounds = schedule(places)
    return [
        RankMeasurements(
            rank, local, host, speed=5e10,
            pairs={pairs[rank]: USUAL for pairs in rounds if rank in pairs}, **fields,
        )
        for rank, (host, local) in enumerate(places)
    ]  # fmt: skip


def changed(several: list[RankMeasurements], rank: int, **fields: Any) -> list[RankMeasurements]:
    several[rank] = replace(several[rank], **fields)
    return several


def slow_links(several: list[RankMeasurements], *bad: int) -> list[RankMeasurements]:
    """Have all-reduces with these ranks be slow, as both ends measure them."""
    return [
        replace(
            each,
            pairs={o: 1e6 if {o, each.rank} & {*bad} else rate for o, rate in each.pairs.items()},
        )
        for each in several
    ]


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 13, 64])
def test_ranks_meet_about_log_n_others_of_their_local_rank(nodes: int, each: int) -> None:
    places = [(f"h{node}", local) for node in range(nodes) for local in range(each)]
    rounds = schedule(places)
    assert len(rounds) <= max(nodes.bit_length(), 3)
    met: dict[int, set[int]] = {rank: set() for rank in range(len(places))}
    for pairs in rounds:
        for rank, other in pairs.items():
            assert pairs[other] == rank
            assert places[rank][1] == places[other][1]
            assert places[rank][0] != places[other][0]
            assert other not in met[rank], "nobody meets twice"
            met[rank].add(other)
    assert all(len(others) >= min(2, nodes - 1) for others in met.values())


def test_nodes_with_fewer_ranks_than_others_have_partners_all_the_same() -> None:
    rounds = schedule([("h0", 0), ("h0", 1), ("h1", 0), ("h2", 0), ("h2", 1)])
    assert {1: 4, 4: 1}.items() <= rounds[0].items()


def test_good_nodes_pass() -> None:
    for nodes in (1, 2, 3, 4, 7, 64):
        assert evaluate_ranks(ranks(nodes, each=2), nccl=False) == Result()


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_wrong_product_blames_its_node_with_rank_and_processor(nodes: int) -> None:
    several = changed(ranks(nodes, each=2, model="A100"), 1, fault="3 are wrong", device="cuda:1")
    judged = evaluate_ranks(several, nccl=True)
    assert judged.failed == {
        "h0": "rank 1 on cuda:1 (A100) computes wrong matrix products: 3 are wrong"
    }
    assert not judged.is_transient


def test_products_that_most_nodes_have_wrong_blame_nobody() -> None:
    several = ranks(3)
    for rank in range(2):
        changed(several, rank, fault="3 are wrong")
    judged = evaluate_ranks(several, nccl=False)
    assert judged.failed == {}
    assert judged.remarks[0].startswith(
        "2 of 3 nodes fail the same check (wrong products), so none is"
    )


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_rank_that_multiplies_at_a_third_is_blamed(nodes: int) -> None:
    judged = evaluate_ranks(changed(ranks(nodes, each=2), 1, speed=1.6e10), nccl=False)
    expected = "rank 1 on cpu multiplies matrices at 16.0 GFLOP/s; usual: 50.0 GFLOP/s"
    assert judged.failed == {"h0": expected}
    assert judged.is_transient
    assert evaluate_ranks(changed(ranks(nodes, each=2), 1, speed=1.8e10), nccl=False) == Result()


def test_gpus_of_other_names_are_not_compared() -> None:
    several = ranks(4, model="H100")
    assert evaluate_ranks(changed(several, 2, model="T4", speed=1e9), nccl=False) == Result()


@pytest.mark.parametrize("nodes", [3, 4, 5, 8, 64])
def test_a_node_all_of_whose_all_reduces_are_slow_is_told_from_its_partners(nodes: int) -> None:
    judged = evaluate_ranks(slow_links(ranks(nodes), 2), nccl=False)
    [(host, reason)] = judged.failed.items()
    assert host == "h2"
    assert reason.endswith("other nodes reach at most 1.0 MB/s; usual: 1,000.0 MB/s")
    assert judged.is_transient


def test_one_slow_adapter_of_several_is_found_by_its_local_rank() -> None:
    [(host, reason)] = evaluate_ranks(slow_links(ranks(4, each=4), 6), nccl=False).failed.items()
    assert host == "h1"
    assert "(local rank 2) reach at most 1.0 MB/s" in reason


def test_a_slow_pair_of_two_nodes_or_alone_blames_neither_and_is_said_once() -> None:
    judged = evaluate_ranks(slow_links(ranks(2), 1), nccl=False)
    assert judged == Result()  # there is nothing usual
    several = ranks(4)
    one, other = several[0], several[next(iter(several[0].pairs))]
    changed(several, one.rank, pairs={**one.pairs, other.rank: 1e6})
    changed(several, other.rank, pairs={**other.pairs, one.rank: 1e6})
    judged = evaluate_ranks(several, nccl=False)
    assert judged.failed == {}
    assert judged.remarks == (f"{one.host} and {other.host} all-reduce at only 1.0 MB/s",)


def test_what_is_quick_enough_between_gpus_or_hosts_is_never_slow() -> None:
    several = ranks(4)
    far = [{o: 6e9 if 2 in (o, r.rank) else 4e11 for o in r.pairs} for r in several]
    several = [replace(each, pairs=pairs) for each, pairs in zip(several, far, strict=True)]
    assert evaluate_ranks(several, nccl=True) == Result()
    slow = [{o: 3e8 if 2 in (o, r.rank) else 4e10 for o in r.pairs} for r in several]
    several = [replace(each, pairs=pairs) for each, pairs in zip(several, slow, strict=True)]
    assert evaluate_ranks(several, nccl=False) == Result()
    assert list(evaluate_ranks(several, nccl=True).failed) == ["h2"]


def within(*rates: float, nccl: bool, **fields: Any) -> Any:
    """The judgement on nodes of two ranks that all-reduce with each other at these rates."""
    several = ranks(len(rates), each=2, model="H100")
    for each in list(several):
        changed(several, each.rank, within=rates[each.rank // 2])
    if fields:
        changed(changed(several, 0, **fields), 1, **fields)
    return evaluate_ranks(several, nccl=nccl)


def test_a_node_whose_own_ranks_all_reduce_slowly_is_named() -> None:
    judged = within(7e10, 4e11, 4e11, nccl=True)
    assert judged.failed == {
        "h0": "its 2 ranks all-reduce with each other at 70,000.0 MB/s; usual: 400,000.0 MB/s"
    }
    assert judged.is_transient
    assert list(within(7e10, 4e11, nccl=True).failed) == ["h0"]
    assert list(within(2e8, 4e9, 4e9, nccl=False).failed) == ["h0"]
    assert within(3e8, 4e9, 4e9, nccl=False) == Result()  # quick enough between processes
    assert within(9e10, 4e11, 4e11, nccl=True) == Result()
    assert within(7e10, 4e11, 4e11, nccl=True, model="T4") == Result()
    assert within(7e10, nccl=True) == Result()
    assert within(-1.0, 4e11, 4e11, nccl=True) == Result()


def test_the_better_of_two_measurements_counts_but_a_wrong_product_stays() -> None:
    former = RankMeasurements(
        0, 0, "h0", fault="wrong", speed=3.0, pairs={1: 5.0, 2: 1.0}, within=7
    )
    latter = RankMeasurements(0, 0, "h0", speed=4.0, pairs={1: 2.0, 2: 3.0}, within=6, across=1)
    best = RankMeasurements(
        0, 0, "h0", fault="wrong", speed=4.0, pairs={1: 5.0, 2: 3.0}, within=7, across=1
    )
    assert best_of_rank(former, latter) == best


def test_the_table_has_a_row_for_each_node_with_its_slowest_rank() -> None:
    several = changed(ranks(3, each=2, within=6e6), 3, fault="1 is wrong", speed=2e10, within=5e6)
    rows = rank_table(several, evaluate_ranks(several, nccl=False).failed)
    assert rows[0] == ("node", "ranks", "on", "product", "speed", "within", "pairs", "")
    assert rows[2] == (
        *("h1", "2-3", "cpu", "wrong on rank 3", "20.0 GFLOP/s", "5.0 MB/s"),
        *(f"{median([USUAL]) / 1e6:,.1f} MB/s", "failed"),
    )
    assert rows[3][-1] == ""
    assert rank_table(ranks(1), {})[1][1:7] == ("0", "cpu", "right", "50.0 GFLOP/s", "-", "-")


class _Passed(list[RankMeasurements]):
    """Ranks, and how often all of them have been gone through."""

    passes = 0

    def __iter__(self) -> Iterator[RankMeasurements]:
        self.passes += 1
        return super().__iter__()


def test_the_ranks_are_gone_through_as_often_however_many_they_are() -> None:
    def passes(nodes: int) -> int:
        several = _Passed(slow_links(ranks(nodes, each=2), 3))
        rank_table(several, evaluate_ranks(several, nccl=False).failed)
        return several.passes

    assert passes(64) == passes(8)
