"""Measures the speed of each rank, reports stragglers and a run that became slow.

All ranks finish a step together; a straggler is the rank that never waits. A rank's own work on a
step ends with its last gradient: from then until the backward pass returns it waits for the other
ranks and the network. The ranks exchange their measurements from time to time.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from clusterddp import log
from clusterddp.distributed import agreement
from clusterddp.files import write_record
from clusterddp.formatting import duration
from clusterddp.ranks.variables import VISIBLE_GPUS
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcome
from clusterddp.run.records import SLOW, RankReport, SlowRank, SlowRanks, SlowRun, SlowRuns, Spent
from clusterddp.training.device import peak_bytes

_MIN_STEPS = 50
_OF_NVML = "; NVML on this node: "
_SPANS = 6
"""Number of consecutive slow spans before a report, so that a single hiccup is not reported."""


class ExchangeWait:
    """Total waiting time of a rank; it counts nothing without parameters to watch."""

    def __init__(
        self,
        device: torch.device,
        *,
        is_measurable: bool = True,
        finds_end: bool = False,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """is_measurable: whether ranks wait for each other only in a visible gradient exchange;
        false within a graph or if layers communicate as well.

        finds_end: call `done` at the end of each backward pass; else the caller does.
        ready: called when the last gradient of a pass is ready.
        """
        self._is_measurable, self._finds_end, self._tell_ready = is_measurable, finds_end, ready
        self.on_gpu = device.type == "cuda"
        self._ready: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        # A GPU's times are read later, so that it never waits for the host.
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def learn(self, model: nn.Module) -> Iterator[None]:
        """Find the last gradient of a backward pass that runs in this context."""
        came: list[Tensor] = []

        def note(parameter: Tensor) -> None:
            came.append(parameter)
            self._tell_ready()

        watched = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles = [_hook(parameter, note) for parameter in watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if came:
            _hook(came[-1], self._note)
        else:
            self._is_measurable = False

    def done(self) -> None:
        """Count the wait that ends when the backward pass returns."""
        if self._ready is None:
            return
        if isinstance(self._ready, float):
            self._seconds += time.perf_counter() - self._ready
        else:
            self._events.append((self._ready, _event()))
        self._ready = None

    def take(self) -> float:
        """Return the seconds waited since the last call; NaN if unknown."""
        if self._events:
            self._events[-1][1].synchronize()
        self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1000.0
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds if self._is_measurable else math.nan

    def _note(self, _: Tensor) -> None:
        self._tell_ready()
        self._ready = _event() if self.on_gpu else time.perf_counter()
        if self._finds_end:
            # DDP queues its wait for the exchange after this hook and before the inner call.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self.done))


def _hook(parameter: Tensor, note: Callable[[Tensor], None]) -> RemovableHandle:
    """Call `note` when the gradient is ready, before DDP's own hook starts the exchange."""
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    return handle


def _event() -> "torch.cuda.Event":
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(frozen=True)
class Throughputs:
    """Images trained by each rank, and its seconds without the time spent waiting."""

    images: Sequence[float] = ()
    seconds: Sequence[float] = ()

    def __sub__(self, earlier: "Throughputs") -> "Throughputs":
        """Subtract the paces of an earlier span."""
        return self + Throughputs(*([-each for each in part] for part in vars(earlier).values()))

    @property
    def images_per_second(self) -> list[float]:
        """Throughput of each rank without waiting; empty if the waiting time is unknown."""
        if any(map(math.isnan, self.seconds)):
            return []
        both = zip(self.images, self.seconds, strict=True)
        return [images / max(seconds, 1e-9) for images, seconds in both]

    def __add__(self, more: "Throughputs") -> "Throughputs":
        """Add the paces of a later span of the same ranks."""
        images = zip_longest(self.images, more.images, fillvalue=0.0)
        seconds = zip_longest(self.seconds, more.seconds, fillvalue=0.0)
        return Throughputs([*map(sum, images)], [*map(sum, seconds)])


class Stopwatch:
    """Stopwatch for the seconds of steps, without the time between them."""

    def __init__(self) -> None:
        self._total, self._since = 0.0, math.nan

    @property
    def elapsed(self) -> float:
        """Total seconds so far, from any thread."""
        since = self._since
        return self._total if math.isnan(since) else self._total + time.perf_counter() - since

    def start(self) -> None:
        """Start, unless it is running."""
        if math.isnan(self._since):
            self._since = time.perf_counter()

    def restart(self) -> None:
        """Start again and drop the time since the last start."""
        self._since = time.perf_counter()

    def drop(self) -> None:
        """Drop the time since the last start, if it is running."""
        if not math.isnan(self._since):
            self.restart()

    def stop(self) -> None:
        """Stop."""
        seconds = 0.0 if math.isnan(self._since) else time.perf_counter() - self._since
        self._total, self._since = self._total + seconds, math.nan

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Exclude the time spent in this context."""
        is_counting = not math.isnan(self._since)
        self.stop()
        yield
        if is_counting:
            self.start()


class StepTimer:
    """Measures the steps of this rank."""

    def __init__(self, waiting: ExchangeWait, step: int) -> None:
        self.clock, self.loading, self.images = Stopwatch(), Stopwatch(), 0
        self.rates: list[float] = []
        """Recent images/s of each rank; empty if unknown."""
        self._waiting, self._last = waiting, (step, 0, 0.0)
        self._first_pass = ExitStack()

    def measure(
        self, modules: Sequence[nn.Module], world_size: int, ready: Callable[[], None]
    ) -> None:
        """Measure waiting in one DDP module's exchange.

        ready: called when the last gradient of a pass is ready; in the first step at every one.
        """
        layers = [layer for module in modules for layer in module.modules()]
        is_seen = len(modules) == 1 and not any(isinstance(x, nn.SyncBatchNorm) for x in layers)
        device = next(modules[0].parameters()).device if is_seen else agreement.device()
        is_known = world_size == 1 or is_seen
        self._waiting = ExchangeWait(device, is_measurable=is_known, finds_end=True, ready=ready)
        if is_seen:
            self._first_pass.enter_context(self._waiting.learn(modules[0]))

    def stop(self, *, exact: bool) -> None:
        """End a step; exact: after the GPU's queued work is done."""
        if exact and self._waiting.on_gpu:
            self.clock.start()
            torch.cuda.synchronize()
        self.clock.stop()
        self._first_pass.close()

    def exchange(self, step: int) -> tuple[Throughputs, int, float] | None:
        """Exchange the paces of all ranks since the last call; collective.

        Returns the paces, the number of steps and this rank's seconds; None without a step.
        """
        steps, images = step - self._last[0], self.images - self._last[1]
        elapsed = self.clock.elapsed
        if not steps:
            return None
        seconds = elapsed - self._last[2]
        self._last = step, self.images, elapsed
        counts, busy = zip(*agreement.rows([images, seconds - self._waiting.take()]), strict=True)
        paces = Throughputs(counts if all(counts) else [steps] * len(counts), busy)
        self.rates = paces.images_per_second if all(counts) else []
        return paces, steps, seconds


def of_ranks(paces: Throughputs, device: torch.device) -> list[RankReport]:
    """Return host, memory and throughput of each rank. Collective over the default group."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    everyone = agreement.gather((host, peak_bytes(device)))
    known = [round(rate, 1) for rate in paces.images_per_second]
    rates: Sequence[float | None] = known or [None] * len(everyone)
    return [
        RankReport(rank, rate, *each)
        for rank, (rate, each) in enumerate(zip(rates, everyone, strict=True))
    ]


@dataclass
class _SlowPeriod:
    """Consecutive spans in which a rank was slow."""

    seconds: float = 0.0
    steps: int = 0
    slowness: float = 0.0
    """Sum of its shares of the others' median speed, each weighted by the span's seconds."""
    since: float = 0.0
    since_step: int = 0
    record: SlowRank | None = None
    """Record, once the straggler is reported."""
    fine_seconds: float = 0.0
    fine_steps: int = 0

    @property
    def relative_speed(self) -> float:
        return self.slowness / self.seconds


class Stragglers:
    """Detects slow ranks on rank 0; on other ranks it does nothing.

    A rank is reported when its speed stays below SLOW of the other ranks' median for `patience`
    seconds of training and 50 steps, and reported as recovered after as long at normal speed.
    Without known speeds (`ExchangeWait`) or with a single rank nothing is reported.
    """

    def __init__(self, attempt: Attempt, rank: int, patience: float) -> None:
        """patience: seconds; 0 is never."""
        self._attempt, self._patience = attempt, patience
        self._is_on = rank == 0 and patience > 0
        self._periods: dict[int, _SlowPeriod] = {}
        self._records: list[SlowRank] = []
        self._host: Callable[[int], str] = self._recorded_host
        self._begin_span()

    def add(self, paces: Throughputs, *, steps: int, seconds: float, step: int, now: float) -> None:
        """Add the ranks' paces over some steps and seconds of training, up to `step` at `now`."""
        if not self._is_on or len(paces.seconds) < 2:
            return
        self._paces += paces
        self._steps += steps
        self._seconds += seconds
        if self._seconds < self._patience / _SPANS:
            return
        before = list(self._records)
        for rank, share in enumerate(shares(self._paces.images_per_second)):
            self._judge(rank, share, step, now)
        self._begin_span()
        if self._records != before:
            with suppress(OSError):  # a full disk costs the record; the log has the line
                write_record(self._attempt.stragglers, SlowRanks(tuple(self._records)))

    @property
    def is_any_slow(self) -> bool:
        """True while a rank is reported as slow."""
        return any(period.record for period in self._periods.values())

    def _begin_span(self) -> None:
        self._paces, self._steps, self._seconds = Throughputs(), 0, 0.0

    def _judge(self, rank: int, share: float, step: int, now: float) -> None:
        if share < SLOW:
            self._slow(rank, share, step, now)
        elif rank in self._periods:
            self._fine(rank, step, now)

    def _slow(self, rank: int, share: float, step: int, now: float) -> None:
        new = _SlowPeriod(since=now - self._seconds, since_step=step - self._steps)
        period = self._periods.setdefault(rank, new)
        period.seconds += self._seconds
        period.steps += self._steps
        period.slowness += share * self._seconds
        period.fine_seconds, period.fine_steps = 0.0, 0
        if period.record is None:
            if not self._is_long(period.seconds, period.steps):
                return
            period.record = SlowRank(
                rank, self._host(rank), since=round(period.since, 3), first_step=period.since_step
            )
            self._records.append(period.record)
            log.warning(
                f"straggler: {period.record.name} has computed at {period.relative_speed:.0%} of "
                f"the other ranks' median speed for {duration(period.seconds)} and "
                f"{period.steps:,} steps. The others wait for it. [CD0818]"
            )
        self._renew(period, until=None)

    def _fine(self, rank: int, step: int, now: float) -> None:
        period = self._periods[rank]
        period.fine_seconds += self._seconds
        period.fine_steps += self._steps
        if period.record is None:
            del self._periods[rank]
        elif self._is_long(period.fine_seconds, period.fine_steps):
            log.info(
                f"straggler: {period.record.name} has been back to normal speed for "
                f"{duration(period.fine_seconds)}, at step {step:,}; it was slow for "
                f"{duration(period.seconds)}, at {period.relative_speed:.0%} of the others"
            )
            self._renew(period, until=round(now - period.fine_seconds, 3))
            del self._periods[rank]

    def _is_long(self, seconds: float, steps: int) -> bool:
        return seconds >= self._patience and steps >= _MIN_STEPS

    def _renew(self, period: _SlowPeriod, until: float | None) -> None:
        """Update the record."""
        assert period.record, "the straggler was reported"
        fresh = replace(
            period.record,
            relative_speed=round(period.relative_speed, 3),
            seconds=round(period.seconds, 1),
            steps=period.steps,
            until=until,
        )
        self._records[self._records.index(period.record)] = period.record = fresh

    def _recorded_host(self, rank: int) -> str:
        """Return a rank's host from its parent's record; empty without one."""
        outcome = read_outcome(self._attempt.outcomes, rank)
        return outcome.host if outcome else ""


@dataclass(frozen=True)
class _Course:
    """Course of the training: samples, steps and seconds by activity, in total or in a span."""

    samples: float
    steps: int
    parts: Mapping[str, float] = field(default_factory=dict)

    def __sub__(self, earlier: "_Course") -> "_Course":
        parts = {name: now - earlier.parts.get(name, 0.0) for name, now in self.parts.items()}
        return _Course(self.samples - earlier.samples, self.steps - earlier.steps, parts)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def rate(self) -> float:
        return self.samples / max(self.seconds, 1e-9)

    def compare(self, best: "_Course") -> str:
        """Return which activities take longer in a step than in a faster span."""
        steps, usual = max(self.steps, 1), max(best.steps, 1)
        more = {
            name: seconds / steps - best.parts.get(name, 0.0) / usual
            for name, seconds in self.parts.items()
        }
        grown = [name for name in self.parts if more[name] > sum(more.values()) / 5 > 0]
        whole = f"a step takes {self.seconds / steps:.3g}s instead of {best.seconds / usual:.3g}s"
        each = (
            f"{name} {self.parts[name] / steps:.3g}s instead of "
            f"{best.parts.get(name, 0.0) / usual:.3g}s"
            for name in sorted(grown, key=more.__getitem__, reverse=True)
        )
        return ": ".join(filter(None, (whole, ", ".join(each))))


class Slowdown:
    """Detects on rank 0 that a run became slow as a whole, with no rank slower than the others.

    The rate is in samples, or in steps if samples are not counted, per second of steps and saves.
    It is compared with the best one in the attempt over a tenth of PATIENCE. A run is reported when
    its rate stays below SLOW_RUN of it for PATIENCE, and again after as long at a better rate.
    """

    PATIENCE = 600.0
    """Seconds of steps and saves."""
    SLOW_RUN = 0.7

    def __init__(self, attempt: Attempt, rank: int, stragglers: Stragglers, step: int) -> None:
        """step: step at which the attempt starts."""
        self._attempt, self._is_on, self._stragglers = attempt, rank == 0, stragglers
        self._seen = _Course(0.0, step)
        self._samples = 0.0
        self._best: _Course | None = None
        self._slow_from: tuple[_Course, float] | None = None
        """Course and time at which the run became slow …"""
        self._fine_from: tuple[_Course, float] | None = None
        """… and at which it recovered, if it has not been fine for long."""
        self._records: list[SlowRun] = []
        self._is_reported = False

    def add(self, samples: float, spent: Spent, loading: float, step: int, now: float) -> None:
        """Add the samples since the last call, and the attempt's times so far.

        loading: seconds in which the step waited for data. now: seconds since the epoch.
        """
        if not self._is_on:
            return
        self._samples += samples
        waiting = spent.waiting or 0.0
        parts = {"loading data": loading, "waiting for other ranks": waiting}
        parts |= {"saving": spent.saving, "computing": spent.training - loading - waiting}
        here = _Course(self._samples, step, parts)
        window = here - self._seen
        if window.seconds < self.PATIENCE / 10:
            return
        place, self._seen = (self._seen, now - window.seconds), here
        if self._best is None or window.rate > self._best.rate:
            self._best = window
        is_slow = window.rate < self.SLOW_RUN * self._best.rate
        if is_slow and (self._is_reported or not self._stragglers.is_any_slow):
            began, self._fine_from = self._slow_from, None
            self._slow_from = began or place
            if began:  # one slow window may be an evaluation
                self._judge_slow(here - began[0], self._best)
        elif self._slow_from and self._is_reported:
            self._fine_from = self._fine_from or place
            self._judge_fine(here - self._fine_from[0], step)
        else:
            self._slow_from = None

    def _judge_slow(self, slow: _Course, best: _Course) -> None:
        if slow.seconds < self.PATIENCE:
            return
        assert self._slow_from
        course, since = self._slow_from
        share, changes = slow.rate / best.rate, slow.compare(best)
        if not self._is_reported and (faults := _gpu_faults()):
            changes = f"{changes}{_OF_NVML}{faults}"
        if self._is_reported:
            _, *of_gpus = self._records.pop().changes.partition(_OF_NVML)
            changes += "".join(of_gpus)
        record = SlowRun(
            round(share, 3),
            round(slow.seconds, 1),
            slow.steps,
            course.steps,
            round(since, 3),
            changes=changes,
        )
        if not self._is_reported:
            log.warning(
                f"slow run: {share:.0%} of its best rate for {duration(slow.seconds)} and "
                f"{slow.steps:,} steps, and no rank is slower than the others: {changes} [CD0825]"
            )
        self._is_reported = True
        self._write([*self._records, record])

    def _judge_fine(self, fine: _Course, step: int) -> None:
        if fine.seconds < self.PATIENCE:
            return
        assert self._fine_from
        *earlier, slow = self._records
        log.info(
            f"slow run: back to normal speed for {duration(fine.seconds)}, at step {step:,}; it "
            f"was slow for {duration(slow.seconds)}, at {slow.relative_speed:.0%} of its best rate"
        )
        self._write([*earlier, replace(slow, until=round(self._fine_from[1], 3))])
        self._slow_from, self._fine_from, self._is_reported = None, None, False

    def _write(self, records: list[SlowRun]) -> None:
        self._records = records
        with suppress(OSError):  # a full disk costs the record; the log has the line
            write_record(self._attempt.slow_run, SlowRuns(tuple(records)))


def _gpu_faults() -> str:
    """Return what NVML reports of this node's GPUs, such as reduced clocks; empty without any."""
    from clusterddp.preflight import gpus  # rarely needed

    names = [name for name in os.environ.get(VISIBLE_GPUS, "").split(",") if name]
    count, faults = gpus.check(len(names), names)
    return faults if count >= 0 else ""


def shares(rates: Sequence[float]) -> list[float]:
    """Return each rank's speed as a share of the others' median; 1 if that median is 0.

    Sorts once, because it runs for thousands of ranks during the training.
    """
    ranked = sorted(rates)
    places = {rate: place for place, rate in enumerate(ranked)}
    low, high = (len(rates) - 2) // 2, (len(rates) - 1) // 2  # middle of the other ranks

    def usual(place: int) -> float:
        return (ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2

    others = [usual(places[rate]) for rate in rates]
    return [rate / other if other else 1.0 for rate, other in zip(rates, others, strict=True)]
