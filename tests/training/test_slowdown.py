"""When a run is named that became slow as a whole."""

from dataclasses import dataclass, field

import pytest

from clusterddp.files import read
from clusterddp.preflight import gpus
from clusterddp.run.attempt import Attempt
from clusterddp.run.records import SlowRun, SlowRuns, Spent
from clusterddp.training.paces import Slowdown, Stragglers

NOW = 1000.0


@dataclass
class Training:
    """Spans of 100 steps."""

    attempt: Attempt
    rank: int = 0
    stragglers: bool = False
    now: float = NOW
    _spent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("loading", "waiting", "saving", "training"), 0.0)
    )
    _step: int = 0

    def __post_init__(self) -> None:
        named = type("Named", (Stragglers,), {"is_any_slow": self.stragglers})
        self._of = Slowdown(self.attempt, self.rank, named(self.attempt, 0, 60.0), 0)

    def spans(
        self, count: int, *, computing: float = 30.0, between: float = 0.0, **more: float
    ) -> None:
        for _ in range(count):
            self._step += 100
            parts = {"loading": 0.0, "waiting": 0.0, "saving": 0.0, **more}
            parts["training"] = computing + parts["loading"] + parts["waiting"]
            for name, seconds in parts.items():
                self._spent[name] += seconds
            self.now += parts["training"] + parts["saving"] + between
            spent = {name: self._spent[name] for name in ("training", "waiting", "saving")}
            self._of.add(3200, Spent(1.0, **spent), self._spent["loading"], self._step, self.now)

    @property
    def record(self) -> tuple[SlowRun, ...]:
        return (read(SlowRuns, self.attempt.slow_run) or SlowRuns()).periods


def test_a_run_that_became_slow_is_named_once_with_what_grew_and_once_more_when_it_recovers(
    attempt: Attempt, logged: list[str]
) -> None:
    run = Training(attempt)
    run.spans(4)
    run.spans(5, loading=70.0, saving=1.0)
    assert (logged, run.record) == ([], ())
    run.spans(2, loading=70.0, saving=1.0)
    run.spans(1, loading=70.0, saving=1.0)
    [line] = logged
    assert line == (
        "warning: slow run: 30% of its best rate for 10m06s and 600 steps, and no rank is slower "
        "than the others: a step takes 1.01s instead of 0.3s: loading data 0.7s instead of 0s "
        "[CD0825]"
    )
    [slow] = run.record
    assert (slow.steps, slow.first_step, slow.since) == (800, 400, NOW + 120)
    assert (slow.relative_speed, slow.until) == (0.297, None)
    back = run.now
    run.spans(19)
    assert len(logged) == 1
    run.spans(1)
    assert logged[1:] == [
        "slow run: back to normal speed for 10m00s, at step 3,200; it was slow for 13m28s, at 30% "
        "of its best rate"
    ]
    assert run.record[0].until == back
    run.spans(40)
    assert len(logged) == 2


@pytest.mark.parametrize(
    "more",
    [
        {"between": 900.0},  # evaluations
        {"computing": 40.0},  # 75 % of its rate
    ],
)
def test_a_rate_that_is_its_own_is_not_named(
    attempt: Attempt, logged: list[str], more: dict[str, float]
) -> None:
    run = Training(attempt)
    run.spans(4)
    run.spans(60, **more)
    assert (logged, run.record) == ([], ())


def test_slow_minutes_that_are_not_in_a_row_are_not_named(
    attempt: Attempt, logged: list[str]
) -> None:
    run = Training(attempt)
    for _ in range(5):
        run.spans(4)
        run.spans(4, waiting=70.0)
    assert logged == []


@pytest.mark.parametrize(("rank", "stragglers"), [(1, False), (0, True)])
def test_another_rank_says_nothing_and_a_straggler_explains_it(
    attempt: Attempt, logged: list[str], rank: int, stragglers: bool
) -> None:
    run = Training(attempt, rank, stragglers)
    run.spans(4)
    run.spans(20, loading=70.0)
    assert (logged, run.record) == ([], ())


def test_what_nvml_reports_of_the_gpus_stays_in_the_record(
    attempt: Attempt, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    faults = "GPU 1 reports thermal slowdown"
    monkeypatch.setattr(gpus, "check", lambda count, _: (count, faults))
    run = Training(attempt)
    run.spans(4)
    run.spans(10, computing=80.0)
    assert len(logged) == 1
    changed = "a step takes 0.8s instead of 0.3s: computing 0.8s instead of 0.3s"
    assert run.record[0].changes == f"{changed}; NVML on this node: {faults}"
