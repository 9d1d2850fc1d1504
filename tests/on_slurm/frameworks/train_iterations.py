"""A loop of N iterations that draws each batch ahead, in the shape of nanoGPT's train.py.

It writes its weights to model.pt. With CHECK it trains again without clusterddp and compares.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from clusterddp.loop import Loop

STEPS, ACCUMULATION, EVERY = 48, 2, 8
RANK = int(os.environ["RANK"])
DATA = torch.randn(4096, generator=torch.Generator().manual_seed(0))
evaluations = []


def train(*, resumes):
    def get_batch(split):
        places = torch.randint(len(DATA) - 9, (4,))
        return torch.stack([DATA[i : i + 8] for i in places]), DATA[places + 8, None]

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
    )  # fmt: skip
    torch.manual_seed(1337 + RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model = DistributedDataParallel(model)
    if resumes:
        loop = Loop(model=model, optimizer=optimizer, save_every="8steps")
        get_batch = loop.ahead(get_batch)
    x, y = get_batch("train")  # the very first batch
    for number in loop.iterations(STEPS) if resumes else range(STEPS):
        if number % EVERY == 0 and RANK == 0:  # rank 0 draws more numbers than the others
            with torch.no_grad():
                get_batch("val")
            evaluations.append(number)
        for micro_step in range(ACCUMULATION):
            model.require_backward_grad_sync = micro_step == ACCUMULATION - 1
            loss = torch.nn.functional.mse_loss(model(x), y) / ACCUMULATION
            x, y = get_batch("train")  # the next one, ahead of its turn
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if resumes:
            loop.step(loss=loss)
        if number + 1 == STEPS:
            break
    return model.module.state_dict(), resumes and loop.steps


dist.init_process_group("gloo")
weights, steps = train(resumes=True)
if RANK == 0:
    torch.save(weights, "model.pt")
print("evaluated at", *evaluations)
print("trained on to step", steps, flush=True)
if "CHECK" in os.environ:
    expected, _ = train(resumes=False)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    print("the weights are equal", flush=True)
dist.destroy_process_group()
