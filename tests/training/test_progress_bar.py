"""The progress bar: what is left of one that was closed."""

import functools
import gc
import sys
import weakref
from collections.abc import Callable

import pytest

from clusterddp.training import progress_bar
from clusterddp.training.progress_bar import ProgressBar


def test_closed_bars_are_let_go_and_leave_a_single_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Callable[..., None]] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    monkeypatch.setattr(progress_bar, "_listen", functools.cache(progress_bar._listen.__wrapped__))
    bars = []
    for _ in range(3):
        bar = ProgressBar(0, 2)
        bar.update()
        bar.close()
        bars.append(weakref.ref(bar))
        del bar
    gc.collect()
    assert not [bar for bar in bars if bar() is not None]
    assert len(hooks) == 1
    hooks[0]("builtins.breakpoint", ())  # without a bar, nothing to clear
