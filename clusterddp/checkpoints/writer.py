"""Rank 0's writing of checkpoints: beside the training, durable, and verified before it counts.

A file appears under its name only when what the disk gives back of it has the checksum of what was
written; older ones go only after that.
"""

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterddp import log
from clusterddp.checkpoints import catalog
from clusterddp.checkpoints import files as checkpoint_file
from clusterddp.checkpoints.files import Best, checksum_of, files, name_of, step_of
from clusterddp.checkpoints.state import to_bytes
from clusterddp.errors import CheckpointError
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.files import sync_folder, write_atomically

_CHUNK_BYTES = 1 << 20


@dataclass
class Costs:
    """What saving has taken so far."""

    saves: int = 0
    """Written and verified."""
    failed: int = 0
    copy_seconds: float = 0.0
    """Training stood still while the state was copied."""
    blocked_seconds: float = 0.0
    """Training stood still until an earlier checkpoint was on disk."""
    write_seconds: float = 0.0
    """From copied to verified, beside the training."""
    bytes: int = 0
    """Written, of those that were verified."""
    longest_seconds: float = field(default=0.0, repr=False)

    def seconds_of_one(self) -> float:
        """What one save has taken at most, from the copy to verified on disk."""
        return self.longest_seconds


class Saver:
    """Writes one checkpoint after the other into a folder, on a thread of its own."""

    @classmethod
    def of_attempt(cls, attempt: Attempt, keep_last: int) -> "Saver":
        """That of an attempt's own folder, while no later one supersedes it."""
        earlier = [one for one in attempts(attempt.run) if one.number < attempt.number]
        return cls(
            attempt.checkpoints,
            keep_last=keep_last,
            may_write=lambda: not attempt.is_superseded,
            older=[one.checkpoints for one in earlier],
        )

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int,
        may_write: Callable[[], bool],
        older: Sequence[Path] = (),
    ) -> None:
        """The folder is there (see `handing_on.adopt`).

        keep_last: how many are kept, the best one apart.
        may_write: asked before each goes under its name; False once another attempt trains.
        older: checkpoint folders of earlier attempts, emptied once this one has saved.
        """
        assert keep_last >= 1
        self._folder, self._keep_last, self._older = folder, keep_last, list(older)
        self._may_write = may_write
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._done = False
        self._warned: set[str] = set()
        self._whole: dict[str, tuple[int, ...]] = {}  # what was verified, as it was then
        self.costs = Costs()
        self.last_step: int | None = None
        """Of the newest verified one in the folder."""
        self.trouble = ""
        """Why the last one could not be written; empty where it was."""
        try:  # where this attempt starts once more, after a kill
            checkpoint_file.remove_leftovers(folder)
        except OSError as error:
            log.warning(f"left-overs in {folder} stay: {error.strerror}")
        found = catalog.newest_in(folder)
        if found:
            self._whole[found.name] = _signature(found)
            self.last_step = step_of(found)

    def save(self, content: dict[str, Any], copy_seconds: float = 0.0) -> None:
        """Begin to write what `checkpoint.collect` returned, after any that is being written.

        copy_seconds: what collecting it took.

        A disk that is full or gone is said, and counted; raises what else went wrong before.
        """
        self._join()
        self.costs.copy_seconds += copy_seconds
        self._done = False
        self._thread = threading.Thread(
            target=self._run, args=(content, copy_seconds), name="saver", daemon=True
        )
        self._thread.start()

    def wait(self) -> bool:
        """Wait for all that was handed over; whether the last of it is on disk and verified."""
        self._join()
        return self._done

    def _join(self) -> None:
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.costs.blocked_seconds += time.perf_counter() - began
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, content: dict[str, Any], copy_seconds: float) -> None:
        """The thread."""
        began = time.perf_counter()
        path = self._folder / name_of(content["step"])
        try:
            written = 0
            # After a resume the first may be the one from which this attempt started. It is the
            # same state, and to replace it is to risk it.
            if not self._is_whole(path):
                data = to_bytes(content)
                written = len(data)
                if not self._publish(path, data):
                    return
                del data
            self.last_step = content["step"]
            self._done, self.trouble = True, ""
            seconds = time.perf_counter() - began
            self.costs.saves += 1
            self.costs.bytes += written
            self.costs.longest_seconds = max(self.costs.longest_seconds, copy_seconds + seconds)
            self._tidy(Best(**content["best"]) if content["best"] else None)
        except OSError as error:
            self.costs.failed += 1
            self.trouble = f"the checkpoint {path} was not written: {error.strerror or error}"
            log.warning(
                f"{self.trouble}. "
                f"Training goes on from memory and the next save tries again; {self._last()}."
            )
        except BaseException as error:
            self._error = error
        finally:
            self.costs.write_seconds += time.perf_counter() - began

    def _publish(self, path: Path, data: bytes) -> bool:
        """Put the bytes under their name, verified; False when another attempt trains now.

        Raises OSError, and leaves nothing behind then.
        """
        digest = hashlib.sha256(data).hexdigest()
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        fresh = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if _stored_sha256(fresh) != digest:
                raise OSError("what the disk gave back is not what was written")
            # The checksum first: so the checkpoint is whole from the moment its name is there.
            write_atomically(checksum_of(path), f"{digest}  {path.name}\n".encode())
            if not self._may_write():
                self._warn_once(
                    "superseded",
                    f"the checkpoint {path} was not published: a later attempt of the run "
                    "has begun, and trains on.",
                )
                return False
            fresh.replace(path)
            self._whole[path.name] = _signature(path)
            sync_folder(path.parent)
        finally:
            _take_away(fresh)
            if not path.exists():
                _take_away(checksum_of(path))
        return True

    def _tidy(self, best: Best | None) -> None:
        """Name the best one, and remove what is no longer needed; what fails is only said."""
        marked = checkpoint_file.read_best(self._folder)
        needed = {marked.step} if marked else set()
        try:
            if best and best != marked and (self._folder / name_of(best.step)).exists():
                needed.add(best.step)  # both, should the new mark not be written
                checkpoint_file.write_best(self._folder, best)
                needed = {best.step}
        except OSError as error:
            self._warn_once("best", f"{self._folder / checkpoint_file.BEST}: {error.strerror}")
        try:
            if not self._may_write():
                return
            for path in self._unneeded(needed):
                self._remove(path)
            for folder in self._older:
                for path in files(folder):
                    self._remove(path)
                self._remove(folder / checkpoint_file.BEST)
            self._older = []
        except (OSError, CheckpointError) as error:
            self._warn_once("tidy", f"old checkpoints are kept: {error}")

    def _unneeded(self, needed: set[int]) -> list[Path]:
        """Those before the last whole ones, the best apart; damaged ones among these stay."""
        kept, unneeded = 0, []
        for path in files(self._folder):
            if kept < self._keep_last:
                kept += self._is_whole(path)
            elif step_of(path) not in needed:
                unneeded.append(path)
        return unneeded

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint is whole; one that did not change since is not read again."""
        try:
            signature = _signature(path)
            if self._whole.get(path.name) != signature:
                checkpoint_file.read(path)
                self._whole[path.name] = signature
        except (OSError, CheckpointError):
            return False
        return True

    def _remove(self, path: Path) -> None:
        try:
            checkpoint_file.remove(path)
        except OSError as error:
            self._warn_once("remove", f"the old checkpoint {path} stays: {error.strerror}")

    def _last(self) -> str:
        if self.last_step is None:
            return "there is no checkpoint here yet"
        return f"the last whole one is that of step {self.last_step}"

    def _warn_once(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(line)


def _stored_sha256(path: Path) -> str:
    """The digest of what the disk holds, not of what memory still does. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):  # clean pages are dropped, so that they are read anew
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _signature(path: Path) -> tuple[int, ...]:
    """What changes when a checkpoint or its checksum does. Raises OSError."""
    both = path.lstat(), checksum_of(path).stat()
    return tuple(part for file in both for part in (file.st_ino, file.st_size, file.st_mtime_ns))


def _take_away(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # a disk that is gone; the next start of the run removes what is left
