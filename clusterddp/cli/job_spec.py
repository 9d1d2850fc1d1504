"""From the values of submit's options to a `JobSpec`: the only place where flags become types."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from clusterddp.cli import settings
from clusterddp.cli.options import config_from
from clusterddp.errors import OptionError, RequestError
from clusterddp.launchers import SHIPPED, full_name
from clusterddp.request.options import COUNT, NEEDED_DIRECTIVES, PASSED_ON, REPLACED
from clusterddp.request.site import Site
from clusterddp.request.spec import DIRECTIVES, JobSpec, Resources
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.slurm import forms

# Directives of sbatch(1) that --sbatch and --omit-directive can name, and no shortened form.
_KNOWN_DIRECTIVES = {
    *DIRECTIVES,
    *REPLACED,
    *PASSED_ON.values(),
    "chdir",
    "comment",
    "gres",
    "nice",
}


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
    given = {name: value for name, value in options.items() if value is not None}
    resources = _resources(given, train)
    environment, passed = _environment(ctx.obj, options["env"])
    template = options["template"]
    if Path(template).name.startswith("_"):
        raise OptionError("--template", f" {template}: it is part of another one, not for itself.")
    values = {
        **fields_given(JobSpec, given),
        "python": _python(options["python"]),
        "template": _template(ctx, template, options["template_dir"]),
        "sbatch": _directives(options["sbatch"], resources),
        "omit_directives": _omitted(options["omit_directive"]),
        "srun_args": tuple(
            w for line in options["srun_args"] for w in forms.words("--srun-args", line)
        ),
        "modules": options["module"],
        "launch_prefix": forms.words("--launch-prefix", options["launch_prefix"] or ""),
        "signal": "" if options["signal"] == "none" else options["signal"],
    }
    spec = JobSpec(
        run_name=run_name,
        run_dir=f"{os.path.abspath(options['output_root'])}/{run_name}",
        resources=resources,
        train=train,
        command=task_command,
        environment=environment,
        pass_environment=passed,
        **values,
    )
    spec.refuse_launcher()
    return spec


def fields_given(record: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the given values that are fields of a request's dataclass."""
    names = {field.name for field in dataclasses.fields(record)}
    return {name: value for name, value in given.items() if name in names}


def _resources(given: Mapping[str, Any], train: TrainConfig | None) -> Resources:
    fields = fields_given(Resources, given)
    fields["gpu_type"], fields["gpus_per_node"] = forms.gpu_count(
        "--gpus-per-node", given["gpus_per_node"]
    )
    if "tasks_per_node" in given:
        COUNT.check("--tasks-per-node", given["tasks_per_node"])
    elif train and train.strategy != "ddp":
        fields["tasks_per_node"] = 1  # a single task drives all GPUs of its node
    return Resources(**fields)


def template_folder(options: Mapping[str, Any]) -> Path | None:
    """The folder of a person's own templates; it must be there when it was named."""
    path = Path(options["template"])
    if "/" in options["template"] and not path.is_file():
        raise OptionError("--template", f": {options['template']!r} is no file.")
    if "/" in options["template"] or (path.is_file() and path.name not in SHIPPED):
        return path.parent
    if options["template_dir"] is None:
        return None
    folder = Path(options["template_dir"])
    if not folder.is_dir():
        raise OptionError("--template-dir", f": {options['template_dir']!r} is no folder.")
    return folder


def _template(ctx: click.Context, value: str, folder: str | None) -> str:
    """The name of a template's file in its folder; raises RequestError where two are meant."""
    if "/" in value:
        return Path(value).name
    is_own = folder and (Path(folder) / value).is_file()
    named = settings.source(ctx, "template") != "default"
    if named and value in SHIPPED and not is_own and Path(value).is_file():
        raise OptionError(
            "--template",
            f" {value}: there is a file of that name here, and a shipped template. Use "
            f"./{value} for the file, or {value.removesuffix('.sbatch.j2')} for the shipped one.",
        )
    return full_name(value, Path(folder) if folder else None)


def _python(value: str) -> str:
    """A relative path is meant from here, a bare name from the PATH of the tasks."""
    return os.path.abspath(value) if "/" in value else value


def _train_config(ctx: click.Context, options: dict[str, Any]) -> TrainConfig:
    config = dict(options)
    config["data_dir"] = os.path.abspath(config["data_dir"]) if config["data_dir"] else ""
    if config["resume"]:
        config["resume"] = _resume_path(config["resume"], options["output_root"])
    return config_from(config, ctx)


def _resume_path(value: str, output_root: str) -> str:
    """A checkpoint file, a run's directory, or the name of a run below the output root."""
    for path in (Path(value), Path(output_root) / value):
        if path.exists():
            return os.path.abspath(path)
    raise OptionError(
        "--resume",
        f": {value!r} is neither a checkpoint, nor a run's directory, nor the name of a "
        f"run below {output_root}.",
    )


def _refuse_training_options(ctx: click.Context) -> None:
    given = [row.flag for row in TRAINING if settings.source(ctx, row.parameter) == "flag"]
    if given:
        raise click.UsageError(
            f"{', '.join(given)} belong{'' if given[1:] else 's'} to the MNIST training, but a "
            "COMMAND is given; put the command's own options behind '--'.",
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
            raise OptionError(
                "--env", f" {name}: is not set here; set it, or use --env {name}=VALUE."
            )
        values.pop(name, None)
        values[name] = value if equals else None
    environment = tuple((n, v) for n, v in values.items() if v is not None)
    passed = tuple(n for n, v in values.items() if v is None)
    if passed:
        from clusterddp.slurm.submission_env import submission_environment

        arriving = submission_environment(os.environ)
        for name in passed:
            if name in os.environ and name not in arriving:
                raise OptionError(
                    "--env",
                    f" {name}: a surrounding job's {name} is kept out of submissions, so it "
                    f"cannot be passed by name. Use --env {name}=VALUE.",
                )
    return environment, passed


def _directives(items: tuple[str, ...], resources: Resources) -> tuple[tuple[str, str | None], ...]:
    """--sbatch over the submitter's SBATCH_*, of which those that an option contradicts are out."""
    directives = settings.sbatch_directives(os.environ)
    for name, contradicted in (
        ("mem-per-cpu", resources.mem),
        ("mem-per-gpu", resources.mem),
        ("cpus-per-gpu", resources.cpus_per_task),
    ):
        if contradicted:
            directives.pop(name, None)
    for item in items:
        key, equals, value = item.partition("=")
        name = key.removeprefix("--")
        forms.DIRECTIVE.check("--sbatch", name)
        instead = _instead(name)
        if name == "gres" and "gpu" in value:
            instead = "--gpus-per-node with --gpu-request gres"
        if instead:
            raise OptionError("--sbatch", f" {item}: refused; use {instead}.")
        directives[name] = forms.text(f"--sbatch {name}", value) if equals else None
    return tuple(directives.items())


def _instead(name: str) -> str:
    """Return what is typed in place of a directive, also of a shortened one, which sbatch takes."""
    if name not in _KNOWN_DIRECTIVES:
        name = next((full for full in (*DIRECTIVES, *REPLACED) if full.startswith(name)), name)
    return DIRECTIVES[name].flag if name in DIRECTIVES else REPLACED.get(name, "")


def _omitted(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        forms.DIRECTIVE.check("--omit-directive", name)
        problem = "the run cannot do without it" if name in NEEDED_DIRECTIVES else ""
        if name not in _KNOWN_DIRECTIVES:
            import difflib

            near = difflib.get_close_matches(name, _KNOWN_DIRECTIVES, n=1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            problem = f"there is no such directive{hint}"
        if problem:
            raise OptionError(
                "--omit-directive", f" {name}: {problem}{'' if problem[-1] == '?' else '.'}"
            )
    return names
