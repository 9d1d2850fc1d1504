"""Removal of unneeded checkpoints, code copies and bundles from runs, and of whole runs.

A run that is queued, running or resumable loses nothing unless it is named, and even then keeps
everything it needs to resume. A whole run is removed only if it is over and no other run needs it.
Nothing outside a run's directory is touched: links are not followed, and every directory above a
removed file must be the run's own. Removals are recorded in events.jsonl.

The files that a sweep's trials share are in the sweep's directory. They are removed only if no
trial can resume. A trial without a directory could be resumed, so the files then stay unless
the sweep is named.
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
from clusterddp.status.sweeps import overall_state
from clusterddp.submission.claim import claimed
from clusterddp.submission.snapshot import Snapshot, digest_of

CHECKPOINT = "checkpoint"
CODE = "code"
CLUSTERDDP = "clusterddp"
_OWN_CLUSTERDDP = re.compile(r"clusterddp-[^/]+-[0-9a-f]{12}\.pyz", re.ASCII)
_MAX_NAMES = 5
_OVER = (RunState.CREATED, RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.CANCELLED)


@dataclass(frozen=True)
class Item:
    """Unneeded files of a run that are removed together."""

    kind: str
    """`checkpoint`, `code` or `clusterddp`."""
    path: str
    """Path relative to the run's directory."""
    step: int | None = None
    bytes: int = 0
    """Bytes freed by its removal; a file with further hard links frees none."""
    files: tuple[str, ...] = ()
    """Files to remove, in this order."""
    folders: tuple[str, ...] = ()
    """Directories to remove if they are empty then."""

    @property
    def description(self) -> str:
        """Its name in text: `step 400 of attempt 1`, `14 files of its copy of the code`."""
        if self.kind == CHECKPOINT:
            return f"step {self.step} of attempt {int(PurePosixPath(self.path).parts[1])}"
        if self.kind == CODE:
            return f"{formatting.count(len(self.files), 'file')} of its copy of the code"
        return "bundled clusterddp"


@dataclass(frozen=True)
class Cleaning:
    """Items to remove, or already removed, of one run or of a sweep's shared files."""

    run: RunDir
    state: RunState
    items: tuple[Item, ...] = ()
    skip_reason: str = ""
    """Why nothing is removed; empty if something is removed or nothing was found."""

    @property
    def bytes(self) -> int:
        """Bytes freed."""
        return sum(item.bytes for item in self.items)


def plan(
    runs: Sequence[RunDir], *, named: bool, older_than: float = 0.0, now: float
) -> list[Cleaning]:
    """Find what each run no longer needs, with one query to Slurm; changes nothing.

    runs: a sweep means its shared files, not its trials.
    named: whether the user named these runs.
    older_than: seconds for which a run must have been inactive.
    now: seconds since the epoch.
    """
    others = [each for root in {run.path.parent for run in runs} for each in find_runs(root)]
    resumed = set(filter(None, map(starts_from, others)))
    single = [run for run in runs if not isinstance(run, SweepDir)]
    known = {run.path: status for run, status in zip(single, statuses(single), strict=True)}
    return [
        _plan_shared(run, named=named, older_than=older_than, now=now)
        if isinstance(run, SweepDir)
        else _plan(run, known[run.path], resumed, named=named, older_than=older_than, now=now)
        for run in runs
    ]


def clean(run: RunDir, *, named: bool, older_than: float = 0.0, now: float) -> Cleaning:
    """Remove what a run no longer needs now, and return what was removed.

    Arguments are as for `plan`. No other process can submit or clean the run meanwhile; if the user
    starts its script by hand, the removal stops. Removals are recorded. Raises RequestError if
    another process has the claim or the run has started, and NotRemoved.
    """
    with contextlib.ExitStack() as stack:
        for each in (run, *_trials(run)):
            stack.enter_context(claimed(each))
        [cleaning] = plan([run], named=named, older_than=older_than, now=now)
        if not cleaning.items:
            return cleaning
        before, removed = _latest(run), []
        try:
            for item in cleaning.items:
                if _latest(run) != before:
                    raise RequestError(
                        f"{run.name} has started meanwhile: nothing more is removed. [CD0508]"
                    )
                _remove(run, item)
                removed.append(item)
        except OSError as error:
            raise NotRemoved(
                f"{run.name}: cannot remove {error.filename or run.path}: {error.strerror}. "
                "Nothing more was removed."
            ) from None
        finally:
            if removed:
                _record(run, removed)
        return cleaning


def _trials(run: RunDir) -> list[RunDir]:
    """Return the trials of a sweep that have a directory; none for a run. Raises RequestError."""
    trials = run.trials if isinstance(run, SweepDir) else []
    return [trial for trial in trials if trial.path.is_dir()]


def _latest(run: RunDir) -> list[attempts.Attempt | None]:
    return [attempts.latest(each) for each in (_trials(run) or [run])]


def reason_to_keep(run: RunDir, status: RunStatus) -> str:
    """Return why a run is cleaned only if it is named; empty if it cannot continue."""
    if status.state == RunState.DONE:
        return ""
    if status.state not in (RunState.FAILED, RunState.CANCELLED):
        more = "never submitted" if status.state == RunState.CREATED else "can resume"
        return status.state if status.state in ACTIVE else f"{status.state}, {more}"
    if status.checkpoint_step is not None:
        return f"{status.state}, can resume from step {status.checkpoint_step}"
    spec = run.read_spec()
    if spec and not spec.uses_own_code:
        return ""
    return f"{status.state}, can {(spec.program if spec else Command).restart_phrase}"


def _plan(
    run: RunDir,
    status: RunStatus,
    resumed: Collection[Path],
    *,
    named: bool,
    older_than: float,
    now: float,
) -> Cleaning:
    if not os.path.lexists(run.path):  # a trial of a sweep
        reason = "its directory is missing; its sweep's shared files are kept to resume it"
        return Cleaning(run, status.state, skip_reason=reason)
    can_continue = reason_to_keep(run, status)
    if can_continue and not named:
        return Cleaning(run, status.state, skip_reason=can_continue)
    if run.path.is_symlink() and not named:
        return Cleaning(run, status.state, skip_reason="its directory is a link")
    if older_than and now - _last_change(run, status) < older_than:
        return Cleaning(run, status.state, skip_reason="not old enough")
    try:
        found = [
            *_checkpoints(run, status, resumed),
            *_bundles(run, keep_current=bool(can_continue)),
        ]
        if not can_continue:
            found += _code(run)
    except (ClusterDDPError, OSError) as error:
        return Cleaning(run, status.state, skip_reason=f"it cannot be read: {error}")
    return Cleaning(run, status.state, tuple(_counted(run, found)))


def _plan_shared(sweep: SweepDir, *, named: bool, older_than: float, now: float) -> Cleaning:
    """Find a sweep's shared files, if none of its trials can resume."""
    try:
        trials = _trials(sweep)
        known = statuses(trials)
        state = overall_state([status.state for status in known])
        if not trials and not named:
            return Cleaning(sweep, state, skip_reason="it has no trials yet")
        if len(trials) < len(sweep.trials) and not named:
            reason = "some of its trials have no directory and could be resumed"
            return Cleaning(sweep, state, skip_reason=reason)
        needed = [run.name for run, s in zip(trials, known, strict=True) if reason_to_keep(run, s)]
        if needed:
            reason = "trials that use its files can resume"
            if named:
                reason += f": {formatting.join_limited(needed, _MAX_NAMES, ', ')}"
            return Cleaning(sweep, state, skip_reason=reason)
        if sweep.path.is_symlink() and not named:
            return Cleaning(sweep, state, skip_reason="its directory is a link")
        changes = [_last_change(run, s) for run, s in zip(trials, known, strict=True)]
        if older_than and now - max(changes, default=0.0) < older_than:
            return Cleaning(sweep, state, skip_reason="not old enough")
        found = [*_bundles(sweep, keep_current=False), *_code(sweep)]
    except (ClusterDDPError, OSError) as error:
        return Cleaning(sweep, RunState.UNKNOWN, skip_reason=f"it cannot be read: {error}")
    return Cleaning(sweep, state, tuple(_counted(sweep, found)))


def _last_change(run: RunDir, status: RunStatus) -> float:
    """Return the time of the run's last activity, in seconds since the epoch."""
    if status.ended_time:
        return status.ended_time
    # An earlier `clean` does not count as activity.
    history = [e for e in events.read(run.events) if not isinstance(e, events.Cleaned)]
    return max((event.time or 0.0 for event in history), default=status.created_time or 0.0)


def _checkpoints(run: RunDir, status: RunStatus, resumed: Collection[Path]) -> Iterator[Item]:
    """Yield the checkpoints except the last valid one, the best, and those other runs start from.

    A run without any valid checkpoint keeps all, and so does an attempt that may be running.
    """
    with log.to(lambda _: None):
        newest = catalog.find_newest(run)
    if newest is None:
        return
    known = list(catalog.iter_candidates(run, None))
    best = next(catalog.iter_best(run, None), None)
    of_best = [each.path for each in known if best and catalog.step_of(each.path) == best.step]
    kept = {newest, *([path for path in of_best if _is_valid(path)][:1] or of_best)}
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
            # In this order, a kill in between leaves no checkpoint that looks damaged.
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
    """Yield the run's bundles of clusterddp with their bytecode.

    The current one stays if `keep_current` is true or a notification job still needs it.
    """
    keep_current = keep_current or notify.has_pending_job(run)
    current = os.readlink(run.bundle) if run.bundle.is_symlink() else ""  # noqa: PTH115
    bytecode = _names_in(run, run.path / "__pycache__")
    for name in sorted(path.name for path in run.path.iterdir()):
        if _OWN_CLUSTERDDP.fullmatch(name) and not (keep_current and name == current):
            compiled = [f for f in bytecode if f.startswith(f"__pycache__/{name[: -len('.pyz')]}.")]
            link = (run.bundle.name,) if name == current else ()
            files = (name, *compiled, *link)
            yield Item(CLUSTERDDP, name, files=files, folders=("__pycache__",))


def _code(run: RunDir) -> Iterator[Item]:
    """Yield the unchanged files of the code copy.

    Files that a command wrote or changed there are results and stay. Raises RequestError.
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
    """Return whether a path in the run is still a file with this SHA-256."""
    try:
        path = _own(run, name)
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return digest_of(file)[0] == digest
    except OSError:
        return False


def _names_in(run: RunDir, path: Path) -> list[str]:
    """List a directory of the run, as paths relative to the run; empty if reached by a link."""
    try:
        inner = sorted(_own(run, f"{_relative(run, path)}/each").parent.iterdir())
    except OSError:
        return []
    return [_relative(run, each) for each in inner]


def _counted(run: RunDir, items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items with their existing files and the bytes that removing these frees."""
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
    """Remove an item's files and empty directories; missing files are ignored. Raises OSError."""
    for name in item.files:
        _own(run, name).unlink(missing_ok=True)
    for name in item.folders:
        with contextlib.suppress(OSError):
            _own(run, name).rmdir()


def _own(run: RunDir, name: str) -> Path:
    """Return a path in the run. Raises OSError if it leaves the run through a link.

    name: relative to the run's directory, which may itself be reached through a link.
    """
    path = run.path.resolve() / name
    if path.parent.resolve() != path.parent or not path.is_relative_to(run.path.resolve()):
        raise OSError(errno.ELOOP, "its path contains a link", str(run.path / name))
    return run.path / name


def _relative(run: RunDir, path: Path) -> str:
    return path.relative_to(run.path).as_posix()


def _record(run: RunDir, removed: Sequence[Item]) -> None:
    """Record what was removed, or log that this failed (the disk may be full)."""
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
            f"cannot write to {run.path} ({error.strerror}): the removal is not recorded. [CD0518]"
        )


class NotRemoved(ClusterDDPError):
    """Raised if a run or a part of it cannot be removed."""

    code = "CD0504"


@dataclass(frozen=True)
class Removal:
    """A directory to remove as a whole."""

    run: RunDir
    state: str
    bytes: int
    """Bytes of its files, including files with hard links elsewhere, which free nothing."""


def plan_removals(runs: Sequence[RunDir]) -> tuple[list[Removal], list[RequestError]]:
    """Measure the runs to remove and refuse those that may be active; changes nothing.

    Slurm is asked once. A sweep can be removed together with all its trials.
    """
    single = [run for run in runs if not isinstance(run, SweepDir)]
    known = {run.path: each for run, each in zip(single, statuses(single), strict=True)}
    left, refused = list(runs), list[RequestError]()
    count = -1
    while len(refused) != count:  # a refused run may need another one
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
    """Rename a directory to a hidden one, then delete that without following links.

    Raises RequestError if another process submits or cleans the run or it has started meanwhile,
    and NotRemoved.
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
        raise NotRemoved(f"{run.name}: cannot remove {where}: {error.strerror or error}.") from None


def _check_removal(run: RunDir, status: RunStatus | None, named: Collection[Path] | None) -> None:
    """Raise RequestError for a run that may be active or that another run needs.

    named: all runs to remove; None if their needs have already been checked.
    """
    if run.path.is_symlink():
        raise RequestError(
            f"{run.path} is a link to {run.path.resolve()}. Name that directory, and remove the "
            "link yourself. [CD0502]"
        )
    if isinstance(run, SweepDir):
        left = [each.name for each in run.trials if each.path.is_dir()]
        left = [name for name in left if (run.path.parent / name).resolve() not in (named or ())]
        if left:
            raise RequestError(
                f"{run.name} is not removed: its trials {', '.join(left)} use its files. [CD0508]"
            )
        return
    if status and not _is_over(run, status):
        is_unknown = status.state == RunState.UNKNOWN
        how = "may still be active" if is_unknown else f"is {status.state}"
        end = "" if is_unknown else f" Cancel it first: clusterddp cancel {run.cli_name}"
        raise RequestError(f"{run.name} {how} and is not removed.{end} [CD0508]")
    users = find_runs(run.path.parent) if named is not None else []
    users = [each for each in users if each.path.resolve() not in (named or ())]
    waiting = [each for each in users if _waits_for(each, run)]
    if waiting and any(each.state not in _OVER for each in statuses(waiting)):
        raise RequestError(
            f"{run.name} is not removed: {waiting[0].name} depends on it and is not over. "
            f"Cancel that first: clusterddp cancel {waiting[0].cli_name} [CD0508]"
        )
    user = next((each for each in users if _starts_within(each, run)), None)
    if user:
        raise RequestError(
            f"{run.name} is not removed: {user.name} starts from one of its checkpoints and may be "
            f"restarted. Remove both together. [CD0508]"
        )


def _is_over(run: RunDir, status: RunStatus) -> bool:
    spec = run.read_spec()
    if status.is_forgotten and spec and spec.run_name != run.name:
        return False  # it was moved; Slurm may know its job by its former name
    if status.state == RunState.CREATED and awaits_turn(History.read(run)):
        return False
    if status.state in _OVER or status.is_forgotten:
        return True
    latest = attempts.latest(run)
    return not status.job_id and not (latest and latest.is_alive())  # it was started by hand


def starts_from(run: RunDir) -> Path | None:
    """Return the checkpoint or directory that a run's --init-from names."""
    spec = run.read_spec()
    source = spec.program.options.get("init_from") if spec else None
    return Path(source).resolve() if source else None


def _starts_within(other: RunDir, run: RunDir) -> bool:
    source = starts_from(other) if other.path != run.path else None
    return source is not None and source.is_relative_to(run.path.resolve())


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
