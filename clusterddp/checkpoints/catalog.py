"""Lists and verifies the checkpoints of a run, and selects the one to resume from.

step-00001200.pt has a SHA-256 file in the format of sha256sum(1), because torch.load silently
accepts a flipped bit. best.json in the same directory names the best checkpoint. Shards are in the
directory step-00001200.shards and in the same list of digests. A new attempt gets the checkpoints
that it needs as links or copies. Works without torch: `state` handles the content, and `writer` and
`from_memory` write.
"""

import errno
import hashlib
import io
import math
import os
import pickletools
import re
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from clusterddp import log
from clusterddp.errors import CheckpointError
from clusterddp.files import read as read_record
from clusterddp.files import read_file, sync_folder, write_atomically, write_record
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.node_memory import is_from_memory
from clusterddp.run.run_dir import RunDir
from clusterddp.version import __version__

FORMAT = 4
"""Version of what a checkpoint holds."""
BEST = "best.json"
_RENEWAL_SECONDS = 1.0
_NAME = re.compile(r"step-(\d{8,})\.pt", re.ASCII)
# torch.save writes a zip archive: its first bytes, and the first of its last 22.
_HEAD, _TAIL, _TAIL_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22
# In the name of the version that wrote a checkpoint; the archive is not compressed.
_MARK = b"clusterddp"


class UnusableError(CheckpointError):
    """A checkpoint is missing, damaged, or another program's file under its name."""

    code = "CD0702"

    def __init__(self, reason: str, message: str, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.reason = reason
        """The cause in a few words."""


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
    """Time of writing, in seconds since the epoch."""
    problem: str
    """Reason why the run cannot resume from it; empty if it is valid."""
    is_best: bool
    is_next: bool
    """True for the checkpoint from which the run resumes."""
    attempt: int
    from_memory: bool = False
    """True if it was saved from the memory of a node (`checkpoints.from_memory`)."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of a run, valid or not."""

    path: Path
    attempt: Attempt
    superseded: str
    """Reason why it is ignored; empty if it counts."""


def find(named: str) -> Path:
    """Return the checkpoint that `--init-from RUN|DIR|FILE` names, or raise CheckpointError."""
    path = Path(named).expanduser()
    if not path.is_dir():
        path = path.resolve() if path.exists() else path  # a link that the user names is meant
        read(path)
        return path
    run = RunDir(path.parent if path.name == "checkpoints" else path)
    if run.attempts.is_dir():
        checkpoint = find_newest(run)
    else:  # one attempt, or a directory of files copied from elsewhere
        checkpoint = newest_in(run.checkpoints if run.checkpoints.is_dir() else path)
    if checkpoint is None:
        raise CheckpointError(
            f"--init-from {named}: there is no valid checkpoint in it. "
            "Name another run directory, or a checkpoint file."
        )
    return checkpoint


def find_resume_checkpoint(run: RunDir) -> Path | None:
    """Return the checkpoint that a run resumes from, or None before its first; see `newest`.

    Raises CheckpointError if the run has saved some and can resume from none of them: a run starts
    again from step 0 only on request.
    """
    checkpoint = find_newest(run)
    if checkpoint:
        return checkpoint
    if any(not each.superseded for each in iter_candidates(run, None)):
        raise CheckpointError(
            f"no checkpoint of {run.name} is valid, so it cannot resume: see 'clusterddp "
            f"checkpoints {run.cli_name}'. {_how_to_restart(run)}"
        )
    step = saved_step(run)
    if step:
        raise CheckpointError(
            f"the checkpoints of {run.name} are gone: it had saved step {step}, but {run.attempts} "
            f"has none now. Put them back there. {_how_to_restart(run)}"
        )
    return None


def _how_to_restart(run: RunDir) -> str:
    """Return what starts a run again at step 0."""
    spec = run.read_spec()
    if not spec or spec.program.keeps_records:
        return f"To start again at step 0: clusterddp resume {run.cli_name} --from-scratch"
    if run.script.exists():
        return "To start again at step 0, submit a new run."
    return f"To start again at step 0, remove {run.path}."


def saved_step(run: RunDir) -> int:
    """Return the highest saved step in the records of a run's attempts; 0 if there is none."""
    noted = ((step, each) for each in _folders(run, None) for step in _noted_steps(each.attempt))
    return max((step for step, folder in noted if step <= folder.last_step), default=0)


def _noted_steps(attempt: Attempt) -> Iterator[int]:
    for noted in (attempt.read_final_record(), attempt.read_liveness()):
        yield max((noted.saved if noted else None) or 0, 0)
    record = attempt.read_record()
    # The path of a checkpoint of another run is an absolute one.
    if record and not Path(record.resumed_from or "/").is_absolute():
        yield record.step or 0


def find_newest(run: RunDir) -> Path | None:
    """Return the latest valid checkpoint of a run.

    Skips a damaged checkpoint with a warning, and all checkpoints after the step from which a later
    attempt resumed: an orphaned process on a lost node may have written them.

    Raises CheckpointError if a directory cannot be read.
    """
    return _first_valid(lambda: (c.path for c in iter_candidates(run, None) if not c.superseded))


def newest_in(folder: Path) -> Path | None:
    """Return the latest valid checkpoint in one directory; see `newest`."""
    return _first_valid(lambda: iter(files(folder)))


def list_verified(run: RunDir) -> list[Entry]:
    """List and verify every checkpoint of a run, the highest step first.

    A checkpoint in the directories of several attempts is listed once. Raises CheckpointError if a
    directory cannot be read.
    """
    entries: dict[tuple[int, str, str], Entry] = {}
    next_is_seen = False
    best = next(iter_best(run, None), None)
    for each in iter_candidates(run, None):
        problem = each.superseded
        try:
            if not problem:
                read(each.path)
        except UnusableError as error:
            problem = error.reason
        try:
            status = each.path.lstat()
            shards = sum(file.lstat().st_size for file in _shard_files(each.path))
        except FileNotFoundError:
            continue  # replaced by a newer checkpoint meanwhile
        checksum = ""
        with suppress(OSError):
            checksum = checksum_of(each.path).read_text(errors="replace")
        entry = Entry(
            path=each.path,
            step=step_of(each.path),
            bytes=status.st_size + shards,
            modified=status.st_mtime,
            problem=problem,
            is_best=best is not None and best.step == step_of(each.path) and not each.superseded,
            is_next=not problem and not next_is_seen,
            attempt=each.attempt.number,
            from_memory=is_from_memory(each.path),
        )
        next_is_seen = next_is_seen or entry.is_next
        entries.setdefault((entry.step, checksum, problem), entry)
    return sorted(entries.values(), key=lambda entry: (-entry.step, -entry.attempt))


def iter_candidates(run: RunDir, before: Attempt | None) -> Iterator[Candidate]:
    """Yield the checkpoints of a run in the order in which it tries to resume from them."""
    for folder in _folders(run, before):
        for path in files(folder.attempt.checkpoints):
            superseded = folder.why if step_of(path) > folder.last_step else ""
            yield Candidate(path, folder.attempt, superseded)


def iter_best(run: RunDir, before: Attempt | None) -> Iterator[Best]:
    """Yield each attempt's best checkpoint unless it is superseded, the latest attempt first."""
    for folder in _folders(run, before):
        best = read_best(folder.attempt.checkpoints)
        if best and best.step <= folder.last_step:
            yield best


@dataclass(frozen=True)
class _Folder:
    """Checkpoints of one attempt, and its last step that no later attempt supersedes."""

    attempt: Attempt
    last_step: float
    """Last step that counts; infinite if all count."""
    why: str
    """Reason why later steps are ignored."""


def _folders(run: RunDir, before: Attempt | None) -> Iterator[_Folder]:
    """Yield the directories of a run, the latest attempt first."""
    last_step, why = math.inf, ""
    given_up = given_up_attempt(run)
    for attempt in reversed(attempts(run)):
        if before and attempt.number >= before.number:
            continue
        if attempt.number <= given_up:
            last_step, why = -1, "given up: 'resume --from-scratch' started again from step 0"
        yield _Folder(attempt, last_step, why)
        record = attempt.read_record()
        if record and record.step is not None and record.step < last_step:
            last_step = record.step
            why = f"superseded: attempt {attempt.number} resumed from step {record.step}"


def given_up_attempt(run: RunDir) -> int:
    """Return the last attempt whose checkpoints `resume --from-scratch` gave up; 0 for none."""
    asked = [e for e in events.read(run.events) if isinstance(e, events.ResumeRequested)]
    return (asked[-1].from_scratch or 0) if asked else 0


def _first_valid(candidates: Callable[[], Iterator[Path]]) -> Path | None:
    """Return the first valid candidate; list again if a newer checkpoint replaced one."""
    warned = set()
    for _ in range(10):
        for path in candidates():
            try:
                read(path)
                return path
            except UnusableError as error:
                if not os.path.lexists(path):
                    break
                if path not in warned:
                    log.info(f"skipping {path.name}: {error}")
                warned.add(path)
        else:
            return None
    raise CheckpointError("the run's checkpoints change faster than they can be read; try again.")


# Errors of os.link where the file system or its rules allow no further name for a file.
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EACCES)


def adopt(
    attempt: Attempt, source: Path | None, keep_last: int, *, best: Best | None = None
) -> Path | None:
    """Create the checkpoints directory of a new attempt atomically.

    It gets the checkpoints of the run that are still needed: `source`, the last keep_last up to it,
    and the best up to it. They are hard links, so that either side can delete its own, or copies
    if the file system has no links. A source in another run stays there.

    best: the one recorded in `source`; by default the best.json files of the run are read.

    Returns the path of the source for the attempt. Raises OSError, and CheckpointError if the
    source is damaged or deleted.
    """
    of_run = source and source.resolve().is_relative_to(attempt.run.attempts.resolve())
    draft = Path(tempfile.mkdtemp(prefix=".checkpoints.", dir=attempt.path))
    try:
        if source and of_run:
            _carry_over(attempt, source, keep_last, best, draft)
        sync_folder(draft)
        draft.replace(attempt.checkpoints)
        sync_folder(attempt.path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return attempt.checkpoints / source.name if source and of_run else source


def _carry_over(
    attempt: Attempt, source: Path, keep_last: int, best: Best | None, draft: Path
) -> None:
    """Link the needed checkpoints into `draft`, and remove invalid ones from it."""
    last = step_of(source)
    try:
        _link(source, draft)
    except FileNotFoundError:
        raise CheckpointError(
            f"the checkpoint {source} was deleted since it was chosen: another attempt of the run "
            "is training. Start this one again."
        ) from None
    read(draft / source.name)
    linked = {last}
    if best is None:
        best = next((each for each in iter_best(attempt.run, attempt) if each.step <= last), None)
    for each in iter_candidates(attempt.run, attempt):
        step = step_of(each.path)
        is_best = best is not None and step == best.step
        full = len(linked) >= keep_last
        if each.superseded or step in linked or step >= last or (full and not is_best):
            continue
        fresh = draft / each.path.name
        try:
            if each.path.is_symlink() or not each.path.is_file():
                read(each.path)  # raises the cause: only regular files are linked
            _link(each.path, draft)
            read(fresh)
            linked.add(step)
        except (FileNotFoundError, UnusableError) as error:
            if os.path.lexists(each.path):
                log.info(f"skipping {each.path.name}: {error}")
            remove(fresh)
    if best and best.step in linked:
        write_best(draft, best)


def _link(path: Path, folder: Path) -> None:
    """Link a checkpoint and its checksum into another directory, or copy them."""
    # The target of a symbolic link is linked, not the link itself.
    for file in (*_shard_files(path), checksum_of(path), path):
        target = folder / file.relative_to(path.parent)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copy2(file, target)
            with target.open("rb") as copy:
                os.fsync(copy.fileno())


def name_of(step: int) -> str:
    return f"step-{step:08d}.pt"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name, or -1 for any other file."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def checksum_of(path: Path) -> Path:
    """Return the path of the SHA-256 of a checkpoint."""
    return path.with_name(path.name + ".sha256")


def shards_of(path: Path) -> Path:
    """Return the directory for the shards of a checkpoint."""
    return path.with_suffix(".shards")


def files(folder: Path) -> list[Path]:
    """List the checkpoints in a directory, valid or not, the highest step first.

    Empty if there is no directory. Raises CheckpointError if it cannot be read.
    """
    try:
        paths = [path for path in folder.iterdir() if step_of(path) >= 0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot read the directory {folder}: {error.strerror}. [CD0505]"
        ) from None
    return sorted(paths, key=step_of, reverse=True)


def read(path: Path, *, shards: bool = True) -> bytes:
    """Return the bytes of a valid checkpoint.

    shards: verify the files of a sharded one too, each once as long as it does not change.

    Raises UnusableError if it is missing, incomplete, unverified, of another format, or not a
    regular file: the run does not keep the target of a symbolic link, and reading a FIFO would
    wait for its writer.
    """
    data = _bytes_of(path)
    sums = _sums_of(path)
    _check_content(path, data, "".join(sums[:1]).split()[:1] == [hashlib.sha256(data).hexdigest()])
    if shards:
        for line in sums[1:]:
            _verify_shard(path, *line.split("  ", 1))
    return data


def _bytes_of(path: Path) -> bytes:
    """Return a checkpoint's bytes; raise UnusableError if it is not a readable regular file."""
    if path.is_symlink():
        reason = "a link" if path.exists() else "a dangling link"
        raise UnusableError(
            reason,
            f"the checkpoint {path} is {reason} to {path.readlink()}. Put the file itself there.",
        )
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise UnusableError("missing", f"the checkpoint {path} does not exist.") from None
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UnusableError(reason, f"the checkpoint {path} {reason}.") from None
    if not data:
        raise UnusableError("empty", f"the checkpoint {path} is empty.")
    return data


def _sums_of(path: Path) -> list[str]:
    """Return the lines of a checkpoint's checksum; raise UnusableError if there are none."""
    checksum = checksum_of(path)
    try:
        return read_file(checksum).decode(errors="replace").splitlines()
    except FileNotFoundError:
        raise UnusableError(
            "no checksum",
            f"the checkpoint {path} has no {checksum.name} next to it, so it may be incomplete. "
            "Copy that file too; if you trust the checkpoint, create it with sha256sum.",
        ) from None
    except OSError as error:
        reason = f"cannot be verified: {checksum.name}: {error.strerror}"
        raise UnusableError(reason, f"the checkpoint {path} {reason}.") from None


def _check_content(path: Path, data: bytes, fits: bool) -> None:
    """Raise UnusableError for another program's file, damaged bytes, or another format.

    fits: whether their SHA-256 matches the recorded one.
    """
    if not data.startswith(_HEAD) or (fits and _MARK not in data):
        raise UnusableError(
            "foreign", f"{path} is not a checkpoint of clusterddp, despite its name. [CD0704]"
        )
    if not fits:
        cut = "" if data[-_TAIL_BYTES:].startswith(_TAIL) else "it is cut off and "
        raise UnusableError(
            "cut off" if cut else "SHA-256 differs",
            f"the checkpoint {path} is damaged: {cut}its SHA-256 does not match the recorded one. "
            "Resume from an older checkpoint of the run.",
        )
    written = _format(data)
    if written is None:
        raise UnusableError(
            "unreadable",
            f"the checkpoint {path} was already damaged when its SHA-256 was taken: it has no "
            "format. Resume from an older checkpoint of the run.",
        )
    if written != FORMAT:
        raise UnusableError(
            f"format {written}",
            f"the checkpoint {path} has format {written}, but clusterddp {__version__} reads "
            f"format {FORMAT}. Resume with the clusterddp that wrote it. [CD0704]",
        )


_verified: dict[tuple[int, ...], str] = {}
"""SHA-256 of the shards that this process has read, by a signature that changes with the file."""


def _verify_shard(path: Path, digest: str, name: str = "") -> None:
    """Raise UnusableError if a shard has changed since it was written."""
    file = path.parent / name
    problem = "SHA-256 differs"
    try:
        inside = shards_of(path).resolve()
        if file.is_symlink() or inside not in file.resolve().parents:
            raise FileNotFoundError  # hostile or damaged: never read outside of the directory
        with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            status = os.fstat(f.fileno())
            signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if signature not in _verified:
                _verified[signature] = _sha256(f)
            if _verified[signature] == digest:
                return
    except FileNotFoundError:
        problem = "missing"
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    raise UnusableError(
        f"shard {problem}",
        f"the checkpoint {path} is damaged: its shard {file}: {problem}. Resume from an older "
        "checkpoint of the run.",
    )


def publish(
    attempt: Attempt, path: Path, write: Callable[[IO[bytes]], object], shards: Mapping[str, str]
) -> bool:
    """Write a checkpoint of an attempt, durably; it gets its name only once it is verified.

    Verified means that the bytes read back from the disk match those written. write: writes them in
    order into a file. shards: SHA-256 of its shards by path. Returns False, and publishes nothing,
    if a later attempt has begun. Raises OSError, after it has removed all partial files.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            summed = _Summed(file)
            write(cast(IO[bytes], summed))
            file.flush()
            os.fsync(file.fileno())
        digest = summed.digest.hexdigest()
        if stored_sha256(fresh) != digest:
            raise OSError("the bytes read back differ from those written")
        # The checksum first, so that the checkpoint is valid as soon as its name exists.
        lines = "".join(f"{each}  {name}\n" for name, each in {path.name: digest, **shards}.items())
        write_atomically(checksum_of(path), lines.encode())
        if attempt.is_superseded:
            return False
        fresh.replace(path)
        sync_folder(path.parent)
        return True
    finally:
        _take_away(fresh)
        if not path.exists():
            _take_away(checksum_of(path))
            shutil.rmtree(shards_of(path), ignore_errors=True)


class _Summed:
    """File that is written in order, with the SHA-256 of its bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _take_away(path: Path) -> None:
    with suppress(OSError):  # the disk is lost; the next attempt removes the file
        path.unlink(missing_ok=True)


def stored_sha256(path: Path) -> str:
    """Return the digest of the bytes on disk, not of those cached in memory. Raises OSError."""
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # drop clean pages to read from disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _sha256(file)


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def _shard_files(path: Path) -> list[Path]:
    """List the files of a sharded checkpoint; empty for any other."""
    with suppress(OSError):
        return sorted(each for each in shards_of(path).rglob("*") if not each.is_dir())
    return []


def _format(data: bytes) -> object:
    """Return a checkpoint's format, or None; its pickle is scanned, never executed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            [record] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            words = pickletools.genops(archive.read(record))
            # A dict's value follows its key; an opcode of the memo can stand between.
            any(word == "format" for _, word, _ in words)
            return next((word for op, word, _ in words if "INT" in op.name), None)
    except (ValueError, LookupError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return None


def read_best(folder: Path) -> Best | None:
    """Return the best checkpoint according to a directory's best.json, or None."""
    return read_record(Best, folder / BEST)


def write_best(folder: Path, best: Best) -> None:
    """Write best.json into a directory. Raises OSError."""
    write_record(folder / BEST, {"step": best.step, "accuracy": best.accuracy})


def remove_leftovers(folder: Path) -> None:
    """Delete temporary files and orphaned checksums of a killed writer.

    Only the directory's writer may call it. Raises OSError.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        hidden = path.name.startswith((".step-", f".{BEST}."))
        of = path.with_suffix({".sha256": "", ".shards": ".pt"}.get(path.suffix, path.suffix))
        if hidden or (of != path and step_of(of) >= 0 and not of.exists()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint and its checksum. Raises OSError."""
    # In this order, so that a kill in between leaves no apparently damaged checkpoint.
    path.unlink(missing_ok=True)
    checksum_of(path).unlink(missing_ok=True)
    if shards_of(path).exists():
        shutil.rmtree(shards_of(path))


class Renewal:
    """File whose `age` stays below two seconds while its writer works; a thread renews it."""

    def __init__(self, path: Path) -> None:
        """Create the file; on a full disk there is none."""
        self._path, self._done = path, threading.Event()
        with suppress(OSError):
            path.touch(0o600)
        threading.Thread(target=self._renew, name="renewal", daemon=True).start()

    def _renew(self) -> None:
        while not self._done.wait(_RENEWAL_SECONDS):
            with suppress(OSError):
                os.utime(self._path)

    def close(self) -> None:
        """Remove the file."""
        self._done.set()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
