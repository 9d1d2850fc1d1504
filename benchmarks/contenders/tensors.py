"""The tutorial's DDP step on tensors that are in memory already: what a loader costs, left out.

Option: `compile`, a mode of torch.compile.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.contenders.article import ConvNet, step_of
from benchmarks.contenders.serving import request, serve
from benchmarks.contenders.timing import as_it_comes_or_exact, timed
from clusterddp.data import mnist
from clusterddp.data.loader import Images, as_images


def main() -> None:
    asked = request()
    as_it_comes_or_exact(asked)
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    device = torch.device(asked.device)
    torch.manual_seed(0)
    model: nn.Module = ConvNet().to(device)
    if int(os.environ["WORLD_SIZE"]) > 1:
        model = DistributedDataParallel(model)
    if mode := asked.options.get("compile"):
        model.compile(mode=mode)
    step = step_of(model, asked)
    images = Images(*mnist.read("mnist", asked.root).tensors(train=True), device)
    first = int(os.environ["RANK"]) * asked.steps * asked.batch_size
    order = (torch.arange(asked.steps * asked.batch_size) + first) % len(images)
    batches = [
        # Laid out as a tutorial's ToTensor does.
        (as_images(some).clone(memory_format=torch.contiguous_format), labels)
        for some, labels in images.batches(order, asked.batch_size)
    ]

    def train() -> float:
        dist.barrier()
        return timed(batches, step, asked.device)

    serve(train)


main()
