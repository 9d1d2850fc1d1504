import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from clusterddp.errors import TrainingError
from clusterddp.models import registry
from clusterddp.request.train_config import MODELS


def test_the_convnet_has_28938_parameters() -> None:
    model = registry.build("convnet")
    assert sum(parameter.numel() for parameter in model.parameters()) == 28_938


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_request_scores_ten_classes(
    name: str, request: pytest.FixtureRequest
) -> None:
    if name == "keras-convnet":
        request.getfixturevalue("keras_installed")
    assert set(registry.MODELS) == set(MODELS)
    assert registry.build(name)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_one_seed_gives_one_set_of_weights() -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(next(registry.build("convnet").parameters()).detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_convnet_pools_before_its_relus_to_the_same_end() -> None:
    ours, textbook = registry.ConvNet(), registry.ConvNet()
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
    linear = [layer for layer in registry.build("mlp").modules() if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [
        (784, 10), (10, 10), (10, 10),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def build(): return 3", "has to return a torch.nn.Module, and returned int"),
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
        registry.build(f"{name}:build")


def test_a_persons_own_function_is_found_from_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_linear.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert registry.build("own_linear:build")(torch.zeros(1, 3)).shape == (1, 2)
