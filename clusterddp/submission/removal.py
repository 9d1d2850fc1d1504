"""Removes whole runs: their directories, with all records, checkpoints and copies of code."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterddp.errors import ClusterDDPError, RequestError
from clusterddp.run import attempt as attempts
from clusterddp.run.run_dir import RunDir, SweepDir, find_runs
from clusterddp.status.state import RunState
from clusterddp.status.status import RunStatus, statuses
from clusterddp.status.stop import awaits_turn
from clusterddp.submission.claim import claimed

_OVER = (RunState.CREATED, RunState.DONE, RunState.FAILED, RunState.STOPPED, RunState.CANCELLED)


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


def plan(runs: Sequence[RunDir]) -> tuple[list[Removal], list[RequestError]]:
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
                _check(run, known.get(run.path), named)
            except RequestError as error:
                left.remove(run)
                refused.append(error)
    states = {path: each.state for path, each in known.items()}
    return [Removal(run, states.get(run.path, ""), _bytes(run.path)) for run in left], refused


def remove(removal: Removal) -> None:
    """Remove a directory, from sight first; no link is followed out of it.

    Raises RequestError where another process submits or cleans the run, or it has been started
    meanwhile, and NotRemoved.
    """
    run = removal.run
    hidden = None
    try:
        with claimed(run):
            _check(run, None if isinstance(run, SweepDir) else statuses([run])[0], None)
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


def _check(run: RunDir, status: RunStatus | None, named: Collection[Path] | None) -> None:
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
        end = "" if is_unknown else f" End it first: clusterddp cancel {run.shown}"
        raise RequestError(f"{run.name} {how}, and is not removed.{end} [CD0508]")
    users = find_runs(run.path.parent) if named is not None else []
    users = [each for each in users if each.path.resolve() not in (named or ())]
    waiting = [each for each in users if _waits_for(each, run)]
    if waiting and any(each.state not in _OVER for each in statuses(waiting)):
        raise RequestError(
            f"{run.name} is not removed: {waiting[0].name} waits for it, or did, and is not over. "
            f"Cancel that first: clusterddp cancel {waiting[0].shown} [CD0508]"
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
    if status.state == RunState.CREATED and awaits_turn(run):
        return False
    if status.state in _OVER or status.is_forgotten:
        return True
    latest = attempts.latest(run)
    return not status.job_id and not (latest and latest.is_alive())  # it was started by hand


def begins_from(run: RunDir) -> Path | None:
    """Return the checkpoint, or the directory, from which a run's training begins with --resume."""
    spec = run.read_spec()
    resume = spec.program.options.get("resume") if spec else None
    return Path(resume).resolve() if resume else None


def _begins_within(other: RunDir, run: RunDir) -> bool:
    place = begins_from(other) if other.path != run.path else None
    return place is not None and place.is_relative_to(run.path.resolve())


def _waits_for(other: RunDir, run: RunDir) -> bool:
    spec = other.read_spec() if other.path != run.path else None
    after = spec.after if spec else ()
    return any(Path(place).resolve() == run.path.resolve() for place, _ in after)


def _bytes(folder: Path) -> int:
    size, seen = 0, set()
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = os.lstat(f"{place}/{name}")
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    size += status.st_size
    return size
