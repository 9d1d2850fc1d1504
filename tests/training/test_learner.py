import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clusterddp.checkpoints import state
from clusterddp.data.loader import generators_kept, seed_generators
from clusterddp.errors import TrainingError
from clusterddp.models import nets
from clusterddp.run.records import Agreement
from clusterddp.training import cuda_graph, replay
from clusterddp.training import learner as learners
from clusterddp.training import step as steps
from clusterddp.training.learner import Learner
from tests.training.capturing import Captures
from tests.training.ranks import run_ranks
from tests.training.trainings import config

CPU = torch.device("cpu")


class Recorded(nn.Module):
    """Keeps which inputs its dropout has let through."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.5), nn.Linear(784, 10)
        self.seen: list[list[float]] = []

    def forward(self, images: Tensor) -> Tensor:
        kept = self.dropout(torch.ones(len(images), 784))
        if self.training:
            self.seen.append(kept[0, :64].tolist())
        scores: Tensor = self.layer(images.flatten(1) * kept)
        return scores


@contextlib.contextmanager
def training_with(model: Any) -> Iterator[None]:
    plain = nets.MODELS["convnet"]
    nets.MODELS["convnet"] = model
    try:
        yield
    finally:
        nets.MODELS["convnet"] = plain


def learner(rank: int, world_size: int, **settings: Any) -> Learner:
    agreed = Agreement(
        "gloo", "cpu", 1, world_size, global_batch_size=8 * world_size,
        reference_world_size=world_size,
    )  # fmt: skip
    return Learner(config(Path("data"), **settings), agreed, rank=rank, device=CPU, mark=print)


def batches(rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same images on every rank, so that nothing but dropout makes gradients differ."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        images = torch.randint(256, (8, 28, 28), generator=generator, dtype=torch.uint8)
        yield images, torch.arange(8)


def trained(rank: int, world_size: int, seed: int) -> tuple[str, list[list[float]]]:
    with training_with(Recorded):
        ours = learner(rank, world_size, seed=seed)
    for images, labels in batches(rank, world_size):
        ours.learn(images, labels)
    assert isinstance(ours.model, Recorded)
    return state.weights_sha256(ours.model), ours.model.seen


def test_ranks_have_one_set_of_weights_and_each_its_own_dropout_and_a_seed_repeats_both() -> None:
    (first, dropped), (second, dropped_there) = run_ranks(2, trained, 7)
    assert first == second
    assert len(dropped) == 3
    assert all(ours != theirs for ours, theirs in zip(dropped, dropped_there, strict=True))
    assert run_ranks(2, trained, 7) == [(first, dropped), (second, dropped_there)]
    other, _ = run_ranks(2, trained, 8)
    assert other[0] != first
    assert other[1] != dropped


class Spread(nn.Module):
    """Begins with weights that every generator has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = [torch.rand(()).item(), random.random(), np.random.random()]
        self.layer = nn.Linear(784, 10)


def begun(rank: int, seed: int) -> list[list[float]]:
    """What is drawn for the weights, and by the rank afterwards."""
    seed_generators(99)  # another process begins elsewhere
    np.random.rand(rank)
    with training_with(Spread):
        model = learner(rank, 2, seed=seed).model
    assert isinstance(model, Spread)
    return [model.drawn, [torch.rand(()).item(), random.random(), np.random.random()]]


def test_weights_and_a_ranks_draws_come_from_the_seed_whichever_generator_draws_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clusterddp.training.step.wrap", lambda model, *_, **__: model)
    with generators_kept(CPU):
        first, second, again, other = begun(0, 7), begun(1, 7), begun(1, 7), begun(0, 9)
    assert first[0] == second[0] and second == again
    for one, another in ((first[1], second[1]), (first[0], other[0]), (first[1], other[1])):
        assert not set(one) & set(another)


class OneByOne(nn.Module):
    """Has what `contiguous(memory_format=…)` takes for channels_last already, and one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, 3)
        self.mixed = nn.Conv2d(4, 8, 1)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1, 1, 26, 26))
        self.fc = nn.Linear(8 * 26 * 26, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.mixed(self.one(images) * self.scale).flatten(1))
        return scores


def _by_channels_last(tensor: Tensor) -> tuple[int, ...]:
    _, channels, height, width = tensor.shape
    return (channels * height * width, 1, channels * width, channels)


@pytest.mark.parametrize(
    "model", [OneByOne, nets.ConvNet, nets.BNConvNet, nets.FastNet, nets.DeepNet]
)
def test_every_convolution_is_channels_last_by_its_strides(model: Any, alone: None) -> None:
    with training_with(model):
        ours = learner(0, 1)
    tensors = [t for t in (*ours.model.parameters(), *ours.model.buffers()) if t.dim() == 4]
    assert tensors
    for tensor in tensors:
        assert tensor.stride() == _by_channels_last(tensor)


def test_a_checkpoint_of_the_first_convolutions_former_strides_goes_on_to_the_same_weights(
    alone: None,
) -> None:
    def resumed(content: dict[str, Any]) -> str:
        agreed = Agreement(
            "gloo", "cpu", 1, 1, resume="x", global_batch_size=8, reference_world_size=1
        )
        settings = config(Path("data"), momentum=0.9)
        ours = Learner(settings, agreed, rank=0, device=CPU, mark=print, resume_content=content)
        ours.learn(*second)
        assert ours.model.layer1[0].weight.stride() == (25, 1, 5, 1)  # type: ignore[union-attr,index]
        return state.weights_sha256(ours.model)

    first, second, _ = batches(0, 1)
    whole = learner(0, 1, momentum=0.9)
    whole.learn(*first)
    drawn = [replay.random_state(())]
    content = dict(
        state.collect(whole.states, state.Position(1), world_size=1, random_states=drawn)
    )
    older = _relaid(content)
    assert older["model"]["layer1.0.weight"].stride() == (25, 25, 5, 1)
    whole.learn(*second)
    assert resumed(content) == resumed(older) == state.weights_sha256(whole.model)


def _relaid(value: Any) -> Any:
    """A checkpoint's content with torch's usual strides where there is one input channel."""
    if isinstance(value, Tensor):
        one = value.dim() == 4 and value.shape[1] == 1
        return value.clone(memory_format=torch.contiguous_format if one else torch.preserve_format)
    if isinstance(value, dict):
        return {name: _relaid(item) for name, item in value.items()}
    return value


class Unrepeatable(nn.Module):
    """Uses an operation that has no deterministic algorithm, on CPUs as on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 10)

    def forward(self, images: Tensor) -> Tensor:
        torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
        scores: Tensor = self.layer(images.flatten(1))
        return scores


def test_an_operation_that_cannot_repeat_itself_is_named(alone: None) -> None:
    with training_with(Unrepeatable):
        ours = learner(0, 1, deterministic=True)
    [batch, *_] = batches(0, 1)
    ours.learn(*batch)  # without the flag's effect it trains
    torch.use_deterministic_algorithms(True)
    try:
        for act in (ours.learn, ours.settle):
            with pytest.raises(
                TrainingError, match=r"--deterministic: put_ has no deterministic algorithm on"
            ):
                act(*batch)
    finally:
        torch.use_deterministic_algorithms(False)


watched = list["Watched"]()
"""Streams in the order in which they were made."""


class Watched(cuda_graph.SideStream):
    """Knows whether it is the one that work is done on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_current = False
        watched.append(self)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_current = True
        with super().__call__():
            yield
        self.is_current = False


def test_one_stream_holds_all_that_a_captured_step_does(
    monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """DDP's making, the settling, warm-ups, the capture, and batches of another size."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(784, 10)

        def forward(self, images: Tensor) -> Tensor:
            passes.append(watched[0].is_current)
            scores: Tensor = self.layer(images.flatten(1))
            return scores

    class Replayed:
        def __init__(self, work: Any) -> None:
            self.replay = self.reset = lambda: None

    def capture(work: Any, aside: Watched) -> Any:
        with aside():
            work()
        return Replayed(work)

    def made(*given: Any) -> nn.Module:
        passes.append(watched[0].is_current)
        return wrap(*given)

    passes, wrap = list[bool](), steps.wrap
    watched.clear()
    monkeypatch.setattr(learners, "SideStream", Watched)
    monkeypatch.setattr(cuda_graph, "SideStream", Watched)
    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(steps, "wrap", made)
    agreed = Agreement("gloo", "cpu", 1, 2, cuda_graph=True, global_batch_size=16)
    with training_with(Seen):
        ours = Learner(config(Path("data")), agreed, rank=0, device=CPU, mark=print)
    images, labels = next(batches(0, 1))
    ours.settle(images, labels)
    ours.capture(images, labels)
    ours.learn(images, labels)
    ours.learn(images[:5], labels[:5])
    assert len(watched) == 1
    assert len(passes) == 1 + 1 + (cuda_graph._WARM_UPS + 1) + 1
    assert all(passes)


@pytest.mark.parametrize("augment", ["none", "affine"])
@pytest.mark.parametrize("model", [nets.ConvNet, nets.BNConvNet, nets.FastNet, nets.DeepNet])
def test_the_built_in_models_can_be_captured(
    model: Any, augment: str, monkeypatch: pytest.MonkeyPatch, alone: None
) -> None:
    """A rate of few binary digits: a captured step reads it from a float32."""

    def weights(captured: bool) -> str:
        agreed = Agreement("gloo", "cpu", 1, 1, cuda_graph=captured, global_batch_size=8)
        settings = config(Path("data"), lr=2**-7, augment=augment, device="auto", cuda_graph="on")
        with training_with(model):
            ours = Learner(settings, agreed, rank=0, device=CPU, mark=print)
        torch.manual_seed(1)
        for images, labels in batches(0, 1):
            ours.learn(images, labels)
        ours.learn(images[:5], labels[:5])
        assert ours.is_captured is captured
        ours.close()
        return state.weights_sha256(ours.model)

    captures = Captures()
    monkeypatch.setattr(cuda_graph, "capture", captures)
    assert weights(True) == weights(False)
    assert captures.made == 1 and not captures.alive


class Idle(nn.Module):
    """Has a parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(784, 10), nn.Parameter(torch.zeros(3))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layer(images.flatten(1))
        return scores


def test_a_rank_alone_that_is_settled_waits_for_nobody_and_may_have_idle_parameters(
    alone: None,
) -> None:
    """As on a GPU, whose kernels are loaded so before the clock starts."""
    with training_with(Idle):
        ours = learner(0, 1)
    before = state.weights_sha256(ours.model)
    for settle_or_learn in (ours.settle, ours.learn):
        settle_or_learn(*next(batches(0, 1)))
        assert ours.waiting.take() == 0
        assert (state.weights_sha256(ours.model) == before) is (settle_or_learn == ours.settle)


def _after_three_steps(rank: int, _: int, broadcasts: bool) -> dict[str, bytes]:
    """The weights and buffers of a rank whose batches are its own."""
    plain, steps.is_reference = steps.is_reference, lambda _: broadcasts
    try:
        with training_with(nets.BNConvNet):
            ours = learner(rank, 2)
    finally:
        steps.is_reference = plain
    assert ours.ddp.broadcast_buffers is broadcasts
    for images, labels in batches(rank, 2):
        ours.learn(images // (rank + 1), labels)
    return {name: value.numpy().tobytes() for name, value in ours.model.state_dict().items()}


def test_rank_0_has_the_same_statistics_without_a_broadcast_at_every_pass() -> None:
    plain, broadcast = (run_ranks(2, _after_three_steps, each) for each in (False, True))
    assert plain[0] == broadcast[0]  # the one that is evaluated and saved
    assert plain[1] != broadcast[1]


@pytest.mark.parametrize(("name", "broadcasts"), [("bn-convnet", False), ("my.models:net", True)])
def test_buffers_of_a_model_of_ones_own_are_broadcast_at_every_pass(
    name: str, broadcasts: bool, alone: None
) -> None:
    agreed = Agreement("gloo", "cpu", 1, 2, global_batch_size=8)
    wrapped = steps.wrap(nets.build("bn-convnet"), config(Path("data"), model=name), agreed)
    assert wrapped.broadcast_buffers is broadcasts
