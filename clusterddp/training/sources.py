"""Loaders that keep a position of their own: torchdata's, Accelerate's and Fabric's.

The only place that knows the private names of Accelerate's and Fabric's loaders. Both wrap torch's
loader, count their iterations, and shuffle by that count. Sources: `DataLoaderShard.__iter__` of
accelerate 1.1 to 1.15, `_FabricDataLoader.__iter__` of Lightning 2.4 to 2.6.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from clusterddp.errors import TrainingError
from clusterddp.training import replay

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric")
_WRAPPERS = {
    "DataLoaderShard": ("base_dataloader", "iteration"),
    "_FabricDataLoader": ("_dataloader", "_num_iter_calls"),
}
"""By class: the attribute with torch's loader, and the one with the number of iterations."""
_OWN_ITERATION = ("CombinedLoader",)
"""Classes that keep no position of their own."""


class Source:
    """A loader, and the parts of its position that its random states do not hold."""

    def __init__(self, loader: Any) -> None:
        """Raises TrainingError for a framework's loader whose position is unknown."""
        self.loader, self.base, self._counter = loader, loader, ""
        kind = type(loader)
        if kind.__module__.partition(".")[0] in _FRAMEWORKS and kind.__name__ not in _OWN_ITERATION:
            inner, self._counter = _WRAPPERS.get(kind.__name__, ("", ""))
            self.base = getattr(loader, inner, None)
            if self.base is None or not hasattr(loader, self._counter):
                raise TrainingError(
                    f"loop.batches() cannot resume a {kind.__module__}.{kind.__name__}. "
                    f"{_REMEDIES.get(kind.__name__, _NEWER)} [CD0819]"
                )
        self._owner = self._state_owner()
        self._first = self._count()

    def load(self, state: Mapping[str, Any] | None, *, is_inside: bool) -> bool:
        """Restore a result of `state`; return whether the trained batches are left to skip.

        is_inside: whether some batches of the epoch are trained.
        """
        if state and self._counter:
            setattr(self.loader, self._counter, state["count"])
            for each, seed in zip(self._seeded(), state["seeds"], strict=False):
                each.initial_seed = seed
        self._first = self._count()
        if state and self._owner is not None and is_inside:
            self._owner.load_state_dict(state["own"])
            return False
        return True

    def state(self, *, is_inside: bool) -> dict[str, Any]:
        """Return the position, as plain values; empty if the random states hold all of it."""
        found: dict[str, Any] = {}
        if self._counter:
            seeds = [each.initial_seed for each in self._seeded()]
            found = {"count": self._first if is_inside else self._count(), "seeds": seeds}
        if self._owner is not None:
            found["own"] = self._owner.state_dict()
        return found

    def iterate(self, fetches: replay.Fetches, *, skips: bool) -> Iterator[Any]:
        """Iterate over the loader; torch's is read by `fetches`."""
        if self.base is self.loader:
            return fetches.read(self.loader, skips=skips)

        def begin(kind: type) -> Iterator[Any]:
            object.__setattr__(self.base, "__class__", kind)  # another iteration is not ours
            return fetches.read(self.base, kind, skips=skips)

        replay.read_by(self.base, begin)
        return iter(self.loader)

    def _count(self) -> int:
        return int(getattr(self.loader, self._counter)) if self._counter else 0

    def _seeded(self) -> list[Any]:
        """Return Accelerate's SeedableRandomSamplers."""
        return [each for each in replay.samplers_of(self.base) if hasattr(each, "initial_seed")]

    def _state_owner(self) -> Any:
        """Return the object that has the loader's own state_dict, if one does."""
        if _has_state(self.base):
            return self.loader
        dataset = getattr(self.base, "dataset", None)
        is_read_here = isinstance(self.base, DataLoader) and self.base.num_workers == 0
        return (
            dataset if is_read_here and self.base is self.loader and _has_state(dataset) else None
        )


_NEWER = "Update clusterddp, or install an older release of the framework."
_REMEDIES = {
    "DataLoaderDispatcher": (
        "Use Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))."
    ),
    "SkipDataLoader": "Pass the loader itself: loop.batches() skips the trained batches.",
}


def _has_state(each: object) -> bool:
    return hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
