"""Finds the batch size that suits a model and its processors: tries growing ones, without training.

Each rank computes by itself, without DDP, so that one whose memory is used up leaves no other in an
exchange; after each size the ranks agree on the outcome.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from clusterddp import log
from clusterddp.data.loader import Images, Loaded
from clusterddp.distributed.heartbeat import Phase
from clusterddp.errors import TrainingError
from clusterddp.request.train_config import TrainConfig
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
_ASKED = {f"asked to stop: {reason}": reason for reason in REASONS if reason}
_NOTES = ("", NEXT_TOO_LARGE, *_ASKED, OUT_OF_MEMORY)
"""Notes of a rank; ranks exchange the place in this list, and the last of them counts."""


@dataclass(frozen=True)
class Tried:
    """The outcome of a size on one rank, or on all together: a line of batch_sizes.json."""

    batch_size: int
    """Images of a rank in one forward pass."""
    images_per_second: float
    """Throughput; 0 where it does not fit."""
    memory_bytes: int
    """The most that a rank has held."""
    note: str = ""
    """Why no larger size is tried; empty where one is."""


def find(
    config: TrainConfig,
    agreed: Agreement,
    *,
    rank: int,
    train_set: Images | Loaded,
    device: torch.device,
    request: StopRequest,
    mark: Callable[[int, int], None] = lambda *_: None,
) -> tuple[list[Tried], str]:
    """Try sizes until one does not fit or, on CPUs, is no faster; rank 0 logs the outcomes.

    Collective over the default process group; every rank returns the same rows, and the reason
    where a rank was asked to stop meanwhile (`request`), which ends it after that size. mark: as
    the watchdog's Progress has it, the size in place of a step. Raises TrainingError where not even
    the first size fits.
    """
    report = log.info if rank == 0 else lambda _: None
    trial = Trial(config, agreed, rank, train_set, device)

    def tried(size: int) -> Tried:
        alone = trial(size, lambda: mark(size, Phase.FORWARD))
        mark(size, Phase.LOG)
        return _together(alone, request.reason, agreed.world_size, device)

    most = len(train_set) // agreed.world_size // config.gradient_accumulation_steps
    rows = list[Tried]()
    report(f"{'batch per rank':>14}  {'images/s':>10}  {'memory per rank':>15}")
    for row in search(sizes(config.batch_size, most), tried, to_the_end=device.type == "cuda"):
        report(
            f"{row.batch_size:>14,}  {row.images_per_second:>10,.0f}  "
            f"{row.memory_bytes / 2**20:>11,.0f} MiB  {row.note}".rstrip()
        )
        rows.append(row)
    reason = _ASKED.get(rows[-1].note, "")
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
) -> Iterator[Tried]:
    """Yield the sizes worth trying, as they are done. `tried` returns the outcome on all ranks.

    to_the_end: until one does not fit; else it ends as well when two in turn were no faster.
    """
    fastest, in_vain = 0.0, 0
    for size in sizes:
        row = tried(size)
        in_vain = 0 if row.images_per_second > _GAIN * fastest else in_vain + 1
        fastest = fastest if in_vain else row.images_per_second
        if not row.note and in_vain == 2 and not to_the_end:
            row = replace(row, note=NO_FASTER)
        yield replace(row, images_per_second=round(row.images_per_second, 1))
        if row.note:
            return


def best(rows: Sequence[Tried]) -> Tried:
    """Return the smallest that is about as fast as the fastest: larger ones only take fewer steps.

    Raises TrainingError where none did fit.
    """
    fitting = [row for row in rows if row.note != OUT_OF_MEMORY]
    if not fitting:
        raise TrainingError(
            f"--find-batch-size: not even {rows[0].batch_size} images per rank fit into memory. "
            "Try a smaller model, or a processor with more. [CD0811]"
        )
    enough = max(row.images_per_second for row in fitting) / _GAIN
    return next(row for row in fitting if row.images_per_second >= enough)


def advice(config: TrainConfig, rows: Sequence[Tried]) -> str:
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


@dataclass(frozen=True)
class Trial:
    """Tries steps of one rank at a size: as in the training, but for the exchange between ranks."""

    config: TrainConfig
    agreed: Agreement
    rank: int
    train_set: Images | Loaded
    device: torch.device
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, size: int, mark: Callable[[], None] = lambda: None) -> Tried:
        """Return the outcome on this rank; `mark` is called at each phase of a step."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            for index in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(index)
        before, speed, note = peak_bytes(self.device), 0.0, ""
        try:
            speed = self._speed(size, mark)
        except (RuntimeError, MemoryError, TrainingError) as error:
            if not is_out_of_memory(error):
                raise
            note = OUT_OF_MEMORY
        if on_gpu:  # what the tensors of a failed step held is free only here
            torch.cuda.empty_cache()
        peak = peak_bytes(self.device)
        if not note and not on_gpu and self._is_risky(peak - before):
            note = NEXT_TOO_LARGE
        return Tried(size, speed, peak, note)

    def _speed(self, size: int, mark: Callable[[], None]) -> float:
        """Return the images per second."""
        learner = self._learner(size, mark)
        try:
            return self._speed_of(learner, size * self.config.gradient_accumulation_steps)
        finally:
            learner.close()  # a graph keeps its memory to itself

    def _speed_of(self, learner: Learner, count: int) -> float:
        some = torch.arange(len(self.train_set))[:count]
        [(images, labels)] = self.train_set.batches(some, count)

        def steps(number: int) -> float:
            for _ in range(number):
                learner.learn(images, labels)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return self.clock()

        began = now = steps(_WARM_UPS)
        done, at_once = 0, _STEPS_OF_GPU if self.device.type == "cuda" else 1
        while done < _STEPS or now - began < _SECONDS:
            now = steps(at_once)
            done += at_once
        return done * len(labels) / max(now - began, 1e-9)

    def _learner(self, size: int, mark: Callable[[], None]) -> Learner:
        """Build the training's own, as for a rank alone; anew, so that no size owes another."""
        if self.config.compile:
            torch.compiler.reset()
        images = size * self.config.gradient_accumulation_steps
        return Learner(
            replace(self.config, sync_batchnorm=False),  # which would be an exchange
            replace(self.agreed, world_size=1, global_batch_size=images, resume=""),
            rank=self.rank,
            device=self.device,
            mark=lambda _: mark(),
        )

    def _is_risky(self, growth: int) -> bool:
        """Return whether twice the size, which takes about that much more, could use up the host.

        There the kernel kills a process where a GPU's allocator refuses.
        """
        free = free_bytes()
        neighbours = math.ceil(self.agreed.world_size / max(len(self.agreed.hosts), 1))
        return free is not None and growth > _SHARE * free / neighbours


def _together(alone: Tried, reason: str, world_size: int, device: torch.device) -> Tried:
    """Return the outcome of a size on all ranks, which keep the pace of the slowest.

    reason: why this rank was asked to stop, of `stop.REASONS`.
    """
    asked = f"asked to stop: {reason}" if reason else ""
    code = max(_NOTES.index(alone.note), _NOTES.index(asked))
    values = [-alone.images_per_second, alone.memory_bytes, code]
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    slowest, memory, code = most.tolist()
    return Tried(alone.batch_size, -slowest * world_size, int(memory), _NOTES[int(code)])


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out, also as cuBLAS and the CPU say it, or in a failed capture."""
    if error is None or isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return error is not None
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return any(word in str(error) for word in words) or is_out_of_memory(
        error.__cause__ or error.__context__
    )
