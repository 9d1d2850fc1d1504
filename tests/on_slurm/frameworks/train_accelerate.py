"""Accelerate's training on two hosts of two ranks, with five lines for clusterddp.

It writes its weights to model.pt. With CHECK it trains again without the lines and compares.
"""

import os

import torch
from accelerate import Accelerator

from clusterddp.loop import Loop

EPOCHS, SAMPLES, STEPS = 4, 384, 48


class Noisy(torch.utils.data.Dataset):
    """Samples with random noise, as an augmentation has."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.full((4,), index / SAMPLES) + 0.1 * torch.rand(4)
        return x, x.sum(0, keepdim=True)


def train(*, resumes):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )  # fmt: skip
    torch.manual_seed(2 + int(os.environ["RANK"]))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    loop = Loop(accelerator=accelerator, save_every="8steps") if resumes else None
    for _ in loop.epochs(EPOCHS) if loop else range(EPOCHS):
        for x, y in loop.batches(loader) if loop else loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if loop and accelerator.sync_gradients:
                loop.step(loss=loss)
    return accelerator, accelerator.unwrap_model(model).state_dict(), loop and loop.steps


accelerator, weights, steps = train(resumes=True)
if accelerator.is_main_process:
    torch.save(weights, "model.pt")
print("trained on to step", steps, flush=True)
if "CHECK" in os.environ:
    _, expected, _ = train(resumes=False)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    print("the weights are equal", flush=True)
