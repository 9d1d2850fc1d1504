"""The models by name; a new one is a class, a line in the table and in `train_config.MODELS`."""

from collections.abc import Callable

from torch import Tensor, nn

from clusterddp.training.recipe_models import DeepNet, FastNet


def build(name: str) -> nn.Module:
    """The model of that name, its weights drawn from torch's generator as it stands."""
    return MODELS[name]()


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": ConvNet,
    "fastnet": FastNet,
    "deepnet": DeepNet,
}
