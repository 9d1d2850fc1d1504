"""`clusterddp resubmit`: submits a run once more, in its own directory, to go on where it was."""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from clusterddp import attempt as attempts
from clusterddp import forms, launchers, slurm
from clusterddp.cli import runs
from clusterddp.cli.inputs import make_sure
from clusterddp.cli.request_options import REQUEST
from clusterddp.cli.settings import SettingsCommand
from clusterddp.cli.train_options import TRAIN_OPTION_NAMES, train_options
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    CheckpointError,
    RequestError,
    SlurmError,
)
from clusterddp.run_dir import RunDir, read_json, run_folders, write_atomically
from clusterddp.run_status import (
    DONE,
    QUEUED,
    RUNNING,
    UNKNOWN,
    jobs_to_ask,
    latest_submission,
    newest_checkpoint,
    run_status,
)
from clusterddp.slurm import JobState, State
from clusterddp.spec import JobSpec, Resources, submission_comment
from clusterddp.train_config import TrainConfig, changes

F = TypeVar("F", bound=Any)

_ASKED = "What Slurm is asked for"
_INTERRUPTED = "When it is interrupted"
_TRAINED = "What the tasks train"
_KEPT = "Where it is kept"
# What a run keeps for good: it belongs to the script's own lines, which are edited there.
_FIXED = {"sbatch", "omit-directive", "output-root"}
_TRAIN_NAMES = tuple(name for name in TRAIN_OPTION_NAMES if name != "resume")
"""A run goes on from its own checkpoints, which come before those of another run."""
_MOST_CHANGES = 20


def _request_names() -> dict[str, list[str]]:
    """The options of `submit` that are taken here too, by the sections of --help."""
    return {
        title: [name for name in REQUEST[title] if name not in _FIXED]
        for title in (_ASKED, _INTERRUPTED, _KEPT)
    }


class ResubmitCommand(SettingsCommand):
    """Takes its options from the command line alone: whatever is not typed stays as recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.name in _TRAIN_NAMES and isinstance(parameter, click.Option):
                parameter.default, parameter.show_default = None, False
        self.params = [one for one in self.params if one.name != "resume"]

    def _load_defaults(self, ctx: click.Context, args: list[str]) -> None:
        super()._load_defaults(ctx, args)
        kept = {k: v for k, v in (ctx.default_map or {}).items() if k == "output_root"}
        ctx.default_map = kept


def _request_options(function: F) -> F:
    for title, names in reversed(_request_names().items()):
        for name in reversed(names):
            settings = {k: v for k, v in REQUEST[title][name].items() if k != "flag"}
            settings |= {"default": None, "show_default": False}
            add = click.option(
                f"--{REQUEST[title][name].get('flag', name)}", name.replace("-", "_"), **settings
            )
            function = add(function)
    return function


@click.command(
    name="resubmit",
    cls=ResubmitCommand,
    groups={
        **{
            title: [name.replace("-", "_") for name in names]
            for title, names in _request_names().items()
            if title != _KEPT
        },
        _TRAINED: list(_TRAIN_NAMES),
    },
    epilog="Exit codes: 0 done, 1 the run failed, 2 a wrong request, "
    "75 it was stopped and has saved, 130 interrupted.",
)
@click.argument("run", type=runs.RUN)
@_request_options
@functools.partial(train_options, settings=False)
@click.option(
    "--template-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of your own templates, where the run was submitted with one and options change.",
)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be sent; touch nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end and exit as it did.")
@runs.output_root_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: str,
    template_dir: Path | None,
    dry_run: bool,
    wait: bool,
    output_root: Path,
    as_json: bool,
    **options: Any,
) -> int:
    """Submit RUN once more: it goes on from its last checkpoint, in its own directory.

    RUN is a run's name, job id or directory. Its script is sent as it stands, unless options are
    given: those replace the recorded ones, and an empty value drops one (--dependency ''). Nothing
    is taken from variables or site.cfg. The starts that --max-requeues caps are counted anew.

    Changed code, or a changed option that decides the weights, is refused with the difference
    shown, unless --allow-changed.
    """
    if dry_run and wait:
        raise click.UsageError("--dry-run starts nothing that --wait could follow.", ctx)
    found = RunDir(runs.find_run(output_root, run).path.absolute())
    before = found.load_spec()
    _go_to_its_folder(found)
    _check_directory(found, before)
    given = {
        name: value
        for name, value in options.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    allow_changed = bool(given.pop("allow_changed", False))
    trained = {name: value for name, value in given.items() if name in _TRAIN_NAMES}
    if trained and before.train is None:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in trained)
        raise click.UsageError(
            f"{flags} belongs to the MNIST training, but {found.name} runs a command.", ctx
        )
    after = _changed(before, given, trained, allow_changed)
    _check_changes(found, before, after, allow_changed)
    if not dry_run:
        _check_state(found, before, after)
    _check_ranks(found, after)
    launcher = launchers.load(after.launcher)
    if after == before and found.script.is_file():
        script = _recorded_script(found)
    else:
        _check_template(found, before, launcher, template_dir, allow_changed)
        script = launcher.prepare(after, template_dir)
    if dry_run:
        _print_dry_run(after, script, as_json)
        return EXIT_DONE
    _check_inputs(found, after)
    submission = _submit(found, before, after, script, launcher)
    return _follow_up(found, after, submission, wait, as_json)


def _go_to_its_folder(run: RunDir) -> None:
    """Submit from where the run was submitted first: a command's relative paths start there."""
    folders = [event.get("folder") for event in run.read_events()]
    folder = next((str(one) for one in folders if one), "")
    if folder and folder != str(Path.cwd()):
        try:
            os.chdir(folder)
        except OSError as error:
            raise RequestError(
                f"{run.name} was submitted from {folder}, which cannot be entered: "
                f"{error.strerror}. Put that folder back, or submit a new run."
            ) from None


def _check_directory(run: RunDir, spec: JobSpec) -> None:
    """The run is one that this version can go on with, and its script leads here."""
    latest = attempts.latest(run)
    if latest and int(latest.read_record().get("format") or 0) > attempts.FORMAT:
        raise RequestError(
            f"{latest.record} was written by a newer clusterddp; update this one to go on with "
            f"{run.name}."
        )
    here, there = run.path.resolve(), Path(spec.run_dir).resolve()
    if here == there:
        return
    element = here.name.removeprefix(f"{there.name}-")
    if here.parent == there.parent and here.name != there.name and element.isdigit():
        raise RequestError(
            f"{run.name} is an element of an array, whose script starts all of them. Go on with: "
            f"sbatch --array={element} {run.script}"
        )
    raise RequestError(
        f"{run.name} lies at {here}, but its script leads to {there}: the directory was moved. "
        f"Move it back, or submit a new run with --resume {here}."
    )


# -- what is asked for now -------------------------------------------------------------------


def _changed(
    before: JobSpec, given: Mapping[str, Any], trained: Mapping[str, Any], allow_changed: bool
) -> JobSpec:
    """The request with what was typed in the place of what was recorded; raises RequestError."""
    fields: dict[str, Any] = {}
    resources = _resources(before.resources, given)
    if resources != before.resources:
        fields["resources"] = resources
    for name in ("job_name", "requeue", "max_requeues", "restart_on_failure", "restart_in_job"):
        if name in given:
            fields[name] = given[name]
    if "signal" in given:
        fields["signal"] = "" if given["signal"] == "none" else given["signal"]
    elif "resources" in fields and dataclasses.replace(before, signal=None) == before:
        fields["signal"] = None  # the default follows the time limit
    if before.train is not None:
        values = dict(trained)
        if values.get("data_dir"):
            values["data_dir"] = os.path.abspath(values["data_dir"])
        if allow_changed:
            values["allow_changed"] = True
        fields["train"] = dataclasses.replace(before.train, **values)
    return dataclasses.replace(before, **fields)


def _resources(before: Resources, given: Mapping[str, Any]) -> Resources:
    names = {field.name for field in dataclasses.fields(Resources)}
    fields = {name: value for name, value in given.items() if name in names}
    if "gpus_per_node" in fields:
        fields["gpu_type"], fields["gpus_per_node"] = forms.gpus(
            "--gpus-per-node", fields["gpus_per_node"]
        )
        usual = before.tasks_per_node == (before.gpus_per_node or 1)
        if usual and "tasks_per_node" not in fields:
            fields["tasks_per_node"] = 0  # one a GPU, as before
    if "tasks_per_node" in given:
        forms.positive("--tasks-per-node", given["tasks_per_node"])
    return dataclasses.replace(before, **fields)


def _check_changes(run: RunDir, before: JobSpec, after: JobSpec, allow_changed: bool) -> None:
    """Refuse, with the difference shown, what would train to other weights."""
    if allow_changed:
        return
    if before.train and after.train:
        changed = changes(dataclasses.asdict(before.train), after.train)
        if changed:
            raise RequestError(
                f"{run.name} was trained with another configuration: {'; '.join(changed)}. Leave "
                "the options as they were, add --allow-changed, or submit a new run."
            )
    if run.code.is_dir() or not run.code_record.is_file():
        return
    from clusterddp import snapshot

    recorded = snapshot.Snapshot.from_json(run.code_record.read_text(errors="replace"))
    now = snapshot.fingerprint(Path.cwd(), leave_out=run_folders(run))
    if now is None:
        click.echo(
            f"clusterddp: warning: the code in {Path.cwd()} cannot be compared with what was "
            "submitted",
            err=True,
        )
        return
    changed = snapshot.difference(recorded, now)
    if changed:
        more = f" and {len(changed) - _MOST_CHANGES} more" if len(changed) > _MOST_CHANGES else ""
        raise RequestError(
            f"the code in {Path.cwd()} is not what {run.name} was submitted with: "
            f"{', '.join(changed[:_MOST_CHANGES])}{more}. Put it back, or add --allow-changed."
        )


def _check_ranks(run: RunDir, spec: JobSpec) -> None:
    """The batch over all ranks stays what it was, so the ranks must share it evenly."""
    if spec.train is None or newest_checkpoint(run) is None:
        return
    agreed = read_json(run.resolved) or {}
    whole, reference = agreed.get("global_batch_size"), agreed.get("reference_world_size")
    if not isinstance(whole, int) or not isinstance(reference, int):
        return
    same_batch = whole == reference * spec.train.batch_size
    if same_batch and whole % spec.world_size:
        raise RequestError(
            f"--nodes and --tasks-per-node: {spec.layout} cannot share the run's batch of {whole} "
            "images over all ranks evenly. Use a number of ranks that divides it."
        )


# -- whether it may start now ----------------------------------------------------------------


def _check_state(run: RunDir, before: JobSpec, after: JobSpec) -> None:
    """Refuse a run that is queued or running, may be, or has nothing left to do."""
    submission = latest_submission(run.read_events())
    states = slurm.query(jobs_to_ask([submission]))
    status = run_status(run, states)
    job = states.get(status.job_id, JobState(State.UNKNOWN))
    detail = f" ({status.detail})" if status.detail else ""
    if status.state in (QUEUED, RUNNING):
        raise RequestError(
            f"{run.name} is {status.state}{detail} as job {status.job_id}: one run cannot train "
            f"twice at once. Follow it with 'clusterddp logs -f {run.shown}', or end it first "
            f"with 'clusterddp stop {run.shown}'."
        )
    if status.state == DONE and not _has_more(before, after):
        raise RequestError(
            f"{run.name} is done: there is nothing left to train. Give it more, such as --epochs N "
            "--allow-changed, or submit a new run."
            if before.train
            else f"{run.name} is done: its command has ended with exit code 0. Submit a new run."
        )
    if status.state != UNKNOWN or submission is None:
        return
    if submission.is_local:
        latest = attempts.latest(run)
        if latest is None or latest.end.exists() or not latest.is_alive():
            return  # wherever that was, nobody trains it any more
        raise RequestError(
            f"{run.name} still trains: {status.detail}. Stop it first with 'clusterddp stop "
            f"{run.shown}'."
        )
    if job.problem:
        raise RequestError(
            f"whether job {status.job_id} of {run.name} still waits or runs is not known: "
            f"{job.problem}. Try again where 'squeue -j {status.job_id}' answers; two jobs cannot "
            "train one run."
        )
    click.echo(f"clusterddp: {run.name}: {status.detail}; submitting it again", err=True)


def _has_more(before: JobSpec, after: JobSpec) -> bool:
    """Whether a training that is done has something left to train by the new options."""
    if before.train is None or after.train is None:
        return False
    old = dataclasses.asdict(before.train)
    return bool(changes(old, after.train)) or before.train.max_steps != after.train.max_steps


def _check_inputs(run: RunDir, spec: JobSpec) -> None:
    for name in spec.pass_environment:
        if name not in os.environ:
            raise RequestError(
                f"{name} is not set here, and the run passes it by name from where you submit; "
                "set it."
            )
    if spec.train:
        own = newest_checkpoint(run) is not None
        resume = "" if own else spec.train.resume  # its own come first
        make_sure(dataclasses.replace(spec.train, resume=resume), may_fetch=True)


# -- the script ------------------------------------------------------------------------------


def _recorded_script(run: RunDir) -> str:
    try:
        return run.script.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{run.script} cannot be read: {error}.") from None


def _check_template(
    run: RunDir,
    before: JobSpec,
    launcher: launchers.Launcher,
    template_dir: Path | None,
    allow_changed: bool,
) -> None:
    """The script is rendered anew: nothing else in it may change unseen."""
    if allow_changed or not run.script.is_file():
        return
    old, again = _recorded_script(run), launcher.prepare(before, template_dir)
    if old != again and _version(old) == _version(again):
        raise RequestError(
            f"{run.script} is not what template {before.template} gives for this run: it was "
            "edited, or rendered from a template of your own, or by another state of "
            "clusterddp. Name its folder with --template-dir, "
            "edit the script and resubmit without options, or add --allow-changed to have it "
            "rendered anew."
        )


def _version(script: str) -> str:
    """The line that says which version has rendered a script."""
    return next((line for line in script.splitlines() if "rendered by clusterddp" in line), "")


def _print_dry_run(spec: JobSpec, script: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run": spec.run_name, "run_dir": spec.run_dir, "script": script}))
    else:
        click.echo(script, nl=False)


# -- sending it ------------------------------------------------------------------------------


def _submit(
    run: RunDir, before: JobSpec, after: JobSpec, script: str, launcher: launchers.Launcher
) -> launchers.Submission:
    """Lay the records down, submit, and put the former records back where that is refused."""
    kept: dict[Path, Path | None] = {}
    try:
        if after != before:
            kept = _renew_records(run, after, script)
        elif not run.script.is_file():  # of `debug`
            kept = {run.script: None}
            write_atomically(run.script, script.encode())
        # Before the submission: the job's first line may come before the record of its id.
        run.add_event("resubmit", changes=_differences(before, after))
        return launcher.submit(after, script, run)
    except RequestError:
        _put_back(kept)
        raise
    except KeyboardInterrupt:
        click.echo(
            f"clusterddp: interrupted; the job may be queued. Look for it by its comment, "
            f"{submission_comment(after.run_name)}.",
            err=True,
        )
        raise
    except OSError as error:
        raise SlurmError(
            f"the run's records cannot be written: {error}. The job may be queued; look for it "
            f"by its comment, {submission_comment(after.run_name)}."
        ) from None


def _renew_records(run: RunDir, spec: JobSpec, script: str) -> dict[Path, Path | None]:
    """Write spec.json and the script anew; the former ones stay as spec-N.json, script-N.sbatch.

    Returns where the former ones are; None for one that was not there. Raises OSError.
    """
    number = 1
    while any(_former(path, number).exists() for path in (run.spec, run.script)):
        number += 1
    kept: dict[Path, Path | None] = {}
    created = run.spec.stat()
    for path, content in ((run.spec, spec.to_json()), (run.script, script)):
        kept[path] = None
        if path.is_file():
            shutil.copy2(path, _former(path, number))
            kept[path] = _former(path, number)
        write_atomically(path, content.encode())
    os.utime(run.spec, ns=(created.st_atime_ns, created.st_mtime_ns))  # runs are listed by it
    return kept


def _former(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")


def _put_back(kept: Mapping[Path, Path | None]) -> None:
    for path, former in kept.items():
        if former:
            former.replace(path)
        else:
            path.unlink(missing_ok=True)


def _differences(before: JobSpec, after: JobSpec) -> list[str]:
    """What the request was changed in, `time 1:00:00, now 2:00:00`."""
    lines = []
    for one, other in (
        (before, after),
        (before.resources, after.resources),
        (before.train, after.train),
    ):
        if one is None or other is None:
            continue
        for field in dataclasses.fields(one):
            old, new = getattr(one, field.name), getattr(other, field.name)
            if old != new and not isinstance(old, Resources | TrainConfig):
                lines.append(f"{field.name} {old}, now {new}")
    return lines


def _goes_on(run: RunDir, spec: JobSpec) -> str:
    """From where the run will train, by the same look at its checkpoints as its ranks will take."""
    from clusterddp.training import checkpoint_file

    try:
        found = checkpoint_file.newest(run, lambda line: click.echo(line, err=True))
    except CheckpointError:
        found = None
    if found:
        return f"goes on from step {checkpoint_file.step_of(found)}"
    resume = spec.train.resume if spec.train else ""
    return f"starts from {resume}" if resume else "starts from the beginning"


def _follow_up(
    run: RunDir, spec: JobSpec, submission: launchers.Submission, wait: bool, as_json: bool
) -> int:
    """Say what was done, and follow the run where that is asked for or needed."""
    fields = {"run": spec.run_name, "run_dir": spec.run_dir, "job_id": submission.job_id}
    following = wait or submission.stop is not None
    if not as_json:
        where = _goes_on(run, spec)
        where = where if spec.train else "starts its command again"
        click.echo(
            f"submitted {run.name} again as job {submission.job_id}: {spec.layout}; it {where}\n"
            f"  status  clusterddp status {run.shown}\n"
            f"  logs    clusterddp logs -f {run.shown}"
        )
    elif not following:
        click.echo(json.dumps(fields))
    if not following:
        return EXIT_DONE
    from clusterddp.cli.follow import follow

    code = follow(run, lines=0, goes_on=not submission.stop, to_stderr=as_json)
    if submission.stop:
        if code == EXIT_INTERRUPTED:
            click.echo(f"clusterddp: {run.name}: cancelling", err=True)
        submission.stop()
    if as_json:
        click.echo(json.dumps({**fields, "exit_code": code}))
    return code
