"""The judgement on nodes, from what they have measured."""

from dataclasses import replace
from typing import Any

import pytest

from clusterddp.preflight import evaluation
from clusterddp.preflight.evaluation import LoadMeasurements, Node, NodeMeasurements, Pair, evaluate
from tests.counting import count_calls

GIB = 2.0**30
GOOD = NodeMeasurements(memory=60 * GIB, disk="/tmp", disk_free=9 * GIB, shm_free=9 * GIB)
QUICK = 1e9


def nodes(count: int = 4) -> list[Node]:
    """Nodes without a fault, with the exchanges that they have."""
    made = []
    for number in range(count):
        distances = (1 << turn for turn in range(count) if 1 << turn < count)
        others = [f"h{(number + distance) % count}" for distance in distances]
        pairs = {other: Pair(0, QUICK, QUICK) for other in others}
        made.append(Node(f"h{number}", GOOD, LoadMeasurements(0.04, "eth0", "up", 1e5), pairs))
    return made


def own(several: list[Node], number: int, **fields: Any) -> list[Node]:
    several[number] = replace(several[number], own=replace(several[number].own, **fields))
    return several


def load(several: list[Node], number: int, **fields: Any) -> list[Node]:
    several[number] = replace(several[number], load=replace(several[number].load, **fields))
    return several


def pairs(several: list[Node], change: Any) -> list[Node]:
    """Change each exchange by `change(node, other, pair)`."""
    return [
        replace(node, pairs={o: change(node.host, o, pair) for o, pair in node.pairs.items()})
        for node in several
    ]


def sends_slowly(*hosts: str) -> Any:
    return lambda node, other, pair: replace(
        pair,
        sent=1e6 if node in hosts else pair.sent,
        received=1e6 if other in hosts else pair.received,
    )


def test_limits_too_low_for_the_jobs_ranks_are_said_of_the_nodes_that_have_them() -> None:
    enough = own(own(nodes(2), 0, open_files=4296.0), 1, open_files=65536.0)
    assert evaluation.low_limits(enough, 2048) == evaluation.low_limits(nodes(), 9999) == ()
    assert evaluation.low_limits(enough, 2049) == (
        "h0: hard limit of 4,296 open files (ulimit -Hn), but 2,049 ranks may need 4,298",
    )
    locked = own(own(nodes(3), 0, locked_bytes=65536.0), 2, locked_bytes=65536.0)
    assert evaluation.low_limits(locked, 8) == (
        "h0, h2: limit of 64 KiB of locked memory (ulimit -l): InfiniBand may fail",
    )


def test_good_nodes_pass() -> None:
    for count in (1, 2, 3, 4, 7, 64):
        assert evaluate(nodes(count), {}) == evaluation.Result()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"gpus_granted": 4, "gpus_seen": 3}, "3 of 4 GPUs answer"),
        ({"gpus_granted": 4, "gpus_seen": 4, "gpu_fault": "GPU 2 is slow"}, "GPU 2 is slow"),
        ({"memory_fault": "GPU 0: 4.0 GiB in use"}, "GPU 0: 4.0 GiB in use"),
        ({"fabric_fault": "GPU 0: not yet"}, "GPU 0: not yet"),
        ({"link_fault": "GPU 0: 8 of 16 PCIe lanes"}, "GPU 0: 8 of 16 PCIe lanes"),
        ({"memory": GIB / 2}, "512 MiB of memory available; median of the others: 60.0 GiB"),
        ({"memory": 20 * GIB, "memory_asked": 50 * GIB}, "20.0 GiB of memory available"),
        ({"disk_fault": "No space left"}, "local disk /tmp: No space left"),
        ({"disk_free": 2.0**20}, "local disk /tmp: 1 MiB free"),
        ({"shm_fault": "Read-only file system"}, "/dev/shm: Read-only file system"),
        ({"clock": -9.0}, "clock 9.0 s behind the others'"),
    ],
)
def test_what_a_node_finds_out_about_itself_blames_it_alone(
    fields: dict[str, Any], reason: str
) -> None:
    judged = evaluate(own(nodes(), 2, **fields), {})
    assert list(judged.failed) == ["h2"]
    assert judged.failed["h2"].startswith(reason)
    assert not judged.is_transient


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"spin": 0.13}, "a fixed loop takes 130 ms; median of the others: 40 ms"),
        ({"link_speed": 2.5e4}, "eth0 runs at 25000 Mbit/s; median of the others: 100000"),
    ],
)
def test_a_node_that_stands_apart_is_blamed(fields: dict[str, Any], reason: str) -> None:
    judged = evaluate(load(nodes(), 2, **fields), {})
    assert list(judged.failed) == ["h2"]
    assert judged.failed["h2"].startswith(reason)
    assert evaluate(load(nodes(), 2, spin=0.11, link_speed=5e4), {}).failed == {}


@pytest.mark.parametrize("count", [3, 4, 5, 8, 64])
def test_a_host_all_of_whose_transfers_are_slow_is_told_from_its_partners(count: int) -> None:
    judged = evaluate(pairs(nodes(count), sends_slowly("h2")), {})
    assert list(judged.failed) == ["h2"]
    assert judged.failed["h2"].startswith("sends at most 1.0 MB/s to ")
    assert judged.is_transient


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_link_that_is_slow_both_ways_is_told_from_few_others(count: int) -> None:
    """A throttled sender's acknowledgements are late too: most rates of three nodes are slow."""

    def slow(node: str, other: str, pair: Pair) -> Pair:
        return replace(pair, sent=2e6, received=6e6) if "h2" in (node, other) else pair

    judged = evaluate(pairs(nodes(count), slow), {})
    assert [*judged.failed] == ["h2"]
    assert "usual: 1,000.0 MB/s" in judged.failed["h2"]


def test_a_node_that_is_merely_slow_is_told_from_one_that_is_unfit() -> None:
    slow = load(nodes(), 1, link_speed=1000.0)
    assert evaluate(slow, {}).slow == ("h1",)
    both = evaluate(own(slow, 1, shm_fault="full"), {"h09": "no answer"})
    assert ({*both.failed}, both.slow) == ({"h1", "h09"}, ())


def test_of_two_slow_hosts_among_eight_both_are_blamed() -> None:
    assert [*evaluate(pairs(nodes(8), sends_slowly("h2", "h5")), {}).failed] == ["h2", "h5"]


def test_one_slow_pair_blames_neither_and_is_said() -> None:
    def slow(node: str, other: str, pair: Pair) -> Pair:
        return replace(pair, sent=1e6, received=1e6) if (node, other) == ("h1", "h2") else pair

    judged = evaluate(pairs(nodes(), slow), {})
    assert judged.failed == {}
    assert "h1 sends to h2 at only 1.0 MB/s" in judged.remarks
    assert evaluate(pairs(nodes(2), sends_slowly("h1")), {}).failed == {}


def test_what_is_quick_enough_is_never_slow() -> None:
    def different(node: str, other: str, pair: Pair) -> Pair:
        return replace(pair, sent=3e8 if node == "h2" else 1e11, received=1e11)

    assert evaluate(pairs(nodes(), different), {}).failed == {}


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_host_to_which_none_can_connect_is_blamed(count: int) -> None:
    def refused(node: str, other: str, pair: Pair) -> Pair:
        return Pair(0, error="timed out") if other == "h1" else pair

    judged = evaluate(pairs(nodes(count), refused), {})
    assert list(judged.failed) == ["h1"]
    assert "other nodes cannot connect to it (timed out)" in judged.failed["h1"]
    assert evaluate(pairs(nodes(2), refused), {}).failed == {}


def test_a_check_that_most_nodes_fail_blames_none() -> None:
    several = nodes()
    for number in range(3):
        own(several, number, shm_fault="Permission denied")
    judged = evaluate(several, {})
    assert judged.failed == {}
    assert judged.remarks[0].startswith(
        "3 of 4 nodes fail the same check (/dev/shm), so none is marked bad"
    )


def test_two_clocks_do_not_tell_which_is_wrong() -> None:
    assert evaluate(own(nodes(2), 1, clock=600.0), {}).failed == {}


def test_a_lack_of_nvml_counts_where_others_have_it() -> None:
    several = nodes()
    for number in range(4):
        own(several, number, gpus_granted=1, gpu_fault="no NVML: x")
    assert evaluate(several, {}).failed == {}
    for number in range(3):
        own(several, number, gpus_seen=1, gpu_fault="")
    assert evaluate(several, {}).failed == {"h3": "no NVML: x"}


def test_fewer_nvlinks_count_beside_two_others_with_such_gpus() -> None:
    def judged(*up: float, most: float = 18.0) -> Any:
        several = nodes(len(up))
        for number, links in enumerate(up):
            own(several, number, nvlinks=links, max_nvlinks=18.0 if number else most)
        return evaluate(several, {})

    assert judged(16, 18, 18).failed == {"h0": "a GPU has 16 NVLinks up; on other nodes: 18"}
    assert judged(16, 18, 18).slow == ("h0",)
    assert judged(12, 18, 18, most=12) == evaluation.Result()  # another kind of GPU
    assert judged(-1, 18, 18, most=-1) == evaluation.Result()
    for fine in ((16, 18), (18, 18, 18), (16, 16, 18, 18)):
        assert judged(*fine) == evaluation.Result()


@pytest.mark.parametrize(
    ("rates", "failed", "remark"),
    [
        ((400.0, 400.0, 400.0), (), ""),
        ((0.0, 400.0, 400.0), ("h0",), ""),
        ((100.0, 400.0, 400.0), ("h0",), ""),
        ((200.0, 400.0, 400.0), (), "h0: InfiniBand port mlx5_0/1: 200 Gbit/s; on other nodes: 400 "
                                    "Gbit/s"),
        ((0.0, 400.0), (), ""),  # two nodes do not tell
        ((0.0, 0.0, 400.0, 400.0), (), ""),  # two kinds of nodes
        ((200.0, 200.0, 400.0, 400.0), (), ""),
        ((0.0, 0.0, 0.0), (), ""),  # a port without a cable
    ],
)  # fmt: skip
def test_a_port_is_compared_with_the_same_port_of_other_nodes(
    rates: tuple[float, ...], failed: tuple[str, ...], remark: str
) -> None:
    several = nodes(len(rates))
    for number, rate in enumerate(rates):
        states = {} if rate else {"mlx5_0/1": "DOWN, Polling"}
        own(several, number, ports={"mlx5_0/1": rate, "mlx5_1/1": 400.0}, port_states=states)
    judged = evaluate(several, {})
    assert (tuple(judged.failed), judged.slow) == (failed, failed)
    assert evaluation.low_limits(several, 2) == ((remark,) if remark else ())
    if failed and not rates[0]:
        assert judged.failed["h0"] == (
            "InfiniBand port mlx5_0/1: DOWN, Polling; on other nodes: 400 Gbit/s"
        )


def test_silence_blames_where_two_others_have_answered() -> None:
    assert evaluate(nodes(3), {"h9": "no answer"}).failed == {"h9": "no answer"}
    assert evaluate(nodes(1), {"h9": "no answer"}).failed == {}
    stopped = {"h9": "stopped answering"}
    assert evaluate(nodes(1), stopped).failed == stopped


def test_the_better_of_two_exchanges_counts() -> None:
    former = {"a": Pair(1, 5.0, 1.0), "b": Pair(2, error="timed out"), "c": Pair(3, 1.0, 1.0)}
    latter = {"a": Pair(1, 2.0, 3.0), "b": Pair(2, 4.0, 4.0)}
    assert evaluation.best_pairs(former, latter) == {"a": Pair(1, 5.0, 3.0), "b": Pair(2, 4.0, 4.0)}


def test_eight_times_the_nodes_take_not_much_more_than_eight_times_the_work() -> None:
    def work(count: int) -> int:
        several = pairs(nodes(count), sends_slowly("h3"))
        return count_calls(lambda: evaluation.table(several, {}, evaluate(several, {})))

    assert work(512) < 14 * work(64)  # each meets log2 of them; the square is 64 times


def test_the_table_has_a_row_for_each_node() -> None:
    several = own(nodes(), 1, disk_fault="No space left on device")
    silent = {"h9": "no answer"}
    rows = evaluation.table(several, silent, evaluate(several, silent))
    assert [row[0] for row in rows] == ["node", "h0", "h1", "h2", "h3", "h9"]
    assert len({len(row) for row in rows}) == 1
    assert [row[-1] for row in rows[2:4]] == ["failed", ""]
    assert rows[1][6:9] == ("eth0 100 Gbit/s", "1,000.0 MB/s", "1,000.0 MB/s")
