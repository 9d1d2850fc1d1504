"""The verdict on an attempt, and what follows it."""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp import polling
from clusterddp.ranks.variables import REHEARSAL_VARIABLE
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.batch.attempts import finish_attempt
from tests.cli.made_runs import Workplace, submitted, workplace
from tests.event_lines import add_event, kinds, read_events
from tests.run.test_attempt import left_by_a_killed_rank

__all__ = ["workplace"]

REPORT = {
    "accuracy": 0.9876, "loss": 0.04, "train_seconds": 12.0, "total_seconds": 20.0,
    "images_per_second": 10000.0, "world_size": 4, "hosts": ["h01", "h02"], "finished": 200.0,
}  # fmt: skip
# The end of a first attempt in a process of its own: its run's directory, srun's exit code.
FINISH = """
import sys
from pathlib import Path
from clusterddp import log
from clusterddp.batch.finish import finish
from clusterddp.batch.job import JobStart
from clusterddp.run.attempt import Attempt
from clusterddp.run.attempt import print_to_job_log
from clusterddp.run.history import Policy
from clusterddp.run.run_dir import RunDir

run = RunDir(Path(sys.argv[1]))
with log.to(print_to_job_log):
    code = finish(JobStart(run, "17"), Attempt(run, 1), int(sys.argv[2]), Policy(False, 0, 0))
sys.exit(code)
"""
STOPPED: dict[str, Any] = {"cause": "stopped", "reason": "signal", "step": 40}


@pytest.fixture
def run(workplace: Workplace) -> RunDir:
    """A run that has begun, of a job that Slurm knows."""
    slurm_says(workplace)
    return begun(workplace.run("mnist", submitted("17")))


def begun(run: RunDir, number: int = 1, restart: int = 0) -> RunDir:
    Attempt(run, number).outcomes.mkdir(parents=True)
    add_event(run, "started", job_id="17", restart=restart, attempt=number)
    return run


def command_run(
    workplace: Workplace, name: str = "own", *, command: tuple[str, ...] = ("python", "train.py"),
    python: str = "python",
) -> RunDir:  # fmt: skip
    slurm_says(workplace)
    run = workplace.run(name, submitted("17"))
    spec = JobSpec(
        run_name=name, run_dir=str(run.path), resources=Resources(), python=python,
        command=command,
    )  # fmt: skip
    run.spec.write_text(spec.to_json())
    return begun(run)


def record(run: RunDir, rank: int, code: int, *, number: int = 1, **fields: Any) -> None:
    content = {
        "rank": rank, "local_rank": rank, "node_rank": 0, "host": "h01", "pid": 1, "job_id": "17",
        "restart": 0, "step_id": "0", "started": 100.0, "ended": 150.0 + rank, "exit_code": code,
        "signal": None, "error": None,
    }  # fmt: skip
    path = Attempt(run, number).outcomes / f"rank-{rank}.json"
    path.write_text(json.dumps({**content, **fields}))


def leave(run: RunDir, number: int = 1, **fields: Any) -> None:
    """Rank 0's last word, and the ranks' exit codes that go with it."""
    Attempt(run, number).end.write_text(json.dumps(fields))
    for rank in (0, 1):
        record(run, rank, 0 if fields["cause"] == "done" else 75, number=number)


def saved(run: RunDir, number: int = 1, step: int = 40, start: int = 0) -> None:
    attempt = Attempt(run, number)
    attempt.checkpoints.mkdir()
    (attempt.checkpoints / f"step-{step:08d}.pt").touch()
    attempt.record.write_text(json.dumps({"step": start}))


def slurm_says(workplace: Workplace, words: str = "", requeue: str = "exit 0") -> None:
    """A controller that knows the job by these words, and what it makes of a requeue."""
    known = {
        "JobState": "RUNNING", "Restarts": 0, "RunTime": "00:01:00", "TimeLimit": "00:10:00",
        "PreemptTime": "None",
    } | dict(word.split("=") for word in words.split())  # fmt: skip
    line = "JobId=17 JobName=x " + " ".join(f"{k}={v}" for k, v in known.items()) + " Command=y"
    workplace.command("scontrol", f'case "$1" in requeue) {requeue};; *) echo "{line}";; esac')


def slurm_preempts(
    workplace: Workplace, version: str = "24.11.5", by: str = "preempt/partition_prio",
    requeue: str = "1", mode: str = "REQUEUE", late: str = ":",
) -> None:  # fmt: skip
    """A controller that has preempted the job; `late` happens when its partition is looked at."""
    job = (
        "JobId=17 JobName=x JobState=RUNNING Restarts=0 PreemptTime=2026-01-01T00:00:00 "
        f"RunTime=00:01:00 TimeLimit=00:10:00 Requeue={requeue} Partition=main Command=y"
    )
    config = f"PreemptMode = REQUEUE\nPreemptType = {by}\nSLURM_VERSION           = {version}"
    partition = f"PartitionName=main PreemptMode={mode} State=UP"
    workplace.command(
        "scontrol",
        f'case "$2" in config) echo "{config}";; job) echo "{job}";; '
        f'partition) {late}; echo "{partition}";; esac',
    )


def last(run: RunDir, event: str) -> dict[str, Any]:
    return [one for one in read_events(run) if one["event"] == event][-1]


# -- how it ended ------------------------------------------------------------------------------


def test_a_finished_run_is_told_in_one_line(workplace: Workplace, run: RunDir) -> None:
    leave(run, cause="done", reason="", step=60)
    run.report.write_text(json.dumps(REPORT))
    got = finish_attempt(workplace, run, 0, requeue=True)
    [line] = got.out.splitlines()
    for word in ("98.76%", "0.0400", "12.0 s", "10,000 images/s", "4 ranks of 2 hosts"):
        assert word in line
    event = last(run, "ended")
    assert (event["job_id"], event["restart"], event["attempt"]) == ("17", 0, 1)
    assert (event["exit_code"], event["cause"], event["why"], event["step"]) == (0, "done", "", 60)
    assert event["first_failure"] is None
    assert (got.code, workplace.calls) == (0, [])


def test_a_rank_lost_after_the_last_word_takes_nothing_from_the_run(
    workplace: Workplace, run: RunDir
) -> None:
    leave(run, cause="done", reason="", step=60)
    run.report.write_text(json.dumps(REPORT))
    record(run, 1, 137, signal="SIGKILL")
    assert finish_attempt(workplace, run, 143).code == 0
    assert last(run, "ended")["cause"] == "done"


def test_the_first_failure_is_named_and_its_code_wins_over_sruns(
    workplace: Workplace, run: RunDir
) -> None:
    record(run, 1, 1, error={"type": "RuntimeError", "message": "boom", "peer_lost": False})
    record(run, 0, 143, signal="SIGTERM")
    run.rank_log(1).write_text("first\nlast words\n")
    got = finish_attempt(workplace, run, 143, requeue=True)
    assert got.code == 1
    assert "rank 1 on h01 failed first: RuntimeError: boom (logs/rank-1.log)" in got.out
    assert "--rank 1" in got.out
    assert "last words" in got.out
    event = last(run, "ended")
    assert (event["exit_code"], event["cause"], event["first_failure"]["rank"]) == (1, "failed", 1)
    assert "requeued" not in kinds(run)


def test_the_last_words_are_those_of_the_latest_attempt(workplace: Workplace, run: RunDir) -> None:
    begun(run, 2, restart=1)
    record(run, 1, 7, number=2)
    run.rank_log(1).write_text("of the first\n--- attempt 2, job 17, 2026-01-01 10:00 ---\n")
    said = finish_attempt(workplace, run, 7, number=2).out
    assert "of the first" not in said
    assert "the end of" not in said  # it has said nothing
    with run.rank_log(1).open("a") as log:
        log.write("of the second\n")
    said = finish_attempt(workplace, run, 7, number=2).out
    assert "--- last lines of logs/rank-1.log:\nof the second\n" in said


def test_a_task_killed_with_its_parent_is_found_in_the_job_log(
    workplace: Workplace, run: RunDir
) -> None:
    record(run, 0, 1, error={"type": "PeerError", "message": "lost", "peer_lost": True})
    run.job_log.write_text(
        "clusterddp: mnist, job 16 on h01, Mon\nsrun: error: h01: task 0: Killed\n"
        "clusterddp: mnist, job 17 on h01, Tue\nsrun: error: h01: task 1: Killed\n"
    )
    got = finish_attempt(workplace, run, 137)
    assert got.code == 137
    assert "rank 1 on h01 failed first: killed by SIGKILL" in got.out


def test_sruns_zero_does_not_hide_a_failed_rank(workplace: Workplace, run: RunDir) -> None:
    run.report.write_text(json.dumps(REPORT))
    record(run, 0, 3)
    assert finish_attempt(workplace, run, 0).code == 3


@pytest.mark.parametrize("older", [False, True], ids=["no report", "an earlier attempt's"])
def test_sruns_zero_without_a_last_word_is_a_failure(
    workplace: Workplace, run: RunDir, older: bool
) -> None:
    """srun exits 0 when it was told to end (TERM), whatever the tasks did."""
    record(run, 0, 0)
    if older:
        run.report.write_text(json.dumps(REPORT))
    got = finish_attempt(workplace, run, 0)
    assert got.code == 1
    assert "did not finish" in got.out
    assert last(run, "ended")["cause"] == "failed"


KILLED = {"signal": "SIGKILL"}


@pytest.mark.parametrize(
    ("ends", "srun_code"),
    [
        ({0: {"ended": None, "exit_code": None}, 1: {"ended": None, "exit_code": None}}, 0),
        ({0: {"ended": None, "exit_code": None}, 1: {"ended": None, "exit_code": None}}, 137),
        ({0: {"exit_code": 137, **KILLED}, 1: {"exit_code": 143, "signal": "SIGTERM"}}, 137),
        ({0: {"exit_code": 1}, 1: {"exit_code": 0}}, 1),
    ],
    ids=["srun was told to end", "killed with their parents", "killed", "by themselves"],
)
def test_a_command_that_was_ended_for_its_silence_has_hung_however_its_ranks_end(
    workplace: Workplace, ends: dict[int, dict[str, Any]], srun_code: int
) -> None:
    run = command_run(workplace)
    for rank, fields in ends.items():
        record(run, rank, 0, **fields)
    run.job_log.write_text("x, job 17 on h01, Tue\nsrun: error: h01: task 0: Killed\n")
    hung = {"ranks": [1], "reason": "no rank printed anything for 30m", "ended": True}
    (Attempt(run, 1).outcomes / "hung.json").write_text(json.dumps(hung))
    got = finish_attempt(workplace, run, srun_code)
    assert got.code == 1
    assert "rank 1 on h01 failed first: hung: no rank printed anything for 30m" in got.out
    assert last(run, "ended")["cause"] == "failed"


@pytest.mark.parametrize("code", [0, 143])
def test_a_silence_no_rank_is_to_blame_for_names_none(workplace: Workplace, code: int) -> None:
    run = command_run(workplace)
    record(run, 0, 143, signal="SIGTERM")
    record(run, 1, 143, signal="SIGTERM")
    hung = {"ranks": [], "reason": "no rank printed anything for 30m", "ended": True}
    (Attempt(run, 1).outcomes / "hung.json").write_text(json.dumps(hung))
    got = finish_attempt(workplace, run, code)
    assert got.code == 1
    told = "the job was ended: no rank printed anything for 30m"
    assert told in got.out and "failed first" not in got.out
    ended = last(run, "ended")
    assert (ended["cause"], ended.get("first_failure"), ended["how"]) == ("failed", None, told)
    assert json.loads(workplace.invoke("status", "own", "--json").out)["detail"] == told


@pytest.mark.parametrize("ranks", [0, 2])
def test_nodes_that_fail_checks_make_no_rank_a_failed_one(
    workplace: Workplace, ranks: int, run: RunDir
) -> None:
    for rank in range(ranks):
        record(run, rank, 75)
    marked_bad = {"nodes": {"h02": "GPU 1 is slow"}, "by": "preflight", "attempt": 1}
    add_event(run, "nodes_marked_bad", job_id="17", **marked_bad)
    got = finish_attempt(workplace, run, 1)
    assert got.code == 1
    ended = last(run, "ended")
    assert (ended["cause"], ended.get("first_failure")) == ("preflight", None)
    assert ended["remark"] == "h02: GPU 1 is slow"
    assert f"no {'step was done' if ranks else 'task has started'}, because a node" in got.out


def test_the_rank_that_did_not_come_to_a_collective_call_is_named(workplace: Workplace) -> None:
    run = command_run(workplace)
    for rank in range(2):
        own = {"group": "0", "size": 2, "last": 4 - rank, "open": 0 if rank else 4, "call": "x"}
        record(run, rank, 134, signal="SIGABRT", collectives=[own])
    got = finish_attempt(workplace, run, 134)
    remark = "rank 1 did not join call 4 of NCCL's group 0, x, where rank 0 waited"
    dumps = run.attempts / "0001" / "nccl-trace-R"
    assert f"clusterddp: {remark} ({dumps}) [CD1233]\n" in got.out + got.err
    assert last(run, "ended")["remark"] == f"{remark} ({dumps})"


@pytest.mark.parametrize("code", [0, 3])
def test_worlds_that_the_tasks_children_formed_are_named(workplace: Workplace, code: int) -> None:
    run = command_run(workplace)
    for rank in range(3):
        own = {"size": 2, "launcher": "torchrun"} if rank else None
        record(run, rank, code if rank == 2 else 0, nested_world=own)
    got = finish_attempt(workplace, run, code)
    remark = (
        "the children of 2 of 3 tasks formed separate worlds, started by torchrun, of 2 ranks "
        "each: each trained separately. If one training of all tasks was meant, have "
        "each start the program without torchrun"
    )
    assert (got.code, f"clusterddp: {remark} [CD1226]\n" in got.out + got.err) == (code, True)
    assert last(run, "ended")["remark"] == remark
    assert f"warning     {remark}\n" in workplace.invoke("status").out


IN_USE = {"type": "DistNetworkError", "message": "port: 29500, EADDRINUSE", "peer_lost": False}
NO_TORCH = {"type": "ModuleNotFoundError", "message": "No module named 'torch'"}


@pytest.mark.parametrize("command", [("fabric", "run", "t.py"), ("sh", "start.sh"), ("./t", "a")])
def test_a_launcher_in_each_task_is_named_where_a_port_is_in_use(
    workplace: Workplace, command: tuple[str, ...]
) -> None:
    (workplace.folder / "start.sh").write_text("fabric run t.py\n")
    run = command_run(workplace, command=command)
    record(run, 0, 0)
    record(run, 1, 1, error=IN_USE)
    got = finish_attempt(workplace, run, 1)
    remark = (
        "each task starts fabric run, which starts its own ranks, and those of several tasks want "
        "the same port. Have each task start the program without fabric run"
    )
    assert (f"{remark} [CD0905]" in got.out) == (command[0] != "./t")
    assert last(run, "ended")["remark"] == (remark if command[0] != "./t" else "")


def test_a_python_of_another_environment_is_named_where_it_lacks_a_module(
    workplace: Workplace,
) -> None:
    run = command_run(workplace, python="/opt/my env/bin/python")
    record(run, 0, 1, error=NO_TORCH)
    got = finish_attempt(workplace, run, 1)
    remark = (
        "python is the first one on the PATH of the tasks, and has no torch. Activate the "
        "environment that has it before you submit, or name its Python: -- "
        "'/opt/my env/bin/python' train.py"
    )
    assert f"{remark} [CD1217]" in got.out
    assert last(run, "ended")["remark"] == remark


@pytest.mark.parametrize(
    ("command", "activated", "own"),
    [
        ((sys.executable, "t.py"), "", ""),
        (("python", "t.py"), "", "bin/python"),
        (("python", "t.py"), "", "bin/python3"),
        (("python", "t.py"), "VIRTUAL_ENV", ""),
        (("python", "t.py"), "CONDA_PREFIX", ""),
    ],
)
def test_a_python_that_is_named_or_of_an_activated_environment_is_not_doubted(
    workplace: Workplace, command: tuple[str, ...], activated: str, own: str
) -> None:
    workplace.command("python", "exit 0")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        is_set = name == activated
        workplace.monkeypatch.setenv(name, str(workplace.folder) if is_set else "")
    run = command_run(workplace, command=command, python=str(workplace.folder / own))
    record(run, 0, 1, error=NO_TORCH)
    assert "on the PATH" not in finish_attempt(workplace, run, 1).out
    assert last(run, "ended")["remark"] == ""


def test_ranks_none_of_which_has_met_another_are_named(workplace: Workplace) -> None:
    """As Lightning's of `Trainer()`: four trainings, each of which ends with exit code 0."""
    run = command_run(workplace)
    for rank in range(4):
        record(run, rank, 0, listened=None if rank else False)
    got = finish_attempt(workplace, run, 0)
    remark = last(run, "ended")["remark"]
    assert remark.startswith("none of the 4 ranks met another: nothing listened on MASTER_PO")
    assert (got.code, f"clusterddp: {remark} [CD1226]\n" in got.out + got.err) == (0, True)
    assert f"warning     {remark}\n" in workplace.invoke("status").out


@pytest.mark.parametrize(
    "fields",
    [
        {"listened": True},
        {"listened": None},
        {"listened": False, "received_signal": {"signal": "SIGTERM", "time": 1.0}},
        {"nested_world": {"size": 2, "launcher": ""}},  # of one task's children alone
    ],
)
def test_of_ranks_that_met_or_did_not_come_to_it_nothing_is_said(
    workplace: Workplace, fields: dict[str, Any]
) -> None:
    run = command_run(workplace)
    record(run, 0, 0, **fields)
    record(run, 1, 0)
    finish_attempt(workplace, run, 0)
    assert last(run, "ended")["remark"] == ""


def test_a_script_that_failed_before_its_tasks_keeps_its_code(
    workplace: Workplace, run: RunDir
) -> None:
    got = finish_attempt(workplace, run, 7)
    assert got.code == 7
    assert "no task has started: ended with exit code 7 [CD1218]\n" in got.out
    assert last(run, "ended")["code"] == "CD1218"
    assert json.loads(workplace.invoke("status", "--json").out)["code"] == "CD1218"
    assert "CD1218: clusterddp explain CD1218\n" in workplace.invoke("status").out
    assert last(run, "ended")["remark"].startswith("no task has started: ended with exit code")


def test_records_of_an_earlier_attempt_do_not_count(workplace: Workplace, run: RunDir) -> None:
    record(run, 0, 3)
    begun(run, 2, restart=1)
    leave(run, 2, cause="done", reason="", step=60)
    assert finish_attempt(workplace, run, 0, number=2).code == 0


def test_a_damaged_run_directory_still_gives_a_verdict(workplace: Workplace) -> None:
    got = finish_attempt(workplace, RunDir(workplace.root / "gone"), 9)
    assert got.code == 9
    assert "cannot record 'ended'" in got.err


def test_what_killed_ranks_have_left_goes_with_the_attempt(
    workplace: Workplace, run: RunDir
) -> None:
    saved(run)
    attempt = Attempt(run, 1)
    attempt.reserve_space()
    kept = sorted(attempt.path.rglob("*"))
    left_by_a_killed_rank(attempt)
    later = Attempt(run, 2)  # of a job that has begun meanwhile
    later.path.mkdir()
    (later.path / ".alive.99").write_text("{}")
    finish_attempt(workplace, run, 137)
    kept.remove(attempt.reserve)
    assert sorted(attempt.path.rglob("*")) == kept
    assert (later.path / ".alive.99").exists()


TROUBLE = "the checkpoint step-00000050.pt was not written: No space left on device"


def test_a_signal_on_a_full_disk_names_the_disk_and_the_run_goes_on(
    workplace: Workplace, run: RunDir
) -> None:
    saved(run)
    leave(run, **{**STOPPED, "step": 50, "saved": 40, "write_error": TROUBLE})
    got = finish_attempt(workplace, run, 0, requeue=True)
    assert "their last checkpoint is from step 40" in got.out
    assert TROUBLE in got.out
    assert kinds(run)[-2:] == ["ended", "requeued"]
    workplace.command("squeue", "echo '17|PENDING|BeginTime'")
    status = json.loads(workplace.invoke("status", "mnist", "--json").out)
    assert status["state"] == "queued"
    assert TROUBLE in status["detail"]


def test_ranks_that_could_record_nothing_on_a_full_disk_have_not_failed(
    workplace: Workplace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(run)
    for rank in (0, 1):
        record(run, rank, 0, ended=None, exit_code=None)
    full = "the disk is full"
    monkeypatch.setattr(Attempt, "write_error", lambda _: full)
    got = finish_attempt(workplace, run, 0, requeue=True)
    assert "could not record how" in got.out and full in got.out
    ended = last(run, "ended")
    assert (ended["cause"], ended["write_error"]) == ("signal", full)
    assert last(run, "requeued")["job_id"] == "17"


def test_a_log_that_takes_no_line_costs_no_verdict(run: RunDir, tmp_path: Path) -> None:
    record(run, 1, 3)
    environ = {**os.environ, "SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(tmp_path)}
    with Path("/dev/full").open("w") as full:  # as a disk that is full, or read-only
        done = subprocess.run(
            [sys.executable, "-c", FINISH, str(run.path), "3"], env=environ, stdout=full,
            stderr=full, check=False,
        )  # fmt: skip
    assert done.returncode == 3
    said = (tmp_path / "slurm-17.out").read_text()
    assert "cannot write the job log: No space left on device" in said
    assert "rank 1 on h01 failed first: exit code 3" in said


def test_no_torch_is_needed(run: RunDir) -> None:
    program = f"{FINISH.rpartition('sys.exit')[0]}sys.exit('torch' in sys.modules)"
    argv = [sys.executable, "-c", program, str(run.path), "1"]
    assert subprocess.run(argv, check=False, timeout=90).returncode == 0


@pytest.mark.parametrize(
    ("word", "how"),
    [("Killed", "killed by SIGKILL"), ("Out Of Memory", "out of memory (killed by the kernel)")],
)
def test_what_is_killed_above_a_rank_is_a_failure_and_no_request_to_stop(
    workplace: Workplace, run: RunDir, word: str, how: str
) -> None:
    """srun ends the other tasks for it, by a TERM that the ranks take for a request."""
    leave(run, cause="stopped", reason="SIGTERM", step=40)
    run.job_log.write_text(
        f"clusterddp: mnist, job 17 on h01, Tue\nsrun: error: h01: task 1: {word}\n"
    )
    got = finish_attempt(workplace, run, 137, requeue=True)
    event = last(run, "ended")
    assert (event["cause"], event["exit_code"], event["step"]) == ("failed", 137, 40)
    assert (event["first_failure"]["rank"], event["first_failure"]["host"]) == (1, "h01")
    assert f"wrapper) was {how}" in got.out
    assert "the ranks saved a checkpoint and exited at step 40" in got.out
    assert "requeued" not in kinds(run)
    finish_attempt(workplace, run, 137, requeue=True, retries=1)
    assert kinds(run)[-1] == "requeued"


# what Slurm says, the ranks' own reason -> the cause that is recorded
CAUSES = [
    ("", "signal", "signal"),
    ("JobState=COMPLETING RunTime=00:10:05", "SIGTERM", "time limit"),
    ("PreemptTime=2026-01-01T00:00:00", "SIGTERM", "preempted"),
    ("JobState=PREEMPTED PreemptTime=None", "SIGTERM", "preempted"),
    ("JobState=PENDING", "SIGTERM", "requeued"),
    ("Restarts=1", "SIGTERM", "requeued"),
    ("JobState=COMPLETING", "SIGTERM", "cancelled"),
    ("JobState=COMPLETING", "stop", "cancelled"),
    ("", "stop", "stopped"),
]


@pytest.mark.parametrize(("words", "reason", "cause"), CAUSES)
def test_the_cause_is_slurms_word_on_what_the_ranks_saw(
    workplace: Workplace, run: RunDir, words: str, reason: str, cause: str
) -> None:
    slurm_says(workplace, words)
    leave(run, cause="stopped", reason=reason, step=40)
    finish_attempt(workplace, run, 75)
    event = last(run, "ended")
    assert (event["cause"], event["step"]) == (cause, 40)
    assert event["why"]  # without --requeue nothing follows, and that is said


def test_a_preemption_that_slurm_shows_as_a_cancellation_is_known_by_the_steps_last_line(
    workplace: Workplace, run: RunDir
) -> None:
    slurm_says(workplace, "JobState=COMPLETING PreemptTime=None")
    leave(run, cause="stopped", reason="SIGTERM", step=40)
    run.job_log.write_text(
        "clusterddp: mnist, job 17 on h01, Tue\nslurmstepd-h01: error: *** STEP 17.0 ON h01 "
        "CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***\n"
    )
    got = finish_attempt(workplace, run, 75, requeue=True)
    assert last(run, "ended")["cause"] == "preempted"
    assert "scontrol requeue 17" in workplace.calls
    assert got.code == 0


OVER_MEMORY = "slurmstepd: error: StepId=17.0 exceeded memory limit (99 > 9), being killed"
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
KILLED = "srun: error: h01: task 0: Killed"


@pytest.mark.parametrize(
    ("lines", "words", "cause"),
    [
        ([ABORTED, KILLED], "", "cancelled"),
        (["srun: forcing job termination", ABORTED, KILLED], "", "cancelled"),
        ([KILLED, "srun: Terminating StepId=17.0", ABORTED], "", "failed"),
        ([KILLED], "", "failed"),
        ([ABORTED, KILLED], "JobState=COMPLETING RunTime=00:10:05", "time limit"),
        ([OVER_MEMORY, ABORTED, KILLED], "", "failed"),
    ],
)
def test_ranks_that_died_with_a_step_that_somebody_ended_have_not_failed(
    workplace: Workplace, run: RunDir, lines: list[str], words: str, cause: str
) -> None:
    slurm_says(workplace, words)
    record(run, 0, 137, ended=None, exit_code=None)
    run.job_log.write_text("\n".join(["clusterddp: mnist, job 17 on h01, Tue", *lines, ""]))
    got = finish_attempt(workplace, run, 137)
    assert (last(run, "ended")["cause"], got.code) == (cause, 137)
    if cause == "cancelled":
        workplace.command("squeue", "exit 0")
        status = workplace.invoke("status", "mnist").out
        assert "cancelled: by scancel 17.0 or a signal to its srun" in status
        assert "CD1203" in status and "SIGKILL" not in status


# -- what follows ------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["", "JobState=COMPLETING RunTime=00:10:05", "PreemptTime=x"])
def test_a_run_that_was_interrupted_goes_back_into_the_queue(
    workplace: Workplace, run: RunDir, words: str
) -> None:
    slurm_says(workplace, words)
    leave(run, **STOPPED)
    got = finish_attempt(workplace, run, 75, requeue=True)
    assert (got.code, got.err) == (0, "")
    assert "scontrol requeue 17" in workplace.calls
    assert kinds(run)[-2:] == ["ended", "requeued"]
    ended, requeued = read_events(run)[-2:]
    assert (ended["why"], requeued["attempt"]) == ("", 1)
    assert requeued["why"] == ended["cause"]
    assert "job 17 is back in the queue" in got.out


@pytest.mark.parametrize(
    ("version", "by", "requeue", "mode", "slurms"),
    [
        ("24.05.0", "preempt/partition_prio", "1", "REQUEUE", True),
        ("24.11.5", "preempt/partition_prio", "1", "GANG,REQUEUE", True),
        ("22.05.8", "preempt/partition_prio", "1", "REQUEUE", False),
        ("24.11.5", "preempt/partition_prio", "1", "CANCEL", False),
        ("24.11.5", "preempt/partition_prio", "0", "REQUEUE", False),
        ("24.11.5", "preempt/qos", "1", "REQUEUE", False),
    ],
)
def test_a_preempted_job_is_left_to_slurm_where_slurm_requeues_it(
    workplace: Workplace, run: RunDir, version: str, by: str, requeue: str, mode: str, *,
    slurms: bool,
) -> None:  # fmt: skip
    slurm_preempts(workplace, version, by, requeue, mode)
    leave(run, **STOPPED)
    got = finish_attempt(workplace, run, 0, requeue=True)
    assert ("scontrol requeue 17" in workplace.calls) != slurms
    assert kinds(run)[-2:] == ["ended", "requeued"]
    assert last(run, "requeued")["why"] == "preempted"
    # Where Slurm does not do it after all, the job must not look as if the run were done.
    assert got.code == (75 if slurms else 0)


@pytest.mark.parametrize("why", ["stop", "cap", "requeue is off"])
@pytest.mark.parametrize("version", ["22.05.8", "24.11.5"])
def test_slurm_does_not_requeue_a_preempted_job_whose_run_is_to_end(
    workplace: Workplace, run: RunDir, version: str, why: str
) -> None:
    slurm_preempts(workplace, version)
    leave(run, **STOPPED)
    if why == "stop":
        add_event(run, "stop_requested", job_id="17", attempt=1)
    capped = {"max_requeues": 0} if why == "cap" else {}
    assert finish_attempt(workplace, run, 0, requeue=why != "requeue is off", **capped).code == 75
    assert last(run, "ended")["cause"] == "preempted"
    forbidden = "scontrol update JobId=17 Requeue=0" in workplace.calls
    assert forbidden == (version == "24.11.5")


@pytest.mark.parametrize("event", ["stop_requested", "cancelled"])
def test_a_stop_while_the_requeue_is_left_to_slurm_takes_the_job_out_again(
    workplace: Workplace, run: RunDir, event: str
) -> None:
    line = json.dumps({"event": event, "job_id": "17", "attempt": 1})
    slurm_preempts(workplace, late=f"echo {shlex.quote(line)} >>{run.events}")
    workplace.command("scancel", "exit 0")
    leave(run, **STOPPED)
    assert finish_attempt(workplace, run, 0, requeue=True).code == 75
    assert workplace.calls[-1] == "scancel 17"
    assert last(run, "cancelled")["job_id"] == "17"


@pytest.mark.parametrize("words", ["JobState=PENDING", "JobState=COMPLETING"])
def test_what_slurm_or_a_person_has_decided_is_left(
    workplace: Workplace, run: RunDir, words: str
) -> None:
    slurm_says(workplace, words)
    leave(run, **STOPPED)
    finish_attempt(workplace, run, 75, requeue=True)
    assert "scontrol requeue 17" not in workplace.calls
    assert kinds(run)[-1] == "ended"


def test_cancel_wins_whatever_slurm_shows(workplace: Workplace, run: RunDir) -> None:
    add_event(run, "cancelled", job_id="17")
    leave(run, **STOPPED)
    assert finish_attempt(workplace, run, 75, requeue=True).code == 75
    assert last(run, "ended")["cause"] == "cancelled"
    assert workplace.calls == []


def test_where_requeue_is_refused_another_job_takes_the_place(
    workplace: Workplace, run: RunDir
) -> None:
    slurm_says(workplace, requeue="echo 'Requested operation is presently disabled' >&2; exit 1")
    workplace.command("sbatch", "/bin/cat >sent; echo '18;cluster'")
    workplace.monkeypatch.setenv("SLURM_SUBMIT_DIR", str(workplace.folder))
    run.script.write_text("#!/bin/bash\necho the script\n")
    leave(run, **STOPPED)
    got = finish_attempt(workplace, run, 75, requeue=True)
    assert got.code == 75  # the run is not done: what waits for this job must not start
    assert "presently disabled" in got.out
    event = last(run, "submitted")
    assert (event["job_id"], event["in_place_of"], event["attempt"]) == ("18", "17", 1)
    assert event["why"] == "signal"
    assert (workplace.folder / "sent").read_text() == "#!/bin/bash\necho the script\n"


def test_a_trial_with_a_script_of_its_own_is_no_element_of_the_next_job(
    workplace: Workplace,
) -> None:
    run = begun(workplace.run("s-3", submitted("17")))
    slurm_says(workplace, requeue="echo 'Requested operation is presently disabled' >&2; exit 1")
    workplace.command("sbatch", "echo 18")
    workplace.monkeypatch.setenv("SLURM_SUBMIT_DIR", str(workplace.folder))
    workplace.monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    workplace.monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    for lines, omitted, job, argument in (
        ("", (), "18", ""),
        ("#SBATCH --array=0-9\n", (), "18_3", " --array=3 --comment=clusterddp:s-3"),
        ("#SBATCH --array=0-9\n", ("comment",), "18_3", " --array=3"),
    ):
        trial = {"trial": (("lr", "1"),), "omit_directives": omitted}
        run.spec.write_text(dataclasses.replace(run.load_spec(), **trial).to_json())
        run.script.write_text(f"#!/bin/bash\n{lines}")
        leave(run, **STOPPED)
        assert finish_attempt(workplace, run, 75, requeue=True).code == 75
        assert last(run, "submitted")["job_id"] == job
        assert f"sbatch --parsable{argument}" in workplace.calls


def test_where_nothing_can_be_submitted_it_says_what_to_type(
    workplace: Workplace, run: RunDir
) -> None:
    slurm_says(workplace, requeue="echo 'disabled' >&2; exit 1")
    workplace.command("sbatch", "echo 'sbatch: error: not from a node' >&2; exit 1")
    workplace.monkeypatch.setenv("SLURM_SUBMIT_DIR", str(workplace.folder))
    run.script.write_text("#!/bin/bash\n")
    leave(run, **STOPPED)
    got = finish_attempt(workplace, run, 75, requeue=True)
    assert got.code == 75
    assert "resume with: clusterddp resume mnist" in got.out
    event = last(run, "requeue_failed")
    assert (event["attempt"], event["why"]) == (1, "signal")
    assert "not from a node" in event["error"]


def test_a_controller_that_is_away_is_waited_for(
    workplace: Workplace, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "SLURM_POLL_SECONDS", 0.01)
    away = "[ -f back ] || { : >back; echo 'Unable to contact slurm controller' >&2; exit 1; }"
    slurm_says(workplace, requeue=away)
    leave(run, **STOPPED)
    got = finish_attempt(workplace, run, 75, requeue=True)
    assert got.code == 0
    assert "trying again" in got.out
    assert workplace.calls.count("scontrol requeue 17") == 2


def test_a_rehearsal_is_only_told_what_clusters_would_do(workplace: Workplace, run: RunDir) -> None:
    workplace.monkeypatch.setenv(REHEARSAL_VARIABLE, "x")
    leave(run, **STOPPED)
    got = finish_attempt(workplace, run, 75, requeue=True)
    assert got.code == 75
    assert "a cluster would requeue the job now" in got.out
    assert "clusterddp resume mnist" in got.out
    assert (workplace.calls, kinds(run)[-1]) == ([], "ended")


# -- asked to stop -----------------------------------------------------------------------------


def element_of(run: RunDir) -> tuple[RunDir, str]:
    """The run as an array's element, and the command that has it go on."""
    element = RunDir(run.path.rename(run.path.with_name(f"{run.name}-3")))
    return element, f"sbatch --array=3 {element.script}"


@pytest.mark.parametrize("what", ["stopped", "cancelled", "requeue refused"])
def test_an_element_of_an_array_is_told_its_own_command(
    workplace: Workplace, run: RunDir, what: str
) -> None:
    element, command = element_of(run)
    slurm_says(workplace, requeue="echo 'disabled' >&2; exit 1")
    workplace.monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    if what == "stopped":
        Attempt(element, 1).ask_to_stop("stop")
    elif what == "cancelled":
        add_event(element, "cancelled", job_id="17")
    leave(element, **(STOPPED if what != "stopped" else {"cause": "stopped", "reason": "stop"}))
    out = finish_attempt(workplace, element, 75, requeue=True).out
    assert f"resume with: {command}\n" in out
    assert "clusterddp resume" not in out


@pytest.mark.parametrize("how", ["the event", "the mark"])
@pytest.mark.parametrize("cause", ["signal", "failed"])
def test_a_stop_that_the_ranks_did_not_see_any_more_counts(
    workplace: Workplace, run: RunDir, how: str, cause: str
) -> None:
    """It came when they had already left for another reason."""
    if cause == "signal":
        leave(run, **STOPPED)
    else:
        record(run, 1, 1, error={"type": "ValueError", "message": "boom", "peer_lost": False})
    if how == "the event":
        add_event(run, "stop_requested", job_id="17", attempt=1)
    else:
        Attempt(run, 1).ask_to_stop("stop")
    finish_attempt(workplace, run, 75, requeue=True, retries=5)
    ended = last(run, "ended")
    assert (ended["cause"], ended["why"]) == (cause, "stopped by 'clusterddp stop'")
    assert not [call for call in workplace.calls if "requeue" in call]


def test_a_stop_of_an_earlier_attempt_is_over(workplace: Workplace, run: RunDir) -> None:
    add_event(run, "stop_requested", job_id="17", attempt=1)
    add_event(run, "resume_requested")
    begun(run, 2)
    leave(run, 2, **STOPPED)
    assert finish_attempt(workplace, run, 75, requeue=True, number=2).code == 0
    assert kinds(run)[-1] == "requeued"


def test_a_commands_own_exit_after_the_signal_counts_as_stopped(workplace: Workplace) -> None:
    run = command_run(workplace)
    add_event(run, "stop_requested", job_id="17", attempt=1)
    record(run, 0, 138, signal="SIGUSR1")  # it does not know the signal
    finish_attempt(workplace, run, 138, requeue=True)
    assert last(run, "ended")["why"] == "stopped by 'clusterddp stop'"
    assert kinds(run)[-1] == "ended"


def test_a_command_that_exits_with_75_for_a_stop_is_stopped(workplace: Workplace) -> None:
    run = command_run(workplace)
    add_event(run, "stop_requested", job_id="17", attempt=1)
    record(run, 0, 75)
    got = finish_attempt(workplace, run, 0, requeue=True)
    assert (got.code, last(run, "ended")["cause"]) == (75, "stopped")
    assert "stopped; the command asked for a restart" in got.out
    status = json.loads(workplace.invoke("status", "own", "--json").out)
    assert (status["state"], status["detail"]) == ("stopped", "by 'clusterddp stop'")


@pytest.mark.parametrize("codes", [(75, 75), (0, 0)], ids=["ranks", "an agent's"])
def test_what_a_commands_loop_has_saved_is_in_the_verdict(
    workplace: Workplace, codes: tuple[int, int]
) -> None:
    """An agent of torchrun's makes a failure of 75, so that its ranks leave with 0."""
    run = command_run(workplace)
    saved(run, step=7)
    leave(run, cause="stopped", reason="time limit", step=7, saved=7)
    for rank, code in enumerate(codes):
        record(run, rank, code)
    got = finish_attempt(workplace, run, 0, requeue=True)
    ended = last(run, "ended")
    assert (ended["cause"], ended["exit_code"], ended["step"]) == ("signal", 75, 7)
    assert "time limit: the ranks saved a checkpoint and exited at step 7" in got.out
    assert kinds(run)[-1] == "requeued"
    workplace.command("squeue", "echo '17|PENDING|Priority'")  # no signal: its own clock
    shown = json.loads(workplace.invoke("status", "own", "--json").out)["detail"]
    assert shown == "resumes after the time limit: Priority"
    begun(run, 2, 1)
    workplace.command("squeue", "echo '17|RUNNING|None'")
    status = json.loads(workplace.invoke("status", "own", "--json").out)
    assert status["restart_reasons"] == ["time limit"]


def test_a_command_loop_that_gains_no_step_twice_is_not_started_again(workplace: Workplace) -> None:
    run = command_run(workplace)
    for number, start in ((1, 7), (2, 7)):
        if number == 2:
            begun(run, 2, 1)
        saved(run, number, step=7, start=start)
        leave(run, number, cause="stopped", reason="signal", step=7, saved=7)
        finish_attempt(workplace, run, 0, requeue=True, number=number)
    assert "2 attempts in a row made no progress" in last(run, "ended")["why"]


def test_a_command_that_the_time_limit_killed_has_failed(workplace: Workplace) -> None:
    run = command_run(workplace)
    slurm_says(workplace, "JobState=COMPLETING RunTime=00:10:05")
    record(run, 0, 143, signal="SIGTERM")
    assert finish_attempt(workplace, run, 143).code == 143
    assert last(run, "ended")["cause"] == "time limit"
    status = json.loads(workplace.invoke("status", "own", "--json").out)
    assert (status["state"], status["exit_code"]) == ("failed", 143)
    assert status["detail"] == "time limit, and requeue is off; it ended without saving"
    assert (
        finish_attempt(workplace, run, 143, requeue=True).code == 0
    )  # what it saved before is its own matter


def test_a_command_that_exits_with_75_asked_to_be_started_again(workplace: Workplace) -> None:
    run = command_run(workplace)
    record(run, 0, 75)
    got = finish_attempt(workplace, run, 0)
    assert got.code == 75
    assert "the command asked for a restart (exit code 75)" in got.out
    assert "saved" not in got.out
    why = "its command asked for a restart (exit code 75), and requeue is off"
    assert f"will not restart automatically: {why}" in got.out
    assert last(run, "ended")["cause"] == "signal"
    assert json.loads(workplace.invoke("status", "own", "--json").out)["detail"] == why
    assert finish_attempt(workplace, run, 75, requeue=True, max_requeues=0).code == 75
    shown = json.loads(workplace.invoke("status", "own", "--json").out)["detail"]
    assert shown.startswith(f"{why.partition(',')[0]}; it has been started")
    Attempt(run, 1).ask_to_stop("signal")
    finish_attempt(workplace, run, 0)
    assert last(run, "ended")["why"] == "signal, and requeue is off"
    Attempt(run, 1).stop.unlink()
    assert finish_attempt(workplace, run, 0, requeue=True).code == 0
    assert "scontrol requeue 17" in workplace.calls


def test_a_command_whose_srun_was_ended_is_not_done(workplace: Workplace) -> None:
    """TERM to srun kills the tasks together with their parents, and srun exits with 0."""
    run = command_run(workplace)
    record(run, 0, 0, ended=None, exit_code=None)
    got = finish_attempt(workplace, run, 0)
    assert got.code == 1
    assert "rank 0 on h01 failed first: left no record of its end" in got.out


@pytest.mark.parametrize(("code", "warned"), [(3, True), (4, False), (75, True)])
def test_a_code_for_which_slurm_requeues_is_warned_about(
    workplace: Workplace, code: int, warned: bool
) -> None:
    run = command_run(workplace)
    config = "RequeueExit             = 2-3,9\nRequeueExitHold         = 75\nX = (null)"
    workplace.command("scontrol", f'case "$2" in config) echo "{config}";; esac')
    record(run, 0, code)
    got = finish_attempt(workplace, run, code)
    assert got.code == code
    assert ("warning: slurm.conf has RequeueExit" in got.out) == warned
    assert (f"Slurm requeues the job because of its exit code {code}" in got.out) == warned


TIMED_OUT = {"type": "", "message": "rank 1 on h01 lost another rank: Timed out", "peer_lost": True}


@pytest.mark.parametrize(("went_on", "cause"), [((0, 1), "suspended"), ((1,), "failed")])
def test_ranks_that_lost_each_other_after_a_suspension_are_started_again(
    workplace: Workplace, run: RunDir, went_on: tuple[int, ...], cause: str
) -> None:
    """Where one rank alone was stopped, the others have waited for it in earnest."""
    for rank in (0, 1):
        record(run, rank, 1, error=TIMED_OUT, **{"continued": 149.0} if rank in went_on else {})
    saved(run)
    got = finish_attempt(workplace, run, 1, requeue=True)
    ended = last(run, "ended")
    assert ended["cause"] == cause
    assert (got.code, "scontrol requeue 17" in workplace.calls) == (
        (0, True) if cause == "suspended" else (1, False)
    )
    if cause == "suspended":
        assert ended["code"] == "CD1230" and "lost another rank" not in got.out


def test_a_command_that_dies_of_the_signal_is_no_run_that_has_saved(workplace: Workplace) -> None:
    run = early(workplace, "from clusterddp import DistEnv\n")
    record(run, 0, 138, signal="SIGUSR1")
    got = finish_attempt(workplace, run, 138, requeue=True)
    assert last(run, "ended")["cause"] == "failed"
    assert f"does not handle that signal: {LOST}" in got.out


def early(workplace: Workplace, text: str = "from clusterddp.loop import Loop\n") -> RunDir:
    """A run whose script has this text."""
    run = command_run(workplace)
    workplace.monkeypatch.chdir(workplace.folder)
    (workplace.folder / "train.py").write_text(text)
    return run


@pytest.mark.parametrize("loop", ["train.py", "model.py", "record"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_before_the_loop_has_begun_interrupts_the_run(
    workplace: Workplace, name: str, loop: str
) -> None:
    run = early(workplace, "import model\n")
    if loop == "record":  # an earlier attempt had one
        run.resolved.write_text("{}")
    else:
        (workplace.folder / loop).write_text("from clusterddp.loop import Loop\nimport model\n")
    code = 128 + signal.Signals[name]
    for rank in range(2):
        record(run, rank, code, signal=name)
    got = finish_attempt(workplace, run, code)
    ended = last(run, "ended")
    assert (got.code, ended["cause"], ended["code"]) == (75, "signal", "CD1220")
    line = (
        f"rank 0 on h01 (logs/rank-0.log) got {name} outside of its Loop, and saved no checkpoint"
    )
    assert f"{line} [CD1220]" in got.out
    assert "resume with: clusterddp resume own" in got.out
    assert "failed first" not in got.out
    finish_attempt(workplace, run, code, requeue=True)
    assert kinds(run)[-1] == "requeued"


def test_two_attempts_in_a_row_that_came_to_no_loop_are_enough(workplace: Workplace) -> None:
    run = early(workplace)
    for number in (1, 2):
        if number == 2:
            begun(run, 2, 1)
        record(run, 0, 138, signal="SIGUSR1", number=number)
        finish_attempt(workplace, run, 138, requeue=True, number=number)
        assert kinds(run)[-1] == ("requeued" if number == 1 else "ended")
    assert "2 attempts in a row made no progress" in last(run, "ended")["why"]


def test_a_folder_that_was_removed_costs_no_verdict(workplace: Workplace) -> None:
    record(run := command_run(workplace), 0, 138, signal="SIGUSR1")
    (gone := workplace.folder / "gone").mkdir()
    workplace.monkeypatch.chdir(gone)
    gone.rmdir()
    got = finish_attempt(workplace, run, 138).code
    assert (got, last(run, "ended")["cause"]) == (138, "failed")


def test_a_stop_before_the_loop_is_a_stop(workplace: Workplace) -> None:
    run = early(workplace)
    add_event(run, "stop_requested", job_id="17", attempt=1)
    record(run, 0, 138, signal="SIGUSR1")
    assert finish_attempt(workplace, run, 138, requeue=True).code == 75
    assert (last(run, "ended")["cause"], last(run, "ended")["code"]) == ("stopped", "CD1204")


@pytest.mark.parametrize(
    ("text", "ranks", "log"),
    [
        ("from clusterddp import DistEnv\n", [{}], ""),
        ("", [{}], ""),
        ("", [], "srun: error: h01: task 0: Terminated\n"),
        (
            "import clusterddp.loop\n",
            [{}],
            "slurmstepd: error: StepId=17.0 exceeded memory limit (9 > 8), being killed\n",
        ),
        ("import clusterddp.loop\n", [{}, {"exit_code": 0, "signal": None}], ""),
    ],
    ids=["no Loop", "nothing", "no record", "memory", "one is done"],
)
def test_term_is_a_failure_without_a_loop_or_if_it_may_follow_from_another_end(
    workplace: Workplace, text: str, ranks: list[dict[str, Any]], log: str
) -> None:
    run = early(workplace, text)
    for rank, fields in enumerate(ranks):
        record(run, rank, 143, **{"signal": "SIGTERM", **fields})
    run.job_log.write_text(f"x, job 17 on h01, Tue\n{log}")
    assert finish_attempt(workplace, run, 143, requeue=True).code == 143
    assert last(run, "ended")["cause"] == "failed"


LOST = "what it trained since its own last checkpoint is lost"
FIT = "import lightning as L\ntrainer = L.Trainer()\ntrainer.fit(model)\n"
ADD = (
    "to save and resume, add before trainer.fit (train.py:3): "
    "from clusterddp.integrations.lightning import resume; resume(trainer)"
)


@pytest.mark.parametrize(
    ("state", "signal_name", "how"),
    [
        ("PREEMPTED", "SIGTERM", f"preempted; the command has saved no checkpoint with "
         f"clusterddp: {LOST} [CD1206]"),
        ("TIMEOUT", "SIGTERM", f"time limit; the command has saved no checkpoint with "
         f"clusterddp: {LOST} [CD1205]"),
        ("RUNNING", "SIGUSR1", f"the command does not handle that signal: {LOST} [CD1220]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("copied", [False, True])
def test_an_interrupted_command_without_a_loop_is_told_what_is_lost_and_what_to_add(
    workplace: Workplace, state: str, signal_name: str, how: str, copied: bool
) -> None:
    run = command_run(workplace)
    slurm_says(workplace, f"JobState={state}")
    folder = run.code if copied else workplace.folder
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(FIT)
    workplace.monkeypatch.chdir(workplace.folder)
    exit_code = 138 if signal_name == "SIGUSR1" else 143
    record(run, 0, exit_code, signal=signal_name)
    got = finish_attempt(workplace, run, exit_code)
    code = last(run, "ended")["code"]
    assert how in got.out
    assert f"clusterddp: {ADD} [{code}]\n" in got.out
    assert ADD in json.loads(workplace.invoke("status", "own", "--json").out)["warnings"]
    assert "resume with" not in got.out  # it starts from its own last checkpoint, if any


def test_nothing_is_lost_where_the_command_asked_for_a_restart_itself(workplace: Workplace) -> None:
    run = command_run(workplace)
    slurm_says(workplace, "JobState=PREEMPTED")
    (workplace.folder / "train.py").write_text(FIT)
    record(run, 0, 75)
    got = finish_attempt(workplace, run, 75)
    assert "preempted; the command asked for a restart" in got.out
    assert LOST not in got.out and "to save and resume" not in got.out
    assert "resume with: clusterddp resume own" in got.out


def test_a_loop_that_was_killed_before_its_last_save_is_not_taken_for_none(
    workplace: Workplace,
) -> None:
    run = command_run(workplace)
    slurm_says(workplace, "JobState=PREEMPTED")
    saved(run)
    record(run, 0, 137, signal="SIGKILL")
    got = finish_attempt(workplace, run, 137)
    assert "preempted; no rank saved a checkpoint at the end" in got.out
    assert "resume with: clusterddp resume own" in got.out


def test_a_job_slurm_put_back_meanwhile_is_taken_out(workplace: Workplace, run: RunDir) -> None:
    slurm_says(workplace, "JobState=PENDING")
    workplace.command("scancel", "exit 0")
    add_event(run, "stop_requested", job_id="17", attempt=1)
    leave(run, **STOPPED)
    finish_attempt(workplace, run, 75, requeue=True)
    assert "scancel 17" in workplace.calls
    assert kinds(run)[-2:] == ["ended", "cancelled"]


@pytest.mark.parametrize("refused", [False, True], ids=["requeued", "the next job"])
@pytest.mark.parametrize("event", ["stop_requested", "cancelled"])
def test_a_stop_during_the_requeue_takes_the_job_out_again(
    workplace: Workplace, run: RunDir, refused: bool, event: str
) -> None:
    line = json.dumps({"event": event, "job_id": "17", "attempt": 1})
    late = f"echo {shlex.quote(line)} >>{run.events}"
    slurm_says(workplace, requeue=f"{late}; exit {int(refused)}")
    workplace.command("sbatch", "/bin/cat >/dev/null; echo 18")
    workplace.command("scancel", "exit 0")
    workplace.monkeypatch.setenv("SLURM_SUBMIT_DIR", str(workplace.folder))
    run.script.write_text("#!/bin/bash\n")
    leave(run, **STOPPED)
    finish_attempt(workplace, run, 75, requeue=True)
    job_id = "18" if refused else "17"
    assert workplace.calls[-1] == f"scancel {job_id}"
    assert last(run, "cancelled")["job_id"] == job_id


def test_a_hostile_path_is_carried(workplace: Workplace, run: RunDir) -> None:
    moved = RunDir(run.path.rename(workplace.folder / "it's $(touch pwned); x"))
    leave(moved, cause="done", reason="", step=60)
    assert finish_attempt(workplace, moved, 0).code == 0
    assert not list(Path(workplace.folder).rglob("pwned"))


# -- told to end, and left with exit code 0 ------------------------------------------------------

TERM, USR1 = "SIGTERM", "SIGUSR1"
ENDED = 150.0
REACHED = "`Trainer.fit` stopped: `max_epochs=3` reached.\n"
HEARD = "[rank: 0] Received SIGTERM: 15\n"


def told(signal_name: str, before: float) -> dict[str, Any]:
    """Fields of a rank's record that got a signal so many seconds before its end."""
    return {"received_signal": {"signal": signal_name, "time": ENDED - before}, "ended": ENDED}


@pytest.mark.parametrize(
    ("ranks", "log", "cause"),
    [
        pytest.param([{}, {}], "", "done", id="nobody was told"),
        pytest.param([told(TERM, 1), told(TERM, 2)], "", "signal", id="TERM"),
        pytest.param([told(TERM, 900)] * 2, "", "signal", id="TERM, long before"),
        pytest.param([told("SIGINT", 1)] * 2, "", "signal", id="INT"),
        pytest.param([told(TERM, 1), {}], "", "done", id="one rank was told nothing"),
        pytest.param([told(USR1, 59)] * 2, "", "signal", id="USR1, left within the minute"),
        pytest.param([told(USR1, 61)] * 2, "", "done", id="USR1, saved and went on"),
        pytest.param([told(USR1, 61), told(USR1, 59)], "", "done", id="USR1, one rank went on"),
        pytest.param([told(TERM, 1)] * 2, REACHED, "done", id="Lightning had finished"),
        pytest.param([told(TERM, 1)] * 2, HEARD + REACHED, "done", id="Lightning finished still"),
        pytest.param([told(TERM, 1)] * 2, REACHED + HEARD, "signal",
         id="Lightning, told in its next fit"),
        pytest.param([told(USR1, 1)] * 2, REACHED + "Handling auto-requeue signal: 10\n", "signal",
         id="Lightning, told to save in its next fit"),
    ],
)  # fmt: skip
def test_a_command_that_ends_with_0_is_done_unless_it_was_told_to_end(
    workplace: Workplace, ranks: list[dict[str, Any]], log: str, cause: str
) -> None:
    run = command_run(workplace)
    for rank, fields in enumerate(ranks):
        record(run, rank, 0, **fields)
    run.logs.mkdir(exist_ok=True)
    run.rank_log(0).write_text(log)
    got = finish_attempt(workplace, run, 0)
    assert last(run, "ended")["cause"] == cause
    assert got.code == (0 if cause == "done" else 75)
    assert ("[CD1229]" in got.out) == (cause != "done")


def test_ranks_that_srun_tells_to_end_because_one_has_failed_have_not_been_told(
    workplace: Workplace,
) -> None:
    run = command_run(workplace)
    record(run, 0, 0, **told(TERM, 1))
    record(run, 1, 1)
    finish_attempt(workplace, run, 1)
    ended = last(run, "ended")
    assert (ended["cause"], ended["stop_signal"]) == ("failed", "")


def test_a_loops_last_word_that_it_is_done_counts_more_than_a_signal(workplace: Workplace) -> None:
    run = command_run(workplace)
    leave(run, cause="done", reason="", step=60)
    for rank in (0, 1):
        record(run, rank, 0, **told(TERM, 1))
    got = finish_attempt(workplace, run, 0, requeue=True)
    assert (got.code, last(run, "ended")["cause"]) == (0, "done")


@pytest.mark.parametrize(
    ("first", "goes_on"),
    [
        pytest.param({"cause": "signal", "stop_signal": TERM}, False, id="told before"),
        pytest.param(
            {"cause": "preempted", "stop_signal": TERM}, False, id="told before, by preemption"
        ),
        pytest.param(
            {"cause": "requeued", "stop_signal": TERM}, True, id="had requeued its job itself"
        ),
        pytest.param({"cause": "signal"}, True, id="asked with 75 before"),
    ],
)
def test_a_command_that_is_told_to_end_twice_in_a_row_stops(
    workplace: Workplace, first: dict[str, Any], goes_on: bool
) -> None:
    run = command_run(workplace)
    add_event(run, "ended", job_id="17", restart=0, attempt=1, exit_code=75, **first)
    begun(run, 2)
    record(run, 0, 0, number=2, **told(TERM, 1))
    got = finish_attempt(workplace, run, 0, requeue=True, number=2)
    assert ("scontrol requeue 17" in workplace.calls) == goes_on
    assert got.code == (0 if goes_on else 75)
    assert ("2 attempts in a row exited with code 0" in got.out) == (not goes_on)
