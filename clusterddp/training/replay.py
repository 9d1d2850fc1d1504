"""Returns to a place in a training: an epoch's batches, the random generators, DDP's buckets.

For a loader of whatever kind; it depends on torch alone (`loop`).

DDP arranges its buckets anew after a process's first backward, in the order in which that yields
the gradients (torch's Reducer, `rebuild_buckets`). Gloo's sum over three ranks and more depends on
where in a bucket a gradient lies, so the first step after a resume would differ by rounding.
"""

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from clusterddp.errors import CheckpointError
from clusterddp.processes.signals import ignore_requests

T = TypeVar("T")


def beyond(loader: Iterable[T], done: int) -> Iterator[T]:
    """Begin an iterator, and take it past so many batches.

    They are skipped by their indices where the loader is torch's without workers, and read
    otherwise: in a worker they draw random numbers that later ones follow.
    """
    if type(loader) is DataLoader and loader.batch_sampler and loader.num_workers == 0:
        rest, indices = copy.copy(loader), _Indices(loader.batch_sampler)
        # A DataLoader refuses to change it; the copy has not been used yet.
        object.__setattr__(rest, "batch_sampler", indices)
        # It draws a number first, and the sampler another with its first batch.
        batches: Iterator[T] = iter(rest)
        for _ in range(done):
            next(indices, None)
        return batches
    iterator = iter(loader)
    for _ in range(done):
        next(iterator, None)
    return iterator


def random_state(generators: Iterable[torch.Generator]) -> dict[str, Any]:
    """Return the states of this process's generators, and of those given, as plain values."""
    version, integers, waiting = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(integers), waiting],
        "generators": [generator.get_state() for generator in generators],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")  # torch has it where it is installed
    if numpy is not None:
        known = numpy.random.get_state()
        if isinstance(known, tuple):  # that of another bit generator stays as it is
            kind, key, *rest = known
            state["numpy"] = [kind, key.tolist(), *rest]
    return state


def restore(state: Mapping[str, Any], generators: Iterable[torch.Generator]) -> None:
    """Give the generators what `random_state` has returned.

    Raises CheckpointError for damaged states and for those of another generator.
    """
    try:
        of_torch, (version, integers, waiting) = state["torch"], state["python"]
        torch.set_rng_state(of_torch)
        random.setstate((version, tuple(integers), waiting))
        restore_own(state, generators)
        if "cuda" in state and torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(state["cuda"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and "numpy" in state:
            kind, key, *rest = state["numpy"]
            numpy.random.set_state((kind, numpy.array(key, dtype=numpy.uint32), *rest))
    except (LookupError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the random states of the checkpoint cannot be restored: {error}. "
            "Resume with the versions that wrote it. [CD0704]"
        ) from None


def restore_own(state: Mapping[str, Any], generators: Iterable[torch.Generator]) -> None:
    """Give the loader's own generators what `random_state` has returned, and no other."""
    for generator, saved in zip(generators, state["generators"], strict=False):
        generator.set_state(saved)


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators that a loader and its sampler were given."""
    found = [
        getattr(owner, "generator", None) for owner in (loader, getattr(loader, "sampler", None))
    ]
    return [each for each in found if isinstance(each, torch.Generator)]


def is_dealt_out(loader: object, world_size: int) -> bool:
    """Return whether torch's DistributedSampler deals a loader's samples out to so many ranks.

    After k batches of b samples on each of n ranks these have seen the first k * b * n of its
    order, which is the same for any number of ranks.
    """
    owners = loader, getattr(loader, "batch_sampler", None)
    samplers = [getattr(owner, "sampler", None) for owner in owners]
    return any(
        isinstance(each, DistributedSampler) and each.num_replicas == world_size
        for each in samplers
    )


class _Indices:
    """Batches of a sampler, as indices; whoever holds it can take some before the loader."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    def __iter__(self) -> "_Indices":
        self._left = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        return next(self._left)


class _Shielded:
    """Start of a worker that leaves Slurm's signals to the rank, and then does what it did."""

    def __init__(self, start: Callable[[int], object] | None) -> None:
        self._start = start

    def __call__(self, number: int) -> None:
        ignore_requests()
        if self._start:
            self._start(number)


def shield_workers(loader: Any) -> None:
    """Keep a DataLoader's workers alive when Slurm signals every process of a step."""
    if hasattr(loader, "worker_init_fn") and not isinstance(loader.worker_init_fn, _Shielded):
        loader.worker_init_fn = _Shielded(loader.worker_init_fn)


def count_samples(batch: object) -> int:
    """Count the samples of a batch by its first tensor; 0 where it has none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(parts, (list, tuple, type({}.values()))):
        return next((count for part in parts if (count := count_samples(part))), 0)
    return 0


def arrangement(ddp: DistributedDataParallel) -> list[int]:
    """Return the parameters' indices as the buckets hold them, arranging these now; collective.

    DDP itself would do so at the next forward pass. Empty where it never arranges them anew, as
    with find_unused_parameters, and before the first backward.
    """
    ddp.reducer._rebuild_buckets()
    ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr] # set once it is made
    buckets = ddp._get_ddp_logging_data().get(  # type: ignore[no-untyped-call]
        "rebuilt_per_bucket_param_indices", ""
    )
    return [int(index) for bucket in buckets.split(",") for index in bucket.split()]


def arrange(ddp: DistributedDataParallel, indices: Sequence[int]) -> None:
    """Arrange the buckets of a wrapper that has done no backward yet; collective.

    A backward of zeros in this order stands for the first one: no forward, no buffers, and no
    gradient is left. With static_graph, or sparse gradients, the buckets stay as they are.
    """
    parameters, are_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    if ddp.static_graph or any(are_sparse) or sorted(indices) != list(range(len(parameters))):
        return
    ddp.reducer.prepare_for_backward([])
    for index in indices:
        (parameters[index].sum() * 0).backward()
    for parameter in parameters:
        parameter.grad = None
    ddp.reducer._rebuild_buckets()
