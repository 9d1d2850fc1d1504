"""Who is named for being slow, and who is not."""

import json
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import pytest

from clusterddp.files import read, write_record
from clusterddp.run.attempt import Attempt
from clusterddp.run.history import History
from clusterddp.run.records import AttemptRecord, SlowRank, SlowRanks
from clusterddp.training.paces import Stragglers, Throughputs, shares

FINE, SLOW = 1.0, 0.5
NOW = 1000.0


@dataclass
class Run:
    """Lines of metrics of four ranks, one in 10 seconds."""

    attempt: Attempt
    patience: float = 60.0
    rank: int = 0
    steps_a_line: int = 100
    step: int = 0
    now: float = NOW
    _of: list[Stragglers] = field(default_factory=list)

    def lines(self, count: int, speed: float, *, rank: int = 2, known: bool = True) -> None:
        """Log lines in which one rank has this speed, and the others 1."""
        self._of = self._of or [Stragglers(self.attempt, self.rank, self.patience)]
        for _ in range(count):
            self.step += self.steps_a_line
            self.now += 10.0
            seconds = [5.0 if known else float("nan")] * 4
            images = [500.0 * (speed if each == rank else 1.0) for each in range(4)]
            paces = Throughputs(images, seconds)
            self._of[0].add(
                paces, steps=self.steps_a_line, seconds=10.0, step=self.step, now=self.now
            )

    @property
    def record(self) -> tuple[SlowRank, ...]:
        return (read(SlowRanks, self.attempt.stragglers) or SlowRanks()).stragglers


def test_a_rank_that_stays_slow_is_named_once_and_once_more_when_it_keeps_up(
    attempt: Attempt, logged: list[str]
) -> None:
    outcome = {
        **{"rank": 2, "local_rank": 0, "node_rank": 1, "host": "h02", "pid": 1, "job_id": "7"},
        **{"restart": 0, "step_id": "0", "started": 1.0},
    }
    (attempt.outcomes / "rank-2.json").write_text(json.dumps(outcome))
    run = Run(attempt)
    run.lines(3, FINE)
    run.lines(5, SLOW)
    assert (logged, run.record) == ([], ())
    run.lines(5, SLOW)
    assert logged == [
        "warning: straggler: rank 2 on h02 has computed at 50% of the other ranks' median speed "
        "for 1m00s and 600 steps. The others wait for it. [CD0818]"
    ]
    assert run.record == (SlowRank(2, "h02", 0.5, 100.0, 1000, 300, NOW + 30, None),)
    run.lines(5, FINE)
    assert len(logged) == 1
    run.lines(1, FINE)
    assert logged[1:] == [
        "straggler: rank 2 on h02 has been back to normal speed for 1m00s, at step 1,900; "
        "it was slow for 1m40s, at 50% of the others"
    ]
    run.lines(20, FINE)
    [over] = run.record
    assert over.until == NOW + 130
    assert len(logged) == 2


@pytest.mark.parametrize(
    "rates", [[], [1.0, 0.5], [1.0, 2.0, 4.0], [3.0, 3.0, 1.0, 9.0], [0.0, 0.0], [5.0] * 7]
)
def test_a_share_is_of_the_median_of_the_other_ranks(rates: list[float]) -> None:
    usual = [median(rates[:rank] + rates[rank + 1 :]) for rank in range(len(rates))]
    expected = [rate / each if each else 1.0 for rate, each in zip(rates, usual, strict=True)]
    assert shares(rates) == expected


def test_a_second_spell_has_a_record_of_its_own(attempt: Attempt, logged: list[str]) -> None:
    run = Run(attempt)
    for _ in range(2):
        run.lines(6, SLOW)
        run.lines(6, FINE)
    assert [(slow.rank, slow.host, slow.first_step) for slow in run.record] == [
        (2, "", 0),
        (2, "", 1200),
    ]
    assert len(logged) == 4
    write_record(attempt.record, AttemptRecord(number=1))
    assert History.read(attempt.run).summaries()[0].stragglers == run.record


@pytest.mark.parametrize(
    "speeds", [[FINE] * 30, [0.81] * 30, [SLOW] * 5 + [FINE] + [SLOW] * 5, [0.01] + [FINE] * 29]
)
def test_noise_and_a_hiccup_name_nobody(
    attempt: Attempt, logged: list[str], speeds: list[float]
) -> None:
    run = Run(attempt)
    for speed in speeds:
        run.lines(1, speed)
    assert (logged, attempt.stragglers.exists()) == ([], False)


@pytest.mark.parametrize("settings", [{"patience": 0.0}, {"rank": 1}, {"steps_a_line": 4}], ids=str)
def test_nobody_is_named_where_it_is_off_or_too_few_steps_are_known(
    attempt: Attempt, logged: list[str], settings: dict[str, Any]
) -> None:
    Run(attempt, **settings).lines(12, SLOW)
    assert (logged, attempt.stragglers.exists()) == ([], False)


def test_unknown_speeds_name_nobody(attempt: Attempt, logged: list[str]) -> None:
    Run(attempt).lines(30, SLOW, known=False)
    alone = Stragglers(attempt, 0, 60.0)
    alone.add(Throughputs([10.0], [1.0]), steps=1000, seconds=100.0, step=1000, now=NOW)
    assert (logged, attempt.stragglers.exists()) == ([], False)


def test_a_full_disk_costs_the_record_and_not_the_line(attempt: Attempt, logged: list[str]) -> None:
    attempt.stragglers.mkdir()  # where no file can take its place
    Run(attempt).lines(6, SLOW)
    assert len(logged) == 1
