"""DDP as tutorials write it: DataLoader, DistributedSampler, ToTensor, plain SGD."""

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.contenders.serving import Request, mnist, request, serve
from benchmarks.contenders.timing import as_it_comes_or_exact, timed


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.layer2(self.layer1(images))
        scores: Tensor = self.fc(features.reshape(features.size(0), -1))
        return scores


def step_of(model: nn.Module, asked: Request) -> Callable[[Tensor, Tensor], None]:
    """The step over one batch on the model's device."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    lower = asked.precision == "bf16"

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(asked.device, torch.bfloat16) if lower else nullcontext():
            loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    asked = request()
    world_size = int(os.environ["WORLD_SIZE"])
    as_it_comes_or_exact(asked)
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    device = torch.device(asked.device)
    torch.manual_seed(0)
    net = ConvNet().to(device)
    model = DistributedDataParallel(net) if world_size > 1 else net
    step = step_of(model, asked)
    dataset = mnist(asked.root)
    sampler: DistributedSampler[int] = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, batch_size=asked.batch_size, shuffle=False, sampler=sampler, pin_memory=True
    )

    def train() -> float:
        dist.barrier()
        batches = itertools.islice(loader, asked.steps)
        return timed(
            batches, lambda images, labels: step(images.to(device), labels.to(device)), asked.device
        )

    serve(train)


if __name__ == "__main__":
    main()
