"""The models by name; a new one is a function, a line in the table and its name in spec.MODELS."""

from collections.abc import Callable

from torch import nn


def build(name: str) -> nn.Module:
    """The model of that name, its weights drawn from torch's generator as it stands."""
    return MODELS[name]()


def convnet() -> nn.Module:
    """Two convolutions and one linear layer for (N, 1, 28, 28) images: 28,938 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 32, 10),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"convnet": convnet}
