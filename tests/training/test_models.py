import pytest
import torch

from clusterddp.train_config import MODELS
from clusterddp.training import models


def test_the_convnet_has_28938_parameters() -> None:
    model = models.build("convnet")
    assert sum(parameter.numel() for parameter in model.parameters()) == 28_938


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_request_scores_ten_classes(name: str) -> None:
    assert set(models.MODELS) == set(MODELS)
    assert models.build(name)(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_one_seed_gives_one_set_of_weights() -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(next(models.build("convnet").parameters()).detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_convnet_pools_before_its_relus_to_the_same_end() -> None:
    ours, textbook = models.ConvNet(), models.ConvNet()
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
