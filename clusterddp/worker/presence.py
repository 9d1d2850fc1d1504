"""Rank 0's threads beside the training: its sign of life, requests to stop, the time limit.

Threads, so that a long step or a hanging exchange delays none of them.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from clusterddp import log
from clusterddp.errors import EXIT_FAILED
from clusterddp.run.attempt import ALIVE_SECONDS, Attempt
from clusterddp.slurm import own_job
from clusterddp.slurm.own_job import is_rehearsal, own_name
from clusterddp.training.stop import Deadline, StopRequest

_TIME_LIMIT_SECONDS = 600.0  # between two polls: an administrator can move the limit


class Presence:
    """While its context is open, the attempt's sign of life is renewed and `stop` looked at."""

    def __init__(
        self, attempt: Attempt, request: StopRequest, superseded: Callable[[], None] | None = None
    ) -> None:
        """`superseded` is called when a later attempt has begun; by default the process ends."""
        self.step: Callable[[], int] = lambda: 0
        """How far the training is."""
        self.saved: Callable[[], int | None] = lambda: None
        """The step of its newest checkpoint, if it has one."""
        self._attempt = attempt
        self._request = request
        self._superseded = superseded or self._leave
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stay, name="presence", daemon=True)
        self._said = False
        self._gone = 0

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
            self._attempt.show_life(self.step(), self.saved())
            self._gone = 0
        except FileNotFoundError:
            self._gone += 1
            if self._gone > 1:  # twice, as a network file system can err for a moment
                self._end(f"{self._attempt.path} was removed: nothing can be saved any more")
        except OSError as error:  # a full disk, say, on which the rest can still be seen
            self._say(f"cannot show its life in {self._attempt.path}: {error.strerror}")
        try:
            reason = self._attempt.asked_to_stop()
            superseded = self._attempt.is_superseded
        except OSError as error:
            self._say(f"cannot be looked at in {self._attempt.path}: {error.strerror}")
            return
        if reason is not None:
            self._request.note("stop" if reason == "stop" else "signal")
        if superseded:
            self._superseded()

    def _say(self, line: str) -> None:
        if not self._said:
            self._said = True
            with contextlib.suppress(OSError):  # the log may lie on the same disk
                log.warning(f"attempt {self._attempt.number} {line}")

    def _leave(self) -> None:
        """Whatever this attempt still did would be work done twice."""
        later = self._attempt.number + 1
        self._end(f"superseded: attempt {later} of the run has begun, and trains on")

    def _end(self, why: str) -> None:
        """End this process at once; the other ranks find their exchange broken."""
        with contextlib.suppress(OSError):
            print(f"clusterddp: attempt {self._attempt.number} ends: {why}", file=sys.stderr)
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(EXIT_FAILED)


def poll_time_limit(deadline: Deadline, environ: Mapping[str, str]) -> None:
    """Poll Slurm for the job's time limit from a background thread, as a controller can be slow."""
    job_id = environ.get("SLURM_JOB_ID", "")
    if job_id:
        threading.Thread(target=lambda: _poll(deadline, job_id, environ), daemon=True).start()


def _poll(deadline: Deadline, job_id: str, environ: Mapping[str, str]) -> None:
    while True:
        deadline.set(seconds_left(job_id, environ))
        time.sleep(_TIME_LIMIT_SECONDS)


def seconds_left(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Return the job's seconds left by the controller's clock, or by this host's without squeue."""
    left = None if is_rehearsal(environ) else own_job.seconds_left(own_name(environ, job_id))
    end = environ.get("SLURM_JOB_END_TIME", "")  # set by newer versions
    return int(end) - time.time() if left is None and end.isdigit() else left
