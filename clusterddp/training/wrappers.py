"""Wrappers around models: DDP's, torch.compile's, Accelerate's and Fabric's.

The only place that knows the private names of Accelerate's Accelerator and of Fabric's models.
Sources: `Accelerator.save_state` of accelerate 1.1 to 1.15, `_FabricModule` of Lightning 2.4 to
2.6.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class AcceleratorFiles:
    """Accelerate's Accelerator as a state that writes its own files."""

    def __init__(self, accelerator: Any) -> None:
        """Raises TypeError if nothing has been prepared."""
        self._accelerator = accelerator
        if not self.models:
            raise TypeError(
                "Loop(accelerator=…): no model is prepared. Call accelerator.prepare() first"
            )

    @property
    def models(self) -> list[nn.Module]:
        """Models that `prepare` has wrapped."""
        return list(self._accelerator._models)

    def save_state(self, directory: str) -> None:
        """Write the models, optimizers, schedulers, scaler and registered objects."""
        with self._own_names():
            self._accelerator.save_state(directory)

    def load_state(self, directory: str) -> None:
        """Restore a result of `save_state`."""
        with self._own_names():
            self._accelerator.load_state(directory)

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Keep to the given directory, and leave the loaders to `sources`.

        With automatic_checkpoint_naming Accelerate would write elsewhere, delete older directories
        and wait for the other ranks; all ranks would write a stateful loader to the same file.
        """
        accelerator, project = self._accelerator, self._accelerator.project_configuration
        before = project.automatic_checkpoint_naming, project.iteration, accelerator._dataloaders
        project.automatic_checkpoint_naming, accelerator._dataloaders = False, []
        try:
            yield
        finally:
            project.automatic_checkpoint_naming, project.iteration = before[:2]
            accelerator._dataloaders = before[2]


def states_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint holds of the states that a script gives: models without wrappers."""
    return {
        name: AcceleratorFiles(each) if _is_accelerator(each) else _unwrap(each)
        for name, each in given.items()
    }


def ddp_wrappers(given: Mapping[str, Any]) -> dict[str, DistributedDataParallel]:
    """Return the DDP wrappers of the states that a script gives, by name."""
    found: dict[str, Any] = {}
    for name, each in given.items():
        models = map(_holder, each._models) if _is_accelerator(each) else [each]
        found |= {f"{name}-{number}" if number else name: m for number, m in enumerate(models)}
    return {name: ddp for name, each in found.items() if (ddp := wrapper_of(each))}


def wrapper_of(model: Any) -> DistributedDataParallel | None:
    """Return a model's DDP wrapper, if any, also inside another wrapper."""
    while isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod", None) or _of_fabric(model)
    return model if isinstance(model, DistributedDataParallel) else None


def _unwrap(each: Any) -> Any:
    """Return a module without its wrappers."""
    while isinstance(each, nn.Module):
        is_ddp = isinstance(each, DistributedDataParallel)
        inner = each.module if is_ddp else getattr(each, "_orig_mod", None) or _of_fabric(each)
        if not isinstance(inner, nn.Module):
            break
        each = inner
    return each


def _of_fabric(model: nn.Module) -> Any:
    """Return the model inside Fabric's wrapper, perhaps DDP's."""
    is_fabric = type(model).__name__ == "_FabricModule"
    return getattr(model, "_forward_module", None) if is_fabric else None


def _holder(model: Any) -> Any:
    """Return the DDP wrapper of a model that an Accelerator has wrapped, else the model."""
    for each in gc.get_objects():
        # Not isinstance: a lazy module would answer it by loading its module.
        if issubclass(type(each), DistributedDataParallel) and each.module is model:
            return each
    return model


def _is_accelerator(each: object) -> bool:
    return any(
        kind.__name__ == "Accelerator" and kind.__module__.startswith("accelerate.")
        for kind in type(each).__mro__
    )
