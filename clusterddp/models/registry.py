"""Builds a model by its name, and checks a user's own before anything is trained.

A new built-in model is a class in `nets`, a line in MODELS and one in `train_config.MODELS`.
"""

import io
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from clusterddp.errors import TrainingError
from clusterddp.models.nets import MLP, BNConvNet, ConvNet, DeepNet, FastNet
from clusterddp.request import user_functions


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


def build(name: str) -> nn.Module:
    """Build the model of that name, its weights drawn from torch's generator.

    Any name that is not built in is a user function, `package.module:function`. Raises
    TrainingError where it cannot be imported or returns no module with weights to train.
    """
    if not user_functions.is_reference(name):
        return MODELS[name]()
    function = user_functions.load(name)
    with user_functions.running(name):
        model = function()
    return check(name, model)


def check(name: str, model: object) -> nn.Module:
    """Return the model that `--model name` returned, once it is checked.

    Raises TrainingError when it is no module, has no parameter to train, has uninitialised ones,
    or cannot be copied to other ranks or read back from a checkpoint.
    """
    if not isinstance(model, nn.Module):
        raise TrainingError(
            f"--model {name}: it has to return a torch.nn.Module, and returned "
            f"{type(model).__name__}."
        )
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise TrainingError(
            f"--model {name}: it has lazy layers, whose sizes are not known yet. Call it once on a "
            "batch of its images before you return it, or give the sizes."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError(f"--model {name}: the module has no parameter to train.")
    for buffer, tensor in model.named_buffers():
        if tensor.numel() > 1 and 0 in tensor.stride():
            raise TrainingError(
                f"--model {name}: the buffer {buffer} overlaps itself (expand), so rank 0's cannot "
                "be copied into it. Register a copy: tensor.clone()."
            )
    _check_extra_state(name, model)
    return model


def _check_extra_state(name: str, model: nn.Module) -> None:
    extra = {
        key: value for key, value in model.state_dict().items() if not isinstance(value, Tensor)
    }
    if not extra:
        return
    file = io.BytesIO()
    try:
        torch.save(extra, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise TrainingError(
            f"--model {name}: what its state_dict holds beside tensors ({', '.join(extra)}) cannot "
            f"be read back from a checkpoint: {str(error).splitlines()[0]} Keep to tensors, "
            "numbers, strings, lists and dicts."
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
            "have them need no gradient: requires_grad_(False)."
        )
