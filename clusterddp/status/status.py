"""Status of a run: its latest submission, its state (`state`), and the records of its training."""

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
from clusterddp.errors import EXIT_INTERRUPTED, RequestError, coded
from clusterddp.request.spec import JobSpec, submission_comment
from clusterddp.run import bad_nodes, events, hold
from clusterddp.run.attempt import Attempt, latest, printed_bytes
from clusterddp.run.events import Cause, Ended, Failure, Started
from clusterddp.run.history import NO_RESTART, SAME_FAILURE, History, steps_gained
from clusterddp.run.hold import Room
from clusterddp.run.outcome import HUNG, first_failure, last_renewal, read_outcomes
from clusterddp.run.records import (
    AttemptRecord,
    HungRanks,
    MetricsLine,
    PreflightRecord,
    Report,
    SlowNetwork,
    SlowRuns,
    StalledOutput,
)
from clusterddp.run.run_dir import NewestCheckpoint, RunDir, newest_checkpoint
from clusterddp.slurm.client import query, slurmd_timeout
from clusterddp.slurm.forms import hosts_of
from clusterddp.slurm.states import JobState, State
from clusterddp.status import end_codes
from clusterddp.status.state import (
    ACTIVE,
    ENDED,
    NEVER_STARTS,
    NO_START,
    NOT_LAUNCHED,
    WAITING_REASONS,
    RunState,
    Submission,
    jobs_to_query,
    judge,
    latest_submission,
    reason,
)

T = TypeVar("T")

_METRICS_BYTES = 65536
_LEAVES_WITHIN_SECONDS = 60.0
"""Time after `clusterddp stop` after which a run that still trains needs attention."""
_NOT_PRINTED = ("failed_rank", "is_forgotten", "is_hanging")
_LOST_SECONDS = 60.0
"""Time beyond SlurmdTimeout after which a silent batch controller counts as lost."""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run; unknown values are None."""

    name: str
    """Name of the run and of its directory."""
    state: RunState
    """created, queued, running, done, failed, cancelled, stopped or unknown."""
    detail: str = ""
    """Reason for the state: what it waits for, how it failed."""
    job_id: str = ""
    """Slurm id of the latest job, or process id of a rehearsal; empty without one."""
    array_task: str = ""
    """Slurm id of the array task, such as 89_0, if the job is one."""
    launcher: str = ""
    """`sbatch`, `submitit` or `local`; empty if nothing was submitted."""
    nodes: int | None = None
    """Requested nodes, without spare nodes."""
    spare_nodes: int | None = None
    """Requested spare nodes, in addition to `nodes`."""
    tasks_per_node: int | None = None
    """Ranks on each node."""
    world_size: int | None = None
    """Number of requested ranks."""
    layout: str = ""
    """`2 nodes x 4 tasks = 8 ranks, and 1 spare node`."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of the latest start."""
    preflight: str = ""
    """Result of the node checks before the latest attempt, as a line; empty without checks."""
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Hosts on each leaf switch that the node checks found; empty if unknown."""
    attempt: int | None = None
    """Number of the latest attempt, over all jobs of the run."""
    restarts: int = 0
    """Starts after the first one since the latest manual submission."""
    restart_reasons: list[str] = field(default_factory=list)
    """Reason for each of these restarts, if known."""
    pending_restart_reason: str = ""
    """Reason for a pending restart; empty without one."""
    dependencies: list[str] = field(default_factory=list)
    """Runs that it waits for in the queue, `a` or `b:any`; empty as soon as it may begin."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint, from its name: 'clusterddp checkpoints' verifies them."""
    checkpoint_time: float | None = None
    """Time at which that checkpoint was written."""
    checkpoint_from_memory: bool = False
    """True if it was saved from the memory of a node, after a failure."""
    steps_repeated: int | None = None
    """Steps that a resume repeats: those known to be done since that checkpoint; None while the run
    trains, and if unknown."""
    step: int | None = None
    """Completed steps, over all attempts."""
    steps_planned: int | None = None
    """Total number of steps; None if unknown, for example for a COMMAND."""
    percent_done: float | None = None
    """Share of completed steps, from 0 to 100."""
    seconds_left: float | None = None
    """Estimated seconds to the last step while it runs, from the recent pace."""
    expected_start: float | None = None
    """Slurm's estimate of its start while it is queued, in seconds since the epoch."""
    epoch: int | None = None
    """Epoch of the latest step, from 1."""
    loss: float | None = None
    """Latest training loss in metrics.jsonl."""
    loss_step: int | None = None
    """Step of that loss, because metrics are recorded every few steps."""
    accuracy: float | None = None
    """Accuracy on the test set: from the report if there is one, else from the last evaluation."""
    excluded_nodes: Mapping[str, str] = field(default_factory=dict)
    """Bad nodes that the next start excludes, with reasons; without those cleared since."""
    warnings: list[str] = field(default_factory=list)
    """Warnings of the training, and a remark on the latest end."""
    created_time: float | None = None
    """Time at which its request was written."""
    submitted_time: float | None = None
    """Time of the latest manual submission."""
    started_time: float | None = None
    """Time of the latest start."""
    ended_time: float | None = None
    """Time of its end; None until it has ended."""
    elapsed_seconds: float | None = None
    """Seconds from the latest start to the end, or to now; None while it waits in the queue."""
    exit_code: int | None = None
    """Exit code of its latest attempt's job; None until it has ended, or if nothing has run."""
    code: str = ""
    """Code of its end, or of the reason why it never starts, for `clusterddp explain`."""
    first_failure: str = ""
    """Rank that failed first, with host, error and log, as text; empty without a failed rank."""
    cleaned: str = ""
    """Files that `clusterddp clean` removed since the last submission, with dates."""
    directory: str = ""
    """Directory of the run: a path below --runs-dir."""
    working_directory: str = ""
    """Directory in which the tasks run the user's code and write relative output."""
    next_command: str = ""
    """Command to type next; empty if there is nothing to do."""
    failed_rank: int | None = None
    """Rank of `first_failure`; not printed."""
    is_forgotten: bool = False
    """True if no end is recorded and Slurm no longer knows its job; not printed."""
    is_hanging: bool = False
    """True if ranks were found that hang, or that print nothing; not printed."""

    def as_dict(self) -> dict[str, object]:
        """Return what `clusterddp status --json` prints."""
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in fields if name not in _NOT_PRINTED}

    def why(self, *, in_short: bool = False) -> str:
        """Return the reason for the state with its code, `rank 3 failed first: … [CD1209]`.

        in_short: only the first line of the reason.
        """
        why = self.first_failure or self.detail
        return coded(why.partition("\n")[0] if in_short else why, self.code).strip()

    @property
    def shown_switches(self) -> str:
        """`2 leaf switches: s1 (4 nodes), s2 (2 nodes)`; empty if unknown."""
        counts = [
            f"{switch} ({formatting.count(len(hosts), 'node')})"
            for switch, hosts in sorted(self.switches.items())
        ]
        total = f"{len(counts)} leaf switch{'es' * (len(counts) > 1)}"
        return f"{total}: {formatting.join_limited(counts, 8, ', ')}" if counts else ""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def check_rank(self, rank: int) -> None:
        """Raise RequestError if the run has no such rank."""
        size = self.world_size
        if size and rank >= size:
            has = f"ranks 0 to {size - 1}" if size > 1 else "only rank 0"
            raise RequestError(f"--rank {rank}: {self.name} has {has}. [CD0102]")

    @property
    def shown_job(self) -> str:
        """Job's id as text, `89_0` or `pid:3158`; empty without a job."""
        job = self.array_task or self.job_id
        return f"pid:{job}" if job and self.launcher == "local" else job


def run_status(
    run: RunDir, slurm_states: Mapping[str, JobState], now: float | None = None
) -> RunStatus:
    """Build the status of a run; `slurm_states`: Slurm's answers for `jobs_to_query`."""
    now = time.time() if now is None else now
    history = History.read(run)  # not earlier: a run can record its end during the query
    submission = latest_submission(history.events)
    state, detail, job, report = _judge(history, submission, slurm_states, now)
    waits = _waits(history, submission, job) if submission and state == RunState.QUEUED else None
    manual_run = None if submission else _latest_manual_run(run)
    if manual_run:
        state, detail = _judge_manual_run(manual_run, report)
    is_stuck = state == RunState.RUNNING and _ignores_stop(submission, job, now)
    hang = _describe_hang(_latest_attempt(run)) if state == RunState.RUNNING else ""
    figures, lines = report or Report(), _last_lines(run.metrics)
    latest = _merge_lines(lines)
    done = progress(_latest_attempt(run), lines)
    checkpoint = newest_checkpoint(run.checkpoints)
    failure = _failure(run, state, submission, manual_run)
    known = submission or _manual_submission(manual_run)
    return RunStatus(
        name=run.name,
        state=state,
        detail=_full_detail(run, state, detail, waits, hang, stuck=is_stuck),
        job_id=known.job_id,
        array_task=known.start.array_task or (job.element if job else ""),
        launcher=known.launcher,
        **_request_fields(history.spec),
        hosts=hosts_of(known.start.nodelist),
        **_preflight(run, known.attempt),
        attempt=known.attempt,
        restarts=known.restarts,
        restart_reasons=list(known.reasons),
        pending_restart_reason=reason(known.requeue_reason) if known.requeue_reason else "",
        dependencies=list(waits.runs) if waits else [],
        **(_checkpoint_fields(run, state, checkpoint, done.step) if checkpoint else {}),
        step=coalesce(figures.steps, done.step),
        steps_planned=coalesce(figures.steps, done.planned),
        percent_done=100.0 if figures.steps else done.percent,
        seconds_left=done.seconds_left if state == RunState.RUNNING and not hang else None,
        expected_start=_expected_start(state, job, waits),
        epoch=coalesce(figures.epochs, latest.epoch),
        **_loss_fields(lines),
        accuracy=coalesce(figures.accuracy, latest.accuracy),
        excluded_nodes=_excluded_nodes(history, state, known.job_id),
        warnings=_warnings(run, figures, known.attempt, known.end.remark if known.end else ""),
        **_times(run, known, state, now),
        exit_code=_exit_code(state, submission, job),
        code=_code(state, known, failure, job),
        first_failure=failure.describe() if failure else "",
        cleaned=_cleaned(history.events),
        directory=str(run.path),
        working_directory=_working_directory(history),
        next_command=_next_command(
            run, state, failure, submission, bool(checkpoint), job, is_stuck=is_stuck or bool(hang)
        ),
        failed_rank=failure.rank if failure else None,
        is_hanging=bool(hang),
        is_forgotten=state == RunState.UNKNOWN and _is_forgotten(submission, job),
    )


def _checkpoint_fields(
    run: RunDir, state: RunState, checkpoint: NewestCheckpoint, step: int | None
) -> dict[str, Any]:
    """Return the fields that describe the newest checkpoint. step: rank 0's, by its heartbeat."""
    from clusterddp.run.node_memory import is_from_memory  # not needed without a checkpoint

    repeated = None
    latest = _latest_attempt(run)
    if latest and state not in (RunState.CREATED, RunState.RUNNING, RunState.DONE):
        # The heartbeat of a killed rank is up to two seconds old; its parent knows its last step.
        steps = [outcome.step for outcome in read_outcomes(latest.outcomes)]
        known = [each for each in (step, *steps) if each is not None]
        repeated = max(max(known) - checkpoint.step, 0) if known else None
    return {
        "checkpoint_step": checkpoint.step,
        "checkpoint_time": checkpoint.time,
        "checkpoint_from_memory": is_from_memory(checkpoint.path),
        "steps_repeated": repeated,
    }


def _warnings(run: RunDir, figures: Report, attempt: int | None, remark: str) -> list[str]:
    """Return the warnings of the report and of the latest attempt: its network, slow periods."""
    record = files.read(SlowRuns, Attempt(run, attempt).slow_run) if attempt else None
    slow = [f"slow run: {each.describe()} [CD0825]" for each in record.periods] if record else []
    network = _slow_network(Attempt(run, attempt)) if attempt else ""
    return [*filter(None, (*figures.warnings, remark, network)), *slow]


def _slow_network(attempt: Attempt) -> str:
    """Return the warning about NCCL's network: that of the first node, and how many have it."""
    paths = sorted(attempt.outcomes.glob("network-*.json"))
    record = files.read(SlowNetwork, paths[0]) if paths else None
    if record is None:
        return ""
    more = f" The same on {formatting.count(len(paths) - 1, 'more node')}." if paths[1:] else ""
    return f"{record.reason}{more} [CD0910]"


def _judge(
    history: History,
    submission: Submission | None,
    slurm_states: Mapping[str, JobState],
    now: float,
) -> tuple[RunState, str, JobState | None, Report | None]:
    """Return a run's state, the reason for it, Slurm's answer and the report."""
    run = history.run
    job = slurm_states.get(submission.job_id) if submission else None
    if job and submission and not submission.is_held and _is_foreign(run, job, submission):
        job = JobState(State.UNKNOWN)
    if submission and submission.is_held and submission.end:
        job = None  # it outlives the run
    alive = submission.is_alive if submission else None
    report = latest_report(run, submission.attempt if submission else None)
    may_start = submission and (
        submission.requeue_reason or (submission.end and submission.end.exit_code)
    )
    if submission and may_start and not _resumes(history):
        submission = dataclasses.replace(submission, resumes=False)
    state, detail = judge(submission, report, job, alive, now)
    if state == RunState.RUNNING and submission and job and job.state is State.RUNNING:
        state, detail = _judge_lost(run, submission, now) or (state, detail)
    if state == RunState.CREATED and run.array_index:  # its own script creates it
        detail = "its script has recorded nothing yet"
    elif state == RunState.CREATED and _is_rehearsed(history.spec):
        detail = "waits for its turn: --launcher local runs one trial at a time"
        if was_cancelled_before_turn(history.reread()):
            state, detail = RunState.CANCELLED, "before it started"
    return state, detail, job, report


def _full_detail(
    run: RunDir, state: RunState, detail: str, waits: events.Waits | None, hang: str, *, stuck: bool
) -> str:
    """Complete the reason for a state from the run's other records."""
    if waits:
        return f"waits for {waits.why if waits.held else ', '.join(waits.runs)}"
    if stuck:
        detail += (
            " more than a minute ago, but still running. See where its ranks are with 'clusterddp "
            f"stacks {run.cli_name}', or end it now with 'clusterddp cancel {run.cli_name}'"
        )
    if state == RunState.RUNNING and hold.is_hold(run):
        room = Room.of(events.read(run.events))
        idle = f"idle since {formatting.moment(room.idle_since)}" if room.idle_since else ""
        return "; ".join(filter(None, (idle, room.describe() if room.nodes else "")))
    return ", ".join(filter(None, (detail, hang)))


def _request_fields(spec: JobSpec | None) -> dict[str, Any]:
    """Return the fields that describe the request."""
    if spec is None:
        return {}
    asked = spec.resources
    return {
        **{name: getattr(asked, name) for name in ("nodes", "spare_nodes", "tasks_per_node")},
        "world_size": spec.world_size,
        "layout": spec.layout,
    }


def _needs_cancel(state: RunState, job: JobState | None) -> bool:
    """Return whether the user must cancel the job: it never starts, or has lost its script."""
    if job is None:
        return False
    never_starts = state == RunState.QUEUED and job.reason in NEVER_STARTS
    return never_starts or (state == RunState.UNKNOWN and job.state is State.RUNNING)


def _judge_lost(run: RunDir, submission: Submission, now: float) -> tuple[RunState, str] | None:
    """Return state and reason for a run whose batch controller is lost; None for other runs.

    Slurm still shows such a job as running if its host restarted quickly and slurmd was back before
    SlurmdTimeout.
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
        f"lost: no heartbeat of its batch script for {formatting.duration(silent)}, although Slurm "
        f"shows job {submission.job_id} as running. End the job with "
        f"'clusterddp cancel {run.cli_name}', then resume with '{run.resume_command}'"
    )


def _describe_hang(attempt: Attempt | None) -> str:
    """Describe a hang: which ranks hang, or since when no rank has printed anything."""
    if attempt is None:
        return ""
    hung = files.read(HungRanks, attempt.outcomes / HUNG) or HungRanks()
    stalled = files.read(StalledOutput, attempt.stalled)
    if hung.reason and not hung.ranks:
        return hung.reason
    if hung.ranks:
        ranks = formatting.join_limited([str(rank) for rank in hung.ranks], 8, ", ")
        return f"{'ranks' if len(hung.ranks) > 1 else 'rank'} {ranks}: {hung.reason}"
    if stalled is None or printed_bytes(attempt.run) != stalled.output_bytes:
        return ""
    ranks = formatting.join_limited([str(rank) for rank in stalled.ranks], 8, ", ")
    who = f"; rank {ranks} is in {stalled.places}" if ranks else ""
    since = f"no rank has printed anything since {formatting.moment(stalled.since)}"
    return f"{since}{who}; the job's log has their stacks"


def _ignores_stop(submission: Submission | None, job: JobState | None, now: float) -> bool:
    """Return whether the ranks still run long after the user asked them to stop."""
    if submission is None or submission.end or not submission.stop_requested:
        return False
    if job and job.state is State.SUSPENDED:
        return False
    return now - (submission.stop_requested_time or now) > _LEAVES_WITHIN_SECONDS


def _resumes(history: History) -> bool:
    """Return whether the next start is expected to resume; for a COMMAND: with a Loop."""
    attempt = _latest_attempt(history.run)
    return attempt is None or steps_gained(attempt, history.spec) is not None


def _is_rehearsed(spec: JobSpec | None) -> bool:
    return bool(spec and spec.trial and spec.launcher == "local")


def was_cancelled_before_turn(history: History) -> bool:
    """Return whether a rehearsal's trial was cancelled since its latest submission."""
    cancelled = False
    for event in history.events:
        if isinstance(event, events.CancelRequested | events.ResumeRequested):
            cancelled = isinstance(event, events.CancelRequested)
    return cancelled


def _cleaned(history: Sequence[events.Event]) -> str:
    """Describe what `clusterddp clean` has removed since the latest submission or start."""
    words: list[str] = []
    for event in history:
        if isinstance(event, events.Cleaned):
            day = time.strftime("%Y-%m-%d", time.localtime(event.time))
            words.append(f"{event.describe()} ({formatting.size(event.bytes)}) on {day}")
        elif isinstance(event, events.Submitted | Started):
            words = []
    return "; ".join(words)


def _waits(history: History, submission: Submission, job: JobState | None) -> events.Waits | None:
    """Find what the job waits for; None if Slurm now gives another reason."""
    if submission.start.time or (job and job.reason not in WAITING_REASONS):
        return None
    waits = history.every(events.Waits)
    return next((event for event in waits[::-1] if event.job_id == submission.job_id), None)


def _expected_start(
    state: RunState, job: JobState | None, waits: events.Waits | None
) -> float | None:
    """Return Slurm's estimate; None for a job that is held or waits for another run."""
    return (
        job.start
        if state == RunState.QUEUED and job and not (waits or job.reason in NO_START)
        else None
    )


def _excluded_nodes(history: History, state: RunState, job_id: str) -> Mapping[str, str]:
    """Return the bad nodes that the job excludes, or, after its end, that a new job would."""
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


def _working_directory(history: History) -> str:
    """Return the directory in which the user's code starts; empty if there is none or unknown."""
    run, spec = history.run, history.spec
    if spec is None or not spec.uses_own_code:
        return ""
    if spec.container_workdir:
        return f"{spec.container_workdir} in the container"
    return str(run.code_folder.absolute()) if run.code.is_dir() else history.folder


def _last_lines(path: Path) -> list[MetricsLine]:
    tail = files.parse_json_lines(files.read_tail(path, _METRICS_BYTES))
    return [line for values in tail if (line := files.load(MetricsLine, values)) is not None]


def _merge_lines(lines: Sequence[MetricsLine]) -> MetricsLine:
    latest = MetricsLine()
    for line in lines:
        if line.step >= 0:
            latest = dataclasses.replace(latest, step=line.step, epoch=line.epoch)
        if line.tested:
            latest = dataclasses.replace(latest, accuracy=line.accuracy)
    return latest


def _loss_fields(lines: Sequence[MetricsLine]) -> dict[str, Any]:
    for line in reversed(lines):
        if line.loss is not None and not line.tested:
            return {"loss": line.loss, "loss_step": line.step if line.step >= 0 else None}
    return {}


def _latest_attempt(run: RunDir) -> Attempt | None:
    with contextlib.suppress(OSError):
        return latest(run)
    return None


def latest_report(run: RunDir, attempt: int | None) -> Report | None:
    """Read report.json, unless it belongs to an attempt before `attempt`."""
    report = files.read(Report, run.report)
    if report is None or report.attempt is None or attempt is None:
        return report
    return None if report.attempt < attempt else report


def _preflight(run: RunDir, attempt: int | None) -> dict[str, Any]:
    """Return the fields of RunStatus that come from the node checks."""
    of = Attempt(run, attempt or 0)
    quick = files.read(PreflightRecord, of.preflight) or PreflightRecord()
    full = files.read(PreflightRecord, of.full_preflight) or PreflightRecord()
    lines = quick.summary, full.summary and f"full: {full.summary}"
    return {"preflight": "; ".join(filter(None, lines)), "switches": quick.switches}


def _failure(
    run: RunDir, state: RunState, submission: Submission | None, manual_run: Attempt | None
) -> Failure | None:
    """Return the rank that failed first in a failed run.

    None for a cancelled run: its ranks were signalled to end.
    """
    if state != RunState.FAILED:
        return None
    if submission is None:
        return _manual_run_failure(manual_run) if manual_run else None
    if submission.end and (submission.end.first_failure or submission.end.cause):
        return submission.end.first_failure
    attempt = latest(run)  # the script recorded no result
    return first_failure(read_outcomes(attempt.outcomes if attempt else run.outcomes))


def _is_forgotten(submission: Submission | None, job: JobState | None) -> bool:
    if submission is None or submission.is_local or submission.requeue_reason:
        return False
    unknown = job is not None and job.state is State.UNKNOWN and not job.problem
    return unknown and submission.end is None


def _latest_manual_run(run: RunDir) -> Attempt | None:
    """Return the latest attempt of a run that was not submitted (`srun clusterddp train`)."""
    attempt = _latest_attempt(run)
    return attempt if attempt and attempt.read_record() else None


def _manual_submission(attempt: Attempt | None) -> Submission:
    """Return a substitute for a submission: the job of manually started ranks, and the time."""
    record = (attempt and attempt.read_record()) or AttemptRecord()
    number = attempt.number if attempt else None
    return Submission(record.job_id, "", start=Started(time=record.began), attempt=number)


def _judge_manual_run(attempt: Attempt, report: Report | None) -> tuple[RunState, str]:
    """Judge from the attempt's own records only: its job may run other programs."""
    how = "its ranks were started by hand"
    final_record = attempt.read_final_record()
    if final_record:
        if final_record.cause == RunState.DONE:
            return RunState.DONE, how
        return (
            RunState.STOPPED,
            f"{how} and saved at step {final_record.step} ({final_record.reason})",
        )
    if _manual_run_failure(attempt):
        return RunState.FAILED, how
    with contextlib.suppress(OSError):
        if attempt.is_alive():
            return RunState.RUNNING, how
    if report:
        return RunState.DONE, how
    return RunState.UNKNOWN, f"{how}; they send no heartbeat and recorded no end"


def _manual_run_failure(attempt: Attempt) -> Failure | None:
    """Return the rank that failed first since the rendezvous; an interrupt is not a failure.

    Without a script the tasks have no attempt number, and record their ends in the run directory.
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


def _is_foreign(run: RunDir, job: JobState, submission: Submission) -> bool:
    """Return whether the job is not the run's, although it has its id.

    A restarted slurmctld that has lost its latest jobs assigns their ids again.
    """
    ours = submission_comment("")
    comments = {ours + run.name}
    name, _, index = run.name.rpartition("-")
    if job.element and job.element.endswith(f"_{index}"):
        # An array task belongs to run RUN-INDEX; its comment names RUN.
        comments.add(ours + name)
    comment = job.comment or ""
    if job.comment == "" and job.state is State.PENDING and submission.end:
        # A script that sets the comment sets it also for a job that is requeued.
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return f"--comment={ours}" in run.script.read_text()
    return comment.startswith(ours) and comment not in comments


def _times(run: RunDir, submission: Submission, state: RunState, now: float) -> dict[str, Any]:
    """Return the fields with times; time in the queue does not count as elapsed."""
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
    """Return the code of a run's end, or of the reason why it never starts; empty if unknown."""
    if state == RunState.QUEUED:
        return end_codes.NEVER_STARTS if job and job.reason in NEVER_STARTS else ""
    if state == RunState.UNKNOWN:  # regardless of the last attempt's end
        return end_codes.BY_RUN_STATE[state]
    if state not in ENDED or state == RunState.DONE:
        return ""
    # A requeued job's code is not that of its previous attempt.
    end = None if submission.requeue_reason else submission.end
    if state == RunState.CANCELLED and not (end and end.cause == Cause.NOT_DUE):
        return end_codes.BY_RUN_STATE[state]
    if state == RunState.STOPPED and submission.requeue_error:
        return end_codes.NOT_RESUMED
    if end and (code := end.code or end_codes.BY_CAUSE.get(end.cause, "")):
        return code
    says_why = job and job.state in end_codes.BY_JOB_STATE.keys() - {State.FAILED}
    if failure and not says_why:
        return end_codes.code_of_failure(failure)
    if state != RunState.FAILED:
        return end_codes.BY_RUN_STATE[state]
    if job is None or (job.state is State.FAILED and submission.start.time):
        return end_codes.UNEXPLAINED
    return end_codes.BY_JOB_STATE.get(job.state, end_codes.UNEXPLAINED)


def _exit_code(state: RunState, submission: Submission | None, job: JobState | None) -> int | None:
    if submission is None or state not in ENDED:
        return None
    if submission.end and submission.end.exit_code is not None:
        return submission.end.exit_code
    # Slurm's 0 for a job that never ran, and its 0:53 for a failed launch, are not exit codes.
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
    """Return the command to type next; is_stuck: the ranks hang, or ignore a request to stop."""
    if state == RunState.CREATED:
        if run.array_index:
            return f"clusterddp logs --job {run.cli_name}"
        if run.sweep:  # the sweep's script would start all trials
            return run.resume_command
        if not run.script.is_file():  # its submission was killed before
            return f"clusterddp rm {run.cli_name}"
        return f"sbatch {shlex.quote(str(run.script))}"
    if submission is None:  # its ranks printed to a terminal, and it cannot be resumed
        return f"clusterddp report {run.cli_name}" if state == RunState.DONE else ""
    if is_stuck:
        return f"clusterddp stacks {run.cli_name}"
    if state == RunState.RUNNING and hold.is_hold(run):
        return f"clusterddp submit --in {run.cli_name}"
    if _needs_cancel(state, job):
        return f"clusterddp cancel {run.cli_name}"
    not_launched = job and job.reason == NOT_LAUNCHED and not submission.start.time
    if state == RunState.FAILED and not_launched:
        return f"scontrol show job {submission.job_id}"
    if state in ACTIVE or (state == RunState.UNKNOWN and job and job.problem):
        return f"clusterddp logs -f {run.cli_name}"
    again = run.resume_command
    # A run that was cancelled before it started has no logs; a local one was in no queue.
    is_silent = not any(path.exists() for path in (run.rank_log(0), run.job_log))
    if state == RunState.CANCELLED:
        was_due = not (submission.end and submission.end.cause == Cause.NOT_DUE)
        if submission.requeue_reason or has_checkpoint or not was_due:
            return again
        if is_silent:
            return "" if submission.is_local else again
    if state == RunState.STOPPED or (submission.requeue_reason and state == RunState.FAILED):
        return again
    # Without a result recorded by the script the logs say little.
    end = submission.end or Ended()
    judged = end.cause and (end.why in ("", NO_RESTART) or end.why_code == SAME_FAILURE)
    has_failed = state in (RunState.FAILED, RunState.UNKNOWN)
    if has_failed and has_checkpoint and not judged:
        return again
    if failure and not is_empty(run.rank_log(failure.rank)):
        return f"clusterddp logs --rank {failure.rank} {run.cli_name}"
    if has_failed:
        return f"clusterddp logs --job {run.cli_name}"
    if state == RunState.DONE and submission.is_local and is_silent:
        return f"clusterddp report {run.cli_name}"  # it printed to a terminal
    return f"clusterddp logs {run.cli_name}"


def is_empty(log: Path) -> bool:
    """Return whether a log exists and is empty."""
    return log.is_file() and not log.stat().st_size


def coalesce(*values: T | None) -> T | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


def statuses(runs: Sequence[RunDir], known: dict[str, JobState] | None = None) -> list[RunStatus]:
    """Return the statuses of runs; query Slurm at most once for all of them.

    known: final answers of earlier calls, updated by this one: only squeue is asked again for them.
    """
    return statuses_and_states(runs, (), known)[0]


def states_of(trials: Sequence[RunDir]) -> list[RunState]:
    """Return only the states of submitted runs, which is fast for many trials."""
    return statuses_and_states((), trials)[1]


def judge_all(trials: Sequence[RunDir]) -> list[tuple[RunState, Report | None]]:
    """Return the state of each run, as `states_of`, with the report of its latest attempt."""
    looked, jobs, now = _query_all(trials)
    judged = (_judge(*each, jobs, now) for each in looked)
    return [(state, report) for state, _, _, report in judged]


def statuses_and_states(
    runs: Sequence[RunDir], trials: Sequence[RunDir], known: dict[str, JobState] | None = None
) -> tuple[list[RunStatus], list[RunState]]:
    """Return the statuses of runs and the states of trials, with a single query."""
    looked, jobs, now = _query_all((*runs, *trials), known)
    if known is not None:
        settled = (State.UNKNOWN, *(state for state in State if state.is_final))
        known |= {j: job for j, job in jobs.items() if job.state in settled and not job.problem}
    states = [_judge(*each, jobs, now)[0] for each in looked[len(runs) :]]
    return [run_status(run, jobs, now) for run in runs], states


def _query_all(
    runs: Sequence[RunDir], known: dict[str, JobState] | None = None
) -> tuple[list[tuple[History, Submission | None]], Mapping[str, JobState], float]:
    """Read the runs' events, and query Slurm for the jobs whose state they do not settle."""
    read = [History.read(run) for run in runs]
    looked = [(history, latest_submission(history.events)) for history in read]
    return looked, query(jobs_to_query([each for _, each in looked]), known=known), time.time()


_PACE_LINES = 20
"""Number of latest metrics lines from which the pace is computed; evaluations count as time."""


@dataclass(frozen=True)
class _Progress:
    """Progress of an attempt; unknown values are None."""

    step: int | None = None
    """Completed steps."""
    planned: int | None = None
    """Total number of steps."""
    seconds_left: float | None = None
    """Estimated seconds to the last step, from the recent pace."""

    @property
    def percent(self) -> float | None:
        """Share of completed steps, from 0 to 100."""
        if self.step is None or not self.planned:
            return None
        return round(min(100 * self.step / self.planned, 100.0), 1)


def progress(attempt: Attempt | None, lines: Sequence[MetricsLine]) -> _Progress:
    """Return the progress of an attempt, from rank 0's heartbeat and the metrics lines.

    lines: the latest lines of metrics.jsonl, oldest first; earlier attempts do not affect the pace.
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
    """Return the recent seconds per step, including everything between steps."""
    began = record.began or 0.0
    own = [line for line in lines if line.step >= 0 and (line.time or 0.0) >= began]
    if len(own) < 2:
        return None
    first, last = own[-_PACE_LINES:][0], own[-1]
    steps, seconds = last.step - first.step, (last.time or 0.0) - (first.time or 0.0)
    return seconds / steps if steps > 0 and seconds > 0 else None
