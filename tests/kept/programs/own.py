"""A training loop of a user's own: `python own.py [--shard] [--crash]`."""

import sys

import torch
import torch.distributed as dist
from tiny import net, pairs
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from clusterddp.loop import Loop

EPOCHS, CRASH_STEP = 2, 20

dist.init_process_group("gloo")
model = net()
if "--shard" in sys.argv:
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
dataset = TensorDataset(*pairs("", train=True))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, shuffle=False)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
loop = Loop(model=model, optimizer=optimizer, save_every="50steps", keep_last=1, log_every=20)
for _ in loop.epochs(EPOCHS):
    for images, labels in loop.batches(loader):
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.step(loss=loss)
        if "--crash" in sys.argv and loop.steps == CRASH_STEP and dist.get_rank() == 1:
            raise ValueError("this crash is kept")
model.eval()
images, labels = pairs("", train=False)
loss = cross_entropy(model(images), labels).item()
if dist.get_rank() == 0:
    print(f"test loss {loss:.5f}", flush=True)
loop.test(loss=loss)
dist.barrier()
dist.destroy_process_group()
