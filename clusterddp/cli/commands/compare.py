"""`clusterddp compare`: compares one device with several in a table and a plot."""

import dataclasses
import os
import shlex
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from clusterddp import formatting, log
from clusterddp.cli.options import (
    JSON_OPTION,
    SettingsCommand,
    dry_run_option,
    given_by,
    options,
    site_options,
)
from clusterddp.cli.runs import echo_json
from clusterddp.comparison import plan, results
from clusterddp.comparison.results import Row, RowRun
from clusterddp.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from clusterddp.processes import hardware
from clusterddp.reporting import plots
from clusterddp.request.options import Choice, Given
from clusterddp.request.spec import OPTIONS, REQUEST, JobSpec
from clusterddp.request.train_config import STRATEGIES, TrainConfig
from clusterddp.slurm import forms
from clusterddp.status.find import DEFAULT_ROOT
from clusterddp.status.state import RunState
from clusterddp.submission.fields import job_spec, template_folder
from clusterddp.submission.inputs import check_inputs, find_user_functions

# Options of `submit` that a row determines or a comparison does not use, and their values.
_FIXED: dict[str, object] = {
    **{"nodes": 1, "nodelist": None, "launcher": "sbatch", "job_name": None},
    **{"strategy": "ddp", "init_from": "", "find_batch_size": False},
    **{"allow_launcher": False, "report_to": "", "on_hang": "report", "stacks": True},
}
# `submit --help` also names the defaults for a COMMAND.
_SIGNAL = "B:USR1@120, or a fifth of a --time below 10 minutes"
_DEFAULTS = {"signal": _SIGNAL, "hang-timeout": "60s", "requeue": "on"}
_OWN = ("strategies", "world_sizes", "fixed_global_batch", "repeat", "where", "name", "of")
_ALLOWED_WITH_OF = {"of", "runs_dir", "plot", "as_json"}
_STRATEGIES = Choice(tuple(reversed(STRATEGIES)))
_COUNTS = forms.Form(r"0*[1-9][0-9]*(,0*[1-9][0-9]*)*", "list of counts", "for example 1,2,4")
_NAME = forms.Form(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}",  # the names of its runs are longer
    "name of a comparison",
    "up to 80 letters, digits, '.', '_' and '-', starting with a letter or digit",
)


class CompareCommand(SettingsCommand):
    """A command with the options of `submit` and the training, except the fixed ones."""

    titles = dict.fromkeys(_OWN, "Comparison")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        ctx.params.update(_FIXED)
        ctx.meta["command"] = ()
        return rest


@click.command(name="compare", cls=CompareCommand)
@click.option(
    "--strategies",
    metavar="LIST",
    default=",".join(_STRATEGIES.names),
    show_default=True,
    help="Rows: single: one device; dp: DataParallel; ddp: one rank per device.",
)
@click.option(
    "--world-sizes",
    metavar="LIST",
    show_default="powers of two, from 2 to the GPUs of a host",
    help="Numbers of ranks (ddp) or GPUs (dp): 2,4,8.",
)
@click.option(
    "--fixed-global-batch",
    is_flag=True,
    help="Share one --batch-size among devices (strong scaling).",
)
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Run each row N times; print medians and spread.",
)
@click.option(
    "--launcher",
    "where",
    type=click.Choice(["local", "sbatch"]),
    default="local",
    show_default=True,
    help="Train here, one by one, or as jobs.",
)
@click.option(
    "--run-name",
    "name",
    metavar="NAME",
    default=partial(time.strftime, "compare-%Y%m%d-%H%M%S"),
    show_default="compare-<time>",
    help="Name of the comparison and prefix of its runs.",
)
@click.option(
    "--of",
    metavar="NAME|RUN",
    multiple=True,
    help="Only print the table of a comparison or of runs; repeatable.",
)
@options(
    dataclasses.replace(row, shown=_DEFAULTS.get(row.name, row.shown))
    for row in OPTIONS.values()
    if row.parameter not in _FIXED
)
@site_options
@dry_run_option("what would be started and change nothing")
@click.option(
    "--plot",
    metavar="FILE",
    show_default="RUNS_DIR/NAME.png",
    help="Plot images/s and efficiency over the number of devices: .png, .svg or .pdf.",
)
@JSON_OPTION
@click.pass_context
def command(
    ctx: click.Context,
    /,
    of: tuple[str, ...],
    name: str,
    where: str,
    repeat: int,
    dry_run: bool,
    plot: str | None,
    as_json: bool,
    **_values: object,
) -> int:
    """Compare one device, DataParallel and DistributedDataParallel.

    \b
    clusterddp compare --max-steps 200                # on this workstation
    clusterddp compare --launcher sbatch --gpus-per-node 4 --world-sizes 1,2,4,8
    clusterddp compare --of compare-20261121-120000   # prints its table again

    In Slurm, nodes have --gpus-per-node GPUs or --tasks-per-node ranks, and the jobs run one after
    the other. On CPUs the ranks of a host share all its CPUs, and a single rank uses all of them:
    --threads 1 compares equal devices.

    Exit codes: 0 done, 1 a run failed, 2 usage error, 130 interrupted.
    """
    given = given_by(ctx)
    root = given.values["runs_dir"]
    if dry_run and as_json:
        raise click.UsageError("--dry-run conflicts with --json. Remove one of them.", ctx)
    if plot is not None:
        plots.check_file("--plot", plot)
    if of:
        flags = given.flags(name for name in given.values if name not in _ALLOWED_WITH_OF)
        if flags:
            raise click.UsageError(f"--of conflicts with {flags}: it only prints results.", ctx)
        return _show(results.trials_of(Path(root), of), ", ".join(of), as_json, plot)
    config, base, rows = _rows(given, name, where)
    planned = plan.build_requests(rows, name, root, repeat, base)
    templates = template_folder(given) if base else None
    plan.log_remarks(planned)
    if dry_run:
        find_user_functions(config, base)
        click.echo("\n".join(plan.dry_run(rows, planned, base, templates)))
        return EXIT_DONE
    check_inputs(config, base)
    try:
        if base:
            limit, force = given.values["snapshot_limit"], given.values["force"]
            trials, number = plan.train_as_jobs(planned, templates, limit, force=force), 0
        else:
            trials, number = plan.train_here(planned)
    except plan.Interrupted as interrupted:
        _print_interrupted(name, root, interrupted)
        return EXIT_INTERRUPTED
    failed = any(trial.state != RunState.DONE for trial in trials)
    trials += [RowRun(row, why=row.missing) for row in rows if row.missing]
    code = _show(trials, name, as_json, f"{root}/{name}.png" if plot is None else plot)
    return 128 + number if number else EXIT_FAILED if failed else code


def _rows(given: Given, name: str, where: str) -> tuple[TrainConfig, JobSpec | None, list[Row]]:
    """Return the configuration, the request of Slurm jobs (None for this machine) and the rows."""
    _NAME.check("--run-name", name)
    strategies = tuple(dict.fromkeys(given.values["strategies"].split(",")))
    for strategy in strategies:
        _STRATEGIES.check("--strategies", strategy)
    counts = given.values["world_sizes"]
    if counts is not None:
        _COUNTS.check("--world-sizes", counts)
        if strategies == ("single",):
            raise click.UsageError("--world-sizes needs --strategies with dp or ddp.")
    if where == "local":
        flags = given.flags(row.parameter for row in REQUEST if row.name != "runs-dir")
        if flags:
            raise click.UsageError(f"{flags} needs --launcher sbatch.")
        base, config = None, TrainConfig.of(given)
    else:
        base = job_spec(given, name)
        [config] = base.trainings
    hosts = plan.hosts(config, base)
    sizes = sorted({*map(int, counts.split(","))}) if counts else plan.powers_of_two(hosts)
    fixed = given.values["fixed_global_batch"]
    return config, base, plan.plan(config, strategies, sizes, hosts, fixed_global_batch=fixed)


def _print_interrupted(name: str, root: str, interrupted: plan.Interrupted) -> None:
    usual = os.environ.get("CLUSTERDDP_RUNS_DIR") or DEFAULT_ROOT
    more = [] if os.path.abspath(root) == os.path.abspath(usual) else [f"--runs-dir={root}"]
    again = shlex.join(["clusterddp", "compare", f"--of={name}", *more])
    left = " ".join(run.cli_name for run in interrupted.runs)
    click.echo(
        f"\nclusterddp: the jobs continue. Print their table: {again}. "
        f"End them: clusterddp cancel {left}",
        err=True,
    )


def _show(trials: Sequence[RowRun], name: str, as_json: bool, plot: str | None) -> int:
    """Print the table or its JSON, and save the plot. Return 1 if it cannot be saved."""
    lines = results.results(trials)
    remarks = results.notes(trials, lines, _hardware(trials))
    if as_json:
        echo_json([dataclasses.asdict(line) for line in lines])
    else:
        click.echo(results.table(lines))
        for note in remarks:
            click.echo(f"  {note}")
    if plot:
        if not any(line.baseline for line in lines):
            log.warning(f"no plot is saved to {plot}: no run has results. [CD0111]")
            return EXIT_FAILED
        figure = results.scaling(lines, formatting.line(name))
        try:
            plots.save_scaling(figure, Path(plot), remarks[:2])
        except OSError as error:
            log.warning(f"cannot write the plot to {plot}: {error.strerror}. [CD0108]")
            return EXIT_FAILED
        log.info(f"the plot is in {plot}")
    return EXIT_DONE


def _hardware(trials: Sequence[RowRun]) -> str:
    """Describe the CPUs of this machine if all runs trained on it; otherwise an empty text."""
    reports = [trial.report for trial in trials if trial.report]
    if not reports or any(report.hosts != (socket.gethostname(),) for report in reports):
        return ""
    return hardware.describe(reports[0].device)
