"""Fetches MNIST from its mirrors, or imports it from a directory or archive."""

import gzip
import http.client
import io
import lzma
import os
import socket
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import IO

from clusterddp import log
from clusterddp.data import mnist
from clusterddp.data.mnist import DatasetInfo
from clusterddp.errors import DataError

# For a mirror that does not answer: torchvision itself would wait two minutes per attempt.
_NETWORK_TIMEOUT_SECONDS = 30
# More than any file in MNIST's format; a small archive could unpack to any size.
_MAX_FILE_BYTES = 1 << 30
_UNREADABLE = (OSError, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError)


def fetch(data_dir: str) -> DatasetInfo:
    """Download MNIST from torchvision's mirrors, verify it and put it into place.

    Keeps a complete set that already exists. Raises DataError, which lists alternatives, if the
    mirrors cannot be reached, the download is not MNIST, or the directory cannot be written.
    """
    root = mnist.dataset_root("mnist", data_dir)
    if not mnist.missing_files(root):
        log.info(f"{root / mnist.RAW} already contains the set; checking it")
        return mnist.check("mnist", data_dir, checksums=True)
    others = mnist.list_sources("mnist", data_dir, may_fetch=False)
    with mnist.draft_beside(root) as draft:
        log.info(f"fetching MNIST into {root / mnist.RAW}")
        _download(draft, others)
        for archive in (draft / mnist.RAW).glob("*.gz"):
            archive.unlink()
        try:
            mnist.check_at("mnist", draft, checksums=True)
        except DataError as fault:
            raise DataError(
                f"the downloaded files are not MNIST: {fault} Try again, or:\n{others} [CD0603]"
            ) from None
        mnist.write_sums(draft / mnist.RAW, "MNIST as published")
        mnist.put_into_place(draft, root)
    return mnist.check("mnist", data_dir, checksums=True)


def _download(draft: Path, others: str) -> None:
    """Download MNIST with torchvision; others: the other ways to get it."""
    try:
        from torchvision import datasets
    except ImportError as error:
        raise DataError(
            f"fetching needs torchvision, which cannot be imported: {error}. Install it "
            f"(python -m pip install torchvision), or:\n{others} [CD0803]"
        ) from None
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_NETWORK_TIMEOUT_SECONDS)
    try:
        # torchvision draws progress bars even if stderr is not a terminal.
        drawn = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        with nullcontext() if drawn else redirect_stderr(io.StringIO()):
            datasets.MNIST(root=str(draft), download=True)
    except (RuntimeError, OSError, http.client.HTTPException) as error:
        reason = " ".join(str(error).split()) or repr(error)
        raise DataError(
            f"MNIST could not be downloaded: {reason}. Compute nodes often have no internet "
            f"access. Fetch it on another machine, or:\n{others} [CD0603]"
        ) from None
    finally:
        socket.setdefaulttimeout(patience)


def import_from(source: Path, data_dir: str) -> DatasetInfo:
    """Import the four IDX files from anywhere in a directory or tar archive.

    They may be gzipped, and named `train-images.idx3-ubyte` or `train-images-idx3-ubyte`.
    Accepts sets other than the published MNIST, and records their digests. Raises DataError if
    files are missing, ambiguous or damaged, or if another set already exists.
    """
    root = mnist.dataset_root("mnist", data_dir)
    with mnist.draft_beside(root) as draft:
        raw = draft / mnist.RAW
        try:
            with _list_entries(source) as entries:
                for name, entry in _choose(entries).items():
                    log.info(f"reading {entry.path}")
                    _copy(entry, raw / name)
            mnist.inspect(raw)
            mnist.check_labels(raw)
        except DataError as fault:
            message = f"nothing was imported from {source}: {fault}"
            raise DataError(message, code=fault.code) from None
        published = all(mnist.digest(raw / name) == mnist.PUBLISHED[name] for name in mnist.FILES)
        if not published:
            log.info("this is not the published MNIST; its digests are recorded with it")
        mnist.write_sums(raw, "MNIST as published" if published else "imported from elsewhere")
        mnist.put_into_place(draft, root)
    return mnist.check("mnist", data_dir, checksums=True)


@dataclass(frozen=True)
class _Entry:
    """One of the four files in some form: its place in the source, and a function to open it."""

    path: PurePath
    open: Callable[[], IO[bytes] | None]
    """Returns None only for files that are not regular; those are never listed."""


@contextmanager
def _list_entries(source: Path) -> Iterator[list[_Entry]]:
    """List the files of the source with known names; archive members are only ever streamed."""
    if os.path.isdir(source):  # noqa: PTH112 -- Path's raises without permission
        entries = []
        for place, folders, names in os.walk(source, onerror=_refuse):
            folders[:] = sorted(name for name in folders if not name.startswith(mnist.DRAFT_PREFIX))
            for path in (Path(place, name) for name in sorted(names)):
                # os.path.isfile does not raise, unlike Path's; without it a pipe would block.
                if mnist.standard_name(path.name) and os.path.isfile(path):  # noqa: PTH113
                    entries.append(_Entry(path, _opener(path)))
        yield entries
        return
    try:
        archive = tarfile.open(source)  # noqa: SIM115 -- closed below; its errors are handled separately
        members = archive.getmembers()
    except _UNREADABLE as error:
        what = f"a readable tar archive ({_words(error)})"
        if isinstance(error, tarfile.ReadError):
            what = "a tar archive"
        raise DataError(
            f"it is neither a directory nor {what}. Give a directory, or a .tar, .tar.gz or .tgz "
            "file; unpack other archives first. [CD0604]"
        ) from None
    with archive:
        # Only regular files: a link or device could lead out of the archive.
        yield [
            _Entry(PurePosixPath(member.name), partial(archive.extractfile, member))
            for member in members
            if member.isreg() and mnist.standard_name(PurePosixPath(member.name).name)
        ]


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {_words(error)}. [CD0607]")


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    return lambda: path.open("rb")


def _choose(entries: list[_Entry]) -> dict[str, _Entry]:
    """Choose one entry for each of the four files; raise DataError if the choice is ambiguous.

    Prefers a directory with all four files over scattered files, and plain over gzipped files.
    """
    folders: dict[PurePath, dict[str, _Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.path.suffix != ".gz"):
        name = str(mnist.standard_name(entry.path.name))
        folders.setdefault(entry.path.parent, {})[name] = entry  # the plain one comes last
    complete = {place: each for place, each in folders.items() if len(each) == len(mnist.FILES)}
    if len(complete) > 1:
        places = ", ".join(sorted(str(place) for place in complete))
        raise DataError(
            f"it contains several sets, in {places}. Name the directory of one of them. [CD0604]"
        )
    if complete:
        return next(iter(complete.values()))
    spread = {
        name: [each[name] for each in folders.values() if name in each] for name in mnist.FILES
    }
    if missing := [name for name, same in spread.items() if not same]:
        raise DataError(
            f"no {', no '.join(missing)} in it (nor with .gz or .idx in the name). "
            "All four IDX files of one set are needed. [CD0604]"
        )
    for name, same in spread.items():
        if len(same) > 1:
            places = ", ".join(sorted(str(entry.path) for entry in same))
            raise DataError(f"it contains {name} more than once: {places}. Keep one. [CD0604]")
    return {name: same[0] for name, same in spread.items()}


def _copy(entry: _Entry, target: Path) -> None:
    """Stream one file into the draft, unpacked; raises DataError for an unreadable one."""
    with target.open("wb") as file:
        try:
            stream = entry.open()
        except _UNREADABLE as error:
            raise DataError(f"{entry.path} cannot be read: {_words(error)}. [CD0607]") from None
        assert stream
        with stream:
            plain = gzip.GzipFile(fileobj=stream) if entry.path.suffix == ".gz" else stream
            while True:
                try:
                    block = plain.read(1 << 20)
                except _UNREADABLE as error:
                    raise DataError(f"{entry.path} is damaged: {_words(error)}. [CD0604]") from None
                if not block:
                    return
                file.write(block)
                if file.tell() > _MAX_FILE_BYTES:
                    raise DataError(
                        f"{entry.path} unpacks to over 1 GiB, more than any set has. [CD0604]"
                    )


def _words(error: BaseException) -> str:
    """Return the message of an exception without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or repr(error)
