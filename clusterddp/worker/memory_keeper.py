"""Keeper of the memory in which a task's rank keeps snapshots, in the task's parent."""

import shutil
import threading
from collections.abc import MutableMapping
from contextlib import suppress

from clusterddp.errors import EXIT_STOPPED
from clusterddp.run import node_memory
from clusterddp.run.node_memory import VARIABLE, Address, own_save_seconds

_UNUSABLE = {"CD0810"}
"""Errors that say that the state itself is of no use: the training has diverged."""


class MemoryKeeper:
    """Memory of one task; saved as a checkpoint when its rank fails."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """environ: variables of the rank, which learns the memory's address from them."""
        self._address: Address | None = None
        self._saving = threading.Lock()
        self._timer: threading.Timer | None = None
        self._own_save_seconds = own_save_seconds(environ)
        environ.pop(VARIABLE, None)  # of another task
        with suppress(OSError, AttributeError):
            self._address = Address.create()
            environ[VARIABLE] = str(self._address)

    def end(self) -> int | None:
        """Return how many steps the rank had done at its end; None if it has not said so.

        Removes the files of a rank that was killed while it wrote them.
        """
        if self._address is None:
            return None
        shutil.rmtree(self._address.scratch, ignore_errors=True)
        return node_memory.read_step(self._address.halves[0])

    def note_term(self) -> None:
        """Save the newest snapshot soon, unless the ranks have saved a newer step by then.

        Slurm kills the rank with its parent KillWait seconds after SIGTERM.
        """
        if self._address and self._timer is None:
            self._timer = threading.Timer(self._own_save_seconds, self._save)
            self._timer.daemon = True
            self._timer.start()

    def close(self, exit_code: int, error_code: str) -> None:
        """Save the newest snapshot of the node if the rank has failed; wait for a save under way.

        It is saved if it is newer than every checkpoint. exit_code: the rank's, negative for a
        signal. error_code: code of its error.
        """
        if self._timer:
            self._timer.cancel()
        if exit_code in (0, EXIT_STOPPED) or error_code in _UNUSABLE:
            with self._saving:
                return
        self._save()

    def _save(self) -> None:
        if self._address:
            from clusterddp.checkpoints import from_memory  # seldom needed

            with self._saving:
                from_memory.save(self._address)
