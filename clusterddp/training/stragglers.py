"""Names ranks that are slower than the others while they train, and records them.

By the ranks' own speeds, which they exchange for each line of metrics anyway: in lock-step all take
the same time over a step, and only what each computes by itself tells them apart.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from clusterddp import log
from clusterddp.files import write_record
from clusterddp.formatting import duration
from clusterddp.run.attempt import Attempt
from clusterddp.run.outcome import read_outcome
from clusterddp.run.records import SLOW, SlowRank, SlowRanks
from clusterddp.training.metrics import Paces

_LEAST_STEPS = 50
_SPANS = 6
"""Spans in a row that have to be slow: one that a hiccup has slowed down names nobody."""


@dataclass
class _Spell:
    """Spans in which a rank was slow, in a row."""

    seconds: float = 0.0
    steps: int = 0
    slowness: float = 0.0
    """Sum of its shares of the others' median speed, each times the span's seconds."""
    since: float = 0.0
    since_step: int = 0
    record: SlowRank | None = None
    """Its record, once it is named."""
    fine_seconds: float = 0.0
    fine_steps: int = 0

    @property
    def share(self) -> float:
        return self.slowness / self.seconds


class Stragglers:
    """Rank 0's look-out for slow ranks; on other ranks it does nothing.

    A rank is named when its speed was below SLOW of the other ranks' median for `patience` seconds
    of training and 50 steps on end, and keeps up again once it was not for as long. Where speeds
    are not known (`metrics.Waiting`), and for a rank alone, nobody is named.
    """

    def __init__(self, attempt: Attempt, rank: int, patience: float) -> None:
        """patience: seconds; 0 is never."""
        self._attempt, self._patience = attempt, patience
        self._is_on = rank == 0 and patience > 0
        self._spells: dict[int, _Spell] = {}
        self._records: list[SlowRank] = []
        self._host: Callable[[int], str] = self._recorded_host
        self._begin_span()

    def add(self, paces: Paces, *, steps: int, seconds: float, step: int, now: float) -> None:
        """Take the ranks' paces over some steps and seconds of training, up to `step` at `now`."""
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
            with suppress(OSError):  # a full disk costs the record; the line stands in the log
                write_record(self._attempt.stragglers, SlowRanks(tuple(self._records)))

    def _begin_span(self) -> None:
        self._paces, self._steps, self._seconds = Paces(), 0, 0.0

    def _judge(self, rank: int, share: float, step: int, now: float) -> None:
        if share < SLOW:
            self._slow(rank, share, step, now)
        elif rank in self._spells:
            self._fine(rank, step, now)

    def _slow(self, rank: int, share: float, step: int, now: float) -> None:
        new = _Spell(since=now - self._seconds, since_step=step - self._steps)
        spell = self._spells.setdefault(rank, new)
        spell.seconds += self._seconds
        spell.steps += self._steps
        spell.slowness += share * self._seconds
        spell.fine_seconds, spell.fine_steps = 0.0, 0
        if spell.record is None:
            if not self._is_long(spell.seconds, spell.steps):
                return
            spell.record = SlowRank(
                rank,
                self._host(rank),
                since=round(spell.since, 3),
                first_step=spell.since_step,
            )
            self._records.append(spell.record)
            log.warning(
                f"straggler: {spell.record.name} has computed at {spell.share:.0%} of the other "
                f"ranks' median speed for {duration(spell.seconds)} and {spell.steps:,} steps, "
                "waiting left out: the others wait for it [CD0818]"
            )
        self._renew(spell, until=None)

    def _fine(self, rank: int, step: int, now: float) -> None:
        spell = self._spells[rank]
        spell.fine_seconds += self._seconds
        spell.fine_steps += self._steps
        if spell.record is None:
            del self._spells[rank]
        elif self._is_long(spell.fine_seconds, spell.fine_steps):
            log.info(
                f"straggler: {spell.record.name} has kept up again for "
                f"{duration(spell.fine_seconds)}, by step {step:,}; it was slow for "
                f"{duration(spell.seconds)}, at {spell.share:.0%}"
            )
            self._renew(spell, until=round(now - spell.fine_seconds, 3))
            del self._spells[rank]

    def _is_long(self, seconds: float, steps: int) -> bool:
        return seconds >= self._patience and steps >= _LEAST_STEPS

    def _renew(self, spell: _Spell, until: float | None) -> None:
        """Bring its record up to date."""
        assert spell.record, "it has been named"
        fresh = replace(
            spell.record,
            share=round(spell.share, 3),
            seconds=round(spell.seconds, 1),
            steps=spell.steps,
            until=until,
        )
        self._records[self._records.index(spell.record)] = spell.record = fresh

    def _recorded_host(self, rank: int) -> str:
        """Return a rank's host as its parent has recorded it; empty where it has none."""
        outcome = read_outcome(self._attempt.outcomes, rank)
        return outcome.host if outcome else ""


def shares(rates: Sequence[float]) -> list[float]:
    """Give each rank's speed as a share of the median of the others; 1 where that is 0.

    By one sorted list, as thousands of ranks are looked at beside the training.
    """
    ranked = sorted(rates)
    places = {rate: place for place, rate in enumerate(ranked)}
    low, high = (len(rates) - 2) // 2, (len(rates) - 1) // 2  # the middle of the others

    def usual(place: int) -> float:
        return (ranked[low + (low >= place)] + ranked[high + (high >= place)]) / 2

    others = [usual(places[rate]) for rate in rates]
    return [rate / other if other else 1.0 for rate, other in zip(rates, others, strict=True)]
