"""The models of the recipes in `clusterddp.request.recipes`, made for bf16 on CPUs with few cores.

What a step takes is mostly the passes over large feature maps (normalisation, ReLU) and the
gradients of the weights, so both begin with a convolution of stride 2, pool before they normalise,
and have channels in multiples of 16, the width that AMX and AVX-512 compute in.
"""

from torch import Tensor, nn


class FastNet(nn.Module):
    """Three convolutions and one linear layer: 15,450 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, 16, kernel_size=5, stride=2, padding=2),
            *_block(16, 16, padding=1, pool=True),
            *_block(16, 32),
        )
        self.fc = nn.Linear(5 * 5 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.fc(_flat(self.features(images)))
        return scores


class DeepNet(nn.Module):
    """Five convolutions and one linear layer: 171,690 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, 32, kernel_size=5, stride=2, padding=2),
            *_block(32, 32, padding=1),
            *_block(32, 64, padding=1, pool=True),
            *_block(64, 64, padding=1),
            *_block(64, 128),
        )
        self.fc = nn.Linear(5 * 5 * 128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.fc(_flat(self.features(images)))
        return scores


def _block(
    channels: int,
    out: int,
    *,
    kernel_size: int = 3,
    stride: int = 1,
    padding: int = 0,
    pool: bool = False,
) -> list[nn.Module]:
    """Convolution, perhaps the largest of each 2 x 2, normalisation, ReLU."""
    return [
        nn.Conv2d(channels, out, kernel_size, stride, padding, bias=False),
        *([nn.MaxPool2d(2)] if pool else []),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    ]


def _flat(features: Tensor) -> Tensor:
    """(N, C, H, W) to (N, H * W * C): in the channels_last layout this copies nothing.

    In torch's usual order the gradient comes back in another layout than the features have, and
    the last ReLU's backward pass takes ten times as long.
    """
    return features.permute(0, 2, 3, 1).flatten(1)
