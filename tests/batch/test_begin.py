"""The start of a job makes an attempt, or says why not."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run import attempt as attempts
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.batch.attempts import begin_attempt
from tests.cli.made_runs import Outcome, Workplace, submitted, workplace
from tests.event_lines import add_event, read_events
from tests.request.test_spec import spec

__all__ = ["workplace"]


# The start of a job in a process of its own, of the run in the directory `one`.
BEGIN = """
import sys
from pathlib import Path
from clusterddp import log
from clusterddp.batch.begin import begin_attempt
from clusterddp.batch.job import JobStart
from clusterddp.errors import ClusterDDPError
from clusterddp.run.attempt import print_to_job_log
from clusterddp.run.run_dir import RunDir

with log.to(print_to_job_log):
    try:
        begin_attempt(JobStart(RunDir(Path("one")), "7"), 0, 0.0, lambda run: [])
    except ClusterDDPError as error:
        log.info(str(error))
        sys.exit(error.exit_code)
"""


def starts(
    workplace: Workplace, run: RunDir, *, job_id: str = "7", restart: int = 0, cap: int = 20
) -> Outcome:
    """What comes of a start of the job; `out` is the attempt's number."""
    return begin_attempt(workplace, run, job_id=job_id, restart=restart, max_requeues=cap)


def noted(event: str, job_id: str = "7", **fields: Any) -> dict[str, Any]:
    return {"event": event, "job_id": job_id, **fields}


def test_a_start_has_the_next_number_and_nothing_to_say(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7"))
    for number in (1, 2):
        got = starts(workplace, run, restart=number - 1)
        assert (got.code, got.out, got.err) == (0, f"{number}", "")
        event = read_events(run)[-1]
        assert (event["event"], event["attempt"], event["restart"]) == (
            "started", number, number - 1,
        )  # fmt: skip
        assert (event["job_id"], event["nodelist"]) == ("7", "h[01-02]")
        assert Attempt(run, number).outcomes.is_dir()


def test_an_element_of_an_array_records_the_name_that_squeue_shows(workplace: Workplace) -> None:
    run = workplace.run("one-1")
    workplace.monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "11")
    workplace.monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert starts(workplace, run, job_id="12").code == 0
    event = read_events(run)[-1]
    assert (event["job_id"], event["array_task"]) == ("12", "11_1")


def test_at_the_cap_it_does_not_start(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7"))
    assert [starts(workplace, run, cap=1).code for _ in range(3)] == [0, 0, 1]
    assert len(attempts.attempts(run)) == 2
    event = read_events(run)[-1]
    assert (event["event"], event["cause"], event["exit_code"]) == ("ended", "failed", 1)
    assert "it has been started 2 times (--max-requeues 1)" in event["why"]
    assert starts(workplace, run, cap=1).out == ""


def test_a_persons_submission_starts_the_counting_anew(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7"))
    assert starts(workplace, run, cap=0).code == 0
    assert starts(workplace, run, cap=0).code == 1
    add_event(
        run, "resume_requested"
    )  # its job can start before the line with the job's id is there
    assert starts(workplace, run, job_id="8", cap=0).out == "2"
    add_event(run, "submitted", job_id="8", launcher="sbatch")
    assert starts(workplace, run, job_id="8", cap=0).code == 1


def test_an_array_element_that_is_given_to_sbatch_again_is_counted_anew(
    workplace: Workplace,
) -> None:
    run = workplace.run("one-1")
    assert starts(workplace, run, cap=0).code == 0
    assert starts(workplace, run, job_id="8", cap=0).code == 1  # the same run, but of no array
    workplace.monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "9")
    workplace.monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert starts(workplace, run, job_id="9", cap=0).out == "2"
    assert starts(workplace, run, job_id="9", restart=1, cap=0).code == 1


@pytest.mark.parametrize("recorded", [True, False], ids=["its verdict", "its ranks' last word"])
def test_a_run_that_is_done_is_not_begun_again(workplace: Workplace, recorded: bool) -> None:
    run = workplace.run("one", submitted("7"))
    assert starts(workplace, run).code == 0
    if recorded:
        add_event(run, **noted("ended", attempt=1, cause="done", exit_code=0))
    else:  # the script was killed before it could judge
        Attempt(run, 1).record.write_text(json.dumps({"job_id": "7"}))
        Attempt(run, 1).end.write_text(json.dumps({"cause": "done", "step": 60}))
    got = starts(workplace, run, restart=1)
    assert (got.code, got.out) == (0, "")
    assert "one is already done" in got.err and got.err.endswith(" [CD1228]\n")
    assert len(attempts.attempts(run)) == 1
    assert read_events(run)[-1]["event"] == "not_started"
    status = json.loads(workplace.invoke("status", "one", "--json").out)
    assert (status["state"], status["attempt"], status["exit_code"]) == ("done", 1, 0)
    add_event(run, "resume_requested")
    assert starts(workplace, run, job_id="8").out == "2"


@pytest.mark.parametrize("event", ["stop_requested", "cancelled"])
def test_what_a_person_took_back_while_it_waited_does_not_start(
    workplace: Workplace, event: str
) -> None:
    run = workplace.run("one", submitted("7"))
    assert starts(workplace, run).code == 0
    for one in (noted("ended", attempt=1, cause="signal"), noted(event), noted("requeued")):
        add_event(run, **one)
    got = starts(workplace, run, restart=1)
    assert (got.code, got.out) == (75, "")  # as of a run that was stopped while it trained
    command = "stop" if event == "stop_requested" else "cancel"
    assert f"not restarted, because of 'clusterddp {command}'" in got.err
    assert len(attempts.attempts(run)) == 1
    ended = read_events(run)[-1]
    assert ended["exit_code"] == 75
    assert ended["cause"] == ("stopped" if event == "stop_requested" else "cancelled")
    add_event(run, "resume_requested")
    assert starts(workplace, run, job_id="8").out == "2"


def test_a_stop_that_comes_in_between_is_seen_or_finds_the_attempt(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks writes the event first and looks for the attempt then."""
    run = workplace.run("one", submitted("7"))
    make = attempts.begin

    def asked_just_before(run: RunDir) -> Attempt:
        add_event(run, "stop_requested", job_id="7")
        assert attempts.latest(run) is None  # so there is no attempt yet to leave a mark in
        return make(run)

    monkeypatch.setattr(attempts, "begin", asked_just_before)
    got = starts(workplace, run)
    assert (got.code, got.out) == (75, "")
    assert "not restarted, because of 'clusterddp stop'" in got.err


def test_a_job_given_to_sbatch_by_hand_starts_a_run_that_was_stopped(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7"), noted("stop_requested"))
    assert starts(workplace, run, job_id="9").out == "1"


def test_another_job_at_work_is_not_joined(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7"))
    assert starts(workplace, run).code == 0
    made = Attempt(run, 1)
    made.record.write_text(json.dumps({"job_id": "7", "host": "elsewhere", "pid": 1}))
    made.renew_liveness(1)
    got = starts(workplace, run, job_id="8")
    assert (got.code, got.out) == (1, "")
    assert "is still trained by job 7 on elsewhere" in got.err
    assert read_events(run)[-1]["cause"] == "failed"
    assert starts(workplace, run, job_id="7", restart=1).out == "2"  # the same job, requeued


def test_a_directory_of_a_newer_version_is_refused(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7"))
    run.spec.write_text(json.dumps({**json.loads(run.spec.read_text()), "format": 99}))
    got = starts(workplace, run)
    assert got.code == 2
    assert "newer clusterddp" in got.err
    assert attempts.attempts(run) == []
    assert_failed_at_once(workplace, run, "newer clusterddp")


def test_a_directory_that_cannot_be_written_is_said(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("7"))
    run.attempts.write_text("")  # a file in the folder's place; root may write everywhere
    got = starts(workplace, run)
    assert got.code == 1
    assert "cannot create an attempt in" in got.err
    assert "Traceback" not in got.err
    assert_failed_at_once(workplace, run, "cannot create an attempt in")


def test_a_defect_of_its_own_is_recorded_too(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workplace.run("one", submitted("7"))

    def defect(run: RunDir) -> Attempt:
        raise RuntimeError("boom")

    monkeypatch.setattr(attempts, "begin", defect)
    with pytest.raises(RuntimeError, match="boom"):
        starts(workplace, run)
    assert_failed_at_once(workplace, run, "RuntimeError: boom")


def assert_failed_at_once(workplace: Workplace, run: RunDir, why: str) -> None:
    """A run that waited to go on is failed from the moment at which it did not begin."""
    requeued = [noted("ended", attempt=1, cause="signal"), noted("requeued", why="signal")]
    lines = run.events.read_text().splitlines()
    for event in requeued:
        lines.insert(1, json.dumps({"time": time.time(), "restart": 0, **event}))
    run.events.write_text("".join(f"{line}\n" for line in lines))
    ended = read_events(run)[-1]
    assert (ended["event"], ended["cause"]) == ("ended", "failed")
    # Slurm may not have seen the end of the script yet.
    workplace.command("squeue", "echo '7|COMPLETING|None|'")
    status = json.loads(workplace.invoke("status", "one", "--json").out)
    assert status["state"] == "failed"
    assert why in status["detail"]


def test_on_a_full_disk_the_reason_goes_to_the_folder_of_the_submission(
    tmp_path: Path, small_disk: Any
) -> None:
    """Neither the run's events nor the job's log take another byte."""
    script = (
        'cp -r "$1/one" one; cat /dev/zero >filler 2>/dev/null\n'
        'cat /dev/zero >>"one/events.jsonl" 2>/dev/null\n'
        'SLURM_JOB_ID=7 SLURM_SUBMIT_DIR="$1" "$2" -c "$3" 2>/dev/full >/dev/full\n'
        'echo "exit $?"'
    )
    with RunDir.create(spec(run_dir=str(tmp_path / "one")), "") as run:
        add_event(run, "submitted", job_id="7")
    done = small_disk("size=1m", "sh", "-c", script, "sh", str(tmp_path), sys.executable, BEGIN)
    assert done.stdout.split() == ["exit", "1"], done.stderr
    said = (tmp_path / "slurm-7.out").read_text()
    assert "cannot create an attempt in" in said
    assert "No space left on device" in said


def test_a_hostile_path_is_carried(workplace: Workplace, tmp_path: Path) -> None:
    run = workplace.run("one", submitted("7"))
    moved = RunDir(run.path.rename(tmp_path / "it's $(touch pwned); x"))
    assert starts(workplace, moved).out == "1"
    assert not list(tmp_path.rglob("pwned"))
