"""`clusterddp fetch`: copies the results of a run from a cluster to this machine."""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import click

from clusterddp.cli.main import ON
from clusterddp.cli.options import SettingsCommand
from clusterddp.cli.runs import RUN, RUNS_DIR_OPTION
from clusterddp.errors import EXIT_DONE, RequestError
from clusterddp.status.find import find_run

_LEFT = ("checkpoints", "code", "__pycache__")
"""Not results, or large: fetched only by a PATTERN."""


@click.command(name="fetch", cls=SettingsCommand)
@click.argument("run", type=RUN)
@click.argument("pattern", nargs=-1)
@click.option(
    "--to",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    show_default="jobs/RUN",
    help="Copy into this directory.",
)
@click.option("--pack", is_flag=True, hidden=True)
@RUNS_DIR_OPTION
def command(run: str, pattern: tuple[str, ...], to: Path | None, pack: bool, runs_dir: Path) -> int:
    """Copy the files of RUN from the cluster of --on: logs, metrics and reports.

    Each PATTERN ('checkpoints/*', '*.html') chooses files by their path in the run's directory
    instead. Checkpoints and the code come only by a PATTERN. A file that is here is replaced.

    Exit codes: 0 copied, 1 the cluster was not reached, 2 no such run, or no file fits.
    """
    if pack:
        _pack(find_run(runs_dir, run).path, pattern)
        return EXIT_DONE
    on = click.get_current_context().meta.get(ON)
    if on is None:
        raise click.UsageError("fetch needs a cluster: clusterddp --on NAME fetch RUN.")
    target = to or Path("jobs") / os.fspath(run).strip("/").rpartition("/")[2]
    own = [sys.executable, "-m", "clusterddp", "--on", on, "fetch", "--pack", "--", run, *pattern]
    with subprocess.Popen(own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as asked:
        assert asked.stdout
        try:
            count = _unpack(asked.stdout, target)
        except tarfile.ReadError:  # it has said why
            count = 0
    if asked.returncode:
        return asked.returncode
    click.echo(f"{count} files in {target}")
    return EXIT_DONE


def _pack(folder: Path, patterns: Sequence[str]) -> None:
    """Write the chosen files as tar to stdout. Raises RequestError if there are none."""
    names = sorted(_chosen(folder, patterns))
    if not names:
        raise RequestError(
            f"no file of {folder.name} fits {', '.join(map(repr, patterns)) or 'the usual ones'}. "
            "Give another PATTERN. [CD1406]"
        )
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|gz") as archive:
        for name in names:
            archive.add(folder / name, name, recursive=False)


def _chosen(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        usual = name.split("/")[0] not in _LEFT and path.suffix != ".pyz"
        fits = any(fnmatchcase(name, each) for each in patterns) if patterns else usual
        if fits and path.is_file() and not path.is_symlink():
            yield name


def _unpack(stream: object, target: Path) -> int:
    """Write plain files below a directory. Raises RequestError for a path that leaves it."""
    count = 0
    with tarfile.open(fileobj=stream, mode="r|gz") as archive:  # type: ignore[call-overload]
        for member in archive:
            path = target / member.name
            if not path.resolve().is_relative_to(target.resolve()):
                raise RequestError(f"the cluster sent {member.name!r}, outside {target}. [CD1406]")
            content = archive.extractfile(member)
            if content is None:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            with content, draft.open("wb") as file:
                while chunk := content.read(1 << 20):
                    file.write(chunk)
            draft.replace(path)
            count += 1
    return count
