import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp import log
from clusterddp.data.loader import Images
from clusterddp.errors import TrainingError
from clusterddp.models import nets
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training import batch_size, cuda_graph
from clusterddp.training.batch_size import (
    NEXT_TOO_LARGE,
    NO_FASTER,
    OUT_OF_MEMORY,
    SizeResult,
    Trial,
)
from clusterddp.training.stop import StopRequest
from tests.training.capturing import Captures
from tests.training.ranks import run_ranks

CPU = torch.device("cpu")
MIB = 1 << 20


def digits(count: int) -> Images:
    return Images(torch.zeros(count, 28, 28, dtype=torch.uint8), torch.arange(count) % 10, CPU)


def agreed(world_size: int = 1, **fields: Any) -> Agreement:
    return Agreement("gloo", "cpu", 1, world_size, **{"hosts": ("h01",), **fields})


class Limited(nn.Module):
    """Takes batches of up to `most` images; counts the passes."""

    most = 64
    passes: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(28 * 28, 10)

    def forward(self, images: Tensor) -> Tensor:
        self.passes.append(len(images))
        if len(images) > self.most:
            torch.empty(1 << 55)  # as much as no host has
        scores: Tensor = self.weights(images.flatten(1))
        return scores


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Limited]]:
    Limited.passes = []
    monkeypatch.setitem(nets.MODELS, "convnet", Limited)
    yield Limited


class Clock:
    """Goes on by so much at each look."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def trial(clock: Callable[[], float], *, world_size: int = 1, **more: Any) -> Trial:
    return Trial(TrainConfig(**more), agreed(world_size), 0, digits(2000), CPU, clock)


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        (64, 300, [16, 32, 64, 128, 256]),
        (16, 16, [16]),
        (100, 450, [25, 50, 100, 200, 400]),
        (75, 200, [75, 150]),
        (8, 40, [8, 16, 32]),
        (64, 10, [10]),
        (64, 0, [1]),
    ],
)
def test_sizes_double_pass_the_wanted_one_and_end_at_the_share_of_a_rank(
    wanted: int, most: int, expected: list[int]
) -> None:
    assert batch_size.sizes(wanted, most) == expected


def searched(
    speeds: Sequence[float], last: str = "", *, to_the_end: bool = False
) -> list[SizeResult]:
    """What comes of sizes 16, 32, … at these speeds; the last one has this note."""
    *others, final = rows(*speeds)
    results = iter([*others, dataclasses.replace(final, note=last)])
    sizes = [16 << n for n in range(12)]
    return list(batch_size.search(sizes, lambda _: next(results), to_the_end=to_the_end))


def test_two_sizes_in_turn_that_are_no_faster_end_the_search() -> None:
    rows = searched([100, 200, 205, 209])
    assert [row.batch_size for row in rows] == [16, 32, 64, 128]
    assert [row.note for row in rows] == ["", "", "", NO_FASTER]


def test_a_size_that_is_faster_again_lets_the_search_go_on() -> None:
    assert len(searched([100, 90, 200, 190, 400, 410, 415])) == 7


def test_a_gpu_is_tried_until_a_size_does_not_fit() -> None:
    rows = searched([100, 100, 100, 100, 100, 0], OUT_OF_MEMORY, to_the_end=True)
    assert [row.note for row in rows] == ["", "", "", "", "", OUT_OF_MEMORY]


def test_memory_that_gets_short_ends_the_search() -> None:
    assert [row.note for row in searched([100, 200], NEXT_TOO_LARGE)] == ["", NEXT_TOO_LARGE]


def rows(*speeds: float, failed: bool = False) -> list[SizeResult]:
    done = [SizeResult(16 << n, speed, MIB) for n, speed in enumerate(speeds)]
    return [*done, SizeResult(16 << len(speeds), 0.0, MIB, OUT_OF_MEMORY)] if failed else done


@pytest.mark.parametrize(
    ("speeds", "expected"), [((1, 2, 3), 64), ((1, 2.9, 3), 32), ((3, 2, 1), 16), ((1, 3, 2.9), 32)]
)
def test_the_smallest_size_about_as_fast_as_the_fastest_is_told(
    speeds: tuple[float, ...], expected: int
) -> None:
    assert batch_size.best(rows(*speeds)).batch_size == expected
    assert batch_size.best(rows(*speeds, failed=True)).batch_size == expected


def test_where_not_even_the_first_size_fits_the_error_says_so() -> None:
    with pytest.raises(TrainingError, match="not even 16 images per rank fit"):
        batch_size.best(rows(failed=True))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (TrainConfig(batch_size=16, lr=0.01, optimizer="sgd"), "--lr 0.04 (linear scaling rule"),
        (TrainConfig(batch_size=256, lr=0.01, optimizer="sgd"), "--lr 0.0025 (linear scaling rule"),
        (
            TrainConfig(batch_size=16, lr=0.01),
            "adam often trains better with the square root, --lr 0.02",
        ),
        (TrainConfig(batch_size=64), "--batch-size 64 (unchanged)"),
    ],
)
def test_the_learning_rate_goes_with_the_size(config: TrainConfig, expected: str) -> None:
    told = batch_size.advice(config, rows(1, 2, 3))
    assert "use: --batch-size 64" in told and expected in told
    assert ("root" in told) is (config.optimizer == "adam" and config.batch_size != 64)


def test_a_size_is_measured_over_seconds_or_a_few_steps_after_warm_up(
    limited: type[Limited],
) -> None:
    assert trial(Clock(0.1))(32).images_per_second == pytest.approx(32 / 0.1)
    assert limited.passes == [32] * (2 + 3)  # 0.3 s
    limited.passes.clear()
    assert trial(Clock(10.0))(32).images_per_second == pytest.approx(32 / 10)
    assert limited.passes == [32] * (2 + 2)


def test_a_step_is_that_of_the_training(limited: type[Limited]) -> None:
    marks: list[int] = []
    ours = trial(Clock(1.0), gradient_accumulation_steps=3, augment="affine")
    assert ours._learner(16, lambda: None).agreed.batch_size == 48  # what a graph is captured for
    tried = ours(16, lambda: marks.append(1))
    assert limited.passes == [16] * 3 * 4 and len(marks) >= 4
    assert tried.images_per_second == pytest.approx(48)
    assert tried.memory_bytes > 50 * MIB  # the whole process


def test_a_size_that_does_not_fit_is_told_and_the_next_ones_work(limited: type[Limited]) -> None:
    ours = trial(Clock(1.0))
    failed = ours(128)
    assert failed.note == OUT_OF_MEMORY and failed.images_per_second == 0
    assert ours(64).note != OUT_OF_MEMORY


def test_another_error_of_the_model_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nets.MODELS, "convnet", lambda: nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trial(Clock(1.0))(16)


def test_a_size_leaves_no_graph_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory would be missing to the next, also where the size does not fit."""
    captures = Captures()
    monkeypatch.setattr(cuda_graph, "capture", captures)
    ours = dataclasses.replace(trial(Clock(1.0)), agreed=agreed(cuda_graph=True))
    assert ours(16).images_per_second > 0
    assert (captures.made, captures.released) == (1, 1)

    def fail() -> float:
        raise MemoryError

    assert dataclasses.replace(ours, clock=fail)(16).note == OUT_OF_MEMORY
    assert (captures.made, captures.released) == (2, 2)


def test_a_capture_that_lacked_memory_is_known_by_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> float:
        try:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        except RuntimeError as error:
            raise TrainingError("the step cannot be captured") from error

    monkeypatch.setattr(Trial, "_speed", fail)
    assert trial(Clock(1.0))(16).note == OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("free", "world_size", "full"),
    [(1000, 1, False), (150, 1, True), (1000, 4, False), (700, 4, True), (None, 4, False)],
)
def test_a_cpu_is_not_filled_up(
    monkeypatch: pytest.MonkeyPatch, free: int | None, world_size: int, full: bool
) -> None:
    peaks = iter([500 * MIB, 600 * MIB])  # this size took 100 MiB
    monkeypatch.setattr(batch_size, "peak_bytes", lambda _: next(peaks))
    left = None if free is None else free * MIB
    monkeypatch.setattr(batch_size, "free_bytes", lambda: left)
    tried = trial(Clock(1.0), world_size=world_size)(16)
    assert (tried.note == NEXT_TOO_LARGE) is full and tried.memory_bytes == 600 * MIB


def together(rank: int, world_size: int) -> SizeResult:
    alone = SizeResult(16, 100.0 - rank, rank * MIB, "" if rank else NEXT_TOO_LARGE)
    return batch_size._together(alone, "", world_size, CPU)


def find(
    rank: int, world_size: int
) -> tuple[list[SizeResult], list[str], list[tuple[int, int]], SizeResult]:
    """On the last rank a batch of 128 does not fit."""
    Limited.passes = []
    Limited.most = 64 if rank == world_size - 1 else 10**6
    nets.MODELS["convnet"] = Limited
    said: list[str] = []
    marks: list[tuple[int, int]] = []
    with log.to(said.append):
        tried, reason = batch_size.find(
            TrainConfig(batch_size=32), agreed(world_size), rank=rank, train_set=digits(2000),
            device=CPU, mark=lambda *mark: marks.append(mark), request=StopRequest(),
        )  # fmt: skip
    assert reason == ""
    return tried, said, marks, together(rank, world_size)


def find_until_asked(rank: int, world_size: int) -> tuple[list[SizeResult], str, list[str]]:
    """Rank 1 is asked to stop while the first size is tried."""
    request, said = StopRequest(), []
    if rank == 1:
        request.note("SIGTERM")
    with log.to(said.append):
        rows, reason = batch_size.find(
            TrainConfig(batch_size=32), agreed(world_size), rank=rank, train_set=digits(2000),
            device=CPU, request=request,
        )  # fmt: skip
    return rows, reason, said


def test_a_request_to_one_rank_ends_it_on_all_after_that_size() -> None:
    (rows, reason, said), (same, other, _) = run_ranks(2, find_until_asked)
    assert rows == same and len(rows) == 1
    assert reason == other == "SIGTERM"
    assert "asked to stop: SIGTERM" in said[-1], "and no advice"


def test_ranks_agree_although_one_of_them_has_no_memory_left() -> None:
    (first, said, marks, both), (second, silence, _, same) = run_ranks(2, find)
    assert first == second and not silence
    assert both == same == SizeResult(16, 2 * 99.0, MIB, NEXT_TOO_LARGE)
    assert first[-1].batch_size <= 128
    assert {row.batch_size for row in first if row.note == OUT_OF_MEMORY} <= {128}
    assert all(row.images_per_second > 0 for row in first if row.note != OUT_OF_MEMORY)
    header, *lines, advice = said
    assert header.split() == ["batch", "per", "rank", "images/s", "memory", "per", "rank"]
    assert [line.split()[0] for line in lines] == [str(row.batch_size) for row in first]
    assert advice.startswith(f"use: --batch-size {batch_size.best(first).batch_size}")
    assert {size for size, _ in marks} == {row.batch_size for row in first}
