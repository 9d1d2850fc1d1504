"""Resume a run, or trials of a sweep, from their newest checkpoints.

The recorded request may be changed if the weights are not affected, or if the user allows it. A
refused submission leaves the records unchanged.
"""

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp import formatting, launchers, log
from clusterddp.errors import CheckpointError, RequestError, coded
from clusterddp.files import write_atomically
from clusterddp.request.options import Record
from clusterddp.request.spec import IN_ALLOCATION, REQUEST, JobSpec
from clusterddp.request.sweep import NO_SWEEP, Sweep, format_trial, is_array
from clusterddp.request.train_config import TrainConfig, changes
from clusterddp.run import attempt as attempts
from clusterddp.run import bad_nodes, events
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, SweepDir, checkpoint_step, newest_checkpoint
from clusterddp.slurm import forms
from clusterddp.slurm.client import query
from clusterddp.slurm.site import array_limits
from clusterddp.slurm.states import JobState, State
from clusterddp.status import chain
from clusterddp.status.state import ACTIVE, RunState, jobs_to_query, latest_submission
from clusterddp.status.status import RunStatus, run_status, statuses
from clusterddp.status.sweeps import ended_without_success
from clusterddp.submission import bundle, slurm_checks, snapshot, submit
from clusterddp.submission.claim import Claim, claimed
from clusterddp.submission.fields import CHANGEABLE, refuse_launcher, remarks
from clusterddp.submission.inputs import (
    check_inputs,
    find_user_functions,
    is_finished,
    uneven_batch,
)
from clusterddp.submission.programs import check_pythons
from clusterddp.submission.submit import (
    ask_for_partitions,
    check_allocation,
    check_commands,
    excluded_from_code,
    reporting_queued_job,
    send,
)
from clusterddp.version import of_script

_MAX_FILES = 5
_MAX_CHANGES = 20
_MAX_COMMANDS = 20
_EITHER = (
    "Add --template-dir DIR, edit the script and resume without options, or add "
    "--allow-config-change to render it again."
)


@dataclass(frozen=True)
class Terms:
    """Conditions for resuming a run, besides the request."""

    allow_config_change: bool = False
    """True if to allow changes that affect the weights, and to replace an edited script."""
    refresh_code: bool = False
    """True if to replace the run's copy of the code by the current directory."""
    upgrade_clusterddp: bool = False
    """True if to replace the run's clusterddp by this one; a changed request always does."""
    from_scratch: bool = False
    """True if to ignore the run's checkpoints and start at step 0."""
    even_if_done: bool = False
    """True if to rerun a COMMAND that ended with exit code 0."""
    force: bool = False
    """True if to warn of resources and programs not found here, rather than refuse."""
    template_folder: Path | None = None
    """Directory of the user's templates, if the run was submitted with one."""
    snapshot_limit_mb: float | None = None
    """Maximum size of a new copy of the code in MB; None: 50, or twice the previous copy."""
    more: Sweep = NO_SWEEP
    """Trials to add to a sweep and submit, instead of its failed ones."""
    one_of_several: bool = False
    """True if other runs are resumed too: a local run would end with this process."""


@dataclass(frozen=True)
class Resumption:
    """Request that resumes a run."""

    spec: JobSpec
    script: str
    """Script to submit."""
    source: Path | None
    """The run's checkpoint to resume from; None if it starts from another run's or at step 0."""
    indices: tuple[int, ...] = ()
    """Submitted trials of a sweep."""
    submission: launchers.SentJob | None = None
    """None in a dry run. Has no job id for a local sweep, which runs the trials in turn."""

    @property
    def job_id(self) -> str:
        """Job id of the submission; empty in a dry run."""
        return self.submission.job_id if self.submission else ""

    @property
    def beginning(self) -> str:
        """Clause that says where the run starts, `resumes from step 1200`."""
        return self.spec.program.beginning(checkpoint_step(self.source) if self.source else None)


def resume(
    run: RunDir, change: Callable[[JobSpec], JobSpec], terms: Terms, *, dry_run: bool = False
) -> Resumption:
    """Resume a run, or trials of a sweep, from the directory of the first submission.

    run: for a `SweepDir`, submit the failed and missing trials, or the new ones in `Terms.more`;
        leave trials that are done, queued or running unchanged.
    change: makes the new request from the recorded one; if equal, the recorded script is sent.
    dry_run: check the request and render the script, but change nothing.

    Raises RequestError if nothing was submitted; SlurmError if the job may be queued.
    """
    run = dataclasses.replace(run, path=run.path.absolute())
    if terms.template_folder:  # before the working directory changes
        terms = dataclasses.replace(terms, template_folder=terms.template_folder.absolute())
    if terms.refresh_code and isinstance(run, SweepDir):
        raise RequestError(
            f"--refresh-code: all trials of {run.name}, also the finished ones, share one copy of "
            "the code, so it cannot be replaced. Submit a new sweep. [CD0313]"
        )
    with contextlib.ExitStack() as stack:
        claim = None if dry_run else stack.enter_context(claimed(run))
        if claim:
            _repair_code(run)
        before = run.load_spec()
        stack.enter_context(submission_folder_of(run))
        _check_directory(run, before)
        after = _changed(run, before, change, terms)
        if isinstance(run, SweepDir):
            indices = _added_indices(run, before, after) if terms.more else _failed_indices(run)
        else:
            indices = []
            _check_state(run, before, after, terms, asks=not dry_run)
        _check_changes(run, before, after, terms)
        for remark in remarks(after):
            if remark not in remarks(before):
                log.warning(coded(remark, "CD0112"))
        script = _script_for(run, before, after, terms)
        own_code = run.code_folder if run.code.is_dir() and not terms.refresh_code else None
        if after.command != before.command:
            refuse_launcher(after)
            check_commands(after, script, folder=own_code, force=terms.force)
        plan = Resumption(after, script, _source(run, before, after, terms), tuple(indices))
        if claim is None:
            for train in after.trainings:
                find_user_functions(train, after, code=own_code)
            return plan
        _check_start(before, plan, own_code, terms)
        runs = [run.trial(index) for index in indices] if isinstance(run, SweepDir) else []
        claims = [claim, *(stack.enter_context(claimed(r)) for r in runs if r.path.exists())]
        new: list[str] = []
        if terms.refresh_code:
            renewal = _code_renewed(after, run, terms.snapshot_limit_mb)
            new += (f"code: {line}" for line in stack.enter_context(renewal))
        is_new = not run.script.is_file() or script != _recorded_script(run)
        if terms.upgrade_clusterddp or is_new or not bundle.verify_bundle(run):
            new += stack.enter_context(bundle.replaced_bundle(run))
        return dataclasses.replace(plan, submission=_submit(claims, before, plan, terms, new))


def _changed(
    run: RunDir, before: JobSpec, change: Callable[[JobSpec], JobSpec], terms: Terms
) -> JobSpec:
    """Return the new request with added trials; raises RequestError for a fixed field."""
    if terms.one_of_several and before.launcher == "local":
        raise RequestError(
            f"{run.name} runs on this machine. Resume it by name: {run.resume_command} [CD1103]"
        )
    if terms.from_scratch and not before.program.keeps_records:
        raise RequestError(
            f"--from-scratch applies only to the built-in training, but {run.name} runs a command. "
            "Use your program's option for that, or submit a new run. [CD0511]"
        )
    after = change(before)
    if terms.allow_config_change:  # the ranks check their configuration too
        program = after.program.changed(run.name, {"allow_config_change": True}, "", ())
        after = dataclasses.replace(after, **program.fields)
    if terms.more:
        whole = after.sweep.with_trials(terms.more, after.program.parse_values)
        after = dataclasses.replace(after, sweep=whole)
    after.check_trials()
    _check_fields(run, dataclasses.replace(before, sweep=after.sweep), after)
    return after


@contextlib.contextmanager
def submission_folder_of(run: RunDir) -> Iterator[None]:
    """Enter the directory of the run's first submission: a command's relative paths need it."""
    folder, here = History.read(run).folder, Path.cwd()
    carried = forms.carried_top(str(here), os.environ)
    if carried and (run.code.is_dir() or Path(folder).is_relative_to(Path(carried).parent)):
        folder = str(Path(carried, run.workdir_name))  # a former tree is old, and may be gone
    if folder and Path(folder) != here:
        try:
            os.chdir(folder)
        except OSError as error:
            raise RequestError(
                f"{run.name} was submitted from {folder}, which cannot be entered: "
                f"{error.strerror}. Restore that directory, or submit a new run. [CD0512]"
            ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # if it was removed meanwhile, the job is still queued
            os.chdir(here)


def _check_fields(run: RunDir, before: JobSpec, after: JobSpec) -> None:
    """Raise RequestError if a fixed field of a run was changed."""
    new, open_to_change = vars(after), (*CHANGEABLE, *before.program.changeable)
    if not {before.launcher, after.launcher} <= {"sbatch", IN_ALLOCATION}:
        open_to_change = tuple(name for name in open_to_change if name != "launcher")
    fixed = [n for n, value in vars(before).items() if n not in open_to_change and value != new[n]]
    if fixed:
        flags = {row.field: f"--{row.name}" for row in REQUEST} | {"environment": "--env"}
        named = ", ".join(flags.get(name, name) for name in fixed)
        raise RequestError(
            f"'resume' cannot change {named} of {run.name}. Submit a new run. [CD0511]"
        )
    if not before.trial:
        return
    swept = [name.replace("-", "_") for name, _ in before.trial]
    old, now = before.program.options, after.program.options
    moved = [name for name in swept if old.get(name) != now.get(name)]
    if moved or before.command != after.command:
        raise RequestError(
            f"the values of {run.name} ({format_trial(before.trial)}) cannot be changed: it is a "
            "trial of a sweep. To add a trial with other values: clusterddp resume "
            f"{before.sweep_name} --sweep …, or submit a new run. [CD0511]"
        )


def _script_for(run: RunDir, before: JobSpec, after: JobSpec, terms: Terms) -> str:
    """Return the script to send: the recorded one if nothing was changed, or a new one."""
    for train in () if terms.from_scratch else after.trainings:
        _check_progress(run, after, train)
    render = launchers.load(after.launcher).prepare
    if not run.script.is_file():
        return render(after, terms.template_folder)
    recorded = _recorded_script(run)
    if after == before:
        return recorded
    whole = run.sweep if before.trial and is_array(recorded) else None
    asked = whole.load_spec() if whole else before  # a trial has the script of its sweep
    again = "" if terms.allow_config_change else render(asked, terms.template_folder)
    if again and recorded != again and of_script(recorded) == of_script(again):
        raise RequestError(
            f"{run.script} differs from the output of template {before.template} for this run: it "
            "was edited, or rendered from your template or by another build of clusterddp. "
            f"{_EITHER} [CD0515]"
        )
    return render(after, terms.template_folder)


def _added_indices(sweep: SweepDir, before: JobSpec, after: JobSpec) -> list[int]:
    """Return the indices of the added trials. Raises RequestError if there are none."""
    indices = [*range(len(before.sweep), len(after.sweep))]
    if not indices:
        raise RequestError(
            f"{sweep.name} already has all of these trials. To resume its failed and missing "
            f"trials: clusterddp resume {sweep.cli_name} [CD1103]"
        )
    submit.refuse_existing(
        after,
        indices,
        "The added trials need this name. Submit them as a new sweep: clusterddp submit "
        "--run-name NAME --sweep …",
    )
    return indices


def _source(run: RunDir, before: JobSpec, spec: JobSpec, terms: Terms) -> Path | None:
    """Return the checkpoint from which the run's ranks will resume.

    Raises RequestError if they could not start.
    """
    if spec.sweep or terms.from_scratch:
        return None
    if not spec.program.keeps_records:
        newest = newest_checkpoint(run.checkpoints)  # a Loop's, which checks it itself
        is_same = spec.command == before.command and not terms.even_if_done
        return newest.path if newest and is_same else None
    from clusterddp.checkpoints import catalog

    try:
        return catalog.find_resume_checkpoint(run)
    except CheckpointError as error:
        raise RequestError(str(error), code=error.code) from None


def _check_start(before: JobSpec, plan: Resumption, own_code: Path | None, terms: Terms) -> None:
    """Check the job's requirements here, like a first submission."""
    spec = plan.spec
    check_allocation(spec)
    is_new = (spec.resources, spec.launcher) != (before.resources, before.launcher)
    question = ask_for_partitions(spec) if is_new else None
    if (spec.python, spec.controller_python) != (before.python, before.controller_python):
        check_pythons(spec)
    has_queue = spec.launcher not in ("local", IN_ALLOCATION)
    if spec.launcher != "local":
        bad_nodes.reject_bad_nodelist(Path(spec.run_dir).parent, spec.resources)
    if spec.after:  # before records are written
        chain.check(chain.check_awaited(spec), spec, has_queue=has_queue)
    for name in spec.pass_environment:
        if name not in os.environ:
            raise RequestError(
                f"{name} is not set in your shell, but the {'sweep' if spec.sweep else 'run'} "
                "passes it to its tasks. Set it. [CD0106]"
            )
    for train in spec.trainings:
        init_from = "" if plan.source else train.init_from  # the run's own checkpoints come first
        check_inputs(dataclasses.replace(train, init_from=init_from), spec, code=own_code)
    if spec.sweep and has_queue:
        slurm_checks.check_array(spec, len(plan.indices), array_limits(spec.resources.account))
    if question:
        slurm_checks.check_partitions(spec, question.answer(), force=terms.force)


def _check_directory(run: RunDir, spec: JobSpec) -> None:
    """Raise RequestError for a run of a newer version, or one that was moved."""
    latest = attempts.latest(run)
    if latest and latest.is_of_newer_version:
        raise RequestError(
            f"{latest.record} was written by a newer clusterddp. To resume {run.name}, update "
            "this one. [CD0506]"
        )
    here, there = run.path.resolve(), Path(spec.run_dir).resolve()
    if here == there:
        return
    if run.array_index:
        raise RequestError(
            f"{run.name} is an array task, whose script starts the whole array. To resume: "
            f"{run.resume_command} [CD0511]"
        )
    raise RequestError(
        f"the directory of {run.name} was moved to {here}, but its script uses {there}. "
        f"Move it back, or submit a new run with --init-from {here}. [CD0512]"
    )


def _check_state(run: RunDir, before: JobSpec, after: JobSpec, terms: Terms, *, asks: bool) -> None:
    """Raise RequestError for a run that may be queued or running, or has nothing left to do.

    asks: whether to query Slurm; if False, only check for remaining work, from the records.
    """
    if not asks:
        _check_done(run, before, after, run_status(run, {}), terms)
        return
    submission = latest_submission(events.read(run.events))
    states = query(jobs_to_query([submission]))
    status = run_status(run, states)
    job = states.get(status.job_id, JobState(State.UNKNOWN))
    detail = f" ({status.detail})" if status.detail else ""
    if status.state in ACTIVE:
        name = formatting.job(status.job_id, status.launcher)
        raise RequestError(
            f"{run.name} is already {status.state}{detail} as {name}. Follow it with 'clusterddp "
            f"logs -f {run.cli_name}', or end it first with 'clusterddp stop --wait "
            f"{run.cli_name}'. [CD0508]"
        )
    _check_done(run, before, after, status, terms)
    if status.state != RunState.UNKNOWN or submission is None:
        return
    if submission.is_local:
        latest = attempts.latest(run)
        if latest is None or latest.end.exists() or not latest.is_alive():
            return  # the run is not active on any host
        raise RequestError(
            f"{run.name} is still training: {status.detail}. Stop it first with 'clusterddp stop "
            f"{run.cli_name}'. [CD0508]"
        )
    if job.problem:
        raise RequestError(
            f"cannot tell whether job {status.job_id} of {run.name} is still queued or running: "
            f"{job.problem}. Two jobs must not train one run: try again when "
            f"'squeue -j {status.job_id}' answers. [CD0509]"
        )
    if job.state is not State.UNKNOWN and not job.state.is_final:
        raise RequestError(f"{run.name} is {status.detail}. [CD0508]")
    log.info(f"{run.name}: {status.detail}; submitting it again")


def _check_done(
    run: RunDir, before: JobSpec, after: JobSpec, status: RunStatus, terms: Terms
) -> None:
    """Raise RequestError for a run that is done and has nothing left to do."""
    if status.state != RunState.DONE:
        return
    if before.train is None or after.train is None:
        if after.command != before.command or terms.even_if_done:
            return
        raise RequestError(
            f"{run.name} is done: its command ended with exit code 0. Give another COMMAND, add "
            "--even-if-done to rerun it, or submit a new run. [CD0510]"
        )
    reached = newest_checkpoint(run.checkpoints)
    old, new = vars(before.train), vars(after.train)
    has_changed = changes(old, new) or old["max_steps"] != new["max_steps"]
    if has_changed and not (reached and is_finished(run, reached[0], before.train, after.train)):
        return
    is_at_most = reached and 0 < before.train.max_steps <= reached[0]
    more = "a larger --max-steps N" if is_at_most else "--epochs N --allow-config-change"
    raise RequestError(
        f"{run.name} is done: there is nothing left to train. To train further, add {more}, or "
        "submit a new run. [CD0510]"
    )


def _failed_indices(sweep: SweepDir) -> list[int]:
    """Return the indices of the failed or missing trials. Raises RequestError if there are none."""
    known = statuses(sweep.trials)
    unsure = next((s for s in known if s.state == RunState.UNKNOWN and not s.is_forgotten), None)
    if unsure:
        raise RequestError(
            f"cannot tell whether {unsure.name} is still queued or running: {unsure.detail}. "
            "Two jobs must not train one run: try again when Slurm answers. [CD0509]"
        )
    indices = [index for index, status in enumerate(known) if ended_without_success(status)]
    own = {index: sweep.trial(index) for index in indices if _has_own_script(sweep, index)}
    indices = [index for index in indices if index not in own]
    if own:
        commands = [f"clusterddp resume {run.cli_name}" for run in own.values()]
        words = (
            "trials that have their own options must be resumed separately: "
            f"{formatting.join_limited(commands, _MAX_COMMANDS, ', ')}"
        )
        if not indices:
            raise RequestError(words, code="CD1103")
        log.info(words)
    if not indices:
        raise RequestError(
            f"every trial of {sweep.name} is done, queued or running, so there is nothing to "
            f"resume. To add trials: clusterddp resume {sweep.cli_name} --sweep NAME=VALUES "
            "[CD1103]"
        )
    return indices


def _has_own_script(sweep: SweepDir, index: int) -> bool:
    """Return whether a trial was submitted with other options, so has a separate script."""
    script = sweep.trial(index).script
    return script.is_file() and not script.is_symlink() and not is_array(script.read_text("utf-8"))


def _check_changes(run: RunDir, before: JobSpec, after: JobSpec, terms: Terms) -> None:
    """Raise RequestError, listing the changes, if the request would lead to other weights.

    Logs how the directory differs from the run's copy of the code.
    """
    changed = changes(before.program.options, after.program.options)
    if changed and not terms.allow_config_change:
        raise RequestError(
            f"{run.name} was trained with another configuration: {'; '.join(changed)}. Keep the "
            "previous values, add --allow-config-change, or submit a new run. [CD0703]"
        )
    if terms.refresh_code or not run.code_record.is_file():
        return
    if snapshot.is_cleaned(run):
        raise RequestError(
            f"'clusterddp clean' removed the copy of the code of {run.name}. To run the current "
            f"files in {Path.cwd()}, {_way_to_current_files(before, run)}. [CD0313]"
        )
    if run.code.is_dir():
        _log_code_changes(before, run)
    elif not terms.allow_config_change:  # the run uses the directory without a copy
        differing = snapshot.changes_since_submission(run, Path.cwd())
        if differing is None:
            log.warning(
                f"the code in {Path.cwd()} cannot be compared with the submitted code. [CD0313]"
            )
        if differing:
            raise RequestError(
                f"the code in {Path.cwd()} has changed since {run.name} was submitted: "
                f"{formatting.join_limited(differing, _MAX_CHANGES, ', ')}. Restore it, or, to "
                f"run the current files, {_way_to_current_files(before, run)}. [CD0313]"
            )


def _check_progress(run: RunDir, spec: JobSpec, config: TrainConfig) -> None:
    """Raise RequestError for a --max-steps below the step from which the run resumes.

    Raises it also for ranks that cannot share the run's batch, as rank 0 would on the node.
    """
    reached = newest_checkpoint(run.checkpoints)
    if reached and 0 < config.max_steps < reached[0]:
        raise RequestError(
            f"--max-steps {config.max_steps}: the newest checkpoint of {run.name} is already at "
            f"step {reached[0]}. Use at least {reached[0]}, or submit a new run. [CD0510]"
        )
    if config.init_from and not reached:
        return  # `inputs` checks another run's checkpoint
    problem = uneven_batch(run, config, spec.world_size, resumes=bool(reached))
    if problem:
        raise RequestError(f"--nodes and --tasks-per-node: {spec.layout}: {problem} [CD0105]")


def _recorded_script(run: RunDir) -> str:
    """Return the script that was sent last; raises RequestError if it cannot be read."""
    try:
        return run.script.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{run.script} cannot be read: {error}. [CD0505]") from None


def _submit(
    claims: Sequence[Claim], before: JobSpec, plan: Resumption, terms: Terms, new: Sequence[str]
) -> launchers.SentJob:
    """Write the records and submit; restore the previous records if that is refused.

    claims: on the run or the sweep, then on the sweep's existing trials. new: changes to record
    in addition to the request's.
    """
    for claim in claims:
        claim.use()
    run, *there = [claim.run for claim in claims]
    after, is_same = plan.spec, plan.spec == before
    records = {} if is_same else {run.spec: after.to_json()}
    if not run.script.is_file() or _recorded_script(run) != plan.script:  # `debug` writes none
        records[run.script] = plan.script
    changes = (*_differences(before, after), *new)
    with reporting_queued_job(after), contextlib.ExitStack() as stack:
        stack.enter_context(_records_renewed(run, records))
        runs = []
        if isinstance(run, SweepDir):
            runs = [run.trial(index) for index in plan.indices]
            missing = [i for i, each in zip(plan.indices, runs, strict=True) if each not in there]
            stack.enter_context(submit.created_trials(run, after, missing))
        for index, trial in zip(plan.indices, runs, strict=True):
            if trial in there:
                own = {} if is_same else {trial.spec: after.trial_spec(index).to_json()}
                stack.enter_context(_records_renewed(trial, own))
        # Before the submission: the job may log before its id is recorded.
        for each in there if runs else [run]:
            latest = attempts.latest(each) if terms.from_scratch else None
            number = latest.number if latest else None
            events.add(each.events, events.ResumeRequested(changes=changes, from_scratch=number))
        submission = send(after, plan.script, run, runs)
    chain.update_waiting_jobs(run)
    return submission


@contextlib.contextmanager
def _records_renewed(run: RunDir, records: Mapping[Path, str]) -> Iterator[None]:
    """Rewrite files of a run while the body submits it; keep numbered copies of the old ones.

    Restores them if the body raises RequestError. Raises OSError.
    """
    kept = _renew_records(run, records) if records else {}
    try:
        yield
    except RequestError:
        for path, former in kept.items():
            if former:
                former.replace(path)
            else:
                path.unlink(missing_ok=True)
        raise


def _renew_records(run: RunDir, records: Mapping[Path, str]) -> dict[Path, Path | None]:
    """Rewrite the files; keep the old ones as spec-N.json and script-N.sbatch.

    Returns the old files' new paths, None for a file that did not exist. Raises OSError.
    """
    number = 1
    while any(_former(path, number).exists() for path in records):
        number += 1
    kept = {path: _former(path, number) if path.is_file() else None for path in records}
    created = run.spec.stat()
    for path, former in kept.items():
        if former:
            shutil.copy2(path, former)
        write_atomically(path, records[path].encode())
    if run.spec in records:  # runs are sorted by its time; an unchanged one can be another user's
        os.utime(run.spec, ns=(created.st_atime_ns, created.st_mtime_ns))
    return kept


def _former(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _differences(before: JobSpec, after: JobSpec) -> list[str]:
    """List the changes of the request, `time 1:00:00, now 2:00:00`."""
    before = dataclasses.replace(before, sweep=after.sweep)
    records = ((before, after), (before.resources, after.resources))
    options = (before.program.options, after.program.options)
    return [
        f"{name} {value}, now {new[name]}"
        for old, new in (*(map(vars, pair) for pair in records), options)
        for name, value in old.items()
        if value != new[name] and not isinstance(value, Record)
    ]


def _log_code_changes(spec: JobSpec, run: RunDir) -> None:
    """Log how the current directory differs from the run's copy of the code.

    Raises RequestError if the record of the copy cannot be read.
    """
    tree, recorded = run.top_of_code(Path.cwd()), snapshot.Snapshot.read(run.code_record)
    excluded, workdir = excluded_from_code(spec, run), run.workdir_name
    limit = _limit_of_code(recorded)
    now = snapshot.fingerprint(tree, limit_mb=limit, exclude=excluded, workdir=workdir)
    taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.code_record.stat().st_mtime))
    uses = f"{run.name} runs its copy of the code ({run.code}, of {taken})"
    if now is None:  # unreadable, or too large
        log.warning(f"{uses}, and {tree} cannot be compared with it. [CD0313]")
        return
    # Large files are linked, so the copy has their current content.
    linked = {*recorded.large, *now.large}
    copied, current = (
        dataclasses.replace(
            each, digests={n: d for n, d in each.digests.items() if n not in linked}
        )
        for each in (recorded, now)
    )
    changes = snapshot.difference(copied, current, new=True)
    if changes:
        files = "1 file differs" if len(changes) == 1 else f"{len(changes)} files differ"
        log.info(
            f"{uses}; {files} in {tree}: {_shown(changes)}. To run the current files, "
            f"{_way_to_current_files(spec, run)}."
        )


def _way_to_current_files(spec: JobSpec, run: RunDir) -> str:
    """Return how to run the current files; the trials of a sweep share one copy of the code."""
    if spec.sweep:
        return (
            "submit a new sweep, or give each failed trial a separate copy: "
            f"clusterddp resume {run.cli_name} --refresh-code"
        )
    return "use --refresh-code"


@contextlib.contextmanager
def _code_renewed(spec: JobSpec, run: RunDir, limit_mb: float | None) -> Iterator[list[str]]:
    """Replace the run's copy of the code by the current directory while the body submits the run.

    Files that a command wrote in its copy are carried over. The old copy is kept until the run is
    submitted, and restored if the body raises RequestError: after other errors the job may be
    queued. The caller holds the claim on the run and has called `_repair_code`.

    limit_mb: maximum size of the copy in MB; None: twice the old one.
    Yields the changes of the code, one line each. Raises RequestError, with nothing changed, if
    the directory cannot be copied.
    """
    tree = run.top_of_code(Path.cwd())
    if not spec.program.has_own_code(spec.sweep, Path.cwd()):
        raise RequestError(
            f"--refresh-code: {run.name} uses no code from {tree}, only installed packages. "
            "Remove the option. [CD0313]"
        )
    recorded = snapshot.Snapshot.read(run.code_record) if run.code_record.is_file() else None
    record = run.code_record.read_bytes() if recorded else None
    had_copy, (draft, former) = run.code.is_dir(), _copies(run)
    try:
        taken = _take_code(spec, run, recorded, limit_mb)
        copied = draft.is_dir()
        if copied and had_copy:
            run.code.rename(former)
        if copied:
            draft.rename(run.code)
        if taken:
            dataclasses.replace(
                taken, outside_paths=recorded.outside_paths if recorded else ()
            ).write(run.code_record)
    except BaseException as error:
        _restore_code(run, had_copy, record)
        if isinstance(error, OSError):
            raise RequestError(
                f"--refresh-code: {run.path} cannot be written: {error}. [CD0504]"
            ) from None
        raise
    changes = snapshot.difference(recorded, taken, new=True) if recorded and taken else []
    where = f"copied {tree} to {run.code}" if copied else f"{run.name} uses {tree}"
    log.info(f"{where}: {_shown(changes) or 'no file differs'}")
    try:
        yield changes
    except RequestError:
        _restore_code(run, had_copy, record)
        raise
    finally:
        if run.code.is_dir():
            _remove_copy(former)


def _repair_code(run: RunDir) -> None:
    """Repair the code's copy if a process was killed while it replaced the copy.

    Raises RequestError if that fails.
    """
    draft, former = _copies(run)
    try:
        if former.is_dir() and not run.code.exists():
            former.rename(run.code)
        for left in (draft, former):
            if left.is_symlink():
                left.unlink()
            elif left.is_dir():
                shutil.rmtree(left)
    except OSError as error:
        raise RequestError(f"{run.path} cannot be written: {error}. [CD0504]") from None


def _take_code(
    spec: JobSpec, run: RunDir, recorded: snapshot.Snapshot | None, limit_mb: float | None
) -> snapshot.Snapshot | None:
    """Copy the directory to the draft, or only compute its digests if the run uses no copy."""
    tree, excluded, has_copy = Path.cwd(), excluded_from_code(spec, run), run.code.is_dir()
    tree, workdir = run.top_of_code(tree), run.workdir_name
    limit = _limit_of_code(recorded) if limit_mb is None else limit_mb
    taken = None
    if has_copy or spec.snapshot is not False:
        needed = has_copy or bool(spec.snapshot)
        taken = snapshot.try_to_take(
            tree, _copies(run)[0], limit, excluded, needed=needed, workdir=workdir
        )
    if taken is None:
        return snapshot.fingerprint(tree, limit_mb=limit, exclude=excluded, workdir=workdir)
    both: list[str] = []
    if recorded and has_copy:
        both = snapshot.carry_over(run.code, recorded, tree, _copies(run)[0], taken)
    if not both:
        return taken
    # Files that the command wrote are not code, even if the directory has them too.
    log.info(f"kept files that {run.name} wrote, instead of those in {tree}: {_shown(both)}")
    digests = {name: digest for name, digest in taken.digests.items() if name not in both}
    return dataclasses.replace(taken, digests=digests, files=len(digests))


def _remove_copy(former: Path) -> None:
    """Remove an old copy; for a sweep's trial, it may be a link to the shared copy."""
    if former.is_symlink():
        with contextlib.suppress(OSError):
            former.unlink()
    else:
        shutil.rmtree(former, ignore_errors=True)


def _copies(run: RunDir) -> tuple[Path, Path]:
    """Return the paths of the new copy of the code and of the old one during replacement."""
    return run.path / ".code-new", run.path / ".code-former"


def _restore_code(run: RunDir, had_copy: bool, record: bytes | None) -> None:
    draft, former = _copies(run)
    with contextlib.suppress(OSError):
        if run.code.is_dir() and (former.is_dir() or not had_copy):
            run.code.rename(draft)
        if former.is_dir():
            former.rename(run.code)
        if record is None:
            run.code_record.unlink(missing_ok=True)
        else:
            write_atomically(run.code_record, record)
    shutil.rmtree(draft, ignore_errors=True)


def _limit_of_code(recorded: snapshot.Snapshot | None) -> float:
    return max(snapshot.LIMIT_MB, 2 * recorded.bytes / 1e6) if recorded else snapshot.LIMIT_MB


def _shown(names: Sequence[str]) -> str:
    return formatting.join_limited(names, _MAX_FILES, ", ")
