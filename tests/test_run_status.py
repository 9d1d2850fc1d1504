"""How a run's records and Slurm's answer become one state."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

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
    seen, why = judge(latest_submission(events), report, job, alive)
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
    write_events(run, submitted(), started())
    run.outcomes.mkdir()
    record = {"local_rank": 0, "node_rank": 0, "host": "h01", "pid": 5, "step_id": "0"}
    for rank, job_id in ((0, "6"), (1, "7")):  # the first is of an earlier job of the run
        times = {"started": 111.0, "ended": 120.0 + rank, "exit_code": 3}
        whole = {"rank": rank, "job_id": job_id, "restart": 0, **record, **times}
        run.outcome(rank).write_text(json.dumps(whole))
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
