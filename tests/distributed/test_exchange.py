"""Exchanges that leave no tensor of Python's in gloo's threads."""

from typing import Any

import torch
import torch.distributed as dist

from clusterddp.distributed import exchange
from clusterddp.distributed.agreement import Poll
from tests.training.ranks import run_ranks

TURNS = 300
"""Of so many plain exchanges of three ranks, gloo still has the tensors of some 10 to 40."""


def rank_exchanges(rank: int, _: int) -> tuple[int, list[Any]]:
    """How many exchanges left a tensor with gloo, and what the last gave."""
    used = list[torch.Tensor]()
    reduce, gather = dist.all_reduce, dist.all_gather

    def reduced(values: torch.Tensor, **options: Any) -> None:
        used.append(values)
        reduce(values, **options)

    def gathered(received: list[torch.Tensor], sent: torch.Tensor) -> None:
        used.extend([*received, sent])
        gather(received, sent)

    dist.all_reduce, dist.all_gather = reduced, gathered
    poll, held, given = Poll(), 0, list[Any]()
    for turn in range(TURNS):
        poll.ask(turn, [rank])
        given = exchange.gather({"rank": "x" * rank})
        held += any(each._use_count() > 1 for each in used)
        used.clear()
    return held, given


def test_gloo_has_no_tensor_of_an_exchange_any_more_once_it_is_over() -> None:
    values = [{"rank": "x" * rank} for rank in range(3)]
    assert run_ranks(3, rank_exchanges) == [(0, values)] * 3
