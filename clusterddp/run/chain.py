"""Chains: runs that wait for other runs, whichever jobs these take.

Slurm holds a job back until the present jobs of the awaited runs are over, with whatever exit code
(`afterany`): a run's records say more than a job's end does. The start that follows looks at these
runs, and begins, waits again, or ends. Who makes a new job for a run has the jobs behind it wait
for that one (`rejoin`), which spares them a start in vain.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from clusterddp import log
from clusterddp.errors import ClusterDDPError, RequestError, SlurmError
from clusterddp.ranks.variables import is_rehearsal, own_name
from clusterddp.request.spec import ANY, CONDITIONS, OK, JobSpec
from clusterddp.run import events, restart_policy
from clusterddp.run.attempt import NotStarted
from clusterddp.run.run_dir import RunDir
from clusterddp.run.state import (
    CANCELLED,
    CREATED,
    DONE,
    FAILED,
    QUEUED,
    RUNNING,
    STOPPED,
    UNKNOWN,
    latest_submission,
)
from clusterddp.run.status import RunStatus, find_run, job_ids, statuses
from clusterddp.slurm import client as slurm
from clusterddp.slurm.states import State

PATIENCE_SECONDS = 600.0
"""Time for which a start asks how an awaited run is doing, until it gives up."""
_PAUSE_SECONDS = 5.0


class Due(Enum):
    """Relation of an awaited run's state to the end that it is to come to."""

    MET = "met"
    WAITS = "waits"
    """The run is queued or running."""
    HELD = "held"
    """The run goes on only once a person submits it again."""
    NEVER = "never"
    """The run has ended otherwise."""
    UNKNOWN = "unknown"


class NotDue(NotStarted):
    """A start that is to begin nothing, as an awaited run has not ended as was asked for."""

    def __init__(self, message: str, cause: str = restart_policy.NOT_DUE) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Awaited:
    """A run that another one waits for, as it is now."""

    run: RunDir
    condition: str
    """End that it is to come to, a word of `CONDITIONS`."""
    status: RunStatus
    due: Due

    @property
    def text(self) -> str:
        """Return what was asked for, as it is typed: `a` or `a:any`."""
        return self.run.name if self.condition == OK else f"{self.run.name}:{self.condition}"

    @property
    def words(self) -> str:
        """Return the run and its state: `a (failed: exit code 3)`."""
        state, detail = self.status.state, self.status.detail
        if state in (RUNNING, CANCELLED):  # the latter's own wait, perhaps, which goes too far here
            detail = ""
        return f"{self.run.name} ({state}{': ' if detail else ''}{detail})"

    @property
    def job(self) -> str:
        """Return the name by which Slurm takes the job to wait for; empty where there is none."""
        if self.due is not Due.WAITS or self.status.launcher == "local":
            return ""
        return self.status.array_element or self.status.job_id


def judge(condition: str, status: RunStatus) -> Due:
    """Judge whether an awaited run has come to the end that was asked for."""
    state = status.state
    if state in (QUEUED, RUNNING):
        return Due.WAITS
    if state == UNKNOWN and not status.is_forgotten:
        return Due.UNKNOWN
    if state == CREATED:
        return Due.HELD
    if condition == ANY:
        return Due.MET
    if state == STOPPED:
        return Due.HELD
    ended = FAILED if state == UNKNOWN else state  # nobody recorded its end: it was killed
    return Due.MET if ended == (DONE if condition == OK else FAILED) else Due.NEVER


# What else can be waited for, beside a run, is to be known by the next two alone.
def find(output_root: Path, text: str) -> tuple[str, str]:
    """Find the run of `RUN[:CONDITION]`; returns its directory and the end that it is to come to.

    Raises RequestError where there is no such run.
    """
    name, _, condition = text.rpartition(":")
    if condition not in CONDITIONS:
        name, condition = text, OK
    return os.path.abspath(find_run(output_root, name).path), condition


def look(spec: JobSpec) -> list[Awaited]:
    """Look at the runs that a request waits for; asks Slurm once, and only where it must."""
    runs = [RunDir(Path(path)) for path, _ in spec.after]
    awaited = []
    for run, (_, condition), status in zip(runs, spec.after, statuses(runs), strict=True):
        if run.path.is_dir():
            awaited.append(Awaited(run, condition, status, judge(condition, status)))
        else:
            gone = replace(status, state="gone", detail=f"no {run.path}")
            awaited.append(Awaited(run, condition, gone, Due.NEVER))
    return awaited


def describe(awaited: Sequence[Awaited]) -> str:
    """Return what a submission waits for, in words; empty where it begins as any other."""
    waits = [each for each in awaited if each.due is not Due.MET]
    jobs = " and ".join(each.job for each in waits if each.job)
    words = f"waits for {', '.join(each.words for each in waits)}" if waits else ""
    return f"{words}, by now job {jobs}" if jobs else words


def check(awaited: Sequence[Awaited], *, has_queue: bool = True) -> None:
    """Refuse a submission that would never begin; raises RequestError.

    has_queue: False for a rehearsal, which nothing holds back.
    """
    for each in awaited:
        asked, again = f"--after {each.text}: {each.words}", each.run.resubmission
        if each.due is Due.NEVER:
            raise RequestError(
                f"{asked} has ended otherwise. Submit it again with '{again}', wait for any end "
                f"of it with --after {each.run.name}:{ANY}, or do not wait with --after ''."
            )
        if each.due is Due.HELD:
            raise RequestError(
                f"{asked} does not go on by itself. Submit it first, with '{again}'."
            )
        if each.due is Due.UNKNOWN:
            raise RequestError(f"{asked} cannot be waited for. Try again where Slurm answers.")
        if each.due is Due.WAITS and not has_queue:
            raise RequestError(
                f"{asked} has not ended, and --launcher local has no queue to wait in. Wait for it "
                f"with 'clusterddp logs -f {each.run.shown}'."
            )
        if each.due is Due.WAITS and not each.job:
            raise RequestError(f"{asked} has no job in Slurm that another one could wait for.")


def dependency(awaited: Sequence[Awaited], others: Sequence[str] = ()) -> str:
    """Return sbatch's --dependency on the runs' present jobs, and on others; empty without any."""
    jobs = [f"afterany:{each.job}" for each in awaited if each.job]
    return ",".join(dict.fromkeys([*filter(None, others), *jobs]))


def record(run: RunDir, jobs: Mapping[RunDir, str], awaited: Sequence[Awaited]) -> None:
    """Record that jobs wait, in their runs, and in those that they wait for. Raises OSError.

    run: the run that waits, or the sweep. jobs: the run's job, or those of the sweep's points.
    """
    for waiting, job_id in jobs.items():
        _record_wait(waiting, job_id, awaited)
    by = str(run.path.absolute())
    for each in awaited:
        if by in _awaited_by(each.run):
            continue
        try:
            events.add(each.run.events, events.AwaitedBy, by=by)
        except OSError as error:
            log.info(
                f"{each.run.name} cannot note that {run.name} waits for it ({error.strerror}); a "
                f"start of {run.name} looks at it all the same"
            )


def wait_again(run: RunDir, job_id: str, restart: int) -> str:
    """Put a job back into the queue that Slurm has started too early; returns why.

    No attempt is begun. Returns nothing where the awaited runs have come to their ends, or an
    attempt has begun since a person submitted the run. restart: SLURM_RESTART_COUNT. Raises NotDue
    where the run can never begin, or cannot wait.
    """
    spec, history = run.load_spec(), events.read(run.events)
    is_over = is_rehearsal(os.environ) or restart_policy.causes_of(history)
    if not spec.after or is_over or restart_policy.withdrawn(history, job_id):
        return ""
    awaited = _look_patiently(spec)
    for each in awaited:
        if each.due in (Due.NEVER, Due.UNKNOWN):
            raise NotDue(f"not started, as it waits for {each.text}: {each.words}")
    waits = [each for each in awaited if each.due is not Due.MET]
    if not waits:
        log.info(f"it has waited for {', '.join(each.words for each in awaited)}")
        return ""
    name = own_name(os.environ, job_id)
    if slurm.ending(name, restart) is slurm.Ending.CANCELLED:
        raise NotDue("the job was cancelled while it waited", restart_policy.CANCELLED)
    try:
        slurm.put_back(name, dependency(waits))
    except SlurmError as error:
        why = f"not started: it cannot wait again for {waits[0].words}: {error}"
        raise NotDue(why, restart_policy.FAILED) from None
    _record_wait(run, job_id, awaited)
    return f"waits for {', '.join(each.words for each in waits)}"


def rejoin(run: RunDir) -> None:
    """Have the jobs that wait for a run wait for its new job.

    Where that fails it is logged: their start looks at the run.
    """
    for path in _awaited_by(run):
        waiting = RunDir(Path(path))
        try:
            _rejoin(run, waiting)
        except (ClusterDDPError, OSError) as error:
            log.info(f"{waiting.name} looks for the new job of {run.name} once it starts: {error}")


def _rejoin(run: RunDir, waiting: RunDir) -> None:
    spec, history = waiting.load_spec(), events.read(waiting.events)
    submission = latest_submission(history)
    awaited_paths = {Path(path).resolve() for path, _ in spec.after}
    if run.path.resolve() not in awaited_paths or submission is None:
        return
    if submission.end and submission.end.cause == restart_policy.NOT_DUE:
        log.info(
            f"{waiting.name} waited for {run.name} and was not started. Submit it again with: "
            f"{waiting.resubmission}"
        )
    if submission.end or submission.is_local or restart_policy.causes_of(history):
        return
    job = slurm.query([submission.job_id])[submission.job_id]
    if job.state is not State.PENDING:
        return  # it is starting, and looks by itself; or it was cancelled
    name, awaited = job.element or submission.job_id, look(spec)
    former = {f"afterany:{job_id}" for each in awaited for job_id in job_ids(each.run)}
    others = [d for d in slurm.dependency_of(name) if d.removesuffix("_*") not in former]
    waits = [event for event in history if isinstance(event, events.Waits)]
    slurm.depend(name, dependency(awaited, others))
    if waits and waits[-1].held:
        slurm.release(name)
    _record_wait(waiting, submission.job_id, awaited)
    log.info(f"{waiting.name} (job {name}) waits for it")


def _look_patiently(spec: JobSpec) -> list[Awaited]:
    """Look at the awaited runs, again and again while Slurm does not say how they are doing."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        awaited = look(spec)
        unknown = [each.words for each in awaited if each.due is Due.UNKNOWN]
        if not unknown or time.monotonic() > deadline:
            return awaited
        log.info(f"{', '.join(unknown)}; asking again")
        time.sleep(_PAUSE_SECONDS)  # a slurmctld that comes back tells nobody


def _record_wait(run: RunDir, job_id: str, awaited: Sequence[Awaited]) -> None:
    waits = [each for each in awaited if each.due is not Due.MET]
    if waits:
        events.add(
            run.events,
            events.Waits,
            job_id=job_id,
            runs=tuple(each.text for each in waits),
            why=", ".join(each.words for each in waits),
            held=not any(each.job for each in waits),
        )


def _awaited_by(run: RunDir) -> list[str]:
    """Return the directories of the runs that wait for this one, or did."""
    noted = [e.by for e in events.read(run.events) if isinstance(e, events.AwaitedBy)]
    return list(dict.fromkeys(noted))
