"""Status of a run: found by name, job id or directory, and put together from its parts.

Its parts are the latest submission and the state (`state`), and what the training has left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clusterddp import files, formatting
from clusterddp.errors import EXIT_INTERRUPTED, coded
from clusterddp.request.spec import JobSpec, submission_comment
from clusterddp.run import bad_nodes, events
from clusterddp.run.attempt import Attempt, latest, printed_bytes
from clusterddp.run.events import Cause, Ended, Failure, Started
from clusterddp.run.history import NO_RESTART, History, steps_gained
from clusterddp.run.outcome import HUNG, first_failure, last_renewal, read_outcomes
from clusterddp.run.records import (
    AttemptRecord,
    HungRanks,
    MetricsLine,
    PreflightRecord,
    Report,
    Silence,
)
from clusterddp.run.run_dir import RunDir, newest_checkpoint
from clusterddp.slurm.client import query, slurmd_timeout
from clusterddp.slurm.forms import hosts_of
from clusterddp.slurm.states import JobState, State
from clusterddp.status import end_codes
from clusterddp.status.state import (
    ACTIVE,
    ENDED,
    HELD_BACK,
    NEVER_STARTS,
    NO_START,
    NOT_LAUNCHED,
    RunState,
    Submission,
    jobs_to_ask,
    judge,
    latest_submission,
    reason,
)

T = TypeVar("T")

_METRICS_BYTES = 65536
_LEAVES_WITHIN_SECONDS = 60.0
"""Time after `clusterddp stop` from which on a run that has not left needs somebody to look."""
_NOT_PRINTED = ("failed_rank", "is_forgotten")
_LOST_SECONDS = 60.0
"""Time beyond SlurmdTimeout after which a silent batch controller is taken for lost."""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run; None where nothing is known."""

    name: str
    """Name of the run, of its directory too."""
    state: RunState
    """created, queued, running, done, failed, cancelled, stopped or unknown."""
    detail: str = ""
    """Reason for the state: what it waits for, how it failed."""
    job_id: str = ""
    """Slurm's id of the latest job; of a rehearsal the number of its process; empty without one."""
    array_element: str = ""
    """Name by which Slurm's commands take the job, 89_0, where it is an array's element."""
    launcher: str = ""
    """`sbatch`, `submitit` or `local`; empty where nothing was submitted."""
    nodes: int | None = None
    """Nodes that were asked for, without spare ones."""
    spare_nodes: int | None = None
    """Nodes beside these that Slurm is asked for."""
    tasks_per_node: int | None = None
    """Ranks on each node."""
    world_size: int | None = None
    """Number of ranks that were asked for."""
    layout: str = ""
    """`2 nodes x 4 tasks = 8 ranks, and 1 spare node`."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of the latest start."""
    preflight: str = ""
    """Line on the checks of its nodes ahead of the latest attempt's tasks; empty without them."""
    attempt: int | None = None
    """Number of the latest attempt, over all jobs of the run."""
    restarts: int = 0
    """Starts after the first since a person last submitted the run."""
    restart_reasons: list[str] = field(default_factory=list)
    """Reason for each of these starts, as far as it is known."""
    goes_on_after: str = ""
    """Reason for which it waits to start again, if it does."""
    waits_for: list[str] = field(default_factory=list)
    """Runs that it waits for in the queue, `a` or `b:any`; empty once it may begin."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint, by its name: 'clusterddp checkpoints' verifies them."""
    checkpoint_time: float | None = None
    """Time at which that checkpoint was written."""
    step: int | None = None
    """Steps that are done, over all attempts."""
    steps_planned: int | None = None
    """Step at which the training will be done; None where nobody knows, as of a COMMAND."""
    percent_done: float | None = None
    """Share of these steps that is done, from 0 to 100."""
    seconds_left: float | None = None
    """Seconds until then while it runs, by the pace of late."""
    expected_start: float | None = None
    """Slurm's estimate of its start while it is queued, in seconds since the epoch."""
    epoch: int | None = None
    """Epoch of the latest step, from 1."""
    loss: float | None = None
    """Loss of the training, the latest in metrics.jsonl."""
    accuracy: float | None = None
    """Accuracy on the test set: from the report if there is one, else the latest evaluation."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Bad nodes that the run's next start leaves out, and why; without those cleared since."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the training, and what is to be known of the latest end."""
    created_time: float | None = None
    """Time at which its request was written."""
    submitted_time: float | None = None
    """Time at which a person last submitted it."""
    started_time: float | None = None
    """Time of the latest start."""
    ended_time: float | None = None
    """Time of its end; None until it has ended."""
    elapsed_seconds: float | None = None
    """Seconds from the latest start to the end, or to now; None while it waits in the queue."""
    exit_code: int | None = None
    """Exit code of its latest attempt's job; None until it has ended, and where nothing has run, as
    of one cancelled in the queue."""
    code: str = ""
    """Code of its end, or of why it never starts, for `clusterddp explain`."""
    first_failure: str = ""
    """Rank that failed first, its host, its error and its log, in words; empty where none did."""
    cleaned: str = ""
    """What `clusterddp clean` has removed since it was last submitted, and when."""
    directory: str = ""
    """Directory of the run, as --runs-dir leads to it."""
    works_in: str = ""
    """Folder in which the tasks run a person's code, where its relative output lies."""
    next_command: str = ""
    """Command to type next; empty where there is nothing to do."""
    failed_rank: int | None = None
    """Rank of `first_failure`; not printed, like the next one."""
    is_forgotten: bool = False
    """True where nobody recorded an end of its job, and Slurm no longer knows it."""

    def as_dict(self) -> dict[str, object]:
        """Return what `clusterddp status --json` prints."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if name not in _NOT_PRINTED}

    def why(self, *, in_short: bool = False) -> str:
        """Return the reason for the state with its code, `rank 3 failed first: … [CD1209]`.

        in_short: of a reason of several lines the first alone.
        """
        why = self.first_failure or self.detail
        return coded(why.partition("\n")[0] if in_short else why, self.code).strip()

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def run_status(
    run: RunDir, slurm_states: Mapping[str, JobState], now: float | None = None
) -> RunStatus:
    """Put the status together; `slurm_states`: what `slurm.client` answers for `jobs_to_ask`."""
    now = time.time() if now is None else now
    history = History.read(run)  # not earlier: a run can record its end while Slurm is asked
    submission = latest_submission(history.events)
    state, detail, job, report = _judge(history, submission, slurm_states, now)
    waits = _waits(history, submission, job) if submission and state == RunState.QUEUED else None
    by_hand = None if submission else _started_by_hand(run)
    if by_hand:
        state, detail = _judge_by_hand(by_hand, report)
    is_stuck = state == RunState.RUNNING and _ignores_stop(submission, job, now)
    figures, lines = report or Report(), _last_lines(run.metrics)
    latest = _summed_up(lines)
    done = progress(_latest_attempt(run), lines)
    checkpoint = newest_checkpoint(run.checkpoints)
    failure = _failure(run, state, submission, by_hand)
    known = submission or _by_hand(by_hand)
    return RunStatus(
        name=run.name,
        state=state,
        detail=_explained(run, state, detail, waits, is_stuck=is_stuck),
        job_id=known.job_id,
        array_element=known.start.array_element or (job.element if job else ""),
        launcher=known.launcher,
        **_asked_for(history.spec),
        hosts=hosts_of(known.start.nodelist),
        preflight=_preflight(run, known.attempt),
        attempt=known.attempt,
        restarts=known.restarts,
        restart_reasons=list(known.reasons),
        goes_on_after=reason(known.put_back) if known.put_back else "",
        waits_for=list(waits.runs) if waits else [],
        checkpoint_step=checkpoint[0] if checkpoint else None,
        checkpoint_time=checkpoint[1] if checkpoint else None,
        step=first_known(figures.steps, done.step),
        steps_planned=first_known(figures.steps, done.planned),
        percent_done=100.0 if figures.steps else done.percent,
        seconds_left=done.seconds_left if state == RunState.RUNNING else None,
        expected_start=_expected_start(state, job, waits),
        epoch=first_known(figures.epochs, latest.epoch),
        loss=latest.loss,
        accuracy=first_known(figures.accuracy, latest.accuracy),
        left_out=_left_out(history, state, known.job_id),
        warnings=[*filter(None, (*figures.warnings, known.end.remark if known.end else ""))],
        **_times(run, known, state, now),
        exit_code=_exit_code(state, submission, job),
        code=_code(state, known, failure, job),
        first_failure=failure.describe() if failure else "",
        cleaned=_cleaned(history.events),
        directory=str(run.path),
        works_in=_works_in(history),
        next_command=_next_command(
            run, state, failure, submission, bool(checkpoint), job, is_stuck=is_stuck
        ),
        failed_rank=failure.rank if failure else None,
        is_forgotten=state == RunState.UNKNOWN and _is_forgotten(submission, job),
    )


def _judge(
    history: History,
    submission: Submission | None,
    slurm_states: Mapping[str, JobState],
    now: float,
) -> tuple[RunState, str, JobState | None, Report | None]:
    """Return a run's state and the reason for it, and what they were judged from."""
    run = history.run
    job = slurm_states.get(submission.job_id) if submission else None
    if job and is_another_runs(run, job):
        job = JobState(State.UNKNOWN)
    alive = submission.is_alive if submission and submission.is_local else None
    report = latest_report(run, submission.attempt if submission else None)
    may_start = submission and (
        submission.put_back or (submission.end and submission.end.exit_code)
    )
    if submission and may_start and not _resumes(history):
        submission = dataclasses.replace(submission, resumes=False)
    state, detail = judge(submission, report, job, alive, now)
    if state == RunState.RUNNING and submission and job and job.state is State.RUNNING:
        state, detail = _lost(run, submission, now) or (state, detail)
    if state == RunState.CREATED and run.array_index:  # by the script itself
        detail = "its script has recorded nothing yet"
    elif state == RunState.CREATED and _is_rehearsed(history.spec):
        detail = "its turn in the rehearsal, which runs one point after the other, has not come"
        if lost_turn(history.again()):
            state, detail = RunState.CANCELLED, "ahead of its turn in the rehearsal"
    return state, detail, job, report


def _explained(
    run: RunDir, state: RunState, detail: str, waits: events.Waits | None, *, is_stuck: bool
) -> str:
    """Add to the reason for a state what the run's other records say of it."""
    if waits:
        return f"waits for {waits.why if waits.held else ', '.join(waits.runs)}"
    if is_stuck:
        detail += (
            f" more than a minute ago, and still at work: 'clusterddp stacks {run.cli_name}' "
            f"shows where its ranks are, 'clusterddp cancel {run.cli_name}' ends it now"
        )
    if state == RunState.RUNNING and (at := _latest_attempt(run)):
        return ", ".join(filter(None, (detail, _hang(at))))
    return detail


def _asked_for(spec: JobSpec | None) -> dict[str, Any]:
    """Return the fields on what was asked for."""
    if spec is None:
        return {}
    asked = spec.resources
    return {
        **{name: getattr(asked, name) for name in ("nodes", "spare_nodes", "tasks_per_node")},
        "world_size": spec.world_size,
        "layout": spec.layout,
    }


def _needs_cancel(state: RunState, job: JobState | None) -> bool:
    """Return whether the job never starts, or runs without its script: a person has to end it."""
    if job is None:
        return False
    never_starts = state == RunState.QUEUED and job.reason in NEVER_STARTS
    return never_starts or (state == RunState.UNKNOWN and job.state is State.RUNNING)


def _lost(run: RunDir, submission: Submission, now: float) -> tuple[RunState, str] | None:
    """Return the state of a run whose batch controller was lost, and the reason; None of others.

    Slurm shows a job as running whose script was lost with all of its host's processes, where its
    slurmd was back at once.
    """
    if submission.is_local or submission.attempt is None:
        return None
    try:
        changed = last_renewal(Attempt(run, submission.attempt).controller)
    except OSError:  # submitit has none
        return None
    silent = now - changed
    if silent < _LOST_SECONDS or silent < slurmd_timeout() + _LOST_SECONDS:
        return None
    return RunState.UNKNOWN, (
        f"lost: its batch script has shown no life for {formatting.duration(silent)}, though Slurm "
        f"says that job {submission.job_id} runs. End that with "
        f"'clusterddp cancel {run.cli_name}', then resume with '{run.resume_command}'"
    )


def _hang(attempt: Attempt) -> str:
    """Say that an attempt's ranks have printed nothing for long, or which of them hang."""
    hung = files.read(HungRanks, attempt.outcomes / HUNG) or HungRanks()
    silent = files.read(Silence, attempt.silent)
    if hung.ranks:
        ranks = formatting.join_limited([str(rank) for rank in hung.ranks], 8, ", ")
        return f"{'ranks' if len(hung.ranks) > 1 else 'rank'} {ranks}: {hung.reason}"
    if silent is None or printed_bytes(attempt.run) != silent.printed:
        return ""
    ranks = formatting.join_limited([str(rank) for rank in silent.ranks], 8, ", ")
    who = f"; rank {ranks} is in {silent.places}" if ranks else ""
    since = f"no rank has printed anything since {formatting.moment(silent.since)}"
    return f"{since}{who}; the job's log has their stacks"


def _ignores_stop(submission: Submission | None, job: JobState | None, now: float) -> bool:
    """Return whether the ranks have been at work for long since a person asked them to leave."""
    if submission is None or submission.end or not submission.stop_asked:
        return False
    if job and job.state is State.SUSPENDED:
        return False
    return now - (submission.stop_asked_time or now) > _LEAVES_WITHIN_SECONDS


def _resumes(history: History) -> bool:
    """Return whether the run's next start resumes, as far as is known: of a COMMAND with a Loop."""
    attempt = _latest_attempt(history.run)
    return attempt is None or steps_gained(attempt, history.spec) is not None


def _is_rehearsed(spec: JobSpec | None) -> bool:
    return bool(spec and spec.point and spec.launcher == "local")


def lost_turn(history: History) -> bool:
    """Return whether a point was cancelled since a person submitted it to a rehearsal."""
    cancelled = False
    for event in history.events:
        if isinstance(event, events.CancelAsked | events.Resubmitted):
            cancelled = isinstance(event, events.CancelAsked)
    return cancelled


def _cleaned(history: Sequence[events.Event]) -> str:
    """Say what `clusterddp clean` has removed since a job of the run was last queued or started."""
    words: list[str] = []
    for event in history:
        if isinstance(event, events.Cleaned):
            day = time.strftime("%Y-%m-%d", time.localtime(event.time))
            words.append(f"{event.describe()} ({formatting.size(event.bytes)}) on {day}")
        elif isinstance(event, events.Submitted | Started):
            words = []
    return "; ".join(words)


def _waits(history: History, submission: Submission, job: JobState | None) -> events.Waits | None:
    """Find what the job waits for, unless Slurm holds it back for another reason by now."""
    if submission.start.time or (job and job.reason not in HELD_BACK):
        return None
    waits = history.every(events.Waits)
    return next((event for event in waits[::-1] if event.job_id == submission.job_id), None)


def _expected_start(
    state: RunState, job: JobState | None, waits: events.Waits | None
) -> float | None:
    """Return Slurm's estimate; none for what is held or waits for another run."""
    return (
        job.start
        if state == RunState.QUEUED and job and not (waits or job.reason in NO_START)
        else None
    )


def _left_out(history: History, state: RunState, job_id: str) -> Mapping[str, str]:
    """Return the bad nodes that the job leaves out, or a new job in the place of one that ended."""
    if state == RunState.DONE:
        return {}
    try:
        bad = bad_nodes.read(history.run.path.parent)
    except OSError:
        bad = None
    if bad is not None and state in ENDED:
        return {host: node.reason for host, node in bad.items()}
    of_job = [event for event in history.every(events.NodesExcluded) if event.job_id == job_id]
    if not of_job:
        return {}
    recorded = of_job[-1].nodes
    return {host: why for host, why in recorded.items() if bad is None or host in bad}


def _works_in(history: History) -> str:
    """Return the folder in which a person's code starts; empty where there is none, or unknown."""
    run, spec = history.run, history.spec
    if spec is None or not spec.uses_own_code:
        return ""
    if spec.container_workdir:
        return f"{spec.container_workdir} of the container"
    return str(run.code_folder.absolute()) if run.code.is_dir() else history.folder


def _last_lines(path: Path) -> list[MetricsLine]:
    tail = files.parse_json_lines(files.read_tail(path, _METRICS_BYTES))
    return [line for values in tail if (line := files.load(MetricsLine, values)) is not None]


def _summed_up(lines: Sequence[MetricsLine]) -> MetricsLine:
    latest = MetricsLine()
    for line in lines:
        if line.step >= 0:
            latest = dataclasses.replace(latest, step=line.step, epoch=line.epoch)
        if line.tested:
            latest = dataclasses.replace(latest, accuracy=line.accuracy)
        elif line.loss is not None:
            latest = dataclasses.replace(latest, loss=line.loss)
    return latest


def _latest_attempt(run: RunDir) -> Attempt | None:
    with contextlib.suppress(OSError):
        return latest(run)
    return None


def latest_report(run: RunDir, attempt: int | None) -> Report | None:
    """Read report.json, unless it is of an attempt before that, the latest one."""
    report = files.read(Report, run.report)
    if report is None or report.attempt is None or attempt is None:
        return report
    return None if report.attempt < attempt else report


def _preflight(run: RunDir, attempt: int | None) -> str:
    of = Attempt(run, attempt or 0)
    quick = files.read(PreflightRecord, of.preflight) or PreflightRecord()
    full = files.read(PreflightRecord, of.full_preflight) or PreflightRecord()
    return "; ".join(filter(None, (quick.summary, full.summary and f"full: {full.summary}")))


def _failure(
    run: RunDir, state: RunState, submission: Submission | None, by_hand: Attempt | None
) -> Failure | None:
    """Find the rank that failed first in a run that has failed.

    Ranks of a cancelled run were told to end: whichever did so first is no culprit.
    """
    if state != RunState.FAILED:
        return None
    if submission is None:
        return _failure_by_hand(by_hand) if by_hand else None
    if submission.end and (submission.end.first_failure or submission.end.cause):
        return submission.end.first_failure
    attempt = latest(run)  # the script came to no verdict
    return first_failure(read_outcomes(attempt.outcomes if attempt else run.outcomes))


def _is_forgotten(submission: Submission | None, job: JobState | None) -> bool:
    if submission is None or submission.is_local or submission.put_back:
        return False
    unknown = job is not None and job.state is State.UNKNOWN and not job.problem
    return unknown and submission.end is None


def _started_by_hand(run: RunDir) -> Attempt | None:
    """Find the latest attempt of a run that nothing submitted: `srun clusterddp train`, say."""
    attempt = _latest_attempt(run)
    return attempt if attempt and attempt.read_record() else None


def _by_hand(attempt: Attempt | None) -> Submission:
    """Return what stands in for a submission: the job in which ranks met, if any, and when."""
    record = (attempt and attempt.read_record()) or AttemptRecord()
    number = attempt.number if attempt else None
    return Submission(record.job_id, "", start=Started(time=record.began), attempt=number)


def _judge_by_hand(attempt: Attempt, report: Report | None) -> tuple[RunState, str]:
    """Judge from the attempt's own records alone: much else may go on in the job."""
    how = "its ranks were started by hand"
    final_record = attempt.read_final_record()
    if final_record:
        if final_record.cause == RunState.DONE:
            return RunState.DONE, how
        return (
            RunState.STOPPED,
            f"{how}, and have saved at step {final_record.step} ({final_record.reason})",
        )
    if _failure_by_hand(attempt):
        return RunState.FAILED, how
    with contextlib.suppress(OSError):
        if attempt.is_alive():
            return RunState.RUNNING, how
    if report:
        return RunState.DONE, how
    return RunState.UNKNOWN, f"{how}, show no sign of life and recorded no end"


def _failure_by_hand(attempt: Attempt) -> Failure | None:
    """Find the rank that failed first since the ranks met; one that was interrupted has not.

    Without a script the tasks know no number of their start, and record their ends in the run.
    """
    record = attempt.read_record()
    began = (record.began if record else None) or 0.0
    return first_failure(
        [
            outcome
            for outcome in read_outcomes(attempt.run.outcomes)
            if (outcome.ended or 0.0) >= began and outcome.exit_code != EXIT_INTERRUPTED
        ]
    )


def is_another_runs(run: RunDir, job: JobState) -> bool:
    """Return whether another run submitted the job.

    A restarted slurmctld that has lost its latest jobs gives their numbers out a second time.
    """
    comments = {submission_comment(run.name)}
    name, _, index = run.name.rpartition("-")
    if job.element and job.element.endswith(f"_{index}"):
        # Each element is a run, RUN-INDEX; the comment is RUN's.
        comments.add(submission_comment(name))
    return job.comment.startswith(submission_comment("")) and job.comment not in comments


def _times(run: RunDir, submission: Submission, state: RunState, now: float) -> dict[str, Any]:
    """Return the fields on times; no seconds have elapsed in the queue."""
    started, end = submission.start.time, submission.end
    times: dict[str, float | None] = {"submitted_time": submission.submitted}
    with contextlib.suppress(OSError):
        times["created_time"] = run.spec.stat().st_mtime
    if started is not None and state != RunState.QUEUED and (end or state == RunState.RUNNING):
        until = (end.time or 0.0) if end else now
        times["elapsed_seconds"] = round(max(until - started, 0.0), 3)
    if end and state in ENDED:
        times["ended_time"] = end.time
    return {**times, "started_time": started}


def _code(
    state: RunState, submission: Submission, failure: Failure | None, job: JobState | None
) -> str:
    """Return the code of a run's end, or of why it never starts; empty where neither is known."""
    if state == RunState.QUEUED:
        return end_codes.NEVER_STARTS if job and job.reason in NEVER_STARTS else ""
    if state == RunState.UNKNOWN:  # whatever the last attempt came to
        return end_codes.OF_RUN[state]
    if state not in ENDED or state == RunState.DONE:
        return ""
    # Of a job that is back in the queue, what the attempt before came to is another thing.
    end = None if submission.put_back else submission.end
    if state == RunState.CANCELLED and not (end and end.cause == Cause.NOT_DUE):
        return end_codes.OF_RUN[state]
    if state == RunState.STOPPED and submission.requeue_error:
        return end_codes.NOT_RESUMED
    if end and (code := end.code or end_codes.OF_CAUSE.get(end.cause, "")):
        return code
    says_why = job and job.state in end_codes.OF_STATE.keys() - {State.FAILED}
    if failure and not says_why:
        return end_codes.of_failure(failure)
    if state != RunState.FAILED:
        return end_codes.OF_RUN[state]
    if job is None or (job.state is State.FAILED and submission.start.time):
        return end_codes.UNEXPLAINED
    return end_codes.OF_STATE.get(job.state, end_codes.UNEXPLAINED)


def _exit_code(state: RunState, submission: Submission | None, job: JobState | None) -> int | None:
    if submission is None or state not in ENDED:
        return None
    if submission.end and submission.end.exit_code is not None:
        return submission.end.exit_code
    # Slurm's 0 of what never ran is no code, and neither is its 0:53 of what it could not start.
    is_none = state == RunState.CANCELLED or (job is not None and job.reason == NOT_LAUNCHED)
    has_run = submission.start.time or not is_none
    return job.exit_code if job and has_run else None


def _next_command(
    run: RunDir,
    state: RunState,
    failure: Failure | None,
    submission: Submission | None,
    has_checkpoint: bool,
    job: JobState | None,
    *,
    is_stuck: bool,
) -> str:
    """Return the command to type next; is_stuck: the ranks have not left as they were asked to."""
    if state == RunState.CREATED:
        if run.array_index:
            return f"clusterddp logs --job {run.cli_name}"
        if run.sweep:  # whose script starts all points
            return run.resume_command
        return f"sbatch {shlex.quote(str(run.script))}"
    if submission is None:  # its ranks printed to a terminal, and nothing can be sent again
        return f"clusterddp report {run.cli_name}" if state == RunState.DONE else ""
    if is_stuck:
        return f"clusterddp stacks {run.cli_name}"
    if _needs_cancel(state, job):
        return f"clusterddp cancel {run.cli_name}"
    if (
        state == RunState.FAILED
        and not submission.start.time
        and job
        and job.reason == NOT_LAUNCHED
    ):
        return f"scontrol show job {submission.job_id}"
    again = run.resume_command
    # One that was cancelled before it started has nothing to read; here it was in no queue.
    logs = run.rank_log(0), run.job_log
    is_silent = not any(path.exists() for path in logs)
    if state == RunState.CANCELLED:
        was_due = not (submission.end and submission.end.cause == Cause.NOT_DUE)
        if submission.put_back or has_checkpoint or not was_due:
            return again
        if is_silent:
            return "" if submission.is_local else again
    if state == RunState.STOPPED or (submission.put_back and state == RunState.FAILED):
        return again
    if state in ACTIVE or (state == RunState.UNKNOWN and job and job.problem):
        return f"clusterddp logs -f {run.cli_name}"
    # Without a verdict of the script on its attempt there is little to read.
    end = submission.end or Ended()
    judged = end.cause and end.why in ("", NO_RESTART)
    has_failed = state in (RunState.FAILED, RunState.UNKNOWN)
    if has_failed and has_checkpoint and not judged:
        return again
    if failure:
        return f"clusterddp logs --rank {failure.rank} {run.cli_name}"
    if has_failed:
        return f"clusterddp logs --job {run.cli_name}"
    if state == RunState.DONE and submission.is_local and is_silent:
        return f"clusterddp report {run.cli_name}"  # a terminal has what it printed
    return f"clusterddp logs {run.cli_name}"


def first_known(*values: T | None) -> T | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def statuses(runs: Sequence[RunDir], known: dict[str, JobState] | None = None) -> list[RunStatus]:
    """Return how the runs are doing; asks Slurm once for all of them, and only where it must.

    known: answers of an earlier look, which this one adds to: squeue alone is asked again for them.
    """
    return statuses_and_states(runs, (), known)[0]


def states_of(points: Sequence[RunDir]) -> list[RunState]:
    """Return the states of runs that were submitted, and no more: quick for the many of a sweep."""
    return statuses_and_states((), points)[1]


def judge_all(points: Sequence[RunDir]) -> list[tuple[RunState, Report | None]]:
    """Return states as `states_of` does, each with the report of the run's latest attempt."""
    looked, jobs, now = _looked(points)
    judged = (_judge(*each, jobs, now) for each in looked)
    return [(state, report) for state, _, _, report in judged]


def statuses_and_states(
    runs: Sequence[RunDir], points: Sequence[RunDir], known: dict[str, JobState] | None = None
) -> tuple[list[RunStatus], list[RunState]]:
    """Return the statuses of runs and the states of points, as the two above do in one look."""
    looked, jobs, now = _looked((*runs, *points), known)
    if known is not None:
        settled = (State.UNKNOWN, *(state for state in State if state.is_final))
        known |= {j: job for j, job in jobs.items() if job.state in settled and not job.problem}
    states = [_judge(*each, jobs, now)[0] for each in looked[len(runs) :]]
    return [run_status(run, jobs, now) for run in runs], states


def _looked(
    runs: Sequence[RunDir], known: dict[str, JobState] | None = None
) -> tuple[list[tuple[History, Submission | None]], Mapping[str, JobState], float]:
    """Read the runs' events, and ask Slurm for the jobs of which these do not tell enough."""
    read = [History.read(run) for run in runs]
    looked = [(history, latest_submission(history.events)) for history in read]
    return looked, query(jobs_to_ask([each for _, each in looked]), known=known), time.time()


_LINES_OF_LATE = 20
"""Lines of metrics of the attempt by which its pace is measured, evaluations between them too."""


@dataclass(frozen=True)
class _Progress:
    """Progress of an attempt; None where nothing is known."""

    step: int | None = None
    """Steps that are done."""
    planned: int | None = None
    """Step at which the training will be done."""
    seconds_left: float | None = None
    """Seconds until then, at the pace of late."""

    @property
    def percent(self) -> float | None:
        """Return the share of its steps that is done, from 0 to 100."""
        if self.step is None or not self.planned:
            return None
        return round(min(100 * self.step / self.planned, 100.0), 1)


def progress(attempt: Attempt | None, lines: Sequence[MetricsLine]) -> _Progress:
    """Return how far an attempt has come, by rank 0's sign of life and its lines of metrics.

    lines: the latest, in the order in which they were written; those of earlier attempts, which
    stand there too, have no part in the pace.
    """
    latest = max((line.step for line in lines), default=-1)
    if attempt is None:
        return _Progress(latest if latest >= 0 else None)
    sign, record = attempt.read_liveness(), attempt.read_record() or AttemptRecord()
    step = max(latest, sign.step or 0)
    if step <= 0 and latest < 0 and not sign.planned:
        return _Progress()
    if not sign.planned or sign.planned < step:
        return _Progress(step)
    pace = _pace(lines, record)
    spent, trained = sign.spent, (sign.step or 0) - (record.step or 0)
    if pace is None and spent and trained > 0:  # no two lines yet
        pace = spent.training / trained
    left = None if pace is None else round((sign.planned - step) * pace, 1)
    return _Progress(step, sign.planned, left)


def _pace(lines: Sequence[MetricsLine], record: AttemptRecord) -> float | None:
    """Return the seconds that a step takes of late, all that lies between the steps included."""
    began = record.began or 0.0
    own = [line for line in lines if line.step >= 0 and (line.time or 0.0) >= began]
    if len(own) < 2:
        return None
    first, last = own[-_LINES_OF_LATE:][0], own[-1]
    steps, seconds = last.step - first.step, (last.time or 0.0) - (first.time or 0.0)
    return seconds / steps if steps > 0 and seconds > 0 else None
