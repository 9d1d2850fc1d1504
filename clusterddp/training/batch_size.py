"""Finds the batch size that suits a model and its processors: tries growing ones, without training.

Each rank computes by itself, without DDP, so that one whose memory is used up leaves no other in an
exchange; after each size the ranks agree on the outcome.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from clusterddp import log
from clusterddp.data.loader import Images, Loaded, training_order
from clusterddp.distributed.heartbeat import Phase
from clusterddp.errors import TrainingError
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.files import write_record
from clusterddp.run.records import Agreement
from clusterddp.training.device import free_bytes, peak_bytes
from clusterddp.training.learner import Learner
from clusterddp.training.stop import REASONS, StopRequest

_SMALLEST = 16
_WARM_UPS = 2
_SECONDS = 0.3
_STEPS = 2
_STEPS_OF_GPU = 5  # between two looks at the clock, for which a GPU has to come to its end
_GAIN = 1.05
"""A size that is not faster by this factor is no faster."""
_SHARE = 0.5
"""Share of the free memory that the next size may be expected to take on a CPU."""

OUT_OF_MEMORY = "out of memory"
NEXT_TOO_LARGE = "the next would take too much of the free memory"
NO_FASTER = "no faster any more"


@dataclass(frozen=True)
class Tried:
    """The outcome of a size on one rank, or on all together."""

    images_per_second: float = 0.0
    memory_bytes: int = 0
    """The most that a rank has held."""
    failed: bool = False
    """It does not fit."""
    full: bool = False
    """The next size is not worth the risk."""
    reason: str = ""
    """Why a rank was asked to stop, of `stop.REASONS`."""


@dataclass(frozen=True)
class Row:
    """A line of the table, and of batch_sizes.json."""

    batch_size: int
    """Images of a rank in one forward pass."""
    images_per_second: float
    """Throughput of all ranks together."""
    memory_bytes: int
    """The most that a rank has held."""
    note: str = ""


def find(
    config: TrainConfig,
    agreed: Agreement,
    *,
    rank: int,
    train_set: Images | Loaded,
    device: torch.device,
    request: StopRequest,
    mark: Callable[[int, int], None] = lambda *_: None,
) -> tuple[list[Row], str]:
    """Try sizes until one does not fit or, on CPUs, is no faster; rank 0 logs the outcomes.

    Collective over the default process group; every rank returns the same rows, and the reason
    where a rank was asked to stop meanwhile (`request`), which ends it after that size. mark: as
    the watchdog's Progress has it, the size in place of a step. Raises TrainingError where not even
    the first size fits.
    """
    report = log.info if rank == 0 else lambda _: None
    trial = Trial(config, agreed, rank, train_set, device)

    reason = ""

    def tried(size: int) -> Tried:
        nonlocal reason
        alone = trial(size, lambda: mark(size, Phase.FORWARD))
        mark(size, Phase.LOG)
        of_all = _together(replace(alone, reason=request.reason), agreed.world_size, device)
        reason = "" if of_all.failed else of_all.reason
        return of_all

    most = len(train_set) // agreed.world_size // config.accumulate
    rows = []
    report(f"{'batch per rank':>14}  {'images/s':>10}  {'memory per rank':>15}")
    for row in search(sizes(config.batch_size, most), tried, to_the_end=device.type == "cuda"):
        report(
            f"{row.batch_size:>14,}  {row.images_per_second:>10,.0f}  "
            f"{row.memory_bytes / 2**20:>11,.0f} MiB  {row.note}".rstrip()
        )
        rows.append(row)
    if not reason:
        report(advice(config, rows))
    return rows, reason


def sizes(wanted: int, most: int) -> list[int]:
    """Return sizes that double, the wanted one among them, up to the share of a rank (`most`)."""
    size = wanted
    while size >= 2 * _SMALLEST and size % 2 == 0:
        size //= 2
    doubled = [max(min(size, most), 1)]
    while 2 * doubled[-1] <= most:
        doubled.append(2 * doubled[-1])
    return doubled


def search(
    sizes: Iterable[int], tried: Callable[[int], Tried], *, to_the_end: bool
) -> Iterator[Row]:
    """Yield the sizes worth trying, as they are done. `tried` returns the outcome on all ranks.

    to_the_end: until one does not fit; else it ends as well when two in turn were no faster.
    """
    fastest, in_vain = 0.0, 0
    for size in sizes:
        outcome = tried(size)
        row = Row(size, round(outcome.images_per_second, 1), outcome.memory_bytes)
        if outcome.failed:
            yield replace(row, note=OUT_OF_MEMORY)
            return
        if outcome.reason:
            yield replace(row, note=f"asked to stop: {outcome.reason}")
            return
        in_vain = 0 if outcome.images_per_second > _GAIN * fastest else in_vain + 1
        fastest = fastest if in_vain else outcome.images_per_second
        if outcome.full or (in_vain == 2 and not to_the_end):
            yield replace(row, note=NEXT_TOO_LARGE if outcome.full else NO_FASTER)
            return
        yield row


def best(rows: Sequence[Row]) -> Row:
    """Return the smallest that is about as fast as the fastest: larger ones only take fewer steps.

    Raises TrainingError where none did fit.
    """
    fitting = [row for row in rows if row.note != OUT_OF_MEMORY]
    if not fitting:
        raise TrainingError(
            f"--find-batch-size: not even {rows[0].batch_size} images per rank fit into memory. "
            "Try a smaller model, or a processor with more."
        )
    enough = max(row.images_per_second for row in fitting) / _GAIN
    return next(row for row in fitting if row.images_per_second >= enough)


def advice(config: TrainConfig, rows: Sequence[Row]) -> str:
    """Return the advice: a size, and a learning rate that suits it. Raises as `best` does."""
    size = best(rows).batch_size
    factor = size / config.batch_size
    if factor == 1:
        return f"use: --batch-size {size} (as it is), the smallest within 5 % of the fastest"
    # Goyal et al. 2017, arXiv 1706.02677; for adam Malladi et al. 2022, arXiv 2205.10287.
    rate = f"--lr {config.lr * factor:g}, by the linear scaling rule: {factor:g} x both"
    if config.optimizer != "sgd":
        root = config.lr * math.sqrt(factor)
        rate += f"; {config.optimizer} often does better with its root, --lr {root:.3g}"
    return f"use: --batch-size {size}, the smallest within 5 % of the fastest; with it {rate}"


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a JSON list. Raises OSError."""
    write_record(path, rows, indent=2)


class Trial:
    """Tries steps of one rank at a size: as in the training, but for the exchange between ranks."""

    def __init__(
        self,
        config: TrainConfig,
        agreed: Agreement,
        rank: int,
        train_set: Images | Loaded,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        free: Callable[[], int | None] = free_bytes,
    ) -> None:
        """free: bytes that this host can still give."""
        self._config, self._agreed = config, agreed
        self._rank, self._device = rank, device
        self._train_set, self._clock, self._free = train_set, clock, free
        self._order = training_order(
            len(train_set), seed=config.seed, epoch=0, rank=rank, world_size=agreed.world_size
        )

    def __call__(self, size: int, mark: Callable[[], None] = lambda: None) -> Tried:
        """Return the outcome on this rank; `mark` is called at each phase of a step."""
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        before, speed = peak_bytes(self._device), 0.0
        try:
            speed = self._speed(size, mark)
        except (RuntimeError, MemoryError, TrainingError) as error:
            if not _is_out_of_memory(error):
                raise
        if on_gpu:  # what the tensors of a failed step held is free only here
            torch.cuda.empty_cache()
        peak = peak_bytes(self._device)
        full = not on_gpu and self._is_risky(peak - before)
        return Tried(speed, peak, failed=not speed, full=full)

    def _speed(self, size: int, mark: Callable[[], None]) -> float:
        """Return the images per second."""
        learner, count = self._learner(size, mark), size * self._config.accumulate
        [(images, labels)] = self._train_set.batches(self._order[:count], count)

        def steps(number: int) -> float:
            for _ in range(number):
                learner.learn(images, labels)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return self._clock()

        began = now = steps(_WARM_UPS)
        done, at_once = 0, _STEPS_OF_GPU if self._device.type == "cuda" else 1
        while done < _STEPS or now - began < _SECONDS:
            now = steps(at_once)
            done += at_once
        return done * len(labels) / max(now - began, 1e-9)

    def _learner(self, size: int, mark: Callable[[], None]) -> Learner:
        """Build the training's own, as for a rank alone; anew, so that no size owes another."""
        if self._config.compile:
            torch.compiler.reset()
        images = size * self._config.accumulate
        return Learner(
            replace(self._config, sync_batchnorm=False),  # which would be an exchange
            replace(self._agreed, world_size=1, global_batch_size=images, resume=""),
            rank=self._rank,
            device=self._device,
            mark=lambda _: mark(),
        )

    def _is_risky(self, growth: int) -> bool:
        """Return whether twice the size, which takes about that much more, could use up the host.

        There the kernel kills a process where a GPU's allocator refuses.
        """
        free = self._free()
        neighbours = math.ceil(self._agreed.world_size / max(len(self._agreed.hosts), 1))
        return free is not None and growth > _SHARE * free / neighbours


def _together(outcome: Tried, world_size: int, device: torch.device) -> Tried:
    """Return the outcome of a size on all ranks, which keep the pace of the slowest."""
    reason = REASONS.index(outcome.reason)
    values = [
        -outcome.images_per_second,
        outcome.memory_bytes,
        outcome.failed,
        outcome.full,
        reason,
    ]
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    slowest, held, failed, full, code = most.tolist()
    return Tried(-slowest * world_size, int(held), bool(failed), bool(full), REASONS[int(code)])


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out, also as cuBLAS and the CPU say it, or in a failed capture."""
    if error is None or isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return error is not None
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return any(word in str(error) for word in words) or _is_out_of_memory(
        error.__cause__ or error.__context__
    )
