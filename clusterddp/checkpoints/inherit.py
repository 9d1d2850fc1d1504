"""How a new attempt comes by the checkpoints of those before it: linked or copied, all or none."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from clusterddp import log
from clusterddp.checkpoints import catalog, files
from clusterddp.checkpoints.files import Best, UnusableError, checksum_of, step_of
from clusterddp.errors import CheckpointError
from clusterddp.run.attempt import Attempt
from clusterddp.run.files import sync_folder

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
        bests = catalog.bests(attempt.run, attempt)
        best = next((each for each in bests if each.step <= last), None)
    for each in catalog.all_of(attempt.run, attempt):
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
