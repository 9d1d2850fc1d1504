"""Copy the environment of the tasks to the disk of each node before they start (`--stage-env`).

The environment is packed into one archive in the runs directory, once for all jobs until a file of
it changes. Then each node unpacks the archive unless it has a copy. The tasks of all nodes so read
one file of the shared file system, in place of some ten thousand each.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterddp import files, formatting, log, polling
from clusterddp.errors import coded
from clusterddp.preflight.collector import started, step_words
from clusterddp.processes.hardware import SHARED_TYPES, file_system_type, mounts
from clusterddp.run.attempt import Attempt
from clusterddp.slurm.forms import STAGED_BUNDLE_VARIABLE, STAGED_FROM_VARIABLE, STAGED_VARIABLE
from clusterddp.staging import environment, node
from clusterddp.staging.environment import ENV, Environment, StagingError

AUTO = "auto"
NO_COPY = "CD0322"
"""Error code of a node without a copy."""
_ARCHIVE_SECONDS = 7 * 86400.0
"""Time after which an unused archive is removed."""


@dataclass(frozen=True)
class Staged:
    """The copy of an environment on each node."""

    variables: dict[str, str]
    """Variables that name the copies for the script's lines."""
    failed: dict[str, str]
    """Reason for each node without a copy."""


def stage(
    attempt: Attempt,
    python: str,
    folder: str,
    nodes: Sequence[str],
    program: Sequence[str],
    prepare: Callable[[], None],
    is_over: Callable[[], bool],
) -> Staged | None:
    """Copy the environment of an interpreter to nodes; return None if the job is ending.

    folder: the nodes' own directory, or AUTO. program: clusterddp's command on the nodes.
    prepare: runs in srun's process before srun. is_over: returns whether the job is ending.
    Raises StagingError if no node can make the copy, and OSError.
    """
    if not nodes:
        problem = "the job's nodes are unknown. Check SLURM_JOB_NODELIST"
        raise StagingError(f"--stage-env {folder}: {problem}, or use --stage-env off. [CD0322]")
    runs = attempt.run.path.resolve().parent
    found = environment.find(python, str(runs))
    digest, needed = found.digest, node.needed_bytes(found.size, len(found.entries))
    copy = node.copy_path(choose(folder, digest, needed, os.environ), digest)
    archive = runs / f".environments-{os.getuid()}" / f"{digest}.tar"
    if not _make_archive(found, archive, is_over):
        return None
    began = time.monotonic()
    bundle = attempt.run.bundle.resolve()
    argv = [*step_words(nodes), *program, "stage", str(archive), str(copy), str(needed)]
    argv += [str(bundle)] if bundle.is_file() else []
    with started(argv, os.environ, attempt.staging_log, prepare) as poll:
        polling.wait_until(
            lambda: poll() is not None or is_over(),
            polling.STAGE_SECONDS,
            every=polling.CHILD_POLL_SECONDS,
            longest=polling.RECORDS_POLL_SECONDS,
        )
        status = poll()
    if is_over():  # nodes then fail because the job ends
        return None
    results = {str(each.get("host")): each for each in files.read_json_lines(attempt.staging_log)}
    failed = {
        host: str(results[host].get("error", "")) if host in results else _silence(attempt)
        for host in nodes
        if host not in results or "error" in results[host]
    }
    if failed.keys() - results:
        _check_srun(status or 0)
    fresh = sum(bool(each.get("unpacked")) for each in results.values())
    log.info(
        f"stage: {formatting.count(len(nodes) - len(failed), 'node')} with a copy in {copy}; "
        f"{fresh} unpacked it, {time.monotonic() - began:.1f} s"
    )
    if len(failed) == len(nodes):
        host, reason = next(iter(failed.items()))
        raise StagingError(f"--stage-env {folder}: {host}: {reason}", code=NO_COPY)
    variables = {STAGED_VARIABLE: str(copy / ENV), STAGED_FROM_VARIABLE: python.rsplit("/", 2)[0]}
    if bundle.is_file():
        variables[STAGED_BUNDLE_VARIABLE] = str(node.bundle_path(copy.parent, bundle))
    return Staged(variables, failed)


def record_failure(attempt: Attempt, error: StagingError | OSError) -> None:
    """Log why the tasks do not start, and keep it for the result of the attempt."""
    if isinstance(error, OSError):
        error = StagingError(
            f"--stage-env: the nodes cannot be asked to copy the environment: {error}. Free space "
            "in the runs directory, and check that srun is on the PATH.",
            code=NO_COPY,
        )
    log.info(coded(error))
    with suppress(OSError):  # it is in the log
        files.write_record(attempt.staging, {"error": str(error), "code": error.code})


def choose(folder: str, digest: str, needed: int, environ: Mapping[str, str]) -> Path:
    """Return the directory for copies on each node: the given one, or the first that fits.

    needed: bytes. Raises StagingError if a given directory is shared or none fits.
    """
    if folder != AUTO:
        if shared := _shared_type(Path(folder)):
            raise StagingError(
                f"--stage-env {folder}: the directory is on {shared}, which nodes share, so a "
                "copy there saves nothing. Name a directory on each node's own disk, or use "
                "auto. [CD0321]"
            )
        return Path(folder)
    named = [environ[name] for name in ("SLURM_TMPDIR", "TMPDIR") if environ.get(name)]
    seen = []
    for text in dict.fromkeys([*named, "/tmp", "/dev/shm"]):
        place = Path(text)
        if not (place.is_absolute() and os.access(place, os.W_OK | os.X_OK)):
            continue
        if shared := _shared_type(place):
            seen.append(f"{place} is on {shared}")
        elif node.forbids_programs(place):
            seen.append(f"{place} is mounted noexec")
        elif node.has_copy(node.copy_path(place, digest)) or node.free_bytes(place) >= needed:
            return place
        else:
            seen.append(f"{place} has {formatting.size(node.free_bytes(place))} free")
    raise StagingError(
        f"--stage-env auto: the environment needs {formatting.size(needed)} on each node, and no "
        f"directory fits: {', '.join(seen)}. Free space, or name a directory: --stage-env DIR "
        "[CD0322]"
    )


def _shared_type(folder: Path) -> str:
    """Return the type of a directory's file system if nodes share it; empty otherwise."""
    kind = file_system_type(os.path.realpath(folder), mounts())
    return kind if kind in SHARED_TYPES.split() else ""


def _make_archive(found: Environment, archive: Path, is_over: Callable[[], bool]) -> bool:
    """Pack an environment unless it is packed. Return False if the job is ending meanwhile.

    If several jobs start at the same time, for example trials of a sweep, one packs and the others
    wait. Raises StagingError.
    """
    claim = archive.with_name(f".{archive.name}.claim")
    try:
        node.make_private(archive.parent, "--runs-dir DIR [CD0321]")
        while not _is_marked_used(archive):
            if is_over():
                return False
            if not files.create(claim):
                _await_other(archive, claim, is_over)
                continue
            try:
                _remove_unused(archive.parent)
                if not archive.exists() and not environment.pack(found, archive, is_over):
                    return False
            finally:
                claim.unlink(missing_ok=True)
        return True
    except OSError as error:
        raise StagingError(
            f"--stage-env: cannot write {archive}: {error.strerror}. Choose a --runs-dir with "
            "free space. [CD0321]"
        ) from None


def _is_marked_used(archive: Path) -> bool:
    """Mark an archive as used now. Return False if there is none. Raises OSError."""
    try:
        os.utime(archive)  # creates no file, unlike touch
    except FileNotFoundError:
        return False
    return True


def _await_other(archive: Path, claim: Path, is_over: Callable[[], bool]) -> None:
    """Wait until another job has packed the archive, or has died and its claim is removed."""
    log.info(f"stage: another job packs {archive}")
    before: object = None
    changed = time.monotonic()
    for _ in polling.poll(every=polling.RECORDS_POLL_SECONDS):
        if archive.exists() or not claim.exists() or is_over():
            return
        drafts = []
        for each in _drafts(archive):
            with suppress(OSError):  # it is the archive now
                drafts.append((each.name, each.stat().st_size))
        if drafts != before:
            before, changed = drafts, time.monotonic()
        elif time.monotonic() - changed > polling.PACKING_SECONDS:
            claim.unlink(missing_ok=True)
            return


def _drafts(archive: Path) -> list[Path]:
    return sorted(archive.parent.glob(f".{archive.name}.*"))


def _remove_unused(folder: Path) -> None:
    """Remove archives that were not used for a week, and old drafts of jobs that were killed."""
    for path in folder.iterdir():
        limit = polling.STAGE_SECONDS if path.name.startswith(".") else _ARCHIVE_SECONDS
        with suppress(OSError):  # another job removed it
            if time.time() - path.stat().st_mtime > limit:
                path.unlink()


def _check_srun(status: int) -> None:
    """Raise StagingError for an srun that was killed: no evidence against silent nodes."""
    if status < 0:
        raise StagingError(
            f"--stage-env: srun has died ({signal.strsignal(-status)}) before each node had a "
            "copy. Submit again, or use --stage-env off.",
            code=NO_COPY,
        )


def _silence(attempt: Attempt) -> str:
    """Return the reason for a node that printed no result, with the last line of the log."""
    text = files.read_tail(attempt.staging_log, 4096).decode(errors="replace")
    last = text.strip().rpartition("\n")[2]
    return f"it did not unpack the environment: {last or 'no output'}. See {attempt.staging_log}."
