"""Rank 0's presence in its attempt: shows that it lives, and sees who wants it to stop.

A thread, so that a long step or a hanging exchange delays neither.
"""

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

from clusterddp.attempt import ALIVE_SECONDS, Attempt
from clusterddp.errors import EXIT_FAILED
from clusterddp.stop import StopRequest


class Presence:
    """While its context is open, the attempt's sign of life is renewed and `stop` looked at."""

    def __init__(
        self, attempt: Attempt, request: StopRequest, superseded: Callable[[], None] | None = None
    ) -> None:
        """`superseded` is called when a later attempt has begun; by default the process ends."""
        self.step: Callable[[], int] = lambda: 0
        """How far the training is."""
        self._attempt = attempt
        self._request = request
        self._superseded = superseded or self._leave
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stay, name="presence", daemon=True)
        self._said = False

    def __enter__(self) -> "Presence":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(ALIVE_SECONDS)  # a file system that hangs must not keep the process

    def _stay(self) -> None:
        while True:
            self._look()
            if self._over.wait(ALIVE_SECONDS):
                return

    def _look(self) -> None:
        try:
            self._attempt.show_life(self.step())
            reason = self._attempt.asked_to_stop()
        except OSError as error:
            self._say(f"cannot show its life in {self._attempt.path}: {error.strerror}")
            return
        if reason is not None:
            self._request.note("stop" if reason == "stop" else "signal")
        if self._attempt.is_superseded:
            self._superseded()

    def _say(self, line: str) -> None:
        if not self._said:
            self._said = True
            print(f"warning: attempt {self._attempt.number} {line}", flush=True)

    def _leave(self) -> None:
        """End at once: whatever this attempt still did would be work done twice."""
        later = self._attempt.number + 1
        print(
            f"clusterddp: attempt {self._attempt.number} is superseded: attempt {later} of the run "
            "has begun, and trains on. This one ends.",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(EXIT_FAILED)
