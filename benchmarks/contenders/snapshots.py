"""A training whose snapshots are switched on and off in turns; prints JSON of both.

Arguments: millions of parameters, pairs. A window with snapshots begins after one and ends with the
next, so that it has exactly one; the other has as many steps.
"""

import json
import sys
import time
from typing import Any

import torch
from torch import nn

from clusterddp.loop import Loop
from clusterddp.training.snapshots import _SHARE_OF_TIME

_LAYERS, _BATCH = 8, 32


def main() -> None:
    millions, pairs = float(sys.argv[1]), int(sys.argv[2])
    width = int((millions * 1e6 / _LAYERS) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(_LAYERS)])
    optimizer = torch.optim.Adam(model.parameters())
    # No ordinary checkpoint is to fall into a window.
    loop = Loop(model=model, optimizer=optimizer, save_every="100000steps")
    loop._saved_at = time.monotonic()  # for it saves early at first
    snapshots, images = loop._snapshots, torch.randn(_BATCH, width)
    steps = iter(loop.iterations(10**9))

    def train() -> bool:
        """Train a step, and return whether it took a snapshot."""
        due = snapshots._due
        next(steps)
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.step()
        layout = snapshots._layout
        return bool(layout and layout.is_ready) and snapshots._due > max(due, time.monotonic() + 5)

    def window(count: int = 0) -> tuple[float, int]:
        """Train so many steps, or until a snapshot; returns the seconds per step, and the steps."""
        began, done = time.perf_counter(), 0
        while True:
            is_taken, done = train(), done + 1
            if done == count or (is_taken and not count):
                return (time.perf_counter() - began) / done, done

    on: list[float] = []
    off: list[float] = []
    copies: list[float] = []
    every, copy = 0.0, snapshots._copy

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        copy(*args)
        copies.append(time.perf_counter() - began)

    vars(snapshots)["_copy"] = timed
    while not snapshots._is_off and not train():
        pass
    is_off = snapshots._is_off
    for _ in range(0 if is_off else pairs):
        # The memory is new at the first copy, which takes longer.
        every = max(snapshots._every, min(copies) / _SHARE_OF_TIME)
        snapshots._due = time.monotonic() + every
        seconds, count = window()
        on.append(seconds)
        snapshots._is_off = True
        off.append(window(count)[0])
        snapshots._is_off = False
    size = snapshots._layout.size if snapshots._layout else 0
    answer = {"with": on, "without": off, "every": every, "seconds": copies[1:], "bytes": size}
    print("answer", json.dumps(answer | {"off": is_off}), flush=True)


main()
