import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from clusterddp.training.stop import REASONS, Deadline, StopRequest


@pytest.fixture
def request_() -> Iterator[StopRequest]:
    """One that listens, while a test sends signals to its own process."""
    ours = StopRequest()
    give_back = ours.listen()
    yield ours
    give_back()


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
    ours = StopRequest()
    give_back = ours.listen()
    assert signal.getsignal(signal.SIGTERM) not in before.values()
    give_back()
    assert {number: signal.getsignal(number) for number in before} == before


def test_nohup_keeps_its_meaning() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        give_back = StopRequest().listen()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        give_back()
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


@pytest.mark.parametrize("seconds_left", [None, 0.0, -3.0])
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
    for words in ("30 s ahead", "takes 25.5 s", "B:USR1@61", "30 s late"):
        assert words in logged[0]


@pytest.mark.parametrize(("lead", "needed"), [(30, 25.0), (0, 500.0)])
def test_a_lead_that_is_enough_or_was_not_asked_for_is_not_mentioned(
    lead: int, needed: float, logged: list[str]
) -> None:
    Deadline(lead).check_lead(needed)
    assert logged == []
