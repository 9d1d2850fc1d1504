"""`clusterddp stop`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp import polling
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.run.attempt import Attempt, begin, latest, publish
from clusterddp.run.records import AttemptRecord
from clusterddp.run.run_dir import RunDir
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace
from tests.event_lines import add_event, kinds

__all__ = ["workplace"]

RUNS = "echo '12|RUNNING|None'"
WAITS = "echo '12|PENDING|BeginTime'"


def training(workplace: Workplace, name: str = "one", job_id: str = "12", **fields: Any) -> RunDir:
    """A run whose first attempt is at work."""
    run = workplace.run(name, submitted(job_id, **fields), {**started(job_id), "attempt": 1})
    Attempt(run, 1).path.mkdir(parents=True)
    run.script.write_text("#!/bin/bash\n")
    return run


def of_a_command(run: RunDir) -> RunDir:
    spec = JobSpec(
        run_name=run.name, run_dir=str(run.path), resources=Resources(), python="python",
        command=("python", "train.py"),
    )  # fmt: skip
    run.spec.write_text(spec.to_json())
    return run


def test_the_attempt_at_work_gets_a_mark_and_no_signal(workplace: Workplace) -> None:
    run = training(workplace)
    workplace.command("squeue", RUNS)
    workplace.command("scancel", "exit 0")
    got = workplace.invoke("stop", "one")
    assert got.code == 0, got.err
    assert got.out == (
        "one: asked attempt 1 to save a checkpoint and exit\n  resume with: clusterddp resume one\n"
    )
    assert Attempt(run, 1).stop_reason() == "stop"
    assert kinds(run)[-1] == "stop_requested"
    assert not [call for call in workplace.calls if "scancel" in call]
    assert "asked to save a checkpoint and exit" in workplace.invoke("status", "one").out


def test_a_run_that_hangs_may_not_leave(workplace: Workplace) -> None:
    hung = Attempt(training(workplace), 1).outcomes / "hung.json"
    hung.parent.mkdir()
    hung.write_text('{"ranks": [1], "reason": "in the forward pass"}')
    workplace.command("squeue", RUNS)
    assert "if it does not exit, use 'clusterddp cancel one'" in workplace.invoke("stop", "one").out


def test_a_run_that_does_not_leave_says_what_to_do_after_a_minute(workplace: Workplace) -> None:
    """As one whose handler of USR1 waits for the other ranks in a barrier."""
    asked = {"event": "stop_requested", "job_id": "1"}
    workplace.run("one", submitted("1"), started("1"), asked, age=75)
    workplace.run("two", submitted("2"), started("2"), {**asked, "job_id": "2"}, age=20)
    workplace.command("squeue", "echo '1|RUNNING|None'; echo '2|RUNNING|None'")
    shown = workplace.invoke("status", "one").out
    assert "exit more than a minute ago, but still running. See where" in shown
    assert "with 'clusterddp stacks one', or end it now with 'clusterddp cancel one'" in shown
    assert "next        clusterddp stacks one\n" in shown
    shown = workplace.invoke("status", "two").out
    assert "still running" not in shown and "next        clusterddp logs -f two\n" in shown


def test_the_latest_attempt_is_asked(workplace: Workplace) -> None:
    run = training(workplace)
    Attempt(run, 1).end.write_text("{}")
    add_event(run, "started", job_id="12", attempt=2, restart=1)
    Attempt(run, 2).path.mkdir()
    workplace.command("squeue", RUNS)
    workplace.invoke("stop", "one")
    assert Attempt(run, 1).stop_reason() is None
    assert Attempt(run, 2).stop_reason() == "stop"


def test_the_record_comes_before_the_look_for_the_attempt(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an attempt that begins meanwhile sees the record, or is seen."""
    run = training(workplace)
    workplace.command("squeue", RUNS)
    seen = []

    def look(one: RunDir) -> Attempt | None:
        seen.append(kinds(one)[-1])
        return latest(one)

    monkeypatch.setattr("clusterddp.status.stop.latest", look)
    workplace.invoke("stop", "one")
    assert seen == ["stop_requested"]
    assert Attempt(run, 1).stop_reason() == "stop"


def test_between_two_attempts_the_record_is_enough(workplace: Workplace) -> None:
    run = training(workplace)
    Attempt(run, 1).end.write_text('{"cause": "stopped", "reason": "signal"}')
    workplace.command("squeue", RUNS)
    assert "no attempt is running, and none will start" in workplace.invoke("stop", "one").out
    assert kinds(run)[-1] == "stop_requested"
    assert Attempt(run, 1).stop_reason() is None


def test_a_command_gets_usr1_through_its_script(workplace: Workplace) -> None:
    run = of_a_command(training(workplace))
    workplace.command("squeue", RUNS)
    # Recorded before, and not narrowed by this shell's own settings.
    workplace.command(
        "scancel", f'[ -z "$SCANCEL_STATE" ] && /bin/grep -q stop_requested {run.events}'
    )
    workplace.monkeypatch.setenv("SCANCEL_STATE", "PENDING")
    got = workplace.invoke("stop", "one")
    assert got.code == 0, got.err
    assert workplace.calls[-1] == "scancel --batch --signal=USR1 12"
    assert "sent SIGUSR1 to its command" in got.out
    assert Attempt(run, 1).stop_reason() == "stop"  # so that `finish` knows too


@pytest.mark.parametrize(
    "body",
    ["echo 'scancel: error: Access/permission denied' >&2; exit 1",
     "echo 'scancel: error: Job is pending: invalid' >&2; exit 0"],
)  # fmt: skip
def test_scancels_words_reach_the_person_and_the_record_is_taken_back(
    workplace: Workplace, body: str
) -> None:
    run = of_a_command(training(workplace))
    workplace.command("squeue", RUNS)
    workplace.command("scancel", body)
    got = workplace.invoke("stop", "one")
    assert got.code == 1
    assert "scancel: error" in got.err
    assert kinds(run)[-2:] == ["stop_requested", "stop_failed"]


def test_a_signal_that_has_ended_the_job_has_reached_it(workplace: Workplace) -> None:
    """Scancel waits some seconds for the script, which is gone, and fails without a word."""
    run = of_a_command(training(workplace))
    workplace.command("squeue", RUNS)
    end = json.dumps(ended("12", 75, cause="stopped", why="stopped", attempt=1))
    workplace.command("scancel", f"echo '{end}' >>{run.events}; exit 229")
    got = workplace.invoke("stop", "one")
    assert (got.code, got.err) == (0, "")
    assert "sent SIGUSR1 to its command" in got.out
    assert kinds(run)[-2:] == ["stop_requested", "ended"]


def test_a_command_of_slurm_that_fails_in_silence_is_explained(workplace: Workplace) -> None:
    run = of_a_command(training(workplace))
    workplace.command("squeue", RUNS)
    workplace.command("scancel", "exit 229")
    got = workplace.invoke("stop", "one")
    assert got.code == 1
    assert "exit code 229 without a message; the job may have ended" in got.err
    assert kinds(run)[-1] == "stop_failed"


def test_a_command_without_a_loop_is_told_to_handle_the_signal(workplace: Workplace) -> None:
    run = of_a_command(training(workplace))
    workplace.command("squeue", RUNS)
    workplace.command("scancel", "exit 0")
    assert "without a handler for it, the command fails" in workplace.invoke("stop", "one").out
    publish(Attempt(run, 1), AttemptRecord())
    assert "without a handler" not in workplace.invoke("stop", "one").out


def test_a_run_in_the_queue_is_cancelled_instead(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"))
    workplace.command("squeue", WAITS)
    workplace.command("scancel", "exit 0")
    got = workplace.invoke("stop", "one")
    assert got.out == ("one had not started: cancelled\n  resume with: clusterddp resume one\n")
    assert workplace.calls[-1] == "scancel 12"
    assert kinds(run)[-1] == "cancelled"


def test_an_element_of_an_array_is_gone_on_with_by_sbatch(workplace: Workplace) -> None:
    run = training(workplace)
    element = RunDir(run.path.rename(run.path.with_name("one-3")))
    workplace.command("squeue", RUNS)
    got = workplace.invoke("stop", "one-3")
    assert got.out.endswith(f"\n  resume with: sbatch --array=3 {element.script.absolute()}\n")


def test_waiting_for_one_that_is_cancelled_in_the_queue_tells_its_end(workplace: Workplace) -> None:
    workplace.run("one", submitted("12"))
    gone = workplace.folder / "gone"
    workplace.command(
        "squeue", f"if [ -e {gone} ]; then echo '12|CANCELLED|None'; else {WAITS}; fi"
    )
    workplace.command("scancel", f": >{gone}")
    got = workplace.invoke("stop", "--wait", "one")
    assert got.code == 0
    told = "clusterddp: one: cancelled: before it started [CD1203]\n  clusterddp resume one\n"
    assert got.err == told


def test_so_is_one_that_waits_to_be_requeued(workplace: Workplace) -> None:
    run = training(workplace)
    add_event(run, "ended", job_id="12", attempt=1, exit_code=75, cause="time limit", why="")
    add_event(run, "requeued", job_id="12", attempt=1, why="time limit")
    workplace.command("squeue", "echo '12|COMPLETING|None'")
    workplace.command("scancel", "exit 0")
    [result] = json.loads(workplace.invoke("stop", "one", "--json").out)
    assert (result["requested"], result["cancelled"], result["job_id"]) == (False, True, "12")
    assert workplace.calls[-1] == "scancel 12"


def test_and_the_job_that_takes_its_place(workplace: Workplace) -> None:
    run = training(workplace)
    add_event(run, "ended", job_id="12", attempt=1, exit_code=75, cause="signal", why="")
    add_event(run, "submitted", job_id="13", in_place_of="12", attempt=1, why="signal")
    workplace.command("squeue", "echo '13|PENDING|Priority'")
    workplace.command("scancel", "exit 0")
    workplace.invoke("stop", "one")
    assert workplace.calls[-1] == "scancel 13"
    workplace.command("squeue", "echo '13|CANCELLED|None'")
    assert "state       cancelled: before it started" in workplace.invoke("status").out


@pytest.mark.parametrize("events", [[], [submitted("12"), started("12"), ended("12", 0)]])
def test_there_is_nothing_to_stop_in_a_run_that_does_not_run(
    workplace: Workplace, events: list[dict[str, Any]]
) -> None:
    run = workplace.run("one", *events)
    got = workplace.invoke("stop", "one")
    assert got.code == 0
    assert ("never submitted" in got.out) or ("has already ended: done" in got.out)
    assert kinds(run) == [event["event"] for event in events]
    assert "resume" not in got.out


def test_the_mark_needs_no_slurm(workplace: Workplace) -> None:
    run = training(workplace)
    got = workplace.invoke("stop", "one")
    assert got.code == 0
    assert "asked attempt 1 to save a checkpoint and exit (Slurm cannot be queried" in got.out
    assert Attempt(run, 1).stop_reason() == "stop"


def test_several_runs_are_asked_and_a_repeated_one_once(workplace: Workplace) -> None:
    for number, name in ((1, "a"), (2, "b")):
        training(workplace, name, str(number))
    workplace.command("squeue", "echo '1|RUNNING|None'; echo '2|RUNNING|None'")
    got = workplace.invoke("stop", "a", "b", "1", "--json")
    assert [(r["name"], r["requested"]) for r in json.loads(got.out)] == [("a", True), ("b", True)]
    assert len([call for call in workplace.calls if call.startswith("squeue")]) == 1


@pytest.mark.parametrize("names", [["one", "tow"], ["tow", "one", "--json"]])
def test_the_others_are_asked_where_one_name_is_wrong(
    workplace: Workplace, names: list[str]
) -> None:
    run = training(workplace)
    workplace.command("squeue", RUNS)
    got = workplace.invoke("stop", *names)
    assert (got.code, "no run 'tow'" in got.err) == (2, True)
    assert '"requested": true' in got.out or "one: asked attempt 1" in got.out
    assert kinds(run)[-1] == "stop_requested"


def test_the_others_are_asked_and_waited_for_if_scancel_refuses_one(workplace: Workplace) -> None:
    for number in ("1", "2", "3"):
        of_a_command(workplace.run(f"run-{number}", submitted(number), started(number)))
    gone = workplace.folder / "gone"
    workplace.command(
        "squeue", f"[ -e {gone} ] && word=CANCELLED; printf '%s|'${{word-RUNNING}}'|None\n' 1 2 3"
    )
    refuse = "case $* in *2) echo 'not yours' >&2; exit 1;; esac"
    workplace.command("scancel", f"{refuse}; case $* in *3) : >{gone};; esac")
    got = workplace.invoke("stop", "--wait", "run-1", "run-2", "run-3")
    assert got.code == 1
    assert "not yours" in got.err
    assert [line.partition(":")[0] for line in got.out.splitlines()][::2] == ["run-1", "run-3"]
    assert "run-2: " not in got.err


def test_a_directory_that_is_gone_or_full_says_what_to_do(workplace: Workplace) -> None:
    run = training(workplace)
    Attempt(run, 1).stop.mkdir()  # stands in the mark's way
    (Attempt(run, 1).stop / "x").touch()
    workplace.command("squeue", RUNS)
    got = workplace.invoke("stop", "one")
    assert got.code == 2
    assert "cannot be written" in got.err
    assert "clusterddp cancel one" in got.err
    assert kinds(run)[-1] == "stop_failed"


# -- on this workstation -----------------------------------------------------------------------


def local(workplace: Workplace, **fields: Any) -> RunDir:
    return training(
        workplace, "here", "5", launcher="local", pid=os.getpid(), time=time.time(), **fields
    )


@pytest.mark.parametrize("of", ["the training", "a command's loop"])
def test_a_rehearsal_gets_the_mark_alone(of: str, workplace: Workplace) -> None:
    run = local(workplace)
    if of != "the training":
        of_a_command(run)
        Attempt(run, 1).record.write_text("{}")
    assert "asked attempt 1 to save a checkpoint and exit" in workplace.invoke("stop", "here").out
    assert Attempt(run, 1).stop_reason() == "stop"
    assert workplace.calls == []


def test_a_debug_run_without_an_attempt_is_asked_again_later(workplace: Workplace) -> None:
    run = local(workplace)
    run.script.unlink()
    Attempt(run, 1).path.rmdir()
    got = workplace.invoke("stop", "here")
    assert got.code == 2
    assert "still starting" in got.err
    assert kinds(run)[-2:] == ["stop_requested", "stop_failed"]


def test_the_command_of_a_rehearsal_cannot_be_asked_and_is_told_so(workplace: Workplace) -> None:
    of_a_command(local(workplace))
    got = workplace.invoke("stop", "here")
    assert "has not started a Loop. A Loop that starts later saves and exits" in got.out
    assert workplace.calls == []


# -- waiting -----------------------------------------------------------------------------------


def test_wait_returns_when_the_run_has_left(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "FOLLOW_FILES_POLL_SECONDS", 0.01)
    monkeypatch.setattr(polling, "FOLLOW_SLURM_POLL_SECONDS", (0.01, 0.02))
    run = training(workplace)
    line = {**ended("12", 75), "attempt": 1, "cause": "stopped", "why": "stopped", "step": 40}
    workplace.command("squeue", RUNS)
    workplace.monkeypatch.setattr(time, "sleep", lambda _: _leave(run, line, workplace))
    got = workplace.invoke("stop", "one", "--wait")
    assert got.code == 0
    assert "one: stopped: by 'clusterddp stop' at step 40" in got.err


def _leave(run: RunDir, line: dict[str, Any], workplace: Workplace) -> None:
    if kinds(run)[-1] == "stop_requested":
        add_event(run, **line)
        workplace.command("squeue", "echo '12|FAILED|None'")


def test_ctrl_c_ends_the_waiting_and_not_the_request(workplace: Workplace) -> None:
    run = local(workplace)
    process = subprocess.Popen(
        [sys.executable, "-m", "clusterddp", "stop", "here", "--wait"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        while "running" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=90) == 130
    finally:
        process.kill()
        process.communicate()
    assert Attempt(run, 1).stop_reason() == "stop"


def test_a_hostile_folder_is_carried(workplace: Workplace) -> None:
    training(workplace)
    root = workplace.root.rename(workplace.folder / "it's $(touch pwned); x")
    workplace.command("squeue", RUNS)
    assert workplace.invoke("stop", "one", "--runs-dir", str(root)).code == 0
    assert Attempt(RunDir(root / "one"), 1).stop_reason() == "stop"
    assert not list(Path(workplace.folder).rglob("pwned"))


def test_ranks_that_a_person_started_are_asked_to_leave_and_are_not_cancelled(
    workplace: Workplace,
) -> None:
    attempt = begin(workplace.run("one"))
    publish(attempt, AttemptRecord(job_id="78", restart=0, host="h1", pid=1))
    got = workplace.invoke("cancel", "78")
    assert "one: its ranks were started by hand" in got.out
    assert not workplace.calls
    assert attempt.stop_reason() is None
    got = workplace.invoke("stop", "78")
    assert (got.code, got.out) == (0, "one: asked attempt 1 to save a checkpoint and exit\n")
    assert attempt.stop_reason() == "stop"
    end = {"cause": "stopped", "reason": "stop", "step": 7, "saved": 7}
    attempt.end.write_text(json.dumps(end))
    got = workplace.invoke("stop", "--wait", "78")
    assert got.code == 0
    assert "one: stopped: its ranks were started by hand and saved at step 7" in got.err
