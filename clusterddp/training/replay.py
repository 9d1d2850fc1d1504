"""Restores a position in a training: an epoch's batches, the random generators, DDP's buckets.

It works with any loader and needs only torch (`loop`).

DDP rebuilds its buckets after a process's first backward pass, in the order of the gradients
(torch's Reducer, `rebuild_buckets`). Gloo's sum over three or more ranks depends on a gradient's
position in its bucket, so the first step after a resume would differ by rounding.
"""

import copy
import functools
import pickle
import random
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from clusterddp.errors import CheckpointError, TrainingError
from clusterddp.processes.signals import end_workers_at_exit, ignore_requests

T = TypeVar("T")

RandomStates = dict[str, Any]
"""One rank's random states in a checkpoint: `now`, at the `start` of the epoch, and before each
batch that was fetched `ahead`; and whether persistent workers are `live` at the epoch's start."""
Packed = tuple[bytes, bytes]
"""One rank's random states in the form that is sent to rank 0 (`pack`)."""
END = object()
"""Marks the end of an iterator."""


class Fetches:
    """Batches that a loader gives to an epoch, from a position on.

    A framework may fetch batches before they are trained. The random states before each of them are
    kept, so that a resumed epoch draws the same numbers for them.
    """

    def __init__(
        self,
        saved: RandomStates | None = None,
        done: int = 0,
        on_fetch: Callable[[], None] = lambda: None,
    ) -> None:
        """saved: this rank's states in the checkpoint, if it resumes. done: the trained batches of
        the epoch in it. on_fetch: called before each batch is read."""
        self.start: Any = None
        """Random states at the start of the epoch."""
        self.generators: list[torch.Generator] = []
        """Generators that belong to the loader."""
        self.is_early = False
        """True while a batch is read that the training does not take yet."""
        self._saved, self._done, self._on_fetch = saved, done, on_fetch
        self._loader: Any = None
        self._was_live = False
        self._ahead: deque[tuple[Any, int]] = deque()

    def read(self, loader: Iterable[T], *, skips: bool = True) -> Iterator[T]:
        """Yield the untrained batches of the epoch; skips: whether the trained ones are left."""
        saved, done, self._saved, self._done = self._saved, self._done, None, 0
        now, ahead = None, deque[Any]()
        self._ahead.clear()
        self.generators = generators_of(loader)
        if saved and saved["live"] and not _is_live(loader):
            _start_workers(loader, self.generators)
        self._loader, self._was_live = loader, _is_live(loader)
        if saved and done:
            now, self.start, ahead = saved["now"], saved["start"], deque(saved["ahead"])
            restore(self.start, self.generators)
        else:
            if saved:
                restore_own(saved["now"], self.generators)
            self.start = random_state(self.generators)
        batches = skip(loader, done if skips else 0)
        while True:
            if ahead:
                restore(ahead.popleft(), self.generators)
            elif now:
                restore(now, ())
                now = None
            self._on_fetch()
            is_ahead = self.is_early or self._ahead
            before = random_state(self.generators) if is_ahead else None
            batch = next(batches, END)
            if now and not ahead:  # the last batch that was ahead; the training continues
                restore(now, ())
                now = None
            if batch is END:
                return
            self._ahead.append((before, count_samples(batch)))
            yield cast(T, batch)

    def trained(self) -> int:
        """Count the next batch as trained; return its samples."""
        return self._ahead.popleft()[1] if self._ahead else 0

    def states(self, *, is_inside: bool) -> RandomStates:
        """Return this rank's random states; is_inside: whether some of the epoch is trained."""
        return {
            "now": random_state(self.generators),
            "start": self.start,
            "ahead": [before for before, _ in self._ahead],
            "live": self._was_live if is_inside else _is_live(self._loader),
        }


def _is_live(loader: object) -> bool:
    """Return whether a loader has persistent workers that run."""
    loaders = (loader, *getattr(loader, "flattened", ()))
    return any(
        getattr(each, "persistent_workers", False) and each._iterator is not None
        for each in loaders
    )


def _start_workers(loader: Any, generators: Sequence[torch.Generator]) -> None:
    """Start persistent workers; their start draws a number, which a later epoch does not."""
    before = random_state(generators)
    iter(loader)
    restore(before, generators)


def skip(loader: Any, done: int) -> Iterator[Any]:
    """Return an iterator over a loader without its first `done` batches.

    It skips them by index if the loader is torch's without workers. Otherwise it reads them:
    in a worker they draw random numbers that later batches depend on.
    """
    has_indices = type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset)
    if has_indices and loader.batch_sampler is not None and loader.num_workers == 0:
        rest, indices = copy.copy(loader), _Indices(loader.batch_sampler)
        # A DataLoader's batch_sampler cannot be set; that of an unused copy can.
        object.__setattr__(rest, "batch_sampler", indices)
        # The loader draws one number first, the sampler another with its first batch.
        batches: Iterator[Any] = iter(rest)
        for _ in range(done):
            next(indices, None)
        return batches
    iterator: Iterator[Any] = iter(loader)
    for _ in range(done):
        next(iterator, None)
    return iterator


def read_by(loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
    """Have the next iteration over a loader call `begin` instead.

    Only the next: a validation or the script may iterate over the same loader.

    Raises TrainingError for an object of a built-in class.
    """
    kind = getattr(type(loader), "_own_kind", type(loader))

    def iterate(_: object) -> Iterator[Any]:
        object.__setattr__(loader, "__class__", kind)
        return begin()

    namespace = {"__iter__": iterate, "_own_kind": kind, "__module__": kind.__module__}
    try:
        object.__setattr__(loader, "__class__", type(kind.__name__, (kind,), namespace))
    except TypeError:
        raise TrainingError(
            f"the batches of a {kind.__name__} cannot be continued at a position. "
            "Use a DataLoader. [CD0819]"
        ) from None


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

    Raises CheckpointError for damaged states and for another generator's.
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


def pack(states: RandomStates | None) -> Packed:
    """Pack a rank's random states without loss; unused and freshly seeded generators take little.

    Returns everything but the generators' bits, and the bits: each generator's as the difference
    from the nearest one that precedes it, or from one that was seeded with torch's seed.
    """
    seed = torch.initial_seed()
    known, bits = _seeded(seed), bytearray(seed.to_bytes(8, "little"))

    def take(part: Tensor) -> int:
        number = _nearest(part, known)
        difference = part if number == _NONE else part ^ known[number]
        bits.append(number)
        bits.extend(_raw(difference))
        known.append(part)
        return len(part)

    rest = _with_parts(states, take, lambda words: take(_bytes(array("I", words).tobytes())))
    small = zlib.compressobj(zdict=_USUAL)
    return small.compress(pickle.dumps(rest)) + small.flush(), zlib.compress(bytes(bits))


def join(packed: Sequence[Packed]) -> dict[str, Any]:
    """Return the content of a checkpoint for the packed states of all ranks, in their order.

    What ranks have alike besides the generators' bits is there once, and the bits are one tensor:
    torch.load takes long for many small ones.
    """
    numbers = {rest: number for number, rest in enumerate(dict.fromkeys(r for r, _ in packed))}
    return {
        "states": [
            pickle.loads(zlib.decompressobj(zdict=_USUAL).decompress(rest)) for rest in numbers
        ],
        "numbers": [numbers[rest] for rest, _ in packed],
        "sizes": [len(bits) for _, bits in packed],
        "bits": _bytes(b"".join(bits for _, bits in packed)),
    }


def unpack(joined: Mapping[str, Any], rank: int) -> RandomStates | None:
    """Return the states of a rank from the result of `join`. Raises CheckpointError."""
    if isinstance(joined, list):  # a checkpoint of an earlier development version
        return cast(RandomStates | None, joined[rank])
    try:
        begin, size = sum(joined["sizes"][:rank]), joined["sizes"][rank]
        bits = _bytes(zlib.decompress(_raw(joined["bits"][begin : begin + size])))
        known, place = _seeded(int.from_bytes(_raw(bits[:8]), "little")), 8

        def give(size: int) -> Tensor:
            nonlocal place
            number, part = int(bits[place]), bits[place + 1 : place + 1 + size]
            known.append(part.clone() if number == _NONE else part ^ known[number])
            place += 1 + size
            return known[-1]

        states = joined["states"][joined["numbers"][rank]]
        return _with_parts(states, give, lambda size: array("I", _raw(give(size))).tolist())
    except (LookupError, ValueError, TypeError, RuntimeError, AttributeError, zlib.error) as error:
        raise CheckpointError(
            f"the random states of the checkpoint cannot be read: {error}. "
            "Resume with the versions that wrote it. [CD0704]"
        ) from None


_PARTS = {"torch": 5056, "python": [3, 2500, None], "generators": [], "cuda": 16}
_USUAL = pickle.dumps(
    {
        "now": {**_PARTS, "numpy": ["MT19937", 2496, 624, 0, 0.0]},
        "start": {**_PARTS, "numpy": ["MT19937", 2496, 624, 0, 0.0]},
        "ahead": [],
        "live": False,
    }
)
"""What most ranks have besides the generators' bits, so that it takes little when it is sent."""
_NONE = 255
"""In place of the number of a known part: there is none of this size."""


def _nearest(part: Tensor, known: Sequence[Tensor]) -> int:
    """Return the number of the known part with the most equal bytes; the first one of them."""
    equal = [
        (int((part == each).sum()), -number)
        for number, each in enumerate(known[:_NONE])
        if each.shape == part.shape
    ]
    return -max(equal)[1] if equal else _NONE


def _seeded(seed: int) -> list[Tensor]:
    """Return the bits of generators that were seeded alike, before and after their first draw."""
    return [part.clone() for part in _seeded_once(seed)]


@functools.lru_cache(maxsize=1)
def _seeded_once(seed: int) -> list[Tensor]:
    ours, python, parts = torch.Generator().manual_seed(seed), random.Random(seed), list[Tensor]()
    for _ in range(2):
        parts += ours.get_state(), _bytes(array("I", python.getstate()[1]).tobytes())
        # numpy's RandomState has the same words as torch's generator: both are MT19937 with
        # the lower half of the seed. So a process without numpy has the same parts.
        words = array("Q", _raw(parts[-2]))[3:627]  # CPUGeneratorImplStateLegacy
        parts.append(_bytes(array("I", words).tobytes()))
        # The program may have set another default device or type, which draws other bits.
        torch.rand(1, generator=ours, device="cpu", dtype=torch.float32)
        python.random()
    return parts


def _with_parts(
    states: RandomStates | None, bits: Callable[[Any], Any], words: Callable[[Any], Any]
) -> RandomStates | None:
    """Replace each generator's bits in a rank's states: those in a tensor, and those in a list."""

    def replaced(state: Any) -> Any:
        if not state:  # before a batch that was not fetched ahead
            return state
        version, integers, waiting = state["python"]
        made = {
            **state,
            "torch": bits(state["torch"]),
            "python": [version, words(integers), waiting],
            "generators": [bits(each) for each in state["generators"]],
        }
        if "cuda" in state:
            made["cuda"] = bits(state["cuda"])
        if "numpy" in state:
            kind, key, *rest = state["numpy"]
            made["numpy"] = [kind, words(key), *rest]
        return made

    if not states:
        return states
    made = dict(states)
    for name in ("now", "start", "drawn"):  # in this order wherever it is unpacked
        if name in states:
            made[name] = replaced(states[name])
    if "ahead" in states:
        made["ahead"] = [*map(replaced, states["ahead"])]
    return made


def _bytes(data: bytes) -> Tensor:
    # torch refuses an empty buffer.
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]


def _raw(part: Tensor) -> bytes:
    """Return a tensor's bytes, also without numpy."""
    return bytes(part.tolist())


def samplers_of(loader: object) -> list[Any]:
    """Return a loader's sampler and batch sampler, and those that they wrap.

    A CombinedLoader of Lightning has its loaders' generators.
    """
    found: list[Any] = []
    owners = [loader, *getattr(loader, "flattened", ())]
    while owners:
        owner = owners.pop()
        for name in ("sampler", "batch_sampler"):
            each = getattr(owner, name, None)
            if each is not None and not any(each is known for known in found):
                found.append(each)
                owners.append(each)
    return found


def generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers."""
    loaders = (loader, *getattr(loader, "flattened", ()))
    found = [getattr(owner, "generator", None) for owner in (*loaders, *samplers_of(loader))]
    return [each for each in dict.fromkeys(found) if isinstance(each, torch.Generator)]


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
    for each in (loader, *getattr(loader, "flattened", ())):
        if hasattr(each, "worker_init_fn") and not isinstance(each.worker_init_fn, _Shielded):
            each.worker_init_fn = _Shielded(each.worker_init_fn)
            end_workers_at_exit()


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
