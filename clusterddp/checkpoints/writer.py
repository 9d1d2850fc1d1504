"""Writes rank 0's checkpoints from a background thread; older ones are deleted only after that."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterddp import log
from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.catalog import Best, Renewal, checksum_of, files, name_of, step_of
from clusterddp.checkpoints.state import to_bytes
from clusterddp.errors import CheckpointError, coded
from clusterddp.run.attempt import Attempt, attempts
from clusterddp.run.records import SavingReport

AwaitShards = Callable[[], tuple[Mapping[str, str], str]]
"""Waits for the files of a sharded checkpoint: their SHA-256 by path, or a rank's error."""


@dataclass
class Costs(SavingReport):
    """Time and bytes that saving has taken so far."""

    longest_seconds: float = 0.0
    """Longest duration of one save, from the copy to the verified file."""


class Saver:
    """Writes checkpoints one at a time into an attempt's directory, from a background thread."""

    def __init__(self, attempt: Attempt, keep_last: int) -> None:
        """attempt: its directory exists already (see `catalog.adopt`).

        Nothing is published there after a later attempt has begun. The directories of earlier
        attempts are emptied after the first save of this one.

        keep_last: checkpoints to keep in addition to the best.
        """
        self._attempt, self._folder, self._keep_last = attempt, attempt.checkpoints, keep_last
        known = attempts(attempt.run)
        self._older = [each.checkpoints for each in known if each.number < attempt.number]
        self._thread: threading.Thread | None = None
        self._renewal: Renewal | None = None
        self._error: BaseException | None = None
        self._done = False
        self._warned: set[str] = set()
        self._valid: dict[str, tuple[int, ...]] = {}  # signatures of verified checkpoints
        self.costs = Costs()
        self.last_step: int | None = None
        """Step of the newest valid checkpoint in the directory."""
        self.trouble = ""
        """Reason why the last checkpoint was not written; empty if it was."""
        try:  # an attempt that starts again after a kill
            catalog.remove_leftovers(self._folder)
        except OSError as error:
            log.warning(
                f"cannot delete temporary files in {self._folder}: {error.strerror}. [CD0706]"
            )
        newest = catalog.newest_in(self._folder)
        if newest:
            self._valid[newest.name] = _signature(newest)
            self.last_step = step_of(newest)

    def announce(self, path: Path) -> None:
        """Show the ranks' parents, until the next save has ended, that it is under way.

        A snapshot that they save meanwhile would slow it down. An earlier save must have ended.
        """
        self._renewal = self._renewal or Renewal(path.with_name(f".{path.name}.ranks"))

    def save(
        self,
        content: Mapping[str, Any],
        copy_seconds: float = 0.0,
        shards: AwaitShards | None = None,
    ) -> None:
        """Start to write the result of `state.collect`, after an earlier write has ended.

        content: has at least `step` and `best`. copy_seconds: time that collecting it took.
        shards: called in the thread for a sharded checkpoint.

        A full or lost disk is logged and counted; raises any other error of the earlier write.
        """
        self._join()
        self.announce(self._folder / name_of(content["step"]))
        self.costs.copy_seconds += copy_seconds
        self._done = False
        self._thread = threading.Thread(
            target=self._run, args=(content, copy_seconds, shards), name="saver", daemon=True
        )
        self._thread.start()

    def wait(self) -> bool:
        """Wait for all checkpoints; return whether the last is on disk and verified."""
        self._join()
        return self._done

    def _join(self) -> None:
        if self._thread:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            self.costs.blocked_seconds += time.perf_counter() - began
        error, self._error = self._error, None
        if error:
            raise error

    def _run(
        self, content: Mapping[str, Any], copy_seconds: float, shards: AwaitShards | None
    ) -> None:
        """Write one checkpoint, in the thread."""
        began = time.perf_counter()
        path = self._folder / name_of(content["step"])
        try:
            written = 0
            digests, problem = shards() if shards else ({}, "")
            if problem:
                self._count_failure(path, problem)
                return
            # After a resume this may be the checkpoint from which the attempt started: do not risk
            # the valid file for the same state.
            if not self._is_valid(path):
                data = to_bytes(content)
                written = len(data)
                if not self._publish(path, data, digests):
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
            self._count_failure(path, error.strerror or str(error))
        except BaseException as error:
            self._error = error
        finally:
            if self._renewal:
                self._renewal.close()
                self._renewal = None
            self.costs.write_seconds += time.perf_counter() - began

    def _count_failure(self, path: Path, cause: str) -> None:
        self.costs.failed += 1
        self.trouble = f"the checkpoint {path} was not written: {cause}"
        last = "there is no checkpoint here yet"
        if self.last_step is not None:
            last = f"the last valid one is from step {self.last_step}"
        log.warning(
            f"{self.trouble}. Training continues from memory and the next save tries again; "
            f"{last}. [CD0706]"
        )

    def _publish(self, path: Path, data: bytes, shards: Mapping[str, str]) -> bool:
        """Publish a checkpoint; return False if another attempt is training now. Raises OSError."""
        if not catalog.publish(self._attempt, path, lambda file: file.write(data), shards):
            self._warn_once(
                "superseded",
                f"the checkpoint {path} was not published: a later attempt of the run is training.",
            )
            return False
        self._valid[path.name] = _signature(path)
        return True

    def _tidy(self, best: Best | None) -> None:
        """Name the best checkpoint and delete unneeded ones; failures are only logged."""
        marked = catalog.read_best(self._folder)
        needed = {marked.step} if marked else set()
        try:
            if best and best != marked and (self._folder / name_of(best.step)).exists():
                needed.add(best.step)  # both, in case the new best.json cannot be written
                catalog.write_best(self._folder, best)
                needed = {best.step}
        except OSError as error:
            self._warn_once("best", f"{self._folder / catalog.BEST}: {error.strerror}")
        try:
            if self._attempt.is_superseded:
                return
            for path in self._unneeded(needed):
                self._remove(path)
            for folder in self._older:
                for path in files(folder):
                    self._remove(path)
                self._remove(folder / catalog.BEST)
            self._older = []
        except (OSError, CheckpointError) as error:
            self._warn_once("tidy", f"cannot delete old checkpoints: {error}")

    def _unneeded(self, needed: set[int]) -> list[Path]:
        """Return the checkpoints to delete: all but the newest `keep_last` valid ones and the best.

        Damaged ones among the newest are kept.
        """
        kept, unneeded = 0, []
        for path in files(self._folder):
            if kept < self._keep_last:
                kept += self._is_valid(path)
            elif step_of(path) not in needed:
                unneeded.append(path)
        return unneeded

    def _is_valid(self, path: Path) -> bool:
        """Verify a checkpoint; read it again only if it has changed."""
        try:
            signature = _signature(path)
            if self._valid.get(path.name) != signature:
                catalog.read(path)
                self._valid[path.name] = signature
        except (OSError, CheckpointError):
            return False
        return True

    def _remove(self, path: Path) -> None:
        try:
            catalog.remove(path)
        except OSError as error:
            self._warn_once("remove", f"cannot delete the checkpoint {path}: {error.strerror}")

    def _warn_once(self, kind: str, line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(coded(line, "CD0706"))


def _signature(path: Path) -> tuple[int, ...]:
    """Return numbers that change when a checkpoint or its checksum does. Raises OSError."""
    both = path.lstat(), checksum_of(path).stat()
    return tuple(part for file in both for part in (file.st_ino, file.st_size, file.st_mtime_ns))
