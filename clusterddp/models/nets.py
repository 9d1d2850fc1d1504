"""The built-in networks, in plain torch: (N, 1, 28, 28) images to (N, 10) scores.

`fastnet` and `deepnet` belong to the recipes and are made for bf16 on CPUs with few cores. A step
spends its time mostly on passes over large feature maps (normalisation, ReLU) and on the
gradients of the weights. So both begin with a convolution of stride 2, pool before they normalise,
and have channels in multiples of 16, the width in which AMX and AVX-512 compute.
"""

from torch import Tensor, nn


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
            nn.Flatten(),
            nn.Linear(28 * 28, 10),
            nn.ReLU(),
            nn.Linear(10, 10),
            nn.ReLU(),
            nn.Linear(10, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.layers(images)
        return scores


# Filters, size, stride and padding of each convolution: 28 x 28 pixels, 28, 12, 6.
CONVOLUTIONS = ((12, 3, 1, 1), (24, 6, 2, 0), (32, 6, 2, 2))
HIDDEN, DROPOUT = 256, 0.5


class BNConvNet(nn.Module):
    """Three convolutions and two linear layers: 49,210 parameters to train.

    The guide's third convolution has a bias, which the normalisation after it takes away again;
    here none has one. The guide's scaling of bytes to [0, 1] is left out: images come normalised.
    """

    def __init__(self) -> None:
        super().__init__()
        channels, layers = 1, list[nn.Module]()
        for filters, size, stride, padding in CONVOLUTIONS:
            layers += [
                nn.Conv2d(channels, filters, size, stride, padding, bias=False),
                _norm(filters),
                nn.ReLU(inplace=True),
            ]
            channels = filters
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(
            nn.Linear(channels, HIDDEN),
            nn.ReLU(inplace=True),
            nn.Dropout(DROPOUT),
            nn.Linear(HIDDEN, 10),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # begins as Keras' layers do
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


def _norm(channels: int) -> nn.BatchNorm2d:
    """Normalise with Keras' constants; there is no scale, which the next layer would undo.

    torch's scales stay at one. Keras counts the share of the old in the average, torch that of the
    new. (Of one batch torch notes the unbiased variance, Keras the biased one: in a batch of 64
    images at 6 x 6 points they differ by 0.04 %.)
    """
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=1 - 0.99)
    norm.weight.requires_grad_(False)
    return norm


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
    """Convolution, optionally max-pooling over 2 x 2, normalisation, ReLU."""
    return [
        nn.Conv2d(channels, out, kernel_size, stride, padding, bias=False),
        *([nn.MaxPool2d(2)] if pool else []),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    ]


def _flat(features: Tensor) -> Tensor:
    """Flatten (N, C, H, W) to (N, H * W * C), in the channels_last layout without a copy.

    In torch's usual order the gradient comes back in another layout than the features have, and
    the last ReLU's backward pass takes ten times as long.
    """
    return features.permute(0, 2, 3, 1).flatten(1)
