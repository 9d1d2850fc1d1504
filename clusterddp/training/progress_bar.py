"""The progress bar of rank 0 on a terminal, which gives way to a debugger's prompt."""

import functools
import sys
import weakref
from typing import Any

from tqdm import tqdm

# Audit events of what is about to print or to ask: `breakpoint()`, a debugger that begins to trace
# (`pdb.set_trace()`), `input()`. Source: the audit events table of Python's documentation.
_ASKING = frozenset({"builtins.breakpoint", "builtins.input", "sys.settrace"})


class ProgressBar(tqdm):  # type: ignore[misc] # tqdm has no types
    """Shows steps done and left, on stderr.

    A debugger that stops the training finds an empty line. As long as it traces, nothing is drawn:
    it would stand where the user types.
    """

    monitor_interval = 0
    """Without tqdm's thread, which draws again while the training stands still."""

    def __init__(self, done: int, total: int) -> None:
        self._is_shown = False
        super().__init__(initial=done, total=total, unit="step", dynamic_ncols=True)
        global _present  # noqa: PLW0603 -- the hook outlives every bar
        _present = weakref.ref(self)
        _listen()

    @property
    def gives_way(self) -> bool:
        """True while a debugger is at work."""
        return sys.gettrace() is not None

    def display(self, *args: Any, **kwargs: Any) -> Any:
        """Draw the bar, unless it gives way."""
        if self.gives_way:
            return None
        self._is_shown = True
        return super().display(*args, **kwargs)

    def make_room(self) -> None:
        """Clear the line of a bar that is shown, until it is drawn again."""
        if self._is_shown and not self.disable:
            self._is_shown = False
            self.clear()


_present: weakref.ref[ProgressBar] | None = None
"""The bar that was begun last, as long as it is in use."""


@functools.cache
def _listen() -> None:
    """Listen for prompts from the first call on: an audit hook cannot be removed."""
    sys.addaudithook(_hear)


def _hear(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _ASKING and _present and (bar := _present()):
        bar.make_room()
