import dataclasses
import itertools
import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clusterddp.distributed import agreement
from clusterddp.distributed.agreement import POLL_SECONDS, Poll, RankInfo, decide
from clusterddp.errors import TrainingError
from clusterddp.files import load
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from tests.training.ranks import run_ranks


def info(rank: int, **fields: Any) -> RankInfo:
    known = RankInfo(
        rank=rank, world_size=4, local_rank=rank % 2, host=f"h0{1 + rank // 2}", pid=100 + rank,
        kind="cpu", device="cpu", gpu="", threads=4, torch="2.9",
    )  # fmt: skip
    return dataclasses.replace(known, **fields)


def gpu(rank: int, **fields: Any) -> RankInfo:
    known = {"kind": "cuda", "device": f"cuda:{rank % 2}", "gpu": f"GPU-{rank}"}
    return info(rank, **{**known, **fields})


def test_the_backend_follows_the_devices() -> None:
    assert decide(TrainConfig(), [info(0), info(1)]).backend == "gloo"
    assert decide(TrainConfig(), [gpu(0), gpu(1)]).backend == "nccl"
    assert decide(TrainConfig(backend="gloo"), [gpu(0), gpu(1)]).backend == "gloo"


def test_a_gpu_alone_starts_no_nccl_unless_told_to() -> None:
    assert decide(TrainConfig(), [gpu(0)]).backend == "gloo"
    assert decide(TrainConfig(backend="nccl"), [gpu(0)]).backend == "nccl"
    before = decide(TrainConfig(backend="nccl"), [gpu(0)])
    assert decide(TrainConfig(), [gpu(0)], before).backend == "nccl"  # as it was recorded


def test_the_fewest_threads_hold_for_all_unless_asked_for() -> None:
    ranks = [info(0, threads=8), info(1, threads=2)]
    assert decide(TrainConfig(), ranks).threads == 2
    assert decide(TrainConfig(threads=5), ranks).threads == 5


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([gpu(0), gpu(1, gpu="GPU-0")], "rank 0 and rank 1 are on one GPU of h01: GPU-0"),
        ([gpu(0), gpu(1, gpu="GPU-0", shares_gpu=True)], "rank 0 and rank 1 are on one GPU of h01"),
        ([info(0), info(1, torch="2.8")], "rank 0 on h01 has torch 2.9, rank 1 on h01 .* 2.8"),
        ([info(0), info(1), gpu(2)], "rank 0 on h01 computes on cpu, rank 2 on h02 on cuda:0"),
    ],
)
def test_ranks_that_do_not_fit_together_are_named(infos: list[RankInfo], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        decide(TrainConfig(), infos)


def test_one_gpu_number_on_two_hosts_is_no_clash() -> None:
    assert decide(TrainConfig(), [gpu(0, gpu="GPU-0"), gpu(2, gpu="GPU-0")]).world_size == 2


def test_nccl_without_gpus_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"--backend nccl.*rank 0 on h01 computes on the CPU"):
        decide(TrainConfig(backend="nccl"), [info(0)])


def test_a_run_that_starts_again_takes_its_first_decisions() -> None:
    first = decide(TrainConfig(), [info(0, threads=2), info(1, threads=2)])
    again = [info(0, threads=8), info(1, threads=8)]
    assert decide(TrainConfig(), again, first).threads == 2
    assert decide(TrainConfig(threads=3), again, first).threads == 3
    assert decide(TrainConfig(), [*again, info(2, threads=8)], first).threads == 8
    with pytest.raises(TrainingError, match=r"started on cpu.*cuda:0.*--device cuda"):
        decide(TrainConfig(), [gpu(0), gpu(1)], first)
    assert decide(TrainConfig(device="cuda"), [gpu(0), gpu(1)], first).backend == "nccl"


def test_it_is_told_who_is_where_and_what_to_know() -> None:
    idle = "1 GPU was granted, but torch sees none"
    agreed = decide(TrainConfig(), [gpu(0), gpu(1), gpu(2, warning=idle), gpu(3, warning=idle)])
    assert agreed.hosts == ("h01", "h02")
    assert agreed.where == ("ranks 0-1 on h01: cuda:0, cuda:1", "ranks 2-3 on h02: cuda:0, cuda:1")
    assert agreed.warnings == (f"h02: {idle}",)


def test_it_travels_as_json() -> None:
    terms = decide(TrainConfig(), [info(0), info(2)])
    agreed = dataclasses.replace(terms, run_dir="runs/one", attempt=2, global_batch_size=64)
    assert load(Agreement, json.loads(json.dumps({**asdict(agreed), "sent": 0.1}))) == agreed


@pytest.mark.parametrize("strategy", ["dp", "single"])
def test_a_strategy_of_one_process_is_refused_with_several(strategy: str) -> None:
    config = TrainConfig(strategy=strategy)
    assert decide(config, [info(0)]).world_size == 1
    with pytest.raises(TrainingError, match=f"--strategy {strategy} .* one process, but 2 were"):
        decide(config, [info(0), info(1)])


def test_a_rank_that_does_not_exist_cannot_be_profiled() -> None:
    assert decide(TrainConfig(profile="1"), [info(0), info(1)]).world_size == 2
    with pytest.raises(TrainingError, match=r"--profile 2: there is no such rank\. Use 0 to 1"):
        decide(TrainConfig(profile="2"), [info(0), info(1)])


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 500.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def train(poll: Poll, clock: Any, steps: int, step_seconds: float, first: int = 0) -> list[int]:
    """The steps at which the ranks ask each other, as the loop has them do."""
    asked = []
    for step in range(first, first + steps + 1):
        if step == first or poll.due(step):
            poll.ask(step, [0])
            asked.append(step)
        clock.now += step_seconds
    return asked


@pytest.mark.parametrize("step_seconds", [0.001, 0.02, 0.3, 4.0])
def test_ranks_ask_about_twice_a_second_and_at_most_at_every_step(
    step_seconds: float, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: (sums.append(1), all_reduce(*a, **k)))
    steps = max(int(60 / step_seconds), 30)
    asked = train(Poll(), Clock(monkeypatch), steps, step_seconds)
    between = max(int(POLL_SECONDS / step_seconds), 1)
    careful = 12  # at first, when nobody knows yet how long a step takes
    assert len(sums) == len(asked) <= steps / between * 1.05 + careful
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert max(gaps[1:]) * step_seconds <= max(POLL_SECONDS, step_seconds) * 1.01


def test_nobody_asks_for_more_than_a_thousand_steps(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = train(Poll(), Clock(monkeypatch), 20_000, 1e-6)
    assert max(b - a for a, b in itertools.pairwise(asked)) == 1000


def test_the_pace_that_ranks_agree_on_is_not_bounded_by_that(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = Poll()
    train(poll, Clock(monkeypatch), 20_000, 1e-4)
    assert poll.pace == pytest.approx(POLL_SECONDS / 1e-4, rel=0.01)


def test_a_step_that_becomes_slow_is_known_at_the_next_look(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, poll = Clock(monkeypatch), Poll()
    train(poll, clock, 1000, 0.01)
    asked = train(poll, clock, 200, 5.0, first=1001)
    assert poll.step_seconds == pytest.approx(5.0)
    assert asked[-20:] == list(range(asked[-20], asked[-20] + 20))


def at_unequal_speeds(rank: int, world_size: int) -> tuple[list[int], list[list[int]]]:
    import time

    now = [1000.0 * rank]  # clocks that have nothing in common
    time.monotonic = lambda: now[0]  # type: ignore[assignment]
    poll = Poll()
    asked, answers = [], []
    for step in range(400):
        if poll.due(step):
            asked.append(step)
            answers.append(poll.ask(step, [rank if step > 200 else 0, int(rank == 1)]))
        now[0] += [0.01, 0.05, 0.002][rank]
    return asked, answers


def test_all_ranks_look_at_the_same_steps_and_see_the_same() -> None:
    first, *others = run_ranks(3, at_unequal_speeds)
    assert all(other == first for other in others)
    asked, answers = first
    assert len(asked) < 60
    assert json.loads(json.dumps(answers)) == [[2 if step > 200 else 0, 1] for step in asked]


def test_what_was_measured_leaves_out_the_wait_for_others(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, poll = Clock(monkeypatch), Poll()
    all_reduce = dist.all_reduce

    def slow(*arguments: Any, **options: Any) -> None:
        all_reduce(*arguments, **options)
        clock.now += 30.0

    monkeypatch.setattr(dist, "all_reduce", slow)
    train(poll, clock, 20, 0.1)
    assert poll.step_seconds == pytest.approx(0.1)


TURNS = 300
"""Of so many plain exchanges of three ranks, gloo still has the tensors of some 10 to 40."""


def rank_exchanges(rank: int, _: int) -> tuple[int, list[Any]]:
    """How many exchanges left a tensor with gloo, and what the last gave."""
    used = list[torch.Tensor]()
    reduce, gather = dist.all_reduce, dist.all_gather

    def reduced(values: torch.Tensor, **options: Any) -> None:
        used.append(values)
        reduce(values, **options)

    def gathered(received: list[torch.Tensor], sent: torch.Tensor, *group: Any) -> None:
        used.extend([*received, sent])
        gather(received, sent, *group)

    dist.all_reduce, dist.all_gather = reduced, gathered
    poll, held, given = Poll(), 0, list[Any]()
    for turn in range(TURNS):
        poll.ask(turn, [rank])
        given = agreement.gather({"rank": "x" * rank})
        held += any(each._use_count() > 1 for each in used)
        used.clear()
    return held, given


def test_gloo_has_no_tensor_of_an_exchange_any_more_once_it_is_over() -> None:
    assert run_ranks(3, rank_exchanges) == [(0, [{"rank": "x" * rank} for rank in range(3)])] * 3
