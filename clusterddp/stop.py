"""A task's own note that it was asked to stop: all that its signal handlers do.

The ranks of a training look at it together (`training.poll`), save at one step and leave. What
comes before they can look, during the imports say, is noted as well.
"""

import signal
import threading
from collections.abc import Callable
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


class StopRequest:
    """Whether, and why, this process was asked to stop."""

    def __init__(self) -> None:
        self.reason = ""
        self.looked_at = False
        """Set once the ranks look at it: a Ctrl-C before that ends the process at once."""

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
        if number == signal.SIGINT and (self.reason == "interrupt" or not self.looked_at):
            raise KeyboardInterrupt  # the second one, or nothing is trained yet
        self.note(_OF_SIGNAL[signal.Signals(number)])


requested = StopRequest()
"""That of this process."""
