"""The models by name; a new one is a class, a line in the table and in `train_config.MODELS`."""

from collections.abc import Callable

from torch import Tensor, nn

from clusterddp.models import user_model
from clusterddp.models.bn_convnet import BNConvNet
from clusterddp.models.recipe_nets import DeepNet, FastNet
from clusterddp.request import user_functions


def build(name: str) -> nn.Module:
    """The model of that name, its weights drawn from torch's generator as it stands.

    A name that is none of ours is a person's own function, `package.module:function`. Raises
    TrainingError where that cannot be imported or returns no module with weights to train.
    """
    if not user_functions.is_reference(name):
        return MODELS[name]()
    function = user_functions.load(name)
    with user_functions.running(name):
        model = function()
    return user_model.check(name, model)


class ConvNet(nn.Module):
    """Two convolutions and one linear layer: 28,938 parameters.

    Pooling comes before the ReLU: the largest of four is the same on either side of it, bit for
    bit and in its gradient too, and the ReLU has a quarter of the work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, padding=2), nn.MaxPool2d(2), nn.ReLU()
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, kernel_size=5, padding=2), nn.MaxPool2d(2), nn.ReLU()
        )
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 28, 28) images to (N, 10) scores."""
        features = self.layer2(self.layer1(images))
        scores: Tensor = self.fc(features.flatten(1))
        return scores


class MLP(nn.Module):
    """Three linear layers, 784-10-10-10: 8,070 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(28 * 28, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(),
            nn.Linear(10, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.layers(images)
        return scores


def _keras_convnet() -> nn.Module:
    from clusterddp.models import keras  # Keras takes a second to import

    return keras.convnet()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": ConvNet,
    "mlp": MLP,
    "bn-convnet": BNConvNet,
    "keras-convnet": _keras_convnet,
    "fastnet": FastNet,
    "deepnet": DeepNet,
}
