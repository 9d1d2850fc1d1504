"""Counts how the processes of a script of three ranks end, with a Loop and without one.

    python -m tests.turns 1000

A turn forks three ranks from this process, which has imported torch; they exchange a few numbers
over gloo, and end as any Python does, through the interpreter's own end. 134 is SIGABRT.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # else each rank imports it, with an optimizer
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.loop import Loop

RANKS = 3
_PATIENCE_SECONDS = 120.0


def train(rank: int, store: str, folder: str) -> None:
    """Train three steps as one rank; with a Loop where a directory is given."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loop = Loop(directory=folder, model=ddp, optimizer=optimizer) if folder else None
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if loop:
            loop.step()
    if loop:
        loop.finish()


def turn(with_loop: bool) -> list[int] | None:
    """Return the exit codes of the ranks of one start, as a shell shows them; None in a rank."""
    folder = tempfile.mkdtemp()
    ranks = []
    for rank in range(RANKS):
        if pid := os.fork():
            ranks.append(pid)
            continue
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        train(rank, f"{folder}/store", f"{folder}/run" if with_loop else "")
        return None  # to the end of the interpreter
    codes = [_exit_code(pid) for pid in ranks]
    shutil.rmtree(folder)
    return codes


def _exit_code(pid: int) -> int:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(ended[1])
    return code if code >= 0 else 128 - code


def main(turns: int) -> None:
    """Take the turns with and without a Loop, one of each after the other, and print the counts."""
    seen: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for number in range(1, turns + 1):
        for with_loop, counts in seen.items():
            codes = turn(with_loop)
            if codes is None:
                return
            counts.update(codes)
        shown = {"with": dict(seen[True]), "without": dict(seen[False])}
        print(f"{number} turns, exit codes of ranks: {shown}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
