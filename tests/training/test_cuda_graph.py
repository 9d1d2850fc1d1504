"""What surrounds a captured step, with a capture that repeats the work; CUDA's own needs a GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

from clusterddp.errors import TrainingError
from clusterddp.models import registry
from clusterddp.request.train_config import TrainConfig
from clusterddp.training import optimizer
from clusterddp.training.cuda_graph import GraphedStep
from clusterddp.training.metrics import Tally
from clusterddp.training.step import Step

CPU = torch.device("cpu")
Work = Callable[[], None]


def net() -> nn.Module:
    """With statistics and random numbers, which a warm-up must not use up."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))


def step(model: nn.Module, kind: str) -> Step:
    adam = optim.AdamW(model.parameters(), 0.01, weight_decay=0.1)
    sgd = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Step(model, adam if kind == "adamw" else sgd, Tally(CPU), device=CPU)


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 28, 28, generator=generator), torch.arange(size) % 8)
        for size in sizes
    ]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_captured_step_trains_as_the_plain_one_does(kind: str, before: int, alone: None) -> None:
    """Also where the optimizer has a history, and with a batch of another size at the end."""
    data = batches([10, 10, 4, 10, 10, 4]) if before else batches([4, 10, 10, 10, 10, 4])
    plain, captured = net(), net()
    ours, theirs = step(plain, kind), step(captured, kind)
    recorded: list[Work] = []

    def capture(work: Work) -> Work:
        recorded.append(work)
        return work

    graphed = GraphedStep(theirs, captured, 10, capture)
    torch.manual_seed(5)
    for batch in data:
        ours(*batch)
    torch.manual_seed(5)
    for batch in data[:before]:
        theirs(*batch)
    for batch in data[before:]:
        graphed(*batch)
    assert len(recorded) == 1
    for name, value in plain.state_dict().items():
        assert torch.equal(value, captured.state_dict()[name]), name
    assert ours.tally.collect()[:2] == theirs.tally.collect()[:2]


def test_what_is_replayed_reads_the_batch_of_now(alone: None) -> None:
    model = net()
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    data = batches([6, 6])
    graphed = GraphedStep(step(model, "sgd"), model, 6, lambda work: work)
    for batch in data:
        graphed(*batch)
    assert torch.equal(seen[-1], data[1][0])


def test_a_step_that_cannot_be_captured_is_told_with_the_way_out(alone: None) -> None:
    def refuses(_: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = net()
    graphed = GraphedStep(step(model, "sgd"), model, 6, refuses)
    with pytest.raises(TrainingError, match=r"is capturing\. Train without one: --cuda-graph off"):
        graphed(*batches([6])[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_on_a_gpu_the_replayed_step_trains_as_the_plain_one_does(kind: str, alone: None) -> None:
    device = torch.device("cuda")
    config = TrainConfig(optimizer=kind, lr=0.01)
    models_of = {}
    for captured in (False, True):
        torch.manual_seed(0)
        model = registry.build("convnet").to(device)
        update = optimizer.build(config, model, captured=captured)
        ours = Step(model, update, Tally(device), device=device)
        train = GraphedStep(ours, model, 16) if captured else ours
        for images, labels in batches([16, 16, 16, 5]):
            ours.set_lr(0.01)
            train(images.to(device), labels.to(device))
        models_of[captured] = model.state_dict()
    for name, value in models_of[False].items():
        torch.testing.assert_close(value, models_of[True][name], rtol=1e-4, atol=1e-5)
