"""Makes a Lightning trainer resumable: `resume(trainer)`.

Lightning restores its own checkpoint file; this module adds the position in the data, the random
states, the metrics of the epoch so far and the stop. The only place that knows Lightning's private
names. Sources: `_FitLoop`, `_TrainingEpochLoop`, `_CheckpointConnector` of Lightning 2.4 to 2.6.
"""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from clusterddp.errors import TrainingError
from clusterddp.integrations.driven import Driven, begin_fit, require
from clusterddp.training import replay

T = TypeVar("T")

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FILE = "trainer.ckpt"
_KEY = "clusterddp"
"""Entry in Lightning's checkpoint with what it does not hold."""
_TUNERS = ("LearningRateFinder", "BatchSizeFinder")


def resume(trainer: T, **options: Any) -> T:
    """Have each `trainer.fit()` save checkpoints, stop on request and resume; return the trainer.

    options: see `Resume`.
    """
    if not hasattr(trainer, "fit_loop"):
        raise TypeError(f"resume() takes a Trainer of Lightning, not a {type(trainer).__name__}")
    trainer.callbacks.append(Resume(**options))  # type: ignore[attr-defined]
    return trainer


def _base() -> Any:
    """Return the Callback of the package in use."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    found = [name for name in _PACKAGES if find_spec(name.partition(".")[0])]
    return importlib.import_module([*imported, *found, _PACKAGES[0]][0]).Callback


class Resume(_base()):  # type: ignore[misc]
    """Lightning callback that makes `trainer.fit()` resumable; for LightningCLI."""

    def __init__(
        self,
        directory: str | None = None,
        save_every: str = "10m",
        keep_last: int = 3,
        snapshot_every: float | str = "10s",
        log_every: int = 0,
    ) -> None:
        """All arguments: see `clusterddp.loop.Loop`."""
        given = {"save_every": save_every, "keep_last": keep_last, "log_every": log_every}
        self._options: dict[str, Any] = {
            "directory": directory, "snapshot_every": snapshot_every, **given
        }  # fmt: skip
        self._fits: dict[Any, _Fit] = {}
        self._fit: _Fit | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and not trainer.fast_dev_run:
            if trainer not in self._fits:
                self._fits[trainer] = _Fit(trainer)
            self._fits[trainer].begin(self._options)
            self._fit = self._fits[trainer]  # only now: on_exception needs its loop

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        if self._fit:
            self._fit.loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._fit and self._fit.is_training:
            self._fit.loop.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit and self._fit.is_training:
            self._fit.validated()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit:
            self._fit.loop.finish()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if self._fit:
            self._fit.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._fit and isinstance(exception, Exception):
            self._fit.loop.abandon()


class _Fit:
    """Fits of a trainer: hooks on its loops, and the files of a checkpoint."""

    loop: Driven

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.loss = trainer, None
        self._fit_loop, self._connector = trainer.fit_loop, trainer._checkpoint_connector
        self._epoch_loop = self._fit_loop.epoch_loop
        self._results = trainer._logger_connector
        self._check()
        signals = trainer._signal_connector
        signals.register_signal_handlers = lambda: None  # Lightning's exchange messages
        _wrap(self._fit_loop, "_load_combined_loader_states", after=self._hold)
        _wrap(self._fit_loop, "on_advance_start", before=self._start, after=self._started)
        _wrap(self._fit_loop, "on_advance_end", after=lambda *_: self.loop.epoch_done())
        _wrap(self._epoch_loop, "on_run_start", after=self._go_on)
        _wrap(self._epoch_loop, "on_advance_end", lambda *_: self.loop.batch_done(), self._trained)
        self._reset = self._epoch_loop.reset
        self._epoch_loop.reset = self._begin_epoch

    def _check(self) -> None:
        package = type(self._fit_loop).__module__.partition(".")[0]
        trainer, fit_loop = self.trainer, self._fit_loop
        val_loop = self._epoch_loop.val_loop
        for owner, names in (
            (trainer, "_signal_connector _logger_connector"),
            (trainer._signal_connector, "register_signal_handlers"),
            (self._connector, "resume_start dump_checkpoint _loaded_checkpoint"),
            (self._results, "_first_loop_iter _callback_metrics"),
            (fit_loop, "_load_combined_loader_states on_advance_start _combined_loader"),
            (fit_loop, "_data_fetcher _last_train_dl_reload_epoch"),
            (self._epoch_loop, "_restarting _batches_that_stepped reset"),
            (val_loop, "_last_val_dl_reload_epoch _seen_batches_per_dataloader"),
        ):
            require(owner, *names.split(), package=package)
        tuners = [type(each).__name__ for each in trainer.callbacks]
        if found := next((name for name in _TUNERS if name in tuners), ""):
            raise TrainingError(
                f"{found} trains within fit(), which cannot be resumed. Use Lightning's Tuner "
                "before resume(trainer), or remove it. [CD0822]"
            )
        if sum(isinstance(each, Resume) for each in trainer.callbacks) > 1:
            raise TrainingError(
                "resume(trainer) was called twice, or the trainer has the callback too. Omit one. "
                "[CD0822]"
            )

    # -- fit ---------------------------------------------------------------------------------

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begin a fit, before Lightning restores a checkpoint; collective."""
        self.loop = begin_fit(self._write, **options)
        self._is_first = True
        source = self.loop.fits.resumed
        self._inside = bool(source) and self.loop.resumes_inside
        self._kept: dict[str, Any] = {}
        self._sanity_steps = self.trainer.num_sanity_val_steps
        if source:
            self.trainer.num_sanity_val_steps = 0
            path = source / f"rank-{self.loop.rank}.pt"
            if path.exists() and not self.loop.has_other_ranks:
                self._kept = torch.load(path, map_location="cpu", weights_only=False)
            original = self._connector.resume_start
            takes = inspect.signature(original).parameters
            known = {"weights_only": False} if "weights_only" in takes else {}

            def resume_start(*_: Any, **__: Any) -> None:
                del self._connector.resume_start
                original(source / _FILE, **known)
                more = self._connector._loaded_checkpoint[_KEY]
                self.trainer.should_stop, self._kept["reload"] = more

            self._connector.resume_start = resume_start

    @property
    def is_training(self) -> bool:
        """True if a fit is in progress, and not a sanity check."""
        return self.trainer.state.fn == "fit" and not self.trainer.sanity_checking

    def _module(self, name: str) -> Any:
        """Return a module of the trainer's package."""
        package = type(self._fit_loop).__module__.partition(".loops")[0]
        return importlib.import_module(f"{package}.{name}")

    @property
    def _loader(self) -> Any:
        """Loader of the training, or Lightning's CombinedLoader of several."""
        combined = self._fit_loop._combined_loader
        return combined if len(combined.flattened) > 1 else combined.flattened[0]

    def _hold(self) -> None:
        """Delay the iteration of new loaders until the epoch begins."""
        loader = self._loader
        replay.read_by(loader, lambda: iter(()))
        if loader is self._fit_loop._combined_loader:
            modes = self._module("utilities.combined_loader")._SUPPORTED_MODES
            loader._iterator = modes[loader._mode]["iterator"](loader.flattened, loader.limits)

    def _start(self) -> None:
        """Begin to train."""
        if not self._is_first:
            return
        trainer, fit_loop = self.trainer, self._fit_loop
        trainer.num_sanity_val_steps = self._sanity_steps
        if "reload" in self._kept:
            train, val = self._kept["reload"]
            fit_loop._last_train_dl_reload_epoch = train
            self._epoch_loop.val_loop._last_val_dl_reload_epoch = val
        steps = trainer.estimated_stepping_batches
        stepped = self._epoch_loop._batches_that_stepped
        total = None if steps in (-1, float("inf")) else self.loop.steps + steps - stepped
        self.loop.begin(trainer.model, total)
        if self._inside:
            _load_on_entry(self._epoch_loop._results, self._kept.get("results", {}))

    def _started(self) -> None:
        """Set what is set at an epoch's start: newer releases do not in a resumed epoch."""
        if not self._is_first or not self._inside:
            return
        if hasattr(self._fit_loop, "restarted_mid_epoch"):
            for each in self.trainer.callbacks:
                if type(each).__name__ == "GradientAccumulationScheduler":
                    each.on_train_epoch_start(self.trainer)
            call = self._module("trainer.call")
            call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")

    def end(self) -> None:
        """End a fit, also one that had nothing left to train."""
        if self._is_first:
            self.loop.finish()
        self.trainer.num_sanity_val_steps = self._sanity_steps

    # -- epoch -------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        """Replace the epoch loop's `reset`: begin, or continue, an epoch."""
        loop = self._epoch_loop
        if self._is_first and not self._inside:
            loop.restarting = False
        stepped = loop._batches_that_stepped
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            self._reset()
        loop._batches_that_stepped = stepped
        if self._is_first and self._inside and self.loop.has_other_ranks:
            self._recount()
        self.loop.read(self._loader)
        if self._is_first:
            iter(self._fit_loop._data_fetcher)
            loop._restarting = True  # Lightning iterates again otherwise

    def _recount(self) -> None:
        """Count the epoch's trained batches at this number of ranks, in whole accumulations."""
        done = self.loop.done_of(self._loader)
        done -= done % self.trainer.accumulate_grad_batches
        self.loop.skip(done, self._loader)
        current = self._epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = current.completed = done

    def _go_on(self, *_: Any) -> None:
        """Train on as if the epoch had not been interrupted."""
        if not self._is_first:
            return
        self._is_first, self._step = False, self._epoch_loop.global_step
        self._epoch_loop.restarting = self._fit_loop._restarting = False
        self._restore_metrics()

    def _trained(self, *_: Any) -> None:
        """Count a step after its validation and schedulers."""
        step = self._epoch_loop.global_step
        if step != self._step:  # several with manual optimization
            self._step = step
            self.loop.step_done(is_last=self._epoch_loop.done, **dict(self._metrics()))

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        if _is_number(self.loss):
            yield "loss", self.loss
        if self.trainer.optimizers:
            yield "lr", self.trainer.optimizers[0].param_groups[0]["lr"]

    def validated(self) -> None:
        """Log the metrics of a validation."""
        known = self._results.metrics["callback"]
        found = {_plain(name): each for name, each in known.items() if _is_number(each)}
        if found:
            self.loop.test(**found)

    # -- files -------------------------------------------------------------------------------

    def _write(self, directory: Path) -> None:
        """Write Lightning's checkpoint and this rank's metrics."""
        trainer, strategy = self.trainer, self.trainer.strategy
        content = self._connector.dump_checkpoint(weights_only=False)
        train, val = self._fit_loop, self._epoch_loop.val_loop
        reload = train._last_train_dl_reload_epoch, val._last_val_dl_reload_epoch
        content[_KEY] = trainer.should_stop, reload
        plugin = strategy.checkpoint_io
        if hasattr(plugin, "_executor"):  # AsyncCheckpointIO gives no sign when it is done
            strategy.checkpoint_io = plugin.checkpoint_io
        try:
            strategy.save_checkpoint(content, directory / _FILE)
        finally:
            strategy.checkpoint_io = plugin
        torch.save(self._metric_states(), directory / f"rank-{self.loop.rank}.pt")

    def _metric_states(self) -> dict[str, Any]:
        logs, val_loop = self._results, self._epoch_loop.val_loop
        return {
            "shown": [logs._callback_metrics, logs._logged_metrics, logs._progress_bar_metrics],
            "results": {name: _state_of(each) for name, each in self._epoch_loop._results.items()},
            "modules": {name: _state_of(each) for name, each in self._modules()},
            "seen": dict(val_loop._seen_batches_per_dataloader),
        }

    def _modules(self) -> Iterator[tuple[str, Any]]:
        """Yield the model's torchmetrics."""
        kind = sys.modules["torchmetrics"].Metric
        for name, each in self.trainer.lightning_module.named_modules():
            if isinstance(each, kind):
                yield name, each

    def _restore_metrics(self) -> None:
        if "shown" not in self._kept:
            return
        logs, shown = self._results, self._kept["shown"]
        logs._callback_metrics, logs._logged_metrics, logs._progress_bar_metrics = shown
        self._epoch_loop.val_loop._seen_batches_per_dataloader.update(self._kept["seen"])
        for name, each in self._modules():
            _load(each, self._kept["modules"].get(name))
        if self._inside:
            logs._first_loop_iter = True  # the next batch is not the epoch's first


def _wrap(
    owner: Any,
    name: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> None:
    """Call functions before and after a method of an object."""
    original = getattr(owner, name)

    def wrapped(*given: Any) -> Any:
        before(*given)
        result = original(*given)
        after(*given)
        return result

    setattr(owner, name, wrapped)


def _state_of(metric: Any) -> dict[str, Any]:
    """Return the state of a torchmetrics.Metric; another metric in it is not part of it."""
    return {name: getattr(metric, name) for name in [*metric._defaults, "_update_count"]}


def _load(metric: Any, state: Mapping[str, Any] | None) -> None:
    if state and not metric._computed:
        for name, value in state.items():
            setattr(metric, name, value)
        metric.to(metric.device)


def _load_on_entry(results: Any, states: dict[str, Any]) -> None:
    """Restore a result of Lightning's `log` when it is entered for the first time."""

    def enter(self: Any, name: str, metric: Any) -> None:
        dict.__setitem__(self, name, metric)
        _load(metric, states.pop(name, None))

    kind = type(results)
    results.__class__ = type(kind.__name__, (kind,), {"__setitem__": enter})


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _plain(name: str) -> str:
    """Return the name of a validation metric in reports."""
    plain = name.removeprefix("val_").removeprefix("val/")
    return "accuracy" if plain == "acc" else plain
