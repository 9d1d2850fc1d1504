"""Compares a run's copy of the code with the folder it came from, and replaces it by that folder.

Every attempt of a run uses the copy; a resubmission logs how the folder differs, or takes it anew.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from clusterddp import formatting, log
from clusterddp.errors import RequestError
from clusterddp.files import write_atomically
from clusterddp.request.spec import JobSpec
from clusterddp.run.run_dir import RunDir
from clusterddp.submission import snapshot
from clusterddp.submission.submit import no_code

_MOST_NAMES = 5


def log_changes(spec: JobSpec, run: RunDir) -> None:
    """Log in what the current folder differs from the run's copy of the code.

    Raises RequestError where the record of the copy cannot be read.
    """
    tree, recorded = run.top_of_code(Path.cwd()), snapshot.Snapshot.read(run.code_record)
    left_out, workdir = no_code(spec, run), run.workdir_name
    limit = _limit_mb(recorded)
    now = snapshot.fingerprint(tree, limit_mb=limit, leave_out=left_out, workdir=workdir)
    taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.code_record.stat().st_mtime))
    uses = f"{run.name} runs its copy of the code ({run.code}, of {taken})"
    if now is None:  # it cannot be read, or has become too large
        log.warning(f"{uses}, and {tree} cannot be compared with it [CD0313]")
        return
    # What is linked for its size is as it is now in the copy, too.
    linked = {*recorded.large, *now.large}
    copied, current = (
        replace(each, digests={n: d for n, d in each.digests.items() if n not in linked})
        for each in (recorded, now)
    )
    changes = snapshot.difference(copied, current, new=True)
    if changes:
        files = "1 file differs" if len(changes) == 1 else f"{len(changes)} files differ"
        log.info(
            f"{uses}; in {tree} {files} by now: {_shown(changes)}. To run the current files, "
            f"{way_to_current_files(spec, run)}."
        )


def way_to_current_files(spec: JobSpec, run: RunDir) -> str:
    """Say how to run the folder's files; the points of a sweep share one copy of the code."""
    if spec.sweep:
        return (
            "submit a new sweep, or give each point that has not ended well a copy of its own: "
            f"clusterddp resubmit {run.shown} --code new"
        )
    return "use --code new"


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
    tree = run.top_of_code(Path.cwd())
    if not spec.program.has_own_code(spec.sweep, Path.cwd()):
        raise RequestError(
            f"--code new: {run.name} uses no code of {tree}: its tasks run what is "
            "installed. [CD0313]"
        )
    recorded = snapshot.Snapshot.read(run.code_record) if run.code_record.is_file() else None
    record = run.code_record.read_bytes() if recorded else None
    had_copy = run.code.is_dir()
    try:
        taken = _take(spec, run, recorded, limit_mb)
        copied = _draft(run).is_dir()
        if copied and had_copy:
            run.code.rename(_former(run))
        if copied:
            _draft(run).rename(run.code)
        if taken:
            replace(taken, leaving=recorded.leaving if recorded else ()).write(run.code_record)
    except BaseException as error:
        _put_back(run, had_copy, record)
        if isinstance(error, OSError):
            raise RequestError(
                f"--code new: {run.path} cannot be written: {error}. [CD0504]"
            ) from None
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
            _remove(_former(run))


def mend(run: RunDir) -> None:
    """Repair the copy after a process that was killed while it renewed the code.

    Raises RequestError where that cannot be done.
    """
    try:
        if _former(run).is_dir() and not run.code.exists():
            _former(run).rename(run.code)
        for left in (_draft(run), _former(run)):
            if left.is_symlink():
                left.unlink()
            elif left.is_dir():
                shutil.rmtree(left)
    except OSError as error:
        raise RequestError(f"{run.path} cannot be written: {error}. [CD0504]") from None


def _take(
    spec: JobSpec, run: RunDir, recorded: snapshot.Snapshot | None, limit_mb: float | None
) -> snapshot.Snapshot | None:
    """Copy the folder to the draft; where the run uses no copy, take its digests alone."""
    tree, left_out, has_copy = Path.cwd(), no_code(spec, run), run.code.is_dir()
    tree, workdir = run.top_of_code(tree), run.workdir_name
    limit = _limit_mb(recorded) if limit_mb is None else limit_mb
    taken = None
    if has_copy or spec.snapshot is not False:
        needed = has_copy or bool(spec.snapshot)
        taken = snapshot.try_to_take(
            tree, _draft(run), limit, left_out, needed=needed, workdir=workdir
        )
    if taken is None:
        return snapshot.fingerprint(tree, limit_mb=limit, leave_out=left_out, workdir=workdir)
    both: list[str] = []
    if recorded and has_copy:
        both = snapshot.carry_over(run.code, recorded, tree, _draft(run), taken)
    if not both:
        return taken
    # What the command has written is no code, even where the folder has it.
    log.info(f"kept what {run.name} has written, although the folder has it too: {_shown(both)}")
    digests = {name: digest for name, digest in taken.digests.items() if name not in both}
    return replace(taken, digests=digests, files=len(digests))


def _remove(former: Path) -> None:
    """Remove a former copy; that of a sweep's point may be a link to what all points use."""
    if former.is_symlink():
        with contextlib.suppress(OSError):
            former.unlink()
    else:
        shutil.rmtree(former, ignore_errors=True)


def _draft(run: RunDir) -> Path:
    return run.path / ".code-new"


def _former(run: RunDir) -> Path:
    return run.path / ".code-former"


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


def _limit_mb(recorded: snapshot.Snapshot | None) -> float:
    return max(snapshot.LIMIT_MB, 2 * recorded.bytes / 1e6) if recorded else snapshot.LIMIT_MB


def _shown(names: Sequence[str]) -> str:
    return formatting.some(names, _MOST_NAMES, ", ")
