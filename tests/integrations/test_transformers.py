"""transformers' Trainer with `resume`: stopped anywhere, it ends as one that was not."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from clusterddp.distributed import agreement  # noqa: E402
from clusterddp.distributed.agreement import Poll  # noqa: E402
from clusterddp.errors import EXIT_STOPPED, TrainingError  # noqa: E402
from clusterddp.integrations import driven  # noqa: E402
from clusterddp.integrations.transformers import resume  # noqa: E402
from clusterddp.training import stop  # noqa: E402
from tests.training.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

SAMPLES = 22
"""Of batches of two: eleven batches, which neither 2 nor 3 divides."""


class Model(nn.Module):
    """A regression with dropout; counts its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layers(x)
        return {"loss": (out - labels).square().mean(), "out": out}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mask values by chance, from all three generators."""
    x = torch.stack([each["x"] for each in samples])
    x = x * (torch.rand_like(x) > 0.2) + random.random() / 10 + float(np.random.rand()) / 10
    return {"x": x, "labels": torch.stack([each["labels"] for each in samples])}


def data() -> list[dict[str, Tensor]]:
    rows = torch.rand(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
    return [{"x": row[:4], "labels": row[4:]} for row in rows]


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same samples, one after the other."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data())


class Stop(TrainerCallback):  # type: ignore[misc]
    """Asks for a stop at a step; notes what happened."""

    def __init__(self, at: int) -> None:
        self.at, self.events = at, list[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"step {state.global_step}")
        if state.global_step == self.at:
            stop.requested.note("stop")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.events.append(f"evaluated {metrics['eval_loss']}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"saved {state.global_step}")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(f"epoch {state.epoch}")


class ShortEpoch(TrainerCallback):  # type: ignore[misc]
    """Ends the first epoch at its fifth step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 5


class Broken(TrainerCallback):  # type: ignore[misc]
    """Fails within the training, after its start."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise ValueError("broken")


@pytest.fixture(autouse=True)
def alone(asked_at_each_step: None) -> Iterator[None]:
    """A request is seen at its step; no loop is left."""
    yield
    leave()


def leave() -> None:
    """End the process's loop, as the end of the process does."""
    for loop in driven._loops.values():
        loop.close()
    driven._loops.clear()
    stop.requested.forget()


class Run:
    """A training in one directory, and what its attempts did."""

    def __init__(self, path: Path, **arguments: Any) -> None:
        self.path = path
        self.callbacks: list[Any] = arguments.pop("callbacks", [])
        self.more = {name: arguments.pop(name) for name in ("train_dataset",) if name in arguments}
        self.arguments = {
            "num_train_epochs": 3, "per_device_train_batch_size": 2, "logging_steps": 3,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
            "learning_rate": 0.01, **arguments,
        }  # fmt: skip
        self.events: list[str] = []

    def trainer(self, at: int = 0) -> Any:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        args = TrainingArguments(output_dir=str(self.path / "out"), **self.arguments)
        trainer = Trainer(
            Model(), args, data_collator=collate,
            **{"train_dataset": data(), "eval_dataset": data()[:4], **self.more},
        )  # fmt: skip
        self.stop = Stop(at)
        for each in [self.stop, *(make() for make in self.callbacks)]:
            trainer.add_callback(each)
        return trainer

    def attempt(self, at: int = 0, train: Callable[[Any], Any] = lambda t: t.train()) -> Any:
        """Train until a step, or the end if it is 0; returns the trainer."""
        trainer = resume(self.trainer(at), directory=self.path / "run")
        try:
            train(trainer)
            code = 0
        except SystemExit as left:  # not kept: its frames would keep the loader's workers
            code = int(left.code or 0)
        assert code == (EXIT_STOPPED if at else 0)
        self.events += self.stop.events
        leave()
        return trainer


def logs(trainer: Any) -> list[dict[str, Any]]:
    """Return what the trainer logged, without the times."""
    return [
        {name: value for name, value in line.items() if not name.endswith(("runtime", "second"))}
        for line in trainer.state.log_history
    ]


def assert_equal(interrupted: Any, whole: Any) -> None:
    for name, value in whole.model.state_dict().items():
        assert torch.equal(interrupted.model.state_dict()[name], value), name
    assert logs(interrupted) == logs(whole)
    assert interrupted.state.best_metric == whole.state.best_metric


@pytest.mark.parametrize(
    ("stops", "arguments"),
    [
        pytest.param([1], {}, id="first step", marks=pytest.mark.release),
        pytest.param([4], {"dataloader_num_workers": 2}, id="workers", marks=pytest.mark.release),
        pytest.param([14, 15], {}, id="twice in a row"),
        pytest.param([11], {}, id="last batch"),
        pytest.param([33], {}, id="last step", marks=pytest.mark.release),
        pytest.param([2, 8], {"gradient_accumulation_steps": 2}, id="accumulation of 2",
                     marks=pytest.mark.release),
        pytest.param([6], {"gradient_accumulation_steps": 2}, id="last, of one batch"),
        pytest.param([3, 5, 7], {"gradient_accumulation_steps": 3}, id="accumulation of 3",
                     marks=pytest.mark.release),
        pytest.param(
            [7],
            {"gradient_accumulation_steps": 3, "dataloader_num_workers": 2},
            id="accumulation, workers",
        ),
        pytest.param([5, 8], {"callbacks": [ShortEpoch]}, id="short epoch"),
        pytest.param([15], {"max_steps": 27}, id="steps"),
        pytest.param([27], {"max_steps": 27}, id="its last step, within an epoch"),
        pytest.param([8], {"eval_strategy": "steps", "eval_steps": 4}, id="at an evaluation"),
        pytest.param([11, 14], {"eval_strategy": "epoch", "save_strategy": "epoch"},
                     id="epochs evaluated"),
        pytest.param(
            [10, 20],
            {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 2},
            id="its own checkpoints",
        ),
        pytest.param(
            [9],
            {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
             "load_best_model_at_end": True, "eval_on_start": True},
            id="best model",
        ),
        pytest.param(
            [4, 11],
            {"train_dataset": Stream(), "max_steps": 27,
             "accelerator_config": {"dispatch_batches": False}},
            id="stream",
        ),
    ],
)  # fmt: skip
def test_a_stopped_training_ends_as_one_that_was_not(
    tmp_path: Path, stops: list[int], arguments: dict[str, Any]
) -> None:
    whole = Run(tmp_path / "whole", **arguments)
    expected = whole.attempt()
    run = Run(tmp_path / "stopped", **arguments)
    for at in stops:
        run.attempt(at)
    assert_equal(run.attempt(), expected)
    assert run.events == whole.events


@pytest.mark.parametrize("name", ["enable_jit_checkpoint", "auto_find_batch_size"])
def test_an_option_that_contradicts_it_is_refused(tmp_path: Path, name: str) -> None:
    trainer = Run(tmp_path).trainer()
    setattr(trainer.args, name, True)
    with pytest.raises(TrainingError, match=rf"(?s)omit {name}.*CD0822"):
        resume(trainer)


def test_only_a_trainer_is_made_resumable() -> None:
    with pytest.raises(TypeError, match="takes a Trainer of transformers, not a str"):
        resume("trainer")


def test_ranks_that_train_by_themselves_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "rank_and_world_size", lambda: (0, 2))
    with pytest.raises(TrainingError, match=r"(?s)each of 2 ranks.*use_cpu=True.*CD0816"):
        resume(Run(tmp_path).trainer()).train()


def test_the_line_twice_is_refused(tmp_path: Path) -> None:
    trainer = resume(Run(tmp_path).trainer())
    with pytest.raises(TrainingError, match=r"(?s)was called twice.*CD0822"):
        resume(trainer)


def test_a_training_that_failed_leaves_the_signals_to_the_script(tmp_path: Path) -> None:
    trainer = resume(Run(tmp_path, callbacks=[Broken]).trainer(), directory=tmp_path / "run")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="broken"):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_release_that_resumes_accumulations_wrongly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Run(tmp_path).trainer()
    for name in ("_run_epoch", "_get_num_items_in_batch"):
        monkeypatch.delattr(Trainer, name, raising=False)
    with pytest.raises(TrainingError, match=r"(?s)transformers 4\.57 or later.*CD0821"):
        resume(trainer)


def test_a_stream_that_one_rank_reads_for_all_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, train_dataset=Stream(), max_steps=4)
    with pytest.raises(TrainingError, match=r'(?s)accelerator_config=\{"dispatch_batches".*CD0819'):
        run.attempt()


@pytest.mark.parametrize("at", [8, 11])
def test_the_first_attempt_begins_with_the_checkpoint_that_the_script_names(
    tmp_path: Path, at: int
) -> None:
    Run(tmp_path / "named", save_strategy="steps", save_steps=5, max_steps=5).attempt()

    def train(trainer: Any) -> None:
        trainer.train(resume_from_checkpoint=str(tmp_path / "named/out/checkpoint-5"))

    whole = Run(tmp_path / "whole")
    expected = whole.attempt(train=train)
    run = Run(tmp_path / "stopped")
    run.attempt(at, train)
    assert_equal(run.attempt(train=train), expected)
    assert run.events == whole.events
    assert run.events[0] == "step 6"


class Reader(Trainer):  # type: ignore[misc]
    """Notes the samples that it trains on."""

    def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        self.read = [*getattr(self, "read", []), *inputs.pop("number").tolist()]
        return super().training_step(model, inputs, *given, **named)


def numbered(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {**collate(samples), "number": torch.tensor([each["number"] for each in samples])}


def read_by_ranks(rank: int, world_size: int, path: str, at: int) -> tuple[list[int], int, int]:
    """Train two epochs as one of several ranks; return the samples, the last step and the plan."""
    Poll.due = lambda *_: True  # type: ignore[method-assign, assignment]
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    args = TrainingArguments(
        output_dir=f"{path}/out", num_train_epochs=2, per_device_train_batch_size=2,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, ddp_backend="gloo",
        remove_unused_columns=False,
    )  # fmt: skip
    rows = [{**row, "number": number} for number, row in enumerate(data())]
    trainer = Reader(
        Model(), args, train_dataset=rows, data_collator=numbered, callbacks=[Stop(at)]
    )
    resume(trainer, directory=f"{path}/run")
    with suppress(SystemExit):
        trainer.train()
    leave()
    return trainer.read, trainer.state.global_step, trainer.state.max_steps


def test_another_number_of_ranks_trains_the_rest_of_all_epochs(tmp_path: Path) -> None:
    [(before, _, _)] = run_ranks(1, read_by_ranks, str(tmp_path), 6)
    ranks = run_ranks(2, read_by_ranks, str(tmp_path), 0)
    assert [each[1:] for each in ranks] == [(6 + 3 + 6, 6 + 3 + 6)] * 2
    rest = [number for read, _, _ in ranks for number in read[:6]]
    # Eleven batches are six of two ranks: the last ones begin again at the epoch's start.
    assert sorted({*before, *rest}) == [*range(SAMPLES)]
    assert len(before) + len(rest) == SAMPLES + 2
    assert sorted({number for read, _, _ in ranks for number in read[6:]}) == [*range(SAMPLES)]


def test_early_stopping_counts_over_attempts_and_a_finished_training_trains_nothing(
    tmp_path: Path,
) -> None:
    arguments = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "metric_for_best_model": "loss", "load_best_model_at_end": True, "learning_rate": 0.5,
        "callbacks": [lambda: transformers.EarlyStoppingCallback(early_stopping_patience=3)],
    }  # fmt: skip
    whole = Run(tmp_path / "whole", **arguments)
    expected = whole.attempt()
    last = expected.state.global_step
    assert last < 33, "it stops early"
    run = Run(tmp_path / "stopped", **arguments)
    run.attempt(last - 1)
    assert_equal(run.attempt(), expected)
    assert run.events == whole.events
    again = run.attempt()
    assert run.events == whole.events
    for name, value in expected.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_two_trainings_in_one_script_each_resume_in_their_own(tmp_path: Path) -> None:
    def both(trainer: Any) -> None:
        trainer.train()
        trainer.train()

    expected = Run(tmp_path / "whole", num_train_epochs=1).attempt(train=both)
    run = Run(tmp_path / "stopped", num_train_epochs=1)
    first = resume(run.trainer(), directory=run.path / "run")
    first.train()
    first.add_callback(Stop(6))  # in the second
    with suppress(SystemExit):
        first.train()
    leave()
    ended = run.attempt(train=both)
    assert run.events[0] == "step 7"
    assert_equal(ended, expected)
