"""`clusterddp submit`: render, check, make the run's directory, submit."""

import functools
import os
import time
from pathlib import Path
from typing import Any

import click

from clusterddp import launchers
from clusterddp.cli import request_options, sbatch_variables, settings, short_lived
from clusterddp.cli.inputs import make_sure
from clusterddp.cli.job_spec import job_spec
from clusterddp.cli.templates import SHIPPED
from clusterddp.cli.train_options import TRAIN_OPTION_NAMES, train_options
from clusterddp.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    RequestError,
    SlurmError,
)
from clusterddp.run_dir import RunDir, run_folders, write_atomically
from clusterddp.spec import JobSpec, submission_comment


class SubmitCommand(settings.SettingsCommand):
    """Takes what stands behind `--` as the COMMAND, untouched."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta["command"] = tuple(args[cut + 1 :])
        if cut < len(args) and not args[cut + 1 :]:
            raise click.UsageError("there is no COMMAND behind '--'.", ctx)
        try:
            return super().parse_args(ctx, args[:cut])
        except click.UsageError as error:
            if type(error) is click.UsageError and "unexpected extra argument" in error.message:
                message = (
                    f"{error.message}. A COMMAND stands behind '--': submit [OPTIONS] -- COMMAND…"
                )
                raise click.UsageError(message, ctx) from None
            raise


@click.command(
    cls=SubmitCommand,
    options_metavar="[OPTIONS] [-- COMMAND…]",
    groups={
        **request_options.groups(),
        "What the tasks train (without a COMMAND)": list(TRAIN_OPTION_NAMES),
    },
    epilog="Precedence: flag, CLUSTERDDP_<OPTION> variable, the SBATCH_* variables of this shell, "
    "site.cfg, --recipe, default. Exit codes: 0 done, 1 the run failed, 2 a wrong request, "
    "75 it was stopped and has saved, 130 interrupted.",
)
@request_options.request_options
@functools.partial(train_options, settings=True)
@click.option("--run-name", metavar="NAME", help="Name of the run; made up when absent.")
@click.option("--site", metavar="FILE", help="The site.cfg to use.")
@click.option("--cluster", metavar="NAME", help="The [cluster:NAME] of site.cfg to use.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would be sent; touch nothing.")
@click.option("--wait", is_flag=True, help="Follow the run to its end and exit as it did.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run_name: str | None,
    site: str | None,  # noqa: ARG001 -- read ahead of the other options, see SettingsCommand
    cluster: str | None,  # noqa: ARG001
    dry_run: bool,
    wait: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Render an sbatch script, check it, and submit it as a run.

    Trains MNIST on every task, or runs COMMAND there with RANK, WORLD_SIZE, MASTER_ADDR … set.
    """
    for name in sbatch_variables.left_out(os.environ):
        click.echo(f"clusterddp: {name} is set here, but has no part in this submission", err=True)
    if run_name == "":
        raise RequestError("--run-name is empty; leave it out to have one made up.")
    if dry_run and wait:
        raise click.UsageError("--dry-run starts nothing that --wait could follow.", ctx)
    with settings.naming_sources(ctx):
        spec = job_spec(ctx, run_name or _made_up_name(), options)
    launcher = launchers.load(spec.launcher)
    script = launcher.prepare(spec, _template_folder(options))
    if dry_run:
        if not run_name:
            click.echo(f"run name: {spec.run_name}", err=True)
        if as_json:
            _print_json(spec, script=script)
        else:
            click.echo(script, nl=False)
        return EXIT_DONE
    short_lived.go_on()
    _check_inputs(spec)
    if options["check"] and spec.launcher != "local":
        _say_outlook(script)
    with RunDir.create(spec, script) as run:
        try:
            keep_code(spec, run, options["snapshot_limit"])
            submission = launcher.submit(spec, script, run)
        except KeyboardInterrupt:
            click.echo(
                f"clusterddp: interrupted; the job may be queued. Look for it by its comment, "
                f"{submission_comment(spec.run_name)}; its directory {run.path} is kept.",
                err=True,
            )
            return EXIT_INTERRUPTED
        except OSError as error:
            raise SlurmError(
                f"the run's records cannot be written: {error}. The job may be queued; look for it "
                f"by its comment, {submission_comment(spec.run_name)}."
            ) from None
    following = wait or submission.stop is not None
    if not as_json:
        _announce(spec, run, submission)
    elif not following:
        _print_json(spec, job_id=submission.job_id)
    if not following:
        return EXIT_DONE
    from clusterddp.cli.follow import follow

    code = follow(run, goes_on=not submission.stop, to_stderr=as_json)
    if submission.stop:
        if code == EXIT_INTERRUPTED:
            click.echo(f"clusterddp: {run.name}: cancelling", err=True)
            submission.stop()
            click.echo(f"clusterddp: {run.name}: cancelled", err=True)
        submission.stop()
    if as_json:
        _print_json(spec, job_id=submission.job_id, exit_code=code)
    return code


def _made_up_name() -> str:
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def _template_folder(options: dict[str, Any]) -> Path | None:
    """The folder of a person's own templates; it must be there when it was named."""
    path = Path(options["template"])
    if "/" in options["template"] and not path.is_file():
        raise RequestError(f"--template: {options['template']!r} is no file.")
    if "/" in options["template"] or (path.is_file() and path.name not in SHIPPED):
        return path.parent
    if options["template_dir"] is None:
        return None
    folder = Path(options["template_dir"])
    if not folder.is_dir():
        raise RequestError(f"--template-dir: {options['template_dir']!r} is no folder.")
    return folder


def _check_inputs(spec: JobSpec) -> None:
    """Make sure on this side of the queue of what a task would otherwise miss."""
    if Path(spec.run_dir).exists():
        raise RequestError(
            f"the run {spec.run_name} exists already at {spec.run_dir}; choose another --run-name."
        )
    if spec.train:
        make_sure(spec.train, may_fetch=True)


def _say_outlook(script: str) -> None:
    """Slurm's own forecast on stderr; what can never run, sbatch refuses by itself."""
    from clusterddp.slurm.sbatch import outlook

    try:
        found, words = outlook(script, os.environ)
    except SlurmError as error:
        found, words = False, f"Slurm could not be asked: {error}."
    else:
        words = f"Slurm says: {words}"
        if not found:
            words += (
                ". Queued all the same, it waits for a node or a partition that is down, or for "
                "ever: see sinfo."
            )
    click.echo(f"clusterddp: {'' if found else 'warning: '}{words}", err=True)


def keep_code(spec: JobSpec, run: RunDir, limit_mb: float) -> None:
    """Copy a command's tree into the run, or note what it is like where it is not to be copied.

    Raises RequestError when it is too large or cannot be read.
    """
    if not spec.command:
        return
    from clusterddp import snapshot

    tree, taken = Path.cwd(), None
    leave_out = run_folders(run)
    if spec.snapshot is not False:
        try:
            taken = snapshot.take(tree, run.code, limit_mb=limit_mb, leave_out=leave_out)
        except RequestError as error:
            if spec.snapshot:  # it was asked for
                raise
            click.echo(f"clusterddp: warning: your code is not copied: {error}", err=True)
    if taken is None:
        taken = snapshot.fingerprint(tree, leave_out=leave_out)
    if taken:
        write_atomically(run.code_record, taken.to_json().encode())


def _announce(spec: JobSpec, run: RunDir, submission: launchers.Submission) -> None:
    click.echo(
        f"submitted {spec.run_name} as job {submission.job_id}: {spec.layout}\n"
        f"  files   {spec.run_dir}\n"
        f"  status  clusterddp status {run.shown}\n"
        f"  logs    clusterddp logs -f {run.shown}\n"
        f"  cancel  clusterddp cancel {run.shown}"
    )


def _print_json(spec: JobSpec, **fields: Any) -> None:
    import json

    click.echo(json.dumps({"run": spec.run_name, "run_dir": spec.run_dir, **fields}))
