"""Train a small network to tell stripes in four directions apart."""

import os

import torch
import torch.distributed as dist
from own_dataset import stripes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from clusterddp.loop import Loop

local_rank = int(os.environ["LOCAL_RANK"])
on_gpu = torch.cuda.is_available()
device = torch.device("cpu")
if on_gpu:
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
ddp = DistributedDataParallel(model)
dataset = TensorDataset(*stripes("", train=True))
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=64, sampler=sampler)
loop = Loop(model=ddp, optimizer=optimizer, save_every="10steps")
for epoch in loop.epochs(3):
    sampler.set_epoch(epoch)
    for images, labels in loop.batches(loader):
        loss = cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.step(loss=loss)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.barrier()
dist.destroy_process_group()
