"""A copy of the person's code as it was at submission, and whether the code has changed since.

People edit while their jobs wait, so every start of a run uses the copy. What is copied is what
git would keep; data, environments and build outputs are linked beside it. Where the copy lies and
who runs from it is the caller's.
"""

import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from clusterddp.errors import RequestError

LIMIT_MB = 50.0
"""Code is smaller, even with notebooks; more is data or checkpoints that git was not told of."""
MOST_FILES = 10_000
"""Of what is made in the run directory, links too: a shared file system makes about 1,000 a s."""
GIT_SECONDS = 60.0
"""Bound on one call of git, which walks the folders that it does not ignore."""

_NEVER = frozenset({".git", "__pycache__"})
"""Neither copied nor linked: the copy is no work tree, and Python writes its own bytecode."""
_LINKED = frozenset({".venv", "node_modules"})
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""What venv and conda leave at the top of an environment, whatever its name."""
# They would make git list another repository, as inside one of git's own hooks.
_GIT_PLACES = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
})  # fmt: skip
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """What the code consisted of; file names hold undecodable bytes as os.fsdecode gives them."""

    files: int
    """How many there are, symbolic links included."""
    bytes: int
    digests: dict[str, str]
    """Name below the tree, with slashes, to the SHA-256 of the content (a link: of its text)."""
    commit: str
    """The hash of git's HEAD; empty without a commit. The files may differ from it."""

    def to_json(self) -> str:
        """As a record; plain ASCII, so that every file name survives."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, content: str) -> "Snapshot":
        """Read a record back; raises RequestError when it is none."""
        try:
            fields: dict[str, Any] = json.loads(content)
            return cls(
                files=int(fields["files"]),
                bytes=int(fields["bytes"]),
                digests={str(name): str(digest) for name, digest in fields["digests"].items()},
                commit=str(fields["commit"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"this is no record of a code snapshot: {error!r}.") from None


def take(
    tree: Path, target: Path, *, limit_mb: float = LIMIT_MB, leave_out: Collection[Path] = ()
) -> Snapshot:
    """Copy the code in a folder to a new, private folder.

    tree: in a git work tree, at its top or below, the files that git tracks or does not ignore,
        those of submodules and repositories within included; elsewhere all files. Never
        __pycache__, environments or node_modules.
    target: must not exist, its parent must. Where a folder was copied, what was passed over in it
        is linked by its absolute path, so that `data/train` still leads somewhere.
    limit_mb: most that the files may have together, in 10^6 bytes.
    leave_out: absolute paths that are neither copied nor linked, such as the folder of the runs.

    Raises RequestError when the tree is over the limits or a file cannot be read (nothing is
    written then), and when the copy fails, of which nothing is left.
    """
    plan = _plan(tree, limit_mb, leave_out)
    links = _links(plan)
    try:
        target.mkdir(mode=0o700)
    except FileExistsError:
        raise RequestError(
            f"{target} exists already; a code snapshot is taken into a new folder."
        ) from None
    except OSError as error:
        raise RequestError(f"cannot make {target} for the code: {error.strerror}.") from None
    try:
        return _copy(plan, links, str(target))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def fingerprint(
    tree: Path, *, limit_mb: float = LIMIT_MB, leave_out: Collection[Path] = ()
) -> Snapshot | None:
    """What `take` would return, without a copy.

    None when nothing can be compared: the tree is gone, over the limits, or cannot be read.
    """
    try:
        plan = _plan(tree, limit_mb, leave_out)
    except RequestError:
        return None
    digests, size = {}, 0
    for name, item in plan.items.items():
        if item.link is not None:
            digests[name] = _link_digest(item.link)
            continue
        try:
            with open(f"{plan.tree}/{name}", "rb") as file:  # noqa: PTH123
                digests[name], length = _digest(file)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        size += length
    return Snapshot(files=len(digests), bytes=size, digests=digests, commit=plan.commit)


def difference(before: Snapshot, after: Snapshot) -> list[str]:
    """What became of the files of `before`, a line each, for a person to read.

    New ones are passed over: a run leaves its own results in the tree.
    """
    lines = []
    for name in before.digests:
        if name not in after.digests:
            lines.append(f"removed {_shown(name)}")
        elif before.digests[name] != after.digests[name]:
            lines.append(f"changed {_shown(name)}")
    return sorted(lines)


@dataclass(frozen=True)
class _Item:
    """A file or a symbolic link that is to be copied."""

    size: int
    mode: int
    modified_ns: int
    link: str | None
    """What the link says, as it stands in the tree; None for a file."""


@dataclass(frozen=True)
class _Plan:
    tree: str
    items: dict[str, _Item]
    left_out: frozenset[str]
    """Names below the tree that are neither copied nor linked."""
    commit: str


class _Folders:
    """Which folders of a tree are code, asked once each: real ones, no environments."""

    def __init__(self, tree: str, left_out: frozenset[str]) -> None:
        self._tree = tree
        self.left_out = left_out
        self._known = {"": True}

    def is_code(self, name: str) -> bool:
        if name not in self._known:
            parent, _, last = name.rpartition("/")
            path = f"{self._tree}/{name}"
            self._known[name] = (
                last not in _NEVER | _LINKED
                and name not in self.left_out
                and self.is_code(parent)
                # git goes on listing what it tracks in a folder that has become a link; written
                # through the copied link it would land in the original.
                and _is_real_folder(path)
                and not any(os.path.lexists(f"{path}/{mark}") for mark in _ENVIRONMENT_MARKS)
            )
        return self._known[name]


def _plan(tree: Path, limit_mb: float, leave_out: Collection[Path]) -> _Plan:
    """Measure the tree; raises RequestError when it cannot be read or is over a limit."""
    top = os.path.abspath(tree)
    if not tree.is_dir():
        raise RequestError(f"{tree} is no folder: there is no code to copy.")
    left_out = _names_below(top, leave_out)
    folders = _Folders(top, left_out)
    listed, without_git = _git_names(top)
    commit = ""
    if listed:
        commit = _git(top, "rev-parse", "--verify", "--quiet", "HEAD")[0].decode().strip()
        names: Iterable[str] = listed
    else:
        # Nothing at all: the folder is itself ignored by a repository around it, such as a home.
        without_git = without_git or "git ignores the whole folder"
        names = _walk(top, folders)
    items: dict[str, _Item] = {}
    for name in _files(top, names, folders):
        item = _measure(top, name)
        if item:
            items[name] = item
        if len(items) > 10 * MOST_FILES:
            break  # a home directory, perhaps: enough is seen to name the largest
    _check_limits(top, items, limit_mb, without_git)
    for name, item in items.items():
        if item.link is None and not os.access(f"{top}/{name}", os.R_OK, effective_ids=True):
            raise _unreadable(top, name, "Permission denied")
    return _Plan(top, items, left_out, commit)


def _names_below(tree: str, paths: Collection[Path]) -> frozenset[str]:
    """The paths that lie in the tree, relative to it, whether typed through links or not."""
    names = set()
    for path in paths:
        for base, full in (
            (tree, os.path.abspath(path)),
            (os.path.realpath(tree), os.path.realpath(path)),
        ):
            name = os.path.relpath(full, base)
            if name not in (".", "..") and not name.startswith("../"):
                names.add(name)
    return frozenset(names)


def _git_names(folder: str) -> tuple[list[str], str]:
    """What git keeps in a folder, and why git could not be asked (else empty).

    A repository in it is one name that ends in a slash, a submodule one without.
    """
    # -z: the names as they are, neither quoted nor ended by a newline that may be their own.
    arguments = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed, problem = _git(folder, *arguments)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name], problem


def _git(folder: str, *arguments: str) -> tuple[bytes, str]:
    """What git prints in a folder, or nothing and its words."""
    environ = {name: value for name, value in os.environ.items() if name not in _GIT_PLACES}
    environ["GIT_OPTIONAL_LOCKS"] = "0"  # only looks: no commit of the person's has to wait
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except OSError as error:
        return b"", f"git: {error.strerror}"
    except subprocess.TimeoutExpired:
        raise RequestError(
            f"git {arguments[0]} gave no answer within {GIT_SECONDS:g} s in {folder}. "
            "Try again, or use --no-snapshot to run from the folder itself."
        ) from None
    if answer.returncode:
        words = answer.stderr.decode(errors="replace").strip().splitlines()
        return b"", words[0] if words else f"git exited with {answer.returncode}"
    return answer.stdout, ""


def _walk(tree: str, folders: _Folders) -> Iterator[str]:
    """Every file and link in the folders that are code."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for entry in _entries(tree, folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield name
            elif folders.is_code(name):
                waiting.append(name)


def _entries(tree: str, folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(f"{tree}/{folder}") as entries:
            return list(entries)
    except FileNotFoundError:
        return []  # removed since it was listed
    except OSError as error:
        raise _unreadable(tree, folder, error.strerror) from None


def _files(tree: str, names: Iterable[str], folders: _Folders) -> Iterator[str]:
    """The names that are code, with what is in a repository within in place of its own name."""
    for listed in names:
        name = listed.rstrip("/")
        parent, _, last = name.rpartition("/")
        if last in _NEVER or name in folders.left_out or not folders.is_code(parent):
            continue
        path = f"{tree}/{name}"
        if not _is_real_folder(path):
            yield name
        elif folders.is_code(name) and os.path.lexists(f"{path}/.git"):
            # One that git cannot list has no names here, so that it is linked as a whole; for one
            # with a damaged .git folder the repository around answers, with the folder itself.
            inner, _ = _git_names(path)
            yield from _files(tree, (f"{name}/{file}" for file in inner if file != "./"), folders)


def _measure(tree: str, name: str) -> _Item | None:
    """The item of that name; None when it has been removed, or is a socket, pipe or device."""
    path = f"{tree}/{name}"
    try:
        found = os.lstat(path)
        # Not Path.readlink, which tidies what the link says.
        link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None  # noqa: PTH115
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(tree, name, error.strerror) from None
    if link is None and not stat.S_ISREG(found.st_mode):
        return None
    size = found.st_size if link is None else 0
    return _Item(size, found.st_mode & 0o777, found.st_mtime_ns, link)


def _check_limits(tree: str, items: Mapping[str, _Item], limit_mb: float, without_git: str) -> None:
    total = sum(item.size for item in items.values())
    ignore = "list what is no code in .gitignore (it is then linked, not copied)"
    if without_git:
        ignore += f", which was not used here ({without_git})"
    if len(items) > MOST_FILES:
        largest = _largest(dict.fromkeys(items, 1), lambda count: f"{count:,} files")
        at_least = "at least " if len(items) > 10 * MOST_FILES else ""
        raise RequestError(
            f"the code in {tree} has {at_least}{len(items):,} files; a copy of it is taken for "
            f"each run, of at most {MOST_FILES:,}. Most are in {largest}. Submit from the folder "
            f"of the code, {ignore}, or use --no-snapshot to run from the folder itself."
        )
    if total > limit_mb * 1e6:
        largest = _largest({name: item.size for name, item in items.items()}, _megabytes)
        raise RequestError(
            f"the code in {tree} has {_megabytes(total)} in {len(items):,} files; a copy of it is "
            f"taken for each run, of at most {limit_mb:g} MB. The largest: {largest}. Raise "
            f"--snapshot-limit MB, {ignore}, or use --no-snapshot to run from the folder itself."
        )


def _largest(weights: Mapping[str, int], show: Callable[[int], str]) -> str:
    """The three heaviest files or folders, each as deep as one place holds most of it."""
    sums: Counter[str] = Counter()
    children = defaultdict(set)
    for name, weight in weights.items():
        below = name
        while below:
            parent = below.rpartition("/")[0]
            children[parent].add(below)
            sums[below] += weight
            below = parent
    told = []
    for heaviest in sorted(children[""], key=lambda name: (-sums[name], name))[:3]:
        name = heaviest
        while name in children:
            deeper = max(children[name], key=lambda child: sums[child])
            if sums[deeper] < 0.8 * sums[name]:
                break
            name = deeper
        told.append(f"{_shown(name)}{'/' * (name in children)} ({show(sums[name])})")
    return ", ".join(told)


def _links(plan: _Plan) -> dict[str, str]:
    """What was passed over in the folders that are copied, to where the copy links it.

    Not only what git ignores: an empty folder too, in which the code may mean to write.
    """
    folders = {""}
    for name in plan.items:
        folder = name.rpartition("/")[0]
        while folder not in folders:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    links = {}
    for folder in folders:
        for entry in _entries(plan.tree, folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if name in plan.items or name in folders or _is_left_out(name, plan.left_out):
                continue
            if entry.is_symlink() or entry.is_dir() or entry.is_file():
                links[name] = f"{plan.tree}/{name}"
    if len(links) + len(plan.items) > MOST_FILES:
        full, count = Counter(name.rpartition("/")[0] for name in links).most_common(1)[0]
        raise RequestError(
            f"beside the code in {plan.tree} are {len(links):,} files and folders that git ignores "
            f"and that would be linked one by one, {count:,} of them in {_shown(full or '.')}; at "
            f"most {MOST_FILES:,} are copied or linked. Move them to a folder that holds no code, "
            "or use --no-snapshot to run from the folder itself."
        )
    return links


def _is_left_out(name: str, left_out: frozenset[str]) -> bool:
    """Whether the copy has nothing of that name, nor a link that leads there."""
    parts = name.split("/")
    return not _NEVER.isdisjoint(parts) or any(
        "/".join(parts[:depth]) in left_out for depth in range(1, len(parts) + 1)
    )


def _copy(plan: _Plan, links: Mapping[str, str], target: str) -> Snapshot:
    """Fill the folder; what is digested is what was written, also when someone is editing."""
    digests, size, name = {}, 0, ""
    try:
        for name in {name.rpartition("/")[0] for name in plan.items}:
            os.makedirs(f"{target}/{name}", exist_ok=True)  # noqa: PTH103
        for name, item in plan.items.items():
            if item.link is not None:
                continue
            try:
                source = open(f"{plan.tree}/{name}", "rb")  # noqa: PTH123, SIM115
            except FileNotFoundError:
                continue  # removed since, as an editor's temporary file is
            with source:
                digests[name], written = _copy_file(source, f"{target}/{name}", item)
                size += written
        # Links come last, so that no file can be written through one.
        for name, item in plan.items.items():
            if item.link is not None:
                digests[name] = _link_digest(item.link)
                Path(f"{target}/{name}").symlink_to(_carried_link(plan, name, item.link))
        for name, leads_to in links.items():
            Path(f"{target}/{name}").symlink_to(leads_to)
    except OSError as error:
        raise RequestError(
            f"cannot copy {_shown(name or '.')} of {plan.tree} to {target}: {error.strerror}. "
            "Nothing of the copy is left. Make room there or mend the file, or use --no-snapshot "
            "to run from the folder itself."
        ) from None
    return Snapshot(files=len(digests), bytes=size, digests=digests, commit=plan.commit)


def _copy_file(source: BinaryIO, target: str, item: _Item) -> tuple[str, int]:
    """The digest and the size of what was copied."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fchmod(descriptor, item.mode)
        # make and ninja would build anew what is linked, were its sources younger.
        os.utime(descriptor, ns=(item.modified_ns, item.modified_ns))
    return digest.hexdigest(), size


def _carried_link(plan: _Plan, name: str, link: str) -> str:
    """What the copied link says: made absolute where the copy has not what it leads to."""
    folder = os.path.dirname(name)  # noqa: PTH120
    leads_to = os.path.normpath(os.path.join(folder, link))  # noqa: PTH118
    if os.path.isabs(link):  # noqa: PTH117
        return link
    if leads_to.split("/")[0] == ".." or _is_left_out(leads_to, plan.left_out):
        return os.path.join(plan.tree, folder, link)  # noqa: PTH118
    return link


def _digest(source: BinaryIO) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def _link_digest(link: str) -> str:
    return hashlib.sha256(b"symbolic link to " + os.fsencode(link)).hexdigest()


def _is_real_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _unreadable(tree: str, name: str, problem: str | None) -> RequestError:
    return RequestError(
        f"cannot read {_shown(name or '.')} of the code in {tree}: {problem}. Make it readable, "
        "list it in .gitignore, or use --no-snapshot to run from the folder itself."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _shown(name: str) -> str:
    """A name in a line for a person: as it is, unless it would break or hide in the line."""
    return name if name.isprintable() and name == name.strip() and name else ascii(name)
