"""Submission of a checked request: create the run's directory, copy its code, call the launcher.

The command line and the Python API both use it, so they submit identically.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterddp import files
from clusterddp.errors import OptionError, RequestError, SlurmError, coded
from clusterddp.launchers import SentJob, load, notice_job
from clusterddp.log import info, warning
from clusterddp.request.options import is_reference
from clusterddp.request.spec import IN_ALLOCATION, JobSpec
from clusterddp.request.sweep import is_array
from clusterddp.run import bad_nodes, events
from clusterddp.run.run_dir import RunDir, SweepDir, remove_created, run_folders
from clusterddp.slurm.client import sbatch_options
from clusterddp.slurm.site import Question, array_limits
from clusterddp.status import chain
from clusterddp.submission import bundle, slurm_checks
from clusterddp.submission.fields import already_ranks, remarks
from clusterddp.submission.inputs import check_folder, check_inputs
from clusterddp.submission.programs import check_command, check_notified, check_pythons

if TYPE_CHECKING:
    from clusterddp.submission import snapshot


_SHARED = ("clusterddp.pyz", "code", "code.json", "script.sbatch")
"""Files of a sweep that its trials link to."""


def submit(
    spec: JobSpec,
    script: str,
    *,
    snapshot_limit_mb: float,
    check_python: bool = False,
    force: bool = False,
    inputs_checked: bool = False,
) -> tuple[RunDir, SentJob]:
    """Check the files that the tasks read, create the run's directory and submit the script.

    For a sweep, return the sweep's directory; those of its trials are created next to it. The
    launcher `local` has no queue, so a sweep is not started yet and `SentJob.job_id` is empty.

    check_python: start the tasks' interpreters and require that they can import torch.
    force: warn of resources and programs not found here, rather than refuse (`slurm_checks`,
        `programs`).
    inputs_checked: the caller has checked the inputs and logged the request's remarks.

    Raises RequestError after removing the directory, and SlurmError if the job may be queued. An
    interruption is logged and raised again.
    """
    _check(spec, script, check_python=check_python, force=force, inputs_checked=inputs_checked)
    if spec.program.has_own_code(spec.sweep) and not inputs_checked:
        _suggest_line(spec)
    made = (SweepDir if spec.sweep else RunDir).create(spec, script)
    with made as run, reporting_queued_job(spec), contextlib.ExitStack() as stack:
        bundle.bundle_into(run)
        _keep_code(spec, run, snapshot_limit_mb)
        runs: list[RunDir] = []
        if isinstance(run, SweepDir):
            runs = stack.enter_context(created_trials(run, spec, range(len(spec.sweep))))
        return run, send(spec, script, run, runs)


def forecast(spec: JobSpec, script: str, *, check_python: bool = False, force: bool = False) -> str:
    """Check a request as `submit` does, and return Slurm's forecast; submit and write nothing.

    Raises RequestError if the request is invalid or Slurm refuses it, SlurmError if Slurm cannot
    be asked.
    """
    if spec.launcher in ("local", IN_ALLOCATION):
        raise OptionError(
            "--test-only",
            f" conflicts with {spec.launched_by}, which has no queue. Remove one of them.",
        )
    _check(spec, script, check_python=check_python, force=force, fetch=False)
    if spec.after:
        chain.check(chain.check_awaited(spec), spec)
    return slurm_checks.forecast(script)


def seconds_until(words: str) -> float | None:
    """Return how far a forecast's start is by this machine's clock; None if it gives none."""
    found = re.search(r"to start at (\d[\d-]+T[\d:]+)", words)
    if not found:
        return None
    return max((datetime.fromisoformat(found[1]) - datetime.now()).total_seconds(), 0.0)


def _check(
    spec: JobSpec,
    script: str,
    *,
    check_python: bool,
    force: bool,
    inputs_checked: bool = False,
    fetch: bool = True,
) -> None:
    """Check a request before anything is created; see `submit`, and `check_inputs` for fetch."""
    _refuse_existing_run(spec)
    check_allocation(spec)
    if re.fullmatch(r"\d+(_\d+)?", spec.run_name):
        warning(
            f"--run-name {spec.run_name} looks like a job id; it is ambiguous if another run has "
            "that job. [CD0502]"
        )
    if spec.launcher != "local":
        bad_nodes.reject_bad_nodelist(Path(spec.run_dir).parent, spec.resources)
    question = ask_for_partitions(spec)
    if spec.sweep and spec.launcher != "local":
        slurm_checks.check_array(spec, len(spec.sweep), array_limits(spec.resources.account))
    for check_start in _start_checks(spec, script, imports=check_python, force=force):
        check_start()
    if not inputs_checked:
        for train in spec.trainings:
            check_inputs(train, spec, fetch=fetch)
        for remark in remarks(spec):
            warning(coded(remark, "CD0112"))
    if question:
        slurm_checks.check_partitions(spec, question.answer(), force=force)


def check_allocation(spec: JobSpec) -> None:
    """Raise RequestError for a run inside an allocation if there is none."""
    if spec.launcher == IN_ALLOCATION:
        from clusterddp.launchers import held  # few runs need it

        held.find_allocation(spec)


def send(spec: JobSpec, script: str, run: RunDir, runs: Sequence[RunDir] = ()) -> SentJob:
    """Submit a script with its launcher and record the job.

    runs: trials of the sweep `run` to submit as one job array. The launcher `local` runs them
    later, so they have no job id yet.
    """
    if runs and spec.launcher == "local":
        chain.check(chain.check_awaited(spec), has_queue=False)  # each trial checks again
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
    """Submit the script with further sbatch options, and record the job in each run."""
    from clusterddp.launchers import sbatch  # imports jinja2

    awaited = chain.check_awaited(spec) if spec.after else []
    chain.check(awaited, spec)
    choice = bad_nodes.choose_for_submission(spec)
    exclude: list[str] = []
    if choice.nodes:
        try:
            exclude = [*dict.fromkeys([*sbatch.excluded(script), *choice.nodes])]
        except RequestError as error:  # --exclude may name a file, which sbatch accepts
            warning(f"no bad node is excluded: {error} [CD1303]")
            choice = bad_nodes.Choice()
    if spec.trial and is_array(script):  # a trial that is submitted with its sweep's script
        runs = [run]
    indices = [_index_of(each) for each in runs]
    job = sbatch.submit(spec, script, run, exclude=exclude, **_overrides(spec, indices, awaited))
    folder, names = str(Path.cwd()), [f"{job.job_id}_{index}" for index in indices]
    sent, by = events.Submitted, spec.launcher
    if runs and run != runs[0]:
        listed = tuple(indices)
        events.add(run.events, sent(job_id=job.job_id, launcher=by, folder=folder, indices=listed))
    jobs = dict(zip(runs or [run], names or [job.job_id], strict=True))
    for each, name in jobs.items():
        # A sweep's trials are not synced one by one: the sweep's own record lists all of them.
        add = events.add if len(names) < 2 else events.note
        add(each.events, sent(job_id=name, launcher=by, folder=folder))
        if choice.nodes:
            events.add(each.events, events.NodesExcluded(job_id=name, nodes=choice.nodes))
    if awaited:
        chain.record(run, jobs, awaited)
        if words := chain.describe(awaited):
            info(f"{spec.run_name} {words}")
    return SentJob(names[0]) if runs == [run] else job


def _overrides(
    spec: JobSpec, indices: Iterable[int], awaited: Sequence[chain.Awaited]
) -> dict[str, str]:
    """Return the sbatch options that override lines of the script."""
    from clusterddp.launchers import sbatch

    others = [spec.resources.dependency]
    return {
        "dependency": chain.dependency(awaited, others) if awaited else "",
        "array": sbatch.array_of(indices, spec.sweep.max_concurrent),
    }


def extra_sbatch_options(spec: JobSpec, script: str, indices: Iterable[int] = ()) -> list[str]:
    """Return the options that sbatch gets in addition to a script, except --exclude for bad nodes.

    indices: trials of a sweep that are submitted.
    """
    if spec.launcher != "sbatch":
        return []
    if spec.trial and is_array(script):
        indices = [spec.index]
    awaited = chain.check_awaited(spec) if spec.after else []
    return sbatch_options(spec.comment, **_overrides(spec, indices, awaited))


def check_commands(
    spec: JobSpec, script: str, *, folder: Path | None = None, force: bool = False
) -> None:
    """Check the COMMAND; for a sweep, the COMMAND of its first trial."""
    first = spec.trial_spec(0) if spec.sweep else spec
    # Scripts are compared because a site's own template can have the name of a shipped one.
    check_command(
        first, lambda: load(spec.launcher).prepare(spec, None) == script, folder, force=force
    )


def ask_for_partitions(spec: JobSpec) -> Question | None:
    """Start asking Slurm for its partitions; return None if they do not matter."""
    if spec.launcher in ("local", IN_ALLOCATION) or "clusters" in dict(spec.sbatch):
        return None
    return Question(os.environ)


@contextlib.contextmanager
def reporting_queued_job(spec: JobSpec) -> Iterator[None]:
    """Explain how to find a job that may be queued although its submission was cut short.

    Logs it after an interruption, which is raised again; raises SlurmError in place of OSError.
    """
    how = "squeue --me" + (spec.comment and f" (its comment is {spec.comment})")
    try:
        yield
    except KeyboardInterrupt:
        info(
            f"interrupted; the job may be queued: see {how}. Its directory {spec.run_dir} is kept."
        )
        raise
    except OSError as error:
        raise SlurmError(
            f"cannot write the run's records: {error}. The job may be queued: see {how}. [CD0404]"
        ) from None


def _start_checks(
    spec: JobSpec, script: str, *, imports: bool = False, force: bool = False
) -> list[Callable[[], None]]:
    """Return the checks of programs that the job starts; they warn or raise RequestError.

    imports: start the tasks' interpreters and require that they can import torch.
    force: see `check_command`.
    """
    return [
        lambda: _warn_of_launcher(spec),
        lambda: check_commands(spec, script, force=force),
        lambda: check_pythons(spec, imports=imports),
        lambda: check_notified(spec),
        lambda: slurm_checks.check_directives(spec),
    ]


def refusals(spec: JobSpec, script: str, *, has_folder: bool, force: bool) -> list[RequestError]:
    """Return the errors that a submission would raise for files and runs, and log its warnings.

    Changes nothing. User functions are not checked.

    has_folder: the dataset's directory was given. force: see `check_command`.
    """
    checks = [lambda: _refuse_existing_run(spec), *_start_checks(spec, script, force=force)]
    checks += [lambda: chain.check(chain.check_awaited(spec), spec)] if spec.after else []
    checks += [partial(check_folder, train) for train in spec.trainings if has_folder]
    refused: dict[str, RequestError] = {}
    for check in checks:
        try:
            check()
        except RequestError as error:
            refused[str(error)] = error
    return [*refused.values()]


def excluded_from_code(spec: JobSpec, run: RunDir) -> list[Path]:
    """List directories that are not code: runs and the shipped datasets."""
    # MNIST is larger than any code, and tasks find it by its absolute path.
    shipped = (each.data_dir for each in spec.trainings if not is_reference(each.dataset))
    sets = [Path(folder, name) for folder in shipped for name in ("MNIST", "synthetic")]
    return run_folders(run) + sets


def _warn_of_launcher(spec: JobSpec) -> None:
    """Warn of a COMMAND whose shell script may start a launcher in every task."""
    if not spec.allow_launcher:
        from clusterddp.request import nested_launcher

        found = nested_launcher.in_script(spec.command, Path.cwd())
        if found:
            warning(
                f"{found.script}, line {found.line}, may start {found.name} in every task, but "
                f"{already_ranks(spec)}: each would train a separate copy. "
                f"Remove {found.name} there; if it is intended, add --allow-launcher. [CD0307]"
            )


def _suggest_line(spec: JobSpec) -> None:
    """Log which lines the script of a COMMAND lacks so that an interrupted run can resume."""
    from clusterddp.scripts import check  # not needed for the built-in training

    first = spec.trial_spec(0) if spec.sweep else spec
    if missing := check.missing_line_of(first.command, Path.cwd()):
        loses = "an interruption loses what the script trained since its own last checkpoint"
        info("\n  ".join([f"{loses}. To save and resume, {missing.advice}", *missing.code]))


def _keep_code(spec: JobSpec, run: RunDir, limit_mb: float) -> None:
    """Copy the user's code into the run or, without a copy, record its digests.

    Raises RequestError if the code is too large or cannot be read.
    """
    tree, taken = Path.cwd(), None
    if not spec.program.has_own_code(spec.sweep, tree):
        return
    from clusterddp.submission import outside, snapshot

    exclude = excluded_from_code(spec, run)
    if spec.snapshot is not False:
        taken = _take_work_tree(tree, run, limit_mb, exclude)
        needed = bool(spec.snapshot)  # requested by an option
        taken = taken or snapshot.try_to_take(tree, run.code, limit_mb, exclude, needed=needed)
    if taken:
        top = run.top_of_code(tree)
        outside.warn_of_imports(spec, top, tree)
        outside_paths = outside.find_outside_paths(spec.command, tree, top)
        if outside_paths:
            warning(f"{outside.outside_paths_remark(outside_paths, top)} [CD0320]")
            taken = dataclasses.replace(taken, outside_paths=tuple(outside_paths))
    taken = taken or snapshot.fingerprint(tree, exclude=exclude)
    if taken:
        taken.write(run.code_record)


def _take_work_tree(
    folder: Path, run: RunDir, limit_mb: float, exclude: list[Path]
) -> "snapshot.Snapshot | None":
    """Copy the whole git work tree around a directory, so that paths like `../data` resolve.

    Return None if there is no work tree or, with a warning, if it is too large.
    """
    from clusterddp.submission import snapshot

    top = snapshot.top_of(folder)
    if top == folder:
        return None
    workdir = folder.relative_to(top).as_posix()
    try:
        taken = snapshot.try_to_take(top, run.code, limit_mb, exclude, needed=True, workdir=workdir)
    except RequestError as error:
        why = re.split(r"[;.] ", str(error))[0]
        warning(
            f"only {folder} is copied, not its whole git work tree {top}: {why}. Relative paths "
            "that leave the directory break in the copy. [CD0320]"
        )
        return None
    Path(run.code, workdir).mkdir(parents=True, exist_ok=True)  # not copied if it has only links
    run.workdir.symlink_to(f"{run.code.name}/{workdir}")
    return taken


@contextlib.contextmanager
def created_trials(
    sweep: SweepDir, spec: JobSpec, indices: Sequence[int]
) -> Iterator[list[RunDir]]:
    """Create the directories of trials as runs that share the sweep's files: all or none.

    Those already created are removed if an error or interruption prevents the others, or if the
    body raises RequestError. Raises RequestError if one exists or cannot be written.
    """
    refuse_existing(spec, indices)
    trials = [sweep.trial(index) for index in indices]
    shared = [name for name in _SHARED if os.path.lexists(sweep.path / name)]
    made: list[RunDir] = []
    try:
        for index, trial in zip(indices, trials, strict=True):
            trial.path.mkdir(mode=0o700)
            made.append(trial)  # after mkdir: an existing one belongs to another submission
            _fill_trial(trial, spec.trial_spec(index), sweep, shared)
    except BaseException as error:
        _undo_trials(made)
        if not isinstance(error, OSError):
            raise
        raise RequestError(
            f"--runs-dir: cannot write {error.filename or sweep.path}: {error.strerror}. "
            "Choose a writable directory with free space. [CD0504]"
        ) from None
    try:
        yield trials
    except RequestError:
        _undo_trials(made)
        raise


def _refuse_existing_run(spec: JobSpec) -> None:
    """Raise RequestError if the directory of a new run, or of a trial of it, already exists."""
    if Path(spec.run_dir).exists():
        raise RequestError(
            f"the run {spec.run_name} already exists at {spec.run_dir}. Choose another "
            "--run-name. [CD0503]"
        )
    refuse_existing(spec, range(len(spec.sweep)))


def refuse_existing(
    spec: JobSpec, indices: Sequence[int], instead: str = "Choose another --run-name."
) -> None:
    """Raise RequestError if the directory of a trial already exists.

    instead: the message's advice.
    """
    for index in indices:
        path = Path(f"{spec.run_dir}-{index}")
        if os.path.lexists(path):
            raise RequestError(
                f"the run {path.name}, a trial of the sweep {spec.run_name}, already exists at "
                f"{path}. {instead} [CD0503]"
            )


def _index_of(trial: RunDir) -> int:
    """Return the index in a trial's name."""
    return int(trial.name.rpartition("-")[2])


def _fill_trial(trial: RunDir, spec: JobSpec, sweep: SweepDir, shared: Sequence[str]) -> None:
    """Fill a directory, the request last because it makes the directory a run. Raises OSError."""
    for name in shared:
        (trial.path / name).symlink_to(Path("..") / sweep.name / name)
    if sweep.workdir_name:
        trial.workdir.symlink_to(sweep.workdir.readlink())
    # Not synced one by one: the sweep's own request contains every trial.
    files.create(trial.path / ".spec.json", spec.to_json().encode())
    (trial.path / ".spec.json").replace(trial.spec)


def _undo_trials(trials: Sequence[RunDir]) -> None:
    for trial in trials:
        remove_created(trial.path, [])
