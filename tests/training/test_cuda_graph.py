import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from clusterddp.errors import TrainingError
from clusterddp.models import nets
from clusterddp.request.train_config import TrainConfig
from clusterddp.training import cuda_graph
from clusterddp.training.cuda_graph import GraphedStep
from clusterddp.training.metrics import MetricSums
from clusterddp.training.step import Step, build_optimizer
from tests.training.capturing import REFUSED, Captures, Graph, captures

__all__ = ["captures"]

CPU = torch.device("cpu")


def noisy_net() -> nn.Module:
    """With statistics and random numbers, which a warm-up must not use up."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))


def graphed_step(model: nn.Module, kind: str = "sgd", **settings: Any) -> Step:
    adam = optim.AdamW(model.parameters(), 0.01, weight_decay=0.1, fused=True)
    update = adam if kind == "adamw" else optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Step(model, update, MetricSums(CPU), device=CPU, **settings)


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 28, 28, generator=generator), torch.arange(size) % 8)
        for size in sizes
    ]


def train(step: Callable[[Tensor, Tensor], None], data: list[tuple[Tensor, Tensor]]) -> None:
    for batch in data:
        step(*batch)


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("before", [0, 2])
def test_a_captured_step_trains_as_the_plain_one_does(
    kind: str, before: int, accumulate: int, captures: Captures, alone: None
) -> None:
    """Also where the optimizer has a history, and with a batch of another size at the end."""
    data = batches([10, 10, 4, 10, 10, 4]) if before else batches([4, 10, 10, 10, 10, 4])
    plain, captured = noisy_net(), noisy_net()
    ours, theirs = (
        graphed_step(each, kind, gradient_accumulation_steps=accumulate)
        for each in (plain, captured)
    )
    graphed = GraphedStep(theirs, captured, 10)
    torch.manual_seed(5)
    train(ours, data)
    torch.manual_seed(5)
    train(theirs, data[:before])
    train(graphed, data[before:])
    [graph] = captures.alive
    assert graph.replays == [len(labels) for _, labels in data[before:]].count(10)
    assert_alike(plain, captured)
    assert ours.tally.collect()[:2] == theirs.tally.collect()[:2]


def test_capturing_ahead_of_the_first_step_changes_nothing(captures: Captures, alone: None) -> None:
    data = batches([6, 6])
    plain, captured = noisy_net(), noisy_net()
    train(graphed_step(plain), data)
    torch.manual_seed(0)
    noisy_net()  # so that dropout draws as it did for the other
    graphed = GraphedStep(graphed_step(captured), captured, 6)
    drawn = torch.get_rng_state()
    graphed.prepare(*batches([6, 6])[1])
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_alike(noisy_net(), captured)
    assert graphed.step.tally.steps == 0
    train(graphed, data)
    assert captures.made == 1
    assert_alike(plain, captured)


class Counting(nn.Module):
    """Counts its passes in Python; looks at a value where it is told to."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.looks, self.passes = nn.Linear(784, 8), looks, 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        scores: Tensor = self.layer(images.flatten(1))
        if self.looks and float(scores.sum().item()) > 1e9:
            return scores * 2
        return scores


def test_python_of_a_model_runs_at_the_capture_alone(captures: Captures, alone: None) -> None:
    """For which reason a model of one's own is captured only where that is asked for."""
    model = Counting()
    train(GraphedStep(graphed_step(model), model, 6), batches([6] * 20))
    assert model.passes == cuda_graph._WARM_UPS + 1


def test_a_step_that_cannot_be_captured_is_told_with_the_way_out(
    captures: Captures, alone: None
) -> None:
    model = Counting(looks=True)
    graphed = GraphedStep(graphed_step(model), model, 6)
    with pytest.raises(TrainingError, match=r"is capturing\. Train without one: --cuda-graph off"):
        graphed(*batches([6])[0])


def test_the_first_error_of_a_failed_capture_is_told(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    def ends_badly(*_: object) -> None:
        try:
            raise RuntimeError(REFUSED)
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(cuda_graph, "capture", ends_badly)
    model = noisy_net()
    with pytest.raises(TrainingError, match=f"into a CUDA graph: {REFUSED}. Train"):
        GraphedStep(graphed_step(model), model, 6)(*batches([6])[0])


def test_a_step_that_falls_back_trains_as_the_plain_one_and_warns_once(
    captures: Captures, logged: list[str], alone: None
) -> None:
    data = batches([6, 6, 4, 6])
    plain, captured = Counting(looks=True), Counting(looks=True)
    theirs = graphed_step(captured, "adamw")
    graphed = GraphedStep(theirs, captured, 6, falls_back=True)
    train(graphed_step(plain, "adamw"), data)
    train(graphed, data)
    assert_alike(plain, captured)
    assert theirs.tally.steps == 4
    [line] = logged
    assert REFUSED in line and "training without one, as --cuda-graph off does" in line
    assert graphed.warning in line


def test_a_capture_that_fails_leaves_no_gradients_in_the_memory_of_its_graph(
    captures: Captures, alone: None
) -> None:
    captures.refuses = "out of memory"
    model = Counting()
    GraphedStep(graphed_step(model), model, 6, falls_back=True).prepare(*batches([6])[0])
    assert (captures.made, model.passes) == (0, cuda_graph._WARM_UPS + 1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_graph_is_released_with_all_that_it_holds(captures: Captures, alone: None) -> None:
    model = noisy_net()
    graphed = GraphedStep(graphed_step(model), model, 6)
    graphed.close()  # before there is one
    train(graphed, batches([6]))
    [graph] = captures.alive
    graphed.close()
    graphed.close()
    assert graph.resets == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    del graph
    assert not captures.alive


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_gpu_that_does_not_release_a_graph_keeps_no_rank(
    fault: str, captures: Captures, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    over = threading.Event()

    def reset(_: Graph) -> None:
        if fault == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        over.wait()

    monkeypatch.setattr(Graph, "reset", reset)
    monkeypatch.setattr(cuda_graph, "_RESET_SECONDS", 0.01)
    model = noisy_net()
    graphed = GraphedStep(graphed_step(model), model, 6)
    train(graphed, batches([6]))
    graphed.close()
    over.set()


@pytest.mark.gpu
def test_on_a_gpu_the_replayed_step_trains_as_the_plain_one_does(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """By SGD: Adam makes a step of a rounding of gradients near zero."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # as in a training
    device = torch.device("cuda", 0)
    config = TrainConfig(optimizer="sgd", lr=0.01)
    models_of = {}
    for captured in (False, True):
        torch.manual_seed(0)
        model = nets.build("convnet").to(device)
        update = build_optimizer(config, model, captured=captured)
        ours = Step(model, update, MetricSums(device), device=device)
        train = GraphedStep(ours, model, 16) if captured else ours
        for images, labels in batches([16, 16, 16, 5]):
            ours.set_lr(0.01)
            train(images.to(device), labels.to(device))
        models_of[captured] = model.state_dict()
    for name, value in models_of[False].items():
        torch.testing.assert_close(value, models_of[True][name], rtol=1e-4, atol=1e-5)


def test_memory_of_the_streams_cublas_goes_once_the_gpu_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = list[str]()
    for place, name in (
        (torch.cuda, "set_device"), (torch.cuda, "synchronize"),
        (torch._C, "_cuda_clearCublasWorkspaces"),
    ):  # fmt: skip
        monkeypatch.setattr(place, name, lambda *_, name=name: calls.append(name), raising=False)
    model = noisy_net()
    step = graphed_step(model)
    graphed = GraphedStep(step, model, 6, cuda_graph.SideStream(CPU))
    step.device = torch.device("cuda", 0)
    for graph in (None, Released(calls)):  # after a capture that failed, and of one that did not
        graphed._graph = graph
        graphed.close()
    cleared = ["synchronize", "_cuda_clearCublasWorkspaces"]
    assert calls == ["set_device", *cleared, "set_device", "reset", *cleared]


class Released:
    """A graph that notes its release."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def replay(self) -> None: ...

    def reset(self) -> None:
        self.calls.append("reset")


@pytest.mark.parametrize(
    "name", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"]
)
@pytest.mark.parametrize("refuses", [False, True])
def test_an_allocator_left_in_capture_is_ended_by_hand(
    name: str, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[tuple[int, tuple[int, int]]]()

    def end(device: int, pool: tuple[int, int]) -> None:
        ended.append((device, pool))
        if refuses:  # as a torch that has ended it itself
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    for each in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"):
        monkeypatch.delattr(torch._C, each, raising=False)
    monkeypatch.setattr(torch._C, name, end, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    cuda_graph._stop_allocating_to((0, 7))
    assert ended == [(1, (0, 7))]
