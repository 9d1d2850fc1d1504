"""Wraps Keras 3 models on torch as modules that DDP can train.

Keras itself keeps its variables, every one as a parameter: moving statistics and random seeds too.
Here the weights belong to a plain module, and Keras computes with them in a `keras.StatelessScope`.
So the module has parameters to train and buffers that DDP shares, its state dict has no duplicates
and no seeds, and `to`, DDP and DataParallel treat it like any other.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from clusterddp.errors import TrainingError
from clusterddp.processes import change_environment
from clusterddp.request.train_config import TrainConfig

# Name of the network; `keras` is imported before it is used.
_NAME = "keras-convnet"


class KerasNet(nn.Module):
    """A built Keras model as a module, its weights named `<layer>_<weight>` by their paths.

    Its random layers must have no seed: without one they draw from torch's generator, which is
    restored with a checkpoint.
    """

    def __init__(self, model: Any) -> None:
        """model: a `keras.Model` on torch, whose weights are copied.

        Raises TrainingError where two of them have the same path.
        """
        super().__init__()
        self._model = (model,)  # the tuple hides it from torch, which would register a submodule
        self._variables: dict[str, Any] = {}
        for variable in model.weights:
            name = variable.path.replace("/", "_")
            if name in self._variables:
                raise TrainingError(
                    f"two weights of the Keras model are named {variable.path}. [CD0812]"
                )
            value = variable.value.detach().clone()
            if variable.trainable:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
            self._variables[name] = variable

    def forward(self, images: Tensor) -> Tensor:
        """Apply the model; Dropout and BatchNormalization follow `train` and `eval`."""
        import keras

        state = [(variable, getattr(self, name)) for name, variable in self._variables.items()]
        # Keras moves its inputs to a device that it chooses, by default the first GPU.
        with keras.device(str(images.device)), keras.StatelessScope(state) as scope:
            scores: Tensor = self._model[0](images, training=self.training)
        if self.training:
            with torch.no_grad():
                for name, buffer in self.named_buffers():
                    buffer.copy_(scope.get_current_value(self._variables[name]))
        return scores

    def to_keras(self) -> Any:
        """Return the Keras model with the current weights, to `save` it for example."""
        for name, variable in self._variables.items():
            variable.assign(getattr(self, name).detach().cpu())
        return self._model[0]


def convnet(
    convolutions: Sequence[tuple[int, int, int, int]], width: int, dropout: float
) -> KerasNet:
    """Build the network of `nets.BNConvNet` in Keras, its weights drawn from torch's generator.

    convolutions: filters, size, stride and padding of each; width: size of the hidden layer.

    Maps (N, 1, 28, 28) images to (N, 10) scores. Raises TrainingError if Keras is not installed or
    is already imported with another backend.
    """
    keras = import_keras()
    layers, order = keras.layers, "channels_first"  # as images come
    with keras.device("cpu"):  # the same numbers whatever the rank then trains on
        images = features = keras.Input((1, 28, 28))
        for number, (filters, size, stride, padding) in enumerate(convolutions, 1):
            padded = "same" if padding else "valid"
            more = {"kernel_initializer": _drawn(keras), "name": f"conv{number}"}
            convolve = layers.Conv2D(filters, size, stride, padded, order, use_bias=False, **more)
            features = convolve(features)
            norm = layers.BatchNormalization(axis=1, scale=False, name=f"norm{number}")
            features = layers.ReLU()(norm(features))
        features = layers.GlobalAveragePooling2D(order)(features)
        hidden = layers.Dense(width, "relu", kernel_initializer=_drawn(keras), name="hidden")
        scores = layers.Dense(10, kernel_initializer=_drawn(keras), name="scores")
        return KerasNet(keras.Model(images, scores(layers.Dropout(dropout)(hidden(features)))))


def import_keras() -> ModuleType:
    """Import Keras on torch, whatever the environment and the user's keras.json say.

    Raises TrainingError where it is not installed, cannot be imported, or was imported in this
    process on another backend.
    """
    if missing := TrainConfig(model=_NAME).missing_package():
        raise TrainingError(f"{missing} This is {socket.gethostname()}. [CD0803]")
    try:
        with _settings():
            import keras
    except Exception as error:  # of any kind: it is a large package, imported with many others
        raise TrainingError(
            f"Keras cannot be imported on {socket.gethostname()}: {type(error).__name__}: "
            f"{error}. [CD0803]"
        ) from error
    backend = keras.config.backend()
    if backend != "torch":
        raise TrainingError(
            f"Keras computes on {backend} in this process, where something has imported it before: "
            f"--model {_NAME} needs it on torch. Set KERAS_BACKEND=torch for that import. [CD0803]"
        )
    module: ModuleType = keras
    return module


@contextmanager
def _settings() -> Iterator[None]:
    """Set the environment from which Keras, on its import, takes torch and else its defaults.

    Keras can be configured in no other way. With /dev/null for a home it neither reads nor writes
    ~/.keras/keras.json, which could change the numbers (floatx), and which all ranks would write
    at the same time.
    """
    before = _own_variables()
    change_environment({"KERAS_BACKEND": "torch", "KERAS_HOME": os.devnull}, without=before)
    try:
        yield
    finally:
        change_environment(before, without=_own_variables())


def _own_variables() -> dict[str, str]:
    """Return the variables that Keras reads, and the one that it sets for TensorFlow."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("KERAS_") or name == "TF_FORCE_GPU_ALLOW_GROWTH"
    }


def _drawn(keras: Any) -> Any:
    """Build Keras' usual initialiser of kernels, seeded by torch in place of `random`."""
    return keras.initializers.GlorotUniform(seed=int(torch.randint(2**31 - 1, ())))
