"""All ranks asking each other, about twice a second, whether to stop or to save now.

One exchange of a few numbers, in step with the training: every rank looks at the same steps, so
all of them learn of a request at the same one. Which steps those are follows from how long steps
take; that too is exchanged.
"""

import time

import torch
import torch.distributed as dist

POLL_SECONDS = 0.5
_MOST_STEPS = 1000


class Poll:
    """When the ranks ask each other, and what they answer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        self._stride = 1
        self._asked: tuple[int, float] | None = None
        self.step_seconds = 0.0
        """What a step has taken lately, all that lies between two of them included."""

    def due(self, step: int) -> bool:
        """Whether the ranks ask each other at this step."""
        return step >= self._next

    def ask(self, step: int, wishes: list[int]) -> list[int]:
        """The largest of each wish over all ranks; every rank calls it at the same step."""
        now = time.monotonic()
        if self._asked and step > self._asked[0]:
            self.step_seconds = (now - self._asked[1]) / (step - self._asked[0])
        wanted = _MOST_STEPS
        if self.step_seconds:
            wanted = min(max(int(POLL_SECONDS / self.step_seconds), 1), _MOST_STEPS)
        answer = torch.tensor([*wishes, -wanted], dtype=torch.int64, device=self._device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        *answers, slowest = answer.tolist()
        # Careful at first: a step that is slow to begin with is soon faster, and the other way.
        self._stride = max(1, min(-slowest, self._stride * 2))
        self._next = step + self._stride
        self._asked = (step, time.monotonic())
        return [int(value) for value in answers]
