"""How a run's records and Slurm's answer become one state."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp import requeue
from clusterddp.attempt import Attempt
from clusterddp.run_dir import RunDir
from clusterddp.run_status import (
    Submission,
    jobs_to_ask,
    judge,
    latest_metrics,
    latest_submission,
    process_alive,
    run_status,
)
from clusterddp.slurm import JobState, State
from clusterddp.spec import JobSpec, Resources
from clusterddp.train_config import TrainConfig

Event = dict[str, Any]


def submitted(job_id: str = "7", **fields: Any) -> Event:
    return {"event": "submitted", "time": 100.0, "job_id": job_id, "launcher": "sbatch", **fields}


def started(job_id: str = "7", restart: int = 0, **fields: Any) -> Event:
    fields = {"time": 110, "nodelist": "h[01-02]", **fields}
    return {"event": "started", "job_id": job_id, "restart": restart, **fields}


def ended(exit_code: int, job_id: str = "7", restart: int = 0, **fields: Any) -> Event:
    fields = {"time": 170, "exit_code": exit_code, **fields}
    return {"event": "ended", "job_id": job_id, "restart": restart, **fields}


def cancelled(job_id: str = "7") -> Event:
    return {"event": "cancelled", "time": 120.0, "job_id": job_id}


def local(**fields: Any) -> Event:
    return submitted("4242", launcher="local", pid=4242, **fields)


def said(state: State, reason: str = "") -> JobState:
    return JobState(state, reason, source="squeue")


def begun(number: int, job_id: str = "7", restart: int = 0, **fields: Any) -> Event:
    """A start as the scripts of now record it."""
    return started(job_id, restart, attempt=number, **fields)


def left(
    number: int, cause: str, why: str = "", job_id: str = "7", restart: int = 0, **fields: Any
) -> Event:
    """The end of an attempt as `finish` records it."""
    code = {"done": 0, "failed": 1}.get(cause, 75)
    fields = {"attempt": number, "cause": cause, "why": why, "step": 40, **fields}
    return ended(code, job_id, restart, **fields)


def requeued(number: int, why: str, **fields: Any) -> Event:
    return {"event": "requeued", "time": 175.0, "job_id": "7", "attempt": number, "why": why,
            **fields}  # fmt: skip


def in_place(job_id: str, number: int, why: str, of: str = "7") -> Event:
    return submitted(job_id, time=176.0, in_place_of=of, attempt=number, why=why)


def noted(event: str, job_id: str = "7", **fields: Any) -> Event:
    return {"event": event, "time": 172.0, "job_id": job_id, **fields}


FAILURE = {"rank": 3, "host": "h02", "reason": "KeyError: 'a'", "log": "logs/rank-3.log"}
BOOM = "rank 3 on h02 failed first: KeyError: 'a' (logs/rank-3.log)"
FORGOTTEN = JobState(State.UNKNOWN)
SILENT = JobState(State.UNKNOWN, problem="squeue: Unable to contact slurm controller")

# events, report, what Slurm says, whether the local process is alive -> state, part of the detail
TABLE: list[tuple[list[Event], Event, JobState | None, bool | None, str, str]] = [
    ([], {}, None, None, "created", "nothing was submitted"),
    ([submitted()], {}, said(State.PENDING, "Resources"), None, "queued", "Resources"),
    ([submitted()], {}, said(State.RUNNING), None, "running", ""),
    ([submitted(), started()], {}, said(State.RUNNING), None, "running", ""),
    ([submitted(), started()], {}, said(State.COMPLETING), None, "running", "completing"),
    ([submitted(), started()], {}, said(State.SUSPENDED), None, "running", "suspended"),
    ([started(), submitted()], {}, said(State.RUNNING), None, "running", ""),
    ([started()], {}, said(State.RUNNING), None, "running", ""),
    # the run's own end
    ([submitted(), started(), ended(0)], {}, None, None, "done", ""),
    ([submitted(), started(), ended(0)], {}, said(State.FAILED), None, "done", ""),
    ([submitted(), started(), ended(1)], {}, FORGOTTEN, None, "failed", "exit code 1"),
    ([submitted(), started(), ended(1)], {}, said(State.COMPLETING), None, "failed", "code 1"),
    ([submitted(), started(), ended(137)], {}, FORGOTTEN, None, "failed", "SIGKILL"),
    ([submitted(), started(), ended(143)], {}, FORGOTTEN, None, "failed", "the time limit"),
    ([submitted(), started(), ended(143)], {}, said(State.TIMEOUT), None, "failed", "time limit"),
    ([submitted(), started(), ended(143)], {}, said(State.CANCELLED), None, "cancelled", "scancel"),
    ([submitted(), started(), cancelled(), ended(143)], {}, None, None, "cancelled", ""),
    ([submitted(), started(), cancelled(), ended(0)], {}, None, None, "done", ""),
    # requeues
    ([submitted(), started(), ended(143)], {}, said(State.PENDING, "BeginTime"), None, "queued",
     "requeued: BeginTime"),
    ([submitted(), started(), ended(143), started(restart=1)], {}, said(State.RUNNING), None,
     "running", ""),
    ([submitted(), started(), started(restart=1), ended(0, restart=1)], {}, None, None, "done", ""),
    ([submitted(), started(restart=1), ended(1, restart=0)], {}, said(State.RUNNING), None,
     "running", ""),  # a late word of the attempt before
    # Slurm's word where the run recorded no end
    ([submitted(), started()], {}, said(State.TIMEOUT), None, "failed", "time limit"),
    ([submitted(), started()], {}, said(State.NODE_FAIL), None, "failed", "node"),
    ([submitted(), started()], {}, said(State.OUT_OF_MEMORY), None, "failed", "memory"),
    ([submitted(), started()], {}, said(State.PREEMPTED), None, "failed", "preempted"),
    ([submitted()], {}, said(State.FAILED, "NonZeroExitCode"), None, "failed", "NonZeroExitCode"),
    ([submitted()], {}, said(State.CANCELLED), None, "cancelled", "before it started"),
    ([submitted(), started()], {}, said(State.CANCELLED), None, "cancelled", ""),
    ([submitted(), started()], {}, said(State.DONE), None, "done", "recorded no end"),
    # nobody knows: never "done"
    ([submitted()], {}, FORGOTTEN, None, "unknown", "never recorded a start"),
    ([submitted(), started()], {}, FORGOTTEN, None, "unknown", "recorded no end"),
    ([submitted(), started()], {"accuracy": 0.9}, FORGOTTEN, None, "unknown", "report.json"),
    ([submitted(), started()], {}, SILENT, None, "unknown", "Unable to contact"),
    ([submitted(), started()], {}, None, None, "unknown", "not asked"),
    ([submitted(), cancelled()], {}, FORGOTTEN, None, "cancelled", "before it started"),
    ([submitted(), cancelled()], {}, SILENT, None, "unknown", "Unable to contact"),
    ([submitted(), cancelled(), {"event": "cancel_failed", "job_id": "7"}], {}, FORGOTTEN, None,
     "unknown", ""),
    # what the script decided at the end of an attempt
    ([submitted(), begun(1), left(1, "done")], {}, None, None, "done", ""),
    ([submitted(), begun(1), left(1, "stopped", "stopped")], {}, FORGOTTEN, None, "stopped",
     "by 'clusterddp stop' at step 40"),
    ([submitted(), begun(1), left(1, "time limit", "time limit, and requeue is off")], {},
     FORGOTTEN, None, "stopped", "time limit, and requeue is off at step 40"),
    ([submitted(), begun(1), left(1, "signal", "it has been started 3 times")], {}, SILENT, None,
     "stopped", "signal at step 40; it has been started 3 times"),
    ([submitted(), begun(1), left(1, "preempted", "preempted, and requeue is off")], {},
     said(State.FAILED), None, "stopped", "preempted"),
    ([submitted(), begun(1), left(1, "cancelled", "cancelled")], {}, said(State.CANCELLED), None,
     "cancelled", "scancel"),
    ([submitted(), begun(1), left(1, "failed", requeue.NO_RESTART)], {}, FORGOTTEN, None, "failed",
     "exit code 1"),
    ([submitted(), begun(1), left(1, "failed", "it has failed 3 times")], {}, FORGOTTEN, None,
     "failed", "exit code 1; it has failed 3 times"),
    ([submitted(), begun(1), ended(75)], {}, FORGOTTEN, None, "stopped", "asked to stop"),
    ([submitted(), begun(1), noted("stop_asked")], {}, said(State.RUNNING), None, "running",
     "asked to save and leave"),
    ([submitted(), begun(1), noted("stop_asked"), noted("stop_failed")], {}, said(State.RUNNING),
     None, "running", ""),
    # it goes on: what Slurm shows meanwhile passes
    *[([submitted(), begun(1), left(1, "time limit"), requeued(1, "time limit")], {}, said(state),
       None, "queued", "goes on after the time limit")
      for state in (State.PENDING, State.COMPLETING, State.DONE, State.FAILED, State.PREEMPTED)],
    ([submitted(), begun(1), left(1, "requeued", "Slurm has put it back")], {}, said(State.PENDING),
     None, "queued", "goes on after a requeue by Slurm"),
    ([submitted(), begun(1), left(1, "requeued", "Slurm has put it back")], {},
     said(State.NODE_FAIL), None, "queued", "goes on after a requeue by Slurm"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, said(State.RUNNING),
     None, "running", "starting"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, SILENT, None,
     "unknown", "goes on after a signal, and Slurm could not be asked"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, FORGOTTEN, None,
     "unknown", "no longer knows job 7"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, said(State.CANCELLED),
     None, "cancelled", "before it started again"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal"), cancelled()], {}, None,
     None, "cancelled", "before it started again"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal", time=1.0)], {},
     said(State.FAILED), None, "failed", "recorded no start since: the job failed"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal"), begun(2, restart=1)], {},
     said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1), begun(2, restart=1), left(1, "signal"), requeued(1, "signal")], {},
     said(State.COMPLETING), None, "running", "completing"),  # late words of the one before
    ([submitted(), begun(1), begun(2, restart=1)], {}, said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1)], {}, said(State.PENDING, "BeginTime"), None, "queued",
     "put back into the queue by Slurm: BeginTime"),
    # about to go on, when looked at in between
    ([submitted(), begun(1), left(1, "time limit")], {}, said(State.RUNNING), None, "running",
     "about to go on after the time limit"),
    ([submitted(), begun(1), left(1, "failed")], {}, said(State.COMPLETING), None, "running",
     "about to go on after a failure"),
    ([submitted(), begun(1), left(1, "time limit")], {}, FORGOTTEN, None, "stopped",
     "time limit at step 40; its script ended before"),
    ([submitted(), begun(1), left(1, "failed")], {}, said(State.FAILED), None, "failed",
     "its script ended before"),
    ([submitted(), begun(1), left(1, "time limit")], {}, SILENT, None, "unknown", "could not be"),
    ([submitted(), begun(1), left(1, "time limit"),
      noted("requeue_failed", attempt=1, error="no sbatch")], {}, said(State.FAILED), None,
     "stopped", "time limit at step 40; it could not be started again: no sbatch"),
    # another job in its place
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal")], {},
     said(State.PENDING, "Priority"), None, "queued", "goes on after a signal: Priority"),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal"), begun(2, "8")], {},
     said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1), left(1, "signal"), begun(2, "8"), in_place("8", 1, "signal")], {},
     said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal"), begun(2, "8"),
      left(2, "done", job_id="8")], {}, None, None, "done", ""),
    # resubmitted by a person
    ([submitted(), begun(1), left(1, "stopped", "stopped"), noted("resubmit", ""),
      submitted("8")], {}, said(State.PENDING), None, "queued", ""),
    # several submissions: the latest counts
    ([submitted(), started(), ended(1), submitted("8")], {}, said(State.PENDING), None, "queued",
     ""),
    ([submitted(), started(), ended(1), started("9")], {}, said(State.RUNNING), None, "running",
     ""),  # the script was given to sbatch by hand
    # runs on this workstation
    ([local()], {}, None, True, "queued", "starting"),
    ([local(), started("4242")], {}, None, True, "running", ""),
    ([local(), started("99")], {}, None, True, "running", ""),
    ([local(), started("4242"), ended(0, "4242")], {}, None, False, "done", ""),
    ([local(), started("4242"), ended(1, "4242")], {}, None, False, "failed", "exit code 1"),
    ([local(), started("4242")], {}, None, False, "failed", "process 4242 is gone"),
    ([local(), started("4242"), cancelled("4242")], {}, None, False, "cancelled", ""),
    ([local(), begun(1, "4242"), left(1, "signal", job_id="4242")], {}, None, True, "running",
     "its script is ending"),
    ([local(), begun(1, "4242"), left(1, "signal", job_id="4242")], {}, None, False, "stopped",
     "signal at step 40; a rehearsal is not put back"),
    ([local(), begun(1, "4242"), noted("stop_asked", "4242")], {}, None, True, "running",
     "asked to save"),
    ([local(host="elsewhere")], {}, None, None, "unknown", "on elsewhere"),
    # damage
    ([{"event": 5}, {"job_id": None}, submitted(time="x"), {**started(), "restart": "y"}], {},
     said(State.RUNNING), None, "running", ""),
    ([submitted(), started(), {"event": "ended", "job_id": "7"}], {}, FORGOTTEN, None, "failed",
     "without an exit code"),
]  # fmt: skip


@pytest.mark.parametrize(("events", "report", "job", "alive", "state", "detail"), TABLE)
def test_state_from_events_and_slurm(
    *,
    events: list[Event],
    report: Event,
    job: JobState | None,
    alive: bool | None,
    state: str,
    detail: str,
) -> None:
    seen, why = judge(latest_submission(events), report, job, alive, now=200.0)
    assert (seen, detail in why) == (state, True), why


def test_slurm_is_asked_only_where_it_has_something_to_say() -> None:
    settled = latest_submission([submitted("1"), started("1"), ended(0, "1")])
    failed = latest_submission([submitted("2"), started("2"), ended(1, "2")])
    given_up = latest_submission([submitted("3"), cancelled("3"), ended(143, "3")])
    going_on = latest_submission([submitted("4"), started("4")])
    here = latest_submission([local()])
    assert jobs_to_ask([settled, failed, given_up, going_on, here, None]) == ["2", "4"]


# -- the whole status ------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "jobs/mnist-1"
    spec = JobSpec(
        run_name="mnist-1",
        run_dir=str(path),
        resources=Resources(nodes=2, gpus_per_node=4),
        python="python",
        train=TrainConfig(),
    )
    path.mkdir(parents=True)
    run = RunDir(path)
    run.spec.write_text(spec.to_json())
    run.logs.mkdir()
    return run


def write_events(run: RunDir, *events: Event) -> None:
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_running_run_shows_its_progress(run: RunDir) -> None:
    write_events(run, submitted(), started())
    lines = [
        {"kind": "train", "step": 2, "epoch": 0, "loss": 2.3, "accuracy": 0.25},
        {"kind": "eval", "step": 2, "epoch": 0, "loss": 2.0, "accuracy": 0.5},
        {"kind": "train", "step": 3, "epoch": 0, "loss": 1.5, "accuracy": 0.75},
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    status = run_status(run, {"7": said(State.RUNNING)}, now=170)
    assert (status.state, status.hosts, status.elapsed_seconds) == ("running", ["h01", "h02"], 60)
    assert (status.nodes, status.tasks_per_node, status.world_size) == (2, 4, 8)
    assert (status.step, status.epoch, status.loss, status.accuracy) == (3, 0, 1.5, 0.5)
    assert (status.submitted_time, status.started_time, status.ended_time) == (100, 110, None)
    assert status.next_command == "clusterddp logs -f mnist-1"


def test_a_done_run_shows_its_report(run: RunDir) -> None:
    write_events(run, submitted(), started(), ended(0))
    run.metrics.write_text('{"step": 3, "accuracy": 0.5, "loss": 0.25}\n')
    report = {"accuracy": 0.99, "loss": 0.03, "steps": 4, "warnings": ["no GPU was seen"]}
    run.report.write_text(json.dumps(report))
    status = run_status(run, {})
    assert status.step == 4
    assert (status.state, status.accuracy, status.loss) == ("done", 0.99, 0.25)
    assert (status.exit_code, status.elapsed_seconds) == (0, 60)
    assert status.warnings == ["no GPU was seen"]


def test_a_failed_run_names_its_first_failure(run: RunDir) -> None:
    write_events(run, submitted(), started(), ended(1, first_failure=FAILURE))
    status = run_status(run, {"7": FORGOTTEN})
    assert (status.state, status.exit_code) == ("failed", 1)
    assert status.first_failure == BOOM
    assert status.next_command == "clusterddp logs --rank 3 mnist-1"


def test_the_ranks_own_records_tell_when_the_script_came_to_no_verdict(run: RunDir) -> None:
    write_events(run, submitted(), begun(1), begun(2, restart=1))
    record = {"local_rank": 0, "node_rank": 0, "host": "h01", "pid": 5, "step_id": "0"}
    for rank in (0, 1):  # rank 0 has failed in the attempt before
        folder = Attempt(run, rank + 1).outcomes
        folder.mkdir(parents=True)
        times = {"started": 111.0, "ended": 120.0 + rank, "exit_code": 3}
        whole = {"rank": rank, "job_id": "7", "restart": rank, **record, **times}
        (folder / f"rank-{rank}.json").write_text(json.dumps(whole))
    status = run_status(run, {"7": said(State.NODE_FAIL)})
    assert status.first_failure.startswith("rank 1 on h01 failed first: exit code 3")


@pytest.mark.parametrize("value", [None, 5, ["x"], "rank 1", {"rank": 1}])
def test_a_failure_in_another_form_does_not_hide_the_end(run: RunDir, value: object) -> None:
    write_events(run, submitted(), started(), ended(1, first_failure=value))
    status = run_status(run, {"7": FORGOTTEN})
    assert (status.state, status.first_failure) == ("failed", "")
    assert status.next_command == "clusterddp logs --job mnist-1"


def test_a_failed_run_that_recorded_nothing_more_still_has_a_status(run: RunDir) -> None:
    write_events(run, submitted(), started(), ended(1))
    assert run_status(run, {"7": FORGOTTEN}).state == "failed"


def test_slurms_exit_code_stands_in_for_a_missing_end(run: RunDir) -> None:
    write_events(run, submitted(), started())
    status = run_status(run, {"7": JobState(State.FAILED, "NonZeroExitCode", 73, "scontrol")})
    assert (status.state, status.exit_code) == ("failed", 73)


@pytest.mark.parametrize("content", ["", "{", "[]", "null\n", "\x00\xff"])
def test_torn_records_do_not_hide_the_run(run: RunDir, content: str) -> None:
    for path in (run.events, run.report, run.metrics, run.spec):
        path.write_text(content)
    status = run_status(run, {})
    assert (status.name, status.state, status.nodes) == ("mnist-1", "created", None)


def test_a_loss_that_is_not_a_number_is_kept_and_such_a_step_is_not(run: RunDir) -> None:
    write_events(run, submitted(), started())
    run.metrics.write_text('{"step": NaN, "loss": NaN}\n')
    status = run_status(run, {"7": said(State.RUNNING)})
    assert status.step is None
    assert str(status.loss) == "nan"


def test_only_the_end_of_long_metrics_is_read(run: RunDir) -> None:
    with run.metrics.open("w") as file:
        file.writelines(json.dumps({"step": n, "loss": 1 / (n + 1)}) + "\n" for n in range(50_000))
    assert latest_metrics(run.metrics)["step"] == 49_999


# -- starts, and what it would go on from ------------------------------------------------------


STARTS: list[tuple[list[Event], str, int | None, int, list[str], str]] = [
    # events -> job, attempt, restarts, their reasons, why it waits to start again
    ([submitted()], "7", None, 0, [], ""),
    ([submitted(), begun(1)], "7", 1, 0, [], ""),
    ([submitted(), begun(1), left(1, "time limit"), requeued(1, "time limit")], "7", 1, 0, [],
     "time limit"),
    ([submitted(), begun(1), left(1, "time limit"), requeued(1, "time limit"), begun(2, restart=1),
      begun(3, restart=2)], "7", 3, 2, ["time limit", "node lost or killed"], ""),
    ([submitted(), begun(1), left(1, "requeued")], "7", 1, 0, [], "requeued by Slurm"),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal")], "8", 1, 0, [],
     "signal"),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal"), begun(2, "8")], "8", 2,
     1, ["signal"], ""),
    ([submitted(), begun(1), left(1, "stopped", "stopped"), noted("resubmit", ""), submitted("8"),
      begun(2, "8")], "8", 2, 0, [], ""),
    ([submitted(), begun(1), left(1, "stopped", "stopped"), noted("resubmit", ""), begun(2, "8"),
      submitted("8")], "8", 2, 0, [], ""),  # the start was quicker than the record
    ([submitted(), begun(1), started(restart=1), ended(1, restart=1, cause="failed", why="no")],
     "7", 1, 0, [], ""),  # `begin` refused the second one
    ([submitted(), started(), started(restart=1)], "7", None, 1, [], ""),  # scripts of before
]  # fmt: skip


@pytest.mark.parametrize(("events", "job", "attempt", "restarts", "reasons", "goes_on"), STARTS)
def test_starts_are_counted_since_a_person_submitted(
    *,
    run: RunDir,
    events: list[Event],
    job: str,
    attempt: int | None,
    restarts: int,
    reasons: list[str],
    goes_on: str,
) -> None:
    write_events(run, *events)
    status = run_status(run, {job: said(State.RUNNING)}, now=200)
    assert (status.job_id, status.attempt, status.restarts) == (job, attempt, restarts)
    assert (status.restart_reasons, status.goes_on_after) == (reasons, goes_on)


def test_the_age_of_a_run_counts_from_the_persons_submission(run: RunDir) -> None:
    write_events(run, submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal"))
    assert run_status(run, {"8": said(State.PENDING)}).submitted_time == 100


def make_checkpoints(run: RunDir, *steps: int) -> None:
    folder = Attempt(run, 1).checkpoints
    folder.mkdir(parents=True)
    for step in steps:
        path = folder / f"step-{step:08d}.pt"
        path.touch()
        os.utime(path, (1000 + step, 1000 + step))
    run.current.symlink_to("attempts/0001")
    run.checkpoints.symlink_to("current/checkpoints")


def test_the_newest_checkpoint_is_told_by_its_name(run: RunDir) -> None:
    write_events(run, submitted(), begun(1))
    make_checkpoints(run, 100, 1200, 900)
    for name in ("step-00009999.pt.sha256", ".step-00009999.pt", "step-x.pt", "best.json"):
        (run.checkpoints / name).touch()
    status = run_status(run, {"7": said(State.RUNNING)})
    assert (status.checkpoint_step, status.checkpoint_time) == (1200, 2200)


@pytest.mark.parametrize("leads", ["nowhere", "to nothing", "to a file"])
def test_a_run_without_checkpoints_has_none(run: RunDir, leads: str) -> None:
    write_events(run, submitted(), begun(1))
    if leads == "to nothing":
        make_checkpoints(run)
    elif leads == "to a file":
        run.checkpoints.touch()
    status = run_status(run, {"7": said(State.RUNNING)})
    assert (status.checkpoint_step, status.checkpoint_time) == (None, None)


NEXT: list[tuple[list[Event], State, bool, str]] = [
    # events, Slurm's word, whether there is a checkpoint -> the command to type
    ([submitted(), begun(1), left(1, "stopped", "stopped")], State.UNKNOWN, False, "resubmit"),
    ([submitted(), begun(1), left(1, "signal", "capped")], State.UNKNOWN, True, "resubmit"),
    ([submitted(), begun(1), left(1, "signal"), noted("requeue_failed", attempt=1)], State.FAILED,
     True, "resubmit"),
    ([submitted(), begun(1)], State.NODE_FAIL, True, "resubmit"),
    ([submitted(), begun(1)], State.TIMEOUT, True, "resubmit"),
    ([submitted(), begun(1)], State.UNKNOWN, True, "resubmit"),
    ([submitted(), begun(1)], State.NODE_FAIL, False, "logs --job"),
    ([submitted(), begun(1), ended(143)], State.FAILED, True, "resubmit"),
    ([submitted(), begun(1), cancelled()], State.CANCELLED, True, "resubmit"),
    ([submitted(), begun(1), left(1, "failed", requeue.NO_RESTART)], State.FAILED, True,
     "logs --job"),
    ([submitted(), begun(1), left(1, "failed", requeue.NO_RESTART, first_failure=FAILURE)],
     State.FAILED, True, "logs --rank 3"),
    ([submitted(), begun(1), left(1, "failed", "capped", first_failure=FAILURE)], State.FAILED,
     True, "resubmit"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], State.PENDING, True,
     "logs -f"),
    ([submitted(), begun(1), left(1, "done")], State.UNKNOWN, True, "logs"),
]  # fmt: skip


@pytest.mark.parametrize(("events", "state", "has_checkpoint", "command"), NEXT)
def test_the_next_command_is_what_helps(
    *, run: RunDir, events: list[Event], state: State, has_checkpoint: bool, command: str
) -> None:
    write_events(run, *events)
    if has_checkpoint:
        make_checkpoints(run, 40)
    status = run_status(run, {"7": said(state)}, now=200)
    assert status.next_command == f"clusterddp {command} mnist-1"


def test_a_report_of_an_earlier_attempt_does_not_hide_what_is_trained_now(run: RunDir) -> None:
    events = [submitted(), begun(1), left(1, "done"), noted("resubmit", ""), submitted("8")]
    write_events(run, *events, begun(2, "8"))
    run.metrics.write_text('{"step": 50}\n')
    run.report.write_text('{"steps": 40, "accuracy": 0.9, "attempt": 1}')
    status = run_status(run, {"8": said(State.RUNNING)})
    assert (status.step, status.accuracy) == (50, None)
    write_events(run, *events, begun(2, "8"), left(2, "done", job_id="8"))
    run.report.write_text('{"steps": 60, "accuracy": 0.95, "attempt": 2}')
    assert run_status(run, {}).accuracy == 0.95


def test_an_attempt_that_was_refused_blames_no_rank_of_an_earlier_one(run: RunDir) -> None:
    refusal = ended(1, restart=1, cause="failed", why="not started again: it has been started 3")
    write_events(run, submitted(), begun(1), left(1, "requeued"), started(restart=1), refusal)
    folder = Attempt(run, 1).outcomes
    folder.mkdir(parents=True)
    record = {"rank": 0, "local_rank": 0, "node_rank": 0, "host": "h01", "pid": 5, "job_id": "7"}
    times = {"restart": 0, "step_id": "0", "started": 1.0, "ended": 2.0, "exit_code": 3}
    (folder / "rank-0.json").write_text(json.dumps({**record, **times}))
    status = run_status(run, {"7": said(State.FAILED)})
    assert (status.state, status.first_failure) == ("failed", "")
    assert "it has been started 3" in status.detail


def test_a_hostile_folder_is_quoted_in_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "it's $(touch pwned); x" / "run")
    run.path.mkdir(parents=True)
    write_events(run)
    words = shlex.split(run_status(run, {}).next_command)
    assert words == ["sbatch", str(run.script)]
    write_events(run, submitted(), begun(1), left(1, "stopped", "stopped"))
    words = shlex.split(run_status(run, {}).next_command)
    assert words == ["clusterddp", "resubmit", str(run.path)]


# -- the process of a local run --------------------------------------------------------------


def test_a_local_process_is_seen_until_it_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = Submission("1", "local", pid=process.pid, submitted=time.time())
    try:
        assert process_alive(mine) is True
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_alive(mine) is False  # a zombie runs nothing
    finally:
        process.kill()
        process.communicate()
    assert process_alive(mine) is False


def test_a_process_that_only_inherited_the_number_is_not_ours() -> None:
    assert process_alive(Submission("1", "local", pid=os.getpid(), submitted=1000.0)) is False


def test_a_process_of_another_machine_cannot_be_seen() -> None:
    assert process_alive(Submission("1", "local", pid=os.getpid(), host="elsewhere")) is None
    assert process_alive(Submission("1", "local")) is None
