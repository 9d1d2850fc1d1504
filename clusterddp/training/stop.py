"""Requests to stop a training, the end of the job's time, and the sign that an attempt is at work.

A signal handler only notes the request. The ranks look at it together (`distributed.agreement`),
save at one step and leave. Free of torch, so that requests are noted during the imports too.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

from clusterddp import log
from clusterddp.errors import EXIT_FAILED
from clusterddp.log import warning
from clusterddp.ranks.variables import is_rehearsal, slurm_job_name
from clusterddp.run.attempt import ALIVE_SECONDS, Attempt
from clusterddp.run.records import Liveness

REASONS = ("", "signal", "SIGTERM", "interrupt", "stop", "time limit")
"""Reasons to stop; ranks exchange the place in this list, and the last of them counts."""
_OF_SIGNAL = {
    signal.SIGUSR1: "signal",
    signal.SIGUSR2: "signal",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGTERM",
    signal.SIGINT: "interrupt",
}

_ON_INTERRUPT = b"clusterddp: saving after this step, then leaving; Ctrl-C again ends at once\n"
_MARGIN_SECONDS = 5.0
# Slurm looks at time limits about twice a minute, so its signal can come that much later.
_SLURM_SECONDS = 30.0
_TIME_LIMIT_SECONDS = 600.0  # between two polls; `Deadline` asks once more before it is near
_FRESH_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
"""Longest wait for Slurm's word before a training leaves; it comes out of the margin."""


class StopRequest:
    """The weightiest reason for which this process was asked to stop, if any."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the request: what comes next in this process is another training."""
        self.reason = ""
        self.looked_at = False
        """Set once the ranks look at it: a Ctrl-C before that ends the process at once."""
        self._interrupted = False

    def note(self, reason: str) -> None:
        """Keep the weightiest reason."""
        if REASONS.index(reason) > REASONS.index(self.reason):
            self.reason = reason

    def listen(self) -> Callable[..., None]:
        """Note signals from now on; returns what restores their former handlers.

        That takes the numbers of those to go on with. In a thread other than the main one, where
        Python allows no handlers, it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda *_: None
        # An ignored SIGHUP is nohup's doing and meant.
        before = {
            number: signal.signal(number, self._take)
            for number in _OF_SIGNAL
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

        def restore(*kept: int) -> None:
            for number, handler in before.items():
                if number not in kept and signal.getsignal(number) == self._take:
                    signal.signal(number, handler)

        return restore

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted or not self.looked_at:
                raise KeyboardInterrupt  # the second one, or nothing is trained yet
            self._interrupted = True
            with contextlib.suppress(OSError):
                os.write(2, _ON_INTERRUPT)  # stderr; print is not for a signal's handler
        if number == signal.SIGTERM and not self.looked_at and _may_start_again(os.environ):
            # There is nothing to save yet, and the agent waits half a minute before it kills.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.note(_OF_SIGNAL[signal.Signals(number)])


def _may_start_again(environ: Mapping[str, str]) -> bool:
    """Return whether a torchrun agent ends ranks by SIGTERM to start them anew after a failure."""
    return environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


requested = StopRequest()
"""This process's request."""


class Deadline:
    """The end of the job's time, by the monotonic clock: the wall clock can be set meanwhile."""

    def __init__(self, signal_lead: int = 0) -> None:
        """`signal_lead`: seconds ahead of the end at which Slurm was asked for a signal, or 0."""
        self._signal_lead = signal_lead
        self._end, self._set_at = math.inf, -math.inf
        self.wanted: threading.Event | None = None
        """Wakes the thread that asks Slurm, where there is one."""
        self._answered = threading.Event()

    def set(self, seconds_left: float | None) -> None:
        """Set the time that is left; None where there is no limit, or it is unknown."""
        if seconds_left is not None and seconds_left > 0:
            self._set_at = time.monotonic()
            self._end = self._set_at + seconds_left
        self._answered.set()

    def is_near(self, lead_seconds: float) -> bool:
        """Return whether to stop now, if stopping and saving takes so long.

        Has Slurm asked again first: an administrator can have moved the limit, and the limit of a
        job that was suspended moves by itself.
        """
        if not self._is_within(lead_seconds):
            return False
        if self.wanted and time.monotonic() - self._set_at > _FRESH_SECONDS:
            self._answered.clear()
            self.wanted.set()
            self._answered.wait(_ANSWER_SECONDS)
        return self._is_within(lead_seconds)

    def _is_within(self, lead_seconds: float) -> bool:
        return time.monotonic() > self._end - lead_seconds - _MARGIN_SECONDS

    def check_lead(self, lead_seconds: float) -> None:
        """Warn once when the signal comes too late for what a step and a save have cost."""
        lead, self._signal_lead = self._signal_lead, 0
        if 0 < lead < lead_seconds + _MARGIN_SECONDS:
            enough = math.ceil(lead_seconds + _MARGIN_SECONDS + _SLURM_SECONDS)
            warning(
                f"Slurm's signal comes {lead} s ahead of the time limit, but to "
                f"finish a step and save takes {lead_seconds:.1f} s here, and Slurm can be "
                f"{_SLURM_SECONDS:.0f} s late: ask for --signal B:USR1@{enough} or more. The ranks "
                "stop by their own clock where they know the limit. [CD1220]"
            )


class Presence:
    """Renews the attempt's sign of life and looks at `stop`, while its context is open."""

    def __init__(self, attempt: Attempt, request: StopRequest) -> None:
        self.sign: Callable[[], Liveness] = lambda: Liveness(step=0)
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
        self._attempt.renew_liveness(sign.step or 0, sign.saved, sign.spent, sign.planned)

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
    from clusterddp.slurm import client as slurm  # which a task's parent does without

    left = None if is_rehearsal(environ) else slurm.seconds_left(slurm_job_name(environ, job_id))
    end = environ.get("SLURM_JOB_END_TIME", "")  # set by newer versions
    return int(end) - time.time() if left is None and end.isdigit() else left
