"""Events of a run, one per line of `events.jsonl`: their types, the reader and the writer.

docs/reference/fields.md is made from this module. A missing field has its default. Times are
seconds since the epoch.
"""

import time
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import ClassVar

from clusterddp import files, formatting


class Cause(str, Enum):
    """Cause of an attempt's end."""

    DONE = "done"
    """The training is complete, or every task of the user's command exited with code 0."""
    FAILED = "failed"
    """A rank, a setup line or the launch failed."""
    CANCELLED = "cancelled"
    """The user cancelled the job."""
    STOPPED = "stopped"
    """`clusterddp stop`: the ranks saved a checkpoint and exited."""
    SIGNAL = "signal"
    """A signal, usually Slurm's before the time limit: the ranks saved a checkpoint and exited."""
    TIME_LIMIT = "time limit"
    """Slurm ended the job at its time limit."""
    PREEMPTED = "preempted"
    """Slurm ended the job for one with a higher priority."""
    REQUEUED = "requeued"
    """Slurm itself requeued the job: preemption, a lost node, `scontrol requeue`."""
    NODE_LOST = "node lost"
    """A node failed or stopped responding."""
    SUSPENDED = "suspended"
    """Slurm suspended the job for longer than the ranks wait for each other, so they timed out."""
    PREFLIGHT = "preflight"
    """A node failed the checks before the tasks, so no task started."""
    NOT_LAUNCHED = "not launched"
    """Slurm could not create the step or start its tasks."""
    SUPERSEDED = "superseded"
    """A later attempt has begun, while an orphan of a lost node was still active."""
    NOT_DUE = "not due"
    """A run that it waited for did not end as required, so no attempt began."""

    __str__ = str.__str__


@dataclass(frozen=True, kw_only=True)
class Event:
    """Fields of all events; on its own, an event that this version does not know."""

    kind: ClassVar[str] = ""
    time: float | None = None
    """Time at which the event was written."""
    job_id: str = ""
    """Slurm's job id; the process id of a rehearsal; empty without a job."""
    attempt: int | None = None
    """Number of the attempt, from 1; None if the event belongs to none."""
    array_task: str = ""
    """Name of an array task for Slurm's commands: `89_0`."""


@dataclass(frozen=True)
class Failure:
    """Rank that failed first, and why."""

    rank: int
    """Rank, from 0."""
    host: str
    """Its host, by Slurm's name; empty if not known."""
    reason: str
    """Error or signal that ended it, in a few words."""
    log: str
    """Its log, relative to the run directory."""
    exit_code: int | None = None
    """Its exit code, 128 + N for signal N; None if not recorded."""

    def describe(self) -> str:
        """Return a sentence: `rank 3 on h02 failed first: RuntimeError: boom (logs/rank-3.log)`."""
        host = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{host} failed first: {self.reason} ({self.log})"


@dataclass(frozen=True, kw_only=True)
class Submitted(Event):
    """Submission of a job by the user or by the job that it replaces."""

    kind: ClassVar[str] = "submitted"
    launcher: str = ""
    """`sbatch`, `submitit`, `local` or `held`."""
    folder: str = ""
    """Directory in which the user typed the command."""
    pid: int | None = None
    """Process that controls a local run, or runs the trials of a sweep in turn, on `host`."""
    host: str | None = None
    """Host of that process."""
    in_place_of: str = ""
    """Job that it replaces; empty if the user submitted it."""
    why: str = ""
    """Reason why it replaces that job; empty without one."""
    wait: float = 0.0
    """Seconds that it waits before its start, because of several starts in a short time."""
    indices: tuple[int, ...] = ()
    """Trials of a sweep that the job array starts."""


@dataclass(frozen=True, kw_only=True)
class ResumeRequested(Event):
    """User's request to resume the run; precedes the job's `Submitted`."""

    kind: ClassVar[str] = "resume_requested"
    changes: tuple[str, ...] = ()
    """Settings and code files that differ from the previous submission."""
    from_scratch: int | None = None
    """Latest attempt whose checkpoints are ignored."""


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """Start of an attempt; without a number if the attempt could not begin."""

    kind: ClassVar[str] = "started"
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    nodelist: str = ""
    """Hosts of the tasks, in Slurm's form: `h[01-02]`."""
    clusterddp: str = ""
    """Version that runs the attempt, and the run's own file or `installed`."""
    spares: tuple[str, ...] = ()
    """Nodes of the job without tasks."""


@dataclass(frozen=True, kw_only=True)
class NotStarted(Event):
    """Start of a job without an attempt, because its run is done or a node is bad."""

    kind: ClassVar[str] = "not_started"
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    nodelist: str = ""
    """Hosts of the job, in Slurm's form: `h[01-02]`."""
    why: str = ""
    """Reason why no attempt began."""


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """End of an attempt; `cause` is empty if no batch script determined it."""

    kind: ClassVar[str] = "ended"
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    exit_code: int | None = None
    """Exit code of the job."""
    cause: str = ""
    """Cause of its end: a value of `Cause`."""
    how: str = ""
    """Description of the end, if the cause's word does not fit."""
    step: int | None = None
    """Step at which the ranks exited."""
    saved: bool = True
    """False if Slurm ended it, or its nodes failed their checks, before anything new was saved; not
    meaningful for other ends."""
    first_failure: Failure | None = None
    """Rank that failed first; None if no rank failed or none is known."""
    hardware: str = ""
    """Hardware error that this failure names; empty without one."""
    write_error: str = ""
    """Reason why a checkpoint or a record could not be written."""
    remark: str = ""
    """Remark for the user in addition to the cause: for example, each task trained separately."""
    why: str = ""
    """Reason why no other attempt follows automatically; empty if one does."""
    why_code: str = ""
    """Error code of that reason; empty if the end itself is the reason."""
    code: str = ""
    """Error code of its end, for `clusterddp explain`; empty if the run is done."""
    stop_signal: str = ""
    """Signal on which the ranks of a command exited with code 0 before they were done."""


@dataclass(frozen=True, kw_only=True)
class Requeued(Event):
    """Requeue of the job."""

    kind: ClassVar[str] = "requeued"
    why: str = ""
    """Reason: the cause of the attempt's end, or why none began."""
    wait: float = 0.0
    """Seconds until the next start, because of several starts in a short time."""


@dataclass(frozen=True, kw_only=True)
class ResumedInJob(Event):
    """Decision to begin the next attempt in the same job, on its remaining nodes."""

    kind: ClassVar[str] = "resumed_in_job"
    why: str = ""
    """Reason: the cause of the previous attempt's end."""
    nodelist: str = ""
    """Hosts of the next attempt, in Slurm's form: `h[01-02]`."""
    wait: float = 0.0
    """Seconds until it begins, because of several starts in a short time."""


@dataclass(frozen=True, kw_only=True)
class RequeueFailed(Event):
    """Failure to requeue the job."""

    kind: ClassVar[str] = "requeue_failed"
    why: str = ""
    """Reason for the requeue."""
    error: str = ""
    """Error message of Slurm or the system."""


class CancelRequested(Event):
    """Cancellation of the job by the user; also by plain scancel, if the notice job has seen it."""

    kind: ClassVar[str] = "cancelled"


class CancelFailed(Event):
    """Failure of the preceding cancellation."""

    kind: ClassVar[str] = "cancel_failed"


@dataclass(frozen=True, kw_only=True)
class StopRequested(Event):
    """User's request to save a checkpoint and exit."""

    kind: ClassVar[str] = "stop_requested"
    by: str = ""
    """Signal to the batch script with which it was requested; empty for `clusterddp stop`."""


class StopFailed(Event):
    """Failure of the preceding stop request to reach the run."""

    kind: ClassVar[str] = "stop_failed"


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """End of srun's step by the step watch, after which srun's exit code says nothing."""

    kind: ClassVar[str] = "step_ended"
    step_id: str = ""
    """Slurm's id of the step within the job: `0`."""
    why: str = ""
    """Reason not to wait for srun."""


class TimeLimitReached(Event):
    """End of the time limit of a rehearsal, or of a run in an allocation."""

    kind: ClassVar[str] = "time_limit"


@dataclass(frozen=True, kw_only=True)
class NodesMarkedBad(Event):
    """Nodes marked bad, which the run's next attempts avoid (`bad_nodes`)."""

    kind: ClassVar[str] = "nodes_marked_bad"
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Reasons by node name: measurements or observations."""
    by: str = ""
    """Why they are bad: a `BY_…` of `bad_nodes`."""


@dataclass(frozen=True, kw_only=True)
class NodesExcluded(Event):
    """Bad nodes excluded from the job's next start."""

    kind: ClassVar[str] = "nodes_excluded"
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Reasons by node name."""


@dataclass(frozen=True, kw_only=True)
class Cleaned(Event):
    """Removal by `clusterddp clean`."""

    kind: ClassVar[str] = "cleaned"
    checkpoints: tuple[int, ...] = ()
    """Steps."""
    code_files: int = 0
    """Number of files of the copied code."""
    clusterddp: tuple[str, ...] = ()
    """Files of the run's own clusterddp."""
    bytes: int = 0
    """Bytes freed."""

    def describe(self) -> str:
        """Return what was removed: `2 checkpoints, 14 files of the code, its clusterddp`."""
        named = (
            ("{}", formatting.count(len(self.checkpoints), "checkpoint") * bool(self.checkpoints)),
            ("{} of the code", formatting.count(self.code_files, "file") * bool(self.code_files)),
            ("{}", "its clusterddp" * bool(self.clusterddp)),
        )
        return formatting.join_known(*named)


@dataclass(frozen=True, kw_only=True)
class NoticeQueued(Event):
    """Queueing of the job that sends the notification; `job_id` is the job that it waits for."""

    kind: ClassVar[str] = "notice_queued"
    notice_job: str = ""
    """Id of the notification job."""


@dataclass(frozen=True, kw_only=True)
class Waits(Event):
    """Wait of the job for other runs, from its submission or one of its starts."""

    kind: ClassVar[str] = "waits"
    runs: tuple[str, ...] = ()
    """Names, each with the required end unless it is `ok`: `a`, `b:any`."""
    why: str = ""
    """States of these runs."""
    held: bool = False
    """True if Slurm holds the job until one of them is submitted again."""


@dataclass(frozen=True, kw_only=True)
class DependentAdded(Event):
    """Run that waits for this one."""

    kind: ClassVar[str] = "dependent_added"
    by: str = ""
    """Its directory."""


@dataclass(frozen=True, kw_only=True)
class CodeChanged(Event):
    """Change of an attempt's code since the submission, if the run has no copy of it."""

    kind: ClassVar[str] = "code_changed"
    changes: tuple[str, ...] = ()
    """Files that differ, each with the kind of change: `changed train.py`."""


@dataclass(frozen=True, kw_only=True)
class RunInHold(Event):
    """Run that a hold has begun, ended or refused."""

    kind: ClassVar[str] = "run_in_hold"
    run: str = ""
    """Its directory."""
    request: str = ""
    """Name of the request."""
    nodelist: str = ""
    """Its nodes; empty once it has ended."""
    why: str = ""
    """Reason for a refusal, or for its end; empty without one."""


@dataclass(frozen=True, kw_only=True)
class LostInHold(Event):
    """Nodes that a hold has lost."""

    kind: ClassVar[str] = "lost_in_hold"
    nodes: tuple[str, ...] = ()
    """Names of the nodes."""


def read(path: Path) -> list[Event]:
    """Read all events in the order in which they were written; none without a file.

    Before an array task has recorded its start, events name it 89_0; its later job id replaces that
    name. Raises OSError.
    """
    history = [parse(content) for content in files.read_json_lines(path)]
    starts = [e for e in history if isinstance(e, Started) and e.array_task and e.job_id]
    numbers = {event.array_task: event.job_id for event in starts}
    return [
        replace(event, job_id=numbers[event.job_id], array_task=event.job_id)
        if event.job_id in numbers
        else event
        for event in history
    ]


def parse(content: Mapping[str, object]) -> Event:
    """Return the event of one line."""
    return files.load(_KINDS.get(str(content.get("event")), Event), content) or Event()


_KINDS = {each.kind: each for each in Event.__subclasses__()}


def add(path: Path, event: Event) -> None:
    """Append an event with the current time, and sync it to disk. Raises OSError.

    Fields with default values are left out.
    """
    files.append_json_line(path, _line(event))


def note(path: Path, event: Event) -> None:
    """Append an event as `add` does, without a sync: a synced record has the same content."""
    files.append_json_line(path, _line(event), sync=False)


def _line(event: Event) -> dict[str, object]:
    values = ((each, getattr(event, each.name)) for each in fields(event) if each.name != "time")
    changed = {each.name: value for each, value in values if value != _default(each)}
    return {"event": event.kind, "time": round(time.time(), 3), **changed}


def _default(each: "Field[object]") -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()
