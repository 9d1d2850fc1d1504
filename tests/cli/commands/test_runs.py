"""`clusterddp runs`."""

import dataclasses
import fcntl
import json
import math
import os
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from clusterddp import polling
from clusterddp.cli import runs
from tests.cli.made_runs import BOOM, FAILURE, Workplace, ended, started, submitted, workplace

__all__ = ["workplace"]


def test_runs_are_listed_with_the_latest_last(workplace: Workplace) -> None:
    done = workplace.run("first", submitted("1"), started("1"), ended("1", 0), age=90)
    done.report.write_text('{"accuracy": 0.98765, "steps": 1200}')
    workplace.run("second", submitted("2"), started("2"), age=60, nodes=1, gpus_per_node=0)
    workplace.run("third", submitted("3"), age=30)
    workplace.run("fourth")
    workplace.command("squeue", "echo '2|RUNNING|None'; echo '3|PENDING|(Resources)'")
    got = workplace.invoke("runs")
    lines = got.out.splitlines()
    assert lines[0].split() == [
        "NAME", "STATE", "JOBID", "LAYOUT", "AGE", "STEP", "ETA", "TEST-ACC", "REASON",
    ]  # fmt: skip
    assert [line.split()[:4] for line in lines[1:]] == [
        ["first", "done", "1", "2x4"],
        ["second", "running", "2", "1x1"],
        ["third", "queued", "3", "2x4"],
        ["fourth", "created", "-", "2x4"],
    ]
    assert lines[1].split()[4:] == ["1m30s", "1200/1200", "(100%)", "-", "98.77%"]
    assert lines[3].endswith("Resources")
    assert got.code == 0


def test_the_process_of_a_rehearsal_is_no_job(workplace: Workplace) -> None:
    pid = str(os.getpid())
    workplace.run("one", submitted(pid, launcher="local", pid=os.getpid(), time=time.time()))
    [_, row] = workplace.invoke("runs").out.splitlines()
    assert row.split()[:3] == ["one", "queued", f"pid:{pid}"]
    assert f"\njob         pid:{pid} (local)\n" in workplace.invoke("status", "one").out


def test_the_latest_and_those_in_a_state_can_be_asked_for(workplace: Workplace) -> None:
    for number in range(1, 5):
        end = [ended(str(number), number % 2)] if number < 4 else []
        events = submitted(str(number)), started(str(number)), *end
        workplace.run(f"run-{number}", *events, age=100 - number)
    workplace.command("squeue", "echo '4|RUNNING|None'")

    def listed(*options: str) -> list[str]:
        got = workplace.invoke("runs", *options, "--json")
        assert got.code == 0, got.err
        return [status["name"] for status in json.loads(got.out)]

    assert listed("-n", "2") == listed("--last=2") == ["run-3", "run-4"]
    assert listed("--state", "failed") == ["run-1", "run-3"]
    assert listed("--state", "failed", "-n", "1") == ["run-3"]
    assert listed("--state", "done", "--state", "running") == ["run-2", "run-4"]
    assert listed("-n", "9") == [f"run-{number}" for number in range(1, 5)]
    assert workplace.invoke("runs", "-n", "0").code == 2
    assert workplace.invoke("runs", "--state", "dead").code == 2
    got = workplace.invoke("runs", "--state", "stopped")
    assert (got.code, got.out) == (0, "")
    assert "no stopped runs in 'jobs'" in got.err


def test_a_line_is_as_wide_as_the_terminal_and_whole_where_there_is_none(
    workplace: Workplace,
) -> None:
    words = {**FAILURE, "reason": "ValueError: " + "long " * 40}
    end = ended("1", 1, first_failure=words, code="CD1209")
    workplace.run("one", submitted("1"), started("1"), end)
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 82, 0, 0))
    command = [sys.executable, "-m", "clusterddp", "runs"]
    environ = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    subprocess.run(command, cwd=workplace.folder, env=environ, stdout=terminal, check=True)
    os.close(terminal)
    lines = os.read(master, 1 << 16).decode().splitlines()
    os.close(master)
    assert len(lines) == 2
    assert len(lines[1]) == 82
    assert lines[1].endswith("… [CD1209]")
    assert "rank 3 on h02" in lines[1]
    assert len(workplace.invoke("runs").out.splitlines()[1]) > 200


def test_slurm_is_asked_once_for_all_runs(workplace: Workplace) -> None:
    for number in range(5):
        workplace.run(f"run-{number}", submitted(str(number)), started(str(number)))
    workplace.run("over", submitted("9"), started("9"), ended("9", 0))
    workplace.command("squeue", "; ".join(f"echo '{number}|RUNNING|None'" for number in range(5)))
    assert workplace.invoke("runs").out.count("running") == 5
    [call] = workplace.calls
    assert "-j 0,1,2,3,4 " in call


def test_a_thousand_runs_are_one_question(workplace: Workplace) -> None:
    """Requeued ones, ones that went on in another job, and stopped ones among them."""
    for number in range(0, 1000, 4):
        one, other = str(number), str(number + 1)
        end = {**ended(one, 75), "attempt": 1, "cause": "time limit", "why": ""}
        start = {**started(one), "attempt": 1}
        again = {"event": "requeued", "job_id": one, "attempt": 1, "why": "time limit"}
        next_job = submitted(other, in_place_of=one, attempt=1, why="time limit")
        stopped = {**end, "cause": "stopped", "why": "stopped"}
        workplace.run(f"running-{number}", submitted(one), start)
        workplace.run(f"requeued-{number}", submitted(one), start, end, again)
        workplace.run(f"in-place-{number}", submitted(one), start, end, next_job)
        workplace.run(f"stopped-{number}", submitted(one), start, stopped)
    answer = "'%s|RUNNING|None\\n%s|PENDING|Priority\\n'"
    loop = f"n=0; while [ $n -lt 1000 ]; do printf {answer} $n $((n + 1)); n=$((n + 4)); done"
    workplace.command("squeue", loop)
    rows = [line.split() for line in workplace.invoke("runs").out.splitlines()[1:]]
    [call] = workplace.calls
    assert call.startswith("squeue")
    assert len(rows) == 1000
    kinds = {(name.rpartition("-")[0], state) for name, state, *_ in rows}
    assert kinds == {
        ("running", "running"), ("requeued", "running"), ("in-place", "queued"),
        ("stopped", "stopped"),
    }  # fmt: skip
    jobs = {name: job for name, _, job, *_ in rows}
    assert jobs["in-place-8"] == "9"


def test_a_stopped_and_a_waiting_run_say_why(workplace: Workplace) -> None:
    end = {**ended("1", 75), "attempt": 1, "why": ""}
    start = {**started("1"), "attempt": 1}
    workplace.run("a", submitted("1"), start, {**end, "cause": "stopped", "why": "stopped"})
    again = {"event": "requeued", "job_id": "1", "attempt": 1, "why": "time limit"}
    workplace.run("b", submitted("1"), start, {**end, "cause": "time limit"}, again)
    workplace.command("squeue", "echo '1|COMPLETED|None'")
    workplace.command("scontrol", "exit 1")
    workplace.run("c", submitted("1"), start, {**end, "cause": "time limit"}, again, age=300)
    rows = {line.split()[0]: line for line in workplace.invoke("runs").out.splitlines()}
    assert "stopped" in rows["a"]
    assert rows["a"].endswith("by 'clusterddp stop' [CD1204]")
    assert "queued" in rows["b"]
    assert rows["b"].endswith("resumes after the time limit")
    assert rows["c"].endswith(" [CD1219]")  # it is not the time limit that it failed by
    assert "failed" in rows["c"]  # that word should have passed long ago


def test_of_a_command_without_a_loop_nobody_says_that_it_resumes(workplace: Workplace) -> None:
    """It may begin anew; one that has begun a Loop resumes."""
    start = {**started("1"), "attempt": 1}
    end = {**ended("1", 75), "attempt": 1, "cause": "preempted"}
    again = {"event": "requeued", "job_id": "1", "attempt": 1, "why": "preempted"}
    for name in ("plain", "loop"):
        run = workplace.run(name, submitted("1"), start, end, again)
        kind = {"train": None, "command": ("python", "train.py"), "resumable": None}
        run.spec.write_text(dataclasses.replace(run.load_spec(), **kind).to_json())
        (run.attempts / "0001").mkdir(parents=True)
    (workplace.root / "loop/attempts/0001/attempt.json").write_text('{"step": 0}')
    workplace.command("squeue", "echo '1|PENDING|Priority'")
    rows = {line.split()[0]: line for line in workplace.invoke("runs").out.splitlines()}
    assert " starts again after preemption: Priority" in rows["plain"]
    assert " resumes after preemption: Priority" in rows["loop"]


def test_runs_are_listed_without_any_slurm(workplace: Workplace) -> None:
    workplace.run("over", submitted("1"), started("1"), ended("1", 1, first_failure=FAILURE))
    workplace.run("lost", submitted("2"))
    got = workplace.invoke("runs")
    assert got.code == 0
    assert "over  failed   1      2x4" in got.out
    assert BOOM in got.out
    assert "no squeue on PATH" in got.out


def test_json_is_a_list_of_statuses(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("1"), started("1"), ended("1", 0))
    run.metrics.write_text('{"step": 3, "loss": NaN}\n')
    [status] = json.loads(workplace.invoke("runs", "--json").out)
    assert (status["name"], status["state"], status["step"]) == ("one", "done", 3)
    assert status["loss"] is None


def test_no_runs_are_no_error(workplace: Workplace) -> None:
    got = workplace.invoke("runs")
    assert (got.code, got.out, got.err) == (0, "", "no runs in 'jobs'\n")
    got = workplace.invoke("runs", "--runs-dir", "elsewhere")
    assert (got.code, "the directory 'elsewhere' does not exist" in got.err) == (2, True)
    assert workplace.invoke("runs", "--json").out.strip() == "[]"


def test_half_made_runs_are_left_out(workplace: Workplace) -> None:
    workplace.run("one").path.rename(workplace.root / ".one.x7g")
    assert "no runs" in workplace.invoke("runs").err


def test_output_is_plain(workplace: Workplace) -> None:
    workplace.run("one", submitted("1"), started("1"), ended("1", 1))
    assert "\x1b" not in workplace.invoke("runs").out


def test_what_a_rank_has_printed_moves_no_cursor(workplace: Workplace) -> None:
    """A failure's words may come from anybody's code, with escape codes in them."""
    failure = {**FAILURE, "reason": "ValueError: \x1b[2Jboom\nand\x07 more"}
    workplace.run("a", submitted("3"), started("3"), ended("3", 1, first_failure=failure))
    for command in ("runs", "status"):
        got = workplace.invoke(command)
        assert "\\x1b[2Jboom" in got.out
        assert not {"\x1b", "\x07"} & set(got.out)


def test_json_knows_no_nan_however_deep_it_lies(capsys: pytest.CaptureFixture[str]) -> None:
    runs.echo_json({"each": (1.0, math.nan), "all": [{"loss": math.inf}]})
    assert json.loads(capsys.readouterr().out) == {"each": [1.0, None], "all": [{"loss": None}]}


def test_a_watch_is_one_squeue_a_look_and_ends_with_130(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than in a terminal the list is printed again where it has changed."""
    workplace.run("done", submitted("1"), started("1"), ended("1", 0), age=60)
    workplace.run("gone", submitted("2"), started("2"), ended("2", 1), age=40)
    workplace.run("one", submitted("3"), started("3"), age=20)
    workplace.command("scontrol", "echo ' JobState=FAILED ExitCode=1:0 '")
    workplace.command("sacct", "exit 1")
    looks: list[float] = []

    def pass_by(seconds: float) -> None:
        looks.append(seconds)
        state = {1: "RUNNING", 2: "RUNNING", 3: "COMPLETING", 4: "COMPLETING"}.get(len(looks))
        if state is None:
            raise KeyboardInterrupt
        workplace.command("squeue", f"echo '2|FAILED|None'; echo '3|{state}|None'")

    workplace.command("squeue", "echo '2|FAILED|None'; echo '3|PENDING|Priority'")
    monkeypatch.setattr(polling, "pause", pass_by)
    got = workplace.invoke("runs", "--watch", "30s")
    assert (got.code, looks) == (130, [30.0] * 5)
    assert got.out.count("NAME") == 3
    calls = [call.split()[0] for call in workplace.calls]
    assert calls.count("squeue") == len(looks)
    assert calls.count("scontrol") == 1
    assert calls.count("sacct") == 0
    refused = workplace.invoke("runs", "--watch", "--json")
    assert (refused.code, "--watch conflicts with --json" in refused.err) == (2, True)
    assert workplace.invoke("runs", "--watch", "0.1s").code == 2


def test_a_watch_draws_in_place_in_a_terminal(workplace: Workplace) -> None:
    for number in range(30):
        workplace.run(f"run-{number:02d}", submitted(str(number)), age=100 - number)
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 60, 0, 0))
    command = [sys.executable, "-m", "clusterddp", "runs", "--watch", "1h"]
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        command, cwd=workplace.folder, env=environ, stdout=terminal, stderr=subprocess.PIPE
    ) as process:
        os.close(terminal)
        drawn = b""
        while b"\x1b[J" not in drawn:
            drawn += os.read(master, 1 << 16)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=90)
    os.close(master)
    assert process.returncode == 130
    screen = drawn.decode().removeprefix("\x1b[H").partition("\x1b[J")[0]
    lines = [line.rstrip("\r").removesuffix("\x1b[K") for line in screen.split("\n")]
    assert len(lines) == 10
    assert lines[1].startswith("NAME")
    assert lines[-1].startswith("run-29")
    assert max(map(len, lines)) <= 60


def test_a_job_that_is_held_or_waits_for_another_has_no_start(workplace: Workplace) -> None:
    """Slurm can still show an estimate that it made before, or shows the earliest time for one."""
    then = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    reasons = ("JobHeldUser", "JobHeldAdmin", "Dependency", "BeginTime", "Priority")
    for number, reason in enumerate(reasons, 1):
        workplace.run(reason, submitted(str(number)))
    waits = {"event": "waits", "job_id": "6", "runs": ["a"], "why": "a (failed)", "held": True}
    workplace.run("waits", submitted("6"), waits)
    rows = [f"{n} {n} {then}|PENDING|{reason}|" for n, reason in enumerate([*reasons, ""], 1)]
    workplace.command("squeue", "".join(f"echo '{row}';" for row in rows))
    listed = json.loads(workplace.invoke("runs", "--json").out)
    assert [each["name"] for each in listed if each["expected_start"]] == ["Priority"]
    assert "estimate" not in workplace.invoke("status", "JobHeldUser").out
    earliest = f"BeginTime: not before {then.replace('T', ' ')}"
    assert earliest in workplace.invoke("status", "BeginTime").out


def test_what_lies_ahead_is_shown(workplace: Workplace) -> None:
    workplace.run("waits", submitted("3"), age=60)
    workplace.run("held", submitted("4"), age=50)
    run = workplace.run("trains", submitted("5"), started("5"), age=40)
    attempt = run.attempts / "0001"
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_text('{"began": 1.0, "step": 0}')
    (attempt / "alive").write_text('{"step": 50, "planned": 200}')
    lines = [{"kind": "train", "step": n, "time": 10.0 + n, "loss": 0.5} for n in (10, 20, 50)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    then = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    rows = f"3 3 {then}|PENDING|Resources|", "4 4 N/A|PENDING|JobHeldUser|", "5 5 |RUNNING|None|"
    workplace.command("squeue", "".join(f"echo '{row}';" for row in rows))
    waits, held, trains = json.loads(workplace.invoke("runs", "--json").out)
    assert abs(waits["expected_start"] - time.time() - 3600) < 60
    assert (held["expected_start"], trains["expected_start"]) == (None, None)
    assert [trains[name] for name in ("step", "steps_planned", "percent_done", "seconds_left")] == [
        50, 200, 25.0, 150.0,
    ]  # fmt: skip
    listed = workplace.invoke("runs").out.splitlines()
    assert " 50/200 (25%)  2m30s " in listed[3]
    assert any(left in listed[1] for left in (" 59m", " 1h00m"))
    said = workplace.invoke("status", "trains").out
    assert "step 50 of 200 (25%), about 2m30s left, training loss 0.5000" in said
    assert "by Slurm's estimate" in workplace.invoke("status", "waits").out
    assert "estimate" not in workplace.invoke("status", "held").out
