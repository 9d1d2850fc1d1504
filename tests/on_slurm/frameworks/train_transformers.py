"""transformers' Trainer on two hosts of two ranks, with one line for clusterddp.

It writes its weights to model.pt. With CHECK it trains again without the line and compares.
"""

import os

import torch
from transformers import Trainer, TrainingArguments

from clusterddp.integrations.transformers import resume

EPOCHS, SAMPLES, STEPS = 4, 384, 48


class Model(torch.nn.Module):
    """A regression with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels):
        loss = torch.nn.functional.mse_loss(self.layers(x), labels)
        return {"loss": loss}


def collate(samples):
    """Add random noise, as an augmentation does."""
    x = torch.stack([each["x"] for each in samples])
    return {"x": x + 0.1 * torch.rand_like(x), "labels": x.sum(1, keepdim=True)}


def train(*, resumes):
    torch.manual_seed(1)
    model = Model()
    data = [{"x": torch.full((4,), index / SAMPLES)} for index in range(SAMPLES)]
    args = TrainingArguments(
        output_dir="out", use_cpu=True, ddp_backend="gloo", num_train_epochs=EPOCHS,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=0.01,
        save_strategy="no", report_to=[], disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, data_collator=collate)
    if resumes:
        resume(trainer, save_every="8steps")
    trainer.train()
    return trainer, model.state_dict()


trainer, weights = train(resumes=True)
if trainer.is_world_process_zero():
    torch.save(weights, "model.pt")
print("trained on to step", trainer.state.global_step, flush=True)
if "CHECK" in os.environ:
    _, expected = train(resumes=False)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    print("the weights are equal", flush=True)
