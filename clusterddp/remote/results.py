"""Files of a run, packed on the cluster and unpacked on the user's machine.

Either end may be newer or hostile: nothing is written outside the directory, and no link.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.remote import session

_LEFT = ("checkpoints", "code", "__pycache__")
"""Not results, or large: fetched only by a pattern."""
_MARK, _DRAFT = ".fetched-from", ".fetch-"
"""Names here: a file with the cluster's name, so that no run of another place is replaced; files
that are not whole yet."""


def fetch(
    on: str, run: str, patterns: Sequence[str], options: Sequence[str], to: Path | None
) -> tuple[int, int, Path]:
    """Copy files of a run to a directory, or to jobs/RUN. options: further ones for the cluster.

    Returns the exit code of the cluster's command, which has said why if it is not 0, the number of
    files and the directory. Raises RequestError for what cannot be written here.
    """
    own = session.command(on, ["fetch", "--pack", *options, "--", run, *patterns])
    count, folder = 0, to or Path()
    with subprocess.Popen(own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as asked:
        try:
            with tarfile.open(fileobj=asked.stdout, mode="r|gz") as archive:
                folder = to or _default(archive.pax_headers.get("run", ""), on)
                for member in archive:
                    count += _unpack(archive, member, folder)
        except (tarfile.TarError, EOFError) as error:  # it ended early; most often, it says why
            while asked.stdout and asked.stdout.read(1 << 20):
                pass  # it would wait for a reader, and this process for it
            if not asked.wait():
                raise RequestError(
                    f"{on} sent no archive ({error}). Does its login shell print? [CD1406]"
                ) from None
        except OSError as error:
            raise RequestError(
                f"cannot write {error.filename or folder}: {error.strerror}. Use --to DIR. [CD0108]"
            ) from None
    return asked.returncode, count, folder


def pack(folder: Path, patterns: Sequence[str]) -> None:
    """Write the chosen files of a run as tar.gz to stdout. Raises RequestError without one."""
    names = sorted(_chosen(folder, patterns))
    if not names:
        raise RequestError(
            f"no file of {folder.name} fits {', '.join(map(repr, patterns)) or 'the usual ones'}. "
            "Give another PATTERN. [CD1406]"
        )
    with tarfile.open(
        fileobj=sys.stdout.buffer,
        mode="w|gz",
        dereference=True,  # else a second name of a file becomes a link to the first
        pax_headers={"run": folder.resolve().name},
    ) as archive:
        for name in names:
            try:
                file = (folder / name).open("rb")
            except FileNotFoundError:  # the run continues
                continue
            except PermissionError:  # a container's root wrote it
                log.info(f"{name} is left out: you may not read it")
                continue
            with file:
                archive.addfile(archive.gettarinfo(arcname=name, fileobj=file), file)


def _chosen(folder: Path, patterns: Sequence[str]) -> Iterator[str]:
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        usual = name.split("/")[0] not in _LEFT and path.suffix != ".pyz"
        fits = any(fnmatchcase(name, each) for each in patterns) if patterns else usual
        is_own = path.name == _MARK or path.name.startswith(_DRAFT)
        if fits and not is_own and path.is_file() and not path.is_symlink():
            yield name


def _default(run: str, on: str) -> Path:
    """Return jobs/RUN, marked. Raises RequestError if it is there and not from this cluster."""
    folder = Path("jobs", run)
    if run in ("", "..") or folder.name != run:
        raise RequestError(f"{on} sent {run!r} as the name of a run. Use --to DIR. [CD1406]")
    mark = folder / _MARK
    if folder.exists() and not (mark.is_file() and mark.read_text() == on):
        raise RequestError(
            f"{folder} is here already, and not fetched from {on}. Use --to DIR. [CD0108]"
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(on)
    return folder


def _unpack(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> bool:
    """Write a plain file whole or not at all. Raises RequestError for a path that leaves."""
    path = folder / member.name
    inside = path.resolve().is_relative_to(folder.resolve())
    if not member.isreg() or not inside or path.name == _MARK:
        raise RequestError(f"the cluster sent {member.name!r}, no file in {folder}. [CD1406]")
    content = archive.extractfile(member)
    assert content, "a plain file"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{_DRAFT}{os.getpid()}")
    try:
        with content, draft.open("wb") as file:
            while chunk := content.read(1 << 20):
                file.write(chunk)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return True
