"""The end of the job's time, and how long before it the ranks have to stop."""

import math
import time

from clusterddp import log

_MARGIN_SECONDS = 5.0
# Slurm looks at time limits about twice a minute, so its signal can come that much later.
_SLURM_SECONDS = 30.0


class Deadline:
    """When the job must end, by the monotonic clock: the wall clock can be set meanwhile."""

    def __init__(self, signal_lead: int = 0) -> None:
        """`signal_lead`: seconds ahead of the end at which Slurm was asked for a signal, or 0."""
        self._signal_lead = signal_lead
        self._end = math.inf
        self._checked = False

    def set(self, seconds_left: float | None) -> None:
        """Take what Slurm says; None where there is no limit, or nobody can say."""
        if seconds_left is not None and seconds_left > 0:
            self._end = time.monotonic() + seconds_left

    def is_near(self, lead_seconds: float) -> bool:
        """Whether to stop now, if stopping and saving takes so long."""
        return time.monotonic() > self._end - lead_seconds - _MARGIN_SECONDS

    def check_lead(self, lead_seconds: float) -> None:
        """Say once when the asked signal comes too late for what a step and a save have cost."""
        if self._checked or not self._signal_lead:
            return
        self._checked = True
        if self._signal_lead < lead_seconds + _MARGIN_SECONDS:
            enough = math.ceil(lead_seconds + _MARGIN_SECONDS + _SLURM_SECONDS)
            log.warning(
                f"Slurm's signal comes {self._signal_lead} s ahead of the time limit, but "
                f"to finish a step and save takes {lead_seconds:.1f} s here, and Slurm can be "
                f"{_SLURM_SECONDS:.0f} s late: ask for --signal B:USR1@{enough} or more. The ranks "
                "stop by their own clock where they know the limit."
            )
