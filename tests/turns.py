"""Counts how the processes of a script of three ranks end, with a Loop and without one.

    python -m tests.turns 1000

A turn starts three ranks that exchange a few numbers over gloo and end. 134 is SIGABRT.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter

RANKS = 3
_SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, ranks, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
ddp = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
loop = None
if folder:
    from clusterddp.loop import Loop

    loop = Loop(folder=folder, model=ddp, optimizer=optimizer)
for _ in range(3):
    optimizer.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if loop:
        loop.step()
if loop:
    loop.finish()
"""


def turn(with_loop: bool) -> list[int]:
    """Return the exit codes of the ranks of one start, as a shell shows them."""
    with tempfile.TemporaryDirectory() as folder:
        loop = f"{folder}/run" if with_loop else ""
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _SCRIPT, str(rank), str(RANKS), f"{folder}/store", loop],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=subprocess.DEVNULL,
            )
            for rank in range(RANKS)
        ]
        try:
            codes = [rank.wait(120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [code if code >= 0 else 128 - code for code in codes]


def main(turns: int) -> None:
    """Take the turns with and without a Loop, one of each after the other, and print the counts."""
    seen: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for number in range(1, turns + 1):
        for with_loop, codes in seen.items():
            codes.update(turn(with_loop))
        shown = {"with": dict(seen[True]), "without": dict(seen[False])}
        print(f"{number} turns, exit codes of ranks: {shown}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
