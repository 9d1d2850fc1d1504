"""Which files of a folder are a person's code, and what lies beside them.

Code is what git would keep. What a copy of it may be at most is held to here; copying is the work
of `snapshot`.
"""

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import RequestError
from clusterddp.submission import git

MOST_FILES = 10_000
"""Of what is made in the run directory, links too: a shared file system makes about 1,000 a s."""

_NEVER = frozenset({".git", "__pycache__"})
"""Neither copied nor linked: the copy is no work tree, and Python writes its own bytecode."""
_LINKED = frozenset({".venv", "node_modules"})
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""What venv and conda leave at the top of an environment, whatever its name."""
_DATASET_MARK = "MNIST/raw"
"""Path that `clusterddp data` and torchvision make in a folder of datasets, whatever its name."""
_LARGE_BYTES = 1_000_000
"""Files from here on are linked, the largest first, where all of them are more than the limit."""


@dataclass(frozen=True)
class Item:
    """A file or a symbolic link that is to be copied."""

    size: int
    mode: int
    modified_ns: int
    link: str | None
    """What the link says, as it stands in the tree; None for a file."""


@dataclass(frozen=True)
class Plan:
    """What a copy of a folder of code consists of."""

    tree: str
    items: dict[str, Item]
    left_out: frozenset[str]
    """Names below the tree that are neither copied nor linked."""
    commit: str
    large: tuple[str, ...] = ()
    """Files that are linked for their size, the largest first."""


def plan(tree: Path, limit_mb: float, leave_out: Collection[Path]) -> Plan:
    """Measure the tree; raises RequestError when it cannot be read or is over a limit."""
    top = os.path.abspath(tree)
    if not tree.is_dir():
        raise RequestError(f"{tree} is no folder: there is no code to copy.")
    left_out = _names_below(top, leave_out)
    folders = _Folders(top, left_out)
    listed, without_git = git.names(top)
    commit = ""
    if listed:
        commit = git.head(top)
        names: Iterable[str] = listed
    else:
        # Nothing at all: the folder is itself ignored by a repository around it, such as a home.
        without_git = without_git or "git ignores the whole folder"
        names = _walk(top, folders)
    items: dict[str, Item] = {}
    for name in _files(top, names, folders):
        item = _measure(top, name)
        if item:
            items[name] = item
        if len(items) > 10 * MOST_FILES:
            break  # a home directory, perhaps: enough is seen to name the largest
    large = _large(items, limit_mb)
    items = {name: item for name, item in items.items() if name not in large}
    _check_limits(top, items, limit_mb, without_git)
    for name, item in items.items():
        if item.link is None and not os.access(f"{top}/{name}", os.R_OK, effective_ids=True):
            raise _unreadable(top, name, "Permission denied")
    return Plan(top, items, left_out, commit, large)


def links(plan: Plan) -> dict[str, str]:
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
            if name in plan.items or name in folders or is_left_out(name, plan.left_out):
                continue
            if entry.is_symlink() or entry.is_dir() or entry.is_file():
                links[name] = f"{plan.tree}/{name}"
    if len(links) + len(plan.items) > MOST_FILES:
        full, count = Counter(name.rpartition("/")[0] for name in links).most_common(1)[0]
        raise RequestError(
            f"beside the code in {plan.tree} are {len(links):,} files and folders that git ignores "
            f"and that would be linked one by one, {count:,} of them in {shown(full or '.')}; at "
            f"most {MOST_FILES:,} are copied or linked. Move them to a folder that holds no code, "
            "or use --no-snapshot to run from the folder itself."
        )
    return links


def is_left_out(name: str, left_out: frozenset[str]) -> bool:
    """Whether the copy has nothing of that name, nor a link that leads there."""
    parts = name.split("/")
    return not _NEVER.isdisjoint(parts) or any(
        "/".join(parts[:depth]) in left_out for depth in range(1, len(parts) + 1)
    )


def shown(name: str) -> str:
    """A name in a line for a person: as it is, unless it would break or hide in the line."""
    return name if name.isprintable() and name == name.strip() and name else ascii(name)


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
                and not any(
                    os.path.lexists(f"{path}/{mark}")
                    for mark in (*_ENVIRONMENT_MARKS, _DATASET_MARK)
                )
            )
        return self._known[name]


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
            inner, _ = git.names(path)
            yield from _files(tree, (f"{name}/{file}" for file in inner if file != "./"), folders)


def _entries(tree: str, folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(f"{tree}/{folder}") as entries:
            return list(entries)
    except FileNotFoundError:
        return []  # removed since it was listed
    except OSError as error:
        raise _unreadable(tree, folder, error.strerror) from None


def _measure(tree: str, name: str) -> Item | None:
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
    return Item(size, found.st_mode & 0o777, found.st_mtime_ns, link)


def _large(items: Mapping[str, Item], limit_mb: float) -> tuple[str, ...]:
    """The fewest large files without which the others keep to the limit; none where that is not
    enough, or not needed.
    """
    surplus = sum(item.size for item in items.values()) - limit_mb * 1e6
    chosen = []
    for name in sorted(items, key=lambda name: (-items[name].size, name)):
        if surplus <= 0 or items[name].size < _LARGE_BYTES:
            break
        chosen.append(name)
        surplus -= items[name].size
    return tuple(chosen) if surplus <= 0 else ()


def _check_limits(tree: str, items: Mapping[str, Item], limit_mb: float, without_git: str) -> None:
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
        told.append(f"{shown(name)}{'/' * (name in children)} ({show(sums[name])})")
    return ", ".join(told)


def _is_real_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _unreadable(tree: str, name: str, problem: str | None) -> RequestError:
    return RequestError(
        f"cannot read {shown(name or '.')} of the code in {tree}: {problem}. Make it readable, "
        "list it in .gitignore, or use --no-snapshot to run from the folder itself."
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
