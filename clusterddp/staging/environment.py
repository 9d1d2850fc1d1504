"""A Python environment as files: what belongs to it, its digest, and one archive of it.

An environment is a venv, a virtualenv or a conda environment. If its base interpreter is outside
/usr, which each node has as its own, the base belongs to it: the interpreter, its libraries and
headers. Links from one to the other stay links. Links out of both become copies of their files.
"""

import hashlib
import io
import json
import os
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterddp import formatting, log
from clusterddp.errors import ClusterDDPError

ENV, BASE = "env", "base"
"""Directories of an archive: the environment, and the part that is copied of its base."""
MANIFEST = "manifest.json"
"""Last member of an archive: the original directories, and the names of all files."""
_FORMAT = 1
_NODES_OWN = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys")
_BASE_PARTS = ("bin", "include", "lib", "lib64")
_CACHES_OF_CONDA = ("pkgs", "envs")
"""Directories of a conda installation that its base environment does not use."""
_PYTHON_SECONDS = 120.0
_PROGRESS_SECONDS = 15.0
_ASK = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.path]))"


class StagingError(ClusterDDPError):
    """Raised if an environment cannot be packed or unpacked."""

    code = "CD0321"


@dataclass(frozen=True)
class Entry:
    """A file, directory or link of an environment."""

    name: str
    """Path in the archive."""
    source: str
    status: os.stat_result
    link: str = ""
    """Target of a link."""

    @property
    def is_file(self) -> bool:
        """True for a file, whose content is copied."""
        return not self.link and stat.S_ISREG(self.status.st_mode)


@dataclass(frozen=True)
class Environment:
    """Content of a copied environment."""

    roots: dict[str, str]
    """Original directory of ENV and, if it is copied, of BASE."""
    typed: dict[str, str]
    """The same directories as the interpreter names them, perhaps through links."""
    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.status.st_size for each in self.entries if each.is_file)

    @property
    def digest(self) -> str:
        """Digest of names, sizes, times and links, the same as long as no file changes.

        Without bytecode, which each import can write.
        """
        lines = [json.dumps([_FORMAT, self.roots])]
        for each in self.entries:
            if "/__pycache__" in each.name:
                continue
            status = each.status
            changed = (status.st_size, status.st_mtime_ns) if each.is_file else ()
            lines.append(json.dumps([each.name, status.st_mode, *changed, each.link]))
        return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]

    def __str__(self) -> str:
        """Describe it: `/shared/venv and /opt/python (36,012 files, 4.8 GB)`."""
        count = f"{len(self.entries):,} files, {formatting.size(self.size)}"
        return f"{' and '.join(self.roots.values())} ({count})"


def find(python: str, runs: str = "") -> Environment:
    """List the environment of an interpreter, which is started. Raises StagingError.

    runs: directory of runs, which is left out.
    """
    typed_prefix, typed_base, path = _ask(python)
    prefix, base = map(os.path.realpath, (typed_prefix, typed_base))
    if _is_below(prefix, _NODES_OWN):
        raise StagingError(
            f"--stage-env: {python} is in {prefix}, which each node has as its own, so nothing "
            "can be copied. Name the Python of a venv or a conda environment with --python, or "
            "use --stage-env off. [CD0321]"
        )
    roots = {ENV: prefix}
    if base != prefix and not _is_below(base, _NODES_OWN):
        roots[BASE] = base
    bases = (base, typed_base)
    shares = any(_is_below(part, bases) and part.endswith("-packages") for part in path)
    try:
        unused = (*(f"{prefix}/{name}" for name in _CACHES_OF_CONDA), runs)
        entries = [*_walk(roots, ENV, prefix, unused)]
        for part in _BASE_PARTS if BASE in roots else ():
            skipped = () if shares else ("site-packages", "test")
            name, top = f"{BASE}/{part}", f"{base}/{part}"
            if os.path.islink(top) and _is_below(os.path.realpath(top), (base,)):  # noqa: PTH114
                entries.append(_link(roots, name, top))
            elif os.path.isdir(top):  # noqa: PTH112 -- as below
                entries += _walk(roots, name, top, (runs,), skipped)
    except OSError as error:
        raise _unreadable(error) from None
    typed = {ENV: typed_prefix, BASE: typed_base}
    return Environment(roots, typed, tuple(sorted(entries, key=lambda each: each.name)))


def pack(environment: Environment, archive: Path, is_over: Callable[[], bool]) -> bool:
    """Write an environment to a tar file, atomically. Return False, and write nothing, if over.

    is_over: returns whether the job is ending; asked for each file. Raises StagingError.
    """
    draft = archive.with_name(f".{archive.name}.{os.uname().nodename}.{os.getpid()}")
    log.info(f"stage: packing {environment}")
    began = said = time.monotonic()
    done, total = 0, formatting.size(environment.size)
    names: list[str] = []
    try:
        with draft.open("wb") as output:
            with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as file:
                for each in environment.entries:
                    if is_over():
                        return False
                    with suppress(FileNotFoundError):  # removed meanwhile
                        _add(file, each)
                        names.append(each.name)
                    done += each.status.st_size if each.is_file else 0
                    if time.monotonic() - said > _PROGRESS_SECONDS:
                        said = time.monotonic()
                        log.info(f"stage: packed {formatting.size(done)} of {total}")
                _add_manifest(file, environment, names)
            output.flush()
            os.fsync(output.fileno())
        draft.replace(archive)
    except OSError as error:
        raise _unreadable(error) from None
    finally:
        draft.unlink(missing_ok=True)
    log.info(f"stage: packed into {archive} in {time.monotonic() - began:.0f} s")
    return True


def _ask(python: str) -> tuple[str, str, list[str]]:
    """Return an interpreter's prefix, the prefix of its base, and its path."""
    try:
        answer = subprocess.run(
            [python, "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PYTHON_SECONDS,
            check=True,
        ).stdout
        prefix, base, path = json.loads(answer.strip().rpartition("\n")[2])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        words = str(getattr(error, "stderr", "") or error).strip().rpartition("\n")[2]
        raise StagingError(
            f"--stage-env: {python} does not say where its environment is: {words}. Try: {python} "
            f"-c 'import sys; print(sys.prefix)' [CD0321]"
        ) from None
    return prefix, base, path


def _walk(
    roots: dict[str, str],
    name: str,
    top: str,
    skipped: tuple[str, ...],
    below: tuple[str, ...] = (),
) -> Iterator[Entry]:
    """Yield the entries of a directory.

    skipped: paths that are left out. below: names that are left out in directories of `lib`, such
    as lib/python3.11. A file that vanishes is left out. Raises OSError.
    """
    yield Entry(name, top, os.stat(top))  # noqa: PTH116 -- Path would take half of the time
    with os.scandir(top) as items:
        for item in sorted(items, key=lambda each: each.name):
            if item.path in skipped:
                continue
            with suppress(FileNotFoundError):
                inner = f"{name}/{item.name}"
                if item.is_symlink():
                    yield _link(roots, inner, item.path)
                elif item.is_dir():
                    within = skipped
                    if name in (f"{BASE}/lib", f"{BASE}/lib64"):
                        within += tuple(f"{item.path}/{each}" for each in below)
                    yield from _walk(roots, inner, item.path, within, below)
                elif item.is_file():
                    yield Entry(inner, item.path, item.stat())


def _link(roots: dict[str, str], name: str, path: str) -> Entry:
    """Return a link within the environment, or a copy of the file that a link out of it names."""
    target = os.readlink(path)  # noqa: PTH115 -- it normalizes
    lexical = os.path.normpath(os.path.join(os.path.dirname(path), target))  # noqa: PTH118, PTH120
    real = os.path.realpath(path)
    for place in (lexical, real):
        for part, root in roots.items():
            inside = f"{part}{place.removeprefix(root)}"
            is_copied = part == ENV or inside.partition("/")[2].split("/")[0] in _BASE_PARTS
            if _is_below(place, (root,)) and is_copied:
                within = os.path.relpath(inside, os.path.dirname(name))  # noqa: PTH120
                return Entry(name, path, os.lstat(path), within)
    if os.path.isfile(real) and not _is_below(real, _NODES_OWN):  # noqa: PTH113
        return Entry(name, path, os.stat(real))  # noqa: PTH116
    return Entry(name, path, os.lstat(path), lexical)


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _unreadable(error: OSError) -> StagingError:
    where = f"{error.filename}: " if error.filename else ""
    return StagingError(
        f"--stage-env: the environment cannot be packed: {where}{error.strerror or error}. Free "
        "space in the runs directory, and make sure that you can read each file. [CD0321]"
    )


def _add_manifest(file: tarfile.TarFile, environment: Environment, names: list[str]) -> None:
    content = {
        "roots": environment.roots,
        "typed": environment.typed,
        "names": names,
        "size": environment.size,
    }
    text = json.dumps(content).encode(errors="surrogateescape")
    member = tarfile.TarInfo(MANIFEST)
    member.size = len(text)
    file.addfile(member, io.BytesIO(text))


def _add(file: tarfile.TarFile, entry: Entry) -> None:
    """Add an entry; its time in whole seconds, to which Python compares that in bytecode."""
    status, member = entry.status, tarfile.TarInfo(entry.name)
    member.mode, member.mtime = status.st_mode & 0o777 | 0o400, int(status.st_mtime)
    if entry.is_file:
        with open(entry.source, "rb") as content:  # noqa: PTH123 -- as above
            member.size = os.fstat(content.fileno()).st_size
            file.addfile(member, content)
        return
    member.type = tarfile.SYMTYPE if entry.link else tarfile.DIRTYPE
    member.linkname = entry.link
    if not entry.link:
        member.mode |= 0o700
    file.addfile(member)
