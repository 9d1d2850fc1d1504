"""How a run's events and Slurm's answer become one state."""

import os
import signal
import subprocess
import sys
import time

import pytest

from clusterddp.run.events import parse
from clusterddp.run.history import NO_RESTART
from clusterddp.slurm.states import JobState, State
from clusterddp.status.state import Submission, jobs_to_query, judge, latest_submission
from tests.made_events import (
    FORGOTTEN,
    SILENT,
    Event,
    begun,
    cancelled,
    ended,
    in_place,
    left,
    local,
    noted,
    requeued,
    said,
    started,
    submitted,
)

LATER = JobState(State.OTHER, word="EXPLORING")
HELD = said(State.PENDING, "job requeued in held state")

# events, report, what Slurm says, whether the local process is alive -> state, part of the detail
TABLE: list[tuple[list[Event], Event, JobState | None, bool | None, str, str]] = [
    ([], {}, None, None, "created", "no submission is recorded"),
    ([], {"steps": 3}, None, None, "done", "started by hand"),
    ([submitted()], {}, said(State.PENDING, "Resources"), None, "queued", "Resources"),
    ([submitted()], {}, said(State.RUNNING), None, "running", ""),
    ([submitted(), started()], {}, said(State.RUNNING), None, "running", ""),
    ([submitted(), started()], {}, said(State.COMPLETING), None, "running", "completing"),
    ([submitted(), started()], {}, said(State.SUSPENDED), None, "running", "suspended"),
    ([started(), submitted()], {}, said(State.RUNNING), None, "running", ""),
    ([started()], {}, said(State.RUNNING), None, "running", ""),
    ([submitted()], {}, LATER, None, "queued", "Slurm reports EXPLORING, a state that"),
    ([submitted(), started()], {}, LATER, None, "running", "Slurm reports EXPLORING, a state that"),
    ([submitted(), begun(1), left(1, "time limit"), requeued(1, "time limit")], {}, LATER, None,
     "queued", "resumes after the time limit: Slurm reports EXPLORING"),
    # --requeue=expedite on healthy nodes
    ([submitted(), begun(1), left(1, "failed", NO_RESTART)], {}, HELD, None,
     "failed", "exit code 1; Slurm holds it: remove it with 'scancel 7'"),
    # the run's own end
    ([submitted(), started(), ended(0)], {}, None, None, "done", ""),
    ([submitted(), started(), ended(0)], {}, said(State.FAILED), None, "done", ""),
    ([submitted(), started(), ended(1)], {}, FORGOTTEN, None, "failed", "exit code 1"),
    ([submitted(), started(), ended(1)], {}, said(State.COMPLETING), None, "failed", "code 1"),
    ([submitted(), started(), ended(137)], {}, FORGOTTEN, None, "failed", "SIGKILL"),
    ([submitted(), started(), ended(143)], {}, FORGOTTEN, None, "failed", "the time limit"),
    ([submitted(), started(), ended(130)], {}, None, None, "stopped", "interrupted (Ctrl-C, or q"),
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
    ([submitted()], {}, FORGOTTEN, None, "unknown", "no start is recorded"),
    ([submitted(), started()], {}, FORGOTTEN, None, "unknown", "no end is recorded"),
    ([submitted(), started()], {"accuracy": 0.9}, FORGOTTEN, None, "unknown", "report.json"),
    ([submitted(), started()], {}, SILENT, None, "unknown", "Unable to contact"),
    ([submitted(), started()], {}, None, None, "unknown", "not queried"),
    ([submitted(), cancelled()], {}, FORGOTTEN, None, "cancelled", "before it started"),
    ([submitted(), cancelled()], {}, SILENT, None, "cancelled", "before it started"),
    ([submitted(), cancelled(), {"event": "cancel_failed", "job_id": "7"}], {}, FORGOTTEN, None,
     "unknown", ""),
    # what the script decided at the end of an attempt
    ([submitted(), begun(1), left(1, "done")], {}, None, None, "done", ""),
    ([submitted(), begun(1), left(1, "stopped", "stopped")], {}, FORGOTTEN, None, "stopped",
     "by 'clusterddp stop' at step 40"),
    ([submitted(), begun(1), left(1, "time limit", "time limit, and requeue is off")], {},
     FORGOTTEN, None, "stopped", "time limit, and requeue is off at step 40"),
    *[([submitted(), begun(1), left(1, cause, f"{cause}, and requeue is off", saved=False)], {},
       FORGOTTEN, None, "failed", f"{cause}, and requeue is off at step 40; it ended without")
      for cause in ("time limit", "preempted", "node lost")],
    ([submitted(), begun(1), left(1, "signal", "it has been started 3 times")], {}, SILENT, None,
     "stopped", "signal at step 40; it has been started 3 times"),
    ([submitted(), begun(1), left(1, "preempted", "preempted, and requeue is off")], {},
     said(State.FAILED), None, "stopped", "preempted"),
    ([submitted(), begun(1), left(1, "cancelled", "cancelled")], {}, said(State.CANCELLED), None,
     "cancelled", "scancel"),
    ([submitted(), begun(1), left(1, "failed", NO_RESTART)], {}, FORGOTTEN, None,
     "failed",
     "exit code 1"),
    ([submitted(), begun(1), left(1, "failed", "it has failed 3 times")], {}, FORGOTTEN, None,
     "failed", "exit code 1; it has failed 3 times"),
    ([submitted(), begun(1), ended(75)], {}, FORGOTTEN, None, "stopped", "stopped on request"),
    ([submitted(), begun(1), noted("stop_requested")], {}, said(State.RUNNING), None, "running",
     "asked to save a checkpoint and exit"),
    ([submitted(), begun(1), noted("stop_requested"), noted("stop_failed")], {},
     said(State.RUNNING), None, "running", ""),
    # it goes on: what Slurm shows meanwhile passes
    *[([submitted(), begun(1), left(1, "time limit"), requeued(1, "time limit")], {}, said(state),
       None, "queued", "resumes after the time limit")
      for state in (State.PENDING, State.COMPLETING, State.DONE, State.FAILED, State.PREEMPTED)],
    ([submitted(), begun(1), left(1, "requeued", "Slurm has put it back")], {}, said(State.PENDING),
     None, "queued", "resumes after a requeue by Slurm"),
    ([submitted(), begun(1), left(1, "requeued", "Slurm has put it back")], {},
     said(State.NODE_FAIL), None, "queued", "resumes after a requeue by Slurm"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, said(State.RUNNING),
     None, "running", "starting"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, SILENT, None,
     "unknown", "resumes after a signal; Slurm cannot be queried"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, FORGOTTEN, None,
     "unknown", "no longer knows job 7"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {}, said(State.CANCELLED),
     None, "cancelled", "before it started again"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal"), cancelled()], {}, None,
     None, "cancelled", "before it started again"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal", time=1.0)], {},
     said(State.FAILED), None, "failed", "no start is recorded since: the job failed"),
    # of that start, or of one before it, by how often Slurm has put the job back
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {},
     JobState(State.FAILED, restarts=1), None, "failed", "slurm-7.out in the directory"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {},
     JobState(State.FAILED, restarts=0), None, "queued", "resumes after a signal"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal")], {},
     JobState(State.NODE_FAIL, restarts=1), None, "queued", "resumes after a signal"),
    ([submitted(), begun(1), left(1, "signal"), requeued(1, "signal"), begun(2, restart=1)], {},
     said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1), begun(2, restart=1), left(1, "signal"), requeued(1, "signal")], {},
     said(State.COMPLETING), None, "running", "completing"),  # late words of the one before
    ([submitted(), begun(1), begun(2, restart=1)], {}, said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1), cancelled()], {}, SILENT, None, "unknown", "cannot be queried"),
    ([submitted(), begun(1)], {}, said(State.PENDING, "BeginTime"), None, "queued",
     "requeued by Slurm: BeginTime"),
    # about to resume, when looked at in between
    ([submitted(), begun(1), left(1, "time limit")], {}, said(State.RUNNING), None, "running",
     "about to resume after the time limit"),
    ([submitted(), begun(1), left(1, "failed")], {}, said(State.COMPLETING), None, "running",
     "about to resume after a failure"),
    ([submitted(), begun(1), left(1, "time limit")], {}, FORGOTTEN, None, "stopped",
     "time limit at step 40; its batch script ended before"),
    ([submitted(), begun(1), left(1, "failed")], {}, said(State.FAILED), None, "failed",
     "its batch script ended before"),
    ([submitted(), begun(1), left(1, "time limit")], {}, SILENT, None, "unknown",
     "cannot be queried"),
    ([submitted(), begun(1), left(1, "time limit"),
      noted("requeue_failed", attempt=1, error="no sbatch")], {}, said(State.FAILED), None,
     "stopped", "time limit at step 40; requeue failed: no sbatch"),
    # another job in its place
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal")], {},
     said(State.PENDING, "Priority"), None, "queued", "resumes after a signal: Priority"),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal"), begun(2, "8")], {},
     said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1), left(1, "signal"), begun(2, "8"), in_place("8", 1, "signal")], {},
     said(State.RUNNING), None, "running", ""),
    ([submitted(), begun(1), left(1, "signal"), in_place("8", 1, "signal"), begun(2, "8"),
      left(2, "done", job_id="8")], {}, None, None, "done", ""),
    # resumed by a person
    ([submitted(), begun(1), left(1, "stopped", "stopped"), noted("resume_requested", ""),
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
    ([local(), started("4242")], {}, None, False, "failed", "process 4242 ended without a record"),
    ([local(), started("4242"), cancelled("4242")], {}, None, False, "cancelled", ""),
    ([local(), begun(1, "4242"), left(1, "signal", job_id="4242")], {}, None, True, "running",
     "its batch script is finishing"),
    ([local(), begun(1, "4242"), left(1, "signal", job_id="4242")], {}, None, False, "stopped",
     "signal at step 40; a rehearsal is not requeued"),
    ([local(), begun(1, "4242"), left(1, "failed", job_id="4242")], {}, None, False, "failed",
     "; a rehearsal is not requeued"),
    ([local(), begun(1, "4242"), noted("stop_requested", "4242")], {}, None, True, "running",
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
    *, events: list[Event], report: Event, job: JobState | None, alive: bool | None, state: str,
    detail: str,
) -> None:  # fmt: skip
    seen, why = judge(latest_submission([parse(e) for e in events]), report, job, alive, now=200.0)
    assert (seen, detail in why) == (state, True), why


def test_slurm_is_asked_only_where_it_has_something_to_say() -> None:
    settled = latest_submission([parse(e) for e in [submitted("1"), started("1"), ended(0, "1")]])
    failed = latest_submission([parse(e) for e in [submitted("2"), started("2"), ended(1, "2")]])
    given_up = latest_submission(
        [parse(e) for e in [submitted("3"), cancelled("3"), ended(143, "3")]]
    )
    going_on = latest_submission([parse(e) for e in [submitted("4"), started("4")]])
    here = latest_submission([parse(e) for e in [local()]])
    assert jobs_to_query([settled, failed, given_up, going_on, here, None]) == ["2", "4"]


def test_a_local_process_is_seen_until_it_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine = Submission("1", "local", pid=process.pid, submitted=time.time())
    try:
        assert mine.is_alive is True
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert mine.is_alive is False  # a zombie runs nothing
    finally:
        process.kill()
        process.communicate()
    assert mine.is_alive is False


def test_a_process_that_only_inherited_the_number_is_not_ours() -> None:
    assert Submission("1", "local", pid=os.getpid(), submitted=1000.0).is_alive is False


def test_a_process_of_another_machine_cannot_be_seen() -> None:
    assert Submission("1", "local", pid=os.getpid(), host="elsewhere").is_alive is None
    assert Submission("1", "local").is_alive is None
