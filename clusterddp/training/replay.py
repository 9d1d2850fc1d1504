"""Restores a position in a training: an epoch's batches, the random generators, DDP's buckets.

It works with any loader and needs only torch (`loop`).

DDP rebuilds its buckets after a process's first backward pass, in the order of the gradients
(torch's Reducer, `rebuild_buckets`). Gloo's sum over three or more ranks depends on a gradient's
position in its bucket, so the first step after a resume would differ by rounding.
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


def skip(loader: Iterable[T], done: int) -> Iterator[T]:
    """Return an iterator over a loader without its first `done` batches.

    It skips them by index if the loader is torch's without workers. Otherwise it reads them:
    in a worker they draw random numbers that later batches depend on.
    """
    if type(loader) is DataLoader and loader.batch_sampler and loader.num_workers == 0:
        rest, indices = copy.copy(loader), _Indices(loader.batch_sampler)
        # A DataLoader's batch_sampler cannot be set; that of an unused copy can.
        object.__setattr__(rest, "batch_sampler", indices)
        # The loader draws one number first, the sampler another with its first batch.
        batches: Iterator[T] = iter(rest)
        for _ in range(done):
            next(indices, None)
        return batches
    iterator = iter(loader)
    for _ in range(done):
        next(iterator, None)
    return iterator


def random_state(generators: Iterable[torch.Generator]) -> dict[str, Any]:
    """Return the states of this process's generators and the given ones, as plain values."""
    version, integers, waiting = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(integers), waiting],
        "generators": [generator.get_state() for generator in generators],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")  # torch imports it if it is installed
    if numpy is not None:
        known = numpy.random.get_state()
        if isinstance(known, tuple):  # other bit generators are not saved
            kind, key, *rest = known
            state["numpy"] = [kind, key.tolist(), *rest]
    return state


def restore(state: Mapping[str, Any], generators: Iterable[torch.Generator]) -> None:
    """Restore the generators from a result of `random_state`.

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
    """Restore only the loader's generators from a result of `random_state`."""
    for generator, saved in zip(generators, state["generators"], strict=False):
        generator.set_state(saved)


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader and its sampler."""
    found = [
        getattr(owner, "generator", None) for owner in (loader, getattr(loader, "sampler", None))
    ]
    return [each for each in found if isinstance(each, torch.Generator)]


def has_distributed_sampler(loader: object, world_size: int) -> bool:
    """Return whether a loader's sampler is torch's DistributedSampler for this world size.

    After k batches of b samples on each of n ranks the first k * b * n samples of its order are
    done, and the order is the same for any number of ranks.
    """
    owners = loader, getattr(loader, "batch_sampler", None)
    samplers = [getattr(owner, "sampler", None) for owner in owners]
    return any(
        isinstance(each, DistributedSampler) and each.num_replicas == world_size
        for each in samplers
    )


class _Indices:
    """Batches of indices from a sampler, some of which can be taken before the loader starts."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self._sampler = sampler

    def __iter__(self) -> "_Indices":
        self._left = iter(self._sampler)
        return self

    def __next__(self) -> Any:
        return next(self._left)


class _Shielded:
    """Worker start function that ignores Slurm's signals, then calls the original one."""

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
    """Count the samples of a batch by its first tensor; 0 without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(parts, (list, tuple, type({}.values()))):
        return next((count for part in parts if (count := count_samples(part))), 0)
    return 0


def rebuild_buckets(ddp: DistributedDataParallel) -> list[int]:
    """Rebuild the buckets and return their parameters' indices in order; collective.

    DDP would rebuild them at the next forward pass. Empty before the first backward pass and if
    DDP never rebuilds them, for example with find_unused_parameters.
    """
    ddp.reducer._rebuild_buckets()
    ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr] # set once it is made
    buckets = ddp._get_ddp_logging_data().get(  # type: ignore[no-untyped-call]
        "rebuilt_per_bucket_param_indices", ""
    )
    return [int(index) for bucket in buckets.split(",") for index in bucket.split()]


def restore_buckets(ddp: DistributedDataParallel, indices: Sequence[int]) -> None:
    """Rebuild the buckets of a wrapper before its first backward pass; collective.

    A backward pass of zeros in this order replaces the first one: it runs no forward, touches no
    buffers and leaves no gradients. Buckets with static_graph or sparse gradients do not change.
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
