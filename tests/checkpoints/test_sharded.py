"""Sharded saves on two ranks: in the background, one at a time, and whole or not at all."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from clusterddp import log
from clusterddp.checkpoints import catalog, sharded
from clusterddp.checkpoints.writer import Saver
from clusterddp.loop import Loop
from tests.forked import CONTEXT
from tests.training import ranks
from tests.training.ranks import PATIENCE, run_ranks

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    pytest.skip("needs FSDP2 on CPUs: torch 2.6", allow_module_level=True)

BLOCKED_SECONDS = 0.2


class Training:
    """A sharded training of six steps, which saves after the third and at the end."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 1))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.said: list[str] = []
        with log.to(self.said.append):
            self.loop = Loop(
                directory=folder, model=self.model, optimizer=self.optimizer, save_every="3steps"
            )
        self.checkpoints = self.loop.attempt.checkpoints

    def run(self, before_step: Callable[[int], object] = lambda _: None) -> None:
        """Train; `before_step` is called with the number of the coming step."""
        with log.to(self.said.append):
            for _ in self.loop.epochs(1):
                for inputs in self.loop.batches(torch.ones(6, 2, 128)):
                    before_step(self.loop.steps + 1)
                    self.optimizer.zero_grad()
                    self.model(inputs).square().mean().backward()
                    self.optimizer.step()
                    self.loop.step()

    @property
    def weights(self) -> list[Tensor]:
        """This rank's shards of the weights."""
        return [each.to_local().detach().clone() for each in self.model.parameters()]  # type: ignore[attr-defined]

    @property
    def saved(self) -> list[int]:
        """Steps of the valid checkpoints."""
        paths = catalog.files(self.checkpoints)
        return [catalog.step_of(path) for path in paths if catalog.read(path)]


class HeldDigests:
    """Has the thread that writes the shards wait before it reads them back."""

    def __init__(self) -> None:
        self.began, self.release = threading.Event(), threading.Event()
        self.most = self._now = 0
        """Most threads at once."""
        self._read = sharded._digests
        sharded._digests = self

    def __call__(self, folder: Path, group: Any) -> tuple[dict[str, str], str]:
        self._now += 1
        self.most = max(self.most, self._now)
        self.began.set()
        if not self.release.wait(PATIENCE):
            raise OSError("nobody waits for the shards, and no step was trained")
        self.release.clear()
        time.sleep(BLOCKED_SECONDS)  # what the training waits for, at least
        self._now -= 1
        return self._read(folder, group)


def rank_trains_meanwhile(rank: int, world_size: int, folder: Path) -> list[int]:
    """Steps that are saved while step 5 is trained; and the checkpoint of step 3 is restored."""
    training, held = Training(folder), HeldDigests()
    third: list[Tensor] = []
    before: list[int] = []

    def look(step: int) -> None:
        if step == 4:
            third.extend(training.weights)
        if step == 6:
            assert held.began.wait(PATIENCE)
            before.extend(training.saved)
            dist.barrier()
            held.release.set()
            sharded._digests = held._read

    training.run(look)
    assert training.saved == [6, 3]
    sharded.restore(training.checkpoints / catalog.name_of(3), training.loop._shards)
    assert all(map(torch.equal, training.weights, third))
    return before


def test_the_training_takes_steps_while_its_shards_are_written(tmp_path: Path) -> None:
    """They are those of the step at which the save was due, and have no name before."""
    assert run_ranks(2, rank_trains_meanwhile, tmp_path) == [[], []]


def rank_is_released_by_who_waits(rank: int, world_size: int, folder: Path) -> tuple[int, Any]:
    """Most threads at once, and rank 0's costs, if a thread goes on only once it is waited for."""
    training, held = Training(folder), HeldDigests()
    waits = {each: each.wait for each in (Saver, sharded.Save)}

    def wait(self: Any, *seconds: float) -> Any:
        if self._thread and self._thread.is_alive():
            held.release.set()
        return waits[type(self)](self, *seconds)

    Saver.wait = sharded.Save.wait = wait  # type: ignore[method-assign]
    training.run()
    assert training.saved == [6, 3]
    return held.most, vars(training.loop._costs)


def test_a_second_save_waits_for_the_first_and_the_end_for_the_last(tmp_path: Path) -> None:
    [(most, costs), (most_of_other, _)] = run_ranks(2, rank_is_released_by_who_waits, tmp_path)
    assert most == most_of_other == 1
    assert costs["saves"] == 2 and costs["failed"] == 0
    assert costs["blocked_seconds"] > 2 * BLOCKED_SECONDS
    assert costs["longest_seconds"] > BLOCKED_SECONDS


def rank_has_a_full_disk(rank: int, world_size: int, folder: Path) -> tuple[Any, list[str]]:
    """What is said by a training whose rank 1 cannot write its shards of step 3."""
    training = Training(folder)
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int) -> None:
        if step == 4 and training.loop._shard_save:
            training.loop._shard_save.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, whole)

    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, whole[1]))
    training.run(fill)
    return vars(training.loop._costs), training.said


def test_a_full_disk_of_one_rank_is_told_and_the_next_save_tries_again(tmp_path: Path) -> None:
    [(costs, said), _] = run_ranks(2, rank_has_a_full_disk, tmp_path)
    assert (costs["failed"], costs["saves"]) == (1, 1)
    [line] = [each for each in said if "was not written" in each]
    assert "step-00000003.pt was not written: " in line and "the disk may be full" in line
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-00000006.pt", "step-00000006.pt.sha256", "step-00000006.shards",
    }  # fmt: skip


def rank_without_gloo(rank: int, world_size: int, folder: Path) -> tuple[list[str], int]:
    """What is said if rank 1 knows no way to the others, and the threads after a save."""
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "none"
    sharded._CONNECT_SECONDS = 1.0
    training, alive = Training(folder), []

    def look(step: int) -> None:
        if step == 4 and training.loop._shard_save:
            alive.append(training.loop._shard_save._thread.is_alive())

    training.run(look)
    assert training.saved == [6, 3]
    return training.said, alive


def test_ranks_that_gloo_cannot_connect_save_in_the_step(tmp_path: Path) -> None:
    [(said, alive), other] = run_ranks(2, rank_without_gloo, tmp_path)
    assert alive == [False] and other[1] == [False]
    assert "Training will wait while its shards are written. Set GLOO_SOCKET_IFNAME" in said[0]


def rank_is_killed(rank: int, world_size: int, folder: Path, killed: int) -> None:
    """Rank `killed` dies while it writes; the other one ends as a script does that has failed."""
    training = Training(folder)
    if rank == killed:
        sharded._digests = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    try:
        training.run()
    finally:
        training.loop.close()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_while_it_writes_leaves_no_checkpoint_and_no_rank(
    tmp_path: Path, killed: int
) -> None:
    store, folder = tmp_path / "store", tmp_path / "run"
    readers = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    processes = [
        CONTEXT.Process(
            target=ranks._rank, args=(writer, str(store), rank_is_killed, (rank, 2, folder, killed))
        )
        for rank, (_, writer) in enumerate(readers)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE)
        assert [process.exitcode is not None for process in processes] == [True, True]
        assert processes[killed].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.join()
    # The next attempt begins anew, and removes what the rank has left.
    run_ranks(2, rank_trains, folder)
    assert not list((folder / "attempts/0001").rglob("*step-*"))


def rank_trains(rank: int, world_size: int, folder: Path) -> None:
    training = Training(folder)
    assert not training.loop.is_resumed
    training.run()
