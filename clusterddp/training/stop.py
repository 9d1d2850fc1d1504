"""Requests to stop a training, and the end of the job's time.

A signal handler only notes the request. The ranks look at it together (`distributed.agreement`),
save at one step and leave. Free of torch, so that requests are noted during the imports too.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType

from clusterddp.log import warning

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
