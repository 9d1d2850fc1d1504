"""From the values of submit's options to a `JobSpec`: the only place where flags become types."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from clusterddp.cli import sbatch_variables, settings
from clusterddp.cli.commands.templates import SHIPPED, full_name
from clusterddp.cli.train_options import TRAIN_OPTION_NAMES, config_from
from clusterddp.errors import RequestError
from clusterddp.request.resources import Resources
from clusterddp.request.site import Site
from clusterddp.request.spec import JobSpec
from clusterddp.request.train_config import TrainConfig
from clusterddp.slurm import forms

# Directives that an option stands for, and those that would take the logs away from the run.
_OPTION_OF = {
    "ntasks": "--tasks-per-node",
    "ntasks-per-node": "--tasks-per-node",
    "gpus": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node with --gpu-request gpus-per-task",
    "no-requeue": "--no-requeue",
    **{
        name: f"--{name}"
        for name in (
            "nodes", "gpus-per-node", "cpus-per-task", "mem", "time", "partition", "account",
            "qos", "constraint", "reservation", "nodelist", "exclude", "dependency", "exclusive",
            "mail-type", "mail-user", "job-name", "export", "requeue", "signal",
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
# Other names of sbatch(1): no shortened form of the above, and what --omit-directive can name.
_KNOWN_DIRECTIVES = {*sbatch_variables.DIRECTIVES.values(), "chdir", "comment", "gres", "nice"}


def job_spec(ctx: click.Context, run_name: str, options: dict[str, Any]) -> JobSpec:
    """Everything that was asked for, checked."""
    assert isinstance(ctx.obj, Site)
    task_command = ctx.meta["command"]
    train = None if task_command else _train_config(ctx, options)
    if task_command:
        _refuse_training_options(ctx)
    for name, value in options.items():
        if value == "" and settings.source(ctx, name) == "flag":
            flag = f"--{name.replace('_', '-')}"
            raise RequestError(f"{flag} is empty; give a value, or leave it out.")
    gpu_type, gpu_count = forms.gpus("--gpus-per-node", options["gpus_per_node"])
    if options["tasks_per_node"] is not None:
        forms.positive("--tasks-per-node", options["tasks_per_node"])
    resources = Resources(
        nodes=options["nodes"],
        gpus_per_node=gpu_count,
        gpu_type=gpu_type,
        gpu_request=options["gpu_request"],
        # What drives all GPUs of its node by itself is a single task.
        tasks_per_node=options["tasks_per_node"] or (1 if train and train.strategy != "ddp" else 0),
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
    if Path(template).name.startswith("_"):
        raise RequestError(f"--template {template}: it is part of another one, not for itself.")
    spec = JobSpec(
        run_name=run_name,
        run_dir=f"{os.path.abspath(options['output_root'])}/{run_name}",
        resources=resources,
        python=_python(options["python"]),
        train=train,
        command=task_command,
        allow_launcher=options["allow_launcher"],
        job_name=options["job_name"] or "",
        launcher=options["launcher"],
        template=_template(ctx, template, options["template_dir"]),
        sbatch=_directives(options["sbatch"], resources),
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
        requeue=options["requeue"],
        snapshot=options["snapshot"],
        max_requeues=options["max_requeues"],
        restart_on_failure=options["restart_on_failure"],
        restart_in_job=options["restart_in_job"],
        signal="" if options["signal"] == "none" else options["signal"],
    )
    spec.refuse_launcher()
    return spec


def _template(ctx: click.Context, value: str, folder: str | None) -> str:
    """The name of a template's file in its folder; raises RequestError where two are meant."""
    if "/" in value:
        return Path(value).name
    is_own = folder and (Path(folder) / value).is_file()
    named = settings.source(ctx, "template") != "default"
    if named and value in SHIPPED and not is_own and Path(value).is_file():
        raise RequestError(
            f"--template {value}: there is a file of that name here, and a shipped template. Use "
            f"./{value} for the file, or {value.removesuffix('.sbatch.j2')} for the shipped one."
        )
    return full_name(value, Path(folder) if folder else None)


def _python(value: str) -> str:
    """A relative path is meant from here, a bare name from the PATH of the tasks."""
    return os.path.abspath(value) if "/" in value else value


def _train_config(ctx: click.Context, options: dict[str, Any]) -> TrainConfig:
    config = {name: options[name] for name in TRAIN_OPTION_NAMES}
    config["data_dir"] = os.path.abspath(config["data_dir"]) if config["data_dir"] else ""
    if config["resume"]:
        config["resume"] = _resume_path(config["resume"], options["output_root"])
    return config_from(config, ctx)


def _resume_path(value: str, output_root: str) -> str:
    """A checkpoint file, a run's directory, or the name of a run below the output root."""
    for path in (Path(value), Path(output_root) / value):
        if path.exists():
            return os.path.abspath(path)
    raise RequestError(
        f"--resume: {value!r} is neither a checkpoint, nor a run's directory, nor the name of a "
        f"run below {output_root}."
    )


def _refuse_training_options(ctx: click.Context) -> None:
    given = [n for n in TRAIN_OPTION_NAMES if settings.source(ctx, n) == "flag"]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(
            f"{names} belong{'' if given[1:] else 's'} to the MNIST training, but a COMMAND is "
            "given; put the command's own options behind '--'.",
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
    passed = tuple(n for n, v in values.items() if v is None)
    if passed:
        from clusterddp.slurm.submission_env import submission_environment

        arriving = submission_environment(os.environ)
        for name in passed:
            if name in os.environ and name not in arriving:
                raise RequestError(
                    f"--env {name}: a surrounding job's {name} is kept out of submissions, so it "
                    f"cannot be passed by name. Use --env {name}=VALUE."
                )
    return environment, passed


def _directives(items: tuple[str, ...], resources: Resources) -> tuple[tuple[str, str | None], ...]:
    """--sbatch over the submitter's SBATCH_*, of which those that an option contradicts are out."""
    found = sbatch_variables.directives(os.environ)
    for name, contradicted in (
        ("mem-per-cpu", resources.mem),
        ("mem-per-gpu", resources.mem),
        ("cpus-per-gpu", resources.cpus_per_task),
    ):
        if contradicted:
            found.pop(name, None)
    for item in items:
        key, equals, value = item.partition("=")
        name = key.removeprefix("--")
        forms.matching("--sbatch", name, forms.DIRECTIVE_NAME, "signal=USR1@90 or requeue")
        option, reason = _meant(name, _OPTION_OF), _meant(name, _REFUSED)
        if name == "gres" and "gpu" in value:
            option = "--gpus-per-node with --gpu-request gres"
        if option:
            raise RequestError(f"--sbatch {item}: there is an option for it, {option}.")
        if reason:
            raise RequestError(f"--sbatch {item}: refused, for {reason}.")
        found[name] = forms.text(f"--sbatch {name}", value) if equals else None
    return tuple(found.items())


def _meant(name: str, table: Mapping[str, str]) -> str | None:
    """The entry of a directive, also of a shortened name, which sbatch takes as well."""
    if name in table or name in _KNOWN_DIRECTIVES:
        return table.get(name)
    return next((entry for full, entry in table.items() if full.startswith(name)), None)


def _omitted(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        forms.matching("--omit-directive", name, forms.DIRECTIVE_NAME, "mem")
        if name in _NEEDED:
            raise RequestError(f"--omit-directive {name}: the run cannot do without it.")
        known = {*_OPTION_OF, *_KNOWN_DIRECTIVES}
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"--omit-directive {name}: there is no such directive.{hint}")
    return names
