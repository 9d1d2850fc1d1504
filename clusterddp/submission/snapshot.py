"""A copy of the person's code as it was at submission, and whether the code has changed since.

People edit while their jobs wait, so every start of a run uses the copy. What is copied is what
git would keep (`code_files`); data, environments and build outputs are linked beside it. Where the
copy lies and who runs from it is the caller's.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.submission import code_files
from clusterddp.submission.code_files import Item, Plan, is_left_out, shown

LIMIT_MB = 50.0
"""Code is smaller, even with notebooks; more is data or checkpoints that git was not told of."""
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
    large: tuple[str, ...] = field(default=(), compare=False)
    """Files that are linked in place of a copy, as with them it would be over its limit."""

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
                large=tuple(map(str, fields.get("large", ()))),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(f"this is no record of a code snapshot: {error!r}.") from None


def take(
    tree: Path, target: Path, *, limit_mb: float = LIMIT_MB, leave_out: Collection[Path] = ()
) -> Snapshot:
    """Copy the code in a folder to a new, private folder.

    tree: in a git work tree, at its top or below, the files that git tracks or does not ignore,
        those of submodules and repositories within included; elsewhere all files. Never
        __pycache__, environments, node_modules or folders of datasets (`MNIST/raw` below them).
    target: must not exist, its parent must. Where a folder was copied, what was passed over in it
        is linked by its absolute path, so that `data/train` still leads somewhere.
    limit_mb: most that the files may have together, in 10^6 bytes. Where they have more, large
        files are linked rather than copied, the largest first, until the others keep to it.
    leave_out: absolute paths that are neither copied nor linked, such as the folder of the runs.

    Raises RequestError when the tree is over the limits or a file cannot be read (nothing is
    written then), and when the copy fails, of which nothing is left.
    """
    plan = code_files.plan(tree, limit_mb, leave_out)
    links = code_files.links(plan)
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


def warn_of_large(taken: Snapshot, limit_mb: float) -> None:
    """Name the files linked for their size: what is edited there reaches a waiting run."""
    if not taken.large:
        return
    more = f" and {len(taken.large) - 3} more" if len(taken.large) > 3 else ""
    log.warning(
        f"too large to copy with your code, so linked: "
        f"{', '.join(map(shown, taken.large[:3]))}{more}. The run reads them where they are. Raise "
        f"--snapshot-limit MB (now {limit_mb:g}) to have them copied; what .gitignore lists is "
        "linked without a word."
    )


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
                    f"{shown(name)} was changed by the run in {copy}, and in {tree} otherwise. "
                    f"Copy the one that is meant over the other."
                )
        for name in [*changed, *_written(copy, record, os.path.abspath(tree))]:
            source, goal = copy / name, target / name
            for parent in _parents(name):
                link = target / parent
                if link.is_symlink() and link.is_dir() and not any(link.iterdir()):
                    link.unlink()  # its last file has gone from the tree
                elif link.is_symlink():
                    raise RequestError(
                        f"{shown(name)} was written in {copy}, but {shown(parent)} of {tree} is "
                        "no code any more (git ignores it, or it is a link). Move one of them."
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
            f"cannot keep {shown(name)}, which was written in {copy}: {error}. Make room, or mend "
            "the file."
        ) from None
    return both


def fingerprint(
    tree: Path, *, limit_mb: float = LIMIT_MB, leave_out: Collection[Path] = ()
) -> Snapshot | None:
    """What `take` would return, without a copy.

    None when nothing can be compared: the tree is gone, over the limits, or cannot be read.
    """
    try:
        plan = code_files.plan(tree, limit_mb, leave_out)
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
    return Snapshot(len(digests), size, digests, plan.commit, plan.large)


def difference(before: Snapshot, after: Snapshot, *, new: bool = False) -> list[str]:
    """What became of the files of `before`, a line each, for a person to read.

    new: tell of new ones too. Where a run works in the tree itself it leaves its results there.
    """
    lines = [f"new {shown(name)}" for name in after.digests if new and name not in before.digests]
    for name in before.digests:
        if name not in after.digests:
            lines.append(f"removed {shown(name)}")
        elif before.digests[name] != after.digests[name]:
            lines.append(f"changed {shown(name)}")
    return sorted(lines)


def _changed_in(copy: Path, record: Snapshot) -> list[str]:
    """The recorded files of a copy whose content is another by now."""
    changed = []
    for name, digest in record.digests.items():
        path = copy / name
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            if _digest(file)[0] != digest:
                changed.append(name)
    return changed


def _written(copy: Path, record: Snapshot, tree: str) -> Iterator[str]:
    """Names that were written in a copy since, the topmost ones, folder by folder."""
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
    """The folders above a name, the topmost first."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not every file system has hard links
        shutil.copy2(source, target, follow_symlinks=False)


def _copy(plan: Plan, links: Mapping[str, str], target: str) -> Snapshot:
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
            f"cannot copy {shown(name or '.')} of {plan.tree} to {target}: {error.strerror}. "
            "Nothing of the copy is left. Make room there or mend the file, or use --no-snapshot "
            "to run from the folder itself."
        ) from None
    return Snapshot(len(digests), size, digests, plan.commit, plan.large)


def _copy_file(source: BinaryIO, target: str, item: Item) -> tuple[str, int]:
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


def _carried_link(plan: Plan, name: str, link: str) -> str:
    """What the copied link says: made absolute where the copy has not what it leads to."""
    folder = os.path.dirname(name)  # noqa: PTH120
    leads_to = os.path.normpath(os.path.join(folder, link))  # noqa: PTH118
    if os.path.isabs(link):  # noqa: PTH117
        return link
    if leads_to.split("/")[0] == ".." or is_left_out(leads_to, plan.left_out):
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
