"""`clusterddp data`: make sure of the dataset before a job waits in the queue for it."""

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
_MOST_IMAGES = 1_000_000


def _data_dir(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not value:
        raise RequestError("--data-dir is empty; name the folder of the dataset. [CD0102]")
    return value


_DATA_DIR_OPTION = click.option(
    "--data-dir",
    metavar="FOLDER",
    default="data",
    envvar="CLUSTERDDP_DATA_DIR",
    show_default=True,
    show_envvar=True,
    callback=_data_dir,
    help="Where datasets are kept: FOLDER/MNIST/raw, FOLDER/synthetic/MNIST/raw.",
)


def _images_option(purpose: str, count: int) -> Callable[[F], F]:
    return click.option(
        f"--{purpose}-images",
        type=click.IntRange(1, _MOST_IMAGES),
        default=count,
        show_default=True,
        help=f"Images to {purpose} on.",
    )


class DataCommand(SettingsCommand):
    """A command whose options have the names of a training's, and are none of it."""

    titles = dict.fromkeys(("data_dir", "dataset", "seed"), "General")


@click.group()
def command() -> None:
    """Fetch, check, import or generate the dataset.

    Do it where you submit, into a folder that the compute nodes share: they often cannot reach
    the internet, and a job that waited for hours should not end for want of a file.

    \b
    clusterddp data fetch              # MNIST from its mirrors
    clusterddp data import mnist.tgz   # MNIST from files that you have
    clusterddp data generate         # digits rendered here, for --dataset synthetic
    clusterddp data check              # whether a set is whole
    """


@command.command("fetch", cls=DataCommand)
@_DATA_DIR_OPTION
def fetch_command(data_dir: str) -> None:
    """Download MNIST, verify it, and put it into place.

    A whole set that is there already is verified and left as it is. An interrupted or
    concurrent fetch never leaves half a set.

    Exit codes: 0 the set is whole and in place, 1 it cannot be had or is damaged, 2 a wrong
    request.
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
    help="Which set to check.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
def check_command(data_dir: str, dataset: str, as_json: bool) -> None:
    """Check that a dataset is whole.

    Compares headers, sizes, labels and SHA-256 digests; changes nothing. The message says what to
    do.

    Exit codes: 0 the set can be trained on, 1 it is missing, damaged or unreadable, 2 a wrong
    request.
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
    """Take MNIST out of a folder or tar archive.

    FILE is a folder, .tar, .tar.gz or .tgz, and may hold another set of MNIST's form. The four
    IDX files may lie anywhere in it, gzipped or plain. They are checked and copied to
    FOLDER/MNIST/raw; a different set that is there already is never overwritten.

    Exit codes: 0 the set is whole and in place, 1 FILE has none, or another one is in its place, 2
    usage error.
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
def synthesise_command(data_dir: str, train_images: int, test_images: int, seed: int) -> None:
    """Render digits for --dataset synthetic.

    They come in MNIST's form and need no network. They are easier than MNIST's: use them to try
    a cluster out, not to compare models. The same set that is there already is left as it is.

    Exit codes: 0 the set is in place, 1 it cannot be written, or another one is in its place, 2 a
    wrong request.
    """
    from clusterddp.data.synthetic import generate

    _show(generate(data_dir, train_images=train_images, test_images=test_images, seed=seed))


def _show(info: DatasetInfo) -> None:
    against = "MNIST as published" if info.published else "the set's own SHA256SUMS"
    checksums = f"verified, {against}" if info.checksums_verified else "not compared"
    click.echo(f"{info.name} is whole at {info.root / RAW}")
    click.echo(f"  train images  {info.train_images:,}")
    click.echo(f"  test images   {info.test_images:,}")
    click.echo(f"  bytes         {info.bytes:,}")
    click.echo(f"  checksums     {checksums}")
