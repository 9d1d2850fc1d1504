import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp.checkpoints import state as checkpoint
from clusterddp.errors import TrainingError
from clusterddp.models import user_model
from tests.training.test_learner import batches, learner, training_with


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
        (3, "has to return a torch.nn.Module, and returned int"),
        (nn.ReLU(), "no parameter to train"),
        (nn.LazyLinear(10), "lazy layers"),
        (WithBuffer(torch.ones(1).expand(50)), "the buffer mean overlaps itself"),
        (WithState(re.compile("a")), "_extra_state) cannot be read back from a checkpoint"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_cannot_be_trained_here_is_refused(model: object, message: str) -> None:
    with pytest.raises(TrainingError, match=re.escape(message)):
        user_model.check("own:build", model)


@pytest.mark.parametrize(
    "model", [WithBuffer(torch.ones(3, 1).expand(3, 1)), WithState({"steps": 3})]
)
def test_what_goes_into_a_checkpoint_and_out_again_is_taken(model: nn.Module) -> None:
    assert user_model.check("own:build", model) is model
    digest = checkpoint.weights_sha256(model)
    if isinstance(model, WithState):
        model.state = {"steps": 4}
        assert checkpoint.weights_sha256(model) != digest


def test_parameters_that_take_no_part_are_named_before_the_first_step(alone: None) -> None:
    with training_with(Idle):
        ours = learner(0, 1)
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
