"""Directories of a sweep's points: made when they are submitted, so that queued ones are seen."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterddp import files
from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.run import events
from clusterddp.run.run_dir import RunDir, SweepDir, undo

SHARED = ("clusterddp.pyz", "code", "code.json", "script.sbatch")
"""Files of a sweep that its points lead to."""


@contextlib.contextmanager
def created(sweep: SweepDir, spec: JobSpec, indices: Sequence[int]) -> Iterator[list[RunDir]]:
    """Make the directories of points as runs that share the sweep's files, or none at all.

    Those that it has made are taken away again when an interruption or an error keeps it from the
    others, or when the body raises RequestError. Raises RequestError where one exists or cannot be
    written.
    """
    refuse_existing(spec, indices)
    points = [sweep.element(index) for index in indices]
    shared = [name for name in SHARED if os.path.lexists(sweep.path / name)]
    made: list[RunDir] = []
    try:
        for index, point in zip(indices, points, strict=True):
            point.path.mkdir(mode=0o700)
            made.append(point)  # one that is there by now is another submission's
            _fill(point, spec.element(index), sweep, shared)
    except BaseException as error:
        _undo(made)
        if not isinstance(error, OSError):
            raise
        raise RequestError(
            f"--output-root: cannot write {error.filename or sweep.path}: {error.strerror}. "
            "Choose a folder that you can write and that has room. [CD0504]"
        ) from None
    try:
        yield points
    except RequestError:
        _undo(made)
        raise


def refuse_existing(
    spec: JobSpec, indices: Sequence[int], instead: str = "choose another --run-name"
) -> None:
    """Refuse points whose directories are there already; raises RequestError.

    instead: what a person can do.
    """
    for index in indices:
        path = Path(f"{spec.run_dir}-{index}")
        if os.path.lexists(path):
            raise RequestError(
                f"the run {path.name} exists already at {path}, and would be a point of the sweep "
                f"{spec.run_name}; {instead}. [CD0503]"
            )


def index_of(point: RunDir) -> int:
    """Return the index of a point, by its name."""
    return int(point.name.rpartition("-")[2])


def note_rehearsal(sweep: RunDir, indices: Sequence[int]) -> None:
    """Record that points will run on this machine, one after the other. Raises OSError."""
    events.add(
        sweep.events,
        events.Submitted(
            launcher="local",
            pid=os.getpid(),
            host=os.uname().nodename,
            folder=str(Path.cwd()),
            indices=tuple(indices),
        ),
    )


def _fill(point: RunDir, spec: JobSpec, sweep: SweepDir, shared: Sequence[str]) -> None:
    """Fill a directory; its request comes last, as it makes the directory a run. Raises OSError."""
    for name in shared:
        (point.path / name).symlink_to(Path("..") / sweep.name / name)
    if sweep.workdir_name:
        point.workdir.symlink_to(sweep.workdir.readlink())
    # Not synced one by one: the sweep's own request has all of it.
    files.create(point.path / ".spec.json", spec.to_json().encode())
    (point.path / ".spec.json").replace(point.spec)


def _undo(points: Sequence[RunDir]) -> None:
    for point in points:
        undo(point.path, [])
