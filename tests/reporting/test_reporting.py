"""What a report concludes from a run's records: stragglers, paces, comparisons."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from clusterddp import formatting
from clusterddp.reporting.gather import (
    RunReport,
    rank_rates,
    read_evaluation,
    read_points,
    stragglers,
    usual_of_many,
)
from clusterddp.reporting.plots import scalings
from clusterddp.run.records import EvaluationRecord, RankRate, RankReport, RateSpread, Report
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus
from tests.hostile import CARRIED, REFUSED


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ([], []),
        ([100.0], []),
        ([100.0, 100.0, 100.0], []),
        ([100.0, 81.0], []),
        ([100.0, 79.0], [1]),
        ([100.0, None, 50.0], [2]),
        ([100.0, 30.0, 100.0, 60.0, 100.0], [1, 3]),
        ([0.0, 100.0, 100.0], [0]),
        ([0.0, 0.0], []),
    ],
)
def test_a_straggler_is_below_four_fifths_of_what_the_others_reach(
    rates: list[float | None], slow: list[int]
) -> None:
    ranks = [RankReport(rank, rate, f"h{rank}") for rank, rate in enumerate(rates)]
    assert [one.rank for one in stragglers(ranks)] == slow


def test_a_ranks_pace_is_its_median_since_the_ranks_are_as_many(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows: list[Any] = [[1, 1, 1], [10, 100], [30, None], [20, 300], "x", [40, 200]]
    lines = [
        json.dumps({"kind": "train", "step": step, "rank_images_per_second": row})
        for step, row in enumerate(rows)
    ]
    path.write_text("\n".join([*lines, '{"kind": "eval", "step": 9}', '{"kind": "tra']))
    assert rank_rates(read_points(path)) == {0: 25.0, 1: 200.0}


def test_of_many_ranks_those_that_are_often_the_slowest_are_known(tmp_path: Path) -> None:
    """And a straggler is told from the median of all, which the others named here are far below."""
    rates = [900.0 + rank / 10 for rank in range(4096)]
    rows = [[*rates[:7], 100.0, *rates[8:]], [*rates[:7], 120.0, *rates[8:]], rates, rates]
    rows[3] = [*rates[:4000], 1.0, *rates[4001:]]  # once
    path = tmp_path / "metrics.jsonl"
    for step, row in enumerate(rows):
        spread = {"rank_spread": asdict(cast(RateSpread, RateSpread.of(row)))}
        line = json.dumps({"kind": "train", "step": step, **spread})
        assert len(line) < 700
        with path.open("a") as file:
            file.write(f"{line}\n")
    points = read_points(path)
    assert points[0].rank_spread == RateSpread.of(rows[0])
    known = rank_rates(points)
    assert known == {**{rank: rates[rank] for rank in range(7)}, 7: 120.0}
    found = stragglers([RankReport(*each) for each in known.items()], usual_of_many(points))
    assert [(one.rank, one.median_of_others) for one in found] == [(7, 1104.8)]


def test_of_64_ranks_each_ones_rate_is_recorded() -> None:
    assert RateSpread.of([1.0] * 64) is None
    assert RateSpread.of([float(rank) for rank in range(65)]) == RateSpread(
        65, 0.0, 32.0, 64.0, tuple(RankRate(rank, float(rank)) for rank in range(8))
    )


def test_mistakes_are_told_the_most_common_first() -> None:
    found = read_evaluation(
        EvaluationRecord(confusion=((9, 1, 0), (3, 9, 1), (0, 0, 9)))
    ).confusions()
    assert [one.describe() for one in found] == [
        "1 predicted as 0: 3 times", "0 predicted as 1: once", "1 predicted as 2: once",
    ]  # fmt: skip


def run(name: str, world_size: int, rate: float, **fields: Any) -> RunReport:
    usual = {"model": "convnet", "dataset": "mnist", "device": "cuda", "precision": "bf16"}
    own = {each: fields.pop(each) for each in ("settings", "complete") if each in fields}
    figures = Report(world_size=world_size, images_per_second=rate, **(usual | fields))
    return RunReport(RunStatus(name, RunState.DONE), figures, **({"complete": True} | own))


def test_runs_of_one_configuration_are_compared_by_their_ranks() -> None:
    [found] = scalings(
        [
            run("eight", 8, 4000.0, settings={"seed": 3, "lr": 0.1}),
            run("one", 1, 1000.0, settings={"strategy": "single"}, threads=8),
            run("four", 4, 3000.0), run("one again", 1, 3000.0),
            run("larger batches", 16, 9000.0, settings={"batch_size": 256}),
            run("another model", 2, 9000.0, model="mlp"), run("failed", 2, 9000.0, complete=False),
        ]
    )  # fmt: skip
    assert found.title == "convnet on cuda, bf16"
    assert [(one.name, one.world_size, found.efficiency(one)) for one in found.sizes] == [
        ("one", 1, 0.5), ("one again", 1, 1.5), ("four", 4, 0.375), ("eight", 8, 0.25),
    ]  # fmt: skip


def test_on_cpus_runs_with_other_threads_are_no_comparison() -> None:
    one = run("one", 1, 10.0, threads=2, device="cpu")
    assert scalings([one, run("two", 2, 10.0, threads=1, device="cpu")]) == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0, "0.0s"),
        (59.94, "59.9s"),
        (725.2, "12m05s"),
        (11265.0, "3h07m"),
        (187e3, "2d03h"),
    ],
)
def test_seconds_are_shown_to_their_size(seconds: float | None, shown: str) -> None:
    assert formatting.duration(seconds) == shown


@pytest.mark.parametrize(
    ("count", "shown"), [(None, "-"), (0, "0 MiB"), (900 << 20, "900 MiB"), (3 << 29, "1.5 GiB")]
)
def test_memory_is_shown_in_powers_of_1024(count: int | None, shown: str) -> None:
    assert formatting.memory(count) == shown


@pytest.mark.parametrize("text", [*CARRIED, *REFUSED])
def test_a_line_is_printable_and_alone(text: str) -> None:
    shown = formatting.line(text)
    assert shown.isprintable()
    assert text in REFUSED or not text.isprintable() or shown == text
