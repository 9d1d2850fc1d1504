"""A model of your own, for `--model own_model:build`."""

from torch import Tensor, nn


class SmallNet(nn.Module):
    """Two convolutions and a linear layer, for grey images of any size."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(3),
        )
        self.scores = nn.Linear(32 * 3 * 3, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, H, W) images to (N, classes) scores."""
        scores: Tensor = self.scores(self.features(images).flatten(1))
        return scores


def build() -> nn.Module:
    """Takes no argument and returns the module; its weights are the same on every rank."""
    return SmallNet(classes=10)
