"""A training of paced steps, of which a rank kills itself at some, once at each.

Arguments: the interval of snapshots in seconds, the seconds of a step, the steps in all, and those
at which it is killed. Rank 0 appends a byte to the file `trained` at each step.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp.loop import Loop


def main() -> None:
    every, pace = map(float, sys.argv[1:3])
    count, *deadly = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(1000, 1000))
    optimizer = torch.optim.Adam(model.parameters())
    loop = Loop(model=model, optimizer=optimizer, snapshot_every=every)
    ends = time.monotonic()
    for step in loop.iterations(count):
        mark = Path(f"killed-{step}")
        if rank == 1 and step in deadly and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(8, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends += pace
        time.sleep(max(0.0, ends - time.monotonic()))
        if rank == 0:
            with Path("trained").open("ab") as trained:
                trained.write(b".")
        loop.step()


main()
