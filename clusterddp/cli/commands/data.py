"""`clusterddp data`: fetches, checks, imports and generates datasets."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from clusterddp.cli.options import SettingsCommand
from clusterddp.data.mnist import RAW, DatasetInfo, check
from clusterddp.errors import RequestError
from clusterddp.request.train_config import DATASETS

F = TypeVar("F", bound=Callable[..., object])
_MAX_IMAGES = 1_000_000


def _data_dir(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not value:
        raise RequestError("--data-dir is empty. Name the directory of the dataset. [CD0102]")
    return value


_DATA_DIR_OPTION = click.option(
    "--data-dir",
    metavar="DIR",
    default="data",
    envvar="CLUSTERDDP_DATA_DIR",
    show_default=True,
    show_envvar=True,
    callback=_data_dir,
    help="Directory of datasets: DIR/MNIST/raw, DIR/synthetic/MNIST/raw.",
)


def _images_option(purpose: str, count: int) -> Callable[[F], F]:
    return click.option(
        f"--{purpose}-images",
        type=click.IntRange(1, _MAX_IMAGES),
        default=count,
        show_default=True,
        help=f"Images to {purpose} on.",
    )


class DataCommand(SettingsCommand):
    """A command whose options share names with the training but belong to no group of it."""

    titles = dict.fromkeys(("data_dir", "dataset", "seed"), "General")


@click.group()
def command() -> None:
    """Fetch, check, import or generate the dataset.

    Run it where you submit, with a directory that the compute nodes share: they often cannot reach
    the internet.

    \b
    clusterddp data fetch              # MNIST from its mirrors
    clusterddp data import mnist.tgz   # MNIST from files that you have
    clusterddp data generate           # rendered digits for --dataset synthetic
    clusterddp data check              # is the dataset complete?
    """


@command.command("fetch", cls=DataCommand)
@_DATA_DIR_OPTION
def fetch_command(data_dir: str) -> None:
    """Download MNIST and verify it.

    An existing dataset is verified and not changed. An interrupted or concurrent download never
    leaves an incomplete dataset.

    Exit codes: 0 the dataset is complete, 1 it cannot be downloaded or is damaged, 2 usage error.
    """
    from clusterddp.data.download import fetch

    _show(fetch(data_dir))


@command.command("check", cls=DataCommand)
@_DATA_DIR_OPTION
@click.option(
    "--dataset",
    type=click.Choice(DATASETS),
    default="mnist",
    show_default=True,
    help="Dataset to check.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
def check_command(data_dir: str, dataset: str, as_json: bool) -> None:
    """Check that a dataset is complete.

    Checks headers, sizes, labels and SHA-256 digests; changes nothing.

    Exit codes: 0 the dataset is complete, 1 it is missing, damaged or unreadable, 2 usage error.
    """
    info = check(dataset, data_dir, checksums=True)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(info), "root": str(info.root)}, indent=2))
    else:
        _show(info)


@command.command("import", cls=DataCommand)
@click.argument("source", metavar="FILE", type=click.Path(exists=True, path_type=Path))
@_DATA_DIR_OPTION
def import_command(source: Path, data_dir: str) -> None:
    """Import MNIST from a directory or tar archive.

    FILE is a directory, .tar, .tar.gz or .tgz that contains MNIST or another dataset in its format:
    four IDX files anywhere in it, gzipped or plain. They are checked and copied to DIR/MNIST/raw. A
    different dataset there is never overwritten.

    Exit codes: 0 the dataset is complete, 1 FILE has no dataset, or another one exists; 2 usage
    error.
    """
    from clusterddp.data.download import import_from

    _show(import_from(source, data_dir))


@command.command("generate", cls=DataCommand)
@_DATA_DIR_OPTION
@_images_option("train", 60_000)
@_images_option("test", 10_000)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="The same seed and counts give the same bytes on every machine.",
)
def generate_command(data_dir: str, train_images: int, test_images: int, seed: int) -> None:
    """Render digits for --dataset synthetic.

    They have MNIST's format and need no network. They are easier than MNIST's: use them to try a
    cluster, not to compare models. An identical existing dataset is not changed.

    Exit codes: 0 the dataset is complete, 1 it cannot be written, or another one exists; 2 usage
    error.
    """
    from clusterddp.data.synthetic import generate

    _show(generate(data_dir, train_images=train_images, test_images=test_images, seed=seed))


def _show(info: DatasetInfo) -> None:
    reference = "MNIST as published" if info.published else "the dataset's own SHA256SUMS"
    checksums = f"verified, {reference}" if info.checksums_verified else "not compared"
    click.echo(f"{info.name} is complete at {info.root / RAW}")
    click.echo(f"  train images  {info.train_images:,}")
    click.echo(f"  test images   {info.test_images:,}")
    click.echo(f"  bytes         {info.bytes:,}")
    click.echo(f"  checksums     {checksums}")
