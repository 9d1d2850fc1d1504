"""A script without any clusterddp code: `submit … -- python own_script.py`.

Ranks come from the environment (env://). Asked to stop, all ranks save at one step and exit with
75, which says: saved, start me again.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from own_dataset import stripes
from own_model import build
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = Path("own_script.pt")
BATCH = 32


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    asked: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ddp = DistributedDataParallel(model)
    images, labels = (tensor.to(device) for tensor in stripes("", train=True))
    code = 0
    while step < steps and not code:
        order = torch.Generator().manual_seed(step)
        batch = torch.randperm(len(labels), generator=order)[: BATCH * world_size][rank::world_size]
        loss = cross_entropy(ddp(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        stop = torch.tensor(len(asked), device=device)
        dist.all_reduce(stop)  # one rank's request is a request to all
        code = 75 if stop else 0
    if rank == 0:
        print(f"step {step}, loss {loss.item():.3f}" if step else "nothing to do", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        fresh = CHECKPOINT.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(CHECKPOINT)  # whole or not at all
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
