"""A task's own note that it was asked to stop: all that its signal handlers do.

The ranks of a training look at it together (`distributed.agreement`), save at one step and leave.
What comes before they can look, during the imports say, is noted as well.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType

REASONS = ("", "signal", "SIGTERM", "interrupt", "stop", "time limit")
"""What can ask for a stop; ranks exchange the place in this list, and the last of them counts."""
_OF_SIGNAL = {
    signal.SIGUSR1: "signal",
    signal.SIGUSR2: "signal",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGTERM",
    signal.SIGINT: "interrupt",
}

_STDERR = 2
_ON_INTERRUPT = b"clusterddp: saving after this step, then leaving; Ctrl-C again ends at once\n"


class StopRequest:
    """Whether, and why, this process was asked to stop."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if nobody had asked: what comes next in this process is another training."""
        self.reason = ""
        self.looked_at = False
        """Set once the ranks look at it: a Ctrl-C before that ends the process at once."""
        self._interrupted = False

    def note(self, reason: str) -> None:
        """Keep the weightiest reason."""
        if REASONS.index(reason) > REASONS.index(self.reason):
            self.reason = reason

    def listen(self) -> Callable[[], None]:
        """Note signals from now on; returns what gives them back their former handlers.

        In a thread other than the main one, where Python allows no handlers, it does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        # An ignored SIGHUP is nohup's doing and meant.
        before = {
            number: signal.signal(number, self._take)
            for number in _OF_SIGNAL
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

        def give_back() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return give_back

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted or not self.looked_at:
                raise KeyboardInterrupt  # the second one, or nothing is trained yet
            self._interrupted = True
            with contextlib.suppress(OSError):
                os.write(_STDERR, _ON_INTERRUPT)  # print is not for a signal's handler
        if number == signal.SIGTERM and not self.looked_at and _may_start_again(os.environ):
            # There is nothing to save yet, and the agent waits half a minute before it kills.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.note(_OF_SIGNAL[signal.Signals(number)])


def _may_start_again(environ: Mapping[str, str]) -> bool:
    """Whether a torchrun agent ends ranks by SIGTERM when one has failed, to start them anew."""
    return environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


requested = StopRequest()
"""That of this process."""
