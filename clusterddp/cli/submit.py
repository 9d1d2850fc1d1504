"""`clusterddp submit`: the only place where flags become a `JobSpec`."""

import functools
import os
import secrets
import time
from pathlib import Path
from typing import Any

import click

from clusterddp import forms, launchers
from clusterddp.cli import request_options, settings
from clusterddp.cli.train_options import TRAIN_OPTION_NAMES, config_from, train_options
from clusterddp.errors import EXIT_DONE, EXIT_INTERRUPTED, DataError, RequestError
from clusterddp.run_dir import RunDir
from clusterddp.site import Site
from clusterddp.spec import JobSpec, Resources, TrainConfig

# Directives that an option stands for, and those that would take the logs away from the run.
_OPTION_OF = {
    "ntasks": "--tasks-per-node",
    "ntasks-per-node": "--tasks-per-node",
    "gpus": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node with --gpu-request gpus-per-task",
    **{
        name: f"--{name}"
        for name in (
            "nodes", "gpus-per-node", "cpus-per-task", "mem", "time", "partition", "account",
            "qos", "constraint", "reservation", "nodelist", "exclude", "dependency", "exclusive",
            "mail-type", "mail-user", "job-name", "export",
        )
    },
}  # fmt: skip
_REFUSED = {
    **dict.fromkeys(("output", "error", "open-mode", "input"), "the run keeps its logs itself"),
    **dict.fromkeys(("array", "wrap", "wait", "parsable", "test-only", "het-group"), (
        "one submission is one run"
    )),
}  # fmt: skip
_NEEDED = ("ntasks", "nodes", "output")


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
                    f"{error.message} A COMMAND stands behind '--': submit [OPTIONS] -- COMMAND…"
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
    "site.cfg, default. Exit codes: 0 done, 1 the run failed, 2 a wrong request, 130 interrupted.",
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
    spec = _spec(ctx, run_name or _made_up_name(), options)
    launcher = launchers.load(spec.launcher)
    script = launcher.prepare(spec, _template_folder(options))
    if dry_run:
        if not run_name:
            click.echo(f"run name: {spec.run_name}", err=True)
        click.echo(script, nl=False)
        return EXIT_DONE
    _check_inputs(spec)
    with RunDir.create(spec, script) as run:
        submission = launcher.submit(spec, script, run)
    _announce(spec, submission, as_json)
    if not (wait or submission.stop):
        return EXIT_DONE
    from clusterddp.cli.follow import follow

    code = follow(run, goes_on=not submission.stop)
    if submission.stop:
        if code == EXIT_INTERRUPTED:
            run.add_event("cancelled", job_id=submission.job_id)
            click.echo(f"clusterddp: {run.name}: cancelling", err=True)
        submission.stop()
    return code


def _spec(ctx: click.Context, run_name: str, options: dict[str, Any]) -> JobSpec:
    """Everything that was asked for, checked."""
    assert isinstance(ctx.obj, Site)
    task_command = ctx.meta["command"]
    train = None if task_command else _train_config(options)
    if task_command:
        _refuse_training_options(ctx)
    gpu_type, gpu_count = forms.gpus("--gpus-per-node", options["gpus_per_node"])
    if options["tasks_per_node"] is not None:
        forms.positive("--tasks-per-node", options["tasks_per_node"])
    resources = Resources(
        nodes=options["nodes"],
        gpus_per_node=gpu_count,
        gpu_type=gpu_type,
        gpu_request=options["gpu_request"],
        tasks_per_node=options["tasks_per_node"] or 0,
        cpus_per_task=options["cpus_per_task"],
        exclusive=options["exclusive"],
        **{
            name: options[name] or ""
            for name in (
                "mem", "time", "partition", "account", "qos", "constraint", "reservation",
                "nodelist", "exclude", "dependency", "mail_type", "mail_user",
            )
        },
    )  # fmt: skip
    environment, passed = _environment(ctx.obj, options["env"])
    template = options["template"]
    return JobSpec(
        run_name=run_name,
        run_dir=f"{os.path.abspath(options['output_root'])}/{run_name}",
        resources=resources,
        python=_python(options["python"]),
        train=train,
        command=task_command,
        job_name=options["job_name"] or "",
        launcher=options["launcher"],
        template=Path(template).name if "/" in template else template,
        sbatch=_directives(options["sbatch"]),
        omit_directives=_omitted(options["omit_directive"]),
        srun_args=tuple(
            w for line in options["srun_args"] for w in forms.words("--srun-args", line)
        ),
        environment=environment,
        pass_environment=passed,
        export=options["export"],
        setup=options["setup"],
        teardown=options["teardown"],
        modules=options["module"],
        network_interface=options["network_interface"] or "",
        launch_prefix=forms.words("--launch-prefix", options["launch_prefix"] or ""),
    )


def _made_up_name() -> str:
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _python(value: str) -> str:
    """A relative path is meant from here, a bare name from the PATH of the tasks."""
    return os.path.abspath(value) if "/" in value else value


def _train_config(options: dict[str, Any]) -> TrainConfig:
    config = {name: options[name] for name in TRAIN_OPTION_NAMES}
    config["data_dir"] = os.path.abspath(config["data_dir"]) if config["data_dir"] else ""
    if config["resume"]:
        config["resume"] = _resume_path(config["resume"], options["output_root"])
    return config_from(config)


def _resume_path(value: str, output_root: str) -> str:
    """A checkpoint file, a run's directory, or the name of a run below the output root."""
    for path in (Path(value), Path(output_root) / value):
        if path.exists():
            return os.path.abspath(path)
    raise RequestError(
        f"--resume: {value!r} is neither a file, nor a directory, nor a run below {output_root}."
    )


def _refuse_training_options(ctx: click.Context) -> None:
    given = [n for n in TRAIN_OPTION_NAMES if settings.source(ctx, n) == "flag"]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(
            f"{names} belongs to the MNIST training, but a COMMAND is given; put the command's own "
            "options behind '--'.",
            ctx,
        )


def _environment(
    site: Site, items: tuple[str, ...]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """--env over the site's [environment]: what the script sets, and what it passes by name."""
    values: dict[str, str | None] = dict(site.environment)
    for item in items:
        name, equals, value = item.partition("=")
        if not equals and forms.VARIABLE.fullmatch(name) and name not in os.environ:
            raise RequestError(f"--env {name}: is not set here; set it, or use --env {name}=VALUE.")
        values.pop(name, None)
        values[name] = value if equals else None
    environment = tuple((n, v) for n, v in values.items() if v is not None)
    return environment, tuple(n for n, v in values.items() if v is None)


def _directives(items: tuple[str, ...]) -> tuple[tuple[str, str | None], ...]:
    found: dict[str, str | None] = dict(settings.sbatch_directives(os.environ))
    for item in items:
        key, equals, value = item.partition("=")
        name = key.removeprefix("--")
        forms.matching("--sbatch", name, forms.DIRECTIVE_NAME, "signal=USR1@90 or requeue")
        option = _OPTION_OF.get(name) or next(
            # sbatch takes shortened names too
            (
                o
                for full, o in _OPTION_OF.items()
                if full.startswith(name) and len(name) < len(full)
            ),
            None,
        )
        if name == "gres" and "gpu" in value:
            option = "--gpus-per-node with --gpu-request gres"
        if option:
            raise RequestError(f"--sbatch {item}: there is an option for it, {option}.")
        if name in _REFUSED:
            raise RequestError(f"--sbatch {item}: refused, for {_REFUSED[name]}.")
        found[name] = forms.text(f"--sbatch {name}", value) if equals else None
    return tuple(found.items())


def _omitted(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        forms.matching("--omit-directive", name, forms.DIRECTIVE_NAME, "mem")
        if name in _NEEDED:
            raise RequestError(f"--omit-directive {name}: the run cannot do without it.")
    return names


def _template_folder(options: dict[str, Any]) -> Path | None:
    """The folder of a person's own templates; it must be there when it was named."""
    if "/" in options["template"]:
        path = Path(options["template"])
        if not path.is_file():
            raise RequestError(f"--template: {options['template']!r} is no file.")
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
        from clusterddp.training import data

        try:
            info = data.ensure(
                spec.train.dataset,
                spec.train.data_dir,
                progress=lambda line: click.echo(line, err=True),
                may_fetch=True,
            )
        except DataError as error:
            raise RequestError(str(error)) from None  # nothing has run that could have failed
        click.echo(f"dataset: {info.describe()}", err=True)


def _announce(spec: JobSpec, submission: launchers.Submission, as_json: bool) -> None:
    if as_json:
        import json

        fields = {"run": spec.run_name, "job_id": submission.job_id, "run_dir": spec.run_dir}
        click.echo(json.dumps(fields))
        return
    click.echo(
        f"submitted {spec.run_name} as job {submission.job_id}: {spec.resources.nodes} nodes x "
        f"{spec.resources.tasks_per_node} tasks = {spec.world_size} ranks\n"
        f"  files   {spec.run_dir}\n"
        f"  status  clusterddp status {spec.run_name}\n"
        f"  logs    clusterddp logs -f {spec.run_name}\n"
        f"  cancel  clusterddp cancel {spec.run_name}"
    )
