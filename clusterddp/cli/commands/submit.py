"""`clusterddp submit`: renders a request, checks it, and submits it as a run."""

import json
import os
from pathlib import Path

import click

from clusterddp.cli import main
from clusterddp.cli.options import (
    JSON_OPTION,
    WAIT_OPTION,
    WithCommand,
    config_option,
    dry_run_option,
    given_by,
    help_all_option,
    options,
    site_options,
)
from clusterddp.cli.sweeps import follow_sweep, sweep_fields, sweep_of, sweep_options, table_of
from clusterddp.errors import EXIT_DONE, EXIT_INTERRUPTED, OptionError, RequestError, coded
from clusterddp.launchers import load
from clusterddp.request.options import Given
from clusterddp.request.spec import OPTIONS, JobSpec
from clusterddp.submission.fields import generate_name, job_spec, remarks, template_folder


class SubmitCommand(WithCommand):
    """A command that refuses sbatch's options and files, and says what to type instead."""

    common = (
        *("nodes", "gpus_per_node", "cpus_per_task", "time", "partition", "account"),
        *("run_name", "launcher", "dry_run", "wait", "help_all"),
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            from clusterddp.cli.usage_errors import submit_message

            if message := submit_message(error):
                raise click.UsageError(message) from None
            raise


@click.command(
    cls=SubmitCommand,
    context_settings=main.HELP_SETTINGS,
    options_metavar="[OPTIONS] [-- COMMAND...]",
    epilog="Precedence, highest first: flag, --config, CLUSTERDDP_<OPTION> variable, SBATCH_* "
    "variables, site.cfg, --recipe, default.",
)
@options(OPTIONS.values())
@click.option("--run-name", metavar="NAME", help="Name of the run. [default: generated]")
@config_option
@click.option(
    "--save-config",
    "save_to",
    metavar="FILE.toml",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the request, without secrets, for --config.",
)
@sweep_options
@site_options
@dry_run_option("the sbatch script, unchecked by Slurm; submit nothing")
@click.option(
    "--test-only",
    is_flag=True,
    help="Check the request, print when Slurm would start it; submit nothing.",
)
@WAIT_OPTION
@JSON_OPTION
@help_all_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    run_name: str | None,
    save_to: Path | None,
    dry_run: bool,
    test_only: bool,
    wait: bool,
    as_json: bool,
    max_concurrent: int | None,
    **_values: object,
) -> int:
    """Render an sbatch script, check it, and submit it as a run.

    Put your own command after '--'. Every rank runs COMMAND with RANK, WORLD_SIZE, MASTER_ADDR and
    so on set. Without a COMMAND, the ranks train MNIST.

    \b
    clusterddp submit --nodes 2 --gpus-per-node 4 -- python train.py
    clusterddp submit --sweep lr=0.1,0.3 -- python train.py --lr {lr}

    Exit codes: 0 submitted, with --wait done; 1 the run failed, or it is unknown whether it was
    queued; 2 usage error, or refused; 75 with --wait: stopped after a checkpoint, can resume; 130
    interrupted.
    """
    _warn_of_variables()
    given = given_by(ctx)
    if run_name == "":
        raise RequestError("--run-name is empty. Omit it to generate a name. [CD0102]")
    if dry_run and wait:
        raise click.UsageError("--dry-run conflicts with --wait. Remove one of them.", ctx)
    if test_only and (dry_run or wait):
        other = "--dry-run" if dry_run else "--wait"
        raise click.UsageError(f"--test-only conflicts with {other}. Remove one of them.", ctx)
    # A request to save keeps it for its submission.
    if dry_run and given.flags(["check_python"]) and not save_to:
        raise click.UsageError(
            "--dry-run conflicts with --check-python, because it starts no interpreter. Remove "
            "one of them.",
            ctx,
        )
    swept = sweep_of(given, max_concurrent or 0)
    if max_concurrent and not swept:
        raise OptionError("--max-concurrent", " needs --sweep NAME=VALUES.")
    spec = job_spec(given, run_name or generate_name("sweep" if swept else "run"), swept)
    script = load(spec.launcher).prepare(spec, template_folder(given))
    if save_to:
        _save(given, spec, save_to)
    if dry_run:
        _warn(given, spec, script)
        if not run_name:
            click.echo(f"run name: {spec.run_name}", err=True)
        _print_script(spec, script, as_json=as_json)
        return EXIT_DONE
    main.enable_gc()
    if test_only:
        return _test(given, spec, script, as_json=as_json)
    return _submit(given, spec, script, wait=wait, as_json=as_json)


def _warn_of_variables() -> None:
    if any(name.startswith(("SBATCH_", "CLUSTERDDP_")) for name in os.environ):
        from clusterddp.cli.usage_errors import warn_of_variables

        warn_of_variables(os.environ)


def _save(given: Given, spec: JobSpec, path: Path) -> None:
    if spec.sweep:
        raise OptionError(
            "--save-config",
            f" {path} conflicts with --sweep: a file contains the request of a single run. Save it "
            f"without --sweep, and submit with --config {path} --sweep NAME=VALUES.",
        )
    from clusterddp.cli.request_file import save

    for name in save(given, spec, path):
        click.echo(
            f"clusterddp: {path} passes {name} without its value, because the name suggests a "
            "secret. Set it in the submitting shell",
            err=True,
        )


def _print_script(spec: JobSpec, script: str, *, as_json: bool) -> None:
    fields: dict[str, object] = {"run": spec.run_name, "run_dir": spec.run_dir, "script": script}
    if spec.sweep:
        fields |= sweep_fields(spec.sweep)
        if not as_json:
            click.echo(table_of(spec), err=True)
    click.echo(json.dumps(fields) if as_json else script, nl=as_json)


def _test(given: Given, spec: JobSpec, script: str, *, as_json: bool) -> int:
    """Print Slurm's forecast of the request."""
    from clusterddp.submission import submit

    asked = {name: given.values[name] for name in ("check_python", "force")}
    words = submit.forecast(spec, script, **asked)
    fields: dict[str, object] = {"run": spec.run_name, "run_dir": spec.run_dir, "forecast": words}
    fields["start_in_seconds"] = submit.seconds_until(words)
    text = f"{spec.run_name} is valid, and was not submitted. Slurm says: {words}"
    click.echo(json.dumps(fields) if as_json else text)
    return EXIT_DONE


def _submit(given: Given, spec: JobSpec, script: str, *, wait: bool, as_json: bool) -> int:
    """Submit the request, print how to follow it, and follow it if requested."""
    from clusterddp import formatting  # a dry run needs none of these
    from clusterddp.cli.runs import follow_submitted
    from clusterddp.submission import submit

    values = given.values
    try:
        run, submission = submit.submit(
            spec,
            script,
            snapshot_limit_mb=values["snapshot_limit"],
            check_python=values["check_python"],
            force=values["force"],
        )
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED
    if spec.sweep:
        trials = range(len(spec.sweep))
        return follow_sweep(spec, run.path, submission, trials, wait=wait, as_json=as_json)
    job = formatting.job(submission.job_id, spec.launcher)
    words = (
        f"{'started' if spec.launcher == 'local' else 'submitted'} {spec.run_name} as {job}: "
        f"{spec.layout}\n"
        f"  directory  {spec.run_dir}\n"
        f"  status     clusterddp status {run.cli_name}\n"
        f"  logs       clusterddp logs -f {run.cli_name}\n"
        f"  cancel     clusterddp cancel {run.cli_name}"
    )
    return follow_submitted(spec, run, submission, words, wait=wait, as_json=as_json)


def _warn(given: Given, spec: JobSpec, script: str) -> None:
    """Print the warnings of a submission, also for missing files. Raises RequestError."""
    has_folder = "data_dir" in given.sources
    has_own = spec.starts_own_files or spec.sbatch
    if has_own or has_folder or spec.after or os.path.lexists(spec.run_dir):
        from clusterddp.submission import inputs, submit  # a plain dry run does not need them

        for train in spec.trainings:
            inputs.find_user_functions(train, spec)
        for refused in submit.refusals(
            spec, script, has_folder=has_folder, force=given.values["force"]
        ):
            text = f"warning: a submission would be refused: {coded(refused)}"
            click.echo(f"clusterddp: {text}", err=True)
    for remark in remarks(spec):
        click.echo(f"clusterddp: warning: {coded(remark, 'CD0112')}", err=True)
    if spec.after:
        from clusterddp.status import chain

        waits = chain.check_awaited(spec)
        if (words := chain.describe(waits)) and chain.dependency(waits):
            click.echo(f"clusterddp: {words}: sbatch gets a --dependency", err=True)
