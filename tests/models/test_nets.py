"""The built-in networks."""

from typing import Any

import pytest
import torch
from torch import nn

from clusterddp.models import registry
from clusterddp.models.nets import BNConvNet, DeepNet, FastNet
from clusterddp.request.train_config import TrainConfig
from clusterddp.training import optimizer


def trained(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def test_the_size_of_bn_convnet_is_as_it_says() -> None:
    model = registry.build("bn-convnet")
    assert isinstance(model, BNConvNet)
    assert f"{trained(model):,} parameters to train" in (BNConvNet.__doc__ or "")
    assert model.features(torch.zeros(2, 1, 28, 28)).shape == (2, 32, 6, 6)


def test_one_seed_gives_one_bn_convnet() -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(registry.build("bn-convnet").state_dict()["head.0.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_norms_of_bn_convnet_shift_but_do_not_scale() -> None:
    model = BNConvNet()
    update = optimizer.build(TrainConfig(weight_decay=0.1), model)
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


def test_the_layout_in_memory_changes_no_score_of_bn_convnet() -> None:
    model, images = BNConvNet().eval(), torch.randn(4, 1, 28, 28)
    usual = model(images)
    assert torch.allclose(model.to(memory_format=torch.channels_last)(images), usual, atol=1e-5)


CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "count"), [("fastnet", 15_450), ("deepnet", 171_690)])
def test_a_models_size_is_as_it_says(name: str, count: int) -> None:
    model = registry.build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert f"{count:,} parameters" in (type(model).__doc__ or "")


@pytest.mark.parametrize("kind", [FastNet, DeepNet])
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
