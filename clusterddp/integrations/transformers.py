"""Makes the Trainer of Hugging Face's transformers resumable, with one line.

    from clusterddp.integrations.transformers import resume

    trainer = resume(Trainer(model, args, train_dataset=data))
    trainer.train()

The only place that knows private names of transformers. Sources: `Trainer._inner_training_loop` of
transformers 4.57, 5.0 and 5.24, `Trainer._init_training_state` and `_run_epoch` of 5.24.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers.trainer
from transformers import TrainerCallback

from clusterddp.distributed import agreement
from clusterddp.errors import TrainingError
from clusterddp.integrations.driven import Driven, begin_fit, require
from clusterddp.training.sources import length_of

T = TypeVar("T")

_WRAPPED = (
    *("train", "training_step", "set_initial_training_values"),
    *("_maybe_log_save_evaluate", "_load_callback_state", "_load_rng_state"),
)
_ONLY_OURS = {
    "push_to_hub": False,
    "save_strategy": "no",
    "save_total_limit": None,
    "save_only_model": False,
    "save_on_each_node": False,
}
"""Arguments of the trainer while it writes a checkpoint of ours."""
_ONCE_TRAINED = {
    "ignore_data_skip": False,
    "eval_on_start": False,
    "restore_callback_states_from_checkpoint": True,
}
"""Arguments of the trainer in a resumed `train()`."""
torch.serialization.register_package(  # 4.57 and 5.0 load an optimizer so on several CPU ranks
    1001, lambda _: None, lambda storage, location: storage if location == "cpu:0" else None
)


def resume(trainer: T, **options: Any) -> T:
    """Have `trainer.train()` save, leave with exit code 75 when asked to, and resume; return it.

    Call it on every rank, before `train()`.

    options of `clusterddp.loop.Loop`: `save_every`, `keep_last`, `snapshot_every`,
    `directory`, `log_every`.

    Raises TrainingError for an option of the trainer that contradicts this, and for a version of
    transformers that it does not know.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise TypeError(f"resume() takes a Trainer of transformers, not a {type(trainer).__name__}")
    _Resumable(trainer, options)
    return trainer


class _Resumable(TrainerCallback):
    """Wraps the methods of one trainer, and counts its batches.

    Each method with the parameter `original` takes the place of the trainer's one of that name.
    """

    _loop: Driven
    _source: Path | None = None
    """Trainer's checkpoint from which this `train()` resumes, if it does."""
    _position: dict[str, Any]
    """What the trainer keeps in local variables; see `_write`."""
    _loss: Any = 0.0
    """Sum of the losses since the last optimizer step."""
    _loss_sum: Any = 0.0
    """The trainer's sum since its last log."""
    _has_stepped = False

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        _refuse(trainer.args)
        require(trainer, "_save_checkpoint", *_WRAPPED, package="transformers")
        if any(isinstance(each, _Resumable) for each in trainer.callback_handler.callbacks):
            raise TrainingError("resume(trainer) was called twice. Call it once. [CD0822]")
        if not (hasattr(trainer, "_get_num_items_in_batch") or hasattr(trainer, "_run_epoch")):
            raise TrainingError(
                "resume(trainer) needs transformers 4.57 or later: earlier releases do not end the "
                "last accumulation of a resumed epoch if it is shorter. Update transformers. "
                "[CD0821]"
            )
        for name in (*_WRAPPED, "_finalize_training"):
            if hasattr(trainer, name):  # the last one since 5.3
                setattr(trainer, name, partial(getattr(self, name), getattr(trainer, name)))
        trainer.add_callback(self)

    # -- one train() ---------------------------------------------------------------------------

    def train(
        self,
        original: Callable[..., T],
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        **given: Any,
    ) -> T:
        if trial is not None:
            raise TrainingError(
                "resume(trainer): hyperparameter_search() trains many times in an order that "
                "no attempt can repeat. Call it on a trainer without resume(), or use "
                "`clusterddp sweep`. [CD0822]"
            )
        args = self._trainer.args
        _, ranks = agreement.rank_and_world_size()
        if args.world_size < ranks:
            raise TrainingError(
                f"each of {ranks} ranks would train on its own: the Trainer sees no GPU. Request "
                "GPUs, or set TrainingArguments(use_cpu=True). [CD0816]"
            )
        loop = self._loop = begin_fit(self._write, **self._options)
        self._position = {"epoch": 0, "seconds": 0.0}
        self._began, self._is_over, self._source = time.time(), False, None
        if loop.fits.resumed:
            [self._source] = loop.fits.resumed.glob("checkpoint-*")
            self._position = self._read_position(loop.fits.resumed)
            resume_from_checkpoint = str(self._source)
        resumed = _set(args, **_ONCE_TRAINED) if self._source else nullcontext()
        with resumed, _set(transformers.trainer, skip_first_batches=self._skip):
            try:
                result = original(resume_from_checkpoint, trial, **given)
            except Exception:
                loop.abandon()
                raise
        self._is_over = True
        loop.finish()
        return result

    def set_initial_training_values(
        self, original: Callable[..., Any], args: Any, dataloader: Any, *more: Any
    ) -> Any:
        self._loader = dataloader
        epochs, self._steps_of_epoch, *others, max_steps = original(args, dataloader, *more)
        if self._source and args.max_steps <= 0 and not self._loop.fits.is_finished:
            max_steps += self._shift_of(max_steps)
        if self._source and (
            self._loop.fits.is_finished
            or self._position["is_stopped"]
            or self._position["step"] >= max_steps
        ):
            epochs = 0
        return (epochs, self._steps_of_epoch, *others, max_steps)

    def _shift_of(self, max_steps: int) -> int:
        """Return how many more steps than `max_steps` this training has, by other numbers of ranks.

        The trainer counts the steps of all epochs at this number of ranks.
        """
        kept = self._position
        if self._loop.has_other_ranks:
            done = (
                self._loop.done_of(self._loader) // self._trainer.args.gradient_accumulation_steps
            )
            left = max_steps - kept["epoch"] * self._steps_of_epoch - done
            kept["shift"] = kept["step"] + max(left, 0) - max_steps
        return int(kept.get("shift", 0))

    def _load_callback_state(self, original: Callable[..., None]) -> None:
        """Have the trainer, which divides the step next, find our epoch and batch.

        It would not after an epoch that ended early, and at another number of ranks.
        """
        original()
        if self._source and not self._loop.fits.is_finished:
            size = self._trainer.args.gradient_accumulation_steps
            steps = self._loop.done_of(self._loader) // size
            self._loop.skip(steps * size, self._loader)
            self._trainer.state.global_step = self._position["epoch"] * self._steps_of_epoch + steps

    def _skip(self, loader: T, batches: int = 0) -> T:
        """Leave skipping to the loop, which reads the loader."""
        if not self._source:  # the checkpoint that train() was given
            self._loop.skip(batches, loader)
        return loader

    def _load_rng_state(self, original: Callable[..., None], checkpoint: Any) -> None:
        if not self._source:
            original(checkpoint)

    def _finalize_training(
        self, original: Callable[..., T], trial: Any, samples: Any, start_time: float
    ) -> T:
        return original(trial, samples, start_time - self._position["seconds"])

    # -- its steps -----------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, kept = self._trainer, self._position
        state.global_step = kept.get("step", state.global_step)
        total = self._loop.steps + state.max_steps - state.global_step
        self._loop.begin(trainer.model_wrapped, total)
        if self._source:
            for name in ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"):
                if hasattr(trainer, name):
                    setattr(trainer, name, kept[name])
            if hasattr(trainer, "_tr_loss"):
                trainer._tr_loss.fill_(kept.pop("loss"))
        else:
            kept["epoch"] = int(state.epoch or 0)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.read(self._loader)

    def training_step(self, original: Callable[..., Any], *given: Any, **named: Any) -> Any:
        loss = original(*given, **named)
        self._loss = self._loss + loss
        return loss + self._position.pop("loss", 0.0)  # before 5.3 the sum is a local variable

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.batch_done()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._loop.batch_done()
        self._has_stepped = True

    def _maybe_log_save_evaluate(
        self, original: Callable[..., None], loss_sum: Any, *given: Any, **named: Any
    ) -> None:
        self._loss_sum = loss_sum
        self._loop.pause()
        original(loss_sum, *given, **named)
        if self._has_stepped:
            control, loss = self._trainer.control, self._loss
            self._has_stepped, self._loss = False, 0.0
            is_last = self._loop.batches_done == length_of(self._loader)
            is_last = is_last or control.should_epoch_stop or control.should_training_stop
            rate = self._trainer.optimizer.param_groups[0]["lr"]
            self._loop.step_done(is_last=is_last, loss=loss, lr=rate)
        else:
            self._position["epoch"] += 1
            self._loop.epoch_done()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if hasattr(self, "_loop"):
            metrics = kwargs["metrics"]
            numbers = {name: each for name, each in metrics.items() if isinstance(each, float)}
            self._loop.test(**{name.removeprefix("eval_"): each for name, each in numbers.items()})

    # -- its checkpoints -----------------------------------------------------------------------

    def _write(self, directory: Path) -> None:
        """Write the trainer's checkpoint, and what it keeps in local variables."""
        trainer = self._trainer
        with _set(trainer.args, output_dir=str(directory), **_ONLY_OURS):
            trainer._save_checkpoint(trainer.model_wrapped, trial=None)
        step, loss = trainer.state.global_step, 0.0 if self._is_over else float(self._loss_sum)
        known = {
            "epoch": self._position["epoch"],
            "step": step,
            "is_stopped": trainer.control.should_training_stop and step < trainer.state.max_steps,
            "loss": loss,
            "shift": self._position.get("shift", 0),
            "seconds": self._position["seconds"] + time.time() - self._began,
            "_total_loss_scalar": trainer._total_loss_scalar,
            "_globalstep_last_logged": trainer._globalstep_last_logged,
            "_initial_global_step": getattr(trainer, "_initial_global_step", 0),
        }
        self._position_file(directory).write_text(json.dumps(known))

    def _read_position(self, directory: Path) -> dict[str, Any]:
        own = self._position_file(directory)
        if own.exists():
            return dict(json.loads(own.read_text()))
        return {**json.loads((directory / "trainer-0.json").read_text()), "loss": 0.0}

    def _position_file(self, directory: Path) -> Path:
        return directory / f"trainer-{self._loop.rank}.json"


def _refuse(args: Any) -> None:
    remedies = {
        "enable_jit_checkpoint": "resume() saves at a signal, on all ranks at the same step",
        "auto_find_batch_size": "each attempt has to train with the same batches. Set "
        "per_device_train_batch_size",
    }
    for name, why in remedies.items():
        if getattr(args, name, False):
            raise TrainingError(f"resume(trainer): omit {name}: {why}. [CD0822]")


@contextmanager
def _set(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes for the time of the context."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
