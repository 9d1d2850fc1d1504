"""Lightning with `resume`: a fit that is stopped ends in the same weights and logs."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch", exc_type=ImportError)

from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from clusterddp.errors import TrainingError
from clusterddp.integrations.lightning import Resume, resume
from clusterddp.run.attempt import attempts
from clusterddp.run.run_dir import RunDir
from clusterddp.training import stop
from tests.integrations.lightning_fits import Samples, fit, loader_of, model_of, process, same
from tests.training.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
release = pytest.mark.release
Case = dict[str, Any]
VAL = {"val": loader_of(shuffle=False)}


def distributed(**options: Any) -> DataLoader[Any]:
    sampler: Any = DistributedSampler(Samples(), num_replicas=1, rank=0)
    return loader_of(shuffle=None, sampler=sampler, **options)()


def own_generator() -> DataLoader[Any]:
    return loader_of(generator=torch.Generator().manual_seed(3))()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Samples()[index] for index in range(24))


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=4)


def combined(mode: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    other = loader_of(Samples(12), generator=generator)()
    return CombinedLoader({"a": loader_of()(), "b": other}, mode)


def several_loaders(mode: str) -> Case:
    def step(self: Any, batch: Any, index: int) -> Any:
        loss = sum(self.loss(each) for each in batch.values() if each is not None)
        self.log("loss", loss)
        return loss

    return {"loader": partial(combined, mode), "model": partial(model_of, training_step=step)}


def plateau(self: Any) -> Any:
    optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.3)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def one_cycle(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.001)
    steps = self.trainer.estimated_stepping_batches
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.002, total_steps=steps)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def manual() -> Any:
    def step(self: Any, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def optimizers(self: Any) -> Any:
        parts = self.layers[0].parameters(), self.layers[2].parameters()
        return [torch.optim.Adam(part, lr=0.01) for part in parts], []

    model = model_of(training_step=step, configure_optimizers=optimizers)
    model.automatic_optimization = False
    return model


def with_metrics() -> Any:
    import torchmetrics

    def step(self: Any, batch: Any, index: int) -> Any:
        x, y = batch
        found = self.layers(x)
        self.error(found, y)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log("max", found.max().detach(), on_step=False, on_epoch=True, reduce_fx="max")
        return torch.nn.functional.mse_loss(found, y)

    model = model_of(training_step=step)
    model.error = torchmetrics.MeanSquaredError()
    return model


def with_hook() -> Any:
    def start(self: Any) -> None:
        self.factor = 1.0 + self.current_epoch
        self.log("factor", self.factor)

    def step(self: Any, batch: Any, index: int) -> Any:
        return self.loss(batch) * self.factor

    return model_of(on_train_epoch_start=start, training_step=step)


def from_iterator() -> Any:
    def step(self: Any, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)

    return model_of(training_step=step)


def twice(trainer: Any, net: Any, loaders: Any) -> None:
    trainer.fit(net, *loaders)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(net, *loaders)


def also_without_steps(trainer: Any, net: Any, loaders: Any) -> None:
    for epochs in (0, 2, 2, 3):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(net, *loaders)


def validates_the_same(trainer: Any, net: Any, loaders: Any) -> None:
    trainer.fit(net, loaders[0], loaders[0])


def stops_early(**options: Any) -> Case:
    return {**VAL, "max_epochs": 6, "callbacks": lambda: [EarlyStopping("val_loss", **options)]}


CASES: dict[str, tuple[Case, list[tuple[int, ...]]]] = {
    # An epoch has six batches.
    "shuffled": ({}, [(2,), (6,), (8,), (18,), (2, 5, 14)]),
    "DistributedSampler": ({"loader": distributed}, [(8,)]),
    "workers": ({"loader": loader_of(num_workers=2)}, [(8,)]),
    "accumulation": ({**VAL, "accumulate_grad_batches": 4}, [(1,), (5,), (8,)]),
    "within an epoch validated": (
        {
            **VAL,
            "val_check_interval": 0.34,
            "model": partial(model_of, configure_optimizers=plateau),
        },
        [(4,), (5,)],
    ),
    "torchmetrics": ({**VAL, "model": with_metrics}, [(8,)]),
    "early stopping": (stops_early(patience=1, min_delta=2.0), [(8,), (12,)]),
    "steps": ({**VAL, "max_steps": 15, "max_epochs": 10}, [(6,), (8,), (14,)]),
    "several loaders": (several_loaders("max_size_cycle"), [(5,), (8,)]),
    "stream": ({**VAL, "loader": stream}, [(6,), (8,)]),
    "reloaded": ({**VAL, "reload_dataloaders_every_n_epochs": 2}, [(8,), (12,)]),
    "two optimizers": ({"model": manual}, [(8,)]),
    "two fits": ({**VAL, "fits": twice}, [(8,), (18,), (20,), (3, 20)]),
    "fits without steps": ({"fits": also_without_steps}, [(8,), (14,)]),
    "validated with the training's loader": (
        {"fits": validates_the_same, "val_check_interval": 2},
        [(3,), (5,), (9,)],
    ),
    "hook of an epoch's start": ({"model": with_hook}, [(8,)]),
    "other callbacks": (
        {
            **VAL,
            "callbacks": lambda: [
                ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
                OnExceptionCheckpoint("exceptions"),
            ],
        },
        [(8,)],
    ),
}
LONGER: dict[str, tuple[Case, list[tuple[int, ...]]]] = {
    "own generator": ({"loader": own_generator}, [(2,), (6,), (8,)]),
    "DistributedSampler, workers": (
        {"loader": partial(distributed, num_workers=2)}, [(2,), (6,), (8,)],
    ),
    "validated every two batches": ({**VAL, "val_check_interval": 2}, [(1,), (2,), (3,), (6,)]),
    "validated over epochs": (
        {**VAL, "val_check_interval": 4, "check_val_every_n_epoch": None}, [(4,), (5,), (8,)],
    ),
    "plateau": ({**VAL, "model": partial(model_of, configure_optimizers=plateau)}, [(6,), (8,)]),
    "one cycle": ({"model": partial(model_of, configure_optimizers=one_cycle)}, [(6,), (8,)]),
    "steps without epochs": ({"max_steps": 15, "max_epochs": -1}, [(6,), (8,), (14,)]),
    "some batches": ({**VAL, "limit_train_batches": 4}, [(1,), (4,), (5,)]),
    "the same batches": ({"overfit_batches": 3}, [(2,), (5,)]),
    "smallest of several loaders": (several_loaders("min_size"), [(2,), (3,), (5,)]),
    "largest of several loaders": (several_loaders("max_size"), [(2,), (5,), (8,)]),
    "dataloader_iter": ({"model": from_iterator}, [(2,), (6,), (8,)]),
    "early stopping, later": (
        {**stops_early(patience=0, min_delta=20.0), "min_epochs": 4}, [(8,), (20,)],
    ),
    "averaging": (
        {"max_epochs": 4, "callbacks": lambda: [StochasticWeightAveraging(swa_lrs=1e-2)]},
        [(8,), (14,)],
    ),
    "accumulation by epoch": (
        {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]}, [(8,), (12,)],
    ),
    "checkpoints by steps": (
        {"callbacks": lambda: [ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)]},
        [(3,), (8,)],
    ),
    "no checkpoints of Lightning's": ({"enable_checkpointing": False}, [(8,)]),
    "time limit of Lightning's": ({"max_time": {"hours": 1}}, [(8,)]),
    "written by a thread": (
        {
            "plugins": [AsyncCheckpointIO],
            "save_every": "2steps",
            "callbacks": lambda: [ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)],
        },
        [(8,)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=release) for name in LONGER)])
def test_a_stopped_fit_ends_in_the_same_weights_and_logs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case, all_stops = (CASES | LONGER)[name]
    weights, lines, trainer = fit(tmp_path / "whole", **case)
    for stops in all_stops:
        found, logged, resumed = fit(tmp_path / str(stops), stops=stops, **case)
        assert same(weights, found), stops
        assert logged == lines, stops
        assert resumed.global_step == trainer.global_step


def test_the_other_package_resumes_as_well(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    package = {"package": "pytorch_lightning", "model": partial(model_of, "pytorch_lightning")}
    weights, lines, _ = fit(tmp_path / "whole", **package)
    found, logged, _ = fit(tmp_path / "stopped", stops=(8,), **package)
    assert same(weights, found)
    assert logged == lines


class Numbers(Samples):
    """Samples whose target is their number."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(4), torch.tensor([float(index)])


def read_by_ranks(
    rank: int, world_size: int, directory: str, stops: tuple[int, ...], has_sampler: bool
) -> list[Any]:
    """Fit as one of several ranks, up to the stop; return each batch's number and samples."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": "1"}
    read: list[Any] = []

    def step(self: Any, batch: Any, index: int) -> Any:
        read.append((self.current_epoch, index, batch[1][:, 0].int().tolist()))
        return self.loss(batch)

    sampler: Any = DistributedSampler(Numbers(), num_replicas=world_size, rank=rank)
    fit(
        Path(directory),
        stops=stops,
        resumes=not stops,
        loader=loader_of(
            Numbers(), **({"sampler": sampler, "shuffle": None} if has_sampler else {})
        ),
        model=partial(model_of, training_step=step),
        devices=world_size,
        strategy="ddp" if world_size > 1 else "auto",
        max_epochs=1,
        logger=False,
    )
    return read


@pytest.mark.parametrize("has_sampler", [True, False], ids=["its own sampler", "Lightning's"])
def test_another_number_of_ranks_reads_the_rest_of_the_epoch_or_is_refused(
    tmp_path: Path, has_sampler: bool
) -> None:
    """Lightning gives a shuffled loader a DistributedSampler only if there are several ranks."""
    [before] = run_ranks(1, read_by_ranks, str(tmp_path), (3,), has_sampler)
    if not has_sampler:
        with pytest.raises(AssertionError, match=r"CheckpointError.*has 1 ranks, but this world"):
            run_ranks(2, read_by_ranks, str(tmp_path), (), has_sampler)
        return
    after = run_ranks(2, read_by_ranks, str(tmp_path), (), has_sampler)
    assert [index for _, index, _ in after[0]] == [1, 2]
    # Three batches of one rank are one and a half of two ranks: the third is trained again.
    read = [number for each in (*before[:2], *after[0], *after[1]) for number in each[2]]
    assert sorted(read) == [*range(24)]


def counting(seen: list[str]) -> Callable[[], Any]:
    def train(self: Any, batch: Any, index: int) -> Any:
        seen.append("trained")
        return self.loss(batch)

    def test(self: Any, batch: Any, index: int) -> None:
        seen.append("tested")

    return partial(model_of, training_step=train, test_step=test)


def fit_and_test(trainer: Any, net: Any, loaders: Any) -> None:
    trainer.fit(net, *loaders)
    trainer.test(net, loader_of()(), verbose=False)


@pytest.mark.parametrize("case", [{}, stops_early(patience=0, min_delta=100.0)], ids=["", "early"])
def test_a_finished_fit_is_passed_and_what_follows_runs(case: Case, tmp_path: Path) -> None:
    seen: list[str] = []
    more: Case = {**case, "model": counting(seen), "fits": fit_and_test}
    weights, _, trainer = fit(tmp_path, **more)
    assert (seen.count("trained"), seen.count("tested")) == (trainer.global_step, 6)
    seen.clear()
    found, _, again = fit(tmp_path, **more)
    assert (seen.count("trained"), seen.count("tested")) == (0, 6)
    assert same(weights, found)
    assert again.global_step == trainer.global_step


def test_our_checkpoint_comes_before_one_that_the_script_names(tmp_path: Path) -> None:
    def fits(trainer: Any, net: Any, loaders: Any) -> None:
        trainer.fit(net, *loaders, ckpt_path=tmp_path / "named.ckpt")

    _, _, trainer = fit(tmp_path / "named", max_epochs=1)
    trainer.save_checkpoint(tmp_path / "named.ckpt")
    weights, lines, _ = fit(tmp_path / "whole", fits=fits)
    assert len([step for step, _ in lines]) < 18  # it began with the named one
    found, logged, _ = fit(tmp_path / "stopped", stops=(8,), fits=fits)
    assert same(weights, found)
    assert logged == lines


def test_a_fit_that_failed_is_resumed_by_the_next_call(tmp_path: Path) -> None:
    broken = [20]

    def step(self: Any, batch: Any, index: int) -> Any:
        if self.global_step in broken:
            broken.clear()
            raise ValueError("broken")
        return self.loss(batch)

    def fits(trainer: Any, net: Any, loaders: Any) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(ValueError, match="broken"):
            twice(trainer, net, loaders)
        assert signal.getsignal(signal.SIGTERM) == before
        assert attempts(RunDir(tmp_path / "failed/run"))[-1].read_final_record() is None
        trainer.fit(net, *loaders)

    weights, _, _ = fit(tmp_path / "whole", fits=twice)
    model = partial(model_of, training_step=step)
    found, _, trainer = fit(tmp_path / "failed", fits=fits, model=model, save_every="1steps")
    assert trainer.global_step == 30
    assert same(weights, found)


def test_a_loader_of_a_built_in_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"(?s)batches of a range.*DataLoader.*CD0819"):
        fit(tmp_path, loader=lambda: range(6))


def test_lightning_takes_no_signal(tmp_path: Path) -> None:
    taken: list[object] = []

    def step(self: Any, batch: Any, index: int) -> Any:
        taken.extend(map(signal.getsignal, (signal.SIGTERM, signal.SIGUSR1)))
        return self.loss(batch)

    fit(tmp_path, model=partial(model_of, training_step=step), max_epochs=1)
    assert set(taken) == {stop.requested._take}


class Disk:
    """Disk that is full at some saves."""

    def __init__(self, *full: int) -> None:
        self.full, self.saves = full, 0

    def plugin(self) -> Any:
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        disk = self

        class Checkpoints(TorchCheckpointIO):
            def save_checkpoint(self, *given: Any, **options: Any) -> None:
                disk.saves += 1
                if disk.saves in disk.full:
                    raise OSError(28, "No space left on device")
                super().save_checkpoint(*given, **options)

        return Checkpoints()


def test_a_full_disk_does_not_end_the_training_and_the_next_save_retries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(2)
    case: Case = {"save_every": "4steps", "enable_checkpointing": False}
    weights, _, _ = fit(tmp_path / "whole")
    found, _, _ = fit(tmp_path / "full", stops=(9,), plugins=[disk.plugin], **case)
    assert same(weights, found)
    assert "No space left on device" in capsys.readouterr().err
    final = attempts(RunDir(tmp_path / "full/run"))[0].read_final_record()
    assert final is not None
    assert (final.reason, final.step, final.saved) == ("stop", 9, 9)


def test_a_tuner_within_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"(?s)LearningRateFinder trains within fit.*CD0822"):
        fit(tmp_path, callbacks=lambda: [LearningRateFinder()])


def test_a_run_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the place of the run")
    with pytest.raises(TrainingError, match=r"(?s)cannot create an attempt.*CD0504"):
        fit(tmp_path)


def test_the_line_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"(?s)resume\(trainer\) was called twice.*CD0822"):
        fit(tmp_path, callbacks=lambda: [Resume()])


def test_only_a_trainer_is_made_resumable() -> None:
    with pytest.raises(TypeError, match="takes a Trainer of Lightning, not a str"):
        resume("trainer")


def test_a_release_without_a_name_that_is_needed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    monkeypatch.delattr(_CheckpointConnector, "resume_start")
    with pytest.raises(
        TrainingError, match=r"(?s)has no _CheckpointConnector.resume_start.*CD0821"
    ):
        fit(tmp_path)


def test_the_line_may_be_a_callback_of_lightning_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    monkeypatch.chdir(tmp_path)
    arguments = [
        "fit", "--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--trainer.devices=1",
        "--trainer.limit_train_batches=3", "--trainer.logger=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.callbacks+=clusterddp.integrations.lightning.Resume",
        f"--trainer.callbacks.directory={tmp_path / 'run'}",
    ]  # fmt: skip
    with process():
        LightningCLI(BoringModel, args=arguments)
    [attempt] = attempts(RunDir(tmp_path / "run"))
    assert [path.name for path in attempt.checkpoints.glob("*.pt")] == ["step-00000003.pt"]
