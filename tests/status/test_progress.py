"""How far a run has come, and the time that is left."""

import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempt import Attempt
from clusterddp.run.records import MetricsLine
from clusterddp.run.run_dir import RunDir
from clusterddp.status.status import _Progress as Progress
from clusterddp.status.status import progress


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(RunDir(tmp_path), 2)
    made.path.mkdir(parents=True)
    made.record.write_text(json.dumps({"began": 1000.0, "step": 100}))
    return made


def shows(attempt: Attempt, **sign: Any) -> None:
    attempt.alive.write_text(json.dumps(sign))


def line(step: int, time: float) -> MetricsLine:
    return MetricsLine("train", step, time=time)


def test_the_pace_is_that_of_the_latest_lines_of_this_attempt(attempt: Attempt) -> None:
    before = [line(50, 100.0), line(100, 200.0)]
    slow = [line(100 + n, 1000.0 + 10 * n) for n in range(1, 20)]
    late = [line(120 + n, 1200.0 + 2 * n) for n in range(20)]
    shows(attempt, step=145, planned=200)
    got = progress(attempt, [*before, *slow, *late])
    assert (got.step, got.planned, got.seconds_left) == (145, 200, 110.0)
    assert got.percent == 72.5


def test_before_two_lines_the_pace_is_that_since_the_first_step(attempt: Attempt) -> None:
    spent = {"first_step": 1001.0, "training": 20.0}
    shows(attempt, step=110, planned=200, spent=spent)
    assert progress(attempt, [line(105, 1010.0)]).seconds_left == 180.0
    shows(attempt, step=100, planned=200, spent=spent)
    assert progress(attempt, []) == Progress(100, 200, None)


@pytest.mark.parametrize(
    ("sign", "lines", "expected"),
    [
        ({}, [], Progress()),
        ({"step": 7}, [], Progress(7)),
        ({"step": 0, "planned": None}, [line(3, 1.0)], Progress(3)),
        ({"step": 9, "planned": 8}, [], Progress(9)),
        ({"step": 200, "planned": 200}, [line(150, 1010.0), line(200, 1020.0)],
         Progress(200, 200, 0.0)),
        ({"step": "x", "planned": []}, [], Progress()),
        ({"step": 120, "planned": 200}, [line(120, 1010.0), line(120, 1020.0)],
         Progress(120, 200, None)),
        ({"step": 120, "planned": 200}, [line(110, 1030.0), line(120, 1020.0)],
         Progress(120, 200, None)),
    ],
)  # fmt: skip
def test_what_is_not_known_is_not_made_up(
    attempt: Attempt, sign: dict[str, Any], lines: list[MetricsLine], expected: Progress
) -> None:
    shows(attempt, **sign)
    assert progress(attempt, lines) == expected


def test_without_an_attempt_the_metrics_tell_the_step() -> None:
    assert progress(None, [line(3, 1.0)]) == Progress(3)
    assert progress(None, []) == Progress()
    assert Progress(3, 0).percent is None
