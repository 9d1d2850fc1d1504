"""Builds models by name, checks user models, and defines the built-in networks.

To add a built-in model, add a class here and an entry in MODELS and in `train_config.MODELS`. The
networks are plain torch and map (N, 1, 28, 28) images to (N, 10) scores.

`fastnet` and `deepnet` belong to the recipes and are designed for bf16 on CPUs with few cores. A
step is dominated by element-wise operations on large feature maps (normalisation, ReLU) and by
weight gradients. Both therefore begin with a convolution of stride 2, pool before they normalise,
and have channels in multiples of 16, the vector width of AMX and AVX-512.
"""

import io
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from clusterddp.errors import TrainingError
from clusterddp.request import user_functions
from clusterddp.request.options import is_reference


def build(name: str) -> nn.Module:
    """Build the model of that name, its weights drawn from torch's generator.

    Any name that is not built in is a user function, `package.module:function`. Raises
    TrainingError where it cannot be imported or returns no module with weights to train.
    """
    if not is_reference(name):
        return MODELS[name]()
    function = user_functions.load(name)
    with user_functions.running(name):
        model = function()
    return check(name, model)


def check(name: str, model: object) -> nn.Module:
    """Check the model that `--model name` returned, and return it.

    Raises TrainingError if it is not a module, has no trainable or has uninitialised parameters, or
    cannot be copied to other ranks or restored from a checkpoint.
    """
    if not isinstance(model, nn.Module):
        raise TrainingError(
            f"--model {name}: expected a torch.nn.Module, found {type(model).__name__}. [CD0309]"
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise TrainingError(
            f"--model {name}: it has lazy layers, whose sizes are not known yet. Call it once on a "
            "batch of its images before you return it, or give the sizes. [CD0812]"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError(f"--model {name}: the module has no parameter to train. [CD0812]")
    for buffer, tensor in model.named_buffers():
        if tensor.numel() > 1 and 0 in tensor.stride():
            raise TrainingError(
                f"--model {name}: the buffer {buffer} overlaps itself (expand), so rank 0's cannot "
                "be copied into it. Register a copy: tensor.clone(). [CD0812]"
            )
    _check_extra_state(name, model)
    return model


def _check_extra_state(name: str, model: nn.Module) -> None:
    state = model.state_dict()
    extra = {key: state[key] for key in state if not isinstance(state[key], Tensor)}
    file = io.BytesIO()
    try:
        torch.save(extra, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise TrainingError(
            f"--model {name}: the state_dict entries {', '.join(extra)} cannot be restored from a "
            f"checkpoint: {str(error).splitlines()[0]} Use only tensors, numbers, strings, lists "
            "and dicts. [CD0812]"
        ) from None


def check_gradients(name: str, model: nn.Module) -> None:
    """Check after a backward pass that every parameter that requires a gradient has one.

    DDP exchanges them all. Raises TrainingError naming the parameters without.
    """
    idle = [
        key for key, value in model.named_parameters() if value.requires_grad and value.grad is None
    ]
    if idle:
        more = ", …" if len(idle) > 5 else ""
        raise TrainingError(
            f"--model {name}: {', '.join(idle[:5])}{more} took no part in the scores of a pass in "
            "evaluation mode, and ranks exchange the gradients of all parameters. Remove them, or "
            "have them need no gradient: requires_grad_(False). [CD0812]"
        )


class ConvNet(nn.Module):
    """Two convolutions and one linear layer: 28,938 parameters.

    Pooling comes before the ReLU: the largest of four is the same on either side of it, bit for
    bit and in its gradient too, and the ReLU has a quarter of the work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.fc(self.layer2(self.layer1(images)).flatten(1))
        return scores


class MLP(nn.Module):
    """Three linear layers, 784-10-10-10: 8,070 parameters."""

    def __init__(self) -> None:
        super().__init__()
        first = [nn.Flatten(), nn.Linear(28 * 28, 10), nn.ReLU()]
        self.layers = nn.Sequential(*first, nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.layers(images)
        return scores


# Filters, size, stride and padding of each convolution: 28 x 28 pixels, 28, 12, 6.
_CONVOLUTIONS = ((12, 3, 1, 1), (24, 6, 2, 0), (32, 6, 2, 2))
_HIDDEN, _DROPOUT = 256, 0.5


class BNConvNet(nn.Module):
    """Three convolutions and two linear layers: 49,210 parameters to train.

    The guide's third convolution has a bias, which the normalisation after it takes away again;
    here none has one. The guide's scaling of bytes to [0, 1] is left out: images come normalised.
    """

    def __init__(self) -> None:
        super().__init__()
        channels, layers = 1, list[nn.Module]()
        for filters, size, stride, padding in _CONVOLUTIONS:
            convolution = nn.Conv2d(channels, filters, size, stride, padding, bias=False)
            layers += [convolution, _norm(filters), nn.ReLU(inplace=True)]
            channels = filters
        self.features = nn.Sequential(*layers)
        hidden = [nn.Linear(channels, _HIDDEN), nn.ReLU(inplace=True), nn.Dropout(_DROPOUT)]
        self.head = nn.Sequential(*hidden, nn.Linear(_HIDDEN, 10))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):  # begins as Keras' layers do
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, 1, 28, 28) images to (N, 10) scores."""
        scores: Tensor = self.head(self.features(images).mean((2, 3)))
        return scores


def _norm(channels: int) -> nn.BatchNorm2d:
    """Normalise with Keras' constants, without a scale, which the next layer would absorb.

    torch's scales stay at one. Keras' momentum weights the old average, torch's the new value.
    (torch records the unbiased variance of a batch, Keras the biased one: for 64 images of
    6 x 6 points they differ by 0.04%.)
    """
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=1 - 0.99)
    norm.weight.requires_grad_(False)
    return norm


class _BlockNet(nn.Module):
    """Blocks of convolutions and one linear layer, which sees `channels` at 5 x 5 points."""

    def __init__(self, *blocks: list[nn.Module], channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*itertools.chain(*blocks))
        self.fc = nn.Linear(5 * 5 * channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, 1, 28, 28) images to (N, 10) scores."""
        # Flattened as (N, H * W * C), in the channels_last layout without a copy. In torch's usual
        # order the gradient comes back in another layout than the features have, and the last
        # ReLU's backward pass takes ten times as long.
        scores: Tensor = self.fc(self.features(images).permute(0, 2, 3, 1).flatten(1))
        return scores


class FastNet(_BlockNet):
    """Three convolutions and one linear layer: 15,450 parameters."""

    def __init__(self) -> None:
        super().__init__(
            _block(1, 16, size=5, stride=2, padding=2),
            _block(16, 16, padding=1, pool=True),
            _block(16, 32),
            channels=32,
        )


class DeepNet(_BlockNet):
    """Five convolutions and one linear layer: 171,690 parameters."""

    def __init__(self) -> None:
        super().__init__(
            _block(1, 32, size=5, stride=2, padding=2),
            _block(32, 32, padding=1),
            _block(32, 64, padding=1, pool=True),
            _block(64, 64, padding=1),
            _block(64, 128),
            channels=128,
        )


def _block(
    channels: int, out: int, *, size: int = 3, stride: int = 1, padding: int = 0, pool: bool = False
) -> list[nn.Module]:
    """Return a convolution, optionally max-pooling over 2 x 2, normalisation and ReLU."""
    return [
        nn.Conv2d(channels, out, size, stride, padding, bias=False),
        *([nn.MaxPool2d(2)] if pool else []),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    ]


def _keras_convnet() -> nn.Module:
    from clusterddp.models import keras  # Keras takes a second to import

    return keras.convnet(_CONVOLUTIONS, _HIDDEN, _DROPOUT)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": ConvNet,
    "mlp": MLP,
    "bn-convnet": BNConvNet,
    "keras-convnet": _keras_convnet,
    "fastnet": FastNet,
    "deepnet": DeepNet,
}
