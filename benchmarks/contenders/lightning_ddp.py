"""The same by Lightning's Trainer, logging, checkpoints and progress bar switched off."""

import logging
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.contenders.serving import mnist, request, serve
from benchmarks.contenders.timing import as_it_comes_or_exact
from clusterddp.models.nets import ConvNet


class Digits(L.LightningModule):  # type: ignore[misc] # it comes without types here
    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet()
        self.began = self.seconds = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)

    def on_train_epoch_start(self) -> None:
        self.began = time.perf_counter()

    def on_train_epoch_end(self) -> None:  # the second counts: in the first DDP still settles
        self.seconds = time.perf_counter() - self.began


def main() -> None:
    asked = request()
    as_it_comes_or_exact(asked)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loader = DataLoader(mnist(asked.root), batch_size=asked.batch_size, shuffle=True)
    environment = TorchElasticEnvironment()
    alone = environment.world_size() == 1

    def train() -> float:
        model = Digits()
        trainer = L.Trainer(
            accelerator=asked.device, devices=environment.world_size(),
            max_epochs=2, limit_train_batches=asked.steps,
            strategy="auto" if alone else DDPStrategy(cluster_environment=environment),
            precision="bf16-mixed" if asked.precision == "bf16" else "32-true",
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, loader)
        return model.seconds

    serve(train)


main()
