"""From the values of submit's options to a `JobSpec`: the only place where flags become types."""

import os
from pathlib import Path
from typing import Any

import click

from clusterddp.cli.options import config_from, naming_sources, source, typed_flags
from clusterddp.errors import OptionError
from clusterddp.launchers import SHIPPED, full_name
from clusterddp.request.options import Settings, sbatch_directives
from clusterddp.request.spec import JobSpec
from clusterddp.request.sweep import NO_SWEEP, Sweep
from clusterddp.request.train_config import TRAINING, TrainConfig
from clusterddp.submission.fields import (
    CONTAINER,
    IMAGES_PYTHON,
    check_new,
    container_fields,
    folder_of_template,
    request_of,
    resume_path,
)


def job_spec(ctx: click.Context, run_name: str, sweep: Sweep = NO_SWEEP) -> JobSpec:
    """Return the checked request; raises RequestError or click's UsageError for one that is not."""
    with naming_sources(ctx):
        spec = _job_spec(ctx, run_name, sweep)
        check_new(spec)
    return spec


def _job_spec(ctx: click.Context, run_name: str, sweep: Sweep) -> JobSpec:
    assert isinstance(ctx.obj, Settings)
    values, task_command = {**ctx.params}, ctx.meta["command"]
    for name in () if task_command else sweep.names:
        if name.replace("-", "_") in values and source(ctx, name.replace("-", "_")) == "flag":
            raise OptionError(
                f"--{name}",
                f" against --sweep {name}: leave the first out, or the second. [CD0103]",
            )
    train = None if task_command else _train_config(ctx)
    flags = typed_flags(ctx, (row.parameter for row in TRAINING)) if task_command else ""
    if flags:
        raise click.UsageError(
            f"{flags} belong{'' if ',' in flags else 's'} to the MNIST training, but a COMMAND is "
            "given; put the command's own options behind '--'.",
            ctx,
        )
    for name, value in values.items():
        if value == "" and source(ctx, name) == "flag":
            flag = f"--{name.replace('_', '-')}"
            raise OptionError(flag, " is empty; give a value, or leave it out. [CD0102]")
    return request_of(
        {name: value for name, value in values.items() if value is not None},
        run_name,
        train if train else task_command,
        environment=ctx.obj.environment,
        directives={} if ctx.meta.get("whole") else sbatch_directives(os.environ),
        container=container_fields(given_container(ctx)),
        template=_template(ctx),
        sweep=sweep,
    )


def given_container(ctx: click.Context) -> dict[str, Any]:
    """Return the given options of a container; without an image only those that were typed.

    A site's own stand for the runs that name an image. The tasks' Python is the image's.
    """
    given = {name: ctx.params[name] for name in CONTAINER if ctx.params[name]}
    if "container_image" not in given:
        return {name: value for name, value in given.items() if source(ctx, name) == "flag"}
    is_named = source(ctx, "python") != "default"
    return {**given, "python": ctx.params["python"] if is_named else IMAGES_PYTHON}


def template_folder(ctx: click.Context) -> Path | None:
    """Return the folder of a person's own templates; raises OptionError where it is not there."""
    return folder_of_template(ctx.params["template"], ctx.params["template_dir"])


def _template(ctx: click.Context) -> str:
    """Return the name of a template's file; raises OptionError where it could mean two."""
    value, folder = ctx.params["template"], ctx.params["template_dir"]
    if Path(value).name.startswith("_"):
        raise OptionError("--template", f" {value}: it is part of another one, not for itself.")
    if "/" in value:
        return Path(value).name
    is_own = folder and (Path(folder) / value).is_file()
    is_named = source(ctx, "template") != "default"
    if is_named and value in SHIPPED and not is_own and Path(value).is_file():
        raise OptionError(
            "--template",
            f" {value}: there is a file of that name here, and a shipped template. Use ./{value} "
            f"for the file, or {value.removesuffix('.sbatch.j2')} for the shipped one.",
        )
    return full_name(value, Path(folder) if folder else None)


def _train_config(ctx: click.Context) -> TrainConfig:
    data_dir, resume = ctx.params["data_dir"], ctx.params["resume"]
    paths = {"data_dir": os.path.abspath(data_dir) if data_dir else ""}
    if resume:
        paths["resume"] = resume_path(resume, ctx.params["output_root"])
    return config_from(ctx, **paths)
