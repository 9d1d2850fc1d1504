"""A training whose snapshots are switched on and off in turns; prints JSON of both.

Arguments: millions of parameters, pairs. Snapshots are taken far more often than by default, since
their cost would vanish in the noise: one in a window of some steps, none in the next.
"""

import json
import sys
import time
from typing import Any

import torch
from torch import nn

from clusterddp.loop import Loop

_LAYERS, _BATCH = 8, 32
_STEPS = 10
"""Steps of a window, or more: the ranks agree on a snapshot each half second."""


def main() -> None:
    millions, pairs = float(sys.argv[1]), int(sys.argv[2])
    width = int((millions * 1e6 / _LAYERS) ** 0.5)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = (nn.Linear(width, width, bias=False) for _ in range(_LAYERS))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    # No ordinary checkpoint is to fall into a window.
    loop = Loop(model=model, optimizer=optimizer, save_every="100000steps")
    loop._saved_at = time.monotonic()  # for it saves early at first
    snapshots, images = loop._snapshots, torch.randn(_BATCH, width, device=device)
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
        """Train so many steps, or enough for a snapshot; returns the seconds and the steps."""
        began, done, is_taken = time.perf_counter(), 0, False
        while done < (count or _STEPS) or not (is_taken or count):
            is_taken = train() or is_taken
            done += 1
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, done

    on, off, copies = list[float](), list[float](), list[float]()
    copy = snapshots._copy

    def timed(*args: Any) -> None:
        began = time.perf_counter()
        copy(*args)
        if snapshots._layout:
            snapshots._layout.finish()  # of a GPU's copy
        copies.append(time.perf_counter() - began)

    vars(snapshots)["_copy"] = timed
    while not snapshots._is_off and not train():
        pass
    is_off = snapshots._is_off
    for _ in range(0 if is_off else pairs):
        snapshots._due = 0.0
        seconds, count = window()
        on.append(seconds / count)
        snapshots._is_off = True
        off.append(window(count)[0] / count)
        snapshots._is_off = False
    size = snapshots._layout.size if snapshots._layout else 0
    answer = {"with": on, "without": off, "seconds": copies[1:], "bytes": size}
    print("answer", json.dumps(answer | {"off": is_off}), flush=True)


main()
