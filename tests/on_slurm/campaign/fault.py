"""What a row of the campaign is, and the table that all rows register in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.on_slurm.campaign.run import Trial

SAME = "same weights"
ENDS = "clean failure"
UNHURRIED = {"KillWait": "30", "MessageTimeout": "60"}
"""What is asked to end has the time for it on a busy machine.

slurmd answers slurmctld's TERM to a step once the step has ended. An answer that takes longer than
MessageTimeout (10 s by default) has slurmctld send it again after a minute, to the same step of the
job's next start, which on these clusters does not wait two minutes (seen on 22.05).
"""

Strike = Callable[["Trial"], str]


@dataclass(frozen=True)
class Fault:
    """One row."""

    name: str
    expected: str
    strike: Strike
    """Starts a run, strikes it, proves it, and returns what it saw; raises where that differs."""
    subject: str
    conf: Mapping[str, str | None] | None = None
    """Lines of a slurm.conf of its own; None shares an unhurried cluster with other faults."""
    hosts: int = 2
    needs: tuple[str, ...] = ()
    """Configurations whose uninterrupted run it is held against."""
    disk: str = ""
    """The small disk on which its runs live: `tmpfs`, `ext4` below the submission's directory, or
    another than that of this directory: `node`, one that writes 50 MB per second: `slow`."""
    quick: bool = field(default=False)
    """Whether it is among those that run on every change."""


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, expected: str = SAME, *, conf: Mapping[str, str | None] | None = None,
    hosts: int = 2, needs: tuple[str, ...] = ("two",), disk: str = "", quick: bool = False,
) -> Callable[[Strike], Strike]:  # fmt: skip
    """Register a function as a row. `conf={}` is a cluster of its own without further lines."""

    def register(strike: Strike) -> Strike:
        assert name not in FAULTS, name
        subject = strike.__module__.rpartition(".")[2]
        FAULTS[name] = Fault(name, expected, strike, subject, conf, hosts, needs, disk, quick)
        return strike

    return register
