"""The progress bar of rank 0 on a terminal, which gives way to a debugger's prompt."""

import sys
from typing import Any

from tqdm import tqdm

# Audit events of what is about to print or to ask: `breakpoint()`, a debugger that begins to trace
# (`pdb.set_trace()`), `input()`. Source: the audit events table of Python's documentation.
_ASKING = frozenset({"builtins.breakpoint", "builtins.input", "sys.settrace"})


class ProgressBar(tqdm):  # type: ignore[misc] # tqdm has no types
    """Steps done and left, on stderr.

    A debugger that stops the training finds an empty line. As long as it traces, nothing is drawn:
    it would stand where the person types.
    """

    monitor_interval = 0
    """Without tqdm's thread, which draws again while the training stands still."""

    def __init__(self, done: int, total: int) -> None:
        self._is_shown = False
        super().__init__(initial=done, total=total, unit="step", dynamic_ncols=True)
        sys.addaudithook(self._hear)  # which stays for good

    @property
    def gives_way(self) -> bool:
        """Whether a debugger is at work."""
        return sys.gettrace() is not None

    def display(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the bar, unless it gives way."""
        if self.gives_way:
            return None
        self._is_shown = True
        return super().display(*args, **kwargs)

    def _hear(self, event: str, _arguments: tuple[object, ...]) -> None:
        if event in _ASKING and self._is_shown and not self.disable:
            self._is_shown = False
            self.clear()
