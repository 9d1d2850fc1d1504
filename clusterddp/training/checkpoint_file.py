"""Checkpoint files: found, listed, handed on and read, each only when its checksum holds.

A file step-00001200.pt lies beside its SHA-256 in the form of sha256sum(1), because torch.load
accepts a flipped bit without a word; best.json in the same folder names the best of them. Works
without torch: what is inside is `checkpoint`'s, and `saver` writes.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp.attempt import Attempt, attempts
from clusterddp.errors import CheckpointError
from clusterddp.run_dir import RunDir, read_json, write_atomically

BEST = "best.json"
_NAME = re.compile(r"step-(\d{8,})\.pt", re.ASCII)
# What torch.save writes is a zip archive: how it begins, and how its last 22 bytes do.
_HEAD, _TAIL, _TAIL_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
# Every checkpoint names the version of clusterddp that wrote it; the archive is not compressed.
_MARK = b"clusterddp"
# Of os.link, where the file system or its rules allow no further name for a file.
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EACCES)


class UnusableError(CheckpointError):
    """A checkpoint is missing, damaged, or another's file under its name."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """In a few words."""


@dataclass(frozen=True)
class Best:
    """The highest accuracy on the test set so far."""

    accuracy: float
    step: int


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a run."""

    path: Path
    step: int
    bytes: int
    modified: float
    """When it was written, in seconds of the epoch."""
    problem: str
    """Why nothing can go on from it; empty when it was verified just now."""
    is_best: bool
    is_next: bool
    """Whether the run would go on from it."""
    attempt: int


def name_of(step: int) -> str:
    return f"step-{step:08d}.pt"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, or -1 for any other file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def checksum_of(path: Path) -> Path:
    """Where the SHA-256 of a checkpoint is kept."""
    return path.with_name(path.name + ".sha256")


def find(resume: str, warn: Callable[[str], None]) -> Path:
    """The checkpoint that `--resume RUN|FOLDER|FILE` names; raises CheckpointError if none."""
    path = Path(resume).expanduser()
    if not path.is_dir():
        read(path)
        return path
    run = RunDir(path.parent if path.name == "checkpoints" else path)
    if run.attempts.is_dir():
        found = newest(run, warn)
    else:  # one attempt, or a folder of files copied from elsewhere
        found = newest_in(run.checkpoints if run.checkpoints.is_dir() else path, warn)
    if found is None:
        raise CheckpointError(
            f"--resume {resume}: there is no whole checkpoint in it. "
            "Name another run directory, or a checkpoint file."
        )
    return found


def newest(run: RunDir, warn: Callable[[str], None], before: Attempt | None = None) -> Path | None:
    """The latest whole checkpoint of a run, or of its attempts before one.

    One that is damaged is passed over with a warning. What an attempt wrote beyond the step from
    which a later one went on does not count: a lost node's orphan may have written it.

    Raises CheckpointError when a folder cannot be read.
    """
    return _first_whole(
        lambda: (each.path for each in _all(run, before) if not each.superseded), warn
    )


def newest_in(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The latest whole checkpoint in one folder; see `newest`."""
    return _first_whole(lambda: iter(files(folder)), warn)


def files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, the highest step first; none without a folder.

    Raises CheckpointError when it cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if step_of(path) >= 0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"the folder {folder} cannot be read: {error.strerror}.") from None
    return sorted(found, key=step_of, reverse=True)


def read(path: Path) -> bytes:
    """The bytes of a checkpoint; raises UnusableError when it is missing, torn or unverified."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UnusableError("missing", f"the checkpoint {path} does not exist.") from None
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UnusableError(reason, f"the checkpoint {path} {reason}.") from None
    if not data:
        raise UnusableError("empty", f"the checkpoint {path} is empty.")
    checksum = checksum_of(path)
    try:
        recorded = checksum.read_text(errors="replace").split()[:1]
    except FileNotFoundError:
        raise UnusableError(
            "no checksum",
            f"the checkpoint {path} has no {checksum.name} beside it, so it may be incomplete. "
            "Copy that file along; if you trust the checkpoint, make it with sha256sum.",
        ) from None
    except OSError as error:
        reason = f"cannot be verified: {checksum.name}: {error.strerror}"
        raise UnusableError(reason, f"the checkpoint {path} {reason}.") from None
    fits = recorded == [hashlib.sha256(data).hexdigest()]
    if not data.startswith(_HEAD) or (fits and _MARK not in data):
        raise UnusableError(
            "foreign", f"{path} is no checkpoint of clusterddp: another file has its name."
        )
    if not fits:
        cut = "" if data[-_TAIL_BYTES:].startswith(_TAIL) else "it is cut off and "
        raise UnusableError(
            "cut off" if cut else "SHA-256 differs",
            f"the checkpoint {path} is damaged: {cut}its SHA-256 is not the recorded one. "
            "Resume from an older checkpoint of the run.",
        )
    return data


def read_best(folder: Path) -> Best | None:
    """What best.json in a folder names, if it is there and whole."""
    content = read_json(folder / BEST) or {}
    try:
        return Best(float(content["accuracy"]), int(content["step"]))
    except (KeyError, TypeError, ValueError):
        return None


def write_best(folder: Path, best: Best) -> None:
    """Raises OSError."""
    content = {"step": best.step, "accuracy": best.accuracy}
    write_atomically(folder / BEST, (json.dumps(content) + "\n").encode())


def adopt(
    attempt: Attempt,
    source: Path | None,
    keep_last: int,
    *,
    best: Best | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Make the checkpoints folder of a new attempt, whole or not at all.

    It gets the checkpoints of the run that are still needed: `source`, the last keep_last with it,
    and the best up to there. They are hard links, so that neither side can take them from the
    other, or copies where the file system has no links. A source in another run stays there.

    best: as `source` itself holds it; by default the best.json files of the run are asked.

    Returns where the attempt finds its source. Raises OSError, and CheckpointError when the source
    is damaged or has gone.
    """
    draft = Path(tempfile.mkdtemp(prefix=".checkpoints.", dir=attempt.path))
    try:
        own = source is not None and _is_within(source, attempt.run.attempts)
        if source is not None and own:
            _hand_on(attempt, source, keep_last, best, draft, warn)
        sync_folder(draft)
        draft.replace(attempt.checkpoints)
        sync_folder(attempt.path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return attempt.checkpoints / source.name if source is not None and own else source


def listing(run: RunDir) -> list[Entry]:
    """Every checkpoint of a run, each read and verified, the highest step first.

    The same one in the folders of several attempts is listed once. Raises CheckpointError when a
    folder cannot be read.
    """
    entries: dict[tuple[int, str, str], Entry] = {}
    next_is_seen = False
    bests = [best for best in map(_counted_best, _folders(run, None)) if best]
    for each in _all(run, None):
        problem = each.superseded
        try:
            if not problem:
                read(each.path)
        except UnusableError as error:
            problem = error.reason
        try:
            status = each.path.stat()
        except FileNotFoundError:
            continue  # removed meanwhile, as a newer one was written
        try:
            checksum = checksum_of(each.path).read_text(errors="replace")
        except OSError:
            checksum = ""
        entry = Entry(
            path=each.path,
            step=step_of(each.path),
            bytes=status.st_size,
            modified=status.st_mtime,
            problem=problem,
            is_best=bool(bests) and bests[0].step == step_of(each.path) and not each.superseded,
            is_next=not problem and not next_is_seen,
            attempt=each.attempt.number,
        )
        next_is_seen = next_is_seen or entry.is_next
        entries.setdefault((entry.step, checksum, problem), entry)
    return sorted(entries.values(), key=lambda entry: (-entry.step, -entry.attempt))


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed writer has left: temporary files, checksums without a checkpoint.

    Only its one writer may call it. Raises OSError.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        hidden = path.name.startswith((".step-", f".{BEST}."))
        lone = path.suffix == ".sha256" and not path.with_suffix("").exists()
        if hidden or (lone and step_of(path.with_suffix("")) >= 0):
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint and its checksum. Raises OSError."""
    # In this order: what a kill leaves in between is not taken for a damaged checkpoint.
    path.unlink(missing_ok=True)
    checksum_of(path).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Folder:
    """The checkpoints of one attempt, and how far they count."""

    attempt: Attempt
    last_step: int | None
    """From there on a later attempt trained; None where there is none."""
    later: int
    """That attempt's number."""


@dataclass(frozen=True)
class _Found:
    path: Path
    attempt: Attempt
    superseded: str
    """Why it does not count, if so."""


def _folders(run: RunDir, before: Attempt | None) -> Iterator[_Folder]:
    """Those of a run, the latest attempt first."""
    last_step, later = None, 0
    for attempt in reversed(attempts(run)):
        if before and attempt.number >= before.number:
            continue
        yield _Folder(attempt, last_step, later)
        started = attempt.read_record().get("step")
        if isinstance(started, int) and (last_step is None or started < last_step):
            last_step, later = started, attempt.number


def _all(run: RunDir, before: Attempt | None) -> Iterator[_Found]:
    """The checkpoints of a run in the order in which it would go on from them."""
    for folder in _folders(run, before):
        for path in files(folder.attempt.checkpoints):
            superseded = ""
            if folder.last_step is not None and step_of(path) > folder.last_step:
                superseded = (
                    f"superseded: attempt {folder.later} went on from step {folder.last_step}"
                )
            yield _Found(path, folder.attempt, superseded)


def _counted_best(folder: _Folder) -> Best | None:
    best = read_best(folder.attempt.checkpoints)
    if best and folder.last_step is not None and best.step > folder.last_step:
        return None
    return best


def _first_whole(
    candidates: Callable[[], Iterator[Path]], warn: Callable[[str], None]
) -> Path | None:
    """The first that can be read; looks anew when one goes away, as it does for a newer one."""
    warned = set()
    for _ in range(10):
        vanished = False
        for path in candidates():
            try:
                read(path)
            except UnusableError as error:
                vanished = not path.exists()
                if vanished:
                    break
                if path not in warned:
                    warn(f"passing over {path.name}: {error}")
                warned.add(path)
                continue
            return path
        if not vanished:
            return None
    raise CheckpointError("the run's checkpoints change faster than they can be read; try again.")


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _hand_on(
    attempt: Attempt,
    source: Path,
    keep_last: int,
    best: Best | None,
    draft: Path,
    warn: Callable[[str], None],
) -> None:
    """Link into `draft` what is still needed; only what can be read there afterwards stays."""
    last = step_of(source)
    try:
        _link(source, draft)
    except FileNotFoundError:
        raise CheckpointError(
            f"the checkpoint {source} has gone since it was chosen: another start of the run is at "
            "work. Start this one again."
        ) from None
    read(draft / source.name)
    linked = {last}
    if best is None:
        bests = [_counted_best(folder) for folder in _folders(attempt.run, attempt)]
        best = next((each for each in bests if each and each.step <= last), None)
    for each in _all(attempt.run, attempt):
        step = step_of(each.path)
        is_best = best is not None and step == best.step
        full = len(linked) >= keep_last
        if each.superseded or step in linked or step >= last or (full and not is_best):
            continue
        fresh = draft / each.path.name
        try:
            _link(each.path, draft)
            read(fresh)
        except (FileNotFoundError, UnusableError) as error:
            if each.path.exists():
                warn(f"passing over {each.path.name}: {error}")
            remove(fresh)
            continue
        linked.add(step)
    if best and best.step in linked:
        write_best(draft, best)


def _link(path: Path, folder: Path) -> None:
    """Give a checkpoint and its checksum a further name, or a copy, in another folder."""
    # Links are of what is meant, not of a symbolic link that leads to it.
    for file in (checksum_of(path), path):
        target = folder / file.name
        try:
            os.link(file.resolve(), target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copy2(file, target)
            with target.open("rb") as copy:
                os.fsync(copy.fileno())
