"""`clusterddp status`, and how a RUN is found by every command that takes one."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from clusterddp import formatting
from clusterddp.explained import catalogue
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.checkpoints.made_checkpoints import attempt
from tests.cli.made_runs import BOOM, FAILURE, Workplace, ended, started, submitted, workplace
from tests.event_lines import add_event

__all__ = ["workplace"]


def test_status_tells_all_that_is_known(workplace: Workplace) -> None:
    run = workplace.run("mnist-1", submitted("12"), started("12"), age=7531)
    records = [
        {"kind": "eval", "step": 30, "epoch": 1, "loss": 0.5, "accuracy": 0.9},
        {"kind": "train", "step": 40, "epoch": 1, "loss": 0.25, "accuracy": 0.8},
    ]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in records))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    got = workplace.invoke("status", "mnist-1")
    lines = dict(line.split(maxsplit=1) for line in got.out.splitlines())
    assert got.code == 0
    assert lines["state"] == "running"
    assert lines["job"] == "12 (sbatch)"
    assert lines["requested"] == "2 nodes x 4 tasks = 8 ranks"
    assert lines["nodes"] == "h01 h02"
    assert lines["progress"] == "step 40, epoch 1, training loss 0.2500, test accuracy 90.00%"
    assert "running for 2h05m" in lines["started"]
    assert lines["next"] == "clusterddp logs -f mnist-1"


def test_a_failed_run_is_told_with_exit_code_0(workplace: Workplace) -> None:
    workplace.run("bad", submitted("1"), started("1"), ended("1", 1, first_failure=FAILURE))
    got = workplace.invoke("status")
    assert got.code == 0
    assert f"state       failed: exit code 1\nfailure     {BOOM}\n" in got.out
    assert "next        clusterddp logs --rank 3 bad" in got.out
    assert "exit code  " not in got.out


def test_the_exit_code_is_a_row_where_only_the_failure_names_it(workplace: Workplace) -> None:
    end = ended("1", 3, first_failure={**FAILURE, "reason": "exit code 3", "exit_code": 3})
    workplace.run("bad", submitted("1"), started("1"), end)
    assert "exit code   3\n" in workplace.invoke("status").out


@pytest.mark.parametrize(("reached", "of_step"), [(40, ""), (1021, " at step 40")])
def test_the_loss_has_its_step_if_the_run_is_further(
    workplace: Workplace, reached: int, of_step: str
) -> None:
    run = workplace.run("one", submitted("12"), started("12"))
    run.metrics.write_text('{"kind": "train", "step": 40, "loss": 0.25}\n')
    attempt = Attempt(run, 1)
    attempt.path.mkdir(parents=True)
    attempt.renew_liveness(reached, None)
    workplace.command("squeue", "echo '12|RUNNING|None'")
    progress = f"progress    step {reached}, training loss 0.2500{of_step}\n"
    assert progress in workplace.invoke("status").out


def test_of_several_runs_each_line_ends_with_the_code(workplace: Workplace) -> None:
    end = ended("1", 1, first_failure=FAILURE, code="CD1209")
    workplace.run("lr-0", submitted("1"), started("1"), end)
    workplace.run("lr-1", submitted("2"), started("2"), ended("2", 0))
    _, failed, done = workplace.invoke("status", "lr-*").out.splitlines()
    assert failed.endswith(f"{BOOM} [CD1209]")
    assert "[" not in done


def test_where_relative_output_lies_is_said_for_code_of_ones_own(workplace: Workplace) -> None:
    run = workplace.run("own", submitted("12", folder="/home/me/x"), started("12"))
    assert json.loads(workplace.invoke("status", "--json").out)["working_directory"] == ""
    assert "workdir" not in workplace.invoke("status").out
    spec = dataclasses.replace(run.load_spec(), train=None, command=("python", "train.py"))
    run.spec.write_text(spec.to_json())
    said = workplace.invoke("status").out
    assert "workdir     /home/me/x; relative output is there\n" in said
    run.code.mkdir()
    said = workplace.invoke("status").out
    assert f"workdir     {run.code}; relative output is there\n" in said
    inside = dataclasses.replace(spec, container_image="docker://x", container_workdir="/w")
    run.spec.write_text(inside.to_json())
    assert "workdir     /w in the container; relative output" in workplace.invoke("status").out


def attempts(run: RunDir, *ends: dict[str, Any]) -> None:
    """Starts of job 12, each but the last with how it ended; empty for one that left no end."""
    for number, end in enumerate(ends, 1):
        add_event(run, "started", job_id="12", restart=number - 1, attempt=number, nodelist="h01")
        if end:
            fields = {"exit_code": 75, "why": "", "step": 40 * number, **end}
            add_event(run, "ended", job_id="12", restart=number - 1, attempt=number, **fields)


def test_requeues_are_told_with_their_reasons(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"))
    attempts(run, {"cause": "time limit"}, {}, {})
    folder = Attempt(run, 3).checkpoints
    folder.mkdir(parents=True)
    run.checkpoints.symlink_to("attempts/0003/checkpoints")
    newest = folder / "step-00001200.pt"
    newest.touch()
    (folder / "step-00000900.pt").touch()
    then = time.time() - 185
    os.utime(newest, (then, then))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    lines = dict(line.split(maxsplit=1) for line in workplace.invoke("status").out.splitlines())
    assert lines["attempt"] == "3 (2 restarts: time limit, killed by a requeue or node failure)"
    assert lines["checkpoint"] == "step 1200, 3m05s ago"
    assert lines["job"] == "12 (sbatch)"
    status = json.loads(workplace.invoke("status", "--json").out)
    assert (status["attempt"], status["restarts"]) == (3, 2)
    assert status["restart_reasons"] == ["time limit", "killed by a requeue or node failure"]
    assert (status["checkpoint_step"], status["checkpoint_time"]) == (1200, pytest.approx(then))


def test_of_many_requeues_the_latest_reasons_are_told(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"))
    attempts(run, *[{"cause": "time limit"}] * 3, *[{"cause": "preempted"}] * 5, {})
    workplace.command("squeue", "echo '12|RUNNING|None'")
    out = workplace.invoke("status").out
    five = ", ".join(["preempted"] * 5)
    assert f"\nattempt     9 (8 restarts: …, {five})\n" in out


def test_a_first_attempt_needs_no_line(workplace: Workplace) -> None:
    attempts(workplace.run("one", submitted("12")), {})
    workplace.command("squeue", "echo '12|RUNNING|None'")
    assert "attempt" not in workplace.invoke("status").out


def test_a_silent_run_says_since_when_and_which_rank_differs(workplace: Workplace) -> None:
    """Until one prints again; the job's log is the script's."""
    run = workplace.run("one", submitted("7"), started("7"))
    attempt = Attempt(run, 1)
    attempt.outcomes.mkdir(parents=True)
    run.rank_log(0).write_text("step 1\n")
    run.job_log.write_text("where they are\n")
    where = {
        "since": 1.0,
        "output_bytes": 7,
        "ranks": [1],
        "places": "sleep (a.py:3), most are in b",
    }
    attempt.stalled.write_text(json.dumps(where))
    workplace.command("squeue", "echo '7|RUNNING|None'")
    silent = f"no rank has printed anything since {formatting.moment(1.0)}; rank 1 is in sleep"
    for shown in (workplace.invoke("status", "one").out, workplace.invoke("runs").out):
        assert f"{silent} (a.py:3), most are in b; the job's log has their stacks" in shown
    run.rank_log(0).write_text("step 1\nstep 2\n")
    assert "state       running\n" in workplace.invoke("status", "one").out
    hung = {"ranks": [2], "reason": "hangs in all_reduce"}
    (attempt.outcomes / "hung.json").write_text(json.dumps(hung))
    assert "state       running: rank 2: hangs in all_reduce\n" in workplace.invoke("status").out


def test_a_script_that_slurm_could_not_start_has_no_log_and_no_exit_code(
    workplace: Workplace,
) -> None:
    """Slurm gives 0:53, which is no signal of anybody's."""
    workplace.run("one", submitted("7"))
    job = "JobId=7 JobState=FAILED Reason=JobLaunchFailure Restarts=0 ExitCode=0:53"
    workplace.command("squeue", "echo '7|FAILED|JobLaunchFailure'")
    workplace.command("scontrol", f"echo '{job}'")
    status = json.loads(workplace.invoke("status", "one", "--json").out)
    assert (status["state"], status["exit_code"], status["code"]) == ("failed", None, "CD1218")
    assert status["detail"] == "Slurm could not start its script on the node (JobLaunchFailure)"
    assert status["next_command"] == "scontrol show job 7"
    assert "JobLaunchFailure" in catalogue()["CD1218"].text


def test_a_stopped_run_says_why_and_how_to_go_on(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"))
    attempts(run, {"cause": "time limit", "why": "it has been started once (--max-requeues 0)"})
    got = workplace.invoke("status")
    assert got.code == 0
    why = "time limit at step 40; it has been started once (--max-requeues 0)"
    assert f"state       stopped: {why}\n" in got.out
    assert "next        clusterddp resume one\n" in got.out
    status = json.loads(workplace.invoke("status", "--json").out)
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert status["ended_time"] is not None


def test_json_holds_the_same(workplace: Workplace) -> None:
    workplace.run("bad", submitted("1"), started("1"), ended("1", 3, first_failure=FAILURE))
    status = json.loads(workplace.invoke("status", "--json").out)
    assert (status["state"], status["exit_code"], status["first_failure"]) == ("failed", 3, BOOM)


def test_a_job_that_slurm_has_forgotten_is_unknown(workplace: Workplace) -> None:
    workplace.run("lost", submitted("1"), started("1"))
    workplace.command("squeue", "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1")
    workplace.command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    got = workplace.invoke("status")
    assert got.code == 0
    assert "state       unknown: Slurm no longer knows the job" in got.out


def test_where_slurm_does_not_answer_no_second_start_is_proposed(workplace: Workplace) -> None:
    attempt(workplace.run("alive", submitted("1"), {**started("1"), "attempt": 1}), 1, 40)
    workplace.command("squeue", "echo 'error: Unable to contact slurm controller' >&2; exit 1")
    got = workplace.invoke("status", "alive")
    assert "state       unknown: Slurm cannot be queried" in got.out
    assert "next        clusterddp logs -f alive\n" in got.out


@pytest.mark.parametrize("text", ["one", "71", "jobs/one", "./jobs/one/", None])
def test_a_run_is_found_by_name_job_id_or_directory(workplace: Workplace, text: str | None) -> None:
    workplace.run("zero", submitted("70"), started("70"), ended("70", 0), age=50)
    workplace.run("one", submitted("71"), started("71"), ended("71", 0))
    got = workplace.invoke("status", *([text] if text else []))
    assert got.out.startswith("run         one\n"), got.err


def test_a_run_that_cannot_be_looked_into_hides_no_other(workplace: Workplace) -> None:
    broken = workplace.run("broken", age=50)
    broken.events.unlink()
    broken.attempts.write_text("")  # no directory
    workplace.run("one", submitted("71"), started("71"), ended("71", 0))
    got = workplace.invoke("status", "71")
    assert got.out.startswith("run         one\n"), got.err


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("mnits-a", "Did you mean mnist-a"),
        ("nist", "Did you mean mnist-"),
        ("xyz", "The latest are mnist-a, mnist-b"),
        ("9999", "no run '9999'"),
        ("", "no run ''"),
        ("..", "no run '..'"),
        ("here", "For the run in the directory of that name, type './here'"),
    ],
)
def test_an_unknown_run_is_met_with_the_nearest_names(
    workplace: Workplace, text: str, hint: str
) -> None:
    workplace.run("mnist-a", age=5)
    workplace.run("mnist-b")
    (workplace.folder / "here").mkdir()
    (workplace.folder / "here/spec.json").touch()
    got = workplace.invoke("status", text)
    assert got.code == 2
    assert hint in got.err
    assert got.out == ""


def test_a_job_id_of_several_runs_is_not_guessed(workplace: Workplace) -> None:
    # Seen: a slurmctld killed soon after a submission issues the same id a second time.
    workplace.run("a", submitted("5"), age=5)
    workplace.run("b", submitted("5"))
    got = workplace.invoke("status", "5")
    assert got.code == 2
    assert "belongs to several runs: a, b" in got.err


def test_an_element_of_an_array_is_found_by_the_name_squeue_shows(workplace: Workplace) -> None:
    # The last element has the array's own number as its job id.
    for index, job_id in enumerate(("12", "13", "11")):
        start = {**started(job_id), "array_task": f"11_{index}"}
        workplace.run(f"arr-{index}", start, ended(job_id, 0))
        got = workplace.invoke("status", f"11_{index}")
        assert got.out.startswith(f"run         arr-{index}\n"), got.err
        assert f"\njob         11_{index} (sbatch)\n" in got.out
        assert f"  11_{index}  " in workplace.invoke("runs", "-n1").out
    assert workplace.invoke("status", "12").out.startswith("run         arr-0\n")
    got = workplace.invoke("cancel", "11")
    assert got.code == 2
    assert "the job id 11 belongs to several runs: arr-0, arr-1, arr-2" in got.err


def test_no_run_at_all_says_how_to_start_one(workplace: Workplace) -> None:
    got = workplace.invoke("status")
    assert got.code == 2
    assert "clusterddp submit" in got.err
    assert "--runs-dir" in got.err


def test_another_runs_dir_stands_in_the_next_command(workplace: Workplace) -> None:
    workplace.run("one", submitted("1"), started("1"), ended("1", 0))
    workplace.root.rename(workplace.folder / "my runs")
    got = workplace.invoke("status", "--runs-dir", "my runs")
    assert "next        clusterddp logs 'my runs/one'" in got.out
    assert workplace.invoke("status", "my runs/one").code == 0
    workplace.monkeypatch.setenv("CLUSTERDDP_RUNS_DIR", "my runs")
    assert "next        clusterddp logs one\n" in workplace.invoke("status").out


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys\n"
        "from clusterddp.cli import main\n"
        "for name, _ in main.COMMANDS.items():\n"
        "    if name not in ('checkpoints', 'data', 'compare', 'report'):\n"
        "        main.cli.get_command(None, name)\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'jinja2', 'submitit', 'tqdm'}\n"
        "sys.exit(repr(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (got.returncode, got.stderr) == (0, "")


@pytest.fixture
def without_its_script(workplace: Workplace) -> RunDir:
    """A run of which Slurm says that it runs, whose batch controller fell silent long ago."""
    run = workplace.run("a", submitted("12"), {**started("12"), "attempt": 1})
    attempt = Attempt(run, 1)
    attempt.path.mkdir(parents=True)
    attempt.controller.touch()
    os.utime(attempt.controller, (time.time() - 500, time.time() - 500))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    workplace.command("scontrol", "echo 'SlurmdTimeout           = 300 sec'")
    return run


def test_a_run_whose_batch_script_is_lost_is_not_running(
    workplace: Workplace, without_its_script: RunDir
) -> None:
    got = json.loads(workplace.invoke("status", "a", "--json").out)
    assert (got["state"], got["code"]) == ("unknown", "CD0509")
    assert got["detail"].startswith("lost: no heartbeat of its batch script for 8m")
    assert got["next_command"] == "clusterddp cancel a"
    refused = workplace.invoke("resume", "a")
    assert (refused.code, "End the job with 'clusterddp cancel a'" in refused.err) == (2, True)


@pytest.mark.parametrize("seconds", ["600", "0"])
def test_it_is_lost_only_a_minute_after_slurms_own_patience(
    workplace: Workplace, without_its_script: RunDir, seconds: str
) -> None:
    workplace.command("scontrol", f"echo 'SlurmdTimeout           = {seconds} sec'")
    state = {"600": "running", "0": "unknown"}[seconds]
    assert json.loads(workplace.invoke("status", "a", "--json").out)["state"] == state
