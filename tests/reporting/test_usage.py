"""What a run used, and what the hours went into."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clusterddp.files import write_record
from clusterddp.reporting.usage import measure_usage
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.history import History
from clusterddp.run.records import AttemptRecord, FinalRecord, GpuUse, Spent, Usage
from clusterddp.run.run_dir import RunDir
from tests.event_lines import add_event

HOUR = 3600.0
BEGAN = 1_700_000_000.0
HOSTS = ("h01", "h02")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def spec(gpus: int = 4, **fields: Any) -> JobSpec:
    resources = Resources(nodes=2, tasks_per_node=4, gpus_per_node=gpus)
    return JobSpec(run_name="one", run_dir="/jobs/one", resources=resources, **fields)


TRAINING: dict[str, Any] = {"train": TrainConfig(data_dir="/data")}


def attempt_of(
    run: RunDir, hours: tuple[float, float | None], spent: Spent | None, *,
    steps: tuple[int, int] | None = (0, 100), nodelist: str = "h[01-02]",
) -> Attempt:  # fmt: skip
    """Make an attempt from one hour to another; its ranks have met where it has steps."""
    made = begin(run)
    began = BEGAN + hours[0] * HOUR
    add_event(run, "started", attempt=made.number, time=began, nodelist=nodelist)
    if steps:
        record = AttemptRecord(number=made.number, began=began + 60, step=steps[0], hosts=HOSTS)
        write_record(made.record, record)
        made.renew_liveness(steps[1], None, spent)
    if hours[1] is not None:
        ended = BEGAN + hours[1] * HOUR
        add_event(run, "ended", attempt=made.number, time=ended, exit_code=1, cause="failed")
    return made


def spent(first_step: float, training: float, waiting: float | None, saving: float) -> Spent:
    return Spent(
        BEGAN + first_step * HOUR, training * HOUR, None if waiting is None else waiting * HOUR,
        saving * HOUR,
    )  # fmt: skip


def measured(run: RunDir, **fields: Any) -> Usage:
    usage = measure_usage(History.read(run), spec(**fields))
    assert usage is not None
    return usage


def whole(usage: Usage) -> float:
    names = ("computing", "waiting", "startup", "saving", "repeated", "other")
    return sum(getattr(usage, name) or 0.0 for name in names)


def test_the_parts_of_all_attempts_add_up_to_the_whole(run: RunDir) -> None:
    attempt_of(run, (0, 10), spent(1, 8, 2, 0.5))  # died at step 100, the next begins at 75
    last = attempt_of(run, (20, 24), spent(20.5, 3, 0.6, 0.1), steps=(75, 175))
    write_record(last.end, FinalRecord("done", "", 175))
    usage = measure_usage(History.read(run), spec(**TRAINING))
    assert usage == Usage(
        node_hours=28.0, gpu_hours=112.0, computing=2 * (4.5 + 2.4), waiting=2 * (1.5 + 0.6),
        startup=3.0, saving=1.2, repeated=4.0, other=1.8,
    )  # fmt: skip
    assert whole(usage) == pytest.approx(usage.node_hours)


def test_without_gpus_there_are_no_gpu_hours(run: RunDir) -> None:
    attempt_of(run, (0, 1), spent(0.5, 0.5, 0, 0))
    usage = measured(run, gpus=0, **TRAINING)
    assert (usage.node_hours, usage.gpu_hours) == (2.0, None)


def test_an_attempt_that_never_came_to_a_step_was_starting(run: RunDir) -> None:
    attempt_of(run, (0, 1), None, steps=None)
    attempt_of(run, (2, 3), Spent(), steps=(0, 0))
    usage = measured(run, **TRAINING)
    assert (usage.node_hours, usage.startup, usage.other) == (4.0, 4.0, 0.0)


def test_where_the_waiting_of_one_attempt_is_unknown_it_is_in_the_computing(run: RunDir) -> None:
    attempt_of(run, (0, 1), spent(0, 1, 0.5, 0))
    attempt_of(run, (1, 2), spent(1, 1, None, 0), steps=(100, 200))
    usage = measured(run, **TRAINING)
    assert (usage.computing, usage.waiting, usage.other) == (4.0, None, 0.0)


def test_the_last_sign_ends_an_attempt_whose_end_nobody_has_recorded(run: RunDir) -> None:
    lost = attempt_of(run, (0, None), spent(0.5, 0.5, 0, 0))
    for path in (lost.record, lost.alive):
        os.utime(path, (BEGAN + HOUR, BEGAN + HOUR))
    usage = measured(run, **TRAINING)
    assert (usage.node_hours, usage.startup) == (2.0, 1.0)
    at_work = measure_usage(
        History.read(run), spec(**TRAINING), until=BEGAN + 2 * HOUR, spent=spent(0.5, 1.5, 0, 0)
    )
    assert at_work is not None
    assert (at_work.node_hours, at_work.computing) == (4.0, 3.0)


def test_of_a_command_without_a_loop_the_whole_alone_is_known(run: RunDir) -> None:
    attempt_of(run, (0, 3), None, steps=None)
    assert measure_usage(History.read(run), spec(gpus=0, command=("python", "mine.py"))) == Usage(
        node_hours=6.0
    )


def test_a_commands_gpus_are_as_busy_as_the_mean_of_all_samples(run: RunDir) -> None:
    for number, samples in ((0, 30), (1, 10)):
        made = attempt_of(run, (number, number + 1), None, steps=None)
        write_record(
            made.outcomes / "gpus-0.json",
            GpuUse("h01", 4, samples, 0.5 + number / 2, 400.0, 9 + number),
        )
    (made.outcomes / "gpus-4.json").write_text("torn")
    usage = measure_usage(History.read(run), spec(command=("python", "mine.py")))
    assert usage == Usage(
        node_hours=4.0,
        gpu_hours=16.0,
        gpu_utilization=0.625,
        gpu_watts=400.0,
        gpu_peak_memory_bytes=10,
    )


def test_before_the_first_attempt_nothing_is_paid(run: RunDir) -> None:
    assert measure_usage(History.read(run), spec(**TRAINING)) is None
    begin(run)  # whose start nobody has recorded
    assert measure_usage(History.read(run), spec(**TRAINING)) is None


@pytest.mark.parametrize("nodelist", ["", "h[01-", "localhost"])
def test_a_list_of_nodes_that_cannot_be_read_costs_nothing_else(run: RunDir, nodelist: str) -> None:
    attempt_of(run, (0, 1), spent(0, 1, 0, 0), nodelist=nodelist)
    assert measured(run, **TRAINING).node_hours == (1.0 if nodelist == "localhost" else 2.0)


def test_clocks_that_differ_make_no_part_negative(run: RunDir) -> None:
    attempt_of(run, (0, 1), spent(-2, 5, 9, 3))
    usage = measure_usage(History.read(run), None)
    assert usage is not None
    assert whole(usage) == pytest.approx(usage.node_hours)
    assert all(value >= 0 for value in json.loads(json.dumps(vars(usage))).values() if value)
