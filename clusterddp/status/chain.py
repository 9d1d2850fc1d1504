"""Chains: runs that wait for other runs or sweeps, whichever jobs these take.

Slurm holds a job back until the present jobs of the awaited runs are over, with whatever exit code
(`afterany`): a run's records say more than a job's end does. The start that follows looks at these
runs, and begins, waits again, or ends. Who makes a new job for a run has the jobs behind it wait
for that one (`rejoin`), which spares them a start in vain.
"""

import contextlib
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from clusterddp import log, patience
from clusterddp.errors import ClusterDDPError, RequestError, SlurmError
from clusterddp.ranks.variables import is_rehearsal, slurm_job_name
from clusterddp.request.spec import ANY, CONDITIONS, FAILED, OK, JobSpec
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
from clusterddp.status.sweeps import most_telling, summary

_MOST_FOLLOWED = 1000
"""Runs and sweeps whose own waits are looked at for a circle."""


class Due(Enum):
    """Relation of the state of an awaited run, or sweep, to the end that it is to come to."""

    MET = "met"
    WAITS = "waits"
    """The run is queued or running."""
    HELD = "held"
    """The run goes on only once a person submits it again."""
    NEVER = "never"
    """The run has ended otherwise."""
    UNKNOWN = "unknown"


class NotDue(StartRefused):
    """Start that is to begin nothing, as an awaited run has not ended as was asked for."""

    code = "CD1106"

    def __init__(self, message: str, cause: str = Cause.NOT_DUE, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.cause = cause


@dataclass(frozen=True)
class Awaited:
    """Run, or sweep, that another one waits for, as it is now."""

    run: RunDir
    """Its directory, a `SweepDir` of a sweep."""
    condition: str
    """End that it is to come to, a word of `CONDITIONS`."""
    due: Due
    state: str
    detail: str = ""
    """Reason for the state; of a sweep how many of its points are in which state."""
    jobs: tuple[str, ...] = ()
    """Names by which Slurm takes the jobs to wait for; none where there are none."""

    @classmethod
    def of(cls, run: RunDir, condition: str, known: Sequence[RunStatus]) -> "Awaited":
        """Return what is awaited. known: status of the run, or of each point of the sweep."""
        is_sweep = isinstance(run, SweepDir)
        waits = [
            status.array_element or status.job_id
            for status in known
            if judge(condition, status) is Due.WAITS and status.launcher != "local"
        ]
        if is_sweep:  # an array's id stands for all of its elements
            waits = [job.partition("_")[0] for job in waits]
            states = [status.state for status in known]
            state, detail = most_telling(states), summary(states)
        else:
            [status] = known
            state, detail = status.state, status.detail
            # Of one that was cancelled it may be its own wait: too far from here.
            if state in (RunState.RUNNING, RunState.CANCELLED):
                detail = ""
        jobs = tuple(dict.fromkeys(filter(None, waits)))
        return cls(run, condition, judge_all(condition, known), state, detail, jobs)

    @property
    def text(self) -> str:
        """Return what was asked for, as it is typed: `a` or `a:any`."""
        return self.run.name if self.condition == OK else f"{self.run.name}:{self.condition}"

    @property
    def words(self) -> str:
        """Return the run and its state: `a (failed: exit code 3)`."""
        return f"{self.run.name} ({self.state}{': ' if self.detail else ''}{self.detail})"


def judge_all(condition: str, known: Sequence[RunStatus]) -> Due:
    """Judge a sweep by its points, once none is queued or running: all are to be done, or to have
    ended in any way, or one at least to have failed. A run is judged as a sweep of one.
    """
    judged = {judge(condition, status) for status in known}
    ends = (Due.NEVER, Due.HELD, Due.MET)
    order = (Due.WAITS, Due.UNKNOWN, *(ends[::-1] if condition == FAILED else ends))
    return next((due for due in order if due in judged), Due.HELD)


def judge(condition: str, status: RunStatus) -> Due:
    """Judge whether an awaited run has come to the end that was asked for."""
    state = status.state
    if state in ACTIVE:
        return Due.WAITS
    if state == RunState.UNKNOWN and not status.is_forgotten:
        return Due.UNKNOWN
    if state == RunState.CREATED:
        return Due.HELD
    if condition == ANY:
        return Due.MET
    if state == RunState.STOPPED:
        return Due.HELD
    # Where nobody recorded its end, it was killed.
    ended_well = state == RunState.DONE
    has_failed = state in (RunState.FAILED, RunState.UNKNOWN)
    return Due.MET if (ended_well if condition == OK else has_failed) else Due.NEVER


def find(runs_dir: Path, text: str) -> tuple[str, str]:
    """Find what `RUN[:CONDITION]` means; returns its directory and the end that it is to come to.

    A sweep is named as a run is. Raises RequestError where there is neither.
    """
    name, _, condition = text.rpartition(":")
    if condition not in CONDITIONS:
        name, condition = text, OK
    found = find_sweep(runs_dir, name) or find_run(runs_dir, name)
    return os.path.abspath(found.path), condition


def look(spec: JobSpec) -> list[Awaited]:
    """Look at what a request waits for; asks Slurm once, and only where it must.

    Raises RequestError where the request of a sweep cannot be read.
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
            awaited.append(Awaited(run, condition, Due.NEVER, "gone", f"no {run.path}"))
    return awaited


def describe(awaited: Sequence[Awaited]) -> str:
    """Return what a submission waits for, in words; empty where it begins as any other."""
    waits = [each for each in awaited if each.due is not Due.MET]
    jobs = " and ".join(job for each in waits for job in each.jobs)
    words = f"waits for {', '.join(each.words for each in waits)}" if waits else ""
    return f"{words}, by now job {jobs}" if jobs else words


def check(
    awaited: Sequence[Awaited], spec: JobSpec | None = None, *, has_queue: bool = True
) -> None:
    """Refuse a submission that would never begin; raises RequestError.

    spec: request of a run, or a sweep, that can be awaited itself, as it is there already.
    has_queue: False for a rehearsal, which nothing holds back.
    """
    for each in awaited:
        asked, again = f"--after {each.text}: {each.words}", each.run.resume_command
        if each.due is Due.NEVER:
            raise RequestError(
                f"{asked} has ended otherwise. Submit it again with '{again}', wait for any end "
                f"of it with --after {each.run.name}:{ANY}, or do not wait with --after "
                "''. [CD1105]"
            )
        if each.due is Due.HELD:
            raise RequestError(
                f"{asked} does not go on by itself. Submit it first, with '{again}'. [CD1105]"
            )
        if each.due is Due.UNKNOWN:
            raise RequestError(
                f"{asked} cannot be waited for. Try again where Slurm answers. [CD0401]"
            )
        if each.due is Due.WAITS and not has_queue:
            raise RequestError(
                f"{asked} has not ended, and --launcher local has no queue to wait in. Wait for it "
                f"with 'clusterddp logs -f {each.run.cli_name}'. [CD1105]"
            )
        if each.due is Due.WAITS and not each.jobs:
            raise RequestError(
                f"{asked} has no job in Slurm that another one could wait for. [CD1105]"
            )
    if spec and (names := _circle(spec, awaited)):
        waits = ", ".join(f"{one} waits for {other}" for one, other in itertools.pairwise(names))
        raise RequestError(
            f"--after {names[0]}: {waits}, so {spec.run_name} would wait for itself. Cancel "
            f"{names[0]} first, or do not wait with --after ''. [CD1105]"
        )


def _circle(spec: JobSpec, awaited: Sequence[Awaited]) -> list[str]:
    """Find a way from an awaited run back to the one that is to wait; returns the names on it.

    It leads over what each run in the queue waits for, and ends where records cannot be read.
    """
    own = {spec.run_dir, *(f"{spec.run_dir}-{index}" for index in range(len(spec.sweep)))}
    own = {os.path.realpath(path) for path in (own | {spec.shared_dir}) - {""}}
    ways = [[each.run] for each in awaited if each.due is Due.WAITS]
    seen = set()
    for way in itertools.islice(ways, _MOST_FOLLOWED):  # which grows meanwhile
        with contextlib.suppress(ClusterDDPError, OSError):
            for path in _waits_for(way[-1]):
                if os.path.realpath(path) in own:
                    return [run.name for run in (*way, _at(path))]
                if path not in seen:
                    seen.add(path)
                    ways.append([*way, _at(path)])
    return []


def _waits_for(run: RunDir) -> set[str]:
    """Return the directories that a run waits for, or points of a sweep, unless it has begun."""
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
    """Return sbatch's --dependency on the runs' present jobs, and on others; empty without any."""
    jobs = [f"afterany:{job}" for each in awaited for job in each.jobs]
    return ",".join(dict.fromkeys([*filter(None, others), *jobs]))


def record(run: RunDir, jobs: Mapping[RunDir, str], awaited: Sequence[Awaited]) -> None:
    """Record that jobs wait, in their runs, and in those that they wait for. Raises OSError.

    run: the run that waits, or the sweep. jobs: the run's job, or those of the sweep's points.
    """
    for waiting, job_id in jobs.items():
        _record_wait(waiting, job_id, awaited, sync=len(jobs) == 1)
    by = str(run.path.absolute())
    for each in awaited:
        if by in _awaited_by(each.run):
            continue
        try:
            events.add(each.run.events, events.AwaitedBy(by=by))
        except OSError as error:
            held = shlex.quote(",".join(slurm.in_arrays([*jobs.values()])))
            log.warning(
                f"{each.run.name} cannot note that {run.name} waits for it ({error.strerror}); a "
                f"start of {run.name} looks at it all the same. Should Slurm hold it until "
                f"{each.run.name} is submitted again, let it look then: scontrol release "
                f"{held} [CD0504]"
            )


def wait_again(run: RunDir, job_id: str, restart: int) -> str:
    """Put a job back into the queue that Slurm has started too early; returns why.

    No attempt is begun. Returns nothing where the awaited runs have come to their ends, or an
    attempt has begun since a person submitted the run. restart: SLURM_RESTART_COUNT. Raises NotDue
    where the run can never begin, or cannot wait.
    """
    spec, history = run.load_spec(), events.read(run.events)
    is_over = is_rehearsal(os.environ) or causes_by_attempt(history)
    name = slurm_job_name(
        os.environ, job_id
    )  # by which a point of a sweep is known until it begins
    is_withdrawn = any(withdrawal_cause(history, each) for each in (job_id, name))
    if not spec.after or is_over or is_withdrawn:
        return ""
    awaited = _look_patiently(spec)
    for each in awaited:
        if each.due in (Due.NEVER, Due.UNKNOWN):
            raise NotDue(f"not started, as it waits for {each.text}: {each.words}")
    waits = [each for each in awaited if each.due is not Due.MET]
    if not waits:
        log.info(f"it has waited for {', '.join(each.words for each in awaited)}")
        return ""
    if slurm.ending(name, restart) is slurm.Ending.CANCELLED:
        raise NotDue("the job was cancelled while it waited [CD1203]", Cause.CANCELLED)
    trouble = ""
    try:
        slurm.put_back(name, dependency(waits))
    except slurm.LeftHeld as error:
        trouble = _left_held(name, error)
    except SlurmError as error:
        why = f"not started: it cannot wait again for {waits[0].words}: {error}"
        raise NotDue(why, Cause.FAILED, code=error.code) from None
    _record_wait(run, name, awaited, trouble=trouble)
    if trouble or not dependency(waits):
        _let_go_where_due(run, name, spec)
    return f"waits for {', '.join(each.words for each in waits)}{trouble}"


def _let_go_where_due(run: RunDir, job_id: str, spec: JobSpec) -> None:
    """Look once more for a job that is held now: `rejoin` has passed it over while it was not."""
    try:
        awaited = look(spec)
        jobs = dependency(awaited)
        if not jobs and any(each.due in (Due.WAITS, Due.HELD) for each in awaited):
            return
        if jobs:
            slurm.depend(job_id, jobs)
        slurm.release(job_id)
    except ClusterDDPError as error:
        log.info(f"it looks no more for what it waits for{_left_held(job_id, error)}")
        return
    log.info("an awaited run has gone on meanwhile, so it is held no more")
    _record_wait(run, job_id, awaited)


def rejoin(run: RunDir) -> None:
    """Have the jobs that wait for a run or a sweep, or for that of a point, wait for its new job.

    Where that fails it is logged: their start looks at the run. A held job is to be released first.
    """
    whole = run.sweep
    awaited = [run, *([whole] if whole else [])]
    for path in dict.fromkeys(path for each in awaited for path in _awaited_by(each)):
        waiting = _at(path)
        try:
            _rejoin(awaited, waiting)
        except (ClusterDDPError, OSError) as error:
            log.info(f"{waiting.name} looks for the new job of {run.name} once it starts: {error}")


def _rejoin(renewed: Sequence[RunDir], waiting: RunDir) -> None:
    """Have the jobs of a run or a sweep wait for the awaited ones as these are now.

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
        jobs = _depend_anew(spec, queued)
    except ClusterDDPError as error:
        if held := slurm.in_arrays([name for name, is_held in queued.values() if is_held]):
            trouble = _left_held(",".join(held), error)
            log.info(f"{waiting.name} is not told of the new job of {renewed[0].name}{trouble}")
            return
        raise
    log.info(f"{waiting.name} (job {' and '.join(jobs)}) waits for it")


def _depend_anew(spec: JobSpec, queued: Mapping[RunDir, tuple[str, bool]]) -> list[str]:
    """Have jobs, as `_waiting_jobs` finds them, wait for what `spec` says; returns their names."""
    awaited = look(spec)
    awaited_runs = [run for each in awaited for run in _runs_of(each.run)]
    former = {f"afterany:{job_id}" for run in awaited_runs for job_id in job_ids(run)}
    first = next(iter(queued.values()))[0]
    others = [d for d in slurm.dependency_of(first) if d.removesuffix("_*") not in former]
    jobs = slurm.in_arrays([name for name, _ in queued.values()])
    for job in jobs:
        slurm.depend(job, dependency(awaited, others))
    for job in slurm.in_arrays([name for name, held in queued.values() if held]):
        slurm.release(job)
    for run, (name, _) in queued.items():
        _record_wait(run, name, awaited, sync=len(queued) == 1)
    return jobs


def _waiting_jobs(waiting: RunDir, spec: JobSpec) -> tuple[dict[RunDir, tuple[str, bool]], bool]:
    """Find the jobs in the queue of a run, or of a sweep's points, that wait as `spec` says.

    Returns each with its name and whether it is held, and whether a run has ended without
    beginning. Those that are starting look by themselves. Slurm tells which is held, as a job is
    held ahead of the record of it; a job completes until the script that had it held has ended.
    """
    found: dict[str, tuple[RunDir, bool]] = {}
    has_ended = False
    for run in _runs_of(waiting):
        history = events.read(run.events)
        submission = latest_submission(history)
        own = run.read_spec() if isinstance(waiting, SweepDir) else spec
        if submission is None or own is None or own.after != spec.after:
            continue  # a point that was submitted again with others to wait for is its own case
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
    """Return the run, or the sweep, of a directory."""
    sweep = SweepDir(Path(path))
    return sweep if sweep.is_sweep else RunDir(Path(path))


def _runs_of(run: RunDir) -> list[RunDir]:
    """Return the points of a sweep, or the run itself."""
    return run.elements if isinstance(run, SweepDir) else [run]


def _look_patiently(spec: JobSpec) -> list[Awaited]:
    """Look at the awaited runs, again and again while Slurm does not say how they are doing."""
    awaited: list[Awaited] = []
    for is_last in patience.looks(patience.SLURM_AWAY, every=patience.SLURM_AWAY_PAUSE):
        awaited = look(spec)
        unknown = [each.words for each in awaited if each.due is Due.UNKNOWN]
        if not unknown:
            break
        if not is_last:
            log.info(f"{', '.join(unknown)}; asking again")
    return awaited


def _left_held(job_id: str, error: Exception) -> str:
    """Return what to say of a job that Slurm holds, and that nobody lets go by itself."""
    release = f"scontrol release {shlex.quote(job_id)}"
    return f"; Slurm holds it ({error}) until '{release}', after which it looks again"


def _record_wait(
    run: RunDir, job_id: str, awaited: Sequence[Awaited], *, sync: bool = True, trouble: str = ""
) -> None:
    """Record what a job waits for.

    sync: False for one of many, as `events.note` says. trouble: reason for which it is held.
    """
    waits = [each for each in awaited if each.due is not Due.MET]
    if waits:
        event = events.Waits(
            job_id=job_id,
            runs=tuple(each.text for each in waits),
            why=f"{', '.join(each.words for each in waits)}{trouble}",
            held=bool(trouble) or not any(each.jobs for each in waits),
        )
        (events.add if sync else events.note)(run.events, event)


def _awaited_by(run: RunDir) -> list[str]:
    """Return the directories of the runs that wait for this one, or did."""
    return list(dict.fromkeys(each.by for each in History.read(run).every(events.AwaitedBy)))
