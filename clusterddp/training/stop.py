"""Stop requests of a training, the deadline of its job, and the attempt's heartbeat.

A signal handler only notes the request. The ranks agree on it (`distributed.agreement`), save at
the same step and exit. Imports without torch, so that requests are noted during its import.
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
from clusterddp.ranks.variables import HELD_VARIABLE, is_rehearsal, slurm_job_name
from clusterddp.run.attempt import ALIVE_SECONDS, Attempt
from clusterddp.run.records import Liveness

REASONS = ("", "signal", "SIGTERM", "interrupt", "stop", "time limit")
"""Reasons to stop; ranks exchange the index in this list, and the highest wins."""
_REASON_BY_SIGNAL = {
    signal.SIGUSR1: "signal",
    signal.SIGUSR2: "signal",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGTERM",
    signal.SIGINT: "interrupt",
}

_ON_INTERRUPT = b"clusterddp: saving after this step, then leaving; Ctrl-C again ends at once\n"
_MARGIN_SECONDS = 5.0
# Slurm checks time limits about twice a minute, so its signal can be that late.
_SLURM_SECONDS = 30.0
_TIME_LIMIT_SECONDS = 600.0  # between two polls; `Deadline` polls again before it is near
_FRESH_SECONDS = 5.0
_ANSWER_SECONDS = 3.0
"""Longest wait for Slurm's answer before a training stops; part of the margin."""


class StopRequest:
    """Strongest reason for which this process was asked to stop, if any."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the request before another training in this process."""
        self.reason = ""
        self.looked_at = False
        """Set once the ranks poll the request: a Ctrl-C before that ends the process at once."""
        self._interrupted = False

    def note(self, reason: str) -> None:
        """Keep the strongest reason."""
        if REASONS.index(reason) > REASONS.index(self.reason):
            self.reason = reason

    def listen(self) -> Callable[..., None]:
        """Install handlers that note signals; return a function that restores the old ones.

        The function takes the signals whose handlers stay. Does nothing outside of the main
        thread, where Python allows no handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            return lambda *_: None
        # An ignored SIGHUP comes from nohup and stays ignored.
        before = {
            number: signal.signal(number, self._take)
            for number in _REASON_BY_SIGNAL
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
                raise KeyboardInterrupt  # the second one, or before training
            self._interrupted = True
            with contextlib.suppress(OSError):
                os.write(2, _ON_INTERRUPT)  # print is not safe in a signal handler
        if number == signal.SIGTERM and not self.looked_at and _may_start_again(os.environ):
            # Nothing to save yet, and the agent would wait half a minute before SIGKILL.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.note(_REASON_BY_SIGNAL[signal.Signals(number)])


def _may_start_again(environ: Mapping[str, str]) -> bool:
    """Return whether a torchrun agent may end ranks by SIGTERM to restart them."""
    return environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


requested = StopRequest()
"""Request of this process."""


class Deadline:
    """End of the job's time, by the monotonic clock, because the wall clock can be changed."""

    def __init__(self, signal_lead: int = 0) -> None:
        """signal_lead: seconds before the end at which Slurm sends its signal, or 0."""
        self._signal_lead = signal_lead
        self._end, self._set_at = math.inf, -math.inf
        self.wanted: threading.Event | None = None
        """Wakes the thread that polls Slurm, if any."""
        self._answered = threading.Event()

    def set(self, seconds_left: float | None) -> None:
        """Set the remaining time: None if it is unlimited or unknown, 0 if the limit has passed.

        A negative time, from a variable of the job's start that may be outdated, is ignored.
        """
        if seconds_left is not None and seconds_left >= 0:
            self._set_at = time.monotonic()
            self._end = self._set_at + seconds_left
        self._answered.set()

    def is_near(self, lead_seconds: float) -> bool:
        """Return whether to stop now, given the seconds needed to stop and save.

        Polls Slurm again first: an administrator can change the limit, and suspension moves it.
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
        """Warn once if the signal comes too late for the measured cost of a step and a save."""
        lead, self._signal_lead = self._signal_lead, 0
        if 0 < lead < lead_seconds + _MARGIN_SECONDS:
            enough = math.ceil(lead_seconds + _MARGIN_SECONDS + _SLURM_SECONDS)
            warning(
                f"Slurm sends its signal {lead} s before the time limit, but a step and a save "
                f"take {lead_seconds:.1f} s here, and Slurm can be {_SLURM_SECONDS:.0f} s late. "
                f"Use --signal B:USR1@{enough} or more. The ranks stop by their own clock if they "
                "know the limit. [CD1220]"
            )


class LivenessWriter:
    """Writes the attempt's heartbeat and polls `stop` while its context is open."""

    def __init__(self, attempt: Attempt, request: StopRequest) -> None:
        self.sign: Callable[[], Liveness] = lambda: Liveness(step=0)
        """Returns the progress of the training."""
        self._attempt = attempt
        self._request = request
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._poll_until_over, name="liveness_writer", daemon=True
        )
        self._said = False
        self._gone = 0

    def __enter__(self) -> "LivenessWriter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(ALIVE_SECONDS)  # a hanging file system must not block the exit
        if not self._thread.is_alive():
            with suppress(OSError):
                self._show()

    def _poll_until_over(self) -> None:
        self._show_or_end()
        while not self._over.wait(ALIVE_SECONDS):
            self._show_or_end()

    def _show(self) -> None:
        sign = self.sign()
        self._attempt.renew_liveness(sign.step or 0, sign.saved, sign.spent, sign.planned)

    def _show_or_end(self) -> None:
        try:
            self._show()
            self._gone = 0
        except FileNotFoundError:
            self._gone += 1
            if self._gone > 1:  # twice, because network file systems have brief errors
                self._end(f"{self._attempt.path} was removed, so nothing can be saved")
        except OSError as error:  # for example a full disk, which can still be read
            self._say(f"cannot write its heartbeat to {self._attempt.path}: {error.strerror}")
        try:
            reason = self._attempt.stop_reason()
            if reason is not None:
                self._request.note("stop" if reason == "stop" else "signal")
            if self._attempt.is_superseded:  # further work would be done twice
                later = self._attempt.number + 1
                self._end(f"superseded: attempt {later} of the run has started")
        except OSError as error:
            self._say(f"cannot read {self._attempt.path}: {error.strerror}")

    def _say(self, line: str) -> None:
        if not self._said:
            self._said = True
            with suppress(OSError):  # the log may be on the same disk
                log.warning(f"attempt {self._attempt.number} {line} [CD0518]")

    def _end(self, why: str) -> None:
        """Exit this process at once; the other ranks' collectives then fail.

        Does nothing if the context has been closed meanwhile, which does not wait for this thread
        on a slow file system: the process no longer belongs to the attempt.
        """
        if self._over.is_set():
            return
        with suppress(OSError):
            line = f"clusterddp: attempt {self._attempt.number} ends: {why}"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 -- the process ends here
            sys.stdout.flush()
        os._exit(EXIT_FAILED)


def poll_time_limit(deadline: Deadline, environ: Mapping[str, str]) -> None:
    """Poll Slurm for the job's time limit in a background thread, because slurmctld can be slow.

    The thread ends when the deadline is garbage-collected: the process may outlive the training.
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
    """Return the job's remaining seconds by slurmctld's clock, or by this host's without squeue."""
    if held_until := environ.get(HELD_VARIABLE):
        return max(float(held_until) - time.time(), 0.0)
    from clusterddp.slurm import client as slurm  # a task's parent does not need it

    left = None if is_rehearsal(environ) else slurm.seconds_left(slurm_job_name(environ, job_id))
    end = environ.get("SLURM_JOB_END_TIME", "")  # set by newer Slurm versions
    return int(end) - time.time() if left is None and end.isdigit() else left
