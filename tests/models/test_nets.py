"""The built-in networks, models by name, and what a user's own has to be."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp.checkpoints import state as checkpoint
from clusterddp.errors import TrainingError
from clusterddp.models import nets
from clusterddp.models.nets import BNConvNet, DeepNet, FastNet
from clusterddp.request.train_config import MODELS, TrainConfig
from clusterddp.training.step import build_optimizer
from tests.training.test_learner import batches, learner, training_with


def test_the_features_of_bn_convnet_are_32_at_6_x_6_points() -> None:
    assert BNConvNet().features(torch.zeros(2, 1, 28, 28)).shape == (2, 32, 6, 6)


def test_the_norms_of_bn_convnet_shift_but_do_not_scale() -> None:
    model = BNConvNet()
    update = build_optimizer(TrainConfig(weight_decay=0.1), model)
    for _ in range(2):
        model(torch.randn(8, 1, 28, 28)).square().sum().backward()
        update.step()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 3
    for norm in norms:
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
        assert bool((norm.bias != 0).all())
        assert norm.running_mean is not None
        assert bool((norm.running_mean != 0).all())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("convnet", 28_938), ("mlp", 8_070), ("fastnet", 15_450), ("deepnet", 171_690)),
        ("bn-convnet", 49_210),
    ],
)
def test_a_models_size_is_as_it_says(name: str, count: int) -> None:
    model = nets.build(name)
    assert sum(each.numel() for each in model.parameters() if each.requires_grad) == count
    assert f"{count:,} parameters" in (type(model).__doc__ or "")


@pytest.mark.parametrize("kind", [BNConvNet, FastNet, DeepNet])
def test_the_layout_in_memory_changes_no_score(kind: type[torch.nn.Module]) -> None:
    model, images = kind().eval(), torch.randn(4, 1, 28, 28)
    usual = model(images)
    assert torch.allclose(model.to(memory_format=torch.channels_last)(images), usual, atol=1e-5)


@pytest.mark.parametrize("kind", [FastNet, DeepNet])
def test_nothing_is_copied_between_the_features_and_the_scores(kind: Any) -> None:
    model = kind().to(memory_format=torch.channels_last)
    seen: list[torch.Tensor] = []
    model.features.register_forward_hook(lambda *call: seen.append(call[2]))
    model.fc.register_forward_pre_hook(lambda *call: seen.append(call[1][0]))
    model(torch.randn(4, 1, 28, 28))
    assert seen[0].data_ptr() == seen[1].data_ptr()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_request_scores_ten_classes(
    name: str, request: pytest.FixtureRequest
) -> None:
    if name == "keras-convnet":
        request.getfixturevalue("keras_installed")
    assert set(nets.MODELS) == set(MODELS)
    assert nets.build(name)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


@pytest.mark.parametrize(
    ("name", "parameter"), [("convnet", "layer1.0.weight"), ("bn-convnet", "head.0.weight")]
)
def test_one_seed_gives_one_set_of_weights(name: str, parameter: str) -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(nets.build(name).state_dict()[parameter])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_convnet_pools_before_its_relus_to_the_same_end() -> None:
    ours, textbook = nets.ConvNet(), nets.ConvNet()
    textbook.load_state_dict(ours.state_dict())
    for layer in (textbook.layer1, textbook.layer2):
        layer[1], layer[2] = layer[2], layer[1]
    assert isinstance(textbook.layer1[1], torch.nn.ReLU)
    images = torch.randn(16, 1, 28, 28)
    images[:8] = images[:8].round()  # ties, and windows with nothing above zero
    for model in (ours, textbook):
        model(images).square().sum().backward()
    assert torch.equal(ours(images), textbook(images))
    for one, other in zip(ours.parameters(), textbook.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_the_mlp_has_layers_of_784_10_10_and_10() -> None:
    linear = [layer for layer in nets.build("mlp").modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [
        (784, 10), (10, 10), (10, 10),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def build(): return 3", "expected a torch.nn.Module, found int"),
        ("import torch\nbuild = torch.nn.ReLU", "no parameter to train"),
        ("build = 3", "build is int"),
        ("import absent_module", "ModuleNotFoundError: No module named 'absent_module'"),
    ],
)
def test_a_function_that_gives_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    name = f"own_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(TrainingError, match=re.escape(message)):
        nets.build(f"{name}:build")


def test_a_persons_own_function_is_found_from_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_linear.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert nets.build("own_linear:build")(torch.zeros(1, 3)).shape == (1, 2)


class WithBuffer(nn.Linear):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__(784, 10)
        self.register_buffer("mean", buffer)


class WithState(nn.Linear):
    def __init__(self, state: Any) -> None:
        super().__init__(784, 10)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(784, 10), nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layer(images.flatten(1))
        return scores


class Volumes(nn.Module):
    """Its weights have five dimensions, for which there is another layout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv3d(1, 2, (1, 3, 3)), nn.Linear(2 * 26 * 26, 10)
        self.flat = nn.Conv2d(1, 1, 3)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layer(self.first(images.unsqueeze(1)).flatten(1))
        return scores + self.flat(images).mean()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.LazyLinear(10), "lazy layers"),
        (WithBuffer(torch.ones(1).expand(50)), "the buffer mean overlaps itself"),
        (WithState(re.compile("a")), "_extra_state cannot be restored from a checkpoint"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_cannot_be_trained_here_is_refused(model: object, message: str) -> None:
    with pytest.raises(TrainingError, match=re.escape(message)):
        nets.check("own:build", model)


@pytest.mark.parametrize(
    "model", [WithBuffer(torch.ones(3, 1).expand(3, 1)), WithState({"steps": 3})]
)
def test_what_goes_into_a_checkpoint_and_out_again_is_taken(model: nn.Module) -> None:
    assert nets.check("own:build", model) is model
    digest = checkpoint.weights_sha256(model)
    if isinstance(model, WithState):
        model.state = {"steps": 4}
        assert checkpoint.weights_sha256(model) != digest


def test_parameters_that_take_no_part_are_named_before_the_first_step(alone: None) -> None:
    with training_with(Idle):
        ours = learner(0, 2)  # a rank alone may have some
    [batch, *_] = batches(0, 1)
    with pytest.raises(TrainingError, match=r"unused.weight, unused.bias took no part"):
        ours.settle(*batch)


def test_layers_of_other_dimensions_keep_their_layout(alone: None) -> None:
    with training_with(Volumes):
        ours = learner(0, 1)
    [batch, *_] = batches(0, 1)
    ours.learn(*batch)
    assert isinstance(ours.model, Volumes)
    assert ours.model.flat.weight.is_contiguous(memory_format=torch.channels_last)
