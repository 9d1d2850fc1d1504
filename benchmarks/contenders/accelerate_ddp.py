"""The same by Hugging Face's Accelerate."""

import itertools

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.contenders.serving import mnist, request, serve
from benchmarks.contenders.timing import as_it_comes_or_exact, timed
from clusterddp.models.nets import ConvNet


def main() -> None:
    asked = request()
    as_it_comes_or_exact(asked)
    accelerator = Accelerator(
        cpu=asked.device == "cpu", mixed_precision="bf16" if asked.precision == "bf16" else "no"
    )
    torch.manual_seed(0)
    net = ConvNet()
    loader = DataLoader(mnist(asked.root), batch_size=asked.batch_size, shuffle=True)
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 1e-4), loader
    )

    def step(images: Tensor, labels: Tensor) -> None:
        with accelerator.autocast():
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

    def train() -> float:
        accelerator.wait_for_everyone()
        return timed(itertools.islice(batches, asked.steps), step, asked.device)

    serve(train)


main()
