"""Submits a checked request: makes the run's directory, copies its code, calls the launcher.

The command and the Python API both submit through here, so that neither can do it differently.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import files
from clusterddp.errors import RequestError, SlurmError, coded
from clusterddp.launchers import SentJob, load, notice_job
from clusterddp.log import info, warning
from clusterddp.request.options import is_reference
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import is_array
from clusterddp.run import bad_nodes, events
from clusterddp.run.run_dir import RunDir, SweepDir, remove_created, run_folders
from clusterddp.slurm.client import sbatch_options
from clusterddp.slurm.site import Question, array_limits
from clusterddp.status import chain
from clusterddp.submission import bundle, outlook
from clusterddp.submission.fields import remarks
from clusterddp.submission.inputs import check_folder, make_sure
from clusterddp.submission.programs import check_command, check_notified, check_pythons

if TYPE_CHECKING:
    from clusterddp.submission import snapshot


_SHARED = ("clusterddp.pyz", "code", "code.json", "script.sbatch")
"""Files of a sweep that its points lead to."""


def submit(
    spec: JobSpec,
    script: str,
    *,
    snapshot_limit_mb: float,
    check: bool = False,
    check_python: bool = False,
    force: bool = False,
    inputs_are_sure: bool = False,
) -> tuple[RunDir, SentJob]:
    """Check the files that the tasks will read, make the run's directory, submit the script.

    Of a sweep it is the sweep's directory, beside which those of its points are made; with the
    launcher `local`, which has no queue, nothing of it is submitted yet (`SentJob.job_id` is
    empty).

    check: ask Slurm for its forecast first. check_python: start the tasks' interpreters, which have
    to import torch. force: warn of what would be refused as nobody here has it (`outlook`,
    `programs`). inputs_are_sure: the caller has checked the files that the tasks read, and logged
    the request's remarks. Raises RequestError, and then leaves
    nothing; SlurmError where the job may be queued; an interruption is logged, and passed on.
    """
    if Path(spec.run_dir).exists():
        raise RequestError(
            f"the run {spec.run_name} exists already at {spec.run_dir}; choose another "
            "--run-name. [CD0503]"
        )
    refuse_existing(spec, range(len(spec.sweep)))
    if re.fullmatch(r"\d+(_\d+)?", spec.run_name):
        warning(
            f"--run-name {spec.run_name} has the form of a job's id: where another run has that "
            f"job, {spec.run_name} can mean either of them [CD0502]"
        )
    if spec.launcher != "local":
        bad_nodes.reject_bad_nodelist(Path(spec.run_dir).parent, spec.resources)
    question = ask_for_partitions(spec)
    if spec.sweep and spec.launcher != "local":
        outlook.check_array(spec, len(spec.sweep), array_limits(spec.resources.account))
    for check_start in _checks_of_starts(spec, script, imports=check_python, force=force):
        check_start()
    if not inputs_are_sure:
        for train in spec.trainings:
            make_sure(train, spec)
    if not inputs_are_sure:
        for remark in remarks(spec):
            warning(coded(remark, "CD0112"))
    if question:
        outlook.check_partitions(spec, question.answer(), force=force)
    if check and spec.launcher != "local":
        outlook.log_forecast(script)
    made = (SweepDir if spec.sweep else RunDir).create(spec, script)
    with made as run, naming_the_job(spec), contextlib.ExitStack() as stack:
        bundle.carry(run)
        _keep_code(spec, run, snapshot_limit_mb)
        runs: list[RunDir] = []
        if isinstance(run, SweepDir):
            runs = stack.enter_context(created_points(run, spec, range(len(spec.sweep))))
        return run, send(spec, script, run, runs)


def send(spec: JobSpec, script: str, run: RunDir, runs: Sequence[RunDir] = ()) -> SentJob:
    """Have a script sent by its launcher, and record the job.

    runs: points of the sweep `run` that are submitted, as one job array of the sweep's script; a
    rehearsal runs them later, and has no job id yet.
    """
    if runs and spec.launcher == "local":
        chain.check(chain.check_awaited(spec), has_queue=False)  # of which each point looks again
        here, host = str(Path.cwd()), os.uname().nodename
        indices = tuple(map(_index_of, runs))
        sent = events.Submitted(
            launcher="local", pid=os.getpid(), host=host, folder=here, indices=indices
        )
        events.add(run.events, sent)
        return SentJob("")
    if spec.launcher == "sbatch":
        job = _send_to_queue(spec, script, run, runs)
    else:
        job = load(spec.launcher).submit(spec, script, run)
    notice_job.submit(spec, run, job.job_id)
    return job


def _send_to_queue(spec: JobSpec, script: str, run: RunDir, runs: Sequence[RunDir]) -> SentJob:
    """Decide what sbatch gets beside the script, send both, and record the job in each run."""
    from clusterddp.launchers import sbatch  # and jinja2

    awaited = chain.check_awaited(spec) if spec.after else []
    chain.check(awaited, spec)
    choice = bad_nodes.choose_for_submission(spec)
    exclude: list[str] = []
    if choice.nodes:
        try:
            exclude = [*dict.fromkeys([*sbatch.excluded(script), *choice.nodes])]
        except RequestError as error:  # a file of names, say, which sbatch takes as well
            warning(f"no bad node is excluded: {error} [CD1303]")
            choice = bad_nodes.Choice()
    if spec.point and is_array(script):  # the sweep's script, of which the run is a point
        runs = [run]
    indices = [_index_of(each) for each in runs]
    beside = _beside(spec, indices, awaited)
    job = sbatch.submit(spec, script, run, exclude=exclude, **beside)
    folder, names = str(Path.cwd()), [f"{job.job_id}_{index}" for index in indices]
    sent, by = events.Submitted, spec.launcher
    if runs and run != runs[0]:
        listed = tuple(indices)
        events.add(run.events, sent(job_id=job.job_id, launcher=by, folder=folder, indices=listed))
    jobs = dict(zip(runs or [run], names or [job.job_id], strict=True))
    for each, name in jobs.items():
        # Those of a sweep are not synced one by one: the sweep's own line tells of all.
        add = events.add if len(names) < 2 else events.note
        add(each.events, sent(job_id=name, launcher=by, folder=folder))
        if choice.nodes:
            events.add(each.events, events.NodesExcluded(job_id=name, nodes=choice.nodes))
    if awaited:
        chain.record(run, jobs, awaited)
        if words := chain.describe(awaited):
            info(f"{spec.run_name} {words}")
    return SentJob(names[0]) if runs == [run] else job


def _beside(
    spec: JobSpec, indices: Iterable[int], awaited: Sequence[chain.Awaited]
) -> dict[str, str]:
    """Return what takes the place of lines of the script."""
    from clusterddp.launchers import sbatch

    others = [spec.resources.dependency]
    return {
        "dependency": chain.dependency(awaited, others) if awaited else "",
        "array": sbatch.array_of(indices, spec.sweep.max_concurrent),
    }


def options_beside(spec: JobSpec, script: str, indices: Iterable[int] = ()) -> list[str]:
    """Return the options that sbatch gets beside a script, but for the bad nodes it leaves out.

    indices: of the points that are submitted, of a sweep.
    """
    if spec.launcher != "sbatch":
        return []
    if spec.point and is_array(script):
        indices = [spec.index]
    awaited = chain.check_awaited(spec) if spec.after else []
    return sbatch_options(spec.comment, **_beside(spec, indices, awaited))


def check_commands(
    spec: JobSpec, script: str, *, folder: Path | None = None, force: bool = False
) -> None:
    """Check the COMMAND; of a sweep that of its first point, which has the sweep's script."""
    first = spec.element(0) if spec.sweep else spec
    # A site's own template can have the name of a shipped one.
    check_command(
        first, lambda: load(spec.launcher).prepare(spec, None) == script, folder, force=force
    )


def ask_for_partitions(spec: JobSpec) -> Question | None:
    """Ask Slurm for the partitions, beside what follows; None where they have no part in it."""
    if spec.launcher == "local" or "clusters" in dict(spec.sbatch):
        return None
    return Question(os.environ)


@contextlib.contextmanager
def naming_the_job(spec: JobSpec) -> Iterator[None]:
    """Tell how to look for a job that may be queued although its submission was cut short.

    Logs it after an interruption, which is passed on; raises SlurmError in place of OSError.
    """
    look = "with squeue --me" + (spec.comment and f", by its comment, {spec.comment}")
    try:
        yield
    except KeyboardInterrupt:
        info(
            f"interrupted; the job may be queued. Look for it {look}; its directory {spec.run_dir} "
            "is kept."
        )
        raise
    except OSError as error:
        raise SlurmError(
            f"the run's records cannot be written: {error}. The job may be queued; look for it "
            f"{look}. [CD0404]"
        ) from None


def _checks_of_starts(
    spec: JobSpec, script: str, *, imports: bool = False, force: bool = False
) -> list[Callable[[], None]]:
    """Return the checks of what the job starts, which warn or raise RequestError.

    imports: start the tasks' interpreters, which have to import torch. force: see `check_command`.
    """
    return [
        lambda: _warn_of_launcher(spec),
        lambda: check_commands(spec, script, force=force),
        lambda: check_pythons(spec, imports=imports),
        lambda: check_notified(spec),
        lambda: outlook.check_directives(spec),
    ]


def refusals_of_files(
    spec: JobSpec, script: str, *, has_folder: bool, force: bool
) -> list[RequestError]:
    """Return what a submission would refuse for files that are not there; touches nothing.

    Logs what it would warn of. has_folder: somebody has named the folder of the dataset. force:
    see `check_command`. A model or a dataset of the user's own is not looked at.
    """
    checks = _checks_of_starts(spec, script, force=force)
    checks += [partial(check_folder, train) for train in spec.trainings if has_folder]
    refusals: dict[str, RequestError] = {}
    for check in checks:
        try:
            check()
        except RequestError as error:
            refusals[str(error)] = error
    return [*refusals.values()]


def no_code(spec: JobSpec, run: RunDir) -> list[Path]:
    """List the folders in a person's tree that hold no code: runs, and the shipped datasets."""
    # MNIST, which the tasks find by its absolute path, is larger than any code.
    shipped = (each.data_dir for each in spec.trainings if not is_reference(each.dataset))
    sets = [Path(folder, name) for folder in shipped for name in ("MNIST", "synthetic")]
    return run_folders(run) + sets


def _warn_of_launcher(spec: JobSpec) -> None:
    """Warn of a COMMAND that is a shell script which may start ranks of its own in every task."""
    if not spec.allow_launcher:
        from clusterddp.request import nested_launcher

        found = nested_launcher.in_script(spec.command, Path.cwd())
        if found:
            warning(
                f"{found.script}, line {found.line}, may start {found.name} in each of "
                f"the tasks, which are ranks already ({spec.layout}): each would train a copy by "
                "itself. Start the program there without it; --allow-launcher says that it is "
                "meant. [CD0307]"
            )


def _keep_code(spec: JobSpec, run: RunDir, limit_mb: float) -> None:
    """Copy the tree of a person's code into the run, or note what it is like without a copy.

    Raises RequestError when it is too large or cannot be read.
    """
    tree, taken = Path.cwd(), None
    if not spec.program.has_own_code(spec.sweep, tree):
        return
    from clusterddp.submission import outside, snapshot

    leave_out = no_code(spec, run)
    if spec.snapshot is not False:
        taken = _take_work_tree(tree, run, limit_mb, leave_out)
        needed = bool(spec.snapshot)  # it was asked for
        taken = taken or snapshot.try_to_take(tree, run.code, limit_mb, leave_out, needed=needed)
    if taken:
        top = run.top_of_code(tree)
        outside.warn_of_imports(spec, top, tree)
        leaving = outside.leaving_paths(spec.command, tree, top)
        if leaving:
            warning(f"{outside.leaving_remark(leaving, top)} [CD0320]")
            taken = dataclasses.replace(taken, leaving=tuple(leaving))
    taken = taken or snapshot.fingerprint(tree, leave_out=leave_out)
    if taken:
        taken.write(run.code_record)


def _take_work_tree(
    folder: Path, run: RunDir, limit_mb: float, leave_out: list[Path]
) -> "snapshot.Snapshot | None":
    """Copy the git work tree around a folder from its top, so that `../data` leads somewhere.

    None where there is none, or, with a warning, where it is too large.
    """
    from clusterddp.submission import snapshot

    top = snapshot.top_of(folder)
    if top == folder:
        return None
    workdir = folder.relative_to(top).as_posix()
    try:
        taken = snapshot.try_to_take(
            top, run.code, limit_mb, leave_out, needed=True, workdir=workdir
        )
    except RequestError as error:
        why = re.split(r"[;.] ", str(error))[0]
        warning(
            f"only {folder} is copied, and not all of its git work tree {top}: {why}. Relative "
            "paths that leave the folder do not lead there in the copy [CD0320]"
        )
        return None
    Path(run.code, workdir).mkdir(parents=True, exist_ok=True)  # of links alone, perhaps
    run.workdir.symlink_to(f"{run.code.name}/{workdir}")
    return taken


@contextlib.contextmanager
def created_points(
    sweep: SweepDir, spec: JobSpec, indices: Sequence[int]
) -> Iterator[list[RunDir]]:
    """Make the directories of points as runs that share the sweep's files, or none at all.

    Those that it has made are taken away again when an interruption or an error keeps it from the
    others, or when the body raises RequestError. Raises RequestError where one exists or cannot be
    written.
    """
    refuse_existing(spec, indices)
    points = [sweep.element(index) for index in indices]
    shared = [name for name in _SHARED if os.path.lexists(sweep.path / name)]
    made: list[RunDir] = []
    try:
        for index, point in zip(indices, points, strict=True):
            point.path.mkdir(mode=0o700)
            made.append(point)  # one that is there by now is another submission's
            _fill_point(point, spec.element(index), sweep, shared)
    except BaseException as error:
        _undo_points(made)
        if not isinstance(error, OSError):
            raise
        raise RequestError(
            f"--runs-dir: cannot write {error.filename or sweep.path}: {error.strerror}. "
            "Choose a writable folder with enough disk space. [CD0504]"
        ) from None
    try:
        yield points
    except RequestError:
        _undo_points(made)
        raise


def refuse_existing(
    spec: JobSpec, indices: Sequence[int], instead: str = "choose another --run-name"
) -> None:
    """Refuse points whose directories are there already; raises RequestError.

    instead: what a person can do.
    """
    for index in indices:
        path = Path(f"{spec.run_dir}-{index}")
        if os.path.lexists(path):
            raise RequestError(
                f"the run {path.name} exists already at {path}, and would be a point of the sweep "
                f"{spec.run_name}; {instead}. [CD0503]"
            )


def _index_of(point: RunDir) -> int:
    """Return the index of a point, by its name."""
    return int(point.name.rpartition("-")[2])


def _fill_point(point: RunDir, spec: JobSpec, sweep: SweepDir, shared: Sequence[str]) -> None:
    """Fill a directory; its request comes last, as it makes the directory a run. Raises OSError."""
    for name in shared:
        (point.path / name).symlink_to(Path("..") / sweep.name / name)
    if sweep.workdir_name:
        point.workdir.symlink_to(sweep.workdir.readlink())
    # Not synced one by one: the sweep's own request has all of it.
    files.create(point.path / ".spec.json", spec.to_json().encode())
    (point.path / ".spec.json").replace(point.spec)


def _undo_points(points: Sequence[RunDir]) -> None:
    for point in points:
        remove_created(point.path, [])
