"""The work tree that a command on a cluster needs: listed here, stored there by its content.

`FOLDER/trees/DIGEST` is a tree and `DIGEST.json` its manifest. Only files that no former tree has
are carried. rsync is not used: it fails where a login shell prints, and may be absent.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from clusterddp.errors import RequestError
from clusterddp.files import write_atomically
from clusterddp.submission import snapshot

IGNORE_FILE = ".clusterddpignore"
_KEPT, _KEPT_SECONDS, _DRAFT_SECONDS = 10, 7 * 86400.0, 86400.0
"""Newest trees that stay, how long the others do after their last use, and what is unfinished."""
Entry = list[object]
"""In a manifest: digest and mode of a file, or the target of a link."""


@dataclass(frozen=True)
class Tree:
    """A work tree here; names are bytes, as latin-1."""

    top: Path
    workdir: str
    """The current directory in it."""
    commit: str
    manifest: dict[str, Entry] = field(repr=False)

    @property
    def digest(self) -> str:
        """Return the digest of names, modes and contents."""
        return hashlib.sha256(self.content).hexdigest()[:24]

    @property
    def content(self) -> bytes:
        """Return the manifest as bytes."""
        return json.dumps(self.manifest, sort_keys=True).encode()

    def files(self, wanted: Iterable[str]) -> Iterator[bytes]:
        """Yield the contents of files by digest. Raises RequestError if one has changed."""
        names = {str(entry[0]): name for name, entry in self.manifest.items() if len(entry) == 2}
        for digest in wanted:
            path = self.top / os.fsdecode(names[digest].encode("latin-1"))
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != digest:
                raise RequestError(f"{path} changed while it was carried. Try again. [CD0312]")
            yield content


def of(folder: Path, limit_mb: float) -> Tree:
    """List the work tree around a directory, less what .clusterddpignore names.

    Raises RequestError for a tree above the limits, or a link that leads out of it.
    """
    top = snapshot.top_of(folder)
    workdir = folder.relative_to(top).as_posix()
    ignored = _ignored(top / IGNORE_FILE)
    plan = snapshot.plan_of(top, limit_mb, (), "" if workdir == "." else workdir, skip=ignored)
    if plan.large:
        raise RequestError(
            f"{snapshot.printable(plan.large[0])} in {top} makes the code larger than {limit_mb:g} "
            f"MB. List it in .gitignore or {IGNORE_FILE}, or raise --snapshot-limit MB. [CD0311]"
        )
    manifest: dict[str, Entry] = {}
    for name, item in plan.items.items():
        entry: Entry
        if item.link:
            entry = [_link(top, name, item.link)]
        else:
            try:
                with (top / name).open("rb") as file:
                    entry = [snapshot.digest_of(file)[0], item.mode]
            except FileNotFoundError:
                continue
        manifest[os.fsencode(name).decode("latin-1")] = entry
    return Tree(top, workdir, plan.commit, manifest)


def _ignored(path: Path) -> Callable[[str], bool]:
    """Return whether a line of the file is a shell pattern of a path, or of a directory above."""
    lines = path.read_text(errors="surrogateescape").splitlines() if path.is_file() else []
    patterns = [line.strip().strip("/") for line in lines if line.strip() and line[0] != "#"]

    def is_ignored(name: str) -> bool:
        parts = name.split("/")
        paths = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        return any(fnmatchcase(each, p) for p in patterns for each in (*paths, *parts))

    return is_ignored


def _link(top: Path, name: str, link: str) -> str:
    """Return a link's target, relative and in the tree. Raises RequestError otherwise."""
    folder = os.path.dirname(name)  # noqa: PTH120 -- text, as git has it
    inside = os.path.relpath(link, top) if link.startswith("/") else os.path.join(folder, link)  # noqa: PTH118
    inside = os.path.normpath(inside)
    if inside.split("/")[0] == "..":
        raise RequestError(
            f"{snapshot.printable(name)} in {top} is a link to {snapshot.printable(link)}, which "
            f"is not carried to the cluster. List it in .gitignore or {IGNORE_FILE}. [CD1404]"
        )
    return os.fsencode(os.path.relpath(inside, folder or ".")).decode("latin-1")


def receive(trees: Path, digest: str, manifest: bytes, ask: Callable[[list[str]], None],
            answer: Callable[[], bytes]) -> int:  # fmt: skip
    """Store a tree there, from former trees and from what `answer` gives for `ask`.

    Returns the number of files that were carried. Raises RequestError for a manifest with a path
    that leaves the tree, OSError if it cannot be written.
    """
    entries: dict[str, Entry] = json.loads(manifest)
    place, stored = trees / digest, trees / f"{digest}.json"
    if place.is_dir() and not stored.is_file():  # in this order: another session writes it first
        _discard(place)  # a part, left by a removal
    draft = Path(tempfile.mkdtemp(prefix=f"{digest}.", dir=trees))
    try:
        paths = {_path(draft, name): entry for name, entry in entries.items()}
        for folder in {path.parent for path in paths}:
            folder.mkdir(parents=True, exist_ok=True)
        files = {path: entry for path, entry in paths.items() if len(entry) == 2}
        missing = _copy_known(trees, files)
        ask([*missing])
        for there in missing.values():
            content = answer()
            for path in there:
                _write(path, content, files[path])
        for path, entry in paths.items():  # last, so that no file is written through one
            if len(entry) == 1:
                path.symlink_to(os.fsdecode(str(entry[0]).encode("latin-1")))
        write_atomically(stored, manifest)  # another session may be reading it
        with contextlib.suppress(OSError):  # another session was first
            draft.rename(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _remove_old(trees)
    return len(missing)


def _path(draft: Path, name: str) -> Path:
    raw = os.fsdecode(name.encode("latin-1"))
    if raw.startswith("/") or {"..", ""} & {*raw.split("/")}:
        raise RequestError(f"{raw!r} leaves the tree. [CD1404]")
    return draft / raw


def _copy_known(trees: Path, files: dict[Path, Entry]) -> dict[str, list[Path]]:
    """Copy files that a former tree has, intact; map the other digests to their paths."""
    known: dict[object, Path] = {}
    for _, manifest in _by_age(trees.glob("*.json"))[-3:]:
        with contextlib.suppress(OSError, ValueError):
            for name, entry in json.loads(manifest.read_bytes()).items():
                known[entry[0]] = _path(manifest.with_suffix(""), name)
    missing: dict[str, list[Path]] = {}
    for path, entry in files.items():
        content = None
        with contextlib.suppress(KeyError, OSError):
            content = known[entry[0]].read_bytes()
        if content is None or hashlib.sha256(content).hexdigest() != entry[0]:
            missing.setdefault(str(entry[0]), []).append(path)
        else:
            _write(path, content, entry)
    return missing


def _write(path: Path, content: bytes, entry: Entry) -> None:
    path.write_bytes(content)
    path.chmod(int(str(entry[1])))


def _remove_old(trees: Path) -> None:
    """Remove trees that were not used lately; runs have their own copies."""
    now = time.time()
    for used, manifest in _by_age(trees.glob("*.json"))[:-_KEPT]:
        if used < now - _KEPT_SECONDS:
            _discard(manifest.with_suffix(""))
            manifest.unlink(missing_ok=True)
    for made, path in _by_age(trees.glob("*.*")):
        if path.suffix != ".json" and made < now - _DRAFT_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _discard(tree: Path) -> None:
    """Remove a tree; at once for others, who would use a part of it as the whole."""
    with contextlib.suppress(OSError):  # another session does it
        old = tree.rename(tree.with_name(f"{tree.name}.old.{os.getpid()}"))
        shutil.rmtree(old, ignore_errors=True)


def _by_age(paths: Iterable[Path]) -> list[tuple[float, Path]]:
    """Return the time of change of each path that is still there, the oldest first."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    return sorted(found)
