"""The tutorial's DDP step on tensors that are in memory already: what a loader costs, left out."""

import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.article import ConvNet
from benchmarks.contenders.serving import request, serve
from clusterddp.training import data
from clusterddp.training.images import Images, as_images


def main() -> None:
    asked = request()
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    device = torch.device(asked.device)
    torch.manual_seed(0)
    model = DistributedDataParallel(ConvNet().to(device))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    images = Images(*data.load("mnist", asked.root, train=True), device)
    first = int(os.environ["RANK"]) * asked.steps * asked.batch_size
    order = (torch.arange(asked.steps * asked.batch_size) + first) % len(images)
    batches = [
        (as_images(some), labels) for some, labels in images.batches(order, asked.batch_size)
    ]

    def train() -> float:
        dist.barrier()
        began = time.perf_counter()
        for some, labels in batches:
            lower = asked.precision == "bf16"
            with torch.autocast(asked.device, torch.bfloat16) if lower else nullcontext():
                loss = criterion(model(some), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if asked.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    serve(train)


main()
