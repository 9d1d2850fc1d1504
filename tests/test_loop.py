"""A loop of one's own: stopped anywhere it ends in the weights of one that was not."""

import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from clusterddp import checkpoints
from clusterddp import loop as loop_module
from clusterddp.checkpoints import catalog, state
from clusterddp.distributed.heartbeat import Phase
from clusterddp.errors import CheckpointError, RequestError, TrainingError
from clusterddp.files import read, read_json_lines
from clusterddp.loop import Loop
from clusterddp.reporting.gather import gather
from clusterddp.request.resources import Resources
from clusterddp.request.spec import DEFAULT_TEMPLATE, JobSpec
from clusterddp.run import attempt as attempts_of_runs
from clusterddp.run import node_memory
from clusterddp.run.attempt import Attempt, attempts, begin, expose_loop
from clusterddp.run.node_memory import Address
from clusterddp.run.outcome import HUNG
from clusterddp.run.records import HungRanks, Liveness
from clusterddp.run.run_dir import RunDir, newest_checkpoint
from clusterddp.slurm.forms import KILL_WAIT_VARIABLE, LOOP_VARIABLE
from clusterddp.status import stacks
from clusterddp.status.status import run_status
from clusterddp.training import replay, stop
from tests import forked
from tests.checkpoints.made_checkpoints import DAMAGE
from tests.training.ranks import run_ranks
from tests.waiting import wait_for

try:
    from torch.distributed.fsdp import fully_shard

    on_cpus = True
except ImportError:  # torch before 2.6, which trains with it on GPUs alone
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[no-redef]

    on_cpus = False
trains_sharded = pytest.mark.skipif(not on_cpus, reason="needs FSDP2 on CPUs: torch 2.6")

EPOCHS, BATCHES = 2, 3
TASK = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw from all three generators each time they are read."""

    def __init__(self, count: int = 12) -> None:
        self.samples = torch.arange(count * 4.0).reshape(count, 4) / 40
        self.read = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += 1
        noise = torch.rand(4) + random.random() + np.random.rand()
        return self.samples[index] + noise, self.samples[index, :1]


class Training:
    """A small training with everything that draws, and what happens in it."""

    def __init__(self, folder: Path, *, workers: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.data = Noisy()
        self.loader = DataLoader(self.data, batch_size=4, shuffle=True, num_workers=workers)
        self.events: list[str] = []
        self.loop = Loop(
            directory=folder, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            **options,
        )  # fmt: skip

    def run(self, before_step: Callable[[int], object] = lambda _: None) -> list[Tensor]:
        for epoch in self.loop.epochs(EPOCHS):
            for samples, targets in self.loop.batches(self.loader):
                loss = (self.model(samples) - targets).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.events.append(f"step {self.loop.steps + 1}")
                before_step(self.loop.steps + 1)
                self.loop.step(loss=loss, lr=self.scheduler.get_last_lr()[0])
            self.scheduler.step()
            self.events.append(f"end of epoch {epoch}, loss {loss.item() > 0}")
        self.loop.close()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.fixture(autouse=True)
def alone(asked_at_each_step: None) -> Iterator[None]:
    """A request is seen at its step; no handler is left."""
    before = {number: signal.getsignal(number) for number in stop._REASON_BY_SIGNAL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stops_at(step: int, number: int = signal.SIGUSR1) -> Callable[[int], None]:
    return lambda now: signal.raise_signal(number) if now == step else None


def left(training: Training, before_step: Callable[[int], object]) -> Any:
    """The exit code of a training that leaves."""
    with pytest.raises(SystemExit) as leaving:
        training.run(before_step)
    training.loop.close()
    stop.requested.forget()
    return leaving.value.code


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# -- alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_stopped_at_any_step_it_ends_in_the_weights_of_one_that_was_not(
    tmp_path: Path, workers: int
) -> None:
    """With dropout, a shuffle and noise of three generators in between."""
    expected = Training(tmp_path / "undisturbed", workers=workers).run()
    for step in range(1, EPOCHS * BATCHES):
        folder = tmp_path / str(step)
        assert left(Training(folder, workers=workers), stops_at(step)) == 75
        again = Training(folder, workers=workers)
        assert again.loop.is_resumed and again.loop.steps == step
        assert same(again.run(), expected), f"stopped at step {step}"


def test_each_step_and_each_epochs_own_code_is_run_once(tmp_path: Path) -> None:
    """A stop at the last batch waits for the code that follows, which needs that batch's loss."""
    undisturbed = Training(tmp_path / "undisturbed")
    undisturbed.run()
    for step in (2, BATCHES):
        first = Training(tmp_path / str(step))
        left(first, stops_at(step))
        second = Training(tmp_path / str(step))
        second.run()
        assert first.events + second.events == undisturbed.events


def test_what_is_trained_already_is_not_read_again(tmp_path: Path) -> None:
    left(Training(tmp_path), stops_at(2))
    again = Training(tmp_path)
    again.run()
    assert again.data.read == (EPOCHS * BATCHES - 2) * 4


def test_any_iterable_is_gone_through_to_where_it_was(tmp_path: Path) -> None:
    def seen(stop_at: int) -> list[int]:
        loop = Loop(directory=tmp_path / "iterable", model=nn.Linear(1, 1))
        batches = []
        try:
            for _ in loop.epochs(1):
                for batch in loop.batches(iter(range(5))):
                    batches.append(batch)
                    stops_at(stop_at)(loop.steps + 1)
                    loop.step()
        except SystemExit:
            pass
        loop.close()
        stop.requested.forget()
        return batches

    assert (seen(3), seen(0)) == ([0, 1, 2], [3, 4])


@pytest.mark.parametrize("stop_at", [2, BATCHES, 5])
def test_generators_of_the_loader_itself_go_on_as_well(tmp_path: Path, stop_at: int) -> None:
    def order(folder: Path, stop_at: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(range(12), batch_size=4, shuffle=True, generator=generator)  # type: ignore[arg-type]
        loop = Loop(directory=folder, model=nn.Linear(1, 1))
        seen = []
        try:
            for _ in loop.epochs(2):
                for batch in loop.batches(loader):
                    seen.append(batch.tolist())
                    stops_at(stop_at)(loop.steps + 1)
                    loop.step()
        except SystemExit:
            pass
        loop.close()
        stop.requested.forget()
        return seen

    expected = order(tmp_path / "undisturbed")
    assert order(tmp_path / "stopped", stop_at) + order(tmp_path / "stopped") == expected


def test_without_random_states_the_generators_are_left_alone(tmp_path: Path) -> None:
    left(Training(tmp_path, random_states=False), stops_at(2))
    content = torch.load(tmp_path / "checkpoints/step-00000002.pt", weights_only=True)
    assert replay.unpack(content["random_states"], 0) is None
    Training(tmp_path, random_states=False).loop.close()
    resumed = torch.get_rng_state()
    Training(tmp_path / "another").loop.close()
    assert torch.equal(resumed, torch.get_rng_state())  # as the script had seeded it


def test_a_finished_loop_has_nothing_left_to_do(tmp_path: Path, logged: list[str]) -> None:
    weights = Training(tmp_path).run()
    again = Training(tmp_path)
    assert same(again.run(), weights)
    assert again.events == []
    assert "resuming from step 6, after epoch 2: step-00000006.pt" in logged
    assert f"nothing left to train: epoch 2 is done. To start again, remove {tmp_path}" in logged


def test_after_the_loop_signals_have_their_usual_effect(tmp_path: Path) -> None:
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    loop = Training(tmp_path).loop
    for _ in range(2):  # what goes on after `finish` listens again
        loop.step()
        assert [signal.getsignal(number) for number in numbers] != before
        loop.finish()
        assert [signal.getsignal(number) for number in numbers] == before
    loop.step()
    loop.close()
    assert [signal.getsignal(number) for number in numbers] == before
    signal.raise_signal(signal.SIGUSR1)  # Slurm's, ahead of the end: what follows goes on
    for wrong in ({"lr": 0.1}, {"model": nn.Linear(1, 1)}):  # no state, another one
        with pytest.raises((TypeError, CheckpointError)):
            Loop(directory=tmp_path, **wrong)
        assert [signal.getsignal(number) for number in numbers] == before


def test_a_loop_that_is_left_by_break_is_finished(tmp_path: Path) -> None:
    """With a stop that waits for the end of the epoch, which does not come."""
    training = Training(tmp_path)
    for _ in training.loop.epochs(EPOCHS):
        for _ in training.loop.batches(training.loader):
            stops_at(BATCHES)(training.loop.steps + 1)
            training.loop.step()
        break
    with pytest.raises(SystemExit) as leaving:
        training.loop.finish()
    training.loop.close()
    assert (leaving.value.code, training.loop.attempt.read_final_record().saved) == (75, BATCHES)  # type: ignore[union-attr]


def test_two_loops_of_a_process_do_not_share_a_folder(tmp_path: Path) -> None:
    first = Loop(directory=tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(TrainingError, match=f"this process already has a Loop in {tmp_path}"):
        Loop(directory=tmp_path, model=nn.Linear(1, 1))
    first.close()
    Loop(directory=tmp_path, model=nn.Linear(1, 1)).close()


def test_a_checkpoint_loads_without_clusterddp(tmp_path: Path) -> None:
    weights = Training(tmp_path).run()
    content = torch.load(tmp_path / f"checkpoints/step-{6:08}.pt", weights_only=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model.load_state_dict(content["model"])
    assert same(list(model.parameters()), weights)


@pytest.mark.parametrize("every", ["2steps", "1epoch"])
def test_it_saves_when_it_was_told_to(tmp_path: Path, every: str) -> None:
    training = Training(tmp_path, save_every=every, keep_last=10)
    training.run()
    steps = [catalog.step_of(path) for path in catalog.files(training.loop.attempt.checkpoints)]
    assert steps == {"2steps": [6, 4, 2], "1epoch": [6, 3]}[every]


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every="1step", keep_last=2)
    training.run()
    steps = [catalog.step_of(path) for path in catalog.files(training.loop.attempt.checkpoints)]
    assert steps == [6, 5]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, logged: list[str]
) -> None:
    expected = Training(tmp_path / "undisturbed").run()
    folder = tmp_path / "damaged"
    left(Training(folder, save_every="1step"), stops_at(4))
    DAMAGE["flipped"][0](folder / "checkpoints/step-00000004.pt")
    again = Training(folder)
    assert again.loop.steps == 3
    assert any("skipping step-00000004.pt" in line for line in logged)
    assert same(again.run(), expected)


def test_without_any_valid_checkpoint_it_does_not_begin_anew(tmp_path: Path) -> None:
    left(Training(tmp_path), stops_at(2))
    DAMAGE["torn"][0](tmp_path / "checkpoints/step-00000002.pt")
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is valid"):
        Training(tmp_path)


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (signal.SIGTERM, 75, "SIGTERM"),
        (signal.SIGUSR2, 75, "signal"),
        (signal.SIGINT, 130, "interrupt"),
    ],
)
def test_it_leaves_with_the_step_that_it_has_saved(
    tmp_path: Path, number: int, code: int, reason: str, logged: list[str]
) -> None:
    training = Training(tmp_path)

    def at_second(step: int) -> None:
        if step == 2:
            signal.raise_signal(number)

    assert left(training, at_second) == code
    assert f"stopped at step 2 ({reason}). The next attempt continues from there" in logged
    last_word = training.loop.attempt.read_final_record()
    assert last_word and (last_word.cause, last_word.reason) == ("stopped", reason)
    assert (last_word.step, last_word.saved) == (2, 2)


def test_it_leaves_before_the_limit_that_it_knows_of(tmp_path: Path) -> None:
    training = Training(tmp_path)
    assert left(training, lambda step: step == 2 and training.loop._deadline.set(0.1)) == 75
    final_record = training.loop.attempt.read_final_record()
    assert final_record and (final_record.reason, final_record.saved) == ("time limit", 2)


@contextmanager
def no_room() -> Iterator[None]:
    """Files of at most 2 KB, as a full disk would end one in its middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_checkpoint_and_not_the_training(
    tmp_path: Path, logged: list[str]
) -> None:
    training = Training(tmp_path, save_every="2steps")
    with no_room():
        code = left(training, stops_at(4))
    assert code == 75
    final_record = training.loop.attempt.read_final_record()
    assert final_record and (final_record.step, final_record.saved) == (4, None)
    assert "File too large" in final_record.write_error
    assert any("Training continues from memory" in line for line in logged)


def test_a_loop_that_cannot_save_its_end_says_so(tmp_path: Path) -> None:
    training = Training(tmp_path)
    with no_room(), pytest.raises(CheckpointError, match=r"the training is done, but .*too large"):
        training.run()
    training.loop.close()


class Odd:
    """Something with a state that torch.load would have to run code for."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": [self.value]}

    def load_state_dict(self, _: object) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, r"has nothing to save"),
        ({"step": nn.Linear(1, 1)}, r"Loop\(step=…\): this name is reserved"),
        ({"lr": 0.1}, r"Loop\(lr=…\): a float has no state_dict"),
        (
            {"odd": Odd(Path("/"))},
            r"Loop\(odd=…\): torch.load with weights_only=True refuses its state_dict: .*PosixPath",
        ),
        (
            {"odd": Odd(np.float64(1))},
            r"Loop\(odd=…\): torch.load with weights_only=True refuses its state_dict: numpy\.",
        ),
        (
            {"odd": Odd(lambda: 0)},
            r"Loop\(odd=…\): torch.load with weights_only=True refuses its state_dict: .*lambda",
        ),
        (
            {"model": nn.Linear(1, 1), "save_every": "10 min"},
            r"save_every='10 min' is not an interval",
        ),
        (
            {"model": nn.Linear(1, 1), "save_every": "0steps"},
            r"save_every='0steps' is not an interval",
        ),
        *(
            (
                {"model": nn.Linear(1, 1), "snapshot_every": odd},
                r"snapshot_every=.* is not an interval",
            )
            for odd in ("abc", "-5s", -5, math.nan, math.inf, None, True)
        ),
    ],
)
def test_a_mistake_is_named_at_once(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Loop(directory=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variable", TASK)
def test_ranks_without_a_process_group_are_no_world(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(TrainingError, match=r"names 2 tasks, .*init_process_group\(\) before"):
        Loop(model=nn.Linear(1, 1))


def test_batches_belong_into_an_epoch(tmp_path: Path) -> None:
    loop = Loop(directory=tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"loop\.epochs"):
        next(loop.batches([1]))
    loop.close()


@pytest.mark.parametrize("saves", [False, True])
def test_an_epoch_without_batches_is_one_step_and_is_done_once(tmp_path: Path, saves: bool) -> None:
    """Whether the stop waits for the end of the epoch, or a person saves and leaves within it."""

    def train(stop_at: int) -> None:
        loop = Loop(directory=tmp_path / "run", model=nn.Linear(1, 1), log_every=1)
        with suppress(SystemExit):
            for epoch in loop.epochs(5):
                if not saves:
                    stops_at(stop_at)(loop.steps + 1)
                loop.step(loss=1.0)
                if saves and loop.steps == stop_at:
                    loop.leave("USR1")
                done.append(epoch)
        loop.close()
        stop.requested.forget()

    done: list[int] = []
    for stop_at in (2, 3, 0):
        train(stop_at)
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [(line["step"], line["epoch"]) for line in lines] == [(n, n) for n in range(1, 6)]
    assert done == ([0, 3, 4] if saves else [0, 1, 2, 3, 4])


def test_a_second_pass_of_batches_in_an_epoch_is_refused(tmp_path: Path) -> None:
    """A validation through it would be taken for the training after a resume."""
    loop = Loop(directory=tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"twice in an epoch"):
        for _ in loop.epochs(1):
            for _ in loop.batches(range(2)):
                loop.step()
            list(loop.batches(range(2)))
    loop.close()


@pytest.mark.parametrize("use", ["loop.step()", "", "raise ValueError"])
def test_a_script_that_counts_no_step_is_told_so(tmp_path: Path, use: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from torch import nn\nfrom clusterddp.loop import Loop\n"
        f"loop = Loop(model=nn.Linear(1, 1))\n{use}\n"
    )
    argv = [sys.executable, "-W", "ignore", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ("Loop counted no step, so nothing was saved" in done.stderr) == (not use)


def test_a_second_step_without_batches_is_refused(tmp_path: Path) -> None:
    """A resume could not tell where in the epoch it was, and would do its steps again."""
    loop = Loop(directory=tmp_path, model=nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"loop\.batches"):
        for _ in loop.epochs(2):
            for _ in range(2):
                loop.step()
    assert loop.steps == 1
    loop.close()


def test_a_checkpoint_of_other_states_is_refused(tmp_path: Path) -> None:
    Training(tmp_path).run()
    with pytest.raises(CheckpointError, match=r"holds model, optimizer, scheduler, but .* model"):
        Loop(directory=tmp_path, model=nn.Linear(1, 1))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    for kind, words in ((nn.Linear(2, 2), ""), (nn.Linear(3, 3), "does not fit .*size mismatch")):
        if words:
            with pytest.raises(CheckpointError, match=f"(?s){words}"):
                Loop(directory=tmp_path, model=kind)
        else:
            loop = Loop(directory=tmp_path, model=kind)
            loop.finish()
            loop.close()


def test_what_rank_0_refuses_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(directory: Path | None = tmp_path, **states: Any) -> tuple[type[Exception], str]:
        with pytest.raises((CheckpointError, TrainingError)) as caught:
            Loop(directory=directory, **states or {"model": nn.Linear(1, 1)})
        return caught.type, caught.value.code

    loop = Loop(directory=tmp_path, model=nn.Linear(1, 1))
    assert refused() == (TrainingError, "CD0816")
    loop.step()
    loop.finish()
    loop.close()
    assert refused(other=nn.Linear(1, 1)) == (CheckpointError, "CD0703")
    load = state.load
    of_shards = lambda *path, **how: {  # noqa: E731
        **load(*path, **how), "loop": {**load(*path)["loop"], "sharded": ["model"]},
    }  # fmt: skip
    monkeypatch.setattr(state, "load", of_shards)
    assert refused() == (CheckpointError, "CD0709")
    monkeypatch.setenv(LOOP_VARIABLE, f":{tmp_path}/run/attempts/0001")
    assert refused(directory=None) == (TrainingError, "CD0512")
    (tmp_path / "file").touch()
    assert refused(directory=tmp_path / "file/run") == (TrainingError, "CD0504")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("it is damaged", code="CD0702"), "CD0702"),
        (OSError(116, "Stale file handle"), "CD0505"),
        (RuntimeError("size mismatch"), "CD0703"),
    ],
    ids=repr,
)
def test_what_a_rank_cannot_restore_keeps_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    Training(tmp_path).run()
    monkeypatch.setattr(state, "restore", fails)
    with pytest.raises(CheckpointError) as caught:
        Training(tmp_path)
    assert caught.value.code == code


# -- what the commands read ------------------------------------------------------------------


def test_status_report_and_plots_read_what_it_writes(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "own")
    training = Training(run.path, log_every=2)
    training.run()
    training.loop.test(accuracy=np.float32(0.75), loss=torch.tensor(0.5), perplexity=3)
    lines = list(read_json_lines(run.metrics))
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("train", 2), ("train", 4), ("train", 6), ("eval", 6),
    ]  # fmt: skip
    assert lines[0]["lr"] == 0.01 and lines[0]["epoch"] == 1 and lines[0]["images_per_second"] > 0
    assert lines[-1]["perplexity"] == 3
    with pytest.raises(TypeError, match=r"the metric lr is not a number: \[0\.1, 0\.2\]"):
        training.loop.test(lr=[0.1, 0.2])
    status = run_status(run, {})
    assert (status.state, status.step, status.accuracy) == ("done", 6, 0.75)
    assert status.loss == lines[2]["loss"]
    assert status.checkpoint_step == 6 and newest_checkpoint(run.checkpoints)
    report = gather(run, status)
    assert [point.step for point in report.points] == [2, 4, 6, 6]
    assert report.report.figures.images_per_second and report.report.command[1:] == sys.argv
    [entry] = catalog.list_verified(run)
    assert (entry.step, entry.problem, entry.is_next) == (6, "", True)


@pytest.mark.parametrize(("log_every", "printed"), [(0, [1, 4]), (2, [2, 4, 6])])
def test_of_a_line_a_second_one_in_ten_seconds_is_printed_unless_the_pace_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], log_every: int,
    printed: list[int],
) -> None:  # fmt: skip
    clock = types.SimpleNamespace(
        monotonic=lambda: 1000.0, time=time.time, perf_counter=time.perf_counter
    )
    monkeypatch.setattr("clusterddp.training.metrics.time", clock)

    def step_takes_4_s(step: int) -> None:
        clock.monotonic = lambda: 1000.0 + 4 * step

    Training(tmp_path, log_every=log_every).run(step_takes_4_s)
    steps = [line["step"] for line in read_json_lines(RunDir(tmp_path).metrics)]
    assert steps == ([2, 4, 6] if log_every else [1, 2, 3, 4, 5, 6])
    told = [re.match(r"epoch \d step (\d+):", line) for line in logged]
    assert [int(each[1]) for each in told if each] == printed


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the steps, which only the test moves."""
    time_now = [0.0]
    clock = types.SimpleNamespace(perf_counter=lambda: time_now[0])
    monkeypatch.setattr("clusterddp.training.paces.time", clock)
    return time_now


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_whole_body_of_the_loop_is_training_and_the_code_between_epochs_is_not(
    tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    def stream() -> Iterator[int]:
        for number in range(3):
            now[0] += 10.0
            yield number

    loop = Loop(directory=tmp_path, model=nn.Linear(1, 1), save_every="1000steps")
    for _ in loop.epochs(2):
        with monkeypatch.context() as patch:
            for _ in loop.batches(stream() if is_stream else range(3)):
                patch.delattr("clusterddp.distributed.agreement.gather", raising=False)  # no step's
                now[0] += 1.0
                loop.step()
                now[0] += 2.0
        now[0] += 100.0
    assert loop._timer.clock.elapsed == (39.0 + 39.0 if is_stream else 7.0 + 7.0)
    assert loop._position.seconds == (39.0 + 37.0 if is_stream else 7.0 + 7.0)
    loop.close()


def test_neither_an_evaluation_nor_the_rest_of_an_epoch_that_is_left_is_training(
    tmp_path: Path, now: list[float]
) -> None:
    loop = Loop(directory=tmp_path, model=nn.Linear(1, 1), save_every="1epoch")
    for _ in loop.epochs(2):
        for number in loop.batches(range(5)):
            now[0] += 1.0
            loop.step()
            if number == 0:
                now[0] += 50.0
                loop.test(loss=1.0)
            if number == 2:
                break
            now[0] += 2.0
        now[0] += 100.0
    assert loop._timer.clock.elapsed == loop._position.seconds == 7.0 + 7.0
    loop.close()


def test_stacks_are_those_of_a_run_that_was_submitted(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "own")
    loop = Loop(directory=run.path, model=nn.Linear(1, 1))
    with pytest.raises(RequestError, match="own was started by hand, so the hosts of its ranks"):
        stacks.read(run, run_status(run, {}))
    loop.close()


def test_metrics_go_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    training = Training(run.path, log_every=1, save_every="2steps")

    def fails(step: int) -> None:
        if step == 6:
            raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        training.run(fails)
    training.loop.close()
    sign = training.loop.attempt.read_liveness()
    assert sign == Liveness(step=5, saved=4, spent=sign.spent, planned=6)
    assert sign.spent and sign.spent.first_step and sign.spent.waiting == 0
    Training(run.path, log_every=1).run()
    assert [line["step"] for line in read_json_lines(run.metrics)] == [1, 2, 3, 4, 5, 6]
    assert [attempt.number for attempt in attempts(run)] == [1, 2]
    record = Attempt(run, 2).read_record()
    assert record and (record.step, record.agent_starts) == (4, 1)


def test_in_a_run_it_writes_into_the_runs_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    attempt = begin(RunDir(tmp_path / "run"))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv(LOOP_VARIABLE, f"17:{attempt.path}")
    loop = Loop(model=nn.Linear(1, 1))
    loop.finish()
    loop.close()
    assert loop.attempt == attempt
    assert not attempt.end.exists()  # a run is done when its command is
    record = attempt.read_record()
    assert record and record.job_id == "17"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "{own}"),
        ("", "{own}"),
        (":/a:", ":/a::{own}"),
        ("/r/clusterddp-0.1-a.pyz:/a", "/a:{own}"),
    ],
)
def test_the_runs_clusterddp_comes_behind_a_persons_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    """An empty part is the current directory."""
    own = str(tmp_path / "clusterddp-0.2-b.pyz")
    monkeypatch.setattr(attempts_of_runs, "bundle_file", lambda: own)
    environ = {} if before is None else {"PYTHONPATH": before}
    expose_loop(environ, Attempt(RunDir(tmp_path), 1))
    assert environ["PYTHONPATH"] == after.format(own=own)


def test_two_scripts_of_one_attempt_do_not_share_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begin(RunDir(tmp_path / "run"))
    monkeypatch.setenv(LOOP_VARIABLE, f":{attempt.path}")
    monkeypatch.setattr(sys, "argv", ["/somewhere/pretrain.py"])
    loop = Loop(model=nn.Linear(1, 1))
    loop.finish()
    loop.close()
    monkeypatch.setattr(sys, "argv", ["finetune.py"])
    with pytest.raises(CheckpointError, match=r"by pretrain\.py, but this script is finetune\.py"):
        Loop(model=nn.Linear(1, 1))
    later = begin(attempt.run)  # of a COMMAND that was changed
    monkeypatch.setenv(LOOP_VARIABLE, f":{later.path}")
    Loop(model=nn.Linear(1, 1)).close()


def in_run_of(
    tasks: int, path: Path, monkeypatch: pytest.MonkeyPatch, template: str = DEFAULT_TEMPLATE
) -> None:
    run = RunDir(path)
    attempt = begin(run)
    command, resources = ("python", "own.py"), Resources(tasks_per_node=tasks)
    spec = JobSpec(
        "run", str(path), resources, command=command, signal="B:USR1@5", template=template
    )
    run.spec.write_text(spec.to_json())
    monkeypatch.setenv(LOOP_VARIABLE, f":{attempt.path}")


@pytest.mark.parametrize(
    ("nodes", "template"), [("", ""), ("1", ""), ("2", ""), ("1", "torchrun.sbatch.j2")]
)
def test_worlds_of_a_runs_tasks_do_not_share_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str, template: str
) -> None:
    """An agent of torchrun's that knows of itself alone, where the run has two tasks.

    With the template for torchrun these are two ranks of one agent.
    """
    in_run_of(2, tmp_path / "run", monkeypatch, template or DEFAULT_TEMPLATE)
    if nodes:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    if nodes == "2" or template:
        Loop(model=nn.Linear(1, 1)).close()
    else:
        with pytest.raises(TrainingError, match=r"has 2 tasks, .* has 1 of them\. .*directory=…"):
            Loop(model=nn.Linear(1, 1))


def test_a_signal_that_comes_too_late_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    in_run_of(1, tmp_path / "run", monkeypatch)
    loop = Loop(model=nn.Linear(1, 1), save_every="1step")
    loop.step()
    assert loop._saver and loop._saver.wait()
    loop.step()
    loop.close()
    assert any("Slurm sends its signal 5 s before" in line for line in logged)


@pytest.mark.parametrize(("kill_wait", "says"), [("0", 1), ("3600", 0), ("", 0)])
def test_a_snapshot_that_takes_longer_to_save_than_kill_wait_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str], kill_wait: str, says: int
) -> None:
    in_run_of(1, tmp_path / "run", monkeypatch)
    monkeypatch.setenv(node_memory.VARIABLE, str(Address.create()))
    monkeypatch.setenv(KILL_WAIT_VARIABLE, kill_wait)
    loop = Loop(model=nn.Linear(1, 1), save_every="2steps", snapshot_every=1e-3)
    wait_for(lambda: loop.step() or (loop._snapshots.is_used and loop._costs.saves > 3), "saves")
    loop.step()
    loop.close()
    assert sum("(KillWait)" in line for line in logged) == says


class Framework:
    """A framework's state, which writes its own files."""

    def save_state(self, directory: str) -> None:
        Path(directory).mkdir(exist_ok=True)
        (Path(directory) / "own").write_text("all of it")

    def load_state(self, directory: str) -> None: ...


def framework_steps(
    rank: int, world_size: int, run: Path, addresses: list[str], in_ddp: bool
) -> bool:
    os.environ[node_memory.VARIABLE] = addresses[rank]
    os.environ[LOOP_VARIABLE] = f":{Attempt(RunDir(run), 1).path}"
    model: nn.Module = nn.Linear(1, 1)
    states = {"model": DistributedDataParallel(model)} if in_ddp else {}
    loop = Loop(**states, framework=Framework(), save_every="9000steps", snapshot_every=1e-3)
    for _ in range(40):
        time.sleep(0.01)
        loop.step()
    used = loop._snapshots.is_used
    loop.close()
    return used


@pytest.mark.parametrize("in_ddp", [True, False])
def test_a_frameworks_files_on_several_ranks_are_in_snapshots_only_with_ddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_ddp: bool
) -> None:
    """Without DDP it may shard its files over the nodes: one node's would be an invalid whole."""
    in_run_of(2, tmp_path / "run", monkeypatch)
    addresses = [str(Address.create()) for _ in range(2)]
    assert run_ranks(2, framework_steps, tmp_path / "run", addresses, in_ddp) == [in_ddp, in_ddp]


def test_a_job_submitted_from_within_a_run_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    attempt = begin(RunDir(tmp_path / "run"))
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    monkeypatch.setenv(LOOP_VARIABLE, f"17:{attempt.path}")
    loop = Loop(model=nn.Linear(1, 1))
    loop.close()
    assert loop.attempt.run.path == tmp_path / "jobs/train"
    assert attempt.read_record() is None


def test_an_attempt_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOOP_VARIABLE, f":{tmp_path}/run/attempts/0001")
    with pytest.raises(TrainingError, match="attempts/0001 does not exist"):
        Loop(model=nn.Linear(1, 1))


def test_under_an_agent_in_a_run_it_leaves_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun would take 75 for a failure; the run knows by the record."""
    attempt = begin(RunDir(tmp_path / "run"))
    monkeypatch.setenv(LOOP_VARIABLE, f":{attempt.path}")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    loop = Loop(model=nn.Linear(1, 1))
    stop.requested.note("signal")
    with pytest.raises(SystemExit) as leaving:
        loop.step()
    loop.close()
    assert leaving.value.code == 0
    final_record = attempt.read_final_record()
    assert final_record and final_record.cause == "stopped"


def test_a_mark_of_the_run_is_heard(tmp_path: Path) -> None:
    training = Training(tmp_path)

    def mark(step: int) -> None:
        if step == 2:
            training.loop.attempt.ask_to_stop("stop")
            assert training.loop._liveness_writer
            training.loop._liveness_writer._show_or_end()

    assert left(training, mark) == 75
    final_record = training.loop.attempt.read_final_record()
    assert final_record and final_record.reason == "stop"


# -- ranks -----------------------------------------------------------------------------------


def rank_trains(
    rank: int, world_size: int, folder: Path, stop_at: int, sharded: bool, epochs: int = 2
) -> tuple[Any, int, list[list[float]]]:
    """Exit code, steps and whole weights of one rank; rank 1 alone is asked to stop."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 1))
    samples = torch.arange(96.0).reshape(24, 4) / 96
    if sharded:
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    data = torch.utils.data.TensorDataset(samples)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    loop = Loop(directory=folder, model=model, optimizer=optimizer, save_every="3steps")
    loop._poll.due = lambda _: True  # type: ignore[method-assign]
    code = None
    try:
        for epoch in loop.epochs(epochs):
            sampler.set_epoch(epoch)
            for [inputs] in loop.batches(loader):
                loss = model(inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if loop.steps + 1 == stop_at and rank == 1:
                    stop.requested.note("signal")
                loop.step(loss=loss)
    except SystemExit as leaving:
        code = leaving.code
    loop.close()
    whole = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for parameter in model.parameters()
    ]
    return code, loop.steps, [each.detach().flatten().tolist() for each in whole]


@pytest.mark.parametrize(
    "sharded",
    [False, pytest.param(True, marks=[pytest.mark.slow, trains_sharded])],
    ids=["ddp", "fsdp2"],
)
def test_one_ranks_request_stops_all_at_one_step_and_they_end_in_the_same_weights(
    tmp_path: Path, sharded: bool
) -> None:
    undisturbed = run_ranks(2, rank_trains, tmp_path / "undisturbed", 0, sharded)
    assert undisturbed[0] == undisturbed[1] and undisturbed[0][:2] == (None, 12)
    stopped = run_ranks(2, rank_trains, tmp_path / "stopped", 4, sharded)
    assert [each[:2] for each in stopped] == [(75, 4), (75, 4)]
    assert run_ranks(2, rank_trains, tmp_path / "stopped", 0, sharded) == undisturbed
    content = torch.load(tmp_path / "stopped/checkpoints/step-00000012.pt", weights_only=True)
    plain = ["0.weight", "0.bias", "3.weight", "3.bias"]  # and no `module.` of DDP's
    assert list(content.get("model", {})) == ([] if sharded else plain)


def rank_trains_deep(
    rank: int, world_size: int, folder: Path, stop_at: int, options: dict[str, Any]
) -> tuple[Any, list[bytes]]:
    """Exit code and weights, bit for bit, of a rank whose gradients fill several buckets."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32))]
    module = nn.Sequential(*layers)
    module[2].bias.requires_grad_(False)
    model = DistributedDataParallel(module, bucket_cap_mb=0.01, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loop = Loop(directory=folder, model=model, optimizer=optimizer)
    loop._poll.due = lambda _: True  # type: ignore[method-assign]
    code, batches = None, [torch.randn(8, 32, generator=_seeded(n, rank)) for n in range(8)]
    try:
        for _ in loop.epochs(1):
            for inputs in loop.batches(batches):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                if loop.steps + 1 == stop_at:
                    stop.requested.note("signal")
                loop.step()
    except SystemExit as leaving:
        code = leaving.code
    loop.close()
    return code, [each.numpy().tobytes() for each in module.state_dict().values()]


def _seeded(batch: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * batch + rank)


@pytest.mark.parametrize(
    "stop_at", [1, pytest.param(5, marks=[pytest.mark.slow, pytest.mark.release])]
)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {}),
        pytest.param(8, {}, marks=[pytest.mark.slow, pytest.mark.release]),
        pytest.param(3, {"gradient_as_bucket_view": True}, marks=pytest.mark.slow),
        pytest.param(3, {"find_unused_parameters": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_over_many_ranks_are_bit_for_bit_those_of_the_run_in_one_piece(
    tmp_path: Path, ranks: int, options: dict[str, Any], stop_at: int
) -> None:
    whole = run_ranks(ranks, rank_trains_deep, tmp_path / "whole", 0, options)
    stopped = run_ranks(ranks, rank_trains_deep, tmp_path / "stopped", stop_at, options)
    assert [code for code, _ in stopped] == [75] * ranks
    resumed = run_ranks(ranks, rank_trains_deep, tmp_path / "stopped", 0, options)
    # Statistics of BatchNorm are each rank's own, and a checkpoint holds those of rank 0.
    assert resumed[0] == whole[0]


def rank_fails(
    rank: int, world_size: int, folder: Path, stop_at: int, where: str, sharded: bool
) -> tuple[Any, str]:
    """Exit code, and what is said on each rank; rank 1 alone has trouble with its files."""

    def stale(*_: object, **__: object) -> None:
        raise OSError(116, "Stale file handle")

    if rank == 1 and where:
        module, name = where.split(".")
        setattr({"catalog": catalog, "sharded": checkpoints.sharded}[module], name, stale)
    try:
        return rank_trains(rank, world_size, folder, stop_at, sharded)[0], ""
    except CheckpointError as error:
        return None, str(error)


@trains_sharded
def test_a_sharded_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """On all ranks at the end of the loop; and in the last word of one that leaves."""
    said = run_ranks(2, rank_fails, tmp_path / "end", 0, "sharded.stored_sha256", True)
    assert said[0] == said[1]
    assert re.search(r"the training is done, but .*0012\.pt was not written: .*Stale", said[0][1])
    assert not list((tmp_path / "end/checkpoints").iterdir())
    left = run_ranks(2, rank_fails, tmp_path / "left", 4, "sharded.stored_sha256", True)
    assert left == [(75, "")] * 2
    final_record = Attempt(RunDir(tmp_path / "left"), 1).read_final_record()
    assert final_record and (final_record.step, final_record.saved) == (4, None)
    assert "Stale file handle" in final_record.write_error


@trains_sharded
def test_what_one_rank_cannot_read_ends_all(tmp_path: Path) -> None:
    run_ranks(2, rank_trains, tmp_path, 4, True)
    said = run_ranks(2, rank_fails, tmp_path, 0, "sharded.check", True)
    assert said[0] == said[1]
    assert re.search("^rank 1 on .*Stale file handle", said[0][1])


def rank_gives(rank: int, world_size: int, folder: Path) -> list[str]:
    """What is said to states of which a rank has a part, and to two other models than the first."""
    said = []
    for model in (nn.Linear(4, 4), nn.Linear(5, 4), nn.Sequential(nn.Linear(4, 4))):
        plain = nn.Linear(4, 4)
        fully_shard(model)
        both = torch.optim.SGD([*model.parameters(), *plain.parameters()])
        average = Odd(next(model.parameters()).detach())
        for states in ({"average": average}, {"optimizer": both, "plain": plain}, {}):
            try:
                loop = Loop(directory=folder, model=model, **states)
                loop.finish()
                loop.close()
            except (TypeError, CheckpointError) as error:
                said.append(str(error))
    return said


def test_a_sharded_state_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    [said, other] = run_ranks(2, rank_gives, tmp_path)
    assert said == other and len(said) == 8
    for refusals in (said[:2], said[2:4], said[5:7]):
        assert "Loop(average=…)" in refusals[0] and "full_tensor()" in refusals[0]
        assert "the SGD does not belong to a module passed to Loop" in refusals[1]
    for told, words in ((said[4], "size mismatch for model.weight"), (said[7], "model.0.weight")):
        assert "does not fit this loop's states: " in told and words in told


def rank_counts(rank: int, world_size: int, folder: Path) -> int:
    """The step that is saved after the second, which is one rank's last batch."""
    loop = Loop(directory=folder, model=nn.Linear(1, 1), save_every="2steps")
    for _ in loop.epochs(1):
        for _ in loop.batches(range(2 + rank)):
            loop.step()
            if loop.steps == 2:
                saved = loop._saved_step
                break
    loop.close()
    return saved


def test_loaders_of_different_lengths_save_at_one_step(tmp_path: Path) -> None:
    assert run_ranks(2, rank_counts, tmp_path) == [2, 2]


def rank_sees(rank: int, world_size: int, folder: Path, stop_at: int) -> tuple[Any, list[int]]:
    """Exit code, and the samples of this rank in an epoch that each rank's share is dealt out."""
    data = torch.utils.data.TensorDataset(torch.arange(60.0))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=3))
    loop = Loop(directory=folder, model=nn.Linear(1, 1))
    loop._poll.due = lambda _: True  # type: ignore[method-assign]
    seen, code = [], None
    try:
        for _ in loop.epochs(1):
            for [samples] in loop.batches(loader):
                seen += [int(sample) for sample in samples]
                if loop.steps + 1 == stop_at:
                    stop.requested.note("signal")
                loop.step()
    except SystemExit as leaving:
        code = leaving.code
    loop.close()
    return code, seen


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_at_another_number_of_ranks_no_sample_of_the_epoch_is_left_out(
    tmp_path: Path, ranks: int
) -> None:
    """Those of less than one batch of all ranks are trained twice, as the page says."""
    order = list(DistributedSampler(range(60), 1, 0, seed=3))  # type: ignore[arg-type]
    before = run_ranks(2, rank_sees, tmp_path, 4)
    first = [sample for _, seen in before for sample in seen]
    assert [code for code, _ in before] == [75, 75]
    assert sorted(first) == sorted(order[:32])
    second = {sample for _, seen in run_ranks(ranks, rank_sees, tmp_path, 0) for sample in seen}
    assert {*first, *second} == set(order)
    assert second & set(first) == set(order[24:32] if ranks == 3 else [])


def rank_reads(rank: int, world_size: int, folder: Path, stop_at: int) -> str:
    """What is said to batches that nobody deals out."""
    loop = Loop(directory=folder, model=nn.Linear(1, 1))
    loop._poll.due = lambda _: True  # type: ignore[method-assign]
    try:
        for _ in loop.epochs(1):
            for _ in loop.batches(range(9)):
                if loop.steps + 1 == stop_at:
                    stop.requested.note("signal")
                loop.step()
    except (SystemExit, CheckpointError) as error:
        return str(error)
    finally:
        loop.close()
    return ""


def test_in_an_epoch_that_nobody_deals_out_another_number_of_ranks_is_refused(
    tmp_path: Path,
) -> None:
    run_ranks(2, rank_reads, tmp_path, 4)
    [said] = run_ranks(1, rank_reads, tmp_path, 0)
    assert "has 2 ranks, but this world has 1" in said and "start 2 ranks." in said


def rank_is_watched(rank: int, world_size: int, folder: Path) -> tuple[list[str], Any, bool]:
    """The phases in which its own code finds this rank, what it has waited, and its paces."""
    model = DistributedDataParallel(nn.Linear(4, 1))
    loop = Loop(directory=folder, model=model)
    loop._poll.due = lambda _: True  # type: ignore[method-assign]
    phases = []

    def note() -> None:
        phases.append(Phase(loop._progress.position.phase).name)

    for _ in loop.epochs(1):
        note()
        for inputs in loop.batches([torch.ones(2, 4)] * 3):
            note()
            model(inputs).sum().backward()
            note()
            loop.step()
            note()
    waiting, rates = loop._spent().waiting, loop._timer.rates
    loop.close()
    return phases, waiting, len(rates) == world_size and all(rate > 0 for rate in rates)


def test_the_watchdog_counts_between_a_batch_and_its_step_alone(tmp_path: Path) -> None:
    """And what each rank waits for others is known, of which its pace follows."""
    for phases, waiting, has_rates in run_ranks(2, rank_is_watched, tmp_path):
        assert phases == ["USER_CODE", *["FORWARD", "BACKWARD", "USER_CODE"] * 3]
        assert waiting is not None and has_rates


def rank_hangs(rank: int, world_size: int, path: Path) -> HungRanks | None:
    """What the run's record says, which rank 1 waits for in its forward pass."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if rank == 0:
        (path / "new").write_text(str(store.port))
        (path / "new").rename(path / "port")
    else:
        wait_for((path / "port").exists, "rank 0's store")
        store = dist.TCPStore("127.0.0.1", int((path / "port").read_text()))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    loop_module._WATCHDOG_SECONDS = 1.0
    os.environ[LOOP_VARIABLE] = f":{path}"
    model = DistributedDataParallel(nn.Linear(4, 1))
    loop, said = Loop(model=model), None
    for _ in loop.epochs(1):
        for inputs in loop.batches([torch.ones(2, 4)] * 3):
            if rank == 1 and loop.steps == 2:  # after DDP has arranged its buckets
                hung = loop.attempt.outcomes / HUNG
                wait_for(hung.exists, "the record of the rank that hangs")
                said = read(HungRanks, hung)
            model(inputs).sum().backward()
            loop.step()
    loop.close()
    return said


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_in_the_runs_record_until_it_goes_on(tmp_path: Path) -> None:
    attempt = begin(RunDir(tmp_path / "run"))
    _, said = run_ranks(2, rank_hangs, attempt.path)
    assert said == HungRanks((1,), "in the forward pass of step 3, while others are exchanging "
                             "the gradients of step 3")  # fmt: skip
    assert not (attempt.outcomes / HUNG).exists()


def rank_loads(rank: int, world_size: int, folder: Path) -> tuple[int, int, list[list[float]]]:
    """Steps, batches that are passed over and weights, before anything is trained."""
    _, steps, weights = rank_trains(rank, world_size, folder, 0, True, epochs=0)
    return steps, world_size, weights


@trains_sharded
@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sharded_checkpoint_resumes_at_another_number_of_ranks(
    tmp_path: Path, ranks: int
) -> None:
    [saved, _] = run_ranks(2, rank_trains, tmp_path, 4, True)
    assert run_ranks(ranks, rank_loads, tmp_path) == [(4, ranks, saved[2])] * ranks
    # And it trains on: 24 samples an epoch, of which 16 are trained in the first.
    [(_, steps, _), *_] = run_ranks(ranks, rank_trains, tmp_path, 0, True)
    left_in_first, in_second = {3: (2, 4), 1: (4, 12)}[ranks]
    assert steps == 4 + left_in_first + in_second


@trains_sharded
@pytest.mark.slow
def test_a_damaged_shard_is_passed_over_with_its_checkpoint(tmp_path: Path) -> None:
    undisturbed = run_ranks(2, rank_trains, tmp_path / "undisturbed", 0, True)
    run_ranks(2, rank_trains, tmp_path / "run", 4, True)
    [shard] = (tmp_path / "run/checkpoints/step-00000004.shards").glob("__1_*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    entries = catalog.list_verified(RunDir(tmp_path / "run"))
    assert [(entry.step, entry.problem) for entry in entries] == [
        (4, "shard SHA-256 differs"), (3, ""),
    ]  # fmt: skip
    assert run_ranks(2, rank_trains, tmp_path / "run", 0, True) == undisturbed


# -- as a process ----------------------------------------------------------------------------

_SCRIPT = """
import signal, sys
import torch
from torch import nn
from clusterddp.loop import Loop

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loop = Loop(model=model, optimizer=optimizer)
while loop.steps < 5:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if loop.steps == 2 and "asked" in sys.argv:
        signal.raise_signal(signal.SIGTERM)
    loop.step()
print([p.tolist() for p in model.parameters()])
"""


def test_a_plain_process_saves_and_exits_with_75(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(_SCRIPT)

    for name in ("stopped", "undisturbed"):
        (tmp_path / name).mkdir()
    asked = forked.run(script, "asked", cwd=tmp_path / "stopped")
    assert (asked.returncode, asked.stdout) == (75, ""), asked.stderr
    assert (
        "clusterddp: stopped at step 3 (SIGTERM). The next attempt continues from there"
        in asked.stderr
    )
    again, whole = (forked.run(script, cwd=tmp_path / name) for name in ("stopped", "undisturbed"))
    assert "resuming from step 3" in again.stderr
    assert again.stdout == whole.stdout and again.stdout, (again, whole)


def test_it_needs_torch_alone(tmp_path: Path) -> None:
    """Of what is installed: no numpy, click, jinja2 or tqdm is imported."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'click', 'jinja2', 'tqdm', "
        "'torchvision', 'submitit'])); import clusterddp.loop, torch; from torch import nn; "
        "bytes_of = clusterddp.loop.agreement.bytes_of; "
        "assert bytes_of(torch.tensor([7, 255], dtype=torch.uint8)) == b'\\x07\\xff'; "
        "assert bytes_of(torch.empty(0, dtype=torch.uint8)) == b''; "
        "loop = clusterddp.loop.Loop(directory=sys.argv[1], model=nn.Linear(1, 1)); loop.finish()"
    )
    argv = [sys.executable, "-W", "ignore", "-c", code, "run"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
