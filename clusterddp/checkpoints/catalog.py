"""Catalogues the checkpoints of a run's attempts: which one it resumes from, which are valid.

A new attempt gets the checkpoints that it needs as links or copies. Works without torch.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterddp import log
from clusterddp.checkpoints import files
from clusterddp.checkpoints.files import Best, UnusableError, checksum_of, step_of
from clusterddp.errors import CheckpointError
from clusterddp.run import events
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.files import sync_folder
from clusterddp.run.run_dir import RunDir


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a run."""

    path: Path
    step: int
    bytes: int
    modified: float
    """Time of writing, in seconds since the epoch."""
    problem: str
    """Cause for which the run cannot resume from it; empty when it was just verified."""
    is_best: bool
    is_next: bool
    """True for the checkpoint from which the run resumes."""
    attempt: int


@dataclass(frozen=True)
class Candidate:
    """A checkpoint of a run, valid or not."""

    path: Path
    attempt: Attempt
    superseded: str
    """Cause for which it does not count; empty where it does."""


def find(resume: str) -> Path:
    """Return the checkpoint that `--resume RUN|FOLDER|FILE` names, or raise CheckpointError."""
    path = Path(resume).expanduser()
    if not path.is_dir():
        path = path.resolve() if path.exists() else path  # a link that the user names is meant
        files.read(path)
        return path
    run = RunDir(path.parent if path.name == "checkpoints" else path)
    if run.attempts.is_dir():
        checkpoint = newest(run)
    else:  # one attempt, or a folder of files copied from elsewhere
        checkpoint = newest_in(run.checkpoints if run.checkpoints.is_dir() else path)
    if checkpoint is None:
        raise CheckpointError(
            f"--resume {resume}: there is no valid checkpoint in it. "
            "Name another run directory, or a checkpoint file."
        )
    return checkpoint


def source(run: RunDir) -> Path | None:
    """Return the checkpoint that a run resumes from, or None before its first; see `newest`.

    Raises CheckpointError where it has saved some and can resume from none of them: a run begins
    at step 0 again only on request.
    """
    checkpoint = newest(run)
    if checkpoint:
        return checkpoint
    anew = f"To begin at step 0 again: clusterddp resubmit {run.shown} --from-scratch"
    if any(not each.superseded for each in all_of(run, None)):
        raise CheckpointError(
            f"no checkpoint of {run.name} is valid, so it cannot resume: see 'clusterddp "
            f"checkpoints {run.shown}'. {anew}"
        )
    step = saved_step(run)
    if step:
        raise CheckpointError(
            f"the checkpoints of {run.name} are gone: it had saved step {step}, and there is none "
            f"below {run.attempts} any more. Put them back there. {anew}"
        )
    return None


def saved_step(run: RunDir) -> int:
    """Return the highest step that a run has saved by its attempts' records; 0 without one."""
    return max(
        (
            step
            for folder in _folders(run, None)
            for step in _noted_steps(folder.attempt)
            if folder.last_step is None or step <= folder.last_step
        ),
        default=0,
    )


def _noted_steps(attempt: Attempt) -> Iterator[int]:
    for noted in (attempt.read_last_word(), attempt.read_sign_of_life()):
        yield max((noted.saved if noted else None) or 0, 0)
    record = attempt.read_record()
    # The path of a checkpoint of another run is an absolute one.
    if record and not Path(record.resumed_from or "/").is_absolute():
        yield record.step


def newest(run: RunDir, before: Attempt | None = None) -> Path | None:
    """Return the latest valid checkpoint of a run, or of its attempts before one.

    A damaged one is passed over with a warning. Those beyond the step from which a later attempt
    resumed do not count: the orphan of a lost node may have written them.

    Raises CheckpointError when a folder cannot be read.
    """
    return _first_valid(lambda: (each.path for each in all_of(run, before) if not each.superseded))


def newest_in(folder: Path) -> Path | None:
    """Return the latest valid checkpoint in one folder; see `newest`."""
    return _first_valid(lambda: iter(files.files(folder)))


def listing(run: RunDir) -> list[Entry]:
    """List and verify every checkpoint of a run, the highest step first.

    A checkpoint in the folders of several attempts is listed once. Raises CheckpointError when a
    folder cannot be read.
    """
    entries: dict[tuple[int, str, str], Entry] = {}
    next_is_seen = False
    best = next(bests(run, None), None)
    for each in all_of(run, None):
        problem = each.superseded
        try:
            if not problem:
                files.read(each.path)
        except UnusableError as error:
            problem = error.reason
        try:
            status = each.path.lstat()
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
            is_best=best is not None and best.step == step_of(each.path) and not each.superseded,
            is_next=not problem and not next_is_seen,
            attempt=each.attempt.number,
        )
        next_is_seen = next_is_seen or entry.is_next
        entries.setdefault((entry.step, checksum, problem), entry)
    return sorted(entries.values(), key=lambda entry: (-entry.step, -entry.attempt))


def all_of(run: RunDir, before: Attempt | None) -> Iterator[Candidate]:
    """Yield the checkpoints of a run in the order in which it tries to resume from them."""
    for folder in _folders(run, before):
        for path in files.files(folder.attempt.checkpoints):
            superseded = ""
            if folder.last_step is not None and step_of(path) > folder.last_step:
                superseded = folder.why
            yield Candidate(path, folder.attempt, superseded)


def bests(run: RunDir, before: Attempt | None) -> Iterator[Best]:
    """Yield the best checkpoint of each attempt where it counts, the latest attempt first."""
    for folder in _folders(run, before):
        best = files.read_best(folder.attempt.checkpoints)
        if best and (folder.last_step is None or best.step <= folder.last_step):
            yield best


@dataclass(frozen=True)
class _Folder:
    """Checkpoints of one attempt, and the last step that counts."""

    attempt: Attempt
    last_step: int | None
    """Last step that counts; None where all count."""
    why: str


def _folders(run: RunDir, before: Attempt | None) -> Iterator[_Folder]:
    """Yield the folders of a run, the latest attempt first."""
    last_step, why = None, ""
    given_up = given_up_attempt(run)
    for attempt in reversed(attempts(run)):
        if before and attempt.number >= before.number:
            continue
        if attempt.number <= given_up:
            last_step, why = -1, "given up: 'resubmit --from-scratch' begins at step 0 again"
        yield _Folder(attempt, last_step, why)
        record = attempt.read_record()
        if record and (last_step is None or record.step < last_step):
            last_step = record.step
            why = f"superseded: attempt {attempt.number} resumed from step {record.step}"


def given_up_attempt(run: RunDir) -> int:
    """Return the last attempt whose checkpoints `resubmit --from-scratch` gave up; 0 for none."""
    resubmits = [e for e in events.read(run.events) if isinstance(e, events.Resubmitted)]
    return (resubmits[-1].from_scratch or 0) if resubmits else 0


def _first_valid(candidates: Callable[[], Iterator[Path]]) -> Path | None:
    """Return the first valid one; looks again when one is deleted, as it is for a newer one."""
    warned = set()
    for _ in range(10):
        vanished = False
        for path in candidates():
            try:
                files.read(path)
            except UnusableError as error:
                vanished = not os.path.lexists(path)
                if vanished:
                    break
                if path not in warned:
                    log.info(f"passing over {path.name}: {error}")
                warned.add(path)
                continue
            return path
        if not vanished:
            return None
    raise CheckpointError("the run's checkpoints change faster than they can be read; try again.")


# Errors of os.link where the file system or its rules allow no further name for a file.
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.ENOTSUP, errno.EACCES)


def adopt(
    attempt: Attempt,
    source: Path | None,
    keep_last: int,
    *,
    best: Best | None = None,
) -> Path | None:
    """Make the checkpoints folder of a new attempt, whole or not at all.

    It gets the checkpoints of the run that are still needed: `source`, the last keep_last with it,
    and the best up to there. They are hard links, which neither side can delete for the other, or
    copies where the file system has no links. A source in another run stays there.

    best: the one recorded in `source`; by default the best.json files of the run are read.

    Returns the path of the source for the attempt. Raises OSError, and CheckpointError when the
    source is damaged or deleted.
    """
    draft = Path(tempfile.mkdtemp(prefix=".checkpoints.", dir=attempt.path))
    try:
        of_run = source is not None and _is_within(source, attempt.run.attempts)
        if source is not None and of_run:
            _carry_over(attempt, source, keep_last, best, draft)
        sync_folder(draft)
        draft.replace(attempt.checkpoints)
        sync_folder(attempt.path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return attempt.checkpoints / source.name if source is not None and of_run else source


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _carry_over(
    attempt: Attempt,
    source: Path,
    keep_last: int,
    best: Best | None,
    draft: Path,
) -> None:
    """Link the needed checkpoints into `draft`; those that are not valid there are removed."""
    last = step_of(source)
    try:
        _link(source, draft)
    except FileNotFoundError:
        raise CheckpointError(
            f"the checkpoint {source} was deleted since it was chosen: another attempt of the run "
            "is training. Start this one again."
        ) from None
    files.read(draft / source.name)
    linked = {last}
    if best is None:
        known = bests(attempt.run, attempt)
        best = next((each for each in known if each.step <= last), None)
    for each in all_of(attempt.run, attempt):
        step = step_of(each.path)
        is_best = best is not None and step == best.step
        full = len(linked) >= keep_last
        if each.superseded or step in linked or step >= last or (full and not is_best):
            continue
        fresh = draft / each.path.name
        try:
            if each.path.is_symlink() or not each.path.is_file():
                files.read(each.path)  # raises the cause: only regular files are linked
            _link(each.path, draft)
            files.read(fresh)
        except (FileNotFoundError, UnusableError) as error:
            if os.path.lexists(each.path):
                log.info(f"passing over {each.path.name}: {error}")
            files.remove(fresh)
            continue
        linked.add(step)
    if best and best.step in linked:
        files.write_best(draft, best)


def _link(path: Path, folder: Path) -> None:
    """Give a checkpoint and its checksum a further name, or a copy, in another folder."""
    # The target of a symbolic link is linked, not the link itself.
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
