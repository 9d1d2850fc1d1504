"""Events of a run, one line of `events.jsonl` each: their types, one reader, one writer.

docs/records.md says what each field means, and since which version. What an event does not say has
the field's default. Times are seconds since the epoch.
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
    FAILED = "failed"
    CANCELLED = "cancelled"
    """A person cancelled the job."""
    STOPPED = "stopped"
    """`clusterddp stop` asked for it, after saving."""
    SIGNAL = "signal"
    """Slurm's signal ahead of the time limit, or one like it, and the ranks have saved."""
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    """Slurm has put the job back by itself: preemption, a lost node, `scontrol requeue`."""
    NODE_LOST = "node lost"
    SUSPENDED = "suspended"
    """Slurm suspended the job for longer than the ranks wait for each other, so they broke off."""
    PREFLIGHT = "preflight"
    """A node has failed its checks ahead of the tasks, which were not started."""
    SUPERSEDED = "superseded"
    """A later attempt has begun, as beside a lost node's orphan."""
    NOT_DUE = "not due"
    """A run that it waited for has ended in another way than was asked for: none has begun."""

    __str__ = str.__str__


@dataclass(frozen=True, kw_only=True)
class Event:
    """Fields that all events share; alone, an event that this version does not know."""

    kind: ClassVar[str] = ""
    time: float | None = None
    """Time at which it was written, in seconds since the epoch."""
    job_id: str = ""
    """Slurm's job id; of a rehearsal the number of its process; empty where there is no job."""
    attempt: int | None = None
    """Number of the attempt, from 1; None where the event is of none."""
    array_element: str = ""
    """Name by which Slurm's commands take the job, 89_0, where it is an array's element."""


@dataclass(frozen=True)
class Failure:
    """Rank that failed first, and why."""

    rank: int
    """Rank, from 0."""
    host: str
    """Its host, by Slurm's name; empty where that is not known."""
    reason: str
    """Error or signal of which it died, in a few words."""
    log: str
    """Its log, relative to the run directory."""
    exit_code: int | None = None
    """Its exit code, 128 + N of signal N; None where nobody recorded it."""

    def describe(self) -> str:
        """Return a line: `rank 3 on h02 failed first: RuntimeError: boom (logs/rank-3.log)`."""
        host = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{host} failed first: {self.reason} ({self.log})"


@dataclass(frozen=True, kw_only=True)
class Submitted(Event):
    """Submission of a job, by a person or by the job that it replaces."""

    kind: ClassVar[str] = "submitted"
    launcher: str = ""
    """`sbatch`, `submitit` or `local`."""
    folder: str = ""
    """Folder in which the person typed the command."""
    pid: int | None = None
    """Process that controls a local run, or runs the points of a sweep in turn, on `host`."""
    host: str | None = None
    """Host of that process."""
    in_place_of: str = ""
    """Job that it replaces; empty where a person submitted it."""
    why: str = ""
    """Reason for which it replaces that job; empty without one."""
    indices: tuple[int, ...] = ()
    """Points of a sweep that the job array starts."""


@dataclass(frozen=True, kw_only=True)
class Resubmitted(Event):
    """Request of a person to submit the run once more; stands before the job's `Submitted`."""

    kind: ClassVar[str] = "resubmit"
    changes: tuple[str, ...] = ()
    """Settings and files of code that differ from the former submission."""
    from_scratch: int | None = None
    """Attempt up to which the checkpoints are given up."""


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """Start of an attempt; without a number where the attempt could not be made."""

    kind: ClassVar[str] = "started"
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    nodelist: str = ""
    """Hosts of the tasks, in Slurm's form: `h[01-02]`."""
    clusterddp: str = ""
    """Version that runs the attempt, and the run's own file or `installed`."""
    spares: tuple[str, ...] = ()
    """Nodes of the job on which no task runs."""


@dataclass(frozen=True, kw_only=True)
class NotStarted(Event):
    """Start by Slurm of a job that begins no attempt: its run is done, or a node of it is bad."""

    kind: ClassVar[str] = "not_started"
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    nodelist: str = ""
    """Hosts of the job, in Slurm's form: `h[01-02]`."""
    why: str = ""
    """Reason for which no attempt began."""


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """End of an attempt; `cause` is empty where no batch script judged it."""

    kind: ClassVar[str] = "ended"
    restart: int = 0
    """SLURM_RESTART_COUNT."""
    exit_code: int | None = None
    """Exit code of the job."""
    cause: str = ""
    """Cause of its end: a word of `Cause`."""
    how: str = ""
    """Event that ended it, where the word of the cause would say another thing."""
    step: int | None = None
    """Step at which the ranks left."""
    saved: bool = True
    """False where Slurm ended it, or its nodes failed their checks, with nothing new saved; of
    another end it says nothing."""
    first_failure: Failure | None = None
    """Rank that failed first; None where none did, or none is known."""
    write_error: str = ""
    """Reason for which a checkpoint or a record could not be written."""
    remark: str = ""
    """What a person should know beside the cause, such as that each task trained by itself."""
    why: str = ""
    """Reason for which no other attempt follows by itself; empty where one does."""
    code: str = ""
    """Code of its end, for `clusterddp explain`; empty of a run that is done."""
    stop_signal: str = ""
    """Signal at which the ranks of a command left with exit code 0, before its end."""


@dataclass(frozen=True, kw_only=True)
class Requeued(Event):
    """Return of the job to the queue."""

    kind: ClassVar[str] = "requeued"
    why: str = ""
    """Reason: the cause of the attempt's end, or why none began."""


@dataclass(frozen=True, kw_only=True)
class ResumedInJob(Event):
    """Decision to begin the next attempt within the job, on nodes that are left of it."""

    kind: ClassVar[str] = "resumed_in_job"
    why: str = ""
    """Reason: the cause of the end of the attempt before."""
    nodelist: str = ""
    """Hosts of the next attempt, in Slurm's form: `h[01-02]`."""


@dataclass(frozen=True, kw_only=True)
class RequeueFailed(Event):
    """Failure to put the job back into the queue."""

    kind: ClassVar[str] = "requeue_failed"
    why: str = ""
    """Reason for which it was to go back."""
    error: str = ""
    """Words of Slurm, or of the system."""


class CancelAsked(Event):
    """Cancellation of the job by a person; one by plain scancel as the notice job has seen it."""

    kind: ClassVar[str] = "cancelled"


class CancelFailed(Event):
    """Failure of the cancellation before it to reach the job."""

    kind: ClassVar[str] = "cancel_failed"


@dataclass(frozen=True, kw_only=True)
class StopAsked(Event):
    """Request of a person to save and leave."""

    kind: ClassVar[str] = "stop_asked"
    by: str = ""
    """Signal to the batch script that asked for it; empty for 'clusterddp stop'."""


class StopFailed(Event):
    """Failure of the request before it to reach the run."""

    kind: ClassVar[str] = "stop_failed"


@dataclass(frozen=True, kw_only=True)
class StepEnded(Event):
    """End of srun's step by the step watch; srun's exit code then says nothing of the tasks."""

    kind: ClassVar[str] = "step_ended"
    step_id: str = ""
    """Slurm's id of the step within the job: `0`."""
    why: str = ""
    """Reason for which srun was not waited for."""


class TimeLimitReached(Event):
    """End of a rehearsal's time limit."""

    kind: ClassVar[str] = "time_limit"


@dataclass(frozen=True, kw_only=True)
class NodesMarkedBad(Event):
    """Nodes that the run's next attempts avoid (`bad_nodes`)."""

    kind: ClassVar[str] = "nodes_marked_bad"
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Measurements, or what was seen, by the node's name."""
    by: str = ""
    """Word of `bad_nodes` for what blames them."""


@dataclass(frozen=True, kw_only=True)
class NodesExcluded(Event):
    """Bad nodes that the job's next start leaves out."""

    kind: ClassVar[str] = "nodes_excluded"
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Reasons by the node's name."""


@dataclass(frozen=True, kw_only=True)
class Cleaned(Event):
    """Removal by `clusterddp clean`."""

    kind: ClassVar[str] = "cleaned"
    checkpoints: tuple[int, ...] = ()
    """Steps."""
    code_files: int = 0
    """Files of the copy of the code."""
    clusterddp: tuple[str, ...] = ()
    """Files of the run's own clusterddp."""
    bytes: int = 0
    """Bytes that were given back."""

    def describe(self) -> str:
        """Name what is gone: `2 checkpoints, 14 files of the code, its clusterddp`."""
        named = (
            ("{}", formatting.count(len(self.checkpoints), "checkpoint") * bool(self.checkpoints)),
            ("{} of the code", formatting.count(self.code_files, "file") * bool(self.code_files)),
            ("{}", "its clusterddp" * bool(self.clusterddp)),
        )
        return formatting.join_known(*named)


@dataclass(frozen=True, kw_only=True)
class NoticeQueued(Event):
    """Queueing of the job that tells the run's end; `job_id` is the job that it waits for."""

    kind: ClassVar[str] = "notice_queued"
    notice_job: str = ""
    """Job id of the job that tells it."""


@dataclass(frozen=True, kw_only=True)
class Waits(Event):
    """Wait of the job in the queue for other runs, from its submission or a start of it on."""

    kind: ClassVar[str] = "waits"
    runs: tuple[str, ...] = ()
    """Names, with the end that each is to come to where that is not `ok`: `a`, `b:any`."""
    why: str = ""
    """States of these runs, in words."""
    held: bool = False
    """True where Slurm holds the job until one of them is submitted again."""


@dataclass(frozen=True, kw_only=True)
class AwaitedBy(Event):
    """Run that waits for this one."""

    kind: ClassVar[str] = "awaited_by"
    by: str = ""
    """Its directory."""


@dataclass(frozen=True, kw_only=True)
class CodeChanged(Event):
    """Difference of an attempt's code from what was submitted, where no copy was made of it."""

    kind: ClassVar[str] = "code_changed"
    changes: tuple[str, ...] = ()
    """Files that differ, each with the way in which it does: `changed train.py`."""


def read(path: Path) -> list[Event]:
    """Read all events in the order in which they were written; none where there is no file.

    A job of an array is known by its name, 89_0, until it has a number of its own, with which its
    start is recorded: its earlier events get that. Raises OSError.
    """
    history = [parse(content) for content in files.read_json_lines(path)]
    starts = [e for e in history if isinstance(e, Started) and e.array_element and e.job_id]
    numbers = {event.array_element: event.job_id for event in starts}
    return [
        replace(event, job_id=numbers[event.job_id], array_element=event.job_id)
        if event.job_id in numbers
        else event
        for event in history
    ]


def parse(content: Mapping[str, object]) -> Event:
    """Build one event from its line."""
    return files.load(_KINDS.get(str(content.get("event")), Event), content) or Event()


_KINDS = {each.kind: each for each in Event.__subclasses__()}


def add(path: Path, event: Event) -> None:
    """Append an event with the current time, and sync it to the disk. Raises OSError.

    Its fields are written that differ from their defaults.
    """
    files.append_json_line(path, _line(event))


def note(path: Path, event: Event) -> None:
    """Append an event as `add` does, without a sync: where a synced record tells the same."""
    files.append_json_line(path, _line(event), sync=False)


def _line(event: Event) -> dict[str, object]:
    values = ((each, getattr(event, each.name)) for each in fields(event) if each.name != "time")
    said = {each.name: value for each, value in values if value != _default(each)}
    return {"event": event.kind, "time": round(time.time(), 3), **said}


def _default(each: "Field[object]") -> object:
    return each.default if each.default_factory is MISSING else each.default_factory()
