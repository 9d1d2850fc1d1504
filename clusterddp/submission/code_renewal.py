"""Compares a run's copy of the code with the folder it came from, and replaces it by that folder.

Every attempt of a run uses the copy; a resubmission logs how the folder differs, or takes it anew.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterddp import log
from clusterddp.errors import RequestError
from clusterddp.request.spec import JobSpec
from clusterddp.run import formatting
from clusterddp.run.files import write_atomically
from clusterddp.run.run_dir import RunDir
from clusterddp.submission import snapshot
from clusterddp.submission.submit import no_code, runs_code_of

_MOST_NAMES = 5


@dataclass(frozen=True)
class Comparison:
    """The folder in which a run was submitted, against the recorded code of that run."""

    tree: Path
    recorded: snapshot.Snapshot
    now: snapshot.Snapshot | None
    """None where the folder cannot be read, or has become too large to be compared."""

    @property
    def changes(self) -> list[str]:
        """Changes of the files, a line each."""
        if self.now is None:
            return []
        # What is linked for its size is as it is now in the copy, too.
        linked = {*self.recorded.large, *self.now.large}
        before, now = (
            replace(one, digests={n: d for n, d in one.digests.items() if n not in linked})
            for one in (self.recorded, self.now)
        )
        return snapshot.difference(before, now, new=True)


def compare(spec: JobSpec, run: RunDir) -> Comparison | None:
    """Compare the current folder with the run's copy; None where the run has no copy.

    Raises RequestError where the record of the copy cannot be read.
    """
    if not run.code.is_dir() or not run.code_record.is_file():
        return None
    recorded = _recorded(run)
    now = snapshot.fingerprint(
        Path.cwd(), limit_mb=_limit_mb(recorded), leave_out=no_code(spec, run)
    )
    return Comparison(Path.cwd(), recorded, now)


def describe(run: RunDir, compared: Comparison) -> str:
    """Warning that the run's copy differs from the folder; empty where nothing differs."""
    taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.code_record.stat().st_mtime))
    uses = f"{run.name} runs its copy of the code ({run.code}, of {taken})"
    if compared.now is None:
        return f"warning: {uses}, and {compared.tree} cannot be compared with it"
    changes = compared.changes
    if not changes:
        return ""
    files = "1 file differs" if len(changes) == 1 else f"{len(changes)} files differ"
    return (
        f"{uses}; in {compared.tree} {files} by now: {_shown(changes)}. "
        "Use --code new to run the current files."
    )


@contextlib.contextmanager
def renewed(spec: JobSpec, run: RunDir, limit_mb: float | None) -> Iterator[list[str]]:
    """Replace the run's copy by the current folder, while the body submits the run.

    What a command has written in its copy goes along. The former copy stays until the run is
    submitted, and is put back when the body raises RequestError: after anything else the job may be
    queued. Whoever holds the claim on the run has called `mend` before.

    limit_mb: most megabytes of the copy; None lets it grow to twice the former one.
    Yields what differs from the former code, a line each. Raises RequestError where the folder
    cannot be copied; nothing is changed then.
    """
    tree = Path.cwd()
    if not runs_code_of(spec, tree):
        raise RequestError(
            f"--code new: {run.name} uses no code of {tree}: its tasks run what is installed."
        )
    recorded = _recorded(run) if run.code_record.is_file() else None
    record = run.code_record.read_bytes() if recorded else None
    had_copy = run.code.is_dir()
    try:
        taken = _take(spec, run, recorded, limit_mb)
        copied = _draft(run).is_dir()
        if copied:
            _swap(run)
        if taken:
            write_atomically(run.code_record, taken.to_json().encode())
    except BaseException as error:
        _put_back(run, had_copy, record)
        if isinstance(error, OSError):
            raise RequestError(f"--code new: {run.path} cannot be written: {error}.") from None
        raise
    changes = snapshot.difference(recorded, taken, new=True) if recorded and taken else []
    where = f"copied {tree} to {run.code}" if copied else f"{run.name} uses {tree}"
    log.info(f"{where} as it is now: {_shown(changes) or 'no file differs'}")
    try:
        yield changes
    except RequestError:
        _put_back(run, had_copy, record)
        raise
    finally:
        if run.code.is_dir():
            shutil.rmtree(_former(run), ignore_errors=True)


def mend(run: RunDir) -> None:
    """Repair the copy after a process that was killed while it renewed the code.

    Raises RequestError where that cannot be done.
    """
    try:
        if _former(run).is_dir() and not run.code.exists():
            _former(run).rename(run.code)
        for left in (_draft(run), _former(run)):
            if left.is_dir():
                shutil.rmtree(left)
    except OSError as error:
        raise RequestError(f"{run.path} cannot be written: {error}.") from None


def _take(
    spec: JobSpec,
    run: RunDir,
    recorded: snapshot.Snapshot | None,
    limit_mb: float | None,
) -> snapshot.Snapshot | None:
    """Copy the folder to the draft; where the run uses no copy, take its digests alone."""
    tree, left_out = Path.cwd(), no_code(spec, run)
    limit = _limit_mb(recorded) if limit_mb is None else limit_mb
    if run.code.is_dir() or spec.snapshot is not False:
        try:
            taken = snapshot.take(tree, _draft(run), limit_mb=limit, leave_out=left_out)
        except RequestError as error:
            if run.code.is_dir() or spec.snapshot:
                raise
            log.warning(f"your code is not copied: {error}")
        else:
            snapshot.warn_of_large(taken, limit)
            if recorded and run.code.is_dir():
                taken = _carry_over(run, recorded, taken)
            return taken
    return snapshot.fingerprint(tree, limit_mb=limit, leave_out=left_out)


def _carry_over(
    run: RunDir, recorded: snapshot.Snapshot, taken: snapshot.Snapshot
) -> snapshot.Snapshot:
    """Keep files that the command has written; they are no code, even where the folder has them."""
    both = snapshot.carry_over(run.code, recorded, Path.cwd(), _draft(run), taken)
    if not both:
        return taken
    log.info(f"kept what {run.name} has written, although the folder has it too: {_shown(both)}")
    digests = {name: digest for name, digest in taken.digests.items() if name not in both}
    return replace(taken, digests=digests, files=len(digests))


def _draft(run: RunDir) -> Path:
    return run.path / ".code-new"


def _former(run: RunDir) -> Path:
    return run.path / ".code-former"


def _swap(run: RunDir) -> None:
    if run.code.is_dir():
        run.code.rename(_former(run))
    _draft(run).rename(run.code)


def _put_back(run: RunDir, had_copy: bool, record: bytes | None) -> None:
    draft, former = _draft(run), _former(run)
    with contextlib.suppress(OSError):
        if run.code.is_dir() and (former.is_dir() or not had_copy):
            run.code.rename(draft)
        if former.is_dir():
            former.rename(run.code)
        if record is None:
            run.code_record.unlink(missing_ok=True)
        else:
            write_atomically(run.code_record, record)
    shutil.rmtree(draft, ignore_errors=True)


def _recorded(run: RunDir) -> snapshot.Snapshot:
    try:
        return snapshot.Snapshot.from_json(run.code_record.read_text(errors="replace"))
    except (OSError, RequestError) as error:
        raise RequestError(f"{run.code_record} cannot be read: {error}") from None


def _limit_mb(recorded: snapshot.Snapshot | None) -> float:
    return max(snapshot.LIMIT_MB, 2 * recorded.bytes / 1e6) if recorded else snapshot.LIMIT_MB


def _shown(names: Sequence[str]) -> str:
    return formatting.some(names, _MOST_NAMES, ", ")
