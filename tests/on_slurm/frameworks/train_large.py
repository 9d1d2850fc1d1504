"""A loop of few steps whose state takes 720 MB: 60 million parameters, and two of Adam for each."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clusterddp.loop import Loop

WIDTH, STEPS, SAVED = 7746, 16, 2

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(WIDTH, WIDTH)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
torch.manual_seed(1 + dist.get_rank())
loop = Loop(model=ddp, optimizer=optimizer, log_every=1)
for _ in loop.iterations(STEPS):
    images = torch.randn(4, WIDTH)
    loss = (ddp(images) - images.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loop.step(loss=loss)
    if loop.steps == SAVED:
        loop.save()
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
