import base64
import math
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp.checkpoints import catalog, state, writer
from clusterddp.data.loader import Images, Loader
from clusterddp.errors import CheckpointError, TrainingError
from clusterddp.files import read_json_lines
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import WorstImage
from clusterddp.run.run_dir import RunDir
from clusterddp.training import cuda_graph, loop
from clusterddp.training.loop import Result, train
from clusterddp.training.stop import Deadline
from tests.training.capturing import Captures, captures
from tests.training.ranks import run_ranks
from tests.training.trainings import (
    after,
    agree,
    asked_at_once,
    build,
    config,
    train_alone,
    train_rank,
)

from .trainings import generator_states

__all__ = ["captures"]

# 2,000 images in batches of 200: two epochs of 10 steps.
EPOCH, END = 10, 20


def lines_of(run: Path, kind: str) -> list[int]:
    return [line["step"] for line in read_json_lines(RunDir(run).metrics) if line["kind"] == kind]


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in RunDir(run).checkpoints.glob("*.pt"))


def assert_equal_within_rounding(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


# A run that is cut off and started again ---------------------------------------------------------


@pytest.fixture(scope="module")
def whole(synthetic_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run in one piece ends with."""
    run = tmp_path_factory.mktemp("whole")
    (result,) = run_ranks(1, train_rank, config(synthetic_dir), run)
    return {**result, "eval": lines_of(run, "eval"), "train": lines_of(run, "train")}


@pytest.mark.parametrize(
    "stops",
    [
        *([0], [EPOCH], [END], [3, 14]),
        *(
            pytest.param(stops, marks=[pytest.mark.slow, pytest.mark.release])
            for stops in (
                *([1], [4], [EPOCH - 1], [EPOCH + 1], [END - 1], [0, 0, 5]),
                *([EPOCH, EPOCH], [EPOCH, EPOCH + 1], [6, 7, 8]),
            )
        ),
    ],
)
def test_a_run_cut_off_anywhere_ends_as_one_in_a_piece(
    stops: list[int], synthetic_dir: Path, tmp_path: Path, whole: dict[str, Any], alone: None
) -> None:
    settings = config(synthetic_dir)
    for stop in stops:
        cut = train_alone(settings, tmp_path, stop)
        assert (cut["reason"], cut["step"]) == ("signal", stop)
        content = state.load(RunDir(tmp_path).checkpoints / catalog.name_of(stop))
        assert content["step"] == content["images"] // 200 == stop
    done = train_alone(settings, tmp_path)
    assert done["reason"] == ""
    for name in ("step", "images", "sha256", "accuracy", "best", "draws"):
        assert done[name] == whole[name], name
    assert lines_of(tmp_path, "train") == whole["train"] == list(range(1, END + 1))
    assert lines_of(tmp_path, "eval") == whole["eval"] == [EPOCH, END]


@pytest.mark.parametrize(
    "cap", [pytest.param(25.0, marks=[pytest.mark.slow, pytest.mark.release]), 0.01]
)
def test_four_ranks_cut_off_in_mid_epoch_end_with_the_very_weights(
    cap: float, synthetic_dir: Path, tmp_path: Path
) -> None:
    settings = config(synthetic_dir, batch_size=50, bucket_cap_mb=cap)
    one = run_ranks(4, train_rank, settings, tmp_path / "one")
    assert (len(one[0]["buckets"].split(",")) > 1) == (cap < 1)
    cut = run_ranks(4, train_rank, settings, tmp_path / "cut", {2: 7})
    assert {(rank["reason"], rank["step"]) for rank in cut} == {("signal", 7)}
    again = run_ranks(4, train_rank, settings, tmp_path / "cut", {0: 8, 1: 8})
    assert {(rank["reason"], rank["step"]) for rank in again} == {("signal", 8)}
    rest = run_ranks(4, train_rank, settings, tmp_path / "cut")
    assert {rank["sha256"] for rank in rest} == {one[0]["sha256"]}
    assert [rank["draws"] for rank in rest] == [rank["draws"] for rank in one]
    assert rest[0]["draws"] != rest[1]["draws"]


def test_a_run_goes_on_at_other_world_sizes_with_its_batch_its_rate_and_its_place(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, batch_size=100, lr_scaling="linear")
    one = run_ranks(2, train_rank, settings, tmp_path / "one", None, False)
    run_ranks(2, train_rank, settings, tmp_path / "cut", {0: 6}, False)
    run_ranks(4, train_rank, settings, tmp_path / "cut", {3: 13}, False)
    done = train_alone(settings, tmp_path / "cut", noisy=False)
    assert (done["step"], done["images"]) == (END, 4000)
    rates = [
        [line["lr"] for line in read_json_lines(RunDir(tmp_path / name).metrics)]
        for name in ("one", "cut")
    ]
    assert rates[0] == rates[1]
    # Another number of summands, each over other images: equal up to rounding, not bit for bit.
    assert_equal_within_rounding(done, one[0])


def test_a_finished_run_that_is_started_again_changes_nothing(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, epochs=1)
    first = train_alone(settings, tmp_path)
    again = train_alone(settings, tmp_path)
    assert (again["sha256"], again["accuracy"]) == (first["sha256"], first["accuracy"])
    assert lines_of(tmp_path, "eval") == [EPOCH]
    assert names_in(tmp_path) == ["step-00000010.pt"]


def test_the_best_result_outlives_the_attempt_and_the_cleaning_up(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracies = {2: 0.9, 4: 0.3, 6: 0.4, 8: 0.5}

    left = iter(accuracies.values())
    monkeypatch.setattr(
        "clusterddp.training.loop.evaluate", lambda *_, **__: Result(next(left), 1.0, torch.eye(10))
    )
    settings = config(
        synthetic_dir, max_steps=8, eval_every="2steps", save_every="2steps", keep_last=1
    )
    train_alone(settings, tmp_path, 4)
    done = train_alone(settings, tmp_path)
    assert (done["best"].step, done["best"].accuracy) == (2, 0.9)
    assert names_in(tmp_path) == ["step-00000002.pt", "step-00000008.pt"]
    older = Attempt(RunDir(tmp_path), 1).checkpoints
    assert not list(older.glob("*.pt")), "the attempt that went before keeps nothing twice"


def test_a_request_to_one_rank_stops_all_at_one_step(synthetic_dir: Path, tmp_path: Path) -> None:
    """Asked by the clock, as in life: nobody looks at every step."""
    ranks = run_ranks(2, stopped_by_one_rank, config(synthetic_dir, epochs=100), tmp_path)
    assert ranks[0] == ranks[1]
    reason, step, seen_at = ranks[0]
    assert reason == "SIGTERM"
    assert step >= 5
    assert seen_at[-1] == step
    assert catalog.name_of(step) in names_in(tmp_path)


def stopped_by_one_rank(
    rank: int, world_size: int, settings: TrainConfig, run: Path
) -> tuple[str, int, list[int]]:

    box = [agree(settings, run, world_size) if rank == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    ours = build(settings, box[0])
    asked = ours._poll.ask
    seen_at: list[int] = []

    def ask(step: int, wishes: list[int]) -> list[int]:
        seen_at.append(step)
        return asked(step, wishes)

    ours._poll.ask = ask  # type: ignore[method-assign]
    if rank == 1:
        after(ours, 5, lambda: ours._request.note("SIGTERM"))
        after(ours, 6, lambda: ours._request.note("SIGTERM"))  # twice is once
    return train(ours), ours.position.step, seen_at


# Time ---------------------------------------------------------------------------------------------


class Clock:
    """The monotonic clock of the loop, which goes on only by steps of the training."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def timed(
    clock: Clock, settings: TrainConfig, run: Path, seconds_a_step: float, **more: Any
) -> loop.Training:
    """A training whose steps take so long, and whose ranks look at every one."""
    ours = build(settings, agree(settings, run), **more)
    asked_at_once(ours, -1)
    step = ours.journal.step

    def slow() -> None:
        step()
        clock.now += seconds_a_step

    ours.journal.step = slow  # type: ignore[method-assign]
    return ours


def lines_by_skewed_clocks(
    rank: int, world_size: int, settings: TrainConfig, run: Path, seconds_a_step: list[float]
) -> list[int]:
    """The steps after which a rank writes a line with the others, by clocks that differ."""
    now = [1000.0 + 5000 * rank]
    time.monotonic = lambda: now[0]  # type: ignore[assignment]
    box = [agree(settings, run, world_size) if rank == 0 else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    ours = build(settings, box[0])
    step, tell, written = ours.journal.step, ours._log, list[int]()

    def goes_on() -> None:
        step()
        now[0] += seconds_a_step[rank]

    def told() -> None:
        if ours.learner.tally.steps:
            written.append(ours.steps)
        tell()

    ours.journal.step, ours._log = goes_on, told  # type: ignore[method-assign]
    train(ours)
    return written[:-1]  # without the one at the end


@pytest.mark.parametrize(
    ("log_every", "seconds_a_step", "expected"),
    [
        (0, [1 / 8000, 1 / 800], [100, 500, 900]),  # by the slower, 400 steps in half a second
        (0, [1 / 8000, 1 / 160], [*range(100, 950, 100)]),
        (90, [1 / 8000, 1 / 80_000], [*range(90, 950, 90)]),
    ],
)
def test_a_line_is_written_at_steps_that_the_ranks_agree_on(
    log_every: int, seconds_a_step: list[float], expected: list[int], synthetic_dir: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Two a second at most, by the slower rank's clock; those that were asked for are kept."""
    settings = config(
        synthetic_dir, model="mlp", batch_size=1, max_steps=950, log_every=log_every, keep_last=9,
        save_every="100epochs", eval_every="100epochs",
    )  # fmt: skip
    ranks = run_ranks(2, lines_by_skewed_clocks, settings, tmp_path / "run", seconds_a_step)
    assert ranks == [expected, expected]
    assert lines_of(tmp_path / "run", "train") == [*expected, 950]


def test_an_interval_of_minutes_goes_by_the_clock(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(synthetic_dir, save_every="2m", keep_last=99, log_every=100)
    assert train(timed(Clock(monkeypatch), settings, tmp_path, 35.0)) == ""
    # The first after 40 s, so that its cost is known; then every four steps, and the end.
    steps = [2, 6, 10, 14, 18, 20]
    assert names_in(tmp_path) == [catalog.name_of(step) for step in steps]
    assert lines_of(tmp_path, "train") == steps, "what was trained until a save is accounted for"


def test_what_a_gpu_still_has_to_do_is_counted_at_every_line(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a GPU takes a hundred seconds for what was queued, whenever it is awaited."""
    clock, waited, now = Clock(monkeypatch), list[int](), time.perf_counter
    ours = timed(clock, config(synthetic_dir, max_steps=6, log_every=2), tmp_path, 0.0)

    def synchronize() -> None:
        waited.append(ours.steps)
        clock.now += 100.0

    ours.learner.waiting.on_gpu = True
    ours._poll.due = lambda _: False  # type: ignore[method-assign]
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now + now())
    assert train(ours) == ""
    lines = [line for line in read_json_lines(RunDir(tmp_path).metrics) if line["kind"] == "train"]
    assert ([line["step"] for line in lines], waited) == ([2, 4, 6], [2, 4, 6])
    assert [line["seconds"] // 100 for line in lines] == [1, 2, 3]


def test_the_first_checkpoint_of_every_attempt_comes_after_forty_seconds(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    settings = config(synthetic_dir, save_every="9epochs", eval_every="9epochs", max_steps=9)
    train(timed(clock, settings, tmp_path, 15.0))
    assert names_in(tmp_path) == ["step-00000003.pt", "step-00000009.pt"]
    settings = config(synthetic_dir, save_every="9epochs", eval_every="9epochs", max_steps=18)
    train(timed(clock, settings, tmp_path, 15.0))
    assert names_in(tmp_path)[-2:] == ["step-00000012.pt", "step-00000018.pt"]


def test_the_ranks_stop_by_their_own_clock_before_the_time_is_over(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    deadline = Deadline()
    deadline.set(100.0)
    ours = timed(clock, config(synthetic_dir), tmp_path, 10.0, deadline=deadline)
    assert train(ours) == "time limit"
    # 100 s less two steps of 10 s, a second, and five to spare: later than 74 s.
    assert ours.position.step == 8
    assert names_in(tmp_path)[-1] == "step-00000008.pt"


# What is written ----------------------------------------------------------------------------------


def test_the_end_is_evaluated_and_saved_whatever_the_intervals(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(
        synthetic_dir, max_steps=7, save_every="3steps", eval_every="5steps", keep_last=9
    )
    train_alone(settings, tmp_path)
    # 5 for the best result so far, which is to be kept.
    assert names_in(tmp_path) == [catalog.name_of(step) for step in (3, 5, 6, 7)]
    assert lines_of(tmp_path, "eval") == [5, 7]
    for line in read_json_lines(RunDir(tmp_path).metrics):
        assert set(line) == {
            "kind", "step", "epoch", "loss", "accuracy", "images_per_second", "lr", "seconds",
            "time", *(["rank_images_per_second"] if line["kind"] == "train" else []),
        }  # fmt: skip
        assert all(
            math.isfinite(value) for value in line.values() if isinstance(value, int | float)
        )


def test_a_full_disk_under_the_metrics_is_said_once_and_ends_nothing(
    synthetic_dir: Path, tmp_path: Path, alone: None, logged: list[str]
) -> None:
    settings = config(synthetic_dir, max_steps=5)
    agreed = agree(settings, tmp_path)
    metrics = Attempt(RunDir(tmp_path), 1).metrics
    metrics.unlink()
    metrics.symlink_to("/dev/full")
    assert train(build(settings, agreed)) == ""
    said = "\n".join(logged)
    assert said.count(f"cannot write {metrics}: No space left on device") == 1
    assert "step 5: training loss" in said
    assert names_in(tmp_path) == ["step-00000005.pt"]


def test_a_last_checkpoint_that_fails_is_tried_again_with_all_that_belongs_to_it(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = writer.Saver._publish
    failures: list[BaseException] = [OSError(28, "No space left on device")]

    def failing(self: writer.Saver, *content: Any) -> bool:
        if failures:
            raise failures.pop()
        return publish(self, *content)

    monkeypatch.setattr(writer.Saver, "_publish", failing)
    train_alone(config(synthetic_dir), tmp_path, 4)
    assert names_in(tmp_path) == ["step-00000004.pt"]
    content = state.load(RunDir(tmp_path).checkpoints / "step-00000004.pt")
    assert len(content["random_states"]["sizes"]) == 1

    failures += [OSError(28, "No space left on device")] * 9
    train_alone(config(synthetic_dir), tmp_path, 6)  # whoever is asked to leave leaves
    failures += [OSError(28, "No space left on device")] * 9
    with pytest.raises(CheckpointError, match="the last whole one has step 4"):
        train_alone(config(synthetic_dir), tmp_path)


def test_who_waits_for_the_last_checkpoint_is_saving(
    synthetic_dir: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By these words the watchdog names a rank that hangs there."""
    settings, said = config(synthetic_dir, max_steps=4), list[str]()
    ours, wait = build(settings, agree(settings, tmp_path, 1)), writer.Saver.wait

    def waiting(self: writer.Saver) -> bool:
        said.append(ours._progress.position.words())
        return wait(self)

    monkeypatch.setattr(writer.Saver, "wait", waiting)
    assert train(ours) == ""
    assert said == ["saving after step 4"]


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, lr=1e30, warmup_steps=0, max_steps=20, log_every=100)
    with pytest.raises(TrainingError, match=r"loss is (nan|inf).*--lr"):
        train_alone(settings, tmp_path)
    assert not names_in(tmp_path)


def test_weights_that_the_very_last_step_has_lost_are_no_result(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    settings = config(synthetic_dir, lr=1e37, warmup_steps=0, max_steps=1)
    with pytest.raises(TrainingError, match=r"the test loss is (nan|inf) at step 1"):
        train_alone(settings, tmp_path)
    assert not names_in(tmp_path)
    assert [line["kind"] for line in read_json_lines(RunDir(tmp_path).metrics)] == ["train"]


# What is trained ----------------------------------------------------------------------------------


def test_ranks_agree_on_weights_and_results_with_one_bucket_or_several(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    by_cap = {}
    for cap in (25.0, 0.02):
        settings = config(synthetic_dir, max_steps=4, bucket_cap_mb=cap)
        ranks = run_ranks(2, train_rank, settings, tmp_path / f"run-{cap}")
        assert ranks[0]["sha256"] == ranks[1]["sha256"]
        assert ranks[0]["accuracy"] == ranks[1]["accuracy"]
        by_cap[cap] = ranks[0]
    assert len(by_cap[25.0]["buckets"].split(",")) == 1
    assert len(by_cap[0.02]["buckets"].split(",")) > 1
    assert by_cap[25.0]["sha256"] == by_cap[0.02]["sha256"]  # a sum of two knows no order


def test_two_ranks_step_as_one_process_does_on_the_joined_batch(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    two = run_ranks(
        2, train_rank, config(synthetic_dir, batch_size=32, max_steps=3), tmp_path / "two",
        None, False,
    )  # fmt: skip
    settings = config(synthetic_dir, batch_size=64, max_steps=3)
    assert_equal_within_rounding(two[0], train_alone(settings, tmp_path / "one", noisy=False))


def test_every_epoch_has_an_order_of_its_own_and_holds_each_image_once(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    ours = build(config(synthetic_dir), agree(config(synthetic_dir), tmp_path))
    taken: list[list[int]] = []
    batches = ours.train_set.batches

    def recorded(
        order: torch.Tensor, size: int, salt: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        taken.append(order.tolist())
        return batches(order, size, salt)

    ours.train_set.batches = recorded  # type: ignore[method-assign]
    try:
        train(ours)
    finally:
        del ours.train_set.batches
    first, second = (order for order in taken if len(order) == 2000)
    assert sorted(first) == sorted(second) == list(range(2000))
    assert first != second


def test_training_learns(synthetic_dir: Path, tmp_path: Path, alone: None) -> None:
    settings = config(synthetic_dir, batch_size=64, warmup_steps=10)
    assert train_alone(settings, tmp_path, noisy=False)["accuracy"] > 0.5


@pytest.mark.parametrize(("wanted", "recorded"), [("", False), ("0", True), ("1", False)])
def test_a_rank_is_profiled_where_it_is_the_one_named(
    wanted: str, recorded: bool, synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    agreed = agree(config(synthetic_dir), tmp_path)
    assert bool(build(config(synthetic_dir, profile=wanted), agreed).profiler) is recorded


# A captured step ---------------------------------------------------------------------------------


def build_captured(
    synthetic_dir: Path, run: Path, captured: bool = True, **settings: Any
) -> loop.Training:
    """Of sgd, which computes with a rate of float32, as a captured step reads it."""
    ours = config(synthetic_dir, **{"optimizer": "sgd", "max_steps": 12, **settings})
    return build(ours, replace(agree(replace(ours, cuda_graph="auto"), run), cuda_graph=captured))


def test_a_captured_training_comes_to_the_weights_of_a_plain_one(
    synthetic_dir: Path, tmp_path: Path, captures: Captures, alone: None
) -> None:
    """With the last batch of an epoch smaller, and an evaluation and checkpoints in between."""
    settings = {"batch_size": 192, "save_every": "5steps", "eval_every": "7steps"}
    plain = build_captured(synthetic_dir, tmp_path / "plain", False, **settings)
    captured = build_captured(synthetic_dir, tmp_path / "captured", **settings)
    assert train(plain) == train(captured) == ""
    assert state.weights_sha256(captured.model) == state.weights_sha256(plain.model)
    assert captured.result.accuracy == plain.result.accuracy
    assert (captures.made, plain.learner.is_captured) == (1, False)


def test_a_captured_training_that_is_cut_off_ends_as_one_in_a_piece(
    synthetic_dir: Path, tmp_path: Path, captures: Captures, alone: None
) -> None:
    whole = build_captured(synthetic_dir, tmp_path / "whole")
    train(whole)
    cut = build_captured(synthetic_dir, tmp_path / "cut")
    asked_at_once(cut, 5)
    assert train(cut) == "signal"
    assert not captures.alive
    rest = build_captured(synthetic_dir, tmp_path / "cut")
    assert (rest.position.step, train(rest)) == (5, "")
    assert state.weights_sha256(rest.model) == state.weights_sha256(whole.model)
    train(build_captured(synthetic_dir, tmp_path / "cut"))
    assert captures.made == 3


def test_the_capture_is_outside_the_clock_of_the_training(
    synthetic_dir: Path, tmp_path: Path, captures: Captures, alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    now = [0.0]

    def slow(*work: Any) -> Any:
        now[0] += 1000.0
        return captures(*work)

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("time.perf_counter", tick)
    monkeypatch.setattr(cuda_graph, "capture", slow)
    ours = build_captured(synthetic_dir, tmp_path)
    train(ours)
    assert captures.made == 1
    assert ours.position.seconds < 1000 <= ours.capture_seconds


@pytest.mark.parametrize("end", ["done", "signal", "error"])
def test_a_training_leaves_no_graph_behind_however_it_ends(
    end: str, synthetic_dir: Path, tmp_path: Path, captures: Captures, alone: None
) -> None:
    """NCCL would wait for it when the process group is left, and for ever."""

    def fail() -> None:
        assert captures.alive
        raise KeyboardInterrupt

    ours = build_captured(synthetic_dir, tmp_path)
    if end == "error":
        after(ours, 3, fail)
        with pytest.raises(KeyboardInterrupt):
            train(ours)
    else:
        asked_at_once(ours, 3 if end == "signal" else -1)
        train(ours)
    assert (captures.made, len(captures.alive)) == (1, 0)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_a_capture_that_fails_is_a_warning_of_the_report_and_the_training_goes_on(
    synthetic_dir: Path, tmp_path: Path, captures: Captures, logged: list[str], alone: None
) -> None:
    plain = build_captured(synthetic_dir, tmp_path / "plain", False)
    train(plain)
    captures.refuses = "out of memory"
    ours = build_captured(synthetic_dir, tmp_path / "ours")
    train(ours)
    assert state.weights_sha256(ours.model) == state.weights_sha256(plain.model)
    assert not ours.learner.is_captured
    [warning] = ours.warnings
    assert "out of memory; training without one" in warning
    assert len([line for line in logged if warning in line]) == 1


def test_a_set_without_a_full_batch_is_trained_without_a_graph_and_the_report_says_so(
    synthetic_dir: Path, tmp_path: Path, captures: Captures, alone: None
) -> None:
    ours = build_captured(synthetic_dir, tmp_path, batch_size=60_000, max_steps=2, epochs=2)
    train(ours)
    assert (captures.made, ours.position.step, ours.warnings) == (0, 2, [])
    assert not ours.learner.is_captured


def not_in_eval(_: torch.Tensor) -> None:
    raise RuntimeError("cudnn RNN backward can only be called in training mode")


class Recurrent(nn.Module):
    """Does a backward pass in training alone, as a recurrent layer on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layer(images.flatten(1))
        if scores.requires_grad and not self.training:
            scores.register_hook(not_in_eval)
        return scores


OWN = f"{__name__}:Recurrent"


@pytest.mark.parametrize(
    ("settings", "captured", "settled", "given"),
    [
        ({}, False, [200], [200]),
        ({"gradient_accumulation_steps": 3}, False, [200], [600]),
        ({"batch_size": 60_000}, False, [2000], [2000]),
        ({"batch_size": 60_000, "gradient_accumulation_steps": 3}, False, [667], [2000]),
        ({"model": OWN}, False, [], []),
        ({}, True, [], [200]),
        ({"batch_size": 60_000}, True, [], [2000]),
        ({"model": OWN}, True, [], [200]),
    ],
)
def test_before_its_first_step_a_gpu_alone_does_a_pass_with_a_built_in_model_that_is_not_captured(
    settings: dict[str, Any], captured: bool, settled: list[int], given: list[int],
    synthetic_dir: Path, tmp_path: Path, captures: Captures, alone: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With as many images as a pass of the training has, and as the set has at most."""
    ours = build_captured(synthetic_dir, tmp_path, captured, **settings)
    ours.loads_kernels = True
    sizes: dict[str, list[int]] = {"settle": [], "capture": []}

    def spy(name: str) -> Any:
        act = getattr(ours.learner, name)

        def counted(images: torch.Tensor, labels: torch.Tensor) -> None:
            assert len(images) == len(labels)
            sizes[name].append(len(labels))
            act(images, labels)

        return counted

    for name in sizes:
        monkeypatch.setattr(ours.learner, name, spy(name))
    ours.prepare()
    ours.learner.close()
    assert sizes == {"settle": settled, "capture": given}
    assert captures.made == (captured and given == [200])


def test_a_model_of_ones_own_that_learns_in_training_alone_trains_on_one_gpu(
    synthetic_dir: Path, tmp_path: Path, alone: None
) -> None:
    ours = build_captured(synthetic_dir, tmp_path, False, model=OWN, max_steps=2)
    ours.loads_kernels = True
    train(ours)
    assert ours.position.step == 2


def test_a_step_that_was_to_be_captured_and_cannot_be_ends_the_run(
    synthetic_dir: Path, tmp_path: Path, captures: Captures, alone: None
) -> None:
    captures.refuses = "out of memory"
    ours = build_captured(synthetic_dir, tmp_path, device="auto", cuda_graph="on")
    with pytest.raises(TrainingError, match=r"out of memory\. Train without one"):
        train(ours)


CPU = torch.device("cpu")
# Label, and what the model below takes the image for.
SEEN = [(0, 0), (1, 1), (2, 1), (2, 2), (1, 2), (0, 0), (2, 1)]


class Reads(nn.Module):
    """Its scores are in the image: what it takes it for, and how sure it is of that."""

    def forward(self, images: Tensor) -> Tensor:
        scores = torch.zeros(len(images), 3)
        flat = images.flatten(1)
        scores[torch.arange(len(images)), flat[:, 0].long()] = flat[:, 1]
        return scores


def floats() -> Images:
    images = torch.zeros(len(SEEN), 1, 2, 2)
    images[:, 0, 0, 0] = torch.tensor([float(taken) for _, taken in SEEN])
    images[:, 0, 0, 1] = torch.arange(1.0, len(SEEN) + 1)  # the later, the surer
    return Images(images, torch.tensor([label for label, _ in SEEN]), CPU)


def evaluated(rank: int, world_size: int) -> dict[str, Any]:
    result = loop.evaluate(Reads(), floats(), CPU, nullcontext)
    return {"accuracy": result.accuracy, "loss": result.loss, **asdict(result.record(7, floats()))}


def test_the_result_is_one_at_every_world_size_each_image_counted_once(alone: None) -> None:
    """With more ranks than would fill a batch, and one that has no image at all."""
    one = evaluated(0, 1)
    assert one["confusion"] == ((2, 0, 0), (0, 1, 1), (0, 2, 1))
    assert one["accuracy"] == 4 / 7
    for world_size in (2, 8):
        for theirs in run_ranks(world_size, evaluated):
            assert theirs["confusion"] == one["confusion"]
            assert theirs["accuracy"] == one["accuracy"]
            assert [row["index"] for row in theirs["worst"]] == [
                row["index"] for row in one["worst"]
            ]
            assert abs(theirs["loss"] - one["loss"]) < 1e-9


class Draws(Reads):
    """Random in evaluation too, as a model that averages over dropout."""

    def forward(self, images: Tensor) -> Tensor:
        torch.rand(()), random.random(), np.random.random()
        return super().forward(images)


class Turned(list[tuple[Tensor, int]]):
    """Transforms at random, test images too."""

    def __getitem__(self, index: Any) -> Any:
        torch.rand(()), random.random(), np.random.random()
        return super().__getitem__(index)


def test_evaluating_takes_no_random_number_from_the_training(alone: None) -> None:
    [(images, labels)] = floats().batches(torch.arange(len(SEEN)), len(SEEN))
    turned = Loader(Turned(zip(images, labels, strict=True)), CPU, 0)
    for model, test_set in ((Draws(), floats()), (Reads(), turned)):
        before = generator_states()
        loop.evaluate(model, test_set, CPU, nullcontext).record(7, test_set)
        assert torch.equal(generator_states(), before)


def test_the_worst_images_come_first_with_what_they_were_taken_for(alone: None) -> None:
    worst = evaluated(0, 1)["worst"]
    assert [(row["index"], row["label"], row["predicted"]) for row in worst[:3]] == [
        (6, 2, 1), (4, 1, 2), (2, 2, 1),
    ]  # fmt: skip
    losses = [row["loss"] for row in worst]
    assert losses == sorted(losses, reverse=True)
    assert len(worst) == len(SEEN)


def test_their_pixels_are_kept_as_bytes() -> None:
    pixels = torch.arange(8, dtype=torch.uint8).view(2, 2, 2)
    labels = torch.tensor([0, 1])
    result = Result(0.5, 1.0, torch.eye(2), (WorstImage(1, 1, 0, 2.0),))
    [kept] = result.record(7, Images(pixels, labels, CPU)).worst
    assert kept.shape == (2, 2)
    assert list(base64.b64decode(kept.pixels)) == [4, 5, 6, 7]
    # Other values are stretched over the whole range; of several channels it is the first.
    pairs = [(torch.tensor([[[-1.0, 0.0], [0.0, 1.0]]] * 3), 0)] * 2
    [kept] = result.record(7, Loader(pairs, CPU, 0)).worst
    assert list(base64.b64decode(kept.pixels)) == [0, 127, 127, 255]
