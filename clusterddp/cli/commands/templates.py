"""`clusterddp templates`: lists, shows and copies the shipped sbatch templates."""

import os
import shlex
from pathlib import Path

import click

from clusterddp.errors import RequestError
from clusterddp.launchers import SHIPPED, full_name
from clusterddp.slurm import forms


class ShippedName(click.Choice):  # type: ignore[type-arg] # not generic before click 8.2
    """Name of a shipped template: its file name or the short form, `torchrun`."""

    def __init__(self) -> None:
        super().__init__(list(SHIPPED))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(super().convert(full_name(value), param, ctx))


NAME = ShippedName()


@click.group()
def command() -> None:
    """List, show or copy the sbatch templates.

    Your template can start with {% extends "shipped/ddp.sbatch.j2" %} and replace single blocks
    (directives, environment, setup, launch, teardown); use it with --template FILE.
    """


@command.command("list")
def list_templates() -> None:
    """List the shipped templates.

    Exit codes: 0 listed.
    """
    for name, summary in SHIPPED.items():
        click.echo(f"{name:22} {summary}")


@command.command()
@click.argument("name", type=NAME)
def show(name: str) -> None:
    """Print a shipped template.

    Exit codes: 0 printed, 2 no such template.
    """
    click.echo(_read(name), nl=False)


@command.command()
@click.argument("name", type=NAME)
@click.argument("target", type=click.Path(path_type=Path), default=Path())
def copy(name: str, target: Path) -> None:
    """Copy a template to a directory or file.

    TARGET is a directory or a new file; the default is the current directory.

    Exit codes: 0 copied, 2 no such template, or TARGET exists or cannot be written.
    """
    path = target / name if target.is_dir() else target
    forms.refuse_carried("TARGET", os.path.abspath(path), os.environ)
    try:
        with path.open("x") as file:
            file.write(_read(name))
    except FileExistsError:
        raise RequestError(f"{path} already exists. Name another file. [CD0108]") from None
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}. [CD0108]") from None
    click.echo(path)
    given = str(path) if "/" in str(path) else f"./{path}"  # a bare name means a shipped template
    click.echo(f"use it with: --template {shlex.quote(given)}", err=True)


def _read(name: str) -> str:
    from clusterddp.launchers.sbatch import shipped_folder

    return (shipped_folder() / name).read_text()
