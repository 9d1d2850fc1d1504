"""Calls a user function for a dataset, checks the result, and makes it readable for training.

The function is called as `function(data_dir, train=True)` for the training set and with False for
the test set. It returns a pair of tensors, kept in memory, or a dataset that is read item by item.
"""

import hashlib
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from clusterddp.data.loader import Images, Loader, seed_generators
from clusterddp.errors import DataError
from clusterddp.request import user_functions
from clusterddp.request.train_config import TrainConfig

_EXPECTED = (
    "a pair of tensors (images, labels), or a dataset with a length whose items are pairs of an "
    "image tensor and an integer label"
)


class OwnSets:
    """The training and the test set of a user function, which each rank calls for itself."""

    def __init__(self, config: TrainConfig) -> None:
        """config.dataset is a reference. Nothing is called yet."""
        self._config = config
        self._given: dict[bool, Any] = {}
        self._sha256 = ""

    def load(self) -> None:
        """Call the function once for each set, and check what it returns.

        Each call starts from the same random state, so that a random split is the same on all ranks
        and in both calls. Raises DataError for unusable sets, and TrainingError if the function
        fails.
        """
        reference = self._config.dataset
        for train in (True, False):
            if train in self._given:
                continue
            function = user_functions.load(reference)
            seed_generators(self._config.seed)
            with user_functions.running(reference):
                given = function(self._config.data_dir, train=train)
            self._given[train] = self._checked(given, train=train)

    def fingerprint(self) -> str:
        """Return one SHA-256 over both sets: the content of tensors, the length of a dataset.

        It shows whether ranks have different sets, and whether a run's set has changed. Raises
        like `load`.
        """
        self.load()
        if not self._sha256:
            digest = hashlib.sha256(self._config.dataset.encode())
            for given in self._given.values():
                digest.update(f"\n{len(given[1] if isinstance(given, tuple) else given)}".encode())
                for tensor in given if isinstance(given, tuple) else ():
                    digest.update(f" {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                    digest.update(tensor.cpu().contiguous().numpy())
            self._sha256 = digest.hexdigest()
        return self._sha256

    def on(self, device: torch.device) -> tuple[Images | Loader, Images | Loader]:
        """Return the training and the test set on this device. Raises like `load`."""
        self.load()
        train, test = (self._readable(self._given[train], device) for train in (True, False))
        self._given = {}  # frees the host's memory: a GPU has copies of the tensors
        return train, test

    def _readable(self, given: Any, device: torch.device) -> Images | Loader:
        if isinstance(given, tuple):
            images, labels = given
            if self._config.data_pipeline == "memory":
                return Images(images, labels, device)
            given = TensorDataset(images, labels)
        return Loader(given, device, self._config.num_workers)

    def _checked(self, given: Any, *, train: bool) -> Any:
        """Return a pair as (float32 or bytes, int64), a dataset unchanged; raises DataError."""
        what = f"--dataset {self._config.dataset} with train={train}"
        pair = isinstance(given, tuple | list) and len(given) == 2
        if pair and all(isinstance(each, Tensor) for each in given):
            images, labels = _pair(what, *given)
            self._check_image(what, images[0])
            return images, labels
        of_items = all(hasattr(type(given), name) for name in ("__len__", "__getitem__"))
        if not of_items or isinstance(given, dict | str | tuple):
            raise DataError(f"{what}: expected {_EXPECTED}, found {_seen(given)}. [CD0605]")
        with user_functions.running(self._config.dataset):
            count = len(given)
            first: Any = given[0] if count else None
        if not count:
            raise DataError(f"{what}: the dataset is empty. [CD0605]")
        of_two = isinstance(first, tuple | list) and len(first) == 2
        if not (of_two and isinstance(first[0], Tensor) and _is_label(first[1])):
            raise DataError(
                f"{what}: expected items that are pairs of an image tensor and an integer label "
                f"of 0 or more, found {_seen(first)} first. [CD0605]"
            )
        self._check_image(what, first[0])
        return given

    def _check_image(self, what: str, image: Tensor) -> None:
        shape = tuple(image.shape)
        if image.dtype is torch.uint8:
            fits, expected = image.dim() == 2, "grey images of bytes, (height, width) each"
        else:
            fits, expected = image.is_floating_point(), "images of floats or bytes"
        if fits and self._config.augment != "none" and image.dtype is not torch.uint8:
            fits = image.dim() == 3
            expected = f"(channels, height, width) for --augment {self._config.augment}"
        if not fits or not image.numel():
            raise DataError(
                f"{what}: expected {expected}, found {image.dtype} of shape {shape}. [CD0605]"
            )


def _pair(what: str, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    shapes = f"images {tuple(images.shape)} and labels {tuple(labels.shape)}"
    if images.dim() < 2 or labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"{what}: expected images (N, …) and labels (N,), one label per image, found "
            f"{shapes}. [CD0605]"
        )
    if not len(labels):
        raise DataError(f"{what}: it returned no image: {shapes}. [CD0605]")
    if not _is_integer(labels) or int(labels.min()) < 0:
        fault = f"a label {int(labels.min())}" if _is_integer(labels) else str(labels.dtype)
        raise DataError(
            f"{what}: expected integer labels of 0 or more, the numbers of the classes, found "
            f"{fault}. [CD0605]"
        )
    if images.is_floating_point():
        images = images.detach().float()
    return images, labels.long()


def _is_label(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and _is_integer(value) and value.item() >= 0
    return isinstance(value, SupportsIndex) and not isinstance(value, bool) and int(value) >= 0


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _seen(value: object) -> str:
    """Describe a value and its parts."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, tuple | list) and len(value) <= 4:
        return f"a {type(value).__name__} of {', '.join(map(_seen, value)) or 'nothing'}"
    if isinstance(value, int | float):
        return f"{type(value).__name__} {value}"
    return type(value).__name__
