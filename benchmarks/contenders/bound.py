"""What the step costs alone: tensors in memory, no loader, no exchange, nothing told or saved.

The arithmetic is the project's own (network, layout, precision, fused optimizer); on a GPU the step
is captured into a graph.
"""

import os

import torch
import torch.distributed as dist

from benchmarks.contenders.serving import request, serve
from benchmarks.contenders.timing import timed
from clusterddp.train_config import TrainConfig
from clusterddp.training import data, memory, models, optimizer
from clusterddp.training.graph import GraphedStep
from clusterddp.training.images import Images
from clusterddp.training.metrics import Tally
from clusterddp.training.step import Step


def main() -> None:
    asked = request()
    dist.init_process_group("gloo")
    device = torch.device(asked.device)
    memory.keep_freed()
    torch.manual_seed(0)
    model = models.build("convnet").to(device).to(memory_format=torch.channels_last)
    config = TrainConfig(optimizer="sgd", lr=1e-4, momentum=0.0)
    captured = asked.device == "cuda"
    step = Step(
        model, optimizer.build(config, model, captured=captured), Tally(device),
        device=device, precision=asked.precision,
    )  # fmt: skip
    train_step = GraphedStep(step, model, asked.batch_size) if captured else step
    images = Images(*data.load("mnist", asked.root, train=True), device)
    first = int(os.environ["RANK"]) * asked.steps * asked.batch_size
    order = (torch.arange(asked.steps * asked.batch_size) + first) % len(images)
    batches = list(images.batches(order, asked.batch_size))

    def train() -> float:
        dist.barrier()
        return timed(batches, train_step, asked.device)

    serve(train)


main()
