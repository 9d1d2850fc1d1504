"""How far hosts' clocks are apart, as the ranks measure it when they meet."""

import pytest

from clusterddp.distributed import clocks


@pytest.mark.parametrize(
    ("sent", "told", "received", "ahead"),
    [
        (100.0, 100.2, 100.5, 0.0),
        (100.0, 105.2, 105.0 - 4.5, 4.95),
        (100.0, 95.1, 100.3, -5.05),
        (100.0, 100.4, 100.3, 0.25),
        (100.0, 100.0, 100.0, 0.0),
        # Nobody can tell a busy rank from a clock that is behind: the hosts' own are trusted.
        (100.0, 104.0, 110.0, 0.0),
    ],
)
def test_clocks_are_apart_by_what_the_round_trip_cannot_explain(
    sent: float, told: float, received: float, ahead: float
) -> None:
    assert clocks.offset(sent, told, received) == pytest.approx(ahead)


def test_one_rank_of_each_other_host_tells_the_time() -> None:
    hosts = ["h01", "h01", "h02", "h02", "h03"]
    hellos = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
    assert clocks.speakers(hellos) == {2: "h02", 4: "h03"}
    assert clocks.speakers(hellos[:2]) == {}
