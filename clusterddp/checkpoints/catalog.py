"""The checkpoints of a run, over all its attempts: which it would go on from, and what each is.

Works without torch, as `checkpoint_file` does.
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
    """When it was written, in seconds of the epoch."""
    problem: str
    """Why nothing can go on from it; empty when it was verified just now."""
    is_best: bool
    is_next: bool
    """Whether the run would go on from it."""
    attempt: int


@dataclass(frozen=True)
class Found:
    """A checkpoint of a run, whole or not."""

    path: Path
    attempt: Attempt
    superseded: str
    """Why it does not count, if so."""


def find(resume: str) -> Path:
    """The checkpoint that `--resume RUN|FOLDER|FILE` names; raises CheckpointError if none."""
    path = Path(resume).expanduser()
    if not path.is_dir():
        path = path.resolve() if path.exists() else path  # a link that a person names is meant
        files.read(path)
        return path
    run = RunDir(path.parent if path.name == "checkpoints" else path)
    if run.attempts.is_dir():
        found = newest(run)
    else:  # one attempt, or a folder of files copied from elsewhere
        found = newest_in(run.checkpoints if run.checkpoints.is_dir() else path)
    if found is None:
        raise CheckpointError(
            f"--resume {resume}: there is no whole checkpoint in it. "
            "Name another run directory, or a checkpoint file."
        )
    return found


def source(run: RunDir) -> Path | None:
    """The checkpoint that a run goes on from, or None while it has saved none; see `newest`.

    Raises CheckpointError where it has saved some and can go on from none of them: to begin at step
    0 again has to be asked for.
    """
    found = newest(run)
    if found:
        return found
    anew = f"To begin at step 0 again: clusterddp resubmit {run.shown} --from-scratch"
    if any(not each.superseded for each in all_of(run, None)):
        raise CheckpointError(
            f"no checkpoint of {run.name} is whole, so it cannot go on: see 'clusterddp "
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
    """The highest step that a run has saved, as its attempts have noted; 0 without one."""
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
    """The latest whole checkpoint of a run, or of its attempts before one.

    One that is damaged is passed over with a warning. What an attempt wrote beyond the step from
    which a later one went on does not count: a lost node's orphan may have written it.

    Raises CheckpointError when a folder cannot be read.
    """
    return _first_whole(lambda: (each.path for each in all_of(run, before) if not each.superseded))


def newest_in(folder: Path) -> Path | None:
    """The latest whole checkpoint in one folder; see `newest`."""
    return _first_whole(lambda: iter(files.files(folder)))


def listing(run: RunDir) -> list[Entry]:
    """Every checkpoint of a run, each read and verified, the highest step first.

    The same one in the folders of several attempts is listed once. Raises CheckpointError when a
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


def all_of(run: RunDir, before: Attempt | None) -> Iterator[Found]:
    """The checkpoints of a run in the order in which it would go on from them."""
    for folder in _folders(run, before):
        for path in files.files(folder.attempt.checkpoints):
            superseded = ""
            if folder.last_step is not None and step_of(path) > folder.last_step:
                superseded = folder.why
            yield Found(path, folder.attempt, superseded)


def bests(run: RunDir, before: Attempt | None) -> Iterator[Best]:
    """The best of each attempt where it counts, the latest attempt first."""
    for folder in _folders(run, before):
        best = files.read_best(folder.attempt.checkpoints)
        if best and (folder.last_step is None or best.step <= folder.last_step):
            yield best


@dataclass(frozen=True)
class _Folder:
    """The checkpoints of one attempt, and how far they count."""

    attempt: Attempt
    last_step: int | None
    """Last step that counts; None where all do."""
    why: str


def _folders(run: RunDir, before: Attempt | None) -> Iterator[_Folder]:
    """Those of a run, the latest attempt first."""
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
            why = f"superseded: attempt {attempt.number} went on from step {record.step}"


def given_up_attempt(run: RunDir) -> int:
    """The attempt up to which a person has given the checkpoints of a run up; 0 for none."""
    resubmits = [e for e in events.read(run.events) if isinstance(e, events.Resubmitted)]
    return (resubmits[-1].from_scratch or 0) if resubmits else 0


def _first_whole(candidates: Callable[[], Iterator[Path]]) -> Path | None:
    """The first that can be read; looks anew when one goes away, as it does for a newer one."""
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


# Of os.link, where the file system or its rules allow no further name for a file.
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
            _hand_on(attempt, source, keep_last, best, draft)
        sync_folder(draft)
        draft.replace(attempt.checkpoints)
        sync_folder(attempt.path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return attempt.checkpoints / source.name if source is not None and own else source


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _hand_on(
    attempt: Attempt,
    source: Path,
    keep_last: int,
    best: Best | None,
    draft: Path,
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
                files.read(each.path)  # names what it is; such a thing is not linked
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
