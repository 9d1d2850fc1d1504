"""`clusterddp resubmit`: submits a run once more, in its own directory, to go on where it was."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from clusterddp import launchers
from clusterddp.cli.options import options, recipe_settings
from clusterddp.cli.run_argument import RUN, output_root_option
from clusterddp.cli.settings import SettingsCommand
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    CheckpointError,
    RequestError,
)
from clusterddp.request.options import ASKED, INTERRUPTED, KEPT
from clusterddp.request.spec import REQUEST, JobSpec
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.run import events
from clusterddp.run.claim import claimed
from clusterddp.run.lookup import find_run
from clusterddp.run.progress import checkpoint_step
from clusterddp.run.run_dir import RunDir
from clusterddp.submission import code_renewal
from clusterddp.submission.changed_request import (
    changed_request,
    check_changes,
    check_ranks,
    check_steps,
    check_template,
    recorded_script,
)
from clusterddp.submission.preflight import find_own_functions, in_another_python, make_sure
from clusterddp.submission.renewed_records import submit_again
from clusterddp.submission.resubmittable import check_directory, check_state

# What a run keeps for good belongs to the script's own lines, which are edited there. A run resumes
# from its own checkpoints, which come before those of another run.
_FIXED = {"sbatch", "omit-directive", "output-root", "resume"}
_TRAINED = [row for row in TRAINING if row.name not in _FIXED]
_ASKED = [
    row for row in REQUEST if row.group in (ASKED, INTERRUPTED, KEPT) and row.name not in _FIXED
]


class ResubmitCommand(SettingsCommand):
    """Takes its options from the command line alone: whatever is not typed stays as recorded."""

    def _load_defaults(self, ctx: click.Context, args: list[str]) -> None:
        super()._load_defaults(ctx, args)
        kept = {k: v for k, v in (ctx.default_map or {}).items() if k == "output_root"}
        ctx.default_map = kept


@click.command(
    name="resubmit",
    cls=ResubmitCommand,
    epilog="Exit codes: 0 done, 1 the run failed, 2 a wrong request, "
    "75 it was stopped and can go on, 130 interrupted.",
)
@click.argument("run", type=RUN)
@options([*_ASKED, *_TRAINED], settings=False, defaults=False)
@click.option(
    "--template-dir",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of your own templates, where the run was submitted with one and options change.",
)
@click.option(
    "--code",
    type=click.Choice(["kept", "new"]),
    default="kept",
    show_default=True,
    help="The code that RUN uses: its copy, kept from the submission, or this folder as it is now.",
)
@click.option(
    "--snapshot-limit",
    metavar="MB",
    type=float,
    show_default="50, or twice the former copy",
    help="Most megabytes that a new copy of the code may have.",
)
@click.option(
    "--from-scratch",
    is_flag=True,
    help="Begin at step 0 again: the run's checkpoints are given up, or are gone.",
)
@click.option("--dry-run", is_flag=True, help="Print exactly what would be sent; touch nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end and exit as it did.")
@output_root_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: str,
    template_dir: Path | None,
    code: str,
    snapshot_limit: float | None,
    dry_run: bool,
    wait: bool,
    output_root: Path,
    as_json: bool,
    **values: Any,
) -> int:
    """Submit RUN once more: it goes on from its last checkpoint, in its own directory.

    RUN is a run's name, job id or directory. Its script is sent as it stands, unless options are
    given: those replace the recorded ones, and an empty value drops one (--dependency ''). Nothing
    is taken from variables or site.cfg. The starts that --max-requeues caps are counted anew.

    It runs its copy of your code, and says in what the folder differs by now; --code new takes the
    folder instead, with what a COMMAND has written in its copy. A changed option that decides the
    weights, or changed code of a run without a copy, is refused with the difference shown, unless
    --allow-changed.

    A run that has saved checkpoints, and can go on from none of them any more, begins at step 0
    only with --from-scratch.
    """
    if dry_run and wait:
        raise click.UsageError("--dry-run starts nothing that --wait could follow.", ctx)
    found = RunDir(find_run(output_root, run).path.absolute())
    template_dir = template_dir and template_dir.absolute()  # ahead of going to the run's folder
    given = {
        name: value
        for name, value in values.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if dry_run:
        before, after = _requests(ctx, found, given)
        check_changes(found, before, after, bool(given.get("allow_changed")), code)
        script, _ = _script(found, before, after, template_dir, given)
        if after.train:
            find_own_functions(
                after.train, code=_own_code(found, code), elsewhere=in_another_python(after)
            )
        _source(found, after, given)
        _print_dry_run(after, script, as_json)
        return EXIT_DONE
    with claimed(found) as claim, contextlib.ExitStack() as stack:
        code_renewal.mend(found)
        before, after = _requests(ctx, found, given)
        check_state(found, before, after)
        check_changes(found, before, after, bool(given.get("allow_changed")), code)
        script, launcher = _script(found, before, after, template_dir, given)
        source = _source(found, after, given)
        _check_inputs(found, after, code, source)
        code_changes: list[str] = []
        if code == "new":
            renewal = code_renewal.renewed(after, found, snapshot_limit)
            code_changes = stack.enter_context(renewal)
        submission = submit_again(
            claim, before, after, script, launcher, code_changes,
            from_scratch=bool(given.get("from_scratch")),
        )  # fmt: skip
    return _follow_up(found, after, submission, source, wait, as_json)


def _requests(ctx: click.Context, run: RunDir, given: Mapping[str, Any]) -> tuple[JobSpec, JobSpec]:
    """The recorded request, and the one that is made now; raises RequestError or UsageError."""
    before = run.load_spec()
    _go_to_its_folder(run)
    check_directory(run, before)
    given = dict(given)
    allow_changed = bool(given.pop("allow_changed", False))
    if given.pop("from_scratch", False) and before.train is None:
        raise click.UsageError(
            f"--from-scratch belongs to the MNIST training, but {run.name} runs a command, which "
            "begins where it likes.",
            ctx,
        )
    rows = [row for row in _TRAINED if row.parameter in given]
    trained = {row.parameter: given[row.parameter] for row in rows}
    if trained and before.train is None:
        flags = ", ".join(row.flag for row in rows)
        raise click.UsageError(
            f"{flags} belongs to the MNIST training, but {run.name} runs a command.", ctx
        )
    trained = {**recipe_settings(trained.get("recipe", "")), **trained}
    return before, changed_request(before, given, trained, allow_changed)


def _script(
    run: RunDir,
    before: JobSpec,
    after: JobSpec,
    template_dir: Path | None,
    given: Mapping[str, Any],
) -> tuple[str, launchers.Launcher]:
    """The script that is sent, the recorded one where nothing was changed, and its launcher."""
    if not given.get("from_scratch"):
        check_steps(run, after)
        check_ranks(run, after)
    launcher = launchers.load(after.launcher)
    if after == before and run.script.is_file():
        return recorded_script(run), launcher
    check_template(run, before, launcher, template_dir, bool(given.get("allow_changed")))
    return launcher.prepare(after, template_dir), launcher


def _go_to_its_folder(run: RunDir) -> None:
    """Submit from where the run was submitted first: a command's relative paths start there."""
    told = events.read(run.events)
    folders = [event.folder for event in told if isinstance(event, events.Submitted)]
    folder = next((str(one) for one in folders if one), "")
    if folder and folder != str(Path.cwd()):
        try:
            os.chdir(folder)
        except OSError as error:
            raise RequestError(
                f"{run.name} was submitted from {folder}, which cannot be entered: "
                f"{error.strerror}. Put that folder back, or submit a new run."
            ) from None


def _source(run: RunDir, spec: JobSpec, given: Mapping[str, Any]) -> Path | None:
    """The checkpoint from which the run will go on, found as its ranks will find it; None for none.

    Raises RequestError where they would not begin.
    """
    if spec.train is None or given.get("from_scratch"):
        return None
    from clusterddp.checkpoints import catalog

    try:
        return catalog.source(run)
    except CheckpointError as error:
        raise RequestError(str(error)) from None


def _check_inputs(run: RunDir, spec: JobSpec, code: str, source: Path | None) -> None:
    for name in spec.pass_environment:
        if name not in os.environ:
            raise RequestError(
                f"{name} is not set here, and the run passes it by name from where you submit; "
                "set it."
            )
    if spec.train:
        resume = "" if source else spec.train.resume  # its own come first
        make_sure(
            dataclasses.replace(spec.train, resume=resume),
            may_fetch=True,
            code=_own_code(run, code),
            elsewhere=in_another_python(spec),
            world_size=spec.world_size,
        )


def _own_code(run: RunDir, code: str) -> Path | None:
    """The copy of the code that the run uses; None where it uses the folder as it is."""
    return run.code if run.code.is_dir() and code == "kept" else None


def _print_dry_run(spec: JobSpec, script: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"run": spec.run_name, "run_dir": spec.run_dir, "script": script}))
    else:
        click.echo(script, nl=False)


def _follow_up(
    run: RunDir,
    spec: JobSpec,
    submission: launchers.Submission,
    source: Path | None,
    wait: bool,
    as_json: bool,
) -> int:
    """Say what was done, and follow the run where that is asked for or needed."""
    fields = {"run": spec.run_name, "run_dir": spec.run_dir, "job_id": submission.job_id}
    following = wait or submission.stop is not None
    if not as_json:
        where = _goes_on(spec.train, source) if spec.train else "starts its command again"
        click.echo(
            f"submitted {run.name} again as job {submission.job_id}: {spec.layout}; it {where}\n"
            f"  status  clusterddp status {run.shown}\n"
            f"  logs    clusterddp logs -f {run.shown}"
        )
    elif not following:
        click.echo(json.dumps(fields))
    if not following:
        return EXIT_DONE
    from clusterddp.cli.output import follow

    code = follow(run, lines=0, goes_on=not submission.stop, to_stderr=as_json)
    if submission.stop:
        if code == EXIT_INTERRUPTED:
            click.echo(f"clusterddp: {run.name}: cancelling", err=True)
        submission.stop()
    if as_json:
        click.echo(json.dumps({**fields, "exit_code": code}))
    return code


def _goes_on(config: TrainConfig, source: Path | None) -> str:
    if source:
        return f"goes on from step {checkpoint_step(source)}"
    return f"starts from {config.resume}" if config.resume else "starts from the beginning"
