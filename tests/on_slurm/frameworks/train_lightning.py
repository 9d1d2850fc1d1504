"""Lightning training on two hosts of two ranks, with one line for clusterddp.

It writes its weights to model.pt. With CHECK it trains again without the line and compares.
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer

from clusterddp.integrations.lightning import resume

EPOCHS, SAMPLES, STEPS = 4, 384, 48


class Noisy(torch.utils.data.Dataset):
    """Samples with random noise, as an augmentation has."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.full((4,), index / SAMPLES) + 0.1 * torch.rand(4)
        return x, x.sum(0, keepdim=True)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(*, resumes):
    torch.manual_seed(1)
    model = Model()
    torch.manual_seed(2 + int(os.environ["SLURM_PROCID"]))
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
    val = torch.utils.data.DataLoader(Noisy(), batch_size=96)
    trainer = Trainer(
        accelerator="cpu", devices=2, num_nodes=2, max_epochs=EPOCHS, accumulate_grad_batches=2,
        check_val_every_n_epoch=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if resumes:
        resume(trainer, save_every="8steps")
    trainer.fit(model, loader, val)
    return trainer, model.state_dict()


trainer, weights = train(resumes=True)
if trainer.is_global_zero:
    torch.save(weights, "model.pt")
print("trained on to step", trainer.global_step, flush=True)
if "CHECK" in os.environ:
    _, expected = train(resumes=False)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    print("the weights are equal", flush=True)
