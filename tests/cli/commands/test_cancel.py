"""`clusterddp cancel`."""

import errno
import json
import signal
import subprocess
import sys
import time

import pytest

from clusterddp.run import events
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.event_lines import kinds, read_events

__all__ = ["workplace"]


def test_a_slurm_job_is_given_to_scancel(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"), started("12"))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    workplace.command("scancel", f"exec /bin/grep -q cancelled {run.events}")  # recorded before
    got = workplace.invoke("cancel", "one")
    assert (got.code, got.out) == (0, "one: asked Slurm (job 12) to end it\n"), got.err
    assert workplace.calls[-1] == "scancel 12"
    assert read_events(run)[-1]["event"] == "cancelled"


def test_a_run_that_has_ended_is_left_as_it_is(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"), started("12"), ended("12", 0))
    got = workplace.invoke("cancel", "one")
    assert (got.code, got.out) == (0, "one has already ended: done\n")
    assert workplace.calls == []
    assert kinds(run)[-1] == "ended"


def test_several_runs_are_cancelled_and_a_repeated_one_once(workplace: Workplace) -> None:
    workplace.run("one", submitted("1"), started("1"))
    workplace.run("two", submitted("2"))
    workplace.run("never")
    workplace.command("squeue", "echo '1|RUNNING|None'; echo '2|PENDING|None'")
    workplace.command("scancel", "exit 0")
    got = workplace.invoke("cancel", "one", "two", "1", "never", "--json")
    assert [(r["name"], r["cancelled"]) for r in json.loads(got.out)] == [
        ("one", True),
        ("two", True),
        ("never", False),
    ]
    assert [call for call in workplace.calls if "scancel" in call] == ["scancel 1", "scancel 2"]


def test_the_others_are_cancelled_where_scancel_refuses_one(workplace: Workplace) -> None:
    for number in ("1", "2", "3"):
        workplace.run(f"run-{number}", submitted(number), started(number))
    workplace.command("squeue", "printf '%s|RUNNING|None\n' 1 2 3")
    workplace.command("scancel", "[ $1 != 2 ] || { echo 'not yours' >&2; exit 1; }")
    got = workplace.invoke("cancel", "run-1", "run-2", "run-3")
    assert got.code == 1
    assert "not yours" in got.err
    assert [line.partition(":")[0] for line in got.out.splitlines()] == ["run-1", "run-3"]


def test_scancels_words_reach_the_person_and_the_record_is_taken_back(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"))
    workplace.command("squeue", "echo '1|RUNNING|None'")
    workplace.command("scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    got = workplace.invoke("cancel", "one")
    assert got.code == 1
    assert "Access/permission denied" in got.err
    assert kinds(run)[-2:] == ["cancelled", "cancel_failed"]


@pytest.mark.parametrize("code", [0, 1])
def test_a_full_disk_keeps_no_run_from_being_ended(
    code: int, workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.run("one", submitted("12"), started("12"))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    workplace.command("scancel", f"echo 'scancel: error: no' >&2; exit {code}")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(events, "add", full)
    got = workplace.invoke("cancel", "one")
    assert got.code == code
    assert workplace.calls[-1] == "scancel 12"
    assert "cannot be written (No space left on device)" in got.err
    assert ("scancel: error: no" in got.err) == bool(code)


@pytest.mark.parametrize("successor", ["12", "13"], ids=["requeued", "the next job"])
def test_what_waits_to_go_on_is_cancelled(workplace: Workplace, successor: str) -> None:
    start = {**started("12"), "attempt": 1}
    end = {**ended("12", 75), "attempt": 1, "cause": "signal", "why": ""}
    again = {"event": "requeued", "job_id": "12", "attempt": 1, "why": "signal"}
    if successor == "13":
        again = submitted("13", in_place_of="12", attempt=1, why="signal")
    run = workplace.run("one", submitted("12"), start, end, again)
    workplace.command("squeue", f"echo '{successor}|PENDING|Priority'")
    workplace.command("scancel", "exit 0")
    got = workplace.invoke("cancel", "one")
    assert got.out == f"one: asked Slurm (job {successor}) to end it\n"
    assert workplace.calls[-1] == f"scancel {successor}"
    assert read_events(run)[-1] | {"time": 0} == {
        "event": "cancelled",
        "time": 0,
        "job_id": successor,
    }


def test_a_stopped_run_has_ended(workplace: Workplace) -> None:
    end = {**ended("12", 75), "attempt": 1, "cause": "stopped", "why": "stopped"}
    workplace.run("one", submitted("12"), {**started("12"), "attempt": 1}, end)
    assert workplace.invoke("cancel", "one").out == "one has already ended: stopped\n"
    assert not [call for call in workplace.calls if "scancel" in call]


def test_a_local_run_gets_sigterm(workplace: Workplace) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        job = str(process.pid)
        event = submitted(job, launcher="local", pid=process.pid, time=time.time())
        run = workplace.run("here", event, started(job))
        got = workplace.invoke("cancel", "here")
        assert (got.code, got.out) == (0, f"here: asked pid:{process.pid} to end it\n"), got.err
        assert process.wait(timeout=90) == -signal.SIGTERM
        assert read_events(run)[-1]["event"] == "cancelled"
        assert "already ended: cancelled" in workplace.invoke("cancel", "here").out
    finally:
        process.kill()
        process.communicate()


def test_a_run_of_another_machine_is_not_touched(workplace: Workplace) -> None:
    run = workplace.run("there", submitted("5", launcher="local", pid=1, host="elsewhere"))
    got = workplace.invoke("cancel", "there")
    assert got.code == 2
    assert "runs on elsewhere" in got.err
    assert len(read_events(run)) == 1


def test_no_run_named_is_a_wrong_request(workplace: Workplace) -> None:
    assert workplace.invoke("cancel").code == 2
