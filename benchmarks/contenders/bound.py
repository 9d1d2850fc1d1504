"""What the step costs alone: tensors in memory, no loader, no exchange, nothing told or saved;
and, by `bound_exchanged`, with the least that ranks can exchange in it.

The arithmetic is the project's own (network, layout, precision, fused optimizer); on a GPU the step
is captured into a graph with the option `cuda_graph` on. Options also as `entered` has them.
"""

import os

import torch
import torch.distributed as dist

from benchmarks.contenders.serving import request, serve
from benchmarks.contenders.timing import entered, timed
from clusterddp.data import mnist
from clusterddp.data.loader import Images
from clusterddp.models import nets
from clusterddp.request.train_config import TrainConfig
from clusterddp.training.cuda_graph import GraphedStep
from clusterddp.training.device import keep_freed
from clusterddp.training.metrics import MetricSums
from clusterddp.training.step import Step, build_optimizer


def main(*, exchange: bool = False) -> None:
    """exchange: with one bare all-reduce a step, of as many bytes as the gradients have, for which
    a rank waits until the slower one is as far."""
    asked = request()
    device = entered(asked)
    keep_freed()
    torch.manual_seed(0)
    model = nets.build("convnet").to(device).to(memory_format=torch.channels_last)
    config = TrainConfig(optimizer="sgd", lr=1e-4, momentum=0.0)
    captured = asked.device == "cuda" and asked.options.get("cuda_graph") == "on"

    def all_reduce() -> None:
        dist.all_reduce(gradients)

    gradients = torch.zeros(sum(each.numel() for each in model.parameters()), device=device)
    step = Step(
        model, build_optimizer(config, model, captured=captured), MetricSums(device),
        device=device, precision=asked.precision,
        exchanged=all_reduce if exchange else lambda: None,
    )  # fmt: skip
    train_step = GraphedStep(step, model, asked.batch_size) if captured else step
    images = Images(*mnist.read("mnist", asked.root).tensors(train=True), device)
    first = int(os.environ["RANK"]) * asked.steps * asked.batch_size
    order = (torch.arange(asked.steps * asked.batch_size) + first) % len(images)
    batches = list(images.batches(order, asked.batch_size))

    def train() -> float:
        dist.barrier()
        return timed(batches, train_step, asked.device)

    serve(train)


if __name__ == "__main__":
    main()
