"""Splits what a run was paid: the hours of its nodes, over all attempts, by what they went into.

From records alone, so that attempts which have died are counted too: events say when an attempt
started and ended, rank 0's sign of life what its time has gone into until two seconds before.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterddp import files
from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, attempts, summaries
from clusterddp.run.records import AttemptSummary, GpuUse, Paid, Spent
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.forms import expand_nodelist

_DIGITS = 6
"""Digits of hours: some four milliseconds."""


@dataclass(frozen=True)
class _Parts:
    """Seconds of one attempt."""

    whole: float
    starting: float
    training: float
    waiting: float | None
    """None where it is not known."""
    saving: float
    redone: float
    """Share of the training that was done again, from 0 to 1."""


def account(
    run: RunDir, spec: JobSpec | None, *, until: float | None = None, spent: Spent | None = None
) -> Paid | None:
    """Add up the time for which nodes were held; None before the first attempt.

    until: present time where the latest attempt is still at work. spent: what that attempt says of
    itself, in place of its sign of life.

    A COMMAND without a Loop says nothing of what its time has gone into: only the whole is known.
    """
    known = attempts(run)
    met = {each.attempt: each for each in summaries(run)}
    splits = bool(met) or (spec is not None and spec.train is not None)
    seconds = computing = waiting = starting = saving = redone = idle = 0.0
    knows_waiting, is_any = True, False
    happened = events.read(run.events)
    for attempt in known:
        is_latest = attempt is known[-1]
        span = _span(attempt, met.get(attempt.number), happened, until if is_latest else None)
        if span is None:
            continue
        is_any = True
        nodes = _nodes(attempt, met.get(attempt.number), happened, spec)
        own = spent if is_latest and spent else attempt.read_sign_of_life().spent
        parts = _split(span, met.get(attempt.number), own)
        knows_waiting &= parts.waiting is not None
        fresh = (1 - parts.redone) * nodes
        spares = _spares(attempt, happened)
        seconds += parts.whole * (nodes + spares)
        idle += parts.whole * spares
        starting += parts.starting * nodes
        saving += parts.saving * nodes
        redone += parts.redone * parts.training * nodes
        computing += fresh * (parts.training - (parts.waiting or 0.0))
        waiting += fresh * (parts.waiting or 0.0)
    if not is_any:
        return None
    whole = round(seconds / 3600, _DIGITS)
    gpus = spec.resources.gpus_per_node if spec else 0
    gpu_hours = round(whole * gpus, _DIGITS) if gpus else None
    has_spares = spec is not None and spec.resources.spare_nodes > 0
    of_spares = round(idle / 3600, _DIGITS) if has_spares else None
    if not splits:
        return Paid(whole, gpu_hours, idle=of_spares, gpu_use=_gpu_use(known))
    if not knows_waiting:
        computing, waiting = computing + waiting, 0.0
    sums = (computing, waiting, starting, saving, redone)
    hours = [round(each / 3600, _DIGITS) for each in sums]
    rest = round(max(whole - sum(hours) - (of_spares or 0.0), 0.0), _DIGITS)
    return Paid(
        whole,
        gpu_hours,
        computing=hours[0],
        waiting=hours[1] if knows_waiting else None,
        starting=hours[2],
        saving=hours[3],
        redone=hours[4],
        idle=of_spares,
        gpu_use=_gpu_use(known),
        rest=rest,
    )


def _gpu_use(known: list[Attempt]) -> float | None:
    """Return the mean of all samples of all GPUs; None without any."""
    found = [files.read(GpuUse, path) for each in known for path in each.outcomes.glob("gpus-*")]
    weights = [(use.gpus * use.samples, use.share) for use in found if use]
    total = sum(weight for weight, _ in weights)
    return round(sum(weight * share for weight, share in weights) / total, 4) if total else None


def _split(
    span: tuple[float, float], summary: AttemptSummary | None, spent: Spent | None
) -> _Parts:
    """Split an attempt's time; what nothing is known of is the rest."""
    began, ended = span
    whole = max(ended - began, 0.0)
    steps = (summary.last_step or 0) - (summary.first_step or 0) if summary else 0
    if spent is None or spent.first_step is None:
        # One of an earlier version that has done steps does not say how long it was starting.
        return _Parts(whole, 0.0 if steps else whole, 0.0, 0.0, 0.0, 0.0)
    starting = min(max(spent.first_step - began, 0.0), whole)
    training = min(spent.training, whole - starting)
    waiting = None if spent.waiting is None else min(spent.waiting, training)
    saving = min(spent.saving, whole - starting - training)
    twice = summary.steps_done_twice if summary else 0
    redone = min(twice / steps, 1.0) if steps else 0.0
    return _Parts(whole, starting, training, waiting, saving, redone)


def _span(
    attempt: Attempt,
    summary: AttemptSummary | None,
    happened: list[events.Event],
    until: float | None,
) -> tuple[float, float] | None:
    """Return when an attempt started and ended; None where its start is not known.

    Where nobody has recorded its end, as of a lost batch host, the last change in its folder is it.
    """
    of_it = [event for event in happened if event.attempt == attempt.number and event.time]
    starts = [event.time for event in of_it if isinstance(event, events.Started) and event.time]
    ends = [event.time for event in of_it if isinstance(event, events.Ended) and event.time]
    began = starts[0] if starts else (summary.began if summary else None)
    if not began:
        return None
    return began, ends[-1] if ends else until or max(_changes(attempt), default=began)


def _changes(attempt: Attempt) -> Iterator[float]:
    """Yield when the files were written that ranks write as they train and end."""
    written: list[Path] = [attempt.record, attempt.alive, attempt.end]
    with suppress(OSError):
        written += attempt.outcomes.iterdir()
    for path in written:
        with suppress(OSError):
            yield min(path.stat().st_mtime, time.time())


def _spares(attempt: Attempt, happened: list[events.Event]) -> int:
    """Count the nodes that an attempt's job had beside those of its tasks."""
    started = (e for e in happened if isinstance(e, events.Started) and e.attempt == attempt.number)
    return next((len(event.spares) for event in started), 0)


def _nodes(
    attempt: Attempt,
    summary: AttemptSummary | None,
    happened: list[events.Event],
    spec: JobSpec | None,
) -> int:
    """Count the nodes of an attempt's tasks, by Slurm's list of them, else by its ranks' hosts."""
    for event in happened:
        if isinstance(event, events.Started) and event.attempt == attempt.number:
            with suppress(RequestError):
                return len(expand_nodelist(event.nodelist))
    hosts = len(summary.hosts) if summary else 0
    return hosts or (spec.resources.nodes if spec else 1)
