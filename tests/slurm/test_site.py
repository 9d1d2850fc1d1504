"""Partitions as sinfo prints them."""

import pytest

from clusterddp.slurm.forms import gpus_of
from clusterddp.slurm.site import Partition, parse_partitions


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1)", {"": 4, "a100": 4}),
        ("gpu:a100:4(S:0,2),gpu:v100:2,nvme:1", {"": 6, "a100": 4, "v100": 2}),
        ("shard:gpu:9,gpu:2(S:0)", {"": 2}),
        ("(null)", {}),
        ("gpu", {}),
        (f"gpu:{'1' * 5000}", {}),
        ("", {}),
    ],
)
def test_gpus_are_counted_by_their_type(gres: str, gpus: dict[str, int]) -> None:
    assert gpus_of(gres) == gpus


def test_a_partition_has_what_the_best_of_its_nodes_have() -> None:
    week = 7 * 24 * 3600
    assert parse_partitions(
        [
            "CLUSTER: one", "main*|7-00:00:00|16|2|gpu:4",
            "main*|7-00:00:00|64|1|gpu:a100:2(S:0-1)", "main*|7-00:00:00|32|1|gpu:a100:1",
            "long|infinite|8|3|(null)", "none|30:00|0|0|(null)", "main|broken", "main|1|x|1|(null)",
        ]
    ) == {
        "main": Partition("main", True, week, "7-00:00:00", 4, 64, {"": 4, "a100": 2}),
        "long": Partition("long", False, None, "infinite", 3, 8, {}),
        "none": Partition("none", False, 1800, "30:00", 0, 0, {}),
    }  # fmt: skip
