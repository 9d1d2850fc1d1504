"""A copy of the person's code as it was at submission, and its comparison with the code since.

People edit while their jobs wait, so every attempt of a run uses the copy. It holds the files that
git would keep; data, environments and build outputs are linked beside it. Where the copy lies and
who runs from it is the caller's.
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

LIMIT_MB = 50.0
"""Code is smaller, even with notebooks; more is data or checkpoints that git was not told of."""
MOST_FILES = 10_000
"""Most files and links of a copy: a shared file system makes about 1,000 a second."""

_NEVER = frozenset({".git", "__pycache__"})
"""Neither copied nor linked: the copy is no work tree, and Python writes its own bytecode."""
_JOBS_OUTPUT = re.compile(r"slurm-\d+(_\d+)?\.out")
"""File in the folder of the submission with what a script prints while its job runs."""
_LINKED = frozenset({".venv", "node_modules"})
_MARKS = ("pyvenv.cfg", "conda-meta", "MNIST/raw")
"""Paths that venv and conda leave in an environment, and `clusterddp data` and torchvision in a
folder of datasets, whatever its name."""
_OF_A_RUN = ("spec.json", "events.jsonl")
"""Records of a run: below another output root than this one's, it is no code either."""
_OUTPUTS = re.compile(
    r"(out|outputs?|checkpoints?|ckpts?|runs?|results?|logs?|lightning_logs|wandb|mlruns|work_dirs"
    r"|exps?|experiments?|saved?|saves|saved?_models?)([-_.].*)?",
    re.IGNORECASE,
)
"""Folders into which training programs write by habit."""
_SAVED = re.compile(r"(ckpt|checkpoint|last|epoch|step)\b|(checkpoint|epoch|step|version)[-_=]?\d")
"""Begin of a checkpoint's name, or of its folder's."""
_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp")
_LARGE_BYTES = 1_000_000
"""Files from here on are linked, the largest first, where all of them are more than the limit."""
GIT_SECONDS = 60.0
"""Bound on one call of git, which walks the folders that it does not ignore."""

# They would make git list another repository, as inside one of git's own hooks.
_GIT_PLACES = frozenset(
    f"GIT_{name}"
    for name in ("DIR", "WORK_TREE", "INDEX_FILE", "COMMON_DIR", "OBJECT_DIRECTORY", "PREFIX")
)
_CHUNK_BYTES = 1 << 20
_LINK = b"symbolic link to "  # before a link's text, in what its digest is of


@dataclass(frozen=True)
class Snapshot:
    """Files of the code; names hold undecodable bytes as os.fsdecode gives them."""

    files: int
    """Number of files, symbolic links included."""
    bytes: int
    digests: Mapping[str, str]
    """Name below the tree, with slashes, to the SHA-256 of the content (a link: of its text)."""
    commit: str
    """The hash of git's HEAD; empty without a commit. The files may differ from it."""
    large: tuple[str, ...] = field(default=(), compare=False)
    """Files that are linked in place of a copy, as with them it would be over its limit."""
    leaving: tuple[str, ...] = field(default=(), compare=False)
    """Relative paths of COMMAND and its script that leave the tree (`submission.outside`)."""

    def write(self, path: Path) -> None:
        """Write it as a record, in plain ASCII, so that every file name survives."""
        write_atomically(path, json.dumps(asdict(self), indent=1, sort_keys=True).encode())

    @classmethod
    def read(cls, path: Path) -> "Snapshot":
        """Read a record back; raises RequestError when that cannot be done."""
        record, problem = None, "it is no record of a code snapshot."
        try:
            record = load(cls, json.loads(read_file(path)), strict=True)
        except (OSError, ValueError, RecursionError) as error:
            problem = str(error) if isinstance(error, OSError) else problem
        if record is None:
            raise RequestError(f"{path} cannot be read: {problem} [CD0312]")
        return record


@dataclass(frozen=True)
class Item:
    """A file or a symbolic link that is to be copied."""

    size: int
    mode: int
    modified_ns: int
    link: str
    """Text of the link, as it stands in the tree; empty for a file."""


@dataclass(frozen=True)
class Plan:
    """Contents of a copy of a folder of code."""

    tree: str
    items: dict[str, Item]
    left_out: frozenset[str]
    """Names below the tree that are neither copied nor linked."""
    commit: str
    large: tuple[str, ...] = ()
    """Files that are linked for their size, the largest first."""


def place_of_code(run: RunDir, tree: Path) -> dict[str, object]:
    """Return where the tasks run a person's code: its folder, its files, whether that is a copy.

    tree: the folder of the submission. Empty where the run has no code of the person's.
    """
    is_copy = run.code.is_dir()
    if not is_copy and not run.code_record.is_file():
        return {}
    try:
        files: int | None = Snapshot.read(run.code_record).files
    except RequestError:  # it is submitted; whoever compares the code reports that
        files = None
    place = (run.code_folder if is_copy else tree).absolute()
    return {"code": str(place), "code_files": files, "is_copy": is_copy}


def described(run: RunDir, place: Mapping[str, object], tree: Path) -> str:
    """Word such a place: `/jobs/a/code: a copy of 12 files of /home/me/x; relative output …`."""
    files = place["code_files"]
    count = "the files" if files is None else "1 file" if files == 1 else f"{files:,} files"
    if place["is_copy"]:
        of = f"a copy of {count} of {run.top_of_code(tree)}"
        return f"{place['code']}: {of}; {describe_output_folder(str(place['code']))}"
    return f"{place['code']} itself, {count}: not copied"


def top_of(folder: Path) -> Path:
    """Return the top of the git work tree in which a folder of code lies, to be copied with it.

    The folder itself without one, where git ignores it, and where the top has the home within.
    """
    try:
        prefix, _ = _git(str(folder), "rev-parse", "--show-prefix")
        depth = os.fsdecode(prefix).rstrip("\n").count("/")
        if not depth or not _git_names(str(folder))[0]:
            return folder
    except RequestError:  # git gives no answer, which the copy of the folder reports
        return folder
    top = folder.parents[depth - 1]
    home = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111 -- there may be none
    return folder if home.is_relative_to(os.path.realpath(top)) else top


def take(
    tree: Path,
    target: Path,
    *,
    limit_mb: float = LIMIT_MB,
    leave_out: Collection[Path] = (),
    workdir: str = "",
) -> Snapshot:
    """Copy the code in a folder to a new, private folder.

    tree: in a git work tree, at its top or below, the files that git tracks or does not ignore,
        those of submodules and repositories within included; elsewhere all files. Never
        __pycache__, environments, node_modules, runs or folders of datasets (`MNIST/raw` below).
    target: must not exist, its parent must. Where a folder was copied, what was passed over in it
        is linked by its absolute path, so that `data/train` still leads somewhere.
    limit_mb: most that the files may have together, in 10^6 bytes. Where they have more, large
        files are linked rather than copied, the largest first, until the others keep to it.
    leave_out: absolute paths that are neither copied nor linked, such as the folder of the runs.
    workdir: folder below the tree in which the code starts, which is code whatever lies in it.

    Raises RequestError when the tree is over the limits or a file cannot be read (nothing is
    written then), and when the copy fails, of which nothing is left.
    """
    plan = _plan(tree, limit_mb, leave_out, workdir)
    links = _links(plan)
    try:
        target.mkdir(mode=0o700)
    except OSError as error:
        raise RequestError(
            f"cannot make {target} for the code: {error.strerror}. [CD0504]"
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
    leave_out: Collection[Path],
    *,
    needed: bool,
    workdir: str = "",
) -> Snapshot | None:
    """Take a copy, or warn that it cannot be taken; where it is `needed`, raise RequestError.

    Warns of files linked for their size too: what is edited there reaches a waiting run.
    """
    try:
        taken = take(tree, target, limit_mb=limit_mb, leave_out=leave_out, workdir=workdir)
    except RequestError as error:
        if needed:
            raise
        log.warning(coded(f"your code is not copied: {error}", error.code))
        return None
    if taken.large:
        names = formatting.join_limited([_shown(name) for name in taken.large], 3, ", ")
        log.warning(
            f"too large to copy with your code, so linked: {names}. The run reads them where they "
            f"are. Raise --snapshot-limit MB (now {limit_mb:g}) to have them copied; what "
            ".gitignore lists is linked without a word. [CD0311]"
        )
    _warn_of_outputs(taken, tree, Path(target, workdir))
    return taken


def _warn_of_outputs(taken: Snapshot, tree: Path, folder: Path) -> None:
    """Warn of outputs of earlier runs that a run from this copy would write over, or resume from.

    folder: that of the copy in which the tasks start.
    """
    linked = [
        path
        for path in sorted(folder.iterdir())
        if path.is_symlink() and path.is_dir() and _OUTPUTS.fullmatch(path.name)
    ]
    if linked:
        names = formatting.join_limited([_shown(f"{path.name}/") for path in linked], 3, ", ")
        log.warning(
            f"{names} in the copy of your code: a link to {os.readlink(linked[0])}, as git "  # noqa: PTH115
            "ignores it. What the run writes there lies there, and other runs write over it. Name "
            "another folder for each run in COMMAND, or move it away before you submit. [CD0320]"
        )
    copied = sorted(filter(_is_checkpoint, taken.digests))
    if copied:
        names = formatting.join_limited([_shown(name) for name in copied], 3, ", ")
        log.warning(
            f"copied with the code of {tree}: {names}. A program that looks for its last "
            "checkpoint there resumes from it. If the run is to begin anew, move them away before "
            "you submit. [CD0320]"
        )


def _is_checkpoint(name: str) -> bool:
    """Return whether a file seems to be a checkpoint that an earlier run has left."""
    path = PurePosixPath(name)
    folders = path.parent.parts
    in_outputs = any(_OUTPUTS.fullmatch(part) or _SAVED.match(part) for part in folders)
    return path.suffix in _SUFFIXES and (in_outputs or bool(_SAVED.match(path.name)))


def carry_over(
    copy: Path, record: Snapshot, tree: Path, target: Path, taken: Snapshot
) -> list[str]:
    """Give a new copy of a tree what was written in the former one since it was taken.

    A command so finds its files where it wrote them: those that the record of the former copy has
    not, and that are no links of `take`; and those that it has changed, where the tree has not.
    Hard links where those can be made, or copies, so that the former copy stays whole.

    Returns the written names that the new copy had as well, whose place they take. Raises
    RequestError, for a file that both have changed too.
    """
    both, name = [], "."
    try:
        changed = _changed_in(copy, record)
        for name in changed:
            if taken.digests.get(name) not in (None, record.digests[name]):
                raise RequestError(
                    f"{_shown(name)} was changed by the run in {copy}, and in {tree} otherwise. "
                    f"Copy the one that is meant over the other. [CD0319]"
                )
        for name in [*changed, *_written(copy, record, os.path.abspath(tree))]:
            source, goal = copy / name, target / name
            for parent in _parents(name):
                link = target / parent
                if link.is_symlink() and link.is_dir() and not any(link.iterdir()):
                    link.unlink()  # its last file has gone from the tree
                elif link.is_symlink():
                    raise RequestError(
                        f"{_shown(name)} was written in {copy}, but {_shown(parent)} of {tree} is "
                        "no code any more (git ignores it, or it is a link). Move one of "
                        "them. [CD0319]"
                    )
            if goal.is_symlink():
                goal.unlink()
            elif goal.exists():
                both += [] if name in record.digests else [name]
                shutil.rmtree(goal) if goal.is_dir() else goal.unlink()
            goal.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and not source.is_symlink():
                shutil.copytree(source, goal, symlinks=True, copy_function=_link_or_copy)
            else:
                _link_or_copy(source, goal)
    except (OSError, shutil.Error) as error:
        raise RequestError(
            f"cannot keep {_shown(name)}, which was written in {copy}: {error}. Make room, or mend "
            "the file. [CD0319]"
        ) from None
    return both


def fingerprint(
    tree: Path, *, limit_mb: float = LIMIT_MB, leave_out: Collection[Path] = (), workdir: str = ""
) -> Snapshot | None:
    """Return what `take` would, without a copy.

    None when nothing can be compared: the tree is gone, over the limits, or cannot be read.
    """
    try:
        return _copy(_plan(tree, limit_mb, leave_out, workdir), "", {})
    except RequestError:
        return None


def changes_since_submission(run: RunDir, folder: Path) -> list[str] | None:
    """List the changes of a folder's code since the run was submitted from it.

    Empty where the run uses a copy, None where nothing can be compared. Raises RequestError where
    the record of the code cannot be read.
    """
    if run.code.is_dir() or not run.code_record.exists():
        return []
    before = Snapshot.read(run.code_record)
    after = fingerprint(folder, leave_out=run_folders(run))
    return difference(before, after) if after else None


def is_cleaned(run: RunDir) -> bool:
    """Return whether `clusterddp clean` has removed files of the run's copy, which are still gone.

    The copy of a sweep's point can be the sweep's. Raises RequestError where the record of the code
    cannot be read.
    """
    sweep = run.sweep if run.code.is_symlink() else None
    history = events.read((sweep or run).events)
    if not any(isinstance(event, events.Cleaned) and event.code_files for event in history):
        return False
    names = Snapshot.read(run.code_record).digests
    return not all(os.path.lexists(run.code / name) for name in names)


def difference(before: Snapshot, after: Snapshot, *, new: bool = False) -> list[str]:
    """List the changes of the files of `before`, a line each.

    new: list new ones too. Where a run works in the tree itself it leaves its results there.
    """
    lines = [f"new {_shown(name)}" for name in after.digests if new and name not in before.digests]
    for name in before.digests:
        if name not in after.digests:
            lines.append(f"removed {_shown(name)}")
        elif before.digests[name] != after.digests[name]:
            lines.append(f"changed {_shown(name)}")
    return sorted(lines)


def _changed_in(copy: Path, record: Snapshot) -> list[str]:
    """List the recorded files of a copy whose content has changed."""
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
    """Yield the names written in a copy since, the topmost ones, folder by folder."""
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
    """List the folders above a name, the topmost first."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not every file system has hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _copy(plan: Plan, target: str, links: dict[str, str]) -> Snapshot:
    """Fill a folder, with these links too; digests are of the written bytes, whoever is editing.

    target: empty where only the digests are wanted.
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
                continue  # removed since, as an editor's temporary file is
            with source, _new_file(f"{target}/{name}", item) if target else nullcontext() as copy:
                digests[name], length = digest_of(source, copy)
            size += length
        # Links come last, so that no file can be written through one.
        for name in links if target else ():
            Path(f"{target}/{name}").symlink_to(links[name])
    except OSError as error:
        raise RequestError(
            f"cannot copy {_shown(name or '.')} of {plan.tree} to {target}: {error.strerror}. "
            "Nothing of the copy is left. Make room there or mend the file, or use --no-snapshot "
            "to run from the folder itself. [CD0312]"
        ) from None
    return Snapshot(len(digests), size, digests, plan.commit, plan.large)


@contextmanager
def _new_file(target: str, item: Item) -> Iterator[BinaryIO]:
    """Make a file, and give it the mode and the time of the item when it is written."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fchmod(descriptor, item.mode)
        # make and ninja would build anew what is linked, were its sources younger.
        os.utime(descriptor, ns=(item.modified_ns, item.modified_ns))


def _carried_link(plan: Plan, name: str, link: str) -> str:
    """Return the text of a copied link, absolute where its target is not in the copy."""
    folder = os.path.dirname(name)  # noqa: PTH120
    leads_to = os.path.normpath(os.path.join(folder, link))  # noqa: PTH118
    if leads_to.split("/")[0] in ("", "..") or _is_left_out(leads_to, plan.left_out):
        return os.path.join(plan.tree, folder, link)  # noqa: PTH118 -- an absolute one as it is
    return link


def digest_of(source: BinaryIO, copy: BinaryIO | None = None) -> tuple[str, int]:
    """Return digest and size of the content, and write it to `copy`."""
    digest, size = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK_BYTES):
        if copy:
            copy.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def _plan(tree: Path, limit_mb: float, leave_out: Collection[Path], workdir: str) -> Plan:
    """Measure the tree; raises RequestError when it cannot be read or is over a limit."""
    top = os.path.abspath(tree)
    if not tree.is_dir():
        raise RequestError(f"{tree} is no folder: there is no code to copy. [CD0312]")
    left_out = _names_below(top, leave_out)
    folders = _Folders(top, left_out, workdir)
    listed, without_git = _git_names(top)
    if not listed:
        # Nothing at all: the folder is itself ignored by a repository around it, such as a home.
        without_git = without_git or "git ignores the whole folder"
    commit = _git_head(top) if listed else ""
    items: dict[str, Item] = {}
    for name in _files(top, listed or _walk(top, "", folders), folders):
        if item := _measure(top, name):
            items[name] = item
        if len(items) > 10 * MOST_FILES:
            break  # a home directory, perhaps: enough is seen to name the largest
    large = _large(items, limit_mb)
    items = {name: item for name, item in items.items() if name not in large}
    _check_limits(top, items, limit_mb, without_git)
    for name, item in items.items():
        if not item.link and not os.access(f"{top}/{name}", os.R_OK, effective_ids=True):
            raise _unreadable(top, name, "Permission denied")
    return Plan(top, items, left_out, commit, large)


def _links(plan: Plan) -> dict[str, str]:
    """Map each name that was passed over in a copied folder to the target of its link.

    Includes what git ignores, and empty folders, in which the code may mean to write.
    """
    folders = {"", *(parent for name in plan.items for parent in _parents(name))}
    links = {}
    for folder in folders:
        for name, entry in _entries(plan.tree, folder):
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
            "or use --no-snapshot to run from the folder itself. [CD0311]"
        )
    return links


def _is_left_out(name: str, left_out: frozenset[str]) -> bool:
    """Return whether the copy has neither a file nor a link of that name."""
    if _JOBS_OUTPUT.fullmatch(name):
        return True
    return not (_NEVER.isdisjoint(name.split("/")) and left_out.isdisjoint([*_parents(name), name]))


def _shown(name: str) -> str:
    """Return a name for a message: as it is, unless it would break or hide in the line."""
    return name if name.isprintable() and name == name.strip() and name else ascii(name)


class _Folders:
    """Folders of a tree that are code, looked up once each: real ones, no environments, no runs."""

    def __init__(self, tree: str, left_out: frozenset[str], workdir: str) -> None:
        self._tree = tree
        self.left_out = left_out
        self._known = dict.fromkeys(["", *_parents(workdir), workdir], True)

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
                and not any(os.path.lexists(f"{path}/{mark}") for mark in _MARKS)
                and not all(os.path.lexists(f"{path}/{record}") for record in _OF_A_RUN)
            )
        return self._known[name]


def _names_below(tree: str, paths: Collection[Path]) -> frozenset[str]:
    """Return the paths that lie in the tree, relative to it, typed through links or not."""
    typed = {os.path.relpath(os.path.abspath(path), tree) for path in paths}
    real = {os.path.relpath(os.path.realpath(path), os.path.realpath(tree)) for path in paths}
    return frozenset(name for name in typed | real if name.split("/")[0] not in (".", ".."))


def _walk(tree: str, folder: str, folders: _Folders) -> Iterator[str]:
    """Yield every file and link in a folder, and in those below it, that are code."""
    for name, entry in _entries(tree, folder):
        if not entry.is_dir(follow_symlinks=False):
            yield name
        elif folders.is_code(name):
            yield from _walk(tree, name, folders)


def _files(tree: str, names: Iterable[str], folders: _Folders) -> Iterator[str]:
    """Yield the names that are code; a repository within is replaced by its files."""
    for listed in names:
        name = listed.rstrip("/")
        parent, _, last = name.rpartition("/")
        if last in _NEVER or name in folders.left_out or not folders.is_code(parent):
            continue
        if _JOBS_OUTPUT.fullmatch(name):
            continue
        path = f"{tree}/{name}"
        if not _is_real_folder(path):
            yield name
        elif folders.is_code(name) and os.path.lexists(f"{path}/.git"):
            # One that git cannot list has no names here, so that it is linked as a whole; for one
            # with a damaged .git folder the repository around answers, with the folder itself.
            inner, _ = _git_names(path)
            yield from _files(tree, (f"{name}/{file}" for file in inner if file != "./"), folders)


def _entries(tree: str, folder: str) -> list[tuple[str, "os.DirEntry[str]"]]:
    """List what a folder of the tree holds, by its name below the tree."""
    try:
        with os.scandir(f"{tree}/{folder}") as entries:
            return [(f"{folder}/{entry.name}".lstrip("/"), entry) for entry in entries]
    except FileNotFoundError:
        return []  # removed since it was listed
    except OSError as error:
        raise _unreadable(tree, folder, error.strerror) from None


def _measure(tree: str, name: str) -> Item | None:
    """Return the item of a name; None when it has been removed, or is a socket, pipe or device."""
    path = f"{tree}/{name}"
    try:
        status = os.lstat(path)
        # Not Path.readlink, which tidies the text.
        link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""  # noqa: PTH115
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(tree, name, error.strerror) from None
    if not link and not stat.S_ISREG(status.st_mode):
        return None
    return Item(0 if link else status.st_size, status.st_mode & 0o777, status.st_mtime_ns, link)


def _large(items: Mapping[str, Item], limit_mb: float) -> tuple[str, ...]:
    """Choose the fewest large files without which the others keep to the limit.

    Empty where that is not enough, or not needed.
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
            f"of the code, {ignore}, or use --no-snapshot to run from the folder itself. [CD0311]"
        )
    if total > limit_mb * 1e6:
        largest = _largest({name: item.size for name, item in items.items()}, _megabytes)
        raise RequestError(
            f"the code in {tree} has {_megabytes(total)} in {len(items):,} files; a copy of it is "
            f"taken for each run, of at most {limit_mb:g} MB. The largest: {largest}. Raise "
            f"--snapshot-limit MB, {ignore}, or use --no-snapshot to run from the folder "
            "itself. [CD0311]"
        )


def _largest(weights: Mapping[str, int], show: Callable[[int], str]) -> str:
    """Name the three heaviest files or folders, each as deep as one place holds most of it."""
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
        largest.append(f"{_shown(name)}{'/' * (name in children)} ({show(sums[name])})")
    return ", ".join(largest)


def _is_real_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114


def _unreadable(tree: str, name: str, problem: str | None) -> RequestError:
    return RequestError(
        f"cannot read {_shown(name or '.')} of the code in {tree}: {problem}. Make it readable, "
        "list it in .gitignore, or use --no-snapshot to run from the folder itself. [CD0312]"
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _git_names(folder: str) -> tuple[list[str], str]:
    """List the names that git keeps in a folder, and the error where git could not be asked.

    A repository in it is one name that ends in a slash, a submodule one without.
    """
    # -z: the names as they are, neither quoted nor ended by a newline that may be their own.
    arguments = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed, problem = _git(folder, *arguments)
    return [os.fsdecode(name) for name in listed.split(b"\0") if name], problem


def _git_head(folder: str) -> str:
    """Return the hash of the commit that is checked out; empty without one."""
    return _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")[0].decode().strip()


def _git(folder: str, *arguments: str) -> tuple[bytes, str]:
    """Run git in a folder; returns its output, or nothing and its error."""
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
            f"git {arguments[0]} gave no answer within {formatting.setting(GIT_SECONDS)} in "
            f"{folder}. Try again, or use --no-snapshot to run from the folder itself. [CD0312]"
        ) from None
    if answer.returncode:
        words = answer.stderr.decode(errors="replace").strip().splitlines()
        return b"", words[0] if words else f"git exited with {answer.returncode}"
    return answer.stdout, ""
