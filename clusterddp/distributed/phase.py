"""Where a rank is in its training: the phase of the step, and how far that is."""

from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """What a rank does in a step, in the order in which it does it."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    UPDATE = 4
    LOG = 5
    EVALUATE = 6
    COUNT = 7
    SAVE = 8
    DONE = 9


_WORDS = {
    Phase.START: "starting, after step {}",
    Phase.DATA: "fetching the batch of step {}",
    Phase.FORWARD: "in the forward pass of step {}",
    Phase.BACKWARD: "exchanging the gradients of step {}",
    Phase.UPDATE: "updating the weights in step {}",
    Phase.LOG: "adding up the figures of step {}",
    Phase.EVALUATE: "evaluating after step {}",
    Phase.COUNT: "adding up the evaluation after step {}",
    Phase.SAVE: "saving after step {}",
    Phase.DONE: "done after step {}",
}


class Place(NamedTuple):
    """Where a rank is; a rank that is further has the greater place."""

    step: int
    turn: int
    """How often the step went back to an earlier phase, as it does to accumulate gradients."""
    phase: int

    def words(self) -> str:
        if self.phase == Phase.START and not self.step:
            return "starting"
        return _WORDS[Phase(self.phase)].format(self.step)


class Progress:
    """Where this rank is: written by its training loop, read by the watchdog's threads."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        # The number of marks, and the place. Replaced as a whole, so that no reader needs a lock.
        self.state = (0, 0, 0, int(Phase.START))

    def mark(self, step: int, phase: int) -> None:
        """Say what this rank does from now on: a Phase of the step with this number.

        The first step is number 1. What comes after a step (EVALUATE, SAVE) has its number, and
        START that of the last finished one. All ranks mark the same; a mark that changes nothing
        shows that a long phase goes on.
        """
        marks, last_step, turn, last_phase = self.state
        if step != last_step:
            turn = 0
        elif phase < last_phase:
            turn += 1
        self.state = (marks + 1, step, turn, phase)

    @property
    def place(self) -> Place:
        return Place(*self.state[1:])
