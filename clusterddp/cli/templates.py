"""`clusterddp templates`: list, show and copy out the shipped sbatch templates."""

from pathlib import Path

import click

from clusterddp.errors import RequestError

SHIPPED = {
    "ddp.sbatch.j2": "one srun task per rank (the default)",
    "torchrun.sbatch.j2": "one torchrun agent per node, which starts that node's ranks",
}


def full_name(template: str) -> str:
    """`torchrun` for `torchrun.sbatch.j2`; any other name as it is."""
    return next((name for name in SHIPPED if name.split(".")[0] == template), template)


NAME = click.Choice(list(SHIPPED))


@click.group()
def command() -> None:
    """List, show or copy the sbatch templates.

    A template of your own can start with {% extends "shipped/ddp.sbatch.j2" %} and replace single
    blocks (directives, environment, setup, launch, teardown); use it with --template FILE.
    """


@command.command("list")
def list_templates() -> None:
    """List the shipped templates."""
    for name, summary in SHIPPED.items():
        click.echo(f"{name:22} {summary}")


@command.command()
@click.argument("name", type=NAME)
def show(name: str) -> None:
    """Print a shipped template."""
    click.echo(_read(name), nl=False)


@command.command()
@click.argument("name", type=NAME)
@click.argument("target", type=click.Path(path_type=Path), default=Path())
def copy(name: str, target: Path) -> None:
    """Copy a shipped template to TARGET, a folder or a new file, to change it."""
    path = target / name if target.is_dir() else target
    try:
        with path.open("x") as file:
            file.write(_read(name))
    except FileExistsError:
        raise RequestError(f"{path} exists already; it is left as it is.") from None
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}.") from None
    click.echo(path)


def _read(name: str) -> str:
    from clusterddp.rendering import shipped_folder

    return (shipped_folder() / name).read_text()
