"""The copy of an environment on a node: unpacked once, used by later jobs, and adapted to its path.

    DIR/clusterddp-UID/          private to the user
        lock                     held by the one process that unpacks or removes
        DIGEST/env, DIGEST/base  a copy; its manifest.json is the archive's
        clusterddp-…/            a copy of a run's clusterddp, with its bytecode

A copy that is not used for an hour is removed before another one is unpacked.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterddp import formatting
from clusterddp.staging.environment import ENV, MANIFEST, StagingError

_UNUSED_SECONDS = 3600.0
_BLOCK_BYTES = 4096
_PYTHON_SECONDS = 120.0
_MAX_SCRIPT_BYTES = 1 << 20
_DRAFT = ".draft-"


def copy_path(folder: Path, digest: str) -> Path:
    """Return the directory of a copy in a node's directory."""
    return folder / f"clusterddp-{os.getuid()}" / digest


def has_copy(path: Path) -> bool:
    """Return whether a copy is complete: cleaners of /tmp remove files that are not read."""
    try:
        names = json.loads((path / MANIFEST).read_text())["names"]
    except (OSError, ValueError, KeyError):
        return False
    return all(os.path.lexists(path / name) for name in names)


def free_bytes(folder: Path) -> int:
    """Return the space in a directory that this user can fill, in bytes. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def forbids_programs(folder: Path) -> bool:
    """Return whether a file system is mounted noexec: neither programs nor libraries start there.

    Raises OSError.
    """
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def needed_bytes(size: int, files: int) -> int:
    """Return the space that a copy takes: each file fills its last block, half of it on average."""
    return size + files * _BLOCK_BYTES // 2


def bundle_path(home: Path, bundle: Path) -> Path:
    """Return the copy of a run's clusterddp in the user's directory on a node."""
    return home / bundle.stem / bundle.name


def unpack(archive: Path, path: Path, needed: int, bundle: Path | None = None) -> bool:
    """Unpack an archive to a copy, unless it is there. Return whether it was unpacked.

    needed: bytes that must be free. bundle: the run's clusterddp, which is copied as well.
    Raises StagingError, and then leaves nothing incomplete.
    """
    try:
        with _locked(path.parent):
            if bundle:
                _copy_bundle(bundle, bundle_path(path.parent, bundle))
            if has_copy(path):
                os.utime(path)  # it is in use from now on
                return False
            if forbids_programs(path.parent):
                raise StagingError(
                    f"{path.parents[1]} is mounted noexec, so no program can start there. Choose "
                    "another directory: --stage-env DIR [CD0322]"
                )
            _remove_others(path)
            free = free_bytes(path.parent)
            if free < needed:
                raise StagingError(
                    f"{path.parents[1]} has {formatting.size(free)} free, and the environment "
                    f"needs {formatting.size(needed)}. Free space there, or choose another "
                    "directory: --stage-env DIR [CD0322]"
                )
            _unpack(archive, path)
            return True
    except (OSError, tarfile.TarError) as error:
        raise StagingError(
            f"the environment cannot be unpacked in {path.parents[1]}: "
            f"{getattr(error, 'strerror', '') or error}. Free space there, or choose another "
            "directory: --stage-env DIR [CD0322]"
        ) from None


def make_private(folder: Path, instead: str) -> None:
    """Create a directory of the user's unless it exists.

    instead: option for another one. Raises StagingError if others can write it, and OSError.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StagingError(
            f"{folder} is not a directory that only you can write, so its files cannot be trusted. "
            f"Remove it, or choose another directory: {instead}"
        )


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Hold the lock of the user's directory, which is created if it is missing. Raises OSError."""
    try:
        make_private(home, "--stage-env DIR [CD0322]")
    except FileNotFoundError:
        raise StagingError(
            f"{home.parent} does not exist. Choose a directory that every node has: "
            "--stage-env DIR [CD0322]"
        ) from None
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _copy_bundle(bundle: Path, path: Path) -> None:
    """Copy a run's clusterddp and its bytecode. Raises OSError."""
    if path.is_file() and path.stat().st_size == bundle.stat().st_size:
        os.utime(path.parent)
        return
    shutil.rmtree(path.parent, ignore_errors=True)
    draft = path.parent.with_name(f"{_DRAFT}{bundle.stem}")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "__pycache__").mkdir(parents=True, mode=0o700)
    for file in (bundle, *bundle.parent.glob(f"__pycache__/{bundle.stem}.*")):
        shutil.copy(file, draft / file.relative_to(bundle.parent))
    draft.rename(path.parent)


def _remove_others(path: Path) -> None:
    """Remove drafts, and copies that are not in use, also an incomplete one of this digest."""
    for other in path.parent.iterdir():
        is_draft = other.name.startswith(_DRAFT)
        if other.is_dir() and (is_draft or not _is_used(other)):
            shutil.rmtree(other, ignore_errors=True)


def _is_used(copy: Path) -> bool:
    """Return whether a process of this user has a copy in its environment, or may soon have it."""
    if time.time() - copy.stat().st_mtime < _UNUSED_SECONDS:
        return True
    mark = f"{copy}/".encode()
    for process in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or gone
            if mark in process.read_bytes():
                return True
    return False


def _unpack(archive: Path, path: Path) -> None:
    """Unpack an archive to a copy, or add what is missing there. Raises OSError."""
    draft = path.with_name(f"{_DRAFT}{path.name}")
    is_new = not path.exists()
    try:
        draft.mkdir(mode=0o700)
        with tarfile.open(archive) as file:
            # The archive is the user's own; Python 3.14 refuses absolute links by default.
            file.extraction_filter = lambda member, _: member
            file.extractall(draft)
        manifest = json.loads((draft / MANIFEST).read_text())
        _adapt(draft, path, manifest)
        if not has_copy(draft):
            raise tarfile.ReadError(f"{archive} is incomplete")
        path.mkdir(mode=0o700, exist_ok=True)
        for name in (*manifest["roots"], *manifest["names"]):
            if not os.path.lexists(path / name):
                (draft / name).rename(path / name)
        _try_python(path)
        (draft / MANIFEST).replace(path / MANIFEST)  # complete from now on
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if is_new and not (path / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)


def _try_python(path: Path) -> None:
    """Raise StagingError if the Python of a copy does not start or lacks its own libraries."""
    argv = [str(path / ENV / "bin" / "python"), "-c", "import zlib"]
    try:
        subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PYTHON_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        words = str(getattr(error, "stderr", "") or error).strip().rpartition("\n")[2]
        raise StagingError(
            f"the copy of Python in {path} does not start: {words}. Use --stage-env off, or a "
            "--python that can be moved, for example of conda or uv. [CD0322]"
        ) from None


def _adapt(draft: Path, path: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the paths of the original in files that Python and the kernel read.

    These are the first lines of scripts, pyvenv.cfg and .pth files. Other files, for example those
    in which conda records its prefix, still name the original.
    """
    moved = {}
    for part, root in manifest["roots"].items():
        for old in {root, manifest["typed"][part]}:
            moved[os.fsencode(f"{old}/")] = os.fsencode(f"{path / part}/")
    scripts = [*draft.glob("*/bin/*"), *draft.glob("*/condabin/*")]
    settings = [draft / ENV / "pyvenv.cfg", *draft.glob("*/lib/python*/site-packages/*.pth")]
    for file in (*scripts, *settings):
        if file.is_symlink() or not file.is_file() or file.stat().st_size > _MAX_SCRIPT_BYTES:
            continue
        content = file.read_bytes()
        if file in settings:
            fresh = _replaced(content, moved)
        elif content.startswith(b"#!"):
            # The second line starts Python if the first would be too long for the kernel.
            first, *rest = content.split(b"\n", 2)
            lines = [_replaced(first, moved), *(_replaced(line, moved) for line in rest[:1])]
            fresh = b"\n".join([*lines, *rest[1:]])
        else:
            continue
        if fresh != content:
            mode = file.stat().st_mode
            file.chmod(mode | 0o200)
            file.write_bytes(fresh)
            file.chmod(mode)


def _replaced(content: bytes, moved: Mapping[bytes, bytes]) -> bytes:
    for old, new in moved.items():
        content = content.replace(old, new)
    return content
