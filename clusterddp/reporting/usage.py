"""Splits a run's node-hours, over all attempts, by activity.

Uses records only, so attempts that died count too. Events give the start and end of an attempt;
rank 0's heartbeat, at most two seconds old, gives the time spent on each activity.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterddp import files
from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.events import Ended, Started
from clusterddp.run.history import History
from clusterddp.run.records import AttemptSummary, GpuUse, Spent, Usage
from clusterddp.slurm.forms import expand_nodelist

_DIGITS = 6
"""Decimal places of hours: about four milliseconds."""


@dataclass(frozen=True)
class _NodeSeconds:
    """Node-seconds of an attempt, by activity."""

    whole: float
    idle: float
    startup: float
    saving: float = 0.0
    repeated: float = 0.0
    computing: float = 0.0
    waiting: float | None = 0.0
    """None if unknown; then `computing` includes it."""


def measure_usage(
    history: History,
    spec: JobSpec | None,
    *,
    until: float | None = None,
    spent: Spent | None = None,
) -> Usage | None:
    """Add up the node-hours of all attempts; None before the first attempt.

    until: current time if the latest attempt is still running. spent: that attempt's own figures,
    used instead of its heartbeat.

    A COMMAND without a Loop does not record its activities, so only the total is known.
    """
    known, met = attempts(history.run), {each.attempt: each for each in history.summaries()}
    parts: list[_NodeSeconds] = []
    for attempt in known:
        is_latest = attempt is known[-1]
        own = spent if is_latest and spent else attempt.read_liveness().spent
        summary = met.get(attempt.number) or AttemptSummary(attempt.number)
        parts += _held(history, attempt, summary, spec, own, until if is_latest else None)
    if not parts:
        return None

    def hours(name: str) -> float:
        return round(sum(getattr(each, name) or 0.0 for each in parts) / 3600, _DIGITS)

    whole, gpus = hours("whole"), spec.resources.gpus_per_node if spec else 0
    usage = Usage(
        whole,
        round(whole * gpus, _DIGITS) if gpus else None,
        idle=hours("idle") if spec and spec.resources.spare_nodes else None,
        **_gpu_use(known),
    )
    if not met and not (spec and spec.program.keeps_records):
        return usage
    knows_waiting = all(each.waiting is not None for each in parts)
    names = ("computing", "waiting", "startup", "saving", "repeated")
    split: dict[str, Any] = {name: hours(name) for name in names}
    other = round(max(whole - sum(split.values()) - (usage.idle or 0.0), 0.0), _DIGITS)
    if knows_waiting:
        return replace(usage, other=other, **split)
    split["computing"] = round(split["computing"] + split.pop("waiting"), _DIGITS)
    return replace(usage, other=other, **split)


def split_usage(usage: Usage) -> list[tuple[str, float]]:
    """List each recorded activity with its node-hours."""
    parts = (
        ("computing" if usage.waiting is not None else "computing and waiting", usage.computing),
        ("waiting for other ranks", usage.waiting),
        ("startup", usage.startup),
        ("checkpointing", usage.saving),
        ("repeated steps", usage.repeated),
        ("idle spare nodes", usage.idle),
        ("other", usage.other),
    )
    return [(name, hours) for name, hours in parts if hours is not None]


def _gpu_use(known: list[Attempt]) -> dict[str, Any]:
    """Return the fields of Usage on the GPUs: means over all samples of all GPUs, and the peak."""
    read = [files.read(GpuUse, path) for each in known for path in each.outcomes.glob("gpus-*")]
    found = [use for use in read if use and use.gpus and use.samples]
    if not found:
        return {}
    total = sum(use.gpus * use.samples for use in found)

    def mean(name: str) -> float:
        return float(sum(use.gpus * use.samples * getattr(use, name) for use in found) / total)

    return {
        "gpu_utilization": round(mean("utilization"), 4),
        "gpu_watts": round(mean("watts"), 1) or None,
        "gpu_peak_memory_bytes": max(use.peak_memory_bytes for use in found) or None,
    }


def _held(
    history: History,
    attempt: Attempt,
    summary: AttemptSummary,
    spec: JobSpec | None,
    spent: Spent | None,
    until: float | None,
) -> Iterator[_NodeSeconds]:
    """Split an attempt's time by activity; yield nothing if its start is unknown.

    If no end was recorded (a lost batch host, for example), the last change in the attempt's
    directory counts as its end.
    """
    started = next(iter(history.every(Started, attempt.number)), Started())
    ends = [event.time for event in history.every(Ended, attempt.number) if event.time]
    began = started.time or summary.began
    if not began:
        return
    ended = ends[-1] if ends else until or max(_changes(attempt), default=began)
    whole = max(ended - began, 0.0)
    nodes, spares = len(summary.hosts) or (spec.resources.nodes if spec else 1), len(started.spares)
    with suppress(RequestError):
        nodes = len(expand_nodelist(started.nodelist))
    if spent is None or spent.first_step is None:  # it reached no training step
        yield _NodeSeconds(whole * (nodes + spares), whole * spares, whole * nodes)
        return
    startup = min(max(spent.first_step - began, 0.0), whole)
    training = min(spent.training, whole - startup)
    waiting = None if spent.waiting is None else min(spent.waiting, training)
    saving = min(spent.saving, whole - startup - training)
    steps = (summary.last_step or 0) - (summary.first_step or 0)
    repeated = min(summary.repeated_steps / steps, 1.0) if steps else 0.0
    fresh = (1 - repeated) * nodes
    yield _NodeSeconds(
        whole=whole * (nodes + spares),
        idle=whole * spares,
        startup=startup * nodes,
        saving=saving * nodes,
        repeated=repeated * training * nodes,
        computing=fresh * (training - (waiting or 0.0)),
        waiting=None if waiting is None else fresh * waiting,
    )


def _changes(attempt: Attempt) -> Iterator[float]:
    """Yield the modification times of the files that the ranks write."""
    written: list[Path] = [attempt.record, attempt.alive, attempt.end]
    with suppress(OSError):
        written += attempt.outcomes.iterdir()
    for path in written:
        with suppress(OSError):
            yield min(path.stat().st_mtime, time.time())
