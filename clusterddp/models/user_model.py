"""What a person's own model has to be for a training to use it, said before anything is trained."""

import io

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from clusterddp.errors import TrainingError


def check(name: str, model: object) -> nn.Module:
    """The model, as it was returned by `--model name`.

    Raises TrainingError when it is no module, has nothing to train, is not complete yet, or could
    not be copied to other ranks or read back from a checkpoint.
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
    """After a backward pass: DDP exchanges the gradient of every parameter that asks for one.

    Raises TrainingError naming those that took no part.
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
