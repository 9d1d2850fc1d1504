"""Fits of a small model that are interrupted and go on in the same process."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, Dataset

from clusterddp.distributed.agreement import Poll
from clusterddp.integrations import driven
from clusterddp.training import stop

PACKAGE = "lightning.pytorch"


class Samples(Dataset[Any]):
    """Samples with random noise, as an augmentation has."""

    def __init__(self, count: int = 24) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        x = torch.full((4,), index / self.count) + 0.1 * torch.rand(4)
        return x, x.sum(0, keepdim=True)


def model_of(package: str = PACKAGE, **more: Any) -> Any:
    """Return a new model, with its attributes: `log` (what it saw)."""
    pl = importlib.import_module(package)

    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
            )
            self.seen: list[Any] = []

        def loss(self, batch: Any) -> Any:
            x, y = batch
            return torch.nn.functional.mse_loss(self.layers(x), y)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.seen.append((self.current_epoch, index, self.global_step))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    for name, value in more.items():
        setattr(Model, name, value)
    return Model()


def logger_of(package: str, lines: list[Any]) -> Any:
    base = importlib.import_module(f"{package}.loggers.logger").Logger

    class Lines(base):  # type: ignore[misc, valid-type]
        name, version = "lines", 0

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            lines.append((step, dict(sorted(metrics.items()))))

        def log_hyperparams(self, *_: Any, **__: Any) -> None:
            pass

    return Lines()


def stopper(package: str, at: int) -> Any:
    """Return a callback that asks for a stop after a number of batches."""
    base = importlib.import_module(package).Callback

    class Stopper(base):  # type: ignore[misc, valid-type]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.total_batch_idx + 1 == at:
                stop.requested.note("stop")

    return Stopper()


@contextlib.contextmanager
def process() -> Iterator[None]:
    """Begin with the state of a new process."""
    stop.requested.forget()
    driven._loops.clear()
    try:
        with mock.patch.object(Poll, "due", lambda *_: True):
            yield
    finally:
        for loop in driven._loops.values():
            loop.close()
        driven._loops.clear()
        stop.requested.forget()


def loader_of(samples: Any = None, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(samples or Samples(), **{"batch_size": 4, "shuffle": True, **options})


def fit(
    directory: Path,
    *,
    stops: tuple[int, ...] = (),
    loader: Callable[[], Any] | None = None,
    val: Callable[[], Any] | None = None,
    model: Callable[[], Any] = model_of,
    callbacks: Callable[[], list[Any]] = list,
    plugins: Sequence[Callable[[], Any]] = (),
    package: str = PACKAGE,
    fits: Callable[[Any, Any, Any], None] | None = None,
    save_every: str = "10m",
    resumes: bool = True,
    **options: Any,
) -> tuple[dict[str, Any], list[Any], Any]:
    """Fit in as many attempts as stops, and one more; return weights, lines and the trainer.

    resumes: whether there is one more.
    """
    pl = importlib.import_module(package)
    from clusterddp.integrations.lightning import resume

    lines: list[Any] = []
    for number, at in enumerate((*stops, 0) if resumes else stops):
        with process():
            torch.manual_seed(7 + number)  # a later attempt has to restore the random state
            given = {
                "devices": 1, "max_epochs": 3, "logger": logger_of(package, lines), **options,
            }  # fmt: skip
            trainer = pl.Trainer(
                accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
                log_every_n_steps=1, default_root_dir=directory, plugins=[p() for p in plugins],
                callbacks=[*callbacks(), stopper(package, at)], **given,
            )  # fmt: skip
            resume(trainer, directory=str(directory / "run"), save_every=save_every)
            net = model()
            if number == 0:
                torch.manual_seed(7)
            try:
                (fits or _fit)(trainer, net, ((loader or loader_of())(), val() if val else None))
                assert not at, f"not stopped at {at}"
            except SystemExit as error:
                assert (error.code, bool(at)) == (75, True)
    return {name: each.clone() for name, each in net.state_dict().items()}, lines, trainer


def _fit(trainer: Any, net: Any, loaders: Any) -> None:
    trainer.fit(net, *loaders)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)
