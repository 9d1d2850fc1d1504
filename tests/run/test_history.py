"""What follows the end of an attempt, and the run's own records from which that is decided."""

import json
from pathlib import Path
from typing import Any

import pytest

from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt
from clusterddp.run.events import Cause, Failure, parse
from clusterddp.run.history import (
    NO_RESTART,
    STOP_ASKED,
    History,
    PastAttempt,
    Policy,
    causes_by_attempt,
    decide,
    restart_delay,
    step_of_death,
    steps_gained,
    withdrawal_cause,
)
from clusterddp.run.run_dir import RunDir
from tests.event_lines import add_event

Event = dict[str, Any]
CANCELLED = Cause.CANCELLED
DONE = Cause.DONE
FAILED = Cause.FAILED
PREEMPTED = Cause.PREEMPTED
REQUEUED = Cause.REQUEUED
SIGNAL = Cause.SIGNAL
STOPPED = Cause.STOPPED
TIME_LIMIT = Cause.TIME_LIMIT
USUAL = Policy(requeue=True, max_requeues=20, retries=0)


def ends(*causes: str, steps_gained: int | None = 5) -> list[PastAttempt]:
    return [PastAttempt(number, cause, steps_gained) for number, cause in enumerate(causes, 1)]


# policy, the causes of all starts so far -> whether another follows, words of the reason
DECISIONS: list[tuple[Policy, list[str], bool, str]] = [
    (USUAL, [DONE], False, DONE),
    (USUAL, [CANCELLED], False, CANCELLED),
    (USUAL, [STOPPED], False, STOPPED),
    (USUAL, [REQUEUED], False, "Slurm requeued the job"),
    (USUAL, [SIGNAL], True, SIGNAL),
    (USUAL, [TIME_LIMIT], True, TIME_LIMIT),
    (USUAL, [PREEMPTED], True, PREEMPTED),
    (USUAL, [FAILED], False, NO_RESTART),
    (USUAL, [Cause.NOT_LAUNCHED], True, Cause.NOT_LAUNCHED),
    (Policy(False, 20, 0), [SIGNAL], False, "signal, and requeue is off"),
    (Policy(False, 20, 0), [TIME_LIMIT], False, "time limit, and requeue is off"),
    (Policy(False, 20, 0), [PREEMPTED], False, "preempted, and requeue is off"),
    (Policy(False, 20, 0, requeues_loops=True), [PREEMPTED], True, PREEMPTED),
    # no other job, whatever the cause
    (Policy(False, 20, 1), [FAILED], False, "failed, and requeue is off"),
    (Policy(True, 20, 1), [FAILED, FAILED], False, "it has failed 2 times"),
    (Policy(True, 20, 2), [FAILED, SIGNAL, FAILED], True, FAILED),
    # the cap counts every start after the first, whoever caused it
    (Policy(True, 2, 0), [REQUEUED, SIGNAL], True, SIGNAL),
    (Policy(True, 2, 0), [SIGNAL, "", SIGNAL], False, "started 3 times (--max-requeues 2)"),
    (Policy(True, 0, 5), [FAILED], False, "started once (--max-requeues 0)"),
    (Policy(True, 0, 0), [SIGNAL], False, "--max-requeues 0"),
]


@pytest.mark.parametrize(("policy", "causes", "restarts", "words"), DECISIONS)
def test_what_follows(policy: Policy, causes: list[str], restarts: bool, words: str) -> None:
    decision = decide(policy, causes[-1], ends(*causes))
    assert (decision.restarts, words in decision.why) == (restarts, True), decision


def test_a_command_without_a_loop_is_not_requeued_where_nobody_asked_for_it() -> None:
    undecided = Policy(False, 20, 0, requeues_loops=True)
    decision = decide(undecided, PREEMPTED, ends(PREEMPTED, steps_gained=None))
    assert (decision.restarts, decision.code) == (False, "CD1221")


def test_a_command_that_left_with_0_at_a_signal_is_put_back_once() -> None:
    first, again = (
        PastAttempt(number, PREEMPTED, None, stopped_by_signal=True) for number in (1, 2)
    )
    assert decide(USUAL, PREEMPTED, [first]).restarts
    decision = decide(USUAL, PREEMPTED, [first, again])
    assert (decision.restarts, decision.code) == (False, "CD1229")
    with_loop = PastAttempt(2, PREEMPTED, 5, stopped_by_signal=True)  # whose steps are known
    assert decide(
        USUAL, PREEMPTED, [PastAttempt(1, PREEMPTED, 5, stopped_by_signal=True), with_loop]
    ).restarts


@pytest.mark.parametrize("cause", [SIGNAL, TIME_LIMIT, PREEMPTED, FAILED, REQUEUED])
def test_nothing_follows_a_request_to_stop(cause: str) -> None:
    decision = decide(Policy(True, 20, 5), cause, ends(cause), stop_requested=True)
    assert (decision.restarts, decision.why) == (False, STOP_ASKED)


def test_a_run_that_is_done_is_done_also_when_it_was_asked_to_stop() -> None:
    assert decide(USUAL, DONE, ends(DONE), stop_requested=True).why == DONE


FRUITLESS: list[tuple[list[tuple[str, int | None]], bool]] = [
    ([(SIGNAL, 0)], True),
    ([(SIGNAL, 0), (SIGNAL, 0)], False),
    ([(SIGNAL, 3), (SIGNAL, 0)], True),
    ([(SIGNAL, 0), (SIGNAL, 3)], True),
    ([(SIGNAL, 0), (PREEMPTED, 0), (SIGNAL, 3)], True),
    ([(SIGNAL, 0), (PREEMPTED, 0), ("", 0), (REQUEUED, 0), (SIGNAL, 0)], False),
    ([(SIGNAL, 0), (PREEMPTED, 0)], True),
    ([(PREEMPTED, 0), ("", 0), (REQUEUED, 0), (PREEMPTED, 0)], True),
    ([(SIGNAL, None), (SIGNAL, None)], True),  # of a command nobody knows
]


@pytest.mark.parametrize(("told", "restarts"), FRUITLESS)
def test_two_starts_in_a_row_without_a_step_end_it(
    told: list[tuple[str, int | None]], restarts: bool
) -> None:
    starts = [PastAttempt(number, cause, steps) for number, (cause, steps) in enumerate(told, 1)]
    decision = decide(USUAL, told[-1][0], starts)
    assert decision.restarts is restarts
    assert restarts or "2 attempts in a row made no progress" in decision.why


def died(
    reason: str, at: int | None, *, number: int = 1, code: str = "CD1209", exit_code: int = 1,
    rank: int = 0, gained: int | None = 50, hardware: str = "", host: str = "h01",
) -> PastAttempt:  # fmt: skip
    failure = Failure(rank, host, reason, f"logs/rank-{rank}.log", exit_code)
    return PastAttempt(
        number, FAILED, gained, failure=failure, code=code, died_at=at, hardware=hardware
    )


BOOM = "ValueError: row 17"
PATIENT = Policy(True, 20, 5)
REPEATED: list[tuple[list[PastAttempt], bool]] = [
    ([died(BOOM, 60), died(BOOM, 60)], False),
    ([died(BOOM, 60), died("ValueError: row 18", 60, rank=3)], False),  # numbers do not count
    ([died(BOOM, 60), died(BOOM, 61)], True),
    ([died(BOOM, 60), died("KeyError: 'row'", 60)], True),
    ([died(BOOM, None), died(BOOM, None)], True),
    ([died("exit code 3", 60, exit_code=3), died("exit code 4", 60, exit_code=4)], True),
    ([died("killed by SIGKILL", 60, code="CD1211", exit_code=137),
      died("OutOfMemoryError: CUDA out of memory", 60, code="CD1212")], False),
    # interruptions between the two do not make them different, another failure does
    ([died(BOOM, 60), PastAttempt(2, PREEMPTED, 0), PastAttempt(3, TIME_LIMIT, 5),
      died(BOOM, 60)], False),
    ([died(BOOM, 60), died("KeyError: 'row'", 70), died(BOOM, 60)], True),
    ([died("killed by SIGBUS", 60, hardware="killed by SIGBUS"),
      died("killed by SIGBUS", 60, hardware="killed by SIGBUS")], False),
    # each on a node of its own, which is marked bad
    ([died("killed by SIGBUS", 60, hardware="killed by SIGBUS"),
      died("killed by SIGBUS", 60, hardware="killed by SIGBUS", host="h02")], True),
]  # fmt: skip


@pytest.mark.parametrize(("starts", "restarts"), REPEATED)
def test_the_same_error_at_the_same_step_ends_it_whatever_is_allowed(
    starts: list[PastAttempt], restarts: bool
) -> None:
    decision = decide(PATIENT, FAILED, starts)
    assert (decision.restarts, decision.code) == (restarts, "" if restarts else "CD1232")
    assert restarts or "same error after step 60, so the program" in decision.why


BUS = died("killed by SIGBUS", 60, code="CD1216", exit_code=135, hardware="killed by SIGBUS")
OF_COMMAND = died("killed by SIGBUS", None, gained=None, hardware="killed by SIGBUS")


def test_hardware_restarts_a_run_that_can_resume_and_uses_up_no_retry() -> None:
    assert decide(USUAL, FAILED, [BUS]).restarts
    assert decide(Policy(True, 20, 1), FAILED, [BUS, died(BOOM, 90)]).restarts
    assert decide(USUAL, FAILED, [BUS, died(BOOM, 90)]).why == NO_RESTART
    assert decide(USUAL, FAILED, [OF_COMMAND]).why == NO_RESTART
    assert decide(Policy(False, 20, 0), FAILED, [BUS]).code == "CD1221"
    assert decide(Policy(True, 0, 0), FAILED, [BUS]).code == "CD1222"


# -- from a run's records ----------------------------------------------------------------------


def submitted(job_id: str, **fields: Any) -> Event:
    return {"event": "submitted", "job_id": job_id, **fields}


def started(number: int, job_id: str = "7") -> Event:
    return {"event": "started", "job_id": job_id, "attempt": number}


def ended(number: int, cause: str, job_id: str = "7") -> Event:
    return {"event": "ended", "job_id": job_id, "attempt": number, "cause": cause}


def noted(event: str, job_id: str = "7") -> Event:
    return {"event": event, "job_id": job_id}


RESUME_ASKED = {"event": "resume_requested"}
CAUSES: list[tuple[list[Event], dict[int, str]]] = [
    ([], {}),
    ([submitted("7")], {}),
    ([submitted("7"), started(1)], {1: ""}),
    ([submitted("7"), started(1), ended(1, SIGNAL), started(2)], {1: SIGNAL, 2: ""}),
    ([submitted("7"), started(1), started(2), ended(2, FAILED)], {1: "", 2: FAILED}),
    # another job in its place goes on counting, a person's submission does not
    ([submitted("7"), started(1), ended(1, SIGNAL), submitted("8", in_place_of="7"),
      started(2, "8")], {1: SIGNAL, 2: ""}),
    ([submitted("7"), started(1), ended(1, STOPPED), submitted("8"), started(2, "8")], {2: ""}),
    ([submitted("7"), started(1), ended(1, STOPPED), RESUME_ASKED], {}),
    # the job has started before the submitting side could write its line
    ([started(1), submitted("7")], {1: ""}),
    ([submitted("7"), started(1), ended(1, STOPPED), RESUME_ASKED, started(2, "8"), submitted("8")],
     {2: ""}),
    # damage, and ends of attempts that are not counted
    ([{"event": 5}, {}, {"event": "ended", "attempt": [1]} | {"attempt": 9}, ended(3, DONE)], {}),
    ([submitted("7"), {"event": "started", "job_id": "7", "attempt": "x"}], {}),
]  # fmt: skip


@pytest.mark.parametrize(("events", "causes"), CAUSES)
def test_starts_are_counted_since_a_person_submitted(
    events: list[Event], causes: dict[int, str]
) -> None:
    assert causes_by_attempt([parse(e) for e in events]) == causes


def begun_at(number: int, when: float) -> Event:
    return {**started(number), "time": when}


def requeued_for(wait: float) -> Event:
    return {"event": "requeued", "job_id": "7", "wait": wait}


RAPID = [submitted("7"), *(begun_at(number, number * 10.0) for number in (1, 2, 3, 4))]
WAITED = [*RAPID, requeued_for(30), begun_at(5, 80.0)]
DELAYS: list[tuple[list[Event], float, float]] = [
    (RAPID[:4], 50, 0),
    (RAPID, 50, 30),  # the user's own start is not among the three
    (RAPID, 619, 30),
    (RAPID, 620, 0),  # the second start was ten minutes ago
    (WAITED, 90, 60),
    ([*WAITED, requeued_for(60), begun_at(6, 160.0)], 170, 120),
    # what was waited is no time, so that the waits keep growing
    ([*WAITED, requeued_for(590), begun_at(6, 690.0)], 700, 120),
    ([*WAITED, begun_at(6, 90.0), begun_at(7, 100.0)], 702, 0),
    ([*RAPID, *(begun_at(number, 45.0) for number in range(5, 20))], 50, 600),
    ([*RAPID, RESUME_ASKED, begun_at(5, 45.0)], 50, 0),
]


@pytest.mark.parametrize(("events", "now", "delay"), DELAYS)
def test_the_fourth_start_by_itself_in_ten_minutes_waits_and_each_later_one_longer(
    events: list[Event], now: float, delay: float
) -> None:
    assert restart_delay([parse(each) for each in events], now) == delay


WITHDRAWN: list[tuple[list[Event], str, str]] = [
    # events, the job that is about to start -> whether a person has taken it back
    ([submitted("7")], "7", ""),
    ([submitted("7"), noted("stop_requested")], "7", STOPPED),
    ([submitted("7"), started(1), noted("stop_requested")], "7", STOPPED),
    ([submitted("7"), started(1), noted("stop_requested"), ended(1, SIGNAL), noted("requeued")],
     "7", STOPPED),
    ([submitted("7"), noted("stop_requested"), started(1)], "7", ""),
    ([submitted("7"), started(1), noted("stop_requested"), noted("stop_failed")], "7", ""),
    ([submitted("7"), started(1), noted("stop_requested"), submitted("8", in_place_of="7")], "8",
     STOPPED),
    ([submitted("7"), started(1), noted("stop_requested"), submitted("8")], "8", ""),
    ([submitted("7"), started(1), noted("stop_requested"), RESUME_ASKED], "8", ""),
    ([submitted("7"), started(1), noted("stop_requested")], "9", ""),  # by hand
    ([submitted("7"), noted("cancelled")], "7", CANCELLED),
    ([submitted("7"), noted("cancelled"), noted("cancel_failed")], "7", ""),
    ([submitted("7"), noted("cancelled"), started(1)], "7", CANCELLED),
    ([submitted("7"), noted("cancelled"), noted("stop_requested")], "7", CANCELLED),
    ([submitted("7"), noted("cancelled"), RESUME_ASKED, submitted("8")], "8", ""),
    ([submitted("7"), noted("cancelled"), submitted("8", in_place_of="7")], "8", ""),
]  # fmt: skip


@pytest.mark.parametrize(("events", "job_id", "found"), WITHDRAWN)
def test_a_request_of_a_person_holds_until_the_next_start(
    events: list[Event], job_id: str, found: str
) -> None:
    assert withdrawal_cause([parse(e) for e in events], job_id) == found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", train=TrainConfig())


def make_run(path: Path, **request: Any) -> RunDir:
    spec = JobSpec(
        run_name=path.name, run_dir=str(path), resources=Resources(), python="python", **request
    )
    with RunDir.create(spec, "#!/bin/bash\n") as run:
        return run


def attempt(run: RunDir, number: int, *steps: int, start: int | None) -> Attempt:
    made = Attempt(run, number)
    made.checkpoints.mkdir(parents=True)
    if start is not None:
        made.record.write_text(json.dumps({"step": start}))
    for step in steps:
        (made.checkpoints / f"step-{step:08d}.pt").touch()
    return made


def test_steps_gained_are_those_beyond_where_it_began(run: RunDir) -> None:
    assert steps_gained(attempt(run, 1, 20, 40, start=0), run.read_spec()) == 40
    assert steps_gained(attempt(run, 2, 20, 40, start=40), run.read_spec()) == 0
    assert steps_gained(attempt(run, 3, start=40), run.read_spec()) == 0
    assert steps_gained(attempt(run, 4, start=None), run.read_spec()) == 0  # its ranks never met


def test_of_a_command_nobody_knows_the_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "own", command=("true",))
    assert steps_gained(Attempt(run, 1), run.read_spec()) is None


def test_what_lies_beside_the_checkpoints_counts_for_nothing(run: RunDir) -> None:
    made = attempt(run, 1, 20, start=0)
    for name in ("step-x.pt", "step-00000099.pt.sha256", ".step-00000099.pt", "best.json"):
        (made.checkpoints / name).touch()
    assert steps_gained(made, run.read_spec()) == 20


def test_starts_have_their_causes_and_their_steps(run: RunDir) -> None:
    for event in (started(1), ended(1, SIGNAL), started(2)):
        add_event(run, **event)
    attempt(run, 1, 20, start=0)
    starts = [
        (each.number, each.cause, each.steps_gained) for each in History.read(run).past_attempts
    ]
    assert starts == [(1, SIGNAL, 20), (2, "", 0)]


@pytest.mark.parametrize(
    ("alive", "code", "known"),
    [(60, 1, 60), (60, 137, 60), (40, 1, 40), (40, 137, None), (None, 1, None)],
)
def test_the_step_of_a_death_is_rank_0s_last_record_but_not_its_first_after_a_kill(
    run: RunDir, alive: int | None, code: int, known: int | None
) -> None:
    made = attempt(run, 2, start=40)
    if alive is not None:
        made.renew_liveness(alive)
    assert step_of_death(made, Failure(1, "h01", "x", "logs/rank-1.log", code)) == known
