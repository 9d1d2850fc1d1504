import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.records import Liveness
from clusterddp.slurm import client
from clusterddp.training import stop
from clusterddp.training.stop import REASONS, Deadline, LivenessWriter, StopRequest, poll_time_limit
from tests.waiting import PATIENCE, wait_for


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    """One that listens, while a test sends signals to its own process."""
    ours = StopRequest()
    restore = ours.listen()
    yield ours
    restore()


def send(*names: str) -> None:
    for name in names:
        os.kill(os.getpid(), signal.Signals[name])


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["SIGUSR1"], "signal"),
        (["SIGUSR2"], "signal"),
        (["SIGTERM"], "SIGTERM"),
        (["SIGHUP"], "SIGTERM"),
        (["SIGTERM", "SIGTERM", "SIGTERM"], "SIGTERM"),
        (["SIGUSR1", "SIGTERM"], "SIGTERM"),
        (["SIGTERM", "SIGUSR1"], "SIGTERM"),
    ],
)
def test_a_signal_is_noted_and_the_weightiest_counts(
    request_: StopRequest, names: list[str], reason: str
) -> None:
    send(*names)
    assert request_.reason == reason


def test_the_first_ctrl_c_of_a_training_is_noted_and_the_second_ends_it(
    request_: StopRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    request_.looked_at = True
    send("SIGINT")
    assert request_.reason == "interrupt"
    assert capfd.readouterr().err.count("Ctrl-C again ends at once") == 1
    with pytest.raises(KeyboardInterrupt):
        send("SIGINT")


@pytest.mark.parametrize("reason", ["stop", "time limit"])
def test_a_second_ctrl_c_ends_it_also_where_it_was_stopping_already(
    request_: StopRequest, reason: str
) -> None:
    request_.looked_at = True
    request_.note(reason)
    send("SIGINT")
    assert request_.reason == reason
    with pytest.raises(KeyboardInterrupt):
        send("SIGINT")


def test_ctrl_c_before_anything_is_trained_ends_at_once(request_: StopRequest) -> None:
    with pytest.raises(KeyboardInterrupt):
        send("SIGINT")
    assert request_.reason == ""


def test_term_before_anything_is_trained_is_noted(request_: StopRequest) -> None:
    send("SIGTERM", "SIGTERM")
    assert (request_.reason, request_.looked_at) == ("SIGTERM", False)


def test_an_agent_that_starts_its_ranks_again_need_not_wait_for_one_that_has_not_begun() -> None:
    program = (
        "import os, signal; from clusterddp.training.stop import StopRequest\n"
        "ours = StopRequest(); ours.listen(); ours.looked_at = {looked_at}\n"
        "os.kill(os.getpid(), signal.SIGTERM); print(ours.reason)"
    )
    environ = {**os.environ, "TORCHELASTIC_MAX_RESTARTS": "2"}
    for looked_at, end in ((False, (-signal.SIGTERM, "")), (True, (0, "SIGTERM\n"))):
        argv = [sys.executable, "-c", program.format(looked_at=looked_at)]
        done = subprocess.run(argv, env=environ, stdout=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stdout) == end


def test_the_former_handlers_are_given_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    restore = StopRequest().listen()
    assert signal.getsignal(signal.SIGTERM) not in before.values()
    restore()
    assert {number: signal.getsignal(number) for number in before} == before


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        restore = StopRequest().listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        restore()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=StopRequest().listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_is_forgotten_does_not_stop_the_next_training(request_: StopRequest) -> None:
    request_.looked_at = True
    send("SIGINT")
    request_.forget()
    assert (request_.reason, request_.looked_at) == ("", False)
    with pytest.raises(KeyboardInterrupt):  # once more, nothing is trained yet
        send("SIGINT")


def test_every_reason_has_its_place() -> None:
    ours = StopRequest()
    for reason in REASONS:
        ours.note(reason)
        assert ours.reason == reason
    ours.note("signal")
    assert ours.reason == REASONS[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [7000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_end_is_near_when_stopping_takes_what_is_left(clock: list[float]) -> None:
    deadline = Deadline()
    deadline.set(100.0)
    assert not deadline.is_near(20.0)
    clock[0] += 74.9  # 20 s to stop, and five to spare
    assert not deadline.is_near(20.0)
    clock[0] += 0.2
    assert deadline.is_near(20.0)
    assert not deadline.is_near(10.0)


def test_after_the_limit_it_is_near_at_once(clock: list[float]) -> None:
    """A start can take longer than the job's limit, and Slurm kills the job some seconds later."""
    deadline = Deadline()
    deadline.set(0.0)
    assert deadline.is_near(0.0)


@pytest.mark.parametrize("seconds_left", [None, -3.0])
def test_without_a_limit_it_is_never_near(clock: list[float], seconds_left: float | None) -> None:
    deadline = Deadline()
    deadline.set(seconds_left)
    clock[0] += 1e9
    assert not deadline.is_near(1e6)


def test_a_lead_that_is_too_short_is_logged_once_with_one_that_is_enough(logged: list[str]) -> None:
    deadline = Deadline(signal_lead=30)
    deadline.check_lead(25.5)
    deadline.check_lead(99.0)
    assert len(logged) == 1
    for words in ("30 s before", "take 25.5 s", "B:USR1@61", "30 s late"):
        assert words in logged[0]


@pytest.mark.parametrize(("lead", "needed"), [(30, 25.0), (0, 500.0)])
def test_a_lead_that_is_enough_or_was_not_asked_for_is_not_mentioned(
    lead: int, needed: float, logged: list[str]
) -> None:
    Deadline(lead).check_lead(needed)
    assert logged == []


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "ALIVE_SECONDS", 0.01)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The reasons for which a process would have ended."""
    reasons: list[str] = []
    monkeypatch.setattr(LivenessWriter, "_end", lambda _, why: reasons.append(why))
    yield reasons
    await_thread()  # a thread that is late would end the tests' process


def await_thread() -> None:
    wait_for(lambda: "presence" not in {t.name for t in threading.enumerate()}, "its thread's end")


@pytest.mark.usefixtures("quickly")
def test_its_sign_of_life_is_renewed_with_the_step(attempt: Attempt) -> None:
    steps = iter(range(1000))
    ours = LivenessWriter(attempt, StopRequest())
    ours.sign = lambda: Liveness(next(steps))
    with ours:
        wait_for(lambda: attempt.alive.exists() and _step(attempt) >= 3, "a third sign of life")
        assert attempt.is_alive()
    await_thread()
    assert sorted(path.name for path in attempt.path.iterdir()) == ["alive", "outcomes"]


@pytest.mark.parametrize(
    ("content", "reason"), [('{"reason": "stop"}', "stop"), ("", "signal"), ("{torn", "signal")]
)
@pytest.mark.usefixtures("quickly")
def test_a_request_in_the_attempts_folder_is_noted(
    attempt: Attempt, content: str, reason: str
) -> None:
    request = StopRequest()
    with LivenessWriter(attempt, request):
        assert request.reason == ""
        fresh = attempt.path / "fresh"
        fresh.write_text(content)
        fresh.replace(attempt.stop)  # in one step: a file that is still empty is a request, too
        wait_for(lambda: request.reason, "the request")
    assert request.reason == reason


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize(
    "said",
    ["superseded: attempt 2 of the run has started", "{} was removed, so nothing can be saved"],
)
def test_an_attempt_that_is_followed_or_removed_ends(
    said: str, attempt: Attempt, ends: list[str]
) -> None:
    with LivenessWriter(attempt, StopRequest()):
        wait_for(attempt.alive.exists, "a sign of life")
        assert not ends
        if said.startswith("superseded"):
            begin(attempt.run)
        while said.startswith("{}") and attempt.path.exists():
            shutil.rmtree(attempt.path, ignore_errors=True)
        wait_for(lambda: ends, "the end")
    assert ends[0] == said.format(attempt.path)


@pytest.mark.usefixtures("quickly")
def test_a_disk_that_takes_no_sign_of_life_is_said_once_and_hides_no_request(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, logged: list[str], ends: list[str]
) -> None:
    tries = []

    def full(self: Attempt, step: int, *_: object) -> None:
        tries.append(step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Attempt, "renew_liveness", full)
    request = StopRequest()
    with LivenessWriter(attempt, request):
        wait_for(lambda: len(tries) > 2, "more than one try")
        attempt.stop.touch()
        wait_for(lambda: request.reason, "the request")
        begin(attempt.run)
        wait_for(lambda: ends, "the end")
    [line] = [line for line in logged if "No space left on device" in line]
    assert line.endswith("[CD0518]")


@pytest.mark.usefixtures("quickly")
def test_a_look_that_outlasts_the_training_does_not_end_the_process(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that was slow meanwhile; what the process does now is not the attempt's."""
    looks, answers, codes = threading.Event(), threading.Event(), list[int]()

    def slow(*_: object) -> None:
        looks.set()
        answers.wait(PATIENCE)

    monkeypatch.setattr(Attempt, "renew_liveness", slow)
    monkeypatch.setattr(os, "_exit", codes.append)
    ours = LivenessWriter(attempt, StopRequest())
    with ours:
        assert looks.wait(PATIENCE)
        begin(attempt.run)
    answers.set()
    ours._thread.join(PATIENCE)
    assert not ours._thread.is_alive()
    assert not codes


def test_nobody_asks_slurm_on_behalf_of_a_training_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[str]()

    def seconds_left(job: str) -> float:
        asked.append(job)
        return 60.0

    monkeypatch.setattr(stop, "_TIME_LIMIT_SECONDS", 0.01)
    monkeypatch.setattr(client, "seconds_left", seconds_left)
    deadline, others = Deadline(), {*threading.enumerate()}
    poll_time_limit(deadline, {"SLURM_JOB_ID": "17"})
    wait_for(lambda: len(asked) > 2, "a third look")
    assert deadline.is_near(60.0)
    [thread] = [each for each in {*threading.enumerate()} - others if each.name == "time limit"]
    del deadline
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_limit_that_was_moved_is_seen_before_the_training_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = [60.0]
    asked = list[float]()

    def seconds_left(job: str) -> float:
        asked.append(limit[0])
        return limit[0]

    now = [7000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(client, "seconds_left", seconds_left)
    deadline = Deadline()
    poll_time_limit(deadline, {"SLURM_JOB_ID": "17"})
    wait_for(lambda: deadline.is_near(60.0), "the first answer")
    assert asked == [60.0]  # what it has just heard is not asked again
    now[0] += 50.0  # suspended, say, or moved by an administrator: the answer is another now
    limit[0] = 600.0
    assert not deadline.is_near(20.0)
    now[0] += 590.0
    limit[0] = 10.0
    assert deadline.is_near(20.0)
    assert asked == [60.0, 600.0, 10.0]


def _step(attempt: Attempt) -> int:
    return int(json.loads(attempt.alive.read_text())["step"])
