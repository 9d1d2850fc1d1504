"""Shows that an attempt is at work, and hears what it is told: a stop, a later attempt, a limit.

Free of torch; for rank 0, of the training and of a script of one's own (`loop`).
"""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

from clusterddp import log
from clusterddp.errors import EXIT_FAILED
from clusterddp.ranks.variables import is_rehearsal, own_name
from clusterddp.run.attempt import ALIVE_SECONDS, Attempt
from clusterddp.run.records import SignOfLife
from clusterddp.slurm import client as slurm
from clusterddp.training.stop import Deadline, StopRequest

_TIME_LIMIT_SECONDS = 600.0  # between two polls; `Deadline` asks once more before it is near


class Presence:
    """Renews the attempt's sign of life and looks at `stop`, while its context is open."""

    def __init__(self, attempt: Attempt, request: StopRequest) -> None:
        self.sign: Callable[[], SignOfLife] = lambda: SignOfLife(step=0)
        """Returns how far the training is."""
        self._attempt = attempt
        self._request = request
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._stay, name="presence", daemon=True)
        self._said = False
        self._gone = 0

    def __enter__(self) -> "Presence":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(ALIVE_SECONDS)  # a file system that hangs must not keep the process
        if not self._thread.is_alive():
            with suppress(OSError):
                self._show()

    def _stay(self) -> None:
        self._look()
        while not self._over.wait(ALIVE_SECONDS):
            self._look()

    def _show(self) -> None:
        sign = self.sign()
        self._attempt.show_life(sign.step or 0, sign.saved, sign.spent, sign.planned)

    def _look(self) -> None:
        try:
            self._show()
            self._gone = 0
        except FileNotFoundError:
            self._gone += 1
            if self._gone > 1:  # twice, as a network file system can err for a moment
                self._end(f"{self._attempt.path} was removed: nothing can be saved any more")
        except OSError as error:  # a full disk, say, on which the rest can still be seen
            self._say(f"cannot show its life in {self._attempt.path}: {error.strerror}")
        try:
            reason = self._attempt.asked_to_stop()
            if reason is not None:
                self._request.note("stop" if reason == "stop" else "signal")
            if self._attempt.is_superseded:  # whatever it still did would be work done twice
                later = self._attempt.number + 1
                self._end(f"superseded: attempt {later} of the run has begun, and trains on")
        except OSError as error:
            self._say(f"cannot be looked at in {self._attempt.path}: {error.strerror}")

    def _say(self, line: str) -> None:
        if not self._said:
            self._said = True
            with suppress(OSError):  # the log may lie on the same disk
                log.warning(f"attempt {self._attempt.number} {line} [CD0518]")

    def _end(self, why: str) -> None:
        """End this process at once; the other ranks find their exchange broken.

        Not where the context has ended meanwhile, as it does without a thread that a slow file
        system keeps: what this process does now is not the attempt's.
        """
        if self._over.is_set():
            return
        with suppress(OSError):
            line = f"clusterddp: attempt {self._attempt.number} ends: {why}"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 -- the process ends here
            sys.stdout.flush()
        os._exit(EXIT_FAILED)


def poll_time_limit(deadline: Deadline, environ: Mapping[str, str]) -> None:
    """Poll Slurm for the job's time limit from a background thread, as slurmctld can be slow.

    It ends once nobody has the deadline any more: the process may do other things than train.
    """
    job_id, held = environ.get("SLURM_JOB_ID", ""), weakref.ref(deadline)
    wanted = threading.Event()

    def poll() -> None:
        while held():
            wanted.clear()
            seconds = seconds_left(job_id, environ)
            if known := held():
                known.set(seconds)
            del known
            wanted.wait(_TIME_LIMIT_SECONDS)

    if job_id:
        deadline.wanted = wanted
        threading.Thread(target=poll, daemon=True, name="time limit").start()


def seconds_left(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Return the job's seconds left by slurmctld's clock, or by this host's without squeue."""
    left = None if is_rehearsal(environ) else slurm.seconds_left(own_name(environ, job_id))
    end = environ.get("SLURM_JOB_END_TIME", "")  # set by newer versions
    return int(end) - time.time() if left is None and end.isdigit() else left
