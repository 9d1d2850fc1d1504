"""Removes what can be spared of runs, checkpoints, copies of code, their clusterddp; and runs.

A run that is queued, running or could go on loses nothing unless it is named, and then nothing that
it needs to go on; a whole run goes once it is over and no other needs it. Nothing outside a run's
directory is touched: no symbolic link is followed, and a file counts only where all folders above
it are the run's own. What was removed stands in events.jsonl. What the points of a sweep share lies
in the sweep's directory, and goes only once none of them could go on; a point whose directory is
gone could be submitted again, and keeps it unless the sweep is named.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from clusterddp import formatting, log
from clusterddp.checkpoints import catalog
from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.request.program import Command
from clusterddp.run import attempt as attempts
from clusterddp.run import events
from clusterddp.run.history import History
from clusterddp.run.run_dir import RunDir, SweepDir, find_runs
from clusterddp.status import notify
from clusterddp.status.state import ACTIVE, RunState
from clusterddp.status.status import RunStatus, statuses
from clusterddp.status.stop import awaits_turn
from clusterddp.status.sweeps import most_telling
from clusterddp.submission.claim import claimed
from clusterddp.submission.snapshot import Snapshot, digest_of

CHECKPOINT = "checkpoint"
CODE = "code"
CLUSTERDDP = "clusterddp"
_OWN_CLUSTERDDP = re.compile(r"clusterddp-[^/]+-[0-9a-f]{12}\.pyz", re.ASCII)
_MOST_NAMES = 5
_OVER = (RunState.CREATED, RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.CANCELLED)


@dataclass(frozen=True)
class Item:
    """Something that can be spared, and goes as a whole."""

    kind: str
    """`checkpoint`, `code` or `clusterddp`."""
    path: str
    """Its place in the run's directory."""
    step: int | None = None
    bytes: int = 0
    """Bytes that its removal gives back; a file with other names that stay gives none."""
    files: tuple[str, ...] = ()
    """Files to remove, in this order."""
    folders: tuple[str, ...] = ()
    """Folders to remove where they are empty then."""

    @property
    def words(self) -> str:
        """Name it: `step 400 of attempt 1`, `14 files of its copy of the code`."""
        if self.kind == CHECKPOINT:
            return f"step {self.step} of attempt {int(PurePosixPath(self.path).parts[1])}"
        if self.kind == CODE:
            count = len(self.files)
            return f"{count:,} {'file' if count == 1 else 'files'} of its copy of the code"
        return f"its own clusterddp, {self.path}"


@dataclass(frozen=True)
class Cleaning:
    """Things to remove of one run, or of what a sweep's points share, or that were removed."""

    run: RunDir
    state: RunState
    items: tuple[Item, ...] = ()
    kept_because: str = ""
    """Reason for which nothing of it is removed; empty where something is, or nothing was found."""

    @property
    def bytes(self) -> int:
        """Return the bytes that are given back."""
        return sum(item.bytes for item in self.items)


def plan(
    runs: Sequence[RunDir], *, named: bool, older_than: float = 0.0, now: float
) -> list[Cleaning]:
    """Find what can be spared of each run; asks Slurm once for all of them, and touches nothing.

    runs: sweeps among them stand for what their points share, and not for these. named: whether a
    person has named these runs. older_than: seconds for which a run must have been
    left alone. now: seconds since the epoch.
    """
    others = [each for root in {run.path.parent for run in runs} for each in find_runs(root)]
    resumed = set(filter(None, map(begins_from, others)))
    alone = [run for run in runs if not isinstance(run, SweepDir)]
    known = {run.path: status for run, status in zip(alone, statuses(alone), strict=True)}
    return [
        _plan_shared(run, named=named, older_than=older_than, now=now)
        if isinstance(run, SweepDir)
        else _plan(run, known[run.path], resumed, named=named, older_than=older_than, now=now)
        for run in runs
    ]


def clean(run: RunDir, *, named: bool, older_than: float = 0.0, now: float) -> Cleaning:
    """Remove what can be spared of a run as it is now; returns what was removed.

    The others are as of `plan`. No other process submits or cleans the run meanwhile; one that a
    person gives to sbatch by hand ends the removal as it starts. Raises RequestError where another
    process is at it, and NotRemoved; what was removed is recorded.
    """
    with contextlib.ExitStack() as stack:
        for each in (run, *_points(run)):
            stack.enter_context(claimed(each))
        [cleaning] = plan([run], named=named, older_than=older_than, now=now)
        if not cleaning.items:
            return cleaning
        before, removed = _latest(run), []
        try:
            for item in cleaning.items:
                if _latest(run) != before:
                    raise RequestError(
                        f"{run.name} has started meanwhile: the rest of it stays. [CD0508]"
                    )
                _remove(run, item)
                removed.append(item)
        except OSError as error:
            raise NotRemoved(
                f"{run.name}: {error.filename or run.path} cannot be removed: {error.strerror}. "
                "What comes after it stays."
            ) from None
        finally:
            if removed:
                _record(run, removed)
        return cleaning


def _points(run: RunDir) -> list[RunDir]:
    """Return the points of a sweep that are there; none of a run. Raises RequestError."""
    points = run.elements if isinstance(run, SweepDir) else []
    return [point for point in points if point.path.is_dir()]


def _latest(run: RunDir) -> list[attempts.Attempt | None]:
    return [attempts.latest(each) for each in (_points(run) or [run])]


def why_kept(run: RunDir, status: RunStatus) -> str:
    """Say why a run may go on, for which it is not cleaned unasked; empty where it has ended."""
    if status.state == RunState.DONE:
        return ""
    if status.state not in (RunState.FAILED, RunState.CANCELLED):
        return status.state if status.state in ACTIVE else f"{status.state}, can go on"
    if status.checkpoint_step is not None:
        return f"{status.state}, can go on from step {status.checkpoint_step}"
    spec = run.read_spec()
    if spec and not spec.uses_own_code:
        return ""
    return f"{status.state}, can {(spec.program if spec else Command).again}"


def _plan(
    run: RunDir,
    status: RunStatus,
    resumed: Collection[Path],
    *,
    named: bool,
    older_than: float,
    now: float,
) -> Cleaning:
    if not os.path.lexists(run.path):  # a sweep has it among its points
        words = (
            "its directory is gone; it can be submitted again while its sweep keeps what is shared"
        )
        return Cleaning(run, status.state, kept_because=words)
    goes_on = why_kept(run, status)
    if goes_on and not named:
        return Cleaning(run, status.state, kept_because=goes_on)
    if run.path.is_symlink() and not named:
        return Cleaning(run, status.state, kept_because="its directory is a link")
    if older_than and now - _last_change(run, status) < older_than:
        return Cleaning(run, status.state, kept_because="not old enough")
    try:
        found = [*_checkpoints(run, status, resumed), *_bundles(run, keep_current=bool(goes_on))]
        if not goes_on:
            found += _code(run)
    except (ClusterDDPError, OSError) as error:
        return Cleaning(run, status.state, kept_because=f"it cannot be read: {error}")
    return Cleaning(run, status.state, tuple(_counted(run, found)))


def _plan_shared(sweep: SweepDir, *, named: bool, older_than: float, now: float) -> Cleaning:
    """Find what the points of a sweep share, once none of them could go on."""
    try:
        points = _points(sweep)
        known = statuses(points)
        state = most_telling([status.state for status in known])
        if not points and not named:
            return Cleaning(sweep, state, kept_because="it has no points yet")
        if len(points) < len(sweep.elements) and not named:
            words = "points of it are gone, and could be submitted again"
            return Cleaning(sweep, state, kept_because=words)
        needed = [run.name for run, s in zip(points, known, strict=True) if why_kept(run, s)]
        if needed:
            words = "points that share it could go on"
            if named:
                words += f": {formatting.join_limited(needed, _MOST_NAMES, ', ')}"
            return Cleaning(sweep, state, kept_because=words)
        if sweep.path.is_symlink() and not named:
            return Cleaning(sweep, state, kept_because="its directory is a link")
        changes = [_last_change(run, s) for run, s in zip(points, known, strict=True)]
        if older_than and now - max(changes, default=0.0) < older_than:
            return Cleaning(sweep, state, kept_because="not old enough")
        found = [*_bundles(sweep, keep_current=False), *_code(sweep)]
    except (ClusterDDPError, OSError) as error:
        return Cleaning(sweep, RunState.UNKNOWN, kept_because=f"it cannot be read: {error}")
    return Cleaning(sweep, state, tuple(_counted(sweep, found)))


def _last_change(run: RunDir, status: RunStatus) -> float:
    """Return the time at which the run was last heard of, in seconds since the epoch."""
    if status.ended_time:
        return status.ended_time
    # `clean` itself is no life.
    history = [e for e in events.read(run.events) if not isinstance(e, events.Cleaned)]
    return max((event.time or 0.0 for event in history), default=status.created_time or 0.0)


def _checkpoints(run: RunDir, status: RunStatus, resumed: Collection[Path]) -> Iterator[Item]:
    """Yield the checkpoints but for the last valid one, the best, and those that others resume.

    A run none of whose checkpoints is valid keeps all of them, and an attempt that may be at work
    all of its own.
    """
    with log.to(lambda _: None):
        newest = catalog.newest(run)
    if newest is None:
        return
    known = list(catalog.all_of(run, None))
    best = next(catalog.bests(run, None), None)
    of_best = [each.path for each in known if best and catalog.step_of(each.path) == best.step]
    valid = [path for path in of_best if _is_valid(path)]
    kept = {newest, *(valid[:1] or of_best)}
    latest = attempts.latest(run)
    for each in known:
        is_at_work = status.state in ACTIVE and each.attempt == latest
        if each.path in kept or is_at_work or each.path.resolve() in resumed:
            continue
        shards = catalog.shards_of(each.path)
        inner = tuple(_names_in(run, shards))
        yield Item(
            CHECKPOINT,
            _relative(run, each.path),
            catalog.step_of(each.path),
            # In this order, so that a kill in between leaves no apparently damaged checkpoint.
            files=(
                _relative(run, each.path),
                _relative(run, catalog.checksum_of(each.path)),
                *inner,
            ),
            folders=(_relative(run, shards),) if inner else (),
        )


def _is_valid(path: Path) -> bool:
    try:
        catalog.read(path)
    except catalog.UnusableError:
        return False
    return True


def _bundles(run: RunDir, *, keep_current: bool) -> Iterator[Item]:
    """Yield the run's own clusterddp, with the bytecode.

    The one in use stays where `keep_current` says so, or where a job is to tell the end by it.
    """
    keep_current = keep_current or notify.has_pending_job(run)
    current = os.readlink(run.bundle) if run.bundle.is_symlink() else ""  # noqa: PTH115
    bytecode = _names_in(run, run.path / "__pycache__")
    for name in sorted(path.name for path in run.path.iterdir()):
        if _OWN_CLUSTERDDP.fullmatch(name) and not (keep_current and name == current):
            beside = [f for f in bytecode if f.startswith(f"__pycache__/{name[: -len('.pyz')]}.")]
            link = (run.bundle.name,) if name == current else ()
            files = (name, *beside, *link)
            yield Item(CLUSTERDDP, name, files=files, folders=("__pycache__",))


def _code(run: RunDir) -> Iterator[Item]:
    """Yield the files of the copy of the code that are as they were copied: the others stay.

    What a command has written or changed there is its result. Raises RequestError.
    """
    if not run.code_record.is_file() or run.code.is_symlink() or not run.code.is_dir():
        return
    record = Snapshot.read(run.code_record)
    same = [n for n, digest in record.digests.items() if _is_same(run, f"code/{n}", digest)]
    folders = {str(parent) for name in same for parent in PurePosixPath(name).parents} - {"."}
    if same:
        yield Item(
            CODE,
            "code",
            files=tuple(f"code/{name}" for name in same),
            folders=tuple(f"code/{f}" for f in sorted(folders, key=len, reverse=True)),
        )


def _is_same(run: RunDir, name: str, digest: str) -> bool:
    """Return whether a path in the run is still the file with this SHA-256."""
    try:
        path = _own(run, name)
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return digest_of(file)[0] == digest
    except OSError:
        return False


def _names_in(run: RunDir, path: Path) -> list[str]:
    """List what lies in a folder of the run, as paths in the run; nothing behind a link."""
    try:
        inner = sorted(_own(run, f"{_relative(run, path)}/each").parent.iterdir())
    except OSError:
        return []
    return [_relative(run, each) for each in inner]


def _counted(run: RunDir, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items with the files that are there, and the bytes that they give back."""
    names: dict[tuple[int, int], int] = {}
    for item in items:
        size, files = 0, []
        for name in item.files:
            status = _lstat(run, name)
            if status is None or stat.S_ISDIR(status.st_mode):
                continue
            files.append(name)
            key = status.st_dev, status.st_ino
            names[key] = names.get(key, 0) + 1
            if names[key] == status.st_nlink and not stat.S_ISLNK(status.st_mode):  # its last name
                size += status.st_size
        if files and (item.kind == CODE or files[0] == item.files[0]):
            yield Item(item.kind, item.path, item.step, size, tuple(files), item.folders)


def _lstat(run: RunDir, name: str) -> os.stat_result | None:
    try:
        return _own(run, name).lstat()
    except OSError:
        return None


def _remove(run: RunDir, item: Item) -> None:
    """Remove an item's files and empty folders. Raises OSError; what is gone already is passed."""
    for name in item.files:
        _own(run, name).unlink(missing_ok=True)
    for name in item.folders:
        with contextlib.suppress(OSError):
            _own(run, name).rmdir()


def _own(run: RunDir, name: str) -> Path:
    """Return a path in the run whose folders are all the run's own. Raises OSError for another.

    name: relative to the run's directory, which may itself be reached by a link.
    """
    path = run.path.resolve() / name
    if path.parent.resolve() != path.parent or not path.is_relative_to(run.path.resolve()):
        raise OSError(errno.ELOOP, "it is reached by a link", str(run.path / name))
    return run.path / name


def _relative(run: RunDir, path: Path) -> str:
    return path.relative_to(run.path).as_posix()


def _record(run: RunDir, removed: Sequence[Item]) -> None:
    """Record what was removed; on a disk that takes nothing it is logged."""
    try:
        events.add(
            run.events,
            events.Cleaned(
                checkpoints=tuple(sorted({i.step for i in removed if i.step is not None})),
                code_files=sum(len(item.files) for item in removed if item.kind == CODE),
                clusterddp=tuple(item.path for item in removed if item.kind == CLUSTERDDP),
                bytes=sum(item.bytes for item in removed),
            ),
        )
    except OSError as error:
        log.warning(
            f"{run.path} cannot be written ({error.strerror}): the removal is not recorded [CD0518]"
        )


class NotRemoved(ClusterDDPError):
    """A run, or something of it, cannot be removed."""

    code = "CD0504"


@dataclass(frozen=True)
class Removal:
    """A directory that is to go as a whole."""

    run: RunDir
    state: str
    bytes: int
    """Bytes of its files; of one with other names elsewhere too, which give none back."""


def plan_removals(runs: Sequence[RunDir]) -> tuple[list[Removal], list[RequestError]]:
    """Measure what is to go, and refuse what may be at work; asks Slurm once, touches nothing.

    A sweep among the runs is to go once all its points are.
    """
    alone = [run for run in runs if not isinstance(run, SweepDir)]
    known = {run.path: each for run, each in zip(alone, statuses(alone), strict=True)}
    left, refused = list(runs), list[RequestError]()
    count = -1
    while len(refused) != count:  # what stays may need another one
        count = len(refused)
        named = {run.path.resolve() for run in left}
        for run in left.copy():
            try:
                _check_removal(run, known.get(run.path), named)
            except RequestError as error:
                left.remove(run)
                refused.append(error)
    states = {path: each.state for path, each in known.items()}
    return [Removal(run, states.get(run.path, ""), _size(run.path)) for run in left], refused


def remove_run(removal: Removal) -> None:
    """Remove a directory, from sight first; no link is followed out of it.

    Raises RequestError where another process submits or cleans the run, or it has been started
    meanwhile, and NotRemoved.
    """
    run = removal.run
    hidden = None
    try:
        with claimed(run):
            _check_removal(run, None if isinstance(run, SweepDir) else statuses([run])[0], None)
            hidden = Path(tempfile.mkdtemp(prefix=f".{run.name}.", dir=run.path.parent))
            run.path.rename(hidden / run.name)
        shutil.rmtree(hidden)
    except OSError as error:
        where = hidden if hidden and (hidden / run.name).exists() else run.path
        if hidden and where == run.path:
            with contextlib.suppress(OSError):
                hidden.rmdir()
        raise NotRemoved(
            f"{run.name}: {where} cannot be removed: {error.strerror or error}."
        ) from None


def _check_removal(run: RunDir, status: RunStatus | None, named: Collection[Path] | None) -> None:
    """Raise RequestError for a run that may be at work, or that another one needs.

    named: the others that are to go; None where these have been looked at, and may have gone.
    """
    if run.path.is_symlink():
        raise RequestError(
            f"{run.path} is a link to {run.path.resolve()}: name that directory, and remove the "
            "link yourself. [CD0502]"
        )
    if isinstance(run, SweepDir):
        left = [each.name for each in run.elements if each.path.is_dir()]
        left = [name for name in left if (run.path.parent / name).resolve() not in (named or ())]
        if left:
            raise RequestError(f"{run.name} keeps what its points {', '.join(left)} use. [CD0508]")
        return
    if status and not _is_over(run, status):
        is_unknown = status.state == RunState.UNKNOWN
        how = "is not known to be over" if is_unknown else f"is {status.state}"
        end = "" if is_unknown else f" End it first: clusterddp cancel {run.cli_name}"
        raise RequestError(f"{run.name} {how}, and is not removed.{end} [CD0508]")
    users = find_runs(run.path.parent) if named is not None else []
    users = [each for each in users if each.path.resolve() not in (named or ())]
    waiting = [each for each in users if _waits_for(each, run)]
    if waiting and any(each.state not in _OVER for each in statuses(waiting)):
        raise RequestError(
            f"{run.name} is not removed: {waiting[0].name} waits for it, or did, and is not over. "
            f"Cancel that first: clusterddp cancel {waiting[0].cli_name} [CD0508]"
        )
    user = next((each for each in users if _begins_within(each, run)), None)
    if user:
        raise RequestError(
            f"{run.name} is not removed: {user.name} begins from a checkpoint of it, and may be "
            f"started again. Remove that as well. [CD0508]"
        )


def _is_over(run: RunDir, status: RunStatus) -> bool:
    spec = run.read_spec()
    if status.is_forgotten and spec and spec.run_name != run.name:
        return False  # it was moved, and Slurm may know its job by the name that it had
    if status.state == RunState.CREATED and awaits_turn(History.read(run)):
        return False
    if status.state in _OVER or status.is_forgotten:
        return True
    latest = attempts.latest(run)
    return not status.job_id and not (latest and latest.is_alive())  # it was started by hand


def begins_from(run: RunDir) -> Path | None:
    """Return the checkpoint or directory that a run's --init-from names."""
    spec = run.read_spec()
    source = spec.program.options.get("init_from") if spec else None
    return Path(source).resolve() if source else None


def _begins_within(other: RunDir, run: RunDir) -> bool:
    place = begins_from(other) if other.path != run.path else None
    return place is not None and place.is_relative_to(run.path.resolve())


def _waits_for(other: RunDir, run: RunDir) -> bool:
    spec = other.read_spec() if other.path != run.path else None
    after = spec.after if spec else ()
    return any(Path(place).resolve() == run.path.resolve() for place, _ in after)


def _size(folder: Path) -> int:
    size, seen = 0, set()
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(f"{place}/{name}")
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    size += status.st_size
    return size
