"""`bn-convnet`: three convolutions with batch normalisation, and dropout before the scores.

The network of the Keras guide "Multi-GPU distributed training with PyTorch"
(keras.io/guides/distributed_training_with_torch), in plain torch; `keras_models` has it in Keras.
"""

from torch import Tensor, nn

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
    """With Keras' constants, and shifts but no scales, which the layer after it would undo.

    torch's scales stay at one. Keras counts the share of the old in the average, torch that of the
    new. (Of one batch torch notes the unbiased variance, Keras the biased one: in a batch of 64
    images at 6 x 6 points they differ by 0.04 %.)
    """
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=1 - 0.99)
    norm.weight.requires_grad_(False)
    return norm
