"""Chains: runs that wait for other runs or sweeps, however many jobs those need.

Slurm holds a job until the current jobs of the awaited runs end, with any exit code (`afterany`):
a run's records are more precise than a job's end. The job then checks these runs, and begins,
requeues itself, or ends. Whatever creates a new job for a run also updates the dependencies of the
jobs that wait for it (`update_waiting_jobs`), which avoids a useless start.
"""

import contextlib
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clusterddp import log, polling
from clusterddp.errors import ClusterDDPError, RequestError, SlurmError
from clusterddp.ranks.variables import has_queue, slurm_job_name
from clusterddp.request.spec import ANY, CONDITIONS, FAILED, IN_ALLOCATION, OK, JobSpec
from clusterddp.run import events
from clusterddp.run.attempt import StartRefused
from clusterddp.run.events import Cause
from clusterddp.run.history import History, causes_by_attempt, withdrawal_cause
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.slurm import client as slurm
from clusterddp.slurm.states import HELD, State
from clusterddp.status.find import find_run, find_sweep, job_ids
from clusterddp.status.state import ACTIVE, RunState, latest_submission
from clusterddp.status.status import RunStatus, statuses
from clusterddp.status.sweeps import overall_state, summary

_MAX_FOLLOWED = 1000
"""Largest number of runs and sweeps searched for a circular wait."""


class Readiness(Enum):
    """Readiness of an awaited run or sweep: has it reached the requested end?"""

    MET = "met"
    WAITS = "waits"
    """The run is queued or running."""
    NEEDS_RESUME = "held"
    """The run needs a manual resumption."""
    NEVER = "never"
    """The run has reached another end."""
    UNKNOWN = "unknown"


class NotDue(StartRefused):
    """Raised if a job must not start, because an awaited run did not reach the requested end."""

    code = "CD1106"

    def __init__(self, message: str, cause: str = Cause.NOT_DUE, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.cause = cause


@dataclass(frozen=True)
class Awaited:
    """Current state of a run or sweep that another run waits for."""

    run: RunDir
    """Its directory: a `SweepDir` for a sweep."""
    condition: str
    """Requested end, one of `CONDITIONS`."""
    readiness: Readiness
    state: str
    detail: str = ""
    """Reason for the state; for a sweep, the number of trials in each state."""
    jobs: tuple[str, ...] = ()
    """Slurm ids of the jobs to wait for."""

    @classmethod
    def of(cls, run: RunDir, condition: str, known: Sequence[RunStatus]) -> "Awaited":
        """Build it from `known`: the status of the run, or of each trial of the sweep."""
        is_sweep = isinstance(run, SweepDir)
        waits = [
            status.array_task or status.job_id
            for status in known
            if judge(condition, status) is Readiness.WAITS
            and status.launcher not in ("local", IN_ALLOCATION)
        ]
        if is_sweep:  # an array's id covers all of its elements
            waits = [job.partition("_")[0] for job in waits]
            states = [status.state for status in known]
            state, detail = overall_state(states), summary(states)
        else:
            [status] = known
            state, detail = status.state, status.detail
            # For a cancelled run the reason may be the run's own wait: irrelevant here.
            if state in (RunState.RUNNING, RunState.CANCELLED):
                detail = ""
        jobs = tuple(dict.fromkeys(filter(None, waits)))
        return cls(run, condition, judge_all(condition, known), state, detail, jobs)

    @property
    def text(self) -> str:
        """Value of --after: `a` or `a:any`."""
        return self.run.name if self.condition == OK else f"{self.run.name}:{self.condition}"

    @property
    def description(self) -> str:
        """Name and state of the run: `a (failed: exit code 3)`."""
        return f"{self.run.name} ({self.state}{': ' if self.detail else ''}{self.detail})"


def judge_all(condition: str, known: Sequence[RunStatus]) -> Readiness:
    """Return the readiness of a sweep from the status of its trials.

    WAITS while a trial is queued or running. ok and any: every trial must meet the condition;
    failed: at least one trial. A run counts as a sweep of one.
    """
    judged = {judge(condition, status) for status in known}
    ends = (Readiness.NEVER, Readiness.NEEDS_RESUME, Readiness.MET)
    order = (Readiness.WAITS, Readiness.UNKNOWN, *(ends[::-1] if condition == FAILED else ends))
    return next((each for each in order if each in judged), Readiness.NEEDS_RESUME)


def judge(condition: str, status: RunStatus) -> Readiness:
    """Return whether an awaited run has reached the requested end, may, or never will."""
    state = status.state
    if state in ACTIVE:
        return Readiness.WAITS
    if state == RunState.UNKNOWN and not status.is_forgotten:
        return Readiness.UNKNOWN
    if state == RunState.CREATED:
        return Readiness.NEEDS_RESUME
    if condition == ANY:
        return Readiness.MET
    if state == RunState.STOPPED:
        return Readiness.NEEDS_RESUME
    # Without a recorded end, it was killed.
    ended_well = state == RunState.DONE
    has_failed = state in (RunState.FAILED, RunState.UNKNOWN)
    return Readiness.MET if (ended_well if condition == OK else has_failed) else Readiness.NEVER


def find(runs_dir: Path, text: str) -> tuple[str, str]:
    """Resolve `RUN[:CONDITION]` to the directory of a run or sweep, and the condition.

    Raises RequestError if there is neither a run nor a sweep with this name.
    """
    name, _, condition = text.rpartition(":")
    if condition not in CONDITIONS:
        name, condition = text, OK
    return os.path.abspath((find_sweep(runs_dir, name) or find_run(runs_dir, name)).path), condition


def check_awaited(spec: JobSpec) -> list[Awaited]:
    """Return the current state of each run that a request waits for; query Slurm at most once.

    Raises RequestError if the request of a sweep cannot be read.
    """
    runs = [_at(path) for path, _ in spec.after]
    each = [_runs_of(run) for run in runs]
    known = iter(statuses([run for several in each for run in several]))
    awaited = []
    for run, several, (_, condition) in zip(runs, each, spec.after, strict=True):
        of_run = [next(known) for _ in several]
        if run.path.is_dir():
            awaited.append(Awaited.of(run, condition, of_run))
        else:
            awaited.append(Awaited(run, condition, Readiness.NEVER, "gone", f"no {run.path}"))
    return awaited


def describe(awaited: Sequence[Awaited]) -> str:
    """Describe what a submission waits for; empty if it waits for nothing."""
    waits = [each for each in awaited if each.readiness is not Readiness.MET]
    jobs = " and ".join(job for each in waits for job in each.jobs)
    words = f"waits for {', '.join(each.description for each in waits)}" if waits else ""
    return f"{words}, currently job {jobs}" if jobs else words


def check(
    awaited: Sequence[Awaited], spec: JobSpec | None = None, *, has_queue: bool = True
) -> None:
    """Raise RequestError for a submission that would never begin.

    spec: request of an existing run or sweep, which may itself be awaited.
    has_queue: False for a rehearsal, which cannot wait in a queue.
    """
    for each in awaited:
        asked, again = f"--after {each.text}: {each.description}", each.run.resume_command
        if each.readiness is Readiness.NEVER:
            repeat = "" if each.state == RunState.DONE else f"Submit it again with '{again}', or w"
            raise RequestError(
                f"{asked} has not ended as requested. {repeat or 'W'}ait for any end with --after "
                f"{each.run.name}:{ANY}, or do not wait with --after ''. [CD1105]"
            )
        if each.readiness is Readiness.NEEDS_RESUME:
            raise RequestError(
                f"{asked} needs a manual resumption. Submit it first: '{again}'. [CD1105]"
            )
        if each.readiness is Readiness.UNKNOWN:
            raise RequestError(
                f"{asked}: its state is unknown. Try again on a machine where Slurm "
                "answers. [CD0401]"
            )
        if each.readiness is Readiness.WAITS and not has_queue:
            raise RequestError(
                f"{asked} has not ended, and a run that starts at once has no queue to wait in. "
                f"Wait for it with 'clusterddp logs -f {each.run.cli_name}'. [CD1105]"
            )
        if each.readiness is Readiness.WAITS and not each.jobs:
            raise RequestError(
                f"{asked} has no Slurm job to wait for. Wait until it has ended. [CD1105]"
            )
    if spec and (names := _find_circle(spec, awaited)):
        waits = ", ".join(f"{one} waits for {other}" for one, other in itertools.pairwise(names))
        raise RequestError(
            f"--after {names[0]}: {waits}, so {spec.run_name} would wait for itself. Cancel "
            f"{names[0]} first, or do not wait with --after ''. [CD1105]"
        )


def _find_circle(spec: JobSpec, awaited: Sequence[Awaited]) -> list[str]:
    """Find a circular wait that starts at an awaited run; return the names on it.

    Follows the waits of each queued run, and stops at records that cannot be read.
    """
    own = {spec.run_dir, *(f"{spec.run_dir}-{index}" for index in range(len(spec.sweep)))}
    own = {os.path.realpath(path) for path in (own | {spec.shared_dir}) - {""}}
    ways = [[each.run] for each in awaited if each.readiness is Readiness.WAITS]
    seen = set()
    for way in itertools.islice(ways, _MAX_FOLLOWED):  # the list grows during the loop
        with contextlib.suppress(ClusterDDPError, OSError):
            for path in _waits_for(way[-1]):
                if os.path.realpath(path) in own:
                    return [run.name for run in (*way, _at(path))]
                if path not in seen:
                    seen.add(path)
                    ways.append([*way, _at(path)])
    return []


def _waits_for(run: RunDir) -> set[str]:
    """Return the directories that a run, or a sweep's trials, still wait for."""
    paths = set()
    for each in _runs_of(run):
        spec = each.read_spec()
        if spec is None or not spec.after:
            continue
        history = events.read(each.events)
        submission = latest_submission(history)
        is_over = submission is None or submission.end or submission.cancelled
        if not is_over and not causes_by_attempt(history):
            paths |= {path for path, _ in spec.after}
    return paths


def dependency(awaited: Sequence[Awaited], others: Sequence[str] = ()) -> str:
    """Return sbatch's --dependency on the runs' current jobs and on others; empty if none."""
    jobs = [f"afterany:{job}" for each in awaited for job in each.jobs]
    return ",".join(dict.fromkeys([*filter(None, others), *jobs]))


def record(run: RunDir, jobs: Mapping[RunDir, str], awaited: Sequence[Awaited]) -> None:
    """Record a wait in the waiting runs and in the awaited runs. Raises OSError.

    run: the waiting run or sweep. jobs: the job of the run, or of each trial of the sweep.
    """
    for waiting, job_id in jobs.items():
        _record_wait(waiting, job_id, awaited, sync=len(jobs) == 1)
    by = str(run.path.absolute())
    for each in awaited:
        if by in _awaited_by(each.run):
            continue
        try:
            events.add(each.run.events, events.DependentAdded(by=by))
        except OSError as error:
            held = shlex.quote(",".join(slurm.join_array_tasks([*jobs.values()])))
            log.warning(
                f"cannot record in {each.run.name} that {run.name} waits for it "
                f"({error.strerror}). {run.name} still checks it at its start. If Slurm holds "
                f"{run.name} after you resume {each.run.name}: scontrol release {held} [CD0504]"
            )


def requeue_until_due(run: RunDir, job_id: str, restart: int) -> str:
    """Requeue a job that Slurm started before its awaited runs ended; return the reason.

    Returns an empty string, and does nothing, if the awaited runs have reached the requested ends,
    or if an attempt has begun since the latest manual submission. restart: SLURM_RESTART_COUNT.
    Raises NotDue if the run can never begin, or cannot wait.
    """
    spec, history = run.load_spec(), events.read(run.events)
    is_over = not has_queue(os.environ) or causes_by_attempt(history)
    name = slurm_job_name(
        os.environ, job_id
    )  # by which a trial of a sweep is known until it begins
    is_withdrawn = any(withdrawal_cause(history, each) for each in (job_id, name))
    if not spec.after or is_over or is_withdrawn:
        return ""
    awaited = _check_until_known(spec)
    for each in awaited:
        if each.readiness in (Readiness.NEVER, Readiness.UNKNOWN):
            raise NotDue(f"not started, because it waits for {each.text}: {each.description}")
    waits = [each for each in awaited if each.readiness is not Readiness.MET]
    if not waits:
        log.info(f"awaited runs have ended: {', '.join(each.description for each in awaited)}")
        return ""
    if slurm.ending(name, restart) is slurm.Ending.CANCELLED:
        raise NotDue("the job was cancelled while it waited [CD1203]", Cause.CANCELLED)
    trouble = ""
    try:
        slurm.requeue_with_dependency(name, dependency(waits))
    except slurm.StillHeld as error:
        trouble = _held_hint(name, error)
    except SlurmError as error:
        why = f"not started: it cannot wait again for {waits[0].description}: {error}"
        raise NotDue(why, Cause.FAILED, code=error.code) from None
    _record_wait(run, name, awaited, trouble=trouble)
    if trouble or not dependency(waits):
        _release_if_due(run, name, spec)
    return f"waits for {', '.join(each.description for each in waits)}{trouble}"


def _release_if_due(run: RunDir, job_id: str, spec: JobSpec) -> None:
    """Check again for a job that is held now: `update_waiting_jobs` may have just missed it."""
    try:
        awaited = check_awaited(spec)
        jobs = dependency(awaited)
        if not jobs and any(
            each.readiness in (Readiness.WAITS, Readiness.NEEDS_RESUME) for each in awaited
        ):
            return
        if jobs:
            slurm.set_dependency(job_id, jobs)
        slurm.release(job_id)
    except ClusterDDPError as error:
        log.info(f"the awaited runs cannot be checked{_held_hint(job_id, error)}")
        return
    log.info("an awaited run was submitted in the meantime: the job is released")
    _record_wait(run, job_id, awaited)


def update_waiting_jobs(run: RunDir) -> None:
    """Make the jobs that wait for a run, or for its sweep, depend on its new job.

    Failures are logged: the waiting jobs check the run at their start, a held job once released.
    """
    whole = run.sweep
    awaited = [run, *([whole] if whole else [])]
    for path in dict.fromkeys(path for each in awaited for path in _awaited_by(each)):
        waiting = _at(path)
        try:
            _update_waiting(awaited, waiting)
        except (ClusterDDPError, OSError) as error:
            log.info(f"{waiting.name} will check {run.name} at its start, not before: {error}")


def _update_waiting(renewed: Sequence[RunDir], waiting: RunDir) -> None:
    """Update the dependencies of the jobs of a waiting run or sweep.

    renewed: the run that has a new job, and its sweep.
    """
    spec = waiting.load_spec()
    awaited_paths = {Path(path).resolve() for path, _ in spec.after}
    if not awaited_paths & {each.path.resolve() for each in renewed}:
        return
    queued, has_ended = _waiting_jobs(waiting, spec)
    if has_ended:
        log.info(
            f"{waiting.name} waited for {renewed[0].name} and was not started. Submit it again "
            f"with: {waiting.resume_command}"
        )
    if not queued:
        return
    try:
        jobs = _replace_dependency(spec, queued)
    except ClusterDDPError as error:
        if held := slurm.join_array_tasks([name for name, is_held in queued.values() if is_held]):
            trouble = _held_hint(",".join(held), error)
            log.info(f"{waiting.name} does not wait for the new job of {renewed[0].name}{trouble}")
            return
        raise
    log.info(f"{waiting.name} (job {' and '.join(jobs)}) waits for it")


def _replace_dependency(spec: JobSpec, queued: Mapping[RunDir, tuple[str, bool]]) -> list[str]:
    """Set the dependencies of queued jobs (from `_waiting_jobs`) by `spec`; return their names."""
    awaited = check_awaited(spec)
    awaited_runs = [run for each in awaited for run in _runs_of(each.run)]
    former = {f"afterany:{job_id}" for run in awaited_runs for job_id in job_ids(run)}
    first = next(iter(queued.values()))[0]
    others = [d for d in slurm.dependency_of(first) if d.removesuffix("_*") not in former]
    jobs = slurm.join_array_tasks([name for name, _ in queued.values()])
    for job in jobs:
        slurm.set_dependency(job, dependency(awaited, others))
    for job in slurm.join_array_tasks([name for name, held in queued.values() if held]):
        slurm.release(job)
    for run, (name, _) in queued.items():
        _record_wait(run, name, awaited, sync=len(queued) == 1)
    return jobs


def _waiting_jobs(waiting: RunDir, spec: JobSpec) -> tuple[dict[RunDir, tuple[str, bool]], bool]:
    """Find the queued jobs of a run, or of a sweep's trials, that wait as `spec` says.

    Returns each job's name and whether it is held, and whether a run has ended without starting.
    Jobs that are starting check for themselves. Slurm's state decides whether a job is held: the
    record follows later, and the job may still be completing after its script held it.
    """
    found: dict[str, tuple[RunDir, bool]] = {}
    has_ended = False
    for run in _runs_of(waiting):
        history = events.read(run.events)
        submission = latest_submission(history)
        own = run.read_spec() if isinstance(waiting, SweepDir) else spec
        if submission is None or own is None or own.after != spec.after:
            continue  # a trial that was resumed with another --after
        if submission.end and submission.end.cause == Cause.NOT_DUE:
            has_ended = True
        if submission.end or submission.is_local or causes_by_attempt(history):
            continue
        waits = [event for event in history if isinstance(event, events.Waits)]
        found[submission.job_id] = run, bool(waits and waits[-1].held)
    jobs = slurm.query([*found]) if found else {}
    queued = {}
    for job_id, (run, was_held) in found.items():
        job = jobs[job_id]
        is_held = was_held if job.problem else job.reason == HELD
        if job.state is State.PENDING or (is_held and not job.state.is_final):
            queued[run] = job.element or job_id, is_held
    return queued, has_ended


def _at(path: str) -> RunDir:
    """Return the run or the sweep in a directory."""
    sweep = SweepDir(Path(path))
    return sweep if sweep.is_sweep else RunDir(Path(path))


def _runs_of(run: RunDir) -> list[RunDir]:
    """Return the trials of a sweep, or the run itself."""
    return run.trials if isinstance(run, SweepDir) else [run]


def _check_until_known(spec: JobSpec) -> list[Awaited]:
    """Check the awaited runs, repeatedly while Slurm does not answer."""
    awaited: list[Awaited] = []
    for is_last in polling.poll(polling.SLURM_RESTART_SECONDS, every=polling.SLURM_POLL_SECONDS):
        awaited = check_awaited(spec)
        unknown = [each.description for each in awaited if each.readiness is Readiness.UNKNOWN]
        if not unknown:
            break
        if not is_last:
            log.info(f"{', '.join(unknown)}; retrying")
    return awaited


def _held_hint(job_id: str, error: Exception) -> str:
    """Return the end of a message about a job that must be released manually."""
    release = f"scontrol release {shlex.quote(job_id)}"
    return f"; Slurm holds it ({error}). To have it check again: '{release}'"


def _record_wait(
    run: RunDir, job_id: str, awaited: Sequence[Awaited], *, sync: bool = True, trouble: str = ""
) -> None:
    """Record what a job waits for.

    sync: False for one of many jobs (see `events.note`). trouble: why it is held.
    """
    waits = [each for each in awaited if each.readiness is not Readiness.MET]
    if waits:
        event = events.Waits(
            job_id=job_id,
            runs=tuple(each.text for each in waits),
            why=f"{', '.join(each.description for each in waits)}{trouble}",
            held=bool(trouble) or not any(each.jobs for each in waits),
        )
        (events.add if sync else events.note)(run.events, event)


def _awaited_by(run: RunDir) -> list[str]:
    """Return the directories of the runs that wait, or waited, for this one."""
    return list(dict.fromkeys(each.by for each in History.read(run).every(events.DependentAdded)))
