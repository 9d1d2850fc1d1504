"""Checks of the nodes by the ranks, after rendezvous and before training.

Each rank multiplies matrices with a known product. The ranks all-reduce within each node, with
their local rank on the other nodes, in pairs, and all together. Rank 0 evaluates and records. The
GPU part has never run on a GPU.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from clusterddp import formatting, log
from clusterddp.distributed.agreement import RankInfo
from clusterddp.distributed.heartbeat import Phase, Progress
from clusterddp.preflight import evaluation
from clusterddp.preflight.evaluation import RankMeasurements, Result, format_rate
from clusterddp.run import bad_nodes, preflight
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import PreflightRecord
from clusterddp.training.step import use_tf32

T = TypeVar("T")

FAILED = "preflight"
"""Reason for the ranks to stop if a node fails."""
_CPU_SIZE, _GPU_SIZE = 512, 4096
"""Rows and columns of the matrices."""
_SPANS, _SPAN_SECONDS = 3, 0.08
"""Number of spans of products, of which the fastest counts, and their length in seconds, which
exceeds the time slices of a shared CPU."""
_FIRST_BYTES, _CPU_BYTES, _GPU_BYTES = 64 << 10, 4 << 20, 64 << 20
"""Smallest and largest size of an all-reduce, in bytes."""
_EXCHANGE_SECONDS = 0.1


def nodes_pass(
    info: RankInfo, attempt: Attempt, device: torch.device, precision: str, progress: Progress
) -> bool:
    """Check the nodes; return whether the ranks can train. Collective over the default group.

    info: this rank's. precision: the training's, restored after a GPU's products. The watchdog
    finds a rank that hangs here. Nodes already marked bad are used, because the job has no others.
    """
    try:
        return _Checks(info, attempt, device, precision, progress).run()
    finally:
        if device.type == "cuda":  # leave all memory to the training
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)


class _Checks:
    """Checks of one rank, in step with the other ranks."""

    def __init__(
        self,
        info: RankInfo,
        attempt: Attempt,
        device: torch.device,
        precision: str,
        progress: Progress,
    ) -> None:
        model = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._own = RankMeasurements(
            info.rank, info.local_rank, info.host, info.device, model=model
        )
        self._attempt, self._device, self._precision = attempt, device, precision
        self._progress = progress
        self._nccl = dist.get_backend() == "nccl"
        # gloo exchanges through host memory on every device.
        self._exchanged = device if self._nccl else torch.device("cpu")
        self._most = _GPU_BYTES if self._nccl else _CPU_BYTES
        self._rounds: list[dict[int, int]] = []
        self._node: dist.ProcessGroup | None = None
        self._local_rank: dist.ProcessGroup | None = None
        self._began = time.monotonic()

    def run(self) -> bool:
        places = self._gather((self._own.host, self._own.local_rank))
        self._node, self._local_rank = self._groups(places)
        self._rounds = evaluation.schedule(places)
        ranks = self._measure()
        judged = evaluation.evaluate_ranks(ranks, nccl=self._nccl)
        if self._agree(judged.is_transient):  # repeat, in case of a brief load
            again = self._measure()
            ranks = [evaluation.best_of_rank(*both) for both in zip(ranks, again, strict=True)]
            judged = evaluation.evaluate_ranks(ranks, nccl=self._nccl)
        whole = self._all_reduce(dist.group.WORLD) if len(ranks) > 1 else None
        is_over = self._agree(self._own.rank == 0 and self._conclude(ranks, judged, whole))
        for group in filter(None, (self._node, self._local_rank)):
            dist.destroy_process_group(group)
        return not is_over

    def _groups(
        self, places: Sequence[tuple[str, int]]
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Create groups of this rank's node, and of its local rank on all nodes, if both differ.

        places: host and local rank of each rank. All ranks create one group at the same time, each
        its own, without the others: NCCL makes all of them by one split of the default group.
        """
        if len({host for host, _ in places}) == 1 or not any(local for _, local in places):
            return None, None
        own = places[self._own.rank]
        node = [rank for rank, (host, _) in enumerate(places) if host == own[0]]
        local_rank = [rank for rank, (_, local) in enumerate(places) if local == own[1]]
        return _group(node), _group(local_rank)

    def _measure(self) -> list[RankMeasurements]:
        """Measure once; return the measurements of all ranks."""
        self._progress.mark(0, Phase.MULTIPLY)
        fault, speed = multiply(self._device, self._precision)
        self._wait_for_all()
        within = across = -1.0
        if self._node and self._local_rank:
            self._progress.mark(0, Phase.NODE)
            within = self._all_reduce(self._node)
            self._wait_for_all()
            self._progress.mark(0, Phase.PAIR)
            across = self._all_reduce(self._local_rank)
            self._wait_for_all()
        pairs = {}
        for partners in self._rounds:
            self._progress.mark(0, Phase.PAIR)
            if (other := partners.get(self._own.rank)) is not None:
                pairs[other] = self._all_reduce_with(other)
            self._wait_for_all()
        own = dataclasses.replace(self._own, fault=fault, speed=speed, pairs=pairs)
        return self._gather(dataclasses.replace(own, within=within, across=across))

    def _wait_for_all(self) -> None:
        self._progress.mark(0, Phase.TOGETHER)
        dist.barrier()

    def _gather(self, own: T) -> list[T]:
        gathered: list[T] = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return gathered

    def _agree(self, wish: bool) -> bool:
        """Return rank 0's wish on every rank."""
        answer = torch.tensor([int(wish)], device=self._exchanged)
        dist.broadcast(answer, 0)
        return bool(answer.item())

    def _all_reduce_with(self, other: int) -> float:
        """All-reduce with another rank; return bytes per second in each direction.

        Uses the ring algorithm of NCCL and gloo for two ranks, by sends and receives of the
        default group: creating groups of two is collective over all ranks, and slow with NCCL.
        """
        halves = self._zeros(self._most).chunk(2)
        mine, others = halves if self._own.rank < other else halves[::-1]
        heard, theirs = torch.empty_like(mine), self._zeros(8, torch.float64)

        def all_reduce(size: int) -> None:
            count = size // 2 // mine.element_size()
            _exchange(others[:count], heard[:count], other)
            mine[:count] += heard[:count]
            _exchange(mine[:count], others[:count], other)

        def slowest(seconds: float) -> float:
            _exchange(torch.full_like(theirs, seconds), theirs, other)
            return max(seconds, theirs.item())

        return self._bytes_per_second(all_reduce, slowest)

    def _all_reduce(self, group: dist.ProcessGroup | None) -> float:
        """All-reduce with the ranks of a group; return bytes per second over the slowest link.

        This is the bus bandwidth of nccl-tests: each link carries 2 (N - 1) / N of the size.
        Negative for a group of one rank.
        """
        everything, world_size = self._zeros(self._most), dist.get_world_size(group)
        if world_size == 1:
            return -1.0

        def all_reduce(size: int) -> None:
            dist.all_reduce(everything[: size // everything.element_size()], group=group)

        def slowest(seconds: float) -> float:
            took = torch.tensor([seconds], dtype=torch.float64, device=self._exchanged)
            dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
            return float(took.item())

        share = 2 * (world_size - 1) / world_size
        return share * self._bytes_per_second(all_reduce, slowest)

    def _bytes_per_second(
        self, all_reduce: Callable[[int], None], slowest: Callable[[float], float]
    ) -> float:
        """Measure growing sizes while fast; return the best of up to three runs of the last.

        slowest: returns the longest time of the participating ranks, so that all do the same.
        """

        def seconds() -> float:
            self._synchronize()
            began = time.perf_counter()
            all_reduce(size)
            self._synchronize()
            return slowest(time.perf_counter() - began)

        size = _FIRST_BYTES
        seconds()  # opens the connection
        spent = took = seconds()
        while size < self._most and spent < _EXCHANGE_SECONDS / 2:
            size *= 4
            spent += (took := seconds())
        for _ in range(2):
            if spent < _EXCHANGE_SECONDS:
                spent += (once := seconds())
                took = min(took, once)
        return size / took

    def _synchronize(self) -> None:
        if self._exchanged.type == "cuda":
            torch.cuda.synchronize(self._exchanged)

    def _zeros(self, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size // dtype.itemsize, dtype=dtype, device=self._exchanged)

    def _conclude(
        self, ranks: Sequence[RankMeasurements], judged: Result, whole: float | None
    ) -> bool:
        """Log and record the result on rank 0; return whether the ranks must stop.

        They do not stop if it cannot be recorded, because the reason would be lost.
        """
        failed, remarks = judged.failed, judged.remarks
        if failed and {*failed} <= self._known_as_bad():
            named = "; ".join(f"{host}: {reason}" for host, reason in failed.items())
            remarks = (*remarks, f"already marked bad, used anyway: {named}")
            failed = {}
        took = round(time.monotonic() - self._began, 3)
        summary = preflight.format_summary((each.host for each in ranks), failed, took)
        if whole is not None:
            size = f"{self._most >> 20} MiB"
            summary += f"; all-reduce over {len(ranks)} ranks up to {size}: {format_rate(whole)}"
        if self._node:
            slowest = min((each for each in ranks if each.within >= 0), key=lambda e: e.within)
            across = min(each.across for each in ranks if each.across >= 0)
            summary += f", within nodes at least {format_rate(slowest.within)} ({slowest.host}), "
            summary += f"across nodes {format_rate(across)}"
        table = formatting.table(evaluation.rank_table(ranks, judged.failed))
        log.info(f"full preflight:\n{formatting.clean(table)}")
        record = PreflightRecord(summary, took, failed, remarks)
        measured = {"all_reduce": whole, "ranks": [dataclasses.asdict(each) for each in ranks]}
        place, write = self._attempt.full_preflight, self._attempt.write_final_record
        return preflight.conclude(record, place, measured, write) and bool(failed)

    def _known_as_bad(self) -> set[str]:
        try:
            return {*bad_nodes.read(self._attempt.run.path.parent)}
        except OSError:
            return set()


def multiply(device: torch.device, precision: str = "fp32") -> tuple[str, float]:
    """Multiply matrices with a known product; return an error, if any, and the speed.

    precision: the training's. The speed is in floating-point operations per second, the best of
    several spans. All factors are between -3 and 3, exact in TF32, and every sum is an integer
    below 2**24: the product is exact in any order of additions.
    """
    size = _GPU_SIZE if device.type == "cuda" else _CPU_SIZE
    numbers = torch.arange(size, device=device)
    rows, columns = 1.0 + numbers % 3, 1.0 + numbers // 3 % 3
    signs = 1.0 - 2.0 * (numbers * (numbers + 1) // 2 % 2)
    left = torch.outer(rows, signs)
    right = torch.outer(signs, columns)
    expected = size * torch.outer(rows, columns)
    fault, best = "", 0.0
    if device.type == "cuda":
        use_tf32("tf32")  # its tensor cores
    try:
        product = torch.mm(left, right)  # the first product loads GPU kernels
        for _ in range(_SPANS):
            seconds, count = _span(lambda: torch.mm(left, right, out=product), device)
            best = max(best, count * 2 * size**3 / seconds)
            wrong = int((product != expected).sum())
            fault = fault or (f"{wrong:,} of {size**2:,} elements are wrong" if wrong else "")
    finally:
        if device.type == "cuda":
            use_tf32(precision)
    return fault, best


def _span(work: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Repeat some work; return the elapsed seconds and the number of repetitions."""
    began, count, batch = _now(device), 0, 1
    while True:
        for _ in range(batch):
            work()
        count += batch
        if (seconds := _now(device) - began) >= _SPAN_SECONDS:
            return seconds, count
        batch *= 2  # wait for a GPU rarely


def _now(device: torch.device) -> float:
    """Return the time after the device's queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _group(ranks: list[int]) -> dist.ProcessGroup:
    """Create a group of ranks, this one among them, by these ranks only."""
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _exchange(sent: Tensor, heard: Tensor, other: int) -> None:
    """Send to another rank and receive as much from it at the same time."""
    both = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, heard, other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
