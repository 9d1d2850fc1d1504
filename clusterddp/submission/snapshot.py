"""Copies of the user's code at submission, and their comparison with later code.

Users edit code while their jobs wait, so every attempt of a run uses the copy. It contains the
files that git would track; data, environments and build outputs are linked. The caller decides
where the copy is stored and what runs from it.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from clusterddp import formatting, log
from clusterddp.errors import RequestError, coded
from clusterddp.files import load, read_file, write_atomically
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir, describe_output_folder, run_folders
from clusterddp.slurm import forms

LIMIT_MB = 50.0
"""Code is smaller, even with notebooks; more means data or checkpoints missing in .gitignore."""
MAX_FILES = 10_000
"""Maximum of files and links in a copy: a shared file system creates about 1,000 per second."""

_NEVER = frozenset({".git", "__pycache__"})
"""Neither copied nor linked: the copy is not a work tree, and Python writes its own bytecode."""
_JOBS_OUTPUT = re.compile(r"slurm-\d+(_\d+)?\.out")
"""Name of a job's output file, which grows in the directory of the submission."""
_LINKED = frozenset({".venv", "node_modules"})
_MARKS = ("pyvenv.cfg", "conda-meta", "MNIST/raw")
"""Paths that identify directories of environments (venv, conda) and datasets (`clusterddp data`,
torchvision)."""
_RUN_RECORDS = ("spec.json", "events.jsonl")
"""Records that identify a run's directory, which is not code below any --runs-dir."""
_OUTPUTS = re.compile(
    r"(out|outputs?|checkpoints?|ckpts?|runs?|results?|logs?|lightning_logs|wandb|mlruns|work_dirs"
    r"|exps?|experiments?|saved?|saves|saved?_models?)([-_.].*)?",
    re.IGNORECASE,
)
"""Usual names of training programs' output directories."""
_SAVED = re.compile(r"(ckpt|checkpoint|last|epoch|step)\b|(checkpoint|epoch|step|version)[-_=]?\d")
"""Usual prefixes of checkpoint files and directories."""
_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp")
_LARGE_BYTES = 1_000_000
"""Smallest file that is linked, rather than copied, if the files exceed the limit."""
GIT_SECONDS = 60.0
"""Timeout of a git call, which walks all directories that are not ignored."""

# These variables, set in git hooks for example, would make git list another repository.
_GIT_PLACES = frozenset(
    f"GIT_{name}"
    for name in ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "OBJECT_DIRECTORY", "PREFIX")
)
_CHUNK_BYTES = 1 << 20
_LINK = b"symbolic link to "  # prefix of a link's target when its digest is computed


@dataclass(frozen=True)
class Snapshot:
    """Files of the code; undecodable bytes in names are escaped as by os.fsdecode."""

    files: int
    """Number of files, including symbolic links."""
    bytes: int
    digests: Mapping[str, str]
    """Path relative to the tree to SHA-256 of the content, or of the target for a link."""
    commit: str
    """Hash of git's HEAD; empty without a commit. The files may differ from it."""
    large: tuple[str, ...] = field(default=(), compare=False)
    """Files that are linked because copying them would exceed the limit."""
    outside_paths: tuple[str, ...] = field(default=(), compare=False)
    """Relative paths in COMMAND and its script that leave the tree (`submission.outside`)."""

    def write(self, path: Path) -> None:
        """Write it as a record, in ASCII, which preserves every file name."""
        write_atomically(path, json.dumps(asdict(self), indent=1, sort_keys=True).encode())

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """Read a record. Raises RequestError if it is missing or invalid."""
        record, problem = None, "it is not a record of a code snapshot."
        try:
            record = load(cls, json.loads(read_file(path)), strict=True)
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error) if isinstance(error, OSError) else problem
        if record is None:
            raise RequestError(f"{path} cannot be read: {problem} [CD0312]")
        return record


@dataclass(frozen=True)
class Item:
    """A file or symbolic link to copy."""

    size: int
    mode: int
    modified_ns: int
    link: str
    """Target of the link as stored in the tree; empty for a file."""


@dataclass(frozen=True)
class Plan:
    """Contents of a copy of the code."""

    tree: str
    items: dict[str, Item]
    excluded: frozenset[str]
    """Paths in the tree that are neither copied nor linked."""
    commit: str
    large: tuple[str, ...] = ()
    """Files that are linked because of their size, largest first."""


def code_location(run: RunDir, tree: Path) -> dict[str, object]:
    """Return the directory of the user's code, its number of files, and whether it is a copy.

    Empty if the run does not use the user's code.
    tree: directory of the submission.
    """
    is_copy = run.code.is_dir()
    if not is_copy and not run.code_record.is_file():
        return {}
    try:
        files: int | None = Snapshot.read(run.code_record).files
    except RequestError:  # reported when the code is compared
        files = None
    folder = (run.code_folder if is_copy else tree).absolute()
    return {"code": str(folder), "code_files": files, "is_copy": is_copy}


def format_code_location(run: RunDir, place: Mapping[str, object], tree: Path) -> str:
    """Format it as `/jobs/a/code: a copy of 12 files of /home/me/x; relative output …`."""
    files = place["code_files"]
    count = "the files" if files is None else "1 file" if files == 1 else f"{files:,} files"
    if place["is_copy"]:
        of = f"a copy of {count} of {run.top_of_code(tree)}"
        return f"{place['code']}: {of}; {describe_output_folder(str(place['code']))}"
    return f"{place['code']} itself, {count}: not copied"


def top_of(folder: Path) -> Path:
    """Return the top of the git work tree that contains a directory, to copy it as a whole.

    Return the directory itself if it is not in a work tree, git ignores it, or the home directory
    is within the work tree.
    """
    if carried := forms.carried_top(str(folder), os.environ):
        return Path(carried)
    try:
        prefix, _ = _git(str(folder), "rev-parse", "--show-prefix")
        depth = os.fsdecode(prefix).rstrip("\n").count("/")
        if not depth or not _git_names(str(folder))[0]:
            return folder
    except RequestError:  # git timed out; copying the directory reports it
        return folder
    top = folder.parents[depth - 1]
    home = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111 -- raises without a home
    return folder if home.is_relative_to(os.path.realpath(top)) else top


def take(
    tree: Path,
    target: Path,
    *,
    limit_mb: float = LIMIT_MB,
    exclude: Collection[Path] = (),
    workdir: str = "",
) -> Snapshot:
    """Copy the code in a directory to a new, private directory.

    tree: in a git work tree, all files that git tracks or does not ignore, including files of
        submodules and nested repositories; elsewhere all files. Never __pycache__, environments,
        node_modules, runs or dataset directories (with `MNIST/raw`).
    target: must not exist, but its parent must. Anything skipped in a copied directory is linked
        by its absolute path, so that `data/train` still resolves.
    limit_mb: limit of the files' total size, in 10^6 bytes. Above it, large files are linked
        rather than copied, largest first.
    exclude: absolute paths that are neither copied nor linked, for example that of the runs.
    workdir: directory in the tree where the code starts; always treated as code.

    Raises RequestError if the tree exceeds the limits, a file cannot be read or copying fails; no
    partial copy is left.
    """
    plan = plan_of(tree, limit_mb, exclude, workdir)
    links = _links(plan)
    try:
        target.mkdir(mode=0o700)
    except OSError as error:
        raise RequestError(
            f"cannot create {target} for the code: {error.strerror}. [CD0504]"
        ) from None
    try:
        return _copy(plan, str(target), links)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def try_to_take(
    tree: Path,
    target: Path,
    limit_mb: float,
    exclude: Collection[Path],
    *,
    needed: bool,
    workdir: str = "",
) -> Snapshot | None:
    """Copy the code; on failure raise RequestError if the copy is `needed`, else warn.

    Also warns of files linked because of their size: later edits of them affect the run.
    """
    try:
        taken = take(tree, target, limit_mb=limit_mb, exclude=exclude, workdir=workdir)
    except RequestError as error:
        if needed:
            raise
        log.warning(coded(f"your code is not copied: {error}", error.code))
        return None
    if taken.large:
        names = formatting.join_limited([printable(name) for name in taken.large], 3, ", ")
        log.warning(
            f"linked, not copied with your code, because of their size: {names}. To copy them, "
            f"raise --snapshot-limit MB (now {limit_mb:g}); to silence this warning, list them in "
            ".gitignore. [CD0311]"
        )
    _warn_of_outputs(taken, tree, Path(target, workdir))
    return taken


def _warn_of_outputs(taken: Snapshot, tree: Path, folder: Path) -> None:
    """Warn of earlier runs' outputs that a run from this copy would overwrite or resume from.

    folder: working directory of the tasks in the copy.
    """
    linked = [
        path
        for path in sorted(folder.iterdir())
        if path.is_symlink() and path.is_dir() and _OUTPUTS.fullmatch(path.name)
    ]
    if linked:
        names = formatting.join_limited([printable(f"{path.name}/") for path in linked], 3, ", ")
        log.warning(
            f"{names} in the copy of your code: a link to {os.readlink(linked[0])}, because git "  # noqa: PTH115
            "ignores it. Runs that write there overwrite each other's files. Give each run its own "
            "output directory in COMMAND, or move this one away before you submit. [CD0320]"
        )
    copied = sorted(filter(_is_checkpoint, taken.digests))
    if copied:
        names = formatting.join_limited([printable(name) for name in copied], 3, ", ")
        log.warning(
            f"checkpoints copied with the code of {tree}: {names}. A program that looks there for "
            "its last checkpoint would resume from it. To start from scratch, move them away "
            "before you submit. [CD0320]"
        )


def _is_checkpoint(name: str) -> bool:
    """Return whether a file looks like a checkpoint of an earlier run."""
    path = PurePosixPath(name)
    in_outputs = any(_OUTPUTS.fullmatch(part) or _SAVED.match(part) for part in path.parent.parts)
    return path.suffix in _SUFFIXES and (in_outputs or bool(_SAVED.match(path.name)))


def carry_over(
    copy: Path, record: Snapshot, tree: Path, target: Path, taken: Snapshot
) -> list[str]:
    """Transfer files that a run wrote in its former copy of a tree to a new copy.

    A command then finds its files where it wrote them: new files, except links made by `take`, and
    files that it changed if the tree did not change them. They are hard-linked if possible, else
    copied, so the former copy stays intact.

    Returns the written names that replace files of the new copy. Raises RequestError, also for a
    file changed on both sides.
    """
    replaced, name = [], "."
    try:
        changed = _changed_in(copy, record)
        for name in changed:
            if taken.digests.get(name) not in (None, record.digests[name]):
                raise RequestError(
                    f"{printable(name)} was changed by the run in {copy} and differently in "
                    f"{tree}. Copy the version to keep over the other one. [CD0319]"
                )
        for name in [*changed, *_written(copy, record, os.path.abspath(tree))]:
            source, goal = copy / name, target / name
            for parent in _parents(name):
                link = target / parent
                if link.is_symlink() and link.is_dir() and not any(link.iterdir()):
                    link.unlink()  # its last file was removed from the tree
                elif link.is_symlink():
                    raise RequestError(
                        f"the run wrote {printable(name)} in {copy}, but {printable(parent)} of "
                        f"{tree} is no longer copied (git ignores it, or it is a link). Move one "
                        "of them. [CD0319]"
                    )
            if goal.is_symlink():
                goal.unlink()
            elif goal.exists():
                replaced += [] if name in record.digests else [name]
                shutil.rmtree(goal) if goal.is_dir() else goal.unlink()
            goal.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, goal, symlinks=True, copy_function=_link_or_copy)
            else:
                _link_or_copy(source, goal)
    except (OSError, shutil.Error) as error:
        raise RequestError(
            f"cannot keep {printable(name)}, which the run wrote in {copy}: {error}. Free space, "
            "or fix the file. [CD0319]"
        ) from None
    return replaced


def fingerprint(
    tree: Path, *, limit_mb: float = LIMIT_MB, exclude: Collection[Path] = (), workdir: str = ""
) -> Snapshot | None:
    """Return what `take` would return, without copying.

    None if the tree is missing, exceeds the limits or cannot be read.
    """
    try:
        return _copy(plan_of(tree, limit_mb, exclude, workdir), "", {})
    except RequestError:
        return None


def changes_since_submission(run: RunDir, folder: Path) -> list[str] | None:
    """List the changes of a directory's code since the run was submitted from it.

    Empty if the run uses a copy, None if the code cannot be compared. Raises RequestError if the
    record of the code cannot be read.
    """
    if run.code.is_dir() or not run.code_record.exists():
        return []
    before = Snapshot.read(run.code_record)
    after = fingerprint(folder, exclude=run_folders(run))
    return difference(before, after) if after else None


def is_cleaned(run: RunDir) -> bool:
    """Return whether `clusterddp clean` removed files of the run's copy that are still missing.

    A trial's copy may be its sweep's. Raises RequestError if the record of the code cannot be read.
    """
    sweep = run.sweep if run.code.is_symlink() else None
    history = events.read((sweep or run).events)
    if not any(isinstance(event, events.Cleaned) and event.code_files for event in history):
        return False
    names = Snapshot.read(run.code_record).digests
    return not all(os.path.lexists(run.code / name) for name in names)


def difference(before: Snapshot, after: Snapshot, *, new: bool = False) -> list[str]:
    """List the changes to the files of `before`, one line per file.

    new: also list new files. A run that works in the tree itself leaves its results there.
    """
    added = [name for name in after.digests if new and name not in before.digests]
    lines = [f"new {printable(name)}" for name in added]
    for name in before.digests:
        if name not in after.digests:
            lines.append(f"removed {printable(name)}")
        elif before.digests[name] != after.digests[name]:
            lines.append(f"changed {printable(name)}")
    return sorted(lines)


def _changed_in(copy: Path, record: Snapshot) -> list[str]:
    """List the recorded files of a copy that have changed."""
    changed = []
    for name, digest in record.digests.items():
        path = copy / name
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            if digest_of(file)[0] != digest:
                changed.append(name)
    return changed


def _written(copy: Path, record: Snapshot, tree: str) -> Iterator[str]:
    """Yield the topmost paths written in a copy since it was made, directory by directory."""
    folders = {"", *(parent for name in record.digests for parent in _parents(name))}
    for folder in sorted(folders):
        if not (copy / folder).is_dir():
            continue
        for path in sorted((copy / folder).iterdir()):
            name = f"{folder}/{path.name}" if folder else path.name
            if name in record.digests or name in folders or path.name == "__pycache__":
                continue
            if path.is_symlink() and os.readlink(path) == f"{tree}/{name}":  # noqa: PTH115
                continue
            yield name


def _parents(name: str) -> list[str]:
    """List the parent directories of a path, topmost first."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not every file system has hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _copy(plan: Plan, target: str, links: dict[str, str]) -> Snapshot:
    """Copy the files and create the links. Digests are of the bytes copied, even during edits.

    target: empty if only the digests are needed.
    """
    digests, size, name = {}, 0, ""
    try:
        for name in {name.rpartition("/")[0] for name in plan.items} if target else ():
            os.makedirs(f"{target}/{name}", exist_ok=True)  # noqa: PTH103
        for name, item in plan.items.items():
            if item.link:
                digests[name] = hashlib.sha256(_LINK + os.fsencode(item.link)).hexdigest()
                links[name] = _carried_link(plan, name, item.link)
                continue
            try:
                source = open(f"{plan.tree}/{name}", "rb")  # noqa: PTH123, SIM115
            except FileNotFoundError:
                continue  # removed meanwhile, for example an editor's temporary file
            with source, _new_file(f"{target}/{name}", item) if target else nullcontext() as copy:
                digests[name], length = digest_of(source, copy)
            size += length
        # Links come last, so that no file can be written through one.
        for name in links if target else ():
            Path(f"{target}/{name}").symlink_to(links[name])
    except OSError as error:
        raise RequestError(
            f"cannot copy {printable(name or '.')} of {plan.tree} to {target}: {error.strerror}. "
            "The copy was removed. Free space there, fix the file, or use --no-snapshot to run "
            "from the directory itself. [CD0312]"
        ) from None
    return Snapshot(len(digests), size, digests, plan.commit, plan.large)


@contextmanager
def _new_file(target: str, item: Item) -> Iterator[BinaryIO]:
    """Create a file, and set its mode and time to the item's after it is written."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fchmod(descriptor, item.mode)
        # make and ninja would rebuild linked outputs if their sources were newer.
        os.utime(descriptor, ns=(item.modified_ns, item.modified_ns))


def _carried_link(plan: Plan, name: str, link: str) -> str:
    """Return the target of a copied link, made absolute if it is not in the copy."""
    folder = os.path.dirname(name)  # noqa: PTH120
    leads_to = os.path.normpath(os.path.join(folder, link))  # noqa: PTH118
    if leads_to.split("/")[0] in ("", "..") or _is_excluded(leads_to, plan.excluded):
        return os.path.join(plan.tree, folder, link)  # noqa: PTH118 -- keeps an absolute link
    return link


def digest_of(source: BinaryIO, copy: BinaryIO | None = None) -> tuple[str, int]:
    """Return SHA-256 and size of the content, and write the content to `copy`."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        if copy:
            copy.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def plan_of(
    tree: Path,
    limit_mb: float,
    exclude: Collection[Path],
    workdir: str,
    *,
    skip: Callable[[str], bool] = lambda _: False,
) -> Plan:
    """Plan the copy of a tree, as `take` does, without the names to skip.

    Raises RequestError likewise.
    """
    top = os.path.abspath(tree)
    if not tree.is_dir():
        raise RequestError(f"{tree} is not a directory: there is no code to copy. [CD0312]")
    excluded = _names_below(top, exclude)
    folders = _Folders(top, excluded, workdir)
    carried = forms.carried_top(top, os.environ)
    listed, without_git = (_carried_names(top, carried), "") if carried else _git_names(top)
    if not listed:
        # An enclosing repository, for example of the home directory, ignores this directory.
        without_git = without_git or "git ignores the whole directory"
    commit = _git_head(top) if listed and not carried else ""
    commit = os.environ.get(forms.COMMIT_VARIABLE, "") if carried else commit
    names = listed if listed or carried else _walk(top, "", folders)
    items: dict[str, Item] = {}
    for name in _files(top, names, folders):
        if skip(name):
            continue
        if item := _measure(top, name):
            items[name] = item
        if len(items) > 10 * MAX_FILES:
            break  # perhaps a home directory: enough files to name the largest directories
    large = () if carried else _large(items, limit_mb)  # it is removed before the run's end
    items = {name: item for name, item in items.items() if name not in large}
    _check_limits(top, items, limit_mb, without_git)
    for name, item in items.items():
        if not item.link and not os.access(f"{top}/{name}", os.R_OK, effective_ids=True):
            raise _unreadable(top, name, "Permission denied")
    return Plan(top, items, excluded, commit, large)


def _links(plan: Plan) -> dict[str, str]:
    """Map each path that is skipped in a copied directory to the target of its link.

    Includes git-ignored paths, and empty directories, which the code may write to.
    """
    if forms.carried_top(plan.tree, os.environ):
        return {}  # what is not in its manifest is not the user's
    folders = {"", *(parent for name in plan.items for parent in _parents(name))}
    links = {}
    for folder in folders:
        for name, entry in _entries(plan.tree, folder):
            if name in plan.items or name in folders or _is_excluded(name, plan.excluded):
                continue
            if entry.is_symlink() or entry.is_dir() or entry.is_file():
                links[name] = f"{plan.tree}/{name}"
    if len(links) + len(plan.items) > MAX_FILES:
        full, count = Counter(name.rpartition("/")[0] for name in links).most_common(1)[0]
        raise RequestError(
            f"the code in {plan.tree} has {len(links):,} git-ignored files and directories next to "
            f"it, {count:,} of them in {printable(full or '.')}; at most {MAX_FILES:,} are "
            "copied or linked. Move them to a directory without code, or use --no-snapshot to run "
            "from the directory itself. [CD0311]"
        )
    return links


def _is_excluded(name: str, excluded: frozenset[str]) -> bool:
    """Return whether a path is neither copied nor linked."""
    if _JOBS_OUTPUT.fullmatch(name):
        return True
    return not (_NEVER.isdisjoint(name.split("/")) and excluded.isdisjoint([*_parents(name), name]))


def printable(name: str) -> str:
    """Return a name for a message, escaped if it has unprintable or surrounding whitespace."""
    return name if name.isprintable() and name == name.strip() and name else ascii(name)


class _Folders:
    """Cache of the directories that are code: not links, environments, datasets or runs."""

    def __init__(self, tree: str, excluded: frozenset[str], workdir: str) -> None:
        self._tree = tree
        self.excluded = excluded
        self._known = dict.fromkeys(["", *_parents(workdir), workdir], True)

    def is_code(self, name: str) -> bool:
        if name not in self._known:
            parent, _, last = name.rpartition("/")
            path = f"{self._tree}/{name}"
            self._known[name] = (
                last not in _NEVER | _LINKED
                and name not in self.excluded
                and self.is_code(parent)
                # git still lists tracked files of a directory that was replaced by a link; copying
                # them through the copied link would write to the original.
                and _is_real_folder(path)
                and not any(os.path.lexists(f"{path}/{mark}") for mark in _MARKS)
                and not all(os.path.lexists(f"{path}/{record}") for record in _RUN_RECORDS)
            )
        return self._known[name]


def _names_below(tree: str, paths: Collection[Path]) -> frozenset[str]:
    """Return the paths inside the tree, relative to it, whether or not they contain links."""
    typed = {os.path.relpath(os.path.abspath(path), tree) for path in paths}
    real = {os.path.relpath(os.path.realpath(path), os.path.realpath(tree)) for path in paths}
    return frozenset(name for name in typed | real if name.split("/")[0] not in (".", ".."))


def _walk(tree: str, folder: str, folders: _Folders) -> Iterator[str]:
    """Yield every file and link that is code in a directory and below."""
    for name, entry in _entries(tree, folder):
        if not entry.is_dir(follow_symlinks=False):
            yield name
        elif folders.is_code(name):
            yield from _walk(tree, name, folders)


def _files(tree: str, names: Iterable[str], folders: _Folders) -> Iterator[str]:
    """Yield the paths that are code; a nested repository is replaced by its files."""
    for listed in names:
        name = listed.rstrip("/")
        parent, _, last = name.rpartition("/")
        if last in _NEVER or name in folders.excluded or not folders.is_code(parent):
            continue
        if _JOBS_OUTPUT.fullmatch(name):
            continue
        path = f"{tree}/{name}"
        if not _is_real_folder(path):
            yield name
        elif folders.is_code(name) and os.path.lexists(f"{path}/.git"):
            # If git cannot list it, there are no names and it is linked as a whole. If its .git is
            # damaged, the enclosing repository answers with the directory itself ("./").
            inner, _ = _git_names(path)
            yield from _files(tree, (f"{name}/{file}" for file in inner if file != "./"), folders)


def _entries(tree: str, folder: str) -> list[tuple[str, "os.DirEntry[str]"]]:
    """List the entries of a directory with their paths relative to the tree."""
    try:
        with os.scandir(f"{tree}/{folder}") as entries:
            return [(f"{folder}/{entry.name}".lstrip("/"), entry) for entry in entries]
    except FileNotFoundError:
        return []  # removed meanwhile
    except OSError as error:
        raise _unreadable(tree, folder, error.strerror) from None


def _measure(tree: str, name: str) -> Item | None:
    """Return the item of a path, or None if it was removed or is a socket, pipe or device."""
    path = f"{tree}/{name}"
    try:
        status = os.lstat(path)
        # Path.readlink would normalize the target.
        link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""  # noqa: PTH115
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(tree, name, error.strerror) from None
    if not link and not stat.S_ISREG(status.st_mode):
        return None
    return Item(0 if link else status.st_size, status.st_mode & 0o777, status.st_mtime_ns, link)


def _large(items: Mapping[str, Item], limit_mb: float) -> tuple[str, ...]:
    """Choose the fewest large files to link so that the others stay within the limit.

    Empty if none are needed, or if linking all of them is not enough.
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
    ignore = "list other files in .gitignore (they are linked then)"
    if without_git:
        ignore += f", which was not used here ({without_git})"
    if len(items) > MAX_FILES:
        largest = _largest(dict.fromkeys(items, 1), lambda count: f"{count:,} files")
        at_least = "at least " if len(items) > 10 * MAX_FILES else ""
        raise RequestError(
            f"the code in {tree} has {at_least}{len(items):,} files, but a run's copy may have at "
            f"most {MAX_FILES:,}. Most are in {largest}. Submit from the directory of the code, "
            f"{ignore}, or use --no-snapshot to run from the directory itself. [CD0311]"
        )
    if total > limit_mb * 1e6:
        largest = _largest({name: item.size for name, item in items.items()}, _megabytes)
        raise RequestError(
            f"the code in {tree} has {_megabytes(total)} in {len(items):,} files, but a run's copy "
            f"may have at most {limit_mb:g} MB. The largest: {largest}. Raise --snapshot-limit MB, "
            f"{ignore}, or use --no-snapshot to run from the directory itself. [CD0311]"
        )


def _largest(weights: Mapping[str, int], show: Callable[[int], str]) -> str:
    """Name the three largest files or directories, descending while one child has 80% of it."""
    sums: Counter[str] = Counter()
    children = defaultdict(set)
    for name, weight in weights.items():
        for below in [*_parents(name), name]:
            children[below.rpartition("/")[0]].add(below)
            sums[below] += weight
    largest = []
    for heaviest in sorted(children[""], key=lambda name: (-sums[name], name))[:3]:
        name = heaviest
        while name in children:
            deeper = max(children[name], key=lambda child: sums[child])
            if sums[deeper] < 0.8 * sums[name]:
                break
            name = deeper
        largest.append(f"{printable(name)}{'/' * (name in children)} ({show(sums[name])})")
    return ", ".join(largest)


def _is_real_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114


def _unreadable(tree: str, name: str, problem: str | None) -> RequestError:
    return RequestError(
        f"cannot read {printable(name or '.')} of the code in {tree}: {problem}. Make it "
        "readable, list it in .gitignore, or use --no-snapshot to run from the directory "
        "itself. [CD0312]"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _carried_names(folder: str, top: str) -> list[str]:
    """List the files of a directory in a carried tree by its manifest, as git would.

    No git is asked: the tree has none, and one around it has its own rules.
    """
    try:
        manifest = json.loads(Path(f"{top}.json").read_bytes())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "its list of files is damaged"
        raise _unreadable(top, "", why) from None
    start = f"{folder[len(top) + 1 :]}/" if folder != top else ""
    names = (os.fsdecode(name.encode("latin-1")) for name in manifest)
    return [name[len(start) :] for name in names if name.startswith(start)]


def _git_names(folder: str) -> tuple[list[str], str]:
    """List the paths that git tracks or does not ignore, and git's error if it failed.

    A nested repository is one name that ends in a slash, a submodule one without.
    """
    # -z: names are neither quoted nor separated by newlines, which they may contain.
    arguments = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed, problem = _git(folder, *arguments)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name], problem


def _git_head(folder: str) -> str:
    """Return the hash of the checked-out commit, or an empty string."""
    return _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")[0].decode().strip()


def _git(folder: str, *arguments: str) -> tuple[bytes, str]:
    """Run git in a directory; return its output and, if it failed, its error."""
    environ = {name: value for name, value in os.environ.items() if name not in _GIT_PLACES}
    environ["GIT_OPTIONAL_LOCKS"] = "0"  # does not block the user's own git commands
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
            f"git {arguments[0]} did not finish within {formatting.setting(GIT_SECONDS)} in "
            f"{folder}. Try again, or use --no-snapshot to run from the directory itself. [CD0312]"
        ) from None
    if answer.returncode:
        words = answer.stderr.decode(errors="replace").strip().splitlines()
        return b"", words[0] if words else f"git exited with {answer.returncode}"
    return answer.stdout, ""
