"""`clusterddp resume`: resumes a run in its own directory."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import click

from clusterddp import formatting
from clusterddp.cli.options import (
    JSON_OPTION,
    WAIT_OPTION,
    SettingsCommand,
    WithCommand,
    dry_run_option,
    given_by,
    options,
)
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION, follow_submitted
from clusterddp.cli.sweeps import echo_dry_run, follow_sweep, sweep_of, sweep_options
from clusterddp.errors import EXIT_DONE, ClusterDDPError, RequestError, coded
from clusterddp.request.options import FAULT_TOLERANCE, OUTPUT, RESOURCES, Given
from clusterddp.request.spec import REQUEST
from clusterddp.request.sweep import Sweep
from clusterddp.request.train_config import TRAINING
from clusterddp.run.run_dir import RunDir, SweepDir
from clusterddp.status.find import find_run, find_sweep, is_pattern, select
from clusterddp.status.status import statuses
from clusterddp.status.sweeps import ended_without_success
from clusterddp.submission.fields import CONTAINER, changed, existing_templates
from clusterddp.submission.resume import Resumption, Terms, resume

# A run keeps these options. Directives are edited in its script, and its own checkpoints take
# precedence over another run's.
_FIXED = {"omit-directive", "init-from"}
_COMMAND_FIELDS = {"env", "module", "setup"}
_FILE_FIELDS = {"template_dir", "snapshot_limit"}
_TRAINING_OPTIONS = [row for row in TRAINING if row.name not in _FIXED]
_REQUEST_OPTIONS = [
    row
    for row in REQUEST
    if (row.group in (RESOURCES, FAULT_TOLERANCE, OUTPUT) and row.name not in _FIXED)
    or row.parameter in ("python", "controller_python", "stage_env", "launcher", "in_hold")
    or row.parameter in (*CONTAINER, *_COMMAND_FIELDS, *_FILE_FIELDS)
]


class ResumeCommand(WithCommand):
    """A command that reads options only from the command line; others stay as recorded."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter:  # RUN is after `--`, and there is no COMMAND
            ctx.meta["command"] = ()
            return SettingsCommand.parse_args(self, ctx, args)

    def _load_settings(self, ctx: click.Context, args: list[str]) -> None:
        super()._load_settings(ctx, args)
        ctx.default_map = {k: v for k, v in (ctx.default_map or {}).items() if k == "runs_dir"}


@click.command(name="resume", cls=ResumeCommand)
@click.argument("run", type=RUN, metavar="RUN [-- COMMAND...]")
@options([*_REQUEST_OPTIONS, *_TRAINING_OPTIONS], settings=False, defaults=False)
@sweep_options
@click.option(
    "--refresh-code",
    is_flag=True,
    help="Replace the run's copy of the code by the current directory.",
)
@click.option(
    "--upgrade-clusterddp",
    is_flag=True,
    help="Use the clusterddp installed here (implied by any option).",
)
@click.option(
    "--from-scratch", is_flag=True, help="Start again at step 0 and ignore any checkpoints."
)
@click.option(
    "--even-if-done", is_flag=True, help="Start a COMMAND again although it ended with exit code 0."
)
@dry_run_option("the sbatch script and submit nothing")
@WAIT_OPTION
@RUNS_DIR_OPTION
@JSON_OPTION
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run: str,
    dry_run: bool,
    wait: bool,
    runs_dir: Path,
    as_json: bool,
    max_concurrent: int | None,
    **_values: object,
) -> int:
    """Resume RUN in its own directory, from its last checkpoint.

    RUN is a run's or sweep's name, job id or directory, or a pattern ('lr-*'), which resumes each
    run that did not succeed. The script is submitted unchanged unless options are given. They
    replace the recorded ones; an empty value drops one (--dependency ''). CLUSTERDDP_* and SBATCH_*
    variables and site.cfg are ignored. The count for --max-requeues starts again.

    For a sweep, it resumes the trials that failed, were stopped or cancelled, never began, or were
    lost by Slurm. --sweep or --sweep-file adds trials instead, and resumes none.

    For a run of a COMMAND you can change the COMMAND, --env, --module, --setup and --sbatch.
    --env NAME=VALUE adds or replaces one variable; --env '' first removes all recorded ones.
    --sbatch does the same with directives. --module and --setup replace the whole list.

    The run keeps using its copy of your code; differences from the current directory are printed.
    --refresh-code makes a new copy of the current directory and carries over the files that the
    COMMAND wrote in the old one; a sweep gets one job and one copy per trial.

    A change of an option that affects the weights (batch size, model), or of code without a copy,
    is printed and refused. --allow-config-change accepts it: the run continues from its checkpoint
    with the new values. If you edited the script, it is rendered again and your edits are lost.

    If none of the saved checkpoints can be used, the run starts at step 0 only with --from-scratch.

    Exit codes: 0 submitted, with --wait done; 1 the run failed, or it is unknown whether it was
    queued; 2 usage error, or refused; 75 with --wait: stopped after a checkpoint, can resume; 130
    interrupted.
    """
    if dry_run and wait:
        raise click.UsageError("--dry-run conflicts with --wait. Remove one of them.", ctx)
    given = given_by(ctx)
    sweep, more = find_sweep(runs_dir, run), sweep_of(given)
    if sweep is None and (more or max_concurrent):
        name = run if is_pattern(run) else find_run(runs_dir, run).name
        option = "--sweep or --sweep-file" if more else "--max-concurrent"
        raise RequestError(
            f"{name} is not a sweep, but {option} needs one. Name a sweep instead. [CD1104]"
        )
    terms = _terms(given, more)
    has_own_copies = sweep is not None and terms.refresh_code and not terms.more
    if has_own_copies or (sweep is None and is_pattern(run)):
        if dry_run or wait or max_concurrent:
            raise click.UsageError(
                f"--dry-run, --wait and --max-concurrent need one job, but {run} means several."
            )
        return _resume_each(given, runs_dir, run, terms, as_json=as_json)
    run_dir = sweep or find_run(runs_dir, run)
    done = resume(run_dir, partial(changed, given), terms, dry_run=dry_run)
    return _follow(done, run_dir, wait=wait, as_json=as_json)


def _terms(given: Given, more: Sweep) -> Terms:
    values = given.values
    return Terms(
        allow_config_change=bool(values["allow_config_change"]),
        refresh_code=values["refresh_code"],
        upgrade_clusterddp=values["upgrade_clusterddp"],
        from_scratch=values["from_scratch"],
        even_if_done=values["even_if_done"],
        force=bool(values["force"]),
        template_folder=existing_templates(values["template_dir"]),
        snapshot_limit_mb=values["snapshot_limit"],
        more=more,
    )


def _follow(done: Resumption, run: RunDir, *, wait: bool, as_json: bool) -> int:
    """Print the submission or the dry run; follow it if requested. Return the exit code."""
    spec, sent = done.spec, done.submission
    if sent is None:  # a dry run
        of_run = {"run": spec.run_name, "run_dir": spec.run_dir}
        of_sweep = {"sweep": run.name, "indices": done.indices}
        fields = of_sweep if isinstance(run, SweepDir) else of_run
        echo_dry_run(spec, done.script, fields, indices=done.indices, as_json=as_json)
        return EXIT_DONE
    if isinstance(run, SweepDir):
        return follow_sweep(spec, run.path, sent, done.indices, wait=wait, as_json=as_json)
    job = formatting.job(done.job_id, spec.launcher)
    words = (
        f"submitted {spec.run_name} again as {job}: {spec.layout}; it {done.beginning}\n"
        f"  status     clusterddp status {run.cli_name}\n"
        f"  logs       clusterddp logs -f {run.cli_name}"
    )
    return follow_submitted(spec, run, sent, words, wait=wait, as_json=as_json, lines=0)


def _resume_each(given: Given, root: Path, pattern: str, terms: Terms, *, as_json: bool) -> int:
    """Resume the runs of a pattern that failed or were stopped. Return the exit code."""
    runs, terms = select(root, pattern), dataclasses.replace(terms, one_of_several=True)
    again = [run for run, s in zip(runs, statuses(runs), strict=True) if ended_without_success(s)]
    if not again:
        raise RequestError(
            f"there is nothing to resume: none of the runs {pattern} ({len(runs)}) failed or was "
            "stopped, cancelled or lost. [CD1103]"
        )
    code, fields = EXIT_DONE, []
    for run in again:
        try:
            done = resume(run, partial(changed, given), terms)
        except ClusterDDPError as error:
            click.echo(f"clusterddp: {coded(error)}", err=True)
            code = max(code, error.exit_code)
            continue
        fields.append({"run": run.name, "run_dir": done.spec.run_dir, "job_id": done.job_id})
        if not as_json:
            job = formatting.job(done.job_id, done.spec.launcher)
            click.echo(f"submitted {run.name} again as {job}; it {done.beginning}")
    if as_json:
        click.echo(json.dumps(fields))
    return code
