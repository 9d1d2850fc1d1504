"""What is shown of a run, from its records and Slurm's answer."""

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from clusterddp.cli.commands.status import describe
from clusterddp.files import write_record
from clusterddp.preflight import evaluation
from clusterddp.preflight.evaluation import LoadMeasurements, NodeMeasurements
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.run.attempt import Attempt, begin, publish
from clusterddp.run.events import Cause
from clusterddp.run.history import NO_RESTART
from clusterddp.run.node_memory import MEMORY_COMMENT
from clusterddp.run.records import AttemptRecord, PreflightRecord
from clusterddp.run.run_dir import RunDir
from clusterddp.slurm.states import JobState, State
from clusterddp.status.status import run_status
from tests.made_events import (
    BOOM,
    FAILURE,
    FORGOTTEN,
    Event,
    begun,
    cancelled,
    ended,
    in_place,
    left,
    noted,
    requeued,
    said,
    started,
    submitted,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "jobs/mnist-1"
    spec = JobSpec(
        run_name="mnist-1", run_dir=str(path), resources=Resources(nodes=2, gpus_per_node=4),
        python="python", train=TrainConfig(),
    )  # fmt: skip
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


def test_a_hanging_run_has_no_time_left_and_names_the_command_that_shows_where(run: RunDir) -> None:
    write_events(run, submitted(), begun(1))
    at = Attempt(run, 1)
    at.outcomes.mkdir(parents=True)
    at.record.write_text('{"began": 100.0, "step": 0}')
    at.alive.write_text('{"step": 10, "planned": 20, "spent": {"first_step": 1.0, "training": 5}}')
    running = {"7": said(State.RUNNING)}
    assert run_status(run, running).seconds_left == 5.0
    (at.outcomes / "hung.json").write_text('{"ranks": [1], "reason": "in the forward pass"}')
    status = run_status(run, running)
    assert (status.detail, status.seconds_left) == ("rank 1: in the forward pass", None)
    assert status.next_command == "clusterddp stacks mnist-1"


@pytest.mark.parametrize(
    ("comment", "script", "state"),
    [
        (None, "#SBATCH --comment=clusterddp:mnist-1", "queued"),
        ("", "echo 'clusterddp: starts'", "queued"),
        ("", "#SBATCH --comment=clusterddp:mnist-1", "failed"),
        ("clusterddp:other", "#SBATCH --comment=clusterddp:mnist-1", "failed"),
        ("clusterddp:mnist-1", "#SBATCH --comment=clusterddp:mnist-1", "queued"),
        ("", "#SBATCH --nodes=1", "queued"),
        ("a site's", "#SBATCH --comment=clusterddp:mnist-1", "queued"),
    ],
)
def test_a_later_job_with_an_ended_runs_id_is_not_its_requeue(
    run: RunDir, comment: str | None, script: str, state: str
) -> None:
    write_events(run, submitted(), begun(1), left(1, Cause.FAILED))
    run.script.write_text(script)
    waits = JobState(State.PENDING, "Priority", comment=comment)
    assert run_status(run, {"7": waits}).state == state


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


@pytest.mark.parametrize(("nodes", "more"), [(1, ""), (3, " The same on 2 more nodes.")])
def test_nodes_on_which_nccl_uses_sockets_are_warned_of(run: RunDir, nodes: int, more: str) -> None:
    write_events(run, submitted(), started(attempt=1), ended(0))
    folder = run.attempts / "0001" / "outcomes"
    folder.mkdir(parents=True)
    for node in range(nodes):
        (folder / f"network-{8 * node}.json").write_text(json.dumps({"reason": f"slow {node}."}))
    assert run_status(run, {}).warnings == [f"slow 0.{more} [CD0910]"]


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
    assert status.code == "CD1202"
    status = run_status(run, {"7": said(State.FAILED)})
    assert status.why() == f"{status.first_failure} [CD1210]"


def test_a_run_that_was_cancelled_while_it_waited_to_start_again_does_not_resume(
    run: RunDir,
) -> None:
    again = [submitted(), begun(1), left(1, "requeued", "Slurm has put it back")]
    write_events(run, *again)
    assert run_status(run, {"7": said(State.PENDING)}).code == ""
    assert run_status(run, {"7": said(State.FAILED)}).code == "CD1219"
    write_events(run, *again, cancelled())
    status = run_status(run, {})
    assert (status.state, status.code) == ("cancelled", "CD1203")
    assert status.next_command == "clusterddp resume mnist-1"


@pytest.mark.parametrize("value", [None, 5, ["x"], "rank 1", {"rank": 1}])
def test_a_failure_in_another_form_does_not_hide_the_end(run: RunDir, value: object) -> None:
    write_events(run, submitted(), started(), ended(1, first_failure=value))
    status = run_status(run, {"7": FORGOTTEN})
    assert (status.state, status.first_failure) == ("failed", "")
    assert status.next_command == "clusterddp logs --job mnist-1"


def test_slurms_exit_code_stands_in_for_a_missing_end(run: RunDir) -> None:
    write_events(run, submitted(), started())
    status = run_status(run, {"7": JobState(State.FAILED, "NonZeroExitCode", 73)})
    assert (status.state, status.exit_code) == ("failed", 73)


@pytest.mark.parametrize("content", ["", "{", "[]", "null\n", "\x00\xff"])
def test_torn_records_do_not_hide_the_run(run: RunDir, content: str) -> None:
    for path in (run.events, run.report, run.metrics, run.spec):
        path.write_text(content)
    status = run_status(run, {})
    assert (status.name, status.state, status.nodes) == ("mnist-1", "created", None)
    assert status.next_command == f"clusterddp rm {run.cli_name}"  # there is no script to submit


def test_a_loss_that_is_not_a_number_is_kept_and_such_a_step_is_not(run: RunDir) -> None:
    write_events(run, submitted(), started())
    run.metrics.write_text('{"step": NaN, "loss": NaN}\n')
    status = run_status(run, {"7": said(State.RUNNING)})
    assert status.step is None
    assert str(status.loss) == "nan"


def test_only_the_end_of_long_metrics_is_read(run: RunDir) -> None:
    with run.metrics.open("w") as file:
        file.writelines(json.dumps({"step": n, "loss": 1 / (n + 1)}) + "\n" for n in range(50_000))
    write_events(run, submitted(), started())
    assert run_status(run, {"7": said(State.RUNNING)}).step == 49_999


# -- starts, and what it would go on from ------------------------------------------------------


STARTS: list[tuple[list[Event], str, int | None, int, list[str], str]] = [
    # events -> job, attempt, restarts, their reasons, why it waits to start again
    ([submitted()], "7", None, 0, [], ""),
    ([submitted(), begun(1)], "7", 1, 0, [], ""),
    ([submitted(), begun(1), left(1, "time limit"), requeued(1, "time limit")], "7", 1, 0, [],
     "time limit"),
    ([submitted(), begun(1), left(1, "time limit"), requeued(1, "time limit"), begun(2, restart=1),
      begun(3, restart=2)], "7", 3, 2, ["time limit", "killed by a requeue or node failure"], ""),
    ([submitted(), begun(1), left(1, "requeued")], "7", 1, 0, [], "requeued by Slurm"),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal")], "8", 1, 0, [],
     "signal"),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal"), begun(2, "8")], "8", 2,
     1, ["signal"], ""),
    ([submitted(), begun(1), left(1, "stopped", "stopped"), noted("resume_requested", ""),
      submitted("8"), begun(2, "8")], "8", 2, 0, [], ""),
    ([submitted(), begun(1), left(1, "stopped", "stopped"), noted("resume_requested", ""),
      begun(2, "8"), submitted("8")], "8", 2, 0, [], ""),  # the start was quicker than the record
    ([submitted(), begun(1), started(restart=1), ended(1, restart=1, cause="failed", why="no")],
     "7", 1, 0, [], ""),  # `begin` refused the second one
    ([submitted(), started(), started(restart=1)], "7", None, 1, [], ""),  # scripts of before
]  # fmt: skip


@pytest.mark.parametrize(("events", "job", "attempt", "restarts", "reasons", "goes_on"), STARTS)
def test_starts_are_counted_since_a_person_submitted(
    *, run: RunDir, events: list[Event], job: str, attempt: int | None, restarts: int,
    reasons: list[str], goes_on: str,
) -> None:  # fmt: skip
    write_events(run, *events)
    status = run_status(run, {job: said(State.RUNNING)}, now=200)
    assert (status.job_id, status.attempt, status.restarts) == (job, attempt, restarts)
    assert (status.restart_reasons, status.pending_restart_reason) == (reasons, goes_on)


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


def test_a_checkpoint_from_memory_and_the_steps_that_a_resume_repeats(run: RunDir) -> None:
    write_events(run, submitted(), begun(1), left(1, "failed", NO_RESTART))
    make_checkpoints(run, 40)
    attempt = Attempt(run, 1)
    attempt.outcomes.mkdir(parents=True, exist_ok=True)
    for rank, step in enumerate((44, 43)):
        known = {"rank": rank, "local_rank": 0, "node_rank": rank, "host": "h01", "pid": 1}
        more = {"job_id": "7", "restart": 0, "step_id": "0", "started": 1.0, "step": step}
        (attempt.outcomes / f"rank-{rank}.json").write_text(json.dumps({**known, **more}))
    status = run_status(run, {"7": said(State.FAILED)})
    assert (status.checkpoint_from_memory, status.steps_repeated) == (False, 4)
    (run.checkpoints / "step-00000040.pt").write_bytes(b"PK" + MEMORY_COMMENT)
    status = run_status(run, {"7": said(State.FAILED)})
    assert status.checkpoint_from_memory
    assert ", saved from memory; a resume repeats 4 steps\n" in describe(status)
    write_events(run, submitted(), begun(1))
    assert run_status(run, {"7": said(State.RUNNING)}).steps_repeated is None


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
    ([submitted(), begun(1), left(1, "stopped", "stopped")], State.UNKNOWN, False, "resume"),
    ([submitted(), begun(1), left(1, "signal", "capped")], State.UNKNOWN, True, "resume"),
    ([submitted(), begun(1), left(1, "signal"), noted("requeue_failed", attempt=1)], State.FAILED,
     True, "resume"),
    ([submitted(), begun(1)], State.NODE_FAIL, True, "resume"),
    ([submitted(), begun(1)], State.TIMEOUT, True, "resume"),
    ([submitted(), begun(1)], State.UNKNOWN, True, "resume"),
    ([submitted(), begun(1)], State.NODE_FAIL, False, "logs --job"),
    ([submitted(), begun(1), ended(143)], State.FAILED, True, "resume"),
    ([submitted(), begun(1), cancelled()], State.CANCELLED, True, "resume"),
    ([submitted(), cancelled()], State.CANCELLED, False, "resume"),
    ([submitted(), cancelled()], State.UNKNOWN, False, "resume"),
    ([submitted(), begun(1), left(1, "failed", NO_RESTART)], State.FAILED, True,
     "logs --job"),
    ([submitted(), begun(1), left(1, "failed", NO_RESTART, first_failure=FAILURE)],
     State.FAILED, True, "logs --rank 3"),
    ([submitted(), begun(1), left(1, "failed", "capped", first_failure=FAILURE)], State.FAILED,
     True, "resume"),
    ([submitted(), begun(1), left(1, "failed", "again", why_code="CD1232", first_failure=FAILURE)],
     State.FAILED, True, "logs --rank 3"),
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


NOT_ASKED = JobState(State.UNKNOWN, problem="squeue: no answer")
CODES: list[tuple[list[Event], State | JobState, str]] = [
    ([submitted()], State.PENDING, ""),
    ([submitted(), begun(1)], State.RUNNING, ""),
    ([submitted(), begun(1), left(1, "done")], State.UNKNOWN, ""),
    ([submitted(), begun(1), left(1, "signal", "capped")], State.UNKNOWN, "CD1208"),
    ([submitted(), begun(1), left(1, "signal"), noted("requeue_failed", attempt=1)], State.FAILED,
     "CD1225"),
    ([submitted(), begun(1), left(1, "failed", "capped", first_failure=FAILURE)], State.FAILED,
     "CD1209"),
    ([submitted(), begun(1), left(1, "failed", "capped", first_failure=FAILURE, code="CD1212")],
     State.FAILED, "CD1212"),
    ([submitted()], State.FAILED, "CD1218"),
    ([submitted(), begun(1)], State.FAILED, "CD1219"),
    ([submitted(), begun(1)], State.TIMEOUT, "CD1205"),
    ([submitted(), begun(1)], State.UNKNOWN, "CD0509"),
    ([submitted(), begun(1), left(1, "signal")], NOT_ASKED, "CD0509"),
    ([submitted(), begun(1), left(1, "signal")], State.UNKNOWN, "CD1208"),
    ([submitted(), cancelled()], State.UNKNOWN, "CD1203"),
    ([submitted(), begun(1), left(1, "time_limit"), requeued(1, "time_limit"), cancelled()],
     State.CANCELLED, "CD1203"),
]  # fmt: skip


@pytest.mark.parametrize(("events", "state", "code"), CODES)
def test_the_code_is_that_of_the_state(
    run: RunDir, events: list[Event], state: State | JobState, code: str
) -> None:
    write_events(run, *events)
    job = state if isinstance(state, JobState) else said(state)
    assert run_status(run, {"7": job}, now=200).code == code


@pytest.mark.parametrize(
    ("why", "command"),
    [("PartitionTimeLimit", "cancel"), ("BadConstraints", "cancel"), ("Priority", "logs -f")],
)
def test_a_job_that_will_never_start_is_to_be_cancelled(
    run: RunDir, why: str, command: str
) -> None:
    write_events(run, submitted())
    status = run_status(run, {"7": said(State.PENDING, why)}, now=200)
    assert status.next_command == f"clusterddp {command} mnist-1"


def test_the_next_command_of_an_array_element_is_sbatchs(run: RunDir) -> None:
    element = RunDir(run.path.rename(run.path.with_name("mnist-1-3")))
    write_events(element, submitted(), begun(1), left(1, "stopped", "stopped"))
    assert run_status(element, {}, now=200).next_command == f"sbatch --array=3 {element.script}"


def test_an_array_element_without_records_has_been_submitted(run: RunDir) -> None:
    # Its script makes the directory, some time before its first record.
    element = RunDir(run.path.rename(run.path.with_name("mnist-1-3")))
    status = run_status(element, {}, now=200)
    assert (status.state, status.detail) == ("created", "its script has recorded nothing yet")
    assert status.next_command == "clusterddp logs --job mnist-1-3"


def test_a_report_of_an_earlier_attempt_does_not_hide_what_is_trained_now(run: RunDir) -> None:
    events = [submitted(), begun(1), left(1, "done"), noted("resume_requested", ""), submitted("8")]
    write_events(run, *events, begun(2, "8"))
    run.metrics.write_text('{"step": 50}\n')
    run.report.write_text('{"steps": 40, "accuracy": 0.9, "attempt": 1}')
    status = run_status(run, {"8": said(State.RUNNING)})
    assert (status.step, status.accuracy) == (50, None)
    write_events(run, *events, begun(2, "8"), left(2, "done", job_id="8"))
    run.report.write_text('{"steps": 60, "accuracy": 0.95, "attempt": 2}')
    assert run_status(run, {}).accuracy == 0.95


def test_the_leaf_switches_of_the_latest_attempt_are_named(run: RunDir) -> None:
    write_events(run, submitted(), begun(1), left(1, "done"))
    attempt = begin(run)
    node = evaluation.Node("h01", NodeMeasurements(switch="s2"), LoadMeasurements())
    nodes = [
        node,
        replace(node, host="h02", own=NodeMeasurements(switch="s1")),
        replace(node, host="h03"),
        replace(node, host="h04", own=NodeMeasurements()),
    ]
    switches = evaluation.nodes_of_switches(nodes)
    write_record(attempt.preflight, PreflightRecord("4 nodes passed", switches=switches))
    status = run_status(run, {})
    assert status.switches == {"s1": ("h02",), "s2": ("h01", "h03")}
    assert "network     2 leaf switches: s1 (1 node), s2 (2 nodes)\n" in describe(status)


def test_an_attempt_that_was_refused_blames_no_rank_of_an_earlier_one(run: RunDir) -> None:
    refusal = ended(1, restart=1, cause="failed", why="not restarted: it has been started 3")
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
    run.script.touch()
    words = shlex.split(run_status(run, {}).next_command)
    assert words == ["sbatch", str(run.script)]
    write_events(run, submitted(), begun(1), left(1, "stopped", "stopped"))
    words = shlex.split(run_status(run, {}).next_command)
    assert words == ["clusterddp", "resume", "it's $(touch pwned); x/run"]
    assert RunDir(tmp_path / "--all" / "run").cli_name == "./--all/run"


def test_a_run_that_waits_after_preemption_takes_no_time(run: RunDir) -> None:
    write_events(run, submitted(), begun(1), left(1, Cause.REQUEUED), requeued(1, "preemption"))
    waiting = run_status(run, {"7": JobState(State.PENDING, "BeginTime")})
    assert (waiting.state, waiting.elapsed_seconds) == ("queued", None)
    write_events(run, submitted(), begun(1))
    assert run_status(run, {"7": JobState(State.RUNNING)}).elapsed_seconds is not None


def test_ranks_that_were_started_by_hand_in_a_job_show_it(run: RunDir) -> None:
    attempt = begin(run)
    publish(attempt, AttemptRecord(job_id="78", restart=0, host="h1", pid=1))
    status = run_status(run, {}, now=attempt.read_record().began + 5)
    assert (status.state, status.job_id) == ("running", "78")
    assert status.elapsed_seconds == pytest.approx(5)
    os.utime(attempt.alive, (1, 1))
    status = run_status(run, {})
    assert (status.state, status.next_command) == ("unknown", "")
    assert "send no heartbeat" in status.detail
    task = {"rank": 0, "local_rank": 0, "node_rank": 0, "host": "h1", "pid": 5}
    job = {"job_id": "78", "restart": 0, "step_id": "0"}
    began = attempt.read_record().began
    run.outcomes.mkdir()
    earlier, interrupted, failed = (began - 5, 3), (began + 5, 130), (began + 5, 3)
    for (ended_at, code), state in (
        (earlier, "unknown"),
        (interrupted, "unknown"),
        (failed, "failed"),
    ):
        whole = {**task, **job, "started": began - 9, "ended": ended_at, "exit_code": code}
        (run.outcomes / "rank-0.json").write_text(json.dumps(whole))
        status = run_status(run, {})
        assert (status.state, status.next_command) == (state, "")
    assert status.first_failure.startswith("rank 0 on h1 failed first: exit code 3")
    assert status.code == "CD1210"
    for cause, state in (("stopped", "stopped"), ("done", "done")):
        end = {"cause": cause, "reason": "signal", "step": 7, "saved": 7}
        attempt.end.write_text(json.dumps(end))
        status = run_status(run, {})
        assert (status.state, status.job_id, status.elapsed_seconds) == (state, "78", None)
        assert status.detail.startswith("its ranks were started by hand")
