"""Finds the batch size that suits a model and its devices: tries growing sizes without training.

Each rank computes without DDP, so that a rank out of memory does not block others in a collective;
after each size the ranks agree on the outcome.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from clusterddp import log
from clusterddp.data.loader import Images, Loader
from clusterddp.distributed.heartbeat import Phase
from clusterddp.errors import TrainingError
from clusterddp.processes.hardware import free_bytes
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.records import Agreement
from clusterddp.training.device import peak_bytes
from clusterddp.training.learner import Learner
from clusterddp.training.stop import REASONS, StopRequest

_SMALLEST = 16
_WARM_UPS = 2
_SECONDS = 0.3
_STEPS = 2
_STEPS_OF_GPU = 5  # between two readings of the clock, each of which waits for the GPU
_GAIN = 1.05
"""Least speedup that counts as faster."""
_SHARE = 0.5
"""Largest share of a host's free memory that the next size may need."""

OUT_OF_MEMORY = "out of memory"
NEXT_TOO_LARGE = "the next would take too much of the free memory"
NO_FASTER = "no longer faster"
_ASKED = {f"asked to stop: {reason}": reason for reason in REASONS if reason}
_NOTES = ("", NEXT_TOO_LARGE, *_ASKED, OUT_OF_MEMORY)
"""Notes of a rank; ranks exchange the index in this list, and the highest wins."""


@dataclass(frozen=True)
class SizeResult:
    """Outcome of a size on one rank or on all: an entry of batch_sizes.json."""

    batch_size: int
    """Images of a rank in one forward pass."""
    images_per_second: float
    """Throughput; 0 if it does not fit."""
    memory_bytes: int
    """Peak memory of a rank."""
    note: str = ""
    """Why no larger size is tried; empty otherwise."""


def find(
    config: TrainConfig,
    agreed: Agreement,
    *,
    rank: int,
    train_set: Images | Loader,
    device: torch.device,
    request: StopRequest,
    mark: Callable[[int, int], None] = lambda *_: None,
) -> tuple[list[SizeResult], str]:
    """Try sizes until one does not fit or, on CPUs, is not faster; rank 0 logs the outcomes.

    Collective over the default process group. Every rank returns the same rows, and the reason if
    a stop was requested (`request`), which ends the search after the current size. mark: as in the
    watchdog's Progress, with the size instead of a step. Raises TrainingError if not even the
    first size fits.
    """
    report = log.info if rank == 0 else lambda _: None
    trial = Trial(config, agreed, rank, train_set, device)

    def tried(size: int) -> SizeResult:
        alone = trial(size, lambda: mark(size, Phase.FORWARD))
        mark(size, Phase.LOG)
        return _together(alone, request.reason, agreed.world_size, device)

    most = len(train_set) // agreed.world_size // config.gradient_accumulation_steps
    rows = list[SizeResult]()
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
    """Return doubling sizes up to a rank's share (`most`), the wanted one among them."""
    size = wanted
    while size >= 2 * _SMALLEST and size % 2 == 0:
        size //= 2
    doubled = [max(min(size, most), 1)]
    while 2 * doubled[-1] <= most:
        doubled.append(2 * doubled[-1])
    return doubled


def search(
    sizes: Iterable[int], tried: Callable[[int], SizeResult], *, to_the_end: bool
) -> Iterator[SizeResult]:
    """Yield the outcome of each size in turn. `tried` returns the outcome on all ranks.

    to_the_end: stop only at a size that does not fit; else also after two that are not faster.
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


def best(rows: Sequence[SizeResult]) -> SizeResult:
    """Return the smallest size about as fast as the fastest: larger ones only mean fewer steps.

    Raises TrainingError if none fits.
    """
    fitting = [row for row in rows if row.note != OUT_OF_MEMORY]
    if not fitting:
        raise TrainingError(
            f"--find-batch-size: not even {rows[0].batch_size} images per rank fit into memory. "
            "Try a smaller model, or a GPU with more memory. [CD0811]"
        )
    enough = max(row.images_per_second for row in fitting) / _GAIN
    return next(row for row in fitting if row.images_per_second >= enough)


def advice(config: TrainConfig, rows: Sequence[SizeResult]) -> str:
    """Return a recommended size and a learning rate for it, as text. Raises like `best`."""
    size = best(rows).batch_size
    factor = size / config.batch_size
    if factor == 1:
        return f"use: --batch-size {size} (unchanged), the smallest within 5% of the fastest"
    # Goyal et al. 2017, arXiv 1706.02677; for adam Malladi et al. 2022, arXiv 2205.10287.
    rate = f"--lr {config.lr * factor:g} (linear scaling rule: {factor:g} times both)"
    if config.optimizer != "sgd":
        root = config.lr * math.sqrt(factor)
        rate += f"; {config.optimizer} often trains better with the square root, --lr {root:.3g}"
    return f"use: --batch-size {size}, the smallest within 5% of the fastest, and {rate}"


@dataclass(frozen=True)
class Trial:
    """Trial steps of one rank at a size, as in the training but without communication."""

    config: TrainConfig
    agreed: Agreement
    rank: int
    train_set: Images | Loader
    device: torch.device
    clock: Callable[[], float] = time.perf_counter

    def __call__(self, size: int, mark: Callable[[], None] = lambda: None) -> SizeResult:
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
        if on_gpu:  # the tensors of a failed step are freed only here
            torch.cuda.empty_cache()
        peak = peak_bytes(self.device)
        if not note and not on_gpu and self._is_risky(peak - before):
            note = NEXT_TOO_LARGE
        return SizeResult(size, speed, peak, note)

    def _speed(self, size: int, mark: Callable[[], None]) -> float:
        """Measure the images per second."""
        learner = self._learner(size, mark)
        try:
            return self._speed_of(learner, size * self.config.gradient_accumulation_steps)
        finally:
            learner.close()  # frees the memory of a graph

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
        """Build a new learner for a single rank, so that no size affects another."""
        if self.config.compile:
            torch.compiler.reset()
        images = size * self.config.gradient_accumulation_steps
        return Learner(
            replace(self.config, sync_batchnorm=False),  # it would communicate
            replace(self.agreed, world_size=1, global_batch_size=images, resume=""),
            rank=self.rank,
            device=self.device,
            mark=lambda _: mark(),
        )

    def _is_risky(self, growth: int) -> bool:
        """Return whether `growth` more bytes could exhaust the host's memory.

        A GPU's allocator raises an error; a host's kernel kills the process.
        """
        free = free_bytes()
        neighbours = math.ceil(self.agreed.world_size / max(len(self.agreed.hosts), 1))
        return free is not None and growth > _SHARE * free / neighbours


def _together(alone: SizeResult, reason: str, world_size: int, device: torch.device) -> SizeResult:
    """Return the outcome of a size on all ranks, at the pace of the slowest.

    reason: why this rank was asked to stop, one of `stop.REASONS`.
    """
    asked = f"asked to stop: {reason}" if reason else ""
    code = max(_NOTES.index(alone.note), _NOTES.index(asked))
    values = [-alone.images_per_second, alone.memory_bytes, code]
    most = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    slowest, memory, code = most.tolist()
    return SizeResult(alone.batch_size, -slowest * world_size, int(memory), _NOTES[int(code)])


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error means out of memory: torch's, cuBLAS's, a CPU's or a capture's."""
    if error is None or isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return error is not None
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
    return any(word in str(error) for word in words) or is_out_of_memory(
        error.__cause__ or error.__context__
    )
