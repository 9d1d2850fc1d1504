"""A step whose srun waits for a lost exit message; the message is lost for real in the campaign."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterddp import log, polling
from clusterddp.batch import step_watch
from clusterddp.errors import SlurmError
from clusterddp.files import read_json
from clusterddp.processes.stacks import Frame, Program
from clusterddp.run.attempt import Attempt
from clusterddp.run.events import StepEnded
from clusterddp.run.history import History
from clusterddp.run.outcome import hang_that_ended_job, note_hung
from clusterddp.run.run_dir import RunDir
from clusterddp.status import stacks
from clusterddp.status.stacks import RankStacks
from tests.batch import test_spares
from tests.status.test_stacks import LOADS, MAIN, REDUCES, at, record
from tests.waiting import PATIENCE

ENDED = {"ended": 2.0, "exit_code": 0}


class Step:
    """An attempt of two ranks, an srun that ends with its stdin, and a scancel."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempt = Attempt(RunDir(folder / "a run's"), 1)
        self.attempt.outcomes.mkdir(parents=True)
        self.calls = folder / "calls"
        self.said: list[str] = []
        self.bin = folder / "bin"
        self.bin.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        monkeypatch.setattr(polling, "FINAL_RECORD_SECONDS", 0.4)
        monkeypatch.setattr(polling, "STEP_CANCEL_SECONDS", 0.2)
        monkeypatch.setattr(polling, "STEP_POLL_SECONDS", 0.02)
        monkeypatch.setattr(polling, "RECORDS_POLL_SECONDS", 0.02)
        self.scancel("exit 0")
        (self.bin / "srun").symlink_to("/bin/sh")
        argv = [self.bin / "srun", "-c", "read line; exit 0"]
        self.srun = subprocess.Popen(argv, stdin=subprocess.PIPE)

    def scancel(self, then: str) -> None:
        path = self.bin / "scancel"
        path.write_text(f'#!/bin/sh\necho "$*" >>{self.calls}\n{then}\n')
        path.chmod(0o755)

    def record(self, rank: int, **fields: object) -> None:
        test_spares.record(self.attempt, rank, "h01", **fields)

    def end(self, **fields: object) -> None:
        """Record that both ranks have ended."""
        for rank in (0, 1):
            self.record(rank, **fields, **ENDED)

    def watch(self) -> None:
        with log.to(self.said.append):
            step_watch.watch(self.attempt, "17", 2, self.at_work, 0.2)

    def at_work(self) -> int | None:
        return self.srun.pid if self.srun.poll() is None else None

    @property
    def cancelled(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    @property
    def noted(self) -> list[StepEnded]:
        """What the verdict on the attempt finds of it."""
        return History.read(self.attempt.run).every(StepEnded, self.attempt.number)


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Step]:
    made = Step(tmp_path, monkeypatch)
    yield made
    made.srun.kill()
    made.srun.communicate()


def test_once_every_end_is_recorded_the_step_is_cancelled_and_no_other(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "STEP_CANCEL_SECONDS", PATIENCE)
    step.scancel(f"kill -9 {step.srun.pid}")
    step.end()
    step.watch()
    assert step.cancelled == ["17.3"]
    assert [event.step_id for event in step.noted] == ["3"]
    assert "every task's end is recorded" in step.said[0]
    assert len(step.said) == 1


@pytest.mark.parametrize("scancel", ["exit 0", "echo Invalid job id specified >&2; exit 1"])
def test_an_srun_that_a_cancelled_step_does_not_end_is_killed_never_terminated(
    step: Step, scancel: str
) -> None:
    step.scancel(scancel)
    step.end()
    step.watch()
    assert step.srun.wait(PATIENCE) == -signal.SIGKILL


def test_without_a_step_to_name_the_job_is_not_cancelled_in_its_place(step: Step) -> None:
    step.end(step_id="")
    step.watch()
    assert step.cancelled == []
    assert step.srun.wait(PATIENCE) == -signal.SIGKILL


def test_an_srun_that_ends_by_itself_is_left_alone(step: Step) -> None:
    step.end()
    step.srun.communicate(b"\n")
    step.watch()
    assert (step.cancelled, step.said) == ([], [])
    assert not step.noted


AT_WORK: dict[str, Callable[[Step], None]] = {
    "one has ended hours ago": lambda step: step.record(1),
    "one has not begun": lambda _: None,
    "there are more than were asked for": lambda step: (step.record(1, **ENDED), step.record(2))[0],
    "one that had ended is started anew by its agent": lambda step: step.record(1, **ENDED),
}


@pytest.mark.parametrize("why", AT_WORK)
def test_a_rank_that_is_at_work_is_waited_for(
    step: Step, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it takes: many times each grace, then its end."""
    step.record(0, **ENDED)
    AT_WORK[why](step)
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1 and "anew" in why:
            step.record(1)
        if looks == 50:
            assert step.cancelled == []
            for rank in (1, 2):
                step.record(rank, **ENDED)

    # sleep: for the watches of other tests, which are threads
    clock = SimpleNamespace(monotonic=lambda: looks * 0.02, sleep=time.sleep)
    monkeypatch.setattr(step_watch, "time", clock)
    monkeypatch.setattr(polling, "time", clock)
    monkeypatch.setattr(polling, "pause", sleep)
    step.watch()
    assert looks > 50
    assert step.cancelled == ["17.3"]


def test_with_rank_0s_last_word_alone_the_step_is_ended_after_a_longer_grace(step: Step) -> None:
    step.record(0, **ENDED)
    step.record(1)
    step.attempt.end.write_text('{"cause": "done"}')
    step.watch()
    assert step.cancelled == ["17.3"]
    assert "with no heartbeat for 0.4s" in step.said[0]


def test_a_sign_of_life_is_waited_for(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    step.record(0)
    step.attempt.end.write_text('{"cause": "done"}')
    looks = 0

    def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks <= 50:
            assert step.cancelled == []
            step.attempt.renew_liveness(looks)

    # sleep: for the watches of other tests, which are threads
    clock = SimpleNamespace(monotonic=lambda: looks * 0.02, sleep=time.sleep)
    monkeypatch.setattr(step_watch, "time", clock)
    monkeypatch.setattr(polling, "time", clock)
    monkeypatch.setattr(polling, "pause", sleep)
    step.watch()
    assert looks > 50 + 20  # the longer grace
    assert step.cancelled == ["17.3"]


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(RunDir(tmp_path / "a"), 1)
    made.outcomes.mkdir(parents=True)
    made.run.logs.mkdir()
    record(made.run, 0)
    return made


class Sleep:
    """Counts the pauses; what is to happen in each is given by its number."""

    def __init__(self, **happens: Callable[[], object]) -> None:
        self.pauses, self.seconds, self._happens = 0, 0.0, happens

    @property
    def is_over(self) -> bool:
        return all(int(name.removeprefix("in_")) <= self.pauses for name in self._happens)

    def __call__(self, seconds: float) -> None:
        self.pauses += 1
        self.seconds += seconds
        self._happens.get(f"in_{self.pauses}", lambda: None)()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [at(0), at(1), at(2), at(3, LOADS, "gpu03")]
    monkeypatch.setattr(stacks, "gather", lambda *_, **__: ranks)


def watch(attempt: Attempt, sleep: Sleep, end: Callable[[], None] | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polling, "pause", sleep)
        attempt.stalled.unlink(missing_ok=True)
        if not end:  # a later attempt begins after the report
            is_over = property(lambda self: self.stalled.exists() and sleep.is_over)
            patch.setattr(Attempt, "is_superseded", is_over)
        step_watch.watch_output(attempt, 4, 600.0, end)


@pytest.mark.usefixtures("found")
def test_the_stacks_are_printed_once_and_the_job_goes_on(
    attempt: Attempt, logged: list[str]
) -> None:
    sleep = Sleep()
    watch(attempt, sleep)
    assert sleep.seconds == 600
    assert logged[0] == "no rank has printed anything for 10m. Stacks of the ranks:"
    assert logged[1].startswith("3 of 4 (ranks 0-2) in all_reduce")
    assert [line for line in logged if line.startswith("rank 3 on gpu03 in DataLoader")]
    assert logged[-1].startswith("the job continues")
    stalled = read_json(attempt.stalled)
    assert stalled is not None
    assert stalled["ranks"] == [3]
    assert stalled["places"].startswith("DataLoader") and "most are in all_red" in stalled["places"]
    assert not (attempt.outcomes / "hung.json").exists()


@pytest.mark.usefixtures("found", "logged")
def test_whatever_a_rank_prints_begins_the_time_anew(attempt: Attempt) -> None:
    quiet = Sleep()
    watch(attempt, quiet)
    logs = attempt.run.logs
    own = Sleep(
        in_5=lambda: (logs / "rank-3.log").write_text("step 1\n"),
        in_9=lambda: (logs / "job.log").write_text("the script's and Slurm's words"),
    )
    watch(attempt, own)
    assert own.pauses == quiet.pauses + 5


@pytest.mark.usefixtures("found")
def test_a_hang_after_a_false_alarm_is_reported_too(attempt: Attempt, logged: list[str]) -> None:
    log = attempt.run.logs / "rank-3.log"
    watch(attempt, Sleep(in_25=lambda: log.write_text("imported\n"), in_70=lambda: None))
    reports = [line.partition(". ")[0] for line in logged if line.startswith("no rank has")]
    assert reports == [f"no rank has printed anything for {silence}" for silence in ("10m", "20m")]


@pytest.mark.usefixtures("found", "logged")
def test_a_log_that_is_begun_anew_counts_as_printed(attempt: Attempt) -> None:
    log = attempt.run.logs / "rank-0.log"
    log.write_text("step 1\nstep 2\n")
    own = Sleep(in_5=lambda: log.write_text("step 3\n"))
    watch(attempt, own)
    assert own.seconds == 750


@pytest.mark.usefixtures("found", "logged")
def test_time_counts_from_the_first_task_on(attempt: Attempt) -> None:
    quiet = Sleep()
    watch(attempt, quiet)
    (attempt.outcomes / "rank-0.json").unlink()
    late = Sleep(in_7=lambda: record(attempt.run, 2))
    watch(attempt, late)
    assert late.pauses == quiet.pauses + 6


@pytest.mark.usefixtures("found", "logged")
def test_the_job_is_ended_only_when_asked_and_the_odd_rank_is_blamed(attempt: Attempt) -> None:
    record(attempt.run, 3)
    ended = []
    watch(attempt, Sleep(), lambda: ended.append(read_json(attempt.outcomes / "hung.json")))
    [hung] = ended
    assert hung is not None
    assert (hung["ranks"], hung["ended"]) == ([3], True)
    told = hang_that_ended_job(attempt.outcomes)
    assert told
    assert told.reason.startswith("no rank printed anything for 10m; it is in Data")
    assert "most are in all_reduce" in told.reason


def unread(rank: int, note: str = "its host has not answered") -> RankStacks:
    return RankStacks(rank, "h01", note=note)


def in_shell(rank: int) -> RankStacks:
    return RankStacks(rank, "h01", (Program(7, "sh", note=f"no Python (sh), sleeping in {rank}"),))


def of_agent(rank: int, frames: tuple[Frame, ...] = REDUCES) -> RankStacks:
    [program] = at(rank, frames).programs
    return RankStacks(rank // 2, "h01", (replace(program, rank=rank),))


# Other lines of the standard library, and another caller further out.
WAITS = (Frame("poll", "/usr/lib/python3.11/selectors.py", 468), *REDUCES)
WAITS_TOO = (Frame("poll", "/usr/lib/python3.11/selectors.py", 469), *REDUCES)
FROM_ELSEWHERE = (*REDUCES, Frame("<module>", "/home/me/train.py", 99))


@pytest.mark.usefixtures("found", "logged")
def test_the_rank_that_a_loops_watchdog_has_named_is_blamed_when_the_job_is_ended(
    attempt: Attempt,
) -> None:
    note_hung(attempt.outcomes, (1,), "in the forward pass of step 7")
    watch(attempt, Sleep(), end=lambda: None)
    told = hang_that_ended_job(attempt.outcomes)
    assert told and (told.ranks, told.reason) == ((1,), "in the forward pass of step 7")


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize(
    "ranks",
    [
        [at(0), at(1), at(2, LOADS), at(3, LOADS)],
        [at(0), at(1), at(2, LOADS), at(3, (MAIN,))],
        [at(0), at(1), at(2), unread(3)],
        [at(0), at(1), at(2, LOADS), unread(3, "has ended: exit code 0")],
        [at(0), at(1), at(2, LOADS), unread(3)],
        [at(0), at(1, WAITS), at(2, WAITS_TOO), at(3, FROM_ELSEWHERE)],
        [of_agent(0), of_agent(1), of_agent(2), of_agent(3, LOADS)],
        [in_shell(0), in_shell(1), in_shell(1), in_shell(1)],
        [],
    ],
    ids=[
        "half and half", "three places", "a host that is silent", "one that has ended", "a doubt",
        "one place", "an agent's ranks", "no Python", "nothing",
    ],
)  # fmt: skip
def test_no_rank_is_blamed_where_it_is_not_sure(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, ranks: list[RankStacks]
) -> None:
    monkeypatch.setattr(stacks, "gather", lambda *_, **__: ranks)
    watch(attempt, Sleep(), lambda: None)
    told = hang_that_ended_job(attempt.outcomes)
    assert told
    seen = "; the job's log has their stacks" if any(stacks.code_locations(ranks)) else ""
    assert (told.ranks, told.reason) == ((), f"no rank printed anything for 10m{seen}")


def test_ranks_that_print_again_meanwhile_are_not_ended_but_watched_on(
    attempt: Attempt, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = attempt.run.logs / "rank-0.log"

    def gather(*_: object, **__: object) -> list[RankStacks]:
        output.write_text("step 1\n")  # from the second time on, nothing new
        return [at(0)]

    def end() -> None:
        assert logged.count("the ranks print again: the job continues") == 1
        logged.append("ended")

    monkeypatch.setattr(stacks, "gather", gather)
    sleep = Sleep()
    watch(attempt, sleep, end)
    assert (logged[-1], sleep.seconds) == ("ended", 1200)


def test_slurm_that_does_not_answer_costs_the_stacks_and_not_the_watch(
    attempt: Attempt, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise SlurmError("slurmctld is down")

    monkeypatch.setattr(stacks, "gather", fails)
    watch(attempt, Sleep(), fails)
    assert "the stacks cannot be read: slurmctld is down" in logged
    assert logged[-1] == "the job cannot be ended, and continues: slurmctld is down"
    assert not (attempt.outcomes / "hung.json").exists()


def test_ranks_that_their_watchdog_found_hung_end_the_tasks(
    attempt: Attempt, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = Sleep(in_3=lambda: note_hung(attempt.outcomes, [1], "step 7, while others are ahead"))
    monkeypatch.setattr(polling, "pause", sleep)
    ended: list[str] = []
    step_watch.watch_hung_ranks(attempt, lambda: ended.append("ended"))
    assert (sleep.pauses, ended) == (3, ["ended"])
    assert logged == [
        "rank 1 hangs: step 7, while others are ahead",
        "ending the job because of --on-hang end",
    ]
    hung = hang_that_ended_job(attempt.outcomes)
    assert hung is not None and hung.ranks == (1,)
    step_watch.watch_hung_ranks(attempt, lambda: ended.append("twice"))
    assert ended == ["ended"]
