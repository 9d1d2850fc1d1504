"""What a report concludes of a sweep's trials: their order, spread, curves and scales."""

import csv
import json
import math
from pathlib import Path

import pytest

from clusterddp.reporting.plots import _by_factors
from clusterddp.reporting.sweep import (
    SweepReport,
    TrialResult,
    as_csv,
    curve,
    format_value,
    label,
    lower_is_better,
    read_lines,
    rows_of,
)
from tests.hostile import CARRIED


def results(*values: tuple[str, str, float | None]) -> list[TrialResult]:
    return [
        TrialResult(
            f"s-{index}", "done", {"lr": lr, "seed": seed}, {} if value is None else {"f1": value}
        )
        for index, (lr, seed, value) in enumerate(values)
    ]


@pytest.mark.parametrize(("lowest_first", "order"), [(False, "bac"), (True, "abc")])
def test_rows_are_in_order_and_what_is_no_number_comes_behind(
    lowest_first: bool, order: str
) -> None:
    made = results(
        ("none", "0", None), ("c", "0", 3.0), ("a", "0", 1.0), ("b", "0", 2.0),
        ("nan", "0", math.nan), ("c", "1", -math.inf),
    )  # fmt: skip
    rows = rows_of(made, ["seed"], "f1", lowest_first=lowest_first)
    got = [row.params["lr"] for row in rows]
    assert got == [each for each in order if each != "c"] + ["c", "nan", "none"]


def test_mean_and_sample_standard_deviation_are_over_the_runs_that_have_the_metric() -> None:
    made = results(("a", "0", 1.0), ("a", "1", 2.0), ("a", "2", 4.5), ("a", "3", None))
    [row] = rows_of(made, ["seed"], "f1", lowest_first=False)
    spread = row.metrics["f1"]
    assert (spread.mean, spread.n) == (2.5, 3)
    assert spread.std == pytest.approx(math.sqrt((1.5**2 + 0.5**2 + 2.0**2) / 2))
    assert (row.best_trial, row.states) == ("s-2", {"done": 4})
    assert rows_of(made[:1], ["seed"], "f1", lowest_first=False)[0].metrics["f1"].std is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e308])
def test_a_seed_that_has_diverged_is_not_hidden_by_the_others(bad: float) -> None:
    made = results(("a", "0", 1.0), ("a", "1", bad), ("a", "2", bad))
    [row] = rows_of(made, ["seed"], "f1", lowest_first=False)
    assert math.isnan(row.metrics["f1"].mean) and row.metrics["f1"].n == 3


def test_the_direction_is_known_by_the_name() -> None:
    lower = "loss train_loss val_loss Loss mse top1_error seconds train_seconds peak_memory_bytes"
    higher = "accuracy train_accuracy f1 reward images_per_second blossom tokens_per_s"
    assert [name for name in lower.split() if not lower_is_better(name)] == []
    assert [name for name in higher.split() if lower_is_better(name)] == []


def test_metrics_say_of_what_they_are() -> None:
    names = ("accuracy", "train_loss", "f1", "train_f1", "train_seconds", "images_per_second")
    assert [label(name) for name in names] == [
        "test accuracy", "training loss", "test f1", "training f1", "train seconds",
        "images per second",
    ]  # fmt: skip
    values = (
        format_value("train_accuracy", 0.5),
        format_value("f1", 1 / 3),
        format_value("f1", None),
    )
    assert values == ("50.00%", "0.33333", "-")


@pytest.mark.parametrize(
    ("values", "by_factors"),
    [
        ([0.1, 0.3, 1.0], True),
        ([32, 64, 128, 256], True),
        ([0.001, 0.1], True),
        ([1, 2], False),
        ([*range(1, 11)], False),
        ([0.0, 0.1, 10.0], False),
        ([-1.0, 1.0, 100.0], False),
        ([5.0], False),
        ([0.1, 0.2, 0.3, 0.4, 0.5], False),
    ],
)
def test_an_axis_is_logarithmic_where_values_are_spread_by_factors(
    values: list[float], by_factors: bool
) -> None:
    assert _by_factors(values) is by_factors


def test_a_curve_is_the_mean_of_the_seeds_where_each_has_been() -> None:
    runs = [
        [{"kind": "train", "step": step, "f1": value} for step, value in points]
        for points in ([(0, 0.0), (10, 10.0)], [(0, 2.0), (4, 6.0)], [(4, math.nan)], [])
    ]
    assert curve(runs, "train", "f1") == [(0, 1.0, 0.0, 2.0), (4, 5.0, 4.0, 6.0), (10, 10, 10, 10)]
    assert curve(runs, "eval", "f1") == []


def test_a_long_curve_keeps_its_last_step() -> None:
    long = [{"kind": "train", "step": step, "f1": 1.0} for step in range(5000)]
    drawn = curve([long], "train", "f1")
    assert len(drawn) <= 200
    assert drawn[-1][0] == 4999


def test_all_evaluations_are_read_and_of_the_training_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "train", "step": step, "loss": 1.0} for step in range(10_000)]
    lines.insert(5, {"kind": "eval", "step": 5, "f1": 0.5})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"kind": "tra')
    latest = read_lines(path)
    assert latest[0] == {"kind": "eval", "step": 5, "f1": 0.5}
    assert latest[-1]["step"] == 9999
    assert len(latest) < 100
    whole = read_lines(path, all_over=True)
    assert 100 < len(whole) < 500 and whole[0]["step"] != 9950
    assert read_lines(tmp_path / "none") == []


def test_csv_gives_back_what_a_person_typed() -> None:
    names = ("lr", "text")
    made = [
        TrialResult(f"s-{index}", "done", {"lr": "=1+1", "text": text}, {"a\n,\x1b": 0.1 + index})
        for index, text in enumerate(CARRIED)
    ]
    rows = rows_of(made, [], "", lowest_first=False)
    report = SweepReport(
        "s", "done", {"done": len(made)}, names, (), "", False, ("a\n,\x1b",), rows, "/s"
    )
    text = as_csv(report)
    assert not any(each in text for each in ("\x1b", "\r"))
    header, *lines = csv.reader(text.split("\n")[:-1])
    assert header == [
        "lr", "text", "a ,\\x1b.mean", "a ,\\x1b.std", "a ,\\x1b.n", "trial.best", "trial.count",
        "trial.states",
    ]  # fmt: skip
    assert [line[1] for line in lines] == CARRIED
    assert [float(line[2]) for line in lines] == [0.1 + index for index in range(len(made))]
