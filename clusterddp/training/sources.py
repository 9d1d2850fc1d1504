"""Loaders that keep their own position: torchdata's, Accelerate's and Fabric's.

The only place that knows the private names of Accelerate's and Fabric's loaders. Both wrap torch's
loader, count their iterations, and shuffle by that count. Sources: `DataLoaderShard.__iter__` of
accelerate 1.1 to 1.15, `_FabricDataLoader.__iter__` of Lightning 2.4 to 2.6.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from clusterddp.errors import TrainingError
from clusterddp.training import replay

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric")
_WRAPPERS = {
    "DataLoaderShard": ("base_dataloader", "iteration"),
    "_FabricDataLoader": ("_dataloader", "_num_iter_calls"),
}
"""By class: the attribute with torch's loader, and the one with the number of iterations."""
_OWN_ITERATION = ("CombinedLoader",)
"""Classes that keep no position."""


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
                    f"the position of {kind.__module__}.{kind.__name__} is unknown, so a resume "
                    f"would train on other batches. {_REMEDIES.get(kind.__name__, _NEWER)} [CD0819]"
                )
        if hasattr(self.base, "_initial_iter_for_state_dict"):
            # torchdata's: an iterator that an earlier state_dict() has begun drew its numbers then.
            self.base.load_state_dict({})
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
        if state and "own" in state and self._owner is not None and is_inside:
            self._owner.load_state_dict(state["own"])
            return False
        return True

    @property
    def is_at_end(self) -> bool | None:
        """True if the epoch has no further batch; None if unknown."""
        return getattr(self.loader, "end_of_dataloader", None) if self._counter else None

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
        replay.read_by(self.base, lambda: fetches.read(self.base, skips=skips))
        return iter(self.loader)

    def _count(self) -> int:
        return int(getattr(self.loader, self._counter)) if self._counter else 0

    def _seeded(self) -> list[Any]:
        """Return Accelerate's SeedableRandomSamplers."""
        return [each for each in replay.samplers_of(self.base) if hasattr(each, "initial_seed")]

    def _state_owner(self) -> Any:
        """Return the object that has the loader's own state_dict, if one does and can be trusted.

        torchdata's StatefulDataLoader forgets the order of a sampler that has no state.
        """
        dataset = getattr(self.base, "dataset", None)
        if _has_state(self.base):
            samplers = [] if isinstance(dataset, IterableDataset) else replay.samplers_of(self.base)
            kept = (BatchSampler, DistributedSampler, SequentialSampler)
            is_kept = all(isinstance(each, kept) or _has_state(each) for each in samplers)
            return self.loader if is_kept else None
        is_read_here = isinstance(self.base, DataLoader) and self.base.num_workers == 0
        is_own = is_read_here and self.base is self.loader and _has_state(dataset)
        return dataset if is_own else None


def order_of(loader: object, world_size: int) -> str:
    """Return the name of an order that the ranks share out, the same for any number of ranks.

    After k batches of b samples on each of n ranks the first k * b * n samples are done. Torch's
    DistributedSampler has one, and Accelerate's BatchSamplerShard with a SeedableRandomSampler or
    without shuffling. Empty if there is none. Frameworks add these samplers for several ranks only.
    """
    samplers = replay.samplers_of(loader)
    for each in samplers:
        if isinstance(each, DistributedSampler) and each.num_replicas == world_size:
            return "shuffled" if each.shuffle else "sequential"
    shards = any(getattr(each, "num_processes", 0) == world_size for each in samplers)
    if world_size > 1 and not shards:
        return ""
    if any(hasattr(each, "initial_seed") for each in samplers):
        return "seeded"
    return "sequential" if any(isinstance(s, SequentialSampler) for s in samplers) else ""


def length_of(loader: object) -> int:
    """Return the number of batches of an epoch; -1 if unknown."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return -1


def splits_batches(loader: object) -> bool:
    """Return whether the ranks share out each batch, not the batches (Accelerate)."""
    return any(getattr(each, "split_batches", False) for each in replay.samplers_of(loader))


_NEWER = "Update clusterddp, or install an older release of the framework."
_REMEDIES = {
    "DataLoaderDispatcher": (
        "Use Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)), or "
        'TrainingArguments(accelerator_config={"dispatch_batches": False}).'
    ),
    "SkipDataLoader": "Pass the loader itself: loop.batches() skips the trained batches.",
}


def _has_state(each: object) -> bool:
    return hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
