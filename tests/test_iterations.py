"""A loop of N iterations, without epochs: stopped anywhere it ends in the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp.loop import Loop
from clusterddp.run.attempt import attempts
from clusterddp.run.run_dir import RunDir
from clusterddp.training import stop

STEPS = 9

pytestmark = pytest.mark.usefixtures("asked_at_each_step")


def train(folder: Path, stops: int = 0, *, seed: int = 0, breaks: bool = False) -> Any:
    """Train in nanoGPT's shape; return the weights, what happened, and the exit code."""

    def get_batch(split: str) -> Tensor:
        return torch.rand(2, 4)

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop, happened, code = Loop(directory=folder, model=model, optimizer=optimizer), [], None
    draw = loop.ahead(get_batch)
    try:
        batch = draw("train")
        for number in loop.iterations(STEPS):
            if number % 3 == 0:
                happened.append(f"evaluation at {number}: {draw('val').sum():.4f}")
            for _ in range(2):
                happened.append(f"{batch.sum():.4f}")
                loss = model(batch).square().mean()
                batch = draw("train")
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number + 1 == stops:
                stop.requested.note("stop")
            loop.step(loss=loss)
            if breaks and number + 1 == STEPS:
                break
        happened.append("the end")
    except SystemExit as left:
        code = left.code
    loop.close()
    stop.requested.forget()
    return [each.detach().clone() for each in model.parameters()], happened, code


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("stops", [1, 3, 8])
def test_it_draws_and_evaluates_as_the_undisturbed_one(
    tmp_path: Path, stops: int, breaks: bool
) -> None:
    """A stop before an evaluation does it once, in the next attempt."""
    weights, happened, _ = train(tmp_path / "whole", breaks=breaks)
    _, before, code = train(tmp_path / "stopped", stops, breaks=breaks)
    after, rest, _ = train(tmp_path / "stopped", seed=7, breaks=breaks)
    assert (code, before + rest) == (75, happened)
    assert all(map(torch.equal, weights, after))


@pytest.mark.parametrize("breaks", [False, True])
def test_its_end_is_saved_and_a_further_start_trains_nothing(tmp_path: Path, breaks: bool) -> None:
    weights, _, code = train(tmp_path, breaks=breaks)
    again, happened, _ = train(tmp_path, seed=7, breaks=breaks)
    assert (code, happened) == (None, ["the end"])
    assert all(map(torch.equal, weights, again))
    assert [each.read_final_record().reason for each in attempts(RunDir(tmp_path))] == ["", ""]


def test_an_iteration_without_one_step_is_an_error(tmp_path: Path) -> None:
    loop = Loop(directory=tmp_path, model=nn.Linear(1, 1))
    iterations = loop.iterations(3)
    next(iterations)
    with pytest.raises(RuntimeError, match="0 times in an iteration"):
        next(iterations)
    loop.close()
