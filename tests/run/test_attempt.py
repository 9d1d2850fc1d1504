"""The attempts of a run: made by one alone, superseded by the next, found alive or not."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clusterddp import log
from clusterddp.run import attempt as attempts
from clusterddp.run.attempt import (
    Attempt,
    StartRefused,
    Superseded,
    begin,
    publish,
    wait_until_inactive,
)
from clusterddp.run.records import AttemptRecord
from clusterddp.run.run_dir import RunDir
from tests.event_lines import add_event


def test_attempts_are_numbered_from_one(run: RunDir) -> None:
    assert attempts.latest(run) is None
    assert [begin(run).path.name for _ in range(3)] == ["0001", "0002", "0003"]
    assert [one.number for one in attempts.attempts(run)] == [1, 2, 3]
    latest = attempts.latest(run)
    assert latest is not None
    assert latest.number == 3
    assert latest.outcomes.stat().st_mode & 0o777 == 0o700


def test_two_starts_at_once_never_share_a_directory(run: RunDir) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: begin(run).number, range(40)))
    assert sorted(made) == list(range(1, 41))


def test_other_names_beside_the_attempts_are_passed_over(run: RunDir) -> None:
    begin(run)
    for name in (".now-x", "old", "0002.bak"):
        (run.attempts / name).mkdir()
    assert [one.number for one in attempts.attempts(run)] == [1]


def test_numbers_go_on_beyond_four_digits(run: RunDir) -> None:
    (run.attempts / "9999").mkdir(parents=True)
    assert begin(run).path.name == "10000"
    assert [one.number for one in attempts.attempts(run)] == [9999, 10000]


def test_publishing_leads_the_runs_own_names_to_the_attempt(run: RunDir) -> None:
    for number in (1, 2):
        made = begin(run)
        made.metrics.write_text(f"{number}\n")
        publish(made, AttemptRecord(step=10 * number))
        assert run.current.readlink() == Path(f"attempts/{number:04d}")
        assert run.metrics.read_text() == f"{number}\n"
        assert made.read_record().step == 10 * number
    assert (run.path.rename(run.path.with_name("moved")) / "metrics.jsonl").read_text() == "2\n"


def test_a_superseded_attempt_publishes_nothing(run: RunDir) -> None:
    first, second = begin(run), begin(run)
    publish(second, AttemptRecord(step=5))
    with pytest.raises(Superseded, match=r"attempt 1 of .* is superseded"):
        publish(first, AttemptRecord(step=9))
    assert not first.record.exists()
    assert run.current.readlink() == Path("attempts/0002")
    assert (first.is_superseded, second.is_superseded) == (True, False)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, None), ("", "signal"), ('{"rea', "signal"), ("[]", "signal"), ("{}", "signal"),
     ('{"reason": "stop"}', "stop")],
)  # fmt: skip
def test_the_mark_says_why_to_stop(run: RunDir, content: str | None, reason: str | None) -> None:
    made = begin(run)
    if content is not None:
        made.stop.write_text(content)
    assert made.stop_reason() == reason


def test_a_persons_mark_replaces_that_of_the_script(run: RunDir) -> None:
    made = begin(run)
    made.stop.touch()
    made.ask_to_stop("stop")
    assert made.stop_reason() == "stop"


def test_an_attempt_that_is_gone_cannot_be_asked(run: RunDir) -> None:
    with pytest.raises(OSError, match="No such file"):
        Attempt(run, 1).ask_to_stop("stop")


def test_a_sign_of_life_is_one_for_some_seconds(run: RunDir) -> None:
    made = begin(run)
    assert not made.is_alive()
    made.renew_liveness(3)
    assert made.is_alive()
    then = time.time() - attempts.LIVENESS_TIMEOUT - 1
    os.utime(made.alive, (then, then))
    assert not made.is_alive()
    assert sorted(path.name for path in run.attempts.iterdir()) == ["0001"]  # no probe is left


# -- waiting for another one -----------------------------------------------------------------


def at_work(run: RunDir, **record: Any) -> Attempt:
    """An attempt whose rank 0 has just shown its life, on another host."""
    made = begin(run)
    publish(made, AttemptRecord(**{"job_id": "6", "host": "elsewhere", "pid": 1, **record}))
    made.renew_liveness(1)
    return made


def waits(run: RunDir, job_id: str = "7", patience: float = 0.0) -> str:
    """What is said when it gives up; empty when it did not need to wait."""
    try:
        wait_until_inactive(run, job_id, patience)
    except StartRefused as error:
        return str(error)
    return ""


def test_another_job_at_work_is_waited_for_and_named(run: RunDir, logged: list[str]) -> None:
    at_work(run)
    with pytest.raises(StartRefused) as caught:
        wait_until_inactive(run, "7", 0.2)
    for words in ("attempt 1 of", "job 6 on elsewhere", "--run-name"):
        assert words in str(caught.value)
    assert len(logged) == 1
    assert "waiting up to 0.2s" in logged[0]


def test_a_clock_that_was_set_since_does_not_end_an_attempt(run: RunDir) -> None:
    made = at_work(run, host=os.uname().nodename, pid=os.getpid())
    record = json.loads(made.record.read_text())
    made.record.write_text(json.dumps({**record, "began": record["began"] - 1e6}))
    assert waits(run) != ""


def test_an_earlier_start_of_the_same_job_is_not_waited_for(run: RunDir) -> None:
    at_work(run, job_id="7")
    assert waits(run, "7") == ""


def test_a_start_outside_slurm_waits_for_one_like_it(run: RunDir) -> None:
    at_work(run, job_id="")
    assert waits(run, "") != ""


@pytest.mark.parametrize(
    "how", ["silent", "no sign", "its own word", "the script's word", "process gone"]
)
def test_an_attempt_that_is_over_is_not_waited_for(run: RunDir, how: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = os.uname().nodename if how == "process gone" else "elsewhere"
    made = at_work(run, host=host, pid=gone.pid)
    if how == "silent":
        os.utime(made.alive, (1, 1))
    elif how == "no sign":
        made.alive.unlink()
    elif how == "its own word":
        made.end.write_text(json.dumps({"cause": "stopped"}))
    elif how == "the script's word":
        add_event(run, "ended", attempt=1)
    assert waits(run) == ""


def test_the_end_of_another_attempt_is_no_end_of_this_one(run: RunDir) -> None:
    at_work(run)
    add_event(run, "ended", attempt=2)
    assert waits(run) != ""


def test_the_wait_ends_with_the_other_one(run: RunDir) -> None:
    made = at_work(run)

    def leave(_line: str) -> None:
        made.end.write_text("{}")

    with log.to(leave):
        wait_until_inactive(run, "7", 60)  # it says so before it waits


def left_by_a_killed_rank(attempt: Attempt) -> None:
    for name in (
        ".alive.17", ".end.json.x", "outcomes/.rank-0.json.x", "checkpoints/.step-00000080.pt.x",
        "checkpoints/.best.json.x", ".checkpoints.x/step-00000040.pt", "torchelastic/7.0_x/0/log",
    ):  # fmt: skip
        path = attempt.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")


def test_the_next_start_removes_what_killed_ranks_have_left_and_nothing_else(run: RunDir) -> None:
    first = begin(run)
    first.checkpoints.mkdir()
    first.renew_liveness(3)
    (first.checkpoints / "step-00000040.pt").touch()
    kept = sorted(first.path.rglob("*"))
    left_by_a_killed_rank(first)
    first.reserve_space()
    elsewhere = run.path.parent / "precious"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    (first.path / ".link").symlink_to(elsewhere)
    begin(run)
    assert sorted(first.path.rglob("*")) == kept
    assert (elsewhere / "mine").exists()


def test_the_last_records_of_an_attempt_find_room_on_a_full_disk(small_disk: Any) -> None:
    write = (
        "from pathlib import Path; from clusterddp.run.attempt import begin\n"
        "from clusterddp.run.run_dir import RunDir\n"
        "attempt = begin(RunDir(Path()))\n"
        "attempt.reserve_space()\n"
        "print(attempt.write_error())\n"
        "try: Path('filler').write_bytes(bytes(1 << 20))\n"
        "except OSError: pass\n"
        "print(attempt.write_error())\n"
        "attempt.write_final_record(attempt.end, {})\n"
        "print(attempt.end.read_text().strip(), attempt.reserve.exists())\n"
    )
    done = small_disk("size=1m", sys.executable, "-c", write)
    assert done.stdout.splitlines() == [
        "", "attempts/0001 cannot be written: No space left on device", "{} False",
    ], done.stderr  # fmt: skip
