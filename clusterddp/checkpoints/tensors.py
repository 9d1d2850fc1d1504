"""Copies and serialises nested state: tensors, in plain containers and values."""

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def to_bytes(content: object) -> bytes:
    """Serialise the content of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def copied(value: Any, copy: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Copy a value with every tensor in it to the CPU, with the same strides.

    copy: in place of that, what becomes of a tensor. Raises TypeError for a DTensor.
    """
    if isinstance(value, Tensor):
        if hasattr(value, "device_mesh"):
            raise TypeError("a DTensor, of which each rank holds a part: give its full_tensor()")
        return copy(value) if copy else value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        items = {name: copied(item, copy) for name, item in value.items()}
        if hasattr(value, "_metadata"):  # a module's state dict: the versions of its layouts
            items = OrderedDict(items)
            items._metadata = value._metadata  # type: ignore[attr-defined]
        return items
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(copied(item, copy) for item in value)
    return value


def why_unreadable(state: object) -> str:
    """Return the name of what torch.load refuses of a state with weights_only; empty for none."""
    try:
        hollow = copied(state, lambda tensor: torch.empty(0, dtype=tensor.dtype))
        torch.load(io.BytesIO(to_bytes(hollow)), weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        return name[1] if name else str(error).splitlines()[0]
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # lambda, file, DTensor
        return str(error)
    return ""
