"""How a run is doing: read from its own directory first, from Slurm's answer second.

So it works without accounting and after Slurm has forgotten the job. `judge` is the pure heart:
events and what Slurm says in, a state and its reason out.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp import requeue
from clusterddp.attempt import latest
from clusterddp.errors import EXIT_PAUSED, ClusterDDPError
from clusterddp.nodelist import expand_nodelist
from clusterddp.outcome import Failure, first_failure, read_outcomes
from clusterddp.run_dir import RunDir, read_json
from clusterddp.slurm import JobState, State
from clusterddp.spec import submission_comment

CREATED = "created"
"""The run directory is there; nothing was submitted."""
QUEUED = "queued"
RUNNING = "running"
DONE = "done"
FAILED = "failed"
CANCELLED = "cancelled"
STOPPED = "stopped"
"""It can go on from its last checkpoint, but does not by itself."""
UNKNOWN = "unknown"
"""The job recorded no end, and Slurm cannot say or no longer knows."""

ENDED = frozenset({DONE, FAILED, CANCELLED, STOPPED})

SETTLE_SECONDS = 60.0
"""How long a job that was put back into the queue may still show how it ended."""

FORGOTTEN = "Slurm no longer knows the job"

_TAIL_BYTES = 65536
_CHECKPOINT = re.compile(r"step-(\d+)\.pt", re.ASCII)
# Why a run goes on: a word of `requeue`, in a sentence.
_AFTER = {
    requeue.TIME_LIMIT: "the time limit",
    requeue.SIGNAL: "a signal",
    requeue.PREEMPTED: "preemption",
    requeue.FAILED: "a failure",
    requeue.REQUEUED: "a requeue by Slurm",
}
# The same for a list of reasons; of a start that left no end, nobody knows more.
_REASONS = {requeue.REQUEUED: "requeued by Slurm", "": "node lost or killed"}
_WHY_FAILED = {
    State.FAILED: "the job failed",
    State.TIMEOUT: "the job reached its time limit",
    State.PREEMPTED: "the job was preempted and is not queued again",
    State.NODE_FAIL: "a node of the job failed",
    State.OUT_OF_MEMORY: "the job ran out of memory",
    State.DEADLINE: "the job's deadline passed",
    State.BOOT_FAIL: "a node of the job did not boot",
}
# Slurm's reasons for which a job as it was asked for cannot start: the others pass by waiting.
_WHY_PENDING = {
    "PartitionNodeLimit": "PartitionNodeLimit: it asks for more nodes than the partition has",
    "PartitionTimeLimit": "PartitionTimeLimit: it asks for more time than the partition gives",
    "PartitionConfig": "PartitionConfig: the partition cannot give what it asks for",
    "PartitionDown": "PartitionDown: the partition is down",
    "BadConstraints": "BadConstraints: no node has what it asks for",
    "DependencyNeverSatisfied": "DependencyNeverSatisfied: what it waits for has failed",
    "JobHeldUser": "JobHeldUser: held; 'scontrol release' lets it go",
    "JobHeldAdmin": "JobHeldAdmin: held by an administrator",
    "ReqNodeNotAvail": "ReqNodeNotAvail: a node it asks for is not available",
}
_SIGNALS = {9: "KILL", 15: "TERM", 11: "SEGV", 6: "ABRT", 2: "INT", 7: "BUS"}


@dataclass(frozen=True)
class Submission:
    """What the events say of the latest submission of a run."""

    job_id: str
    launcher: str
    pid: int | None = None
    """Of a local run: the process that controls it, on `host`."""
    host: str | None = None
    submitted: float | None = None
    """Times are seconds since the epoch."""
    first_started: float | None = None
    started: float | None = None
    """Of the latest start: a requeued job starts several times."""
    restart: int = 0
    nodelist: str = ""
    ended: float | None = None
    exit_code: int | None = None
    first_failure: str = ""
    """`Failure.describe()` of the rank that failed first."""
    cancelled: bool = False
    """Whether `clusterddp cancel` asked for its end."""
    attempt: int | None = None
    """The run's latest; None where the scripts number none."""
    restarts: int = 0
    """Starts after the first since a person last submitted the run."""
    reasons: tuple[str, ...] = ()
    """Why each of them followed, in a few words."""
    cause: str = ""
    """How it ended: a word of `requeue`; empty in the records of other scripts."""
    why: str = ""
    """Why it does not go on after that."""
    step: int | None = None
    """At which the ranks left."""
    goes_on: str = ""
    """The reason for which it was put back into the queue, until it has started again."""
    goes_on_since: float | None = None
    requeue_error: str = ""
    """Why it could not be put back."""
    stop_asked: bool = False
    """Whether `clusterddp stop` asked the latest attempt to save and leave."""

    @property
    def is_local(self) -> bool:
        return self.launcher == "local"


@dataclass(frozen=True)
class RunStatus:
    """One run, as `clusterddp status --json` prints it; None where nothing is known."""

    name: str
    state: str
    """created, queued, running, done, failed, cancelled, stopped or unknown."""
    detail: str = ""
    """Why it is in that state: what it waits for, how it failed."""
    job_id: str = ""
    launcher: str = ""
    nodes: int | None = None
    tasks_per_node: int | None = None
    world_size: int | None = None
    layout: str = ""
    """`2 nodes x 4 tasks = 8 ranks`."""
    hosts: list[str] = field(default_factory=list)
    attempt: int | None = None
    """The latest start's number, over all jobs of the run."""
    restarts: int = 0
    """Starts after the first since a person last submitted the run."""
    restart_reasons: list[str] = field(default_factory=list)
    goes_on_after: str = ""
    """Why it waits to start again, if it does."""
    checkpoint_step: int | None = None
    """Of the newest checkpoint, by its name: 'clusterddp checkpoints' verifies them."""
    checkpoint_time: float | None = None
    step: int | None = None
    epoch: int | None = None
    loss: float | None = None
    """Of the training, the latest in metrics.jsonl."""
    accuracy: float | None = None
    """On the test set: from the report when there is one, otherwise the latest evaluation."""
    warnings: list[str] = field(default_factory=list)
    created_time: float | None = None
    submitted_time: float | None = None
    started_time: float | None = None
    ended_time: float | None = None
    elapsed_seconds: float | None = None
    """From the latest start to the end, or to now."""
    exit_code: int | None = None
    first_failure: str = ""
    directory: str = ""
    next_command: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def run_status(
    run: RunDir, slurm_states: Mapping[str, JobState], now: float | None = None
) -> RunStatus:
    """The status of a run; `slurm_states` is the answer of `slurm.query` for `jobs_to_ask`."""
    now = time.time() if now is None else now
    submission = latest_submission(run.read_events())
    job = slurm_states.get(submission.job_id) if submission else None
    if job and is_another_runs(run, job):
        job = JobState(State.UNKNOWN)
    alive = process_alive(submission) if submission and submission.is_local else None
    report = _report(run, submission)
    state, detail = judge(submission, report, job, alive, now)
    latest = latest_metrics(run.metrics)
    checkpoint = newest_checkpoint(run)
    failure = ""
    # Of a cancelled run the ranks were told to end: whichever did so first is no culprit.
    if state == FAILED and submission:
        failure = submission.first_failure
        if not submission.cause:  # the script came to no verdict
            failure = failure or _first_failure(run)
    return RunStatus(
        name=run.name,
        state=state,
        detail=detail,
        **_request(run),
        **_times(run, submission, state, now),
        **_starts(submission),
        checkpoint_step=checkpoint[0] if checkpoint else None,
        checkpoint_time=checkpoint[1] if checkpoint else None,
        step=_number(report.get("steps"), latest.get("step"), as_type=int),
        epoch=_number(report.get("epochs"), latest.get("epoch"), as_type=int),
        loss=_number(latest.get("loss")),
        accuracy=_number(report.get("accuracy"), latest.get("test_accuracy")),
        warnings=_texts(report.get("warnings")),
        exit_code=_exit_code(state, submission, job),
        first_failure=failure,
        directory=str(run.path),
        next_command=_next_command(run, state, failure, submission, bool(checkpoint)),
    )


def latest_submission(events: Sequence[Mapping[str, Any]]) -> Submission | None:
    """The latest submission in a run's events, or None when nothing was submitted.

    Of a run that went on in another job it is that job, with the time at which a person submitted
    the first. A script that was given to sbatch by hand has `started` as its first record.
    """
    job_id = launcher = ""
    position = -1
    persons: float | None = None
    for index, event in enumerate(events):
        kind, seen = event.get("event"), str(event.get("job_id") or "")
        if kind == "submitted" and seen:
            job_id, launcher, position = seen, str(event.get("launcher") or "sbatch"), index
            if not event.get("in_place_of"):
                persons = _number(event.get("time"))
        elif kind == "started" and seen and seen != job_id and launcher != "local":
            job_id, launcher, position, persons = seen, "sbatch", index, None
    if not job_id:
        return None
    # A job can start before the submitting side has written its own line, so its id decides; the
    # tasks of a local run may know it by another number, so there the order does.
    own = [
        event
        for index, event in enumerate(events)
        if str(event.get("job_id") or "") == job_id or (launcher == "local" and index > position)
    ]
    found: dict[str, Any] = {"job_id": job_id, "launcher": launcher}
    for event in own:
        _take(event, found)
    if persons is not None:
        found["submitted"] = persons
    causes = requeue.causes_of(events)
    if causes:
        found["attempt"] = max(causes)
        found["restarts"] = len(causes) - 1
        found["reasons"] = tuple(reason(cause) for cause in list(causes.values())[:-1])
    else:
        found["restarts"] = found.get("restart", 0)
    return Submission(**found)


# What an end says, which the next start makes void.
_OF_THE_END = (
    "ended", "exit_code", "first_failure", "cause", "why", "step", "goes_on", "goes_on_since",
    "requeue_error", "stop_asked",
)  # fmt: skip


def _take(event: Mapping[str, Any], found: dict[str, Any]) -> None:
    """Add what one of its events says of a submission."""
    restart = _number(event.get("restart"), as_type=int) or 0
    when = _number(event.get("time"))
    kind = event.get("event")
    if kind == "submitted":
        found["submitted"] = when
        found["pid"] = _number(event.get("pid"), as_type=int)
        found["host"] = event.get("host")
        if event.get("in_place_of") and "started" not in found:
            found.update(goes_on=str(event.get("why") or "?"), goes_on_since=when)
    elif kind == "started":
        found.setdefault("first_started", when)
        found.update(started=when, restart=restart, nodelist=str(event.get("nodelist") or ""))
        found["attempt"] = _number(event.get("attempt"), as_type=int)
        for name in _OF_THE_END:
            found.pop(name, None)
    elif kind in ("stop_asked", "stop_failed"):
        found["stop_asked"] = kind == "stop_asked"
    elif kind in ("cancelled", "cancel_failed"):
        found["cancelled"] = kind == "cancelled"
    elif _is_late(event, restart, found):
        return
    elif kind == "ended":
        found.update(ended=when or 0.0, restart=restart)
        found["exit_code"] = _number(event.get("exit_code"), as_type=int)
        found["first_failure"] = _described(event.get("first_failure"))
        found["cause"] = str(event.get("cause") or "")
        found["why"] = str(event.get("why") or "")
        found["step"] = _number(event.get("step"), as_type=int)
        if found["cause"] == requeue.REQUEUED:
            found.update(goes_on=requeue.REQUEUED, goes_on_since=when)
    elif kind == "requeued":
        found.update(goes_on=str(event.get("why") or "?"), goes_on_since=when)
    elif kind == "requeue_failed":
        found["requeue_error"] = str(event.get("error") or "?")


def _is_late(event: Mapping[str, Any], restart: int, found: Mapping[str, Any]) -> bool:
    """Whether it is a word of an attempt before the latest one."""
    number = event.get("attempt")
    if isinstance(number, int) and isinstance(found.get("attempt"), int):
        return bool(number != found["attempt"])
    return event.get("event") == "ended" and restart < found.get("restart", 0)


def reason(cause: str) -> str:
    """Why a start followed another one, in a few words, from how that one ended."""
    return _REASONS.get(cause, cause)


def _described(failure: object) -> str:
    """The failure that `clusterddp finish` recorded, as a line; empty for another form."""
    try:
        return Failure(**failure).describe() if isinstance(failure, dict) else ""
    except TypeError:
        return ""  # a record of another version


def jobs_to_ask(submissions: Sequence[Submission | None]) -> list[str]:
    """The job ids of which Slurm has something to say that the run's own records do not.

    An end with exit code 0 is final. Another may be followed by a requeue, or be a cancellation
    that somebody else asked for.
    """
    return [
        one.job_id
        for one in submissions
        if one and not one.is_local and not (one.ended is not None and _settled(one))
    ]


def judge(
    submission: Submission | None,
    report: Mapping[str, Any],
    job: JobState | None,
    alive: bool | None,
    now: float | None = None,
) -> tuple[str, str]:
    """The state of a run and the reason for it.

    report: the content of report.json, empty without one.
    job: what Slurm says; None when it was not asked.
    alive: whether the process of a local run is there; None when that cannot be seen from here.
    now: seconds since the epoch.
    """
    if submission is None:
        return CREATED, "nothing was submitted, as far as the run's records tell"
    if submission.ended is not None:
        return _judge_ended(submission, job, alive, now)
    if submission.goes_on and not submission.cancelled:
        return _judge_going_on(submission, job, now)
    if submission.is_local:
        return _judge_local(submission, alive)
    if job is None:
        job = JobState(State.UNKNOWN, problem="Slurm was not asked")
    if job.state is State.UNKNOWN:
        return _judge_forgotten(submission, report, job)
    if job.state is State.PENDING:
        again = "put back into the queue by Slurm" if submission.started else ""
        return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))
    if not job.state.is_final:
        seen = "" if job.state is State.RUNNING else job.state.value
        return RUNNING, ", ".join(filter(None, (seen, _asked(submission))))
    if job.state is State.DONE:
        return DONE, "Slurm says COMPLETED; the run itself recorded no end"
    if job.state is State.CANCELLED:
        return CANCELLED, "" if submission.started else "before it started"
    why = _WHY_FAILED[job.state]
    return FAILED, f"{why} ({job.reason})" if job.reason and job.state is State.FAILED else why


def latest_metrics(path: Path) -> dict[str, Any]:
    """The latest values in metrics.jsonl; those of an evaluation are named test_loss and so on."""
    latest: dict[str, Any] = {}
    for record in _tail_records(path):
        tested = record.get("kind") == "eval"
        for name, value in record.items():
            latest[f"test_{name}" if tested and name in ("loss", "accuracy") else name] = value
    return latest


def process_alive(submission: Submission) -> bool | None:
    """Whether the process that controls a local run is there; None for another machine's.

    A process that started after the submission has only inherited the number.
    """
    import socket

    if submission.pid is None or submission.host not in (None, socket.gethostname()):
        return None
    try:
        fields = Path(f"/proc/{submission.pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return False
        return _answers_signal(submission.pid)  # no /proc: macOS
    except OSError:
        return False  # it ended while being read
    if fields[0] in "ZX":
        return False
    started = _boot_time() + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # The clock can have been set since; a number comes round again only after a long while.
    return submission.submitted is None or started <= submission.submitted + 60


def _settled(submission: Submission) -> bool:
    return submission.exit_code == 0 or submission.cancelled


def _judge_ended(
    submission: Submission, job: JobState | None, alive: bool | None, now: float | None
) -> tuple[str, str]:
    cause = submission.cause
    if cause == requeue.DONE or (not cause and submission.exit_code == 0):
        return DONE, ""
    if submission.cancelled:
        return CANCELLED, "before it started again" if submission.goes_on else ""
    if submission.goes_on:
        return _judge_going_on(submission, job, now)
    if job and job.state is State.PENDING:
        return QUEUED, ": ".join(filter(None, ("requeued", _why_pending(job))))
    if submission.requeue_error:
        error = f"it could not be started again: {submission.requeue_error}"
        return STOPPED, f"{_how(submission)}; {error}"
    if cause == requeue.CANCELLED:
        return CANCELLED, "by scancel"
    if cause and not submission.why:
        return _judge_undecided(submission, job, alive)
    if not cause:
        return _judge_code(submission.exit_code, job)
    if cause == requeue.FAILED:
        told = "" if submission.why == requeue.NO_RESTART else f"; {submission.why}"
        return FAILED, f"exit code {submission.exit_code}{told}"
    if cause == requeue.STOPPED:
        return STOPPED, f"by 'clusterddp stop'{_at(submission)}"
    if submission.why.startswith(cause):
        return STOPPED, f"{submission.why}{_at(submission)}"
    return STOPPED, f"{_how(submission)}; {submission.why}"


def _judge_going_on(
    submission: Submission, job: JobState | None, now: float | None
) -> tuple[str, str]:
    """Of a job that was put back into the queue, or submitted in another one's place."""
    again = f"goes on after {_AFTER.get(submission.goes_on, submission.goes_on)}"
    if job is None or job.problem:
        problem = job.problem if job else "Slurm was not asked"
        return UNKNOWN, f"it {again}, and Slurm could not be asked: {problem}"
    if job.state is State.UNKNOWN:
        job_id = submission.job_id
        return UNKNOWN, f"it was put back into the queue, but Slurm no longer knows job {job_id}"
    if job.state is State.CANCELLED:
        return CANCELLED, "by scancel, before it started again"
    if job.state is State.RUNNING:
        return RUNNING, "it is starting"
    since = submission.goes_on_since or 0.0
    if job.state.is_final and (time.time() if now is None else now) - since > SETTLE_SECONDS:
        what = _WHY_FAILED.get(job.state, f"Slurm says {job.state.value}")
        return FAILED, f"it was put back into the queue, and recorded no start since: {what}"
    return QUEUED, ": ".join(filter(None, (again, _why_pending(job))))


def _judge_undecided(
    submission: Submission, job: JobState | None, alive: bool | None
) -> tuple[str, str]:
    """Its end is recorded, and that it is to go on, but not that it was put back."""
    after = f"after {_AFTER.get(submission.cause, submission.cause)}"
    if submission.is_local:
        if alive:
            return RUNNING, "its script is ending"
        return STOPPED, f"{_how(submission)}; a rehearsal is not put back into a queue"
    if job is None or job.problem:
        problem = job.problem if job else "Slurm was not asked"
        return UNKNOWN, f"it is to go on {after}, and Slurm could not be asked: {problem}"
    if job.state is not State.UNKNOWN and not job.state.is_final:
        return RUNNING, f"about to go on {after}"
    state = FAILED if submission.cause == requeue.FAILED else STOPPED
    return state, f"{_how(submission)}; its script ended before it had put the job back"


def _judge_code(code: int | None, job: JobState | None) -> tuple[str, str]:
    """From the exit code alone, as of a script that came to no verdict of its own."""
    if job and job.state is State.CANCELLED:
        return CANCELLED, "by scancel"
    if job and job.state in _WHY_FAILED and job.state is not State.FAILED:
        return FAILED, _WHY_FAILED[job.state]
    if code is None:
        return FAILED, "the run recorded its end without an exit code"
    if code == EXIT_PAUSED:
        return STOPPED, "it was asked to stop, and has left"
    if code == 143:
        return FAILED, "exit code 143: ended by SIGTERM (scancel, the time limit or preemption)"
    if code > 128:
        name = _SIGNALS.get(code - 128)
        return FAILED, f"exit code {code}: {f'SIG{name}' if name else f'signal {code - 128}'}"
    return FAILED, f"exit code {code}"


def _asked(submission: Submission) -> str:
    return "asked to save and leave" if submission.stop_asked else ""


def _how(submission: Submission) -> str:
    return f"{submission.cause}{_at(submission)}"


def _at(submission: Submission) -> str:
    return "" if submission.step is None else f" at step {submission.step}"


def _why_pending(job: JobState) -> str:
    return _WHY_PENDING.get(job.reason, job.reason) if job.state is State.PENDING else ""


def _judge_local(submission: Submission, alive: bool | None) -> tuple[str, str]:
    if alive:
        if not submission.started:
            return QUEUED, "its processes are starting"
        return RUNNING, _asked(submission)
    if alive is None:
        where = f"on {submission.host}" if submission.host else "without a process id"
        return UNKNOWN, f"it was started {where}, which cannot be seen from here"
    if submission.cancelled:
        return CANCELLED, ""
    gone = f"its process {submission.pid} is gone and recorded no end"
    return FAILED, f"{gone}: it was killed, or the machine restarted"


def is_another_runs(run: RunDir, job: JobState) -> bool:
    """Whether the job is one that another run submitted: a restarted controller that has lost its
    latest jobs gives their numbers out a second time."""
    return job.comment.startswith(submission_comment("")) and job.comment != submission_comment(
        run.name
    )


def _judge_forgotten(
    submission: Submission, report: Mapping[str, Any], job: JobState
) -> tuple[str, str]:
    finished = "; its report.json is there, so the training itself finished" if report else ""
    if job.problem:
        return UNKNOWN, f"Slurm could not be asked: {job.problem}{finished}"
    if submission.cancelled:
        return CANCELLED, "" if submission.started else "before it started"
    lost = f"{FORGOTTEN}, and "
    if submission.started:
        return UNKNOWN, f"{lost}it recorded no end: killed, or its node was lost{finished}"
    return UNKNOWN, f"{lost}it never recorded a start: cancelled, or failed before its first line"


def _request(run: RunDir) -> dict[str, Any]:
    try:
        spec = run.load_spec()
    except ClusterDDPError:
        return {}  # a damaged record takes nothing from what else is known
    return {
        "nodes": spec.resources.nodes,
        "tasks_per_node": spec.resources.tasks_per_node,
        "world_size": spec.world_size,
        "layout": spec.layout,
    }


def _times(run: RunDir, submission: Submission | None, state: str, now: float) -> dict[str, Any]:
    try:
        created = run.spec.stat().st_mtime
    except OSError:
        created = None
    if submission is None:
        return {"created_time": created}
    elapsed = None
    if submission.started is not None:
        if submission.ended is not None:
            elapsed = submission.ended - submission.started
        elif state == RUNNING:
            elapsed = now - submission.started
    return {
        "created_time": created,
        "job_id": submission.job_id,
        "launcher": submission.launcher,
        "hosts": _hosts(submission.nodelist),
        "submitted_time": submission.submitted,
        "started_time": submission.started,
        "ended_time": submission.ended if state in ENDED else None,
        "elapsed_seconds": None if elapsed is None else round(max(elapsed, 0.0), 3),
    }


def _starts(submission: Submission | None) -> dict[str, Any]:
    if submission is None:
        return {}
    return {
        "attempt": submission.attempt,
        "restarts": submission.restarts,
        "restart_reasons": list(submission.reasons),
        "goes_on_after": reason(submission.goes_on) if submission.goes_on else "",
    }


def newest_checkpoint(run: RunDir) -> tuple[int, float] | None:
    """The step and the time of the checkpoint with the highest step; not verified, so cheap."""
    try:
        with os.scandir(run.checkpoints) as entries:
            found = [(int(name[1]), e) for e in entries if (name := _CHECKPOINT.fullmatch(e.name))]
        step, newest = max(found, key=lambda one: one[0])
        return step, newest.stat().st_mtime
    except (OSError, ValueError):
        return None


def _report(run: RunDir, submission: Submission | None) -> dict[str, Any]:
    """report.json, unless it is of an attempt before the latest one."""
    report = read_json(run.report) or {}
    of, latest_one = report.get("attempt"), submission.attempt if submission else None
    stale = isinstance(of, int) and latest_one is not None and of < latest_one
    return {} if stale else report


def _hosts(nodelist: str) -> list[str]:
    try:
        return expand_nodelist(nodelist) if nodelist else []
    except ClusterDDPError:
        return [nodelist]


def _exit_code(state: str, submission: Submission | None, job: JobState | None) -> int | None:
    if submission is None or state not in ENDED:
        return None
    if submission.exit_code is not None:
        return submission.exit_code
    return job.exit_code if job else None


def _first_failure(run: RunDir) -> str:
    """As the ranks' own outcomes tell it, where the script came to no verdict."""
    attempt = latest(run)
    failure = first_failure(read_outcomes(attempt.outcomes if attempt else run.outcomes))
    return failure.describe() if failure else ""


def _next_command(
    run: RunDir, state: str, failure: str, submission: Submission | None, has_checkpoint: bool
) -> str:
    if state == CREATED:
        return f"sbatch {shlex.quote(str(run.script))}"
    again = f"clusterddp resubmit {run.shown}"
    if state == STOPPED or (state == CANCELLED and has_checkpoint):
        return again
    if state == CANCELLED and not run.rank_log(0).exists() and not run.job_log.exists():
        return ""  # it never started: there is nothing to read
    if state in (QUEUED, RUNNING):
        return f"clusterddp logs -f {run.shown}"
    # Without a verdict of the script on its attempt there is little to read.
    judged = submission and submission.cause and submission.why in ("", requeue.NO_RESTART)
    if state in (FAILED, UNKNOWN) and has_checkpoint and not judged:
        return again
    rank = re.match(r"rank (\d+) ", failure)
    if rank:
        return f"clusterddp logs --rank {rank[1]} {run.shown}"
    if state in (FAILED, UNKNOWN):
        return f"clusterddp logs --job {run.shown}"
    return f"clusterddp logs {run.shown}"


def _tail_records(path: Path) -> Iterator[dict[str, Any]]:
    import json

    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:  # the first can be cut, the last torn: neither parses
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _number(*values: object, as_type: type = float) -> Any:
    """The first that is a number."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if as_type is float or math.isfinite(value):
            return as_type(value)
    return None


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0


def _answers_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody's process, at least
    return True
