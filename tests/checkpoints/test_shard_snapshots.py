"""Snapshots of a sharded training: what is left of them when ranks and nodes are lost."""

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clusterddp import log
from clusterddp.checkpoints import catalog, from_memory, sharded, state
from clusterddp.checkpoints.shard_snapshots import ShardSnapshots, keepers
from clusterddp.checkpoints.state import Position
from clusterddp.distributed.agreement import Poll
from clusterddp.loop import Loop
from clusterddp.polling import wait_until
from clusterddp.run import attempt as attempts
from clusterddp.run import node_memory
from clusterddp.run.attempt import Attempt, attempt_at
from clusterddp.run.node_memory import VARIABLE, Address
from clusterddp.run.run_dir import RunDir
from tests.training.ranks import PATIENCE, run_ranks

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:
    pytest.skip("needs FSDP2 on CPUs: torch 2.6", allow_module_level=True)

HOSTS = ("a", "a", "b", "b")


class Trained:
    """A sharded model that changes at each step, and its snapshots."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        # The last parameter has fewer rows than there are ranks.
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1))
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.position = Position()
        self.shards: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model(torch.ones(2, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.position.step += 1

    @property
    def weights(self) -> list[Any]:
        """This rank's shards, and its part of the optimizer's state."""
        moments = [
            value
            for each in self.optimizer.state.values()
            for value in each.values()
            if isinstance(value, Tensor)
        ]
        both = [*self.model.parameters(), *moments]
        return [getattr(each, "to_local", each.detach)().tolist() for each in both]


def wait(snapshots: Any) -> None:
    """Wait for the thread, which is busy on a slow machine."""
    if snapshots._thread:
        snapshots._thread.join(PATIENCE)


def take(trained: Trained, snapshots: ShardSnapshots) -> None:
    def collect(random_states: list[Any], copy: Any) -> Any:
        return state.collect(
            {}, trained.position, world_size=len(random_states), random_states=random_states,
            copy=copy,
        )  # fmt: skip

    snapshots.take(trained.position.step, {}, [], {}, {"now": torch.ones(1)}, collect)


def rank_trains(
    rank: int,
    world_size: int,
    folder: Path,
    memories: Sequence[Address],
    hosts: Sequence[str],
    torn: int | None,
) -> dict[int, list[Any]]:
    """Train three steps with a snapshot of each; return the weights of each step.

    torn: rank that is killed in the last snapshot, when the others have it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(memories[rank]))
        patch.setenv("SLURMD_NODENAME", hosts[rank])
        trained, weights = Trained(), {}
        snapshots = ShardSnapshots(attempt_at(folder), 1e-6, trained.shards)
        for step in range(1, 4):
            trained.step()
            weights[step] = trained.weights
            if step == 1:
                take(trained, snapshots)  # prepares
            snapshots._not_before = 0
            if step == 3 and rank == torn:
                patch.setattr(node_memory, "write_steps", only_begun)
            take(trained, snapshots)
            wait(snapshots)
        assert not snapshots._problem
        return weights


def only_begun(
    half: int, member: int, begun: int, finished: int, write: Any = node_memory.write_steps
) -> None:
    if not finished:
        write(half, member, begun, finished)


def rank_restores(rank: int, world_size: int, path: Path) -> list[Any]:
    trained = Trained()
    sharded.restore(path, trained.shards)
    return trained.weights


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = attempts.begin(RunDir(tmp_path / "run"))
    made.checkpoints.mkdir()
    return made


@pytest.fixture
def memories() -> list[Address]:
    """Memory of four tasks, all of which this process owns."""
    return [Address.create() for _ in HOSTS]


def save(memories: Sequence[Address], ranks: Collection[int]) -> None:
    """Save at the tasks of some ranks, at once."""
    threads = [threading.Thread(target=from_memory.save, args=(memories[r],)) for r in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def assert_saved(attempt: Attempt, step: int, weights: Sequence[dict[int, list[Any]]]) -> None:
    """The only checkpoint is of this step; it has the weights of all ranks, and nothing is left."""
    assert [catalog.step_of(path) for path in catalog.files(attempt.checkpoints)] == [step]
    path = attempt.checkpoints / catalog.name_of(step)
    assert state.load(path)["step"] == step  # and all digests are right
    assert node_memory.is_from_memory(path)
    restored = run_ranks(len(weights), rank_restores, path)
    for one, other in zip(restored, weights, strict=True):
        assert one == other[step]
    hidden = {each.name for each in attempt.checkpoints.rglob(".*")}
    assert hidden == {".metadata"}


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 3)])
def test_the_newest_step_is_saved_though_a_node_is_lost(
    attempt: Attempt, memories: list[Address], ranks: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(from_memory, "_NOTES_SECONDS", 1.0)
    weights = run_ranks(4, rank_trains, attempt.path, memories, HOSTS, None)
    save(memories, ranks)
    assert_saved(attempt, 3, weights)


@pytest.mark.parametrize(("hosts", "step"), [("aaaa", 2), (HOSTS, 3)])
def test_of_a_rank_killed_in_its_copy_the_other_nodes_copy_or_the_step_before_is_saved(
    attempt: Attempt, memories: list[Address], hosts: Sequence[str], step: int
) -> None:
    weights = run_ranks(4, rank_trains, attempt.path, memories, hosts, 1)
    save(memories, range(4))
    assert_saved(attempt, step, weights)


def test_a_task_whose_others_still_run_leaves_its_shards_for_them(
    attempt: Attempt, memories: list[Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NCCL the other ranks do not notice: srun ends them when the first task has gone."""
    monkeypatch.setattr(from_memory, "_NOTES_SECONDS", 0.5)
    weights = run_ranks(2, rank_trains, attempt.path, memories, ("a", "a"), 0)
    save(memories, [1])
    for half in memories[1].halves:  # it has ended
        node_memory.write_steps(half, 0, 0, 0)
    assert catalog.files(attempt.checkpoints) == []
    save(memories, [0])
    assert_saved(attempt, 2, weights)


def test_a_note_that_comes_late_is_seen(
    attempt: Attempt, memories: list[Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk delays it until the first task has written its shards."""
    monkeypatch.setattr(from_memory, "_NOTES_SECONDS", 0.2)
    weights = run_ranks(2, rank_trains, attempt.path, memories, ("a", "a"), None)
    late = threading.Thread(target=from_memory.save, args=(memories[0],))
    write = from_memory._write_shards

    def write_first(*arguments: Any) -> None:
        if not late.ident:
            assert attempt.is_saving_memory  # the batch process must not kill the tasks
            late.start()
            note = attempt.checkpoints / ".step-note.0"
            assert wait_until(note.exists, PATIENCE, every=0.01)
        write(*arguments)

    monkeypatch.setattr(from_memory, "_write_shards", write_first)
    save(memories, [1])
    late.join(PATIENCE)
    assert_saved(attempt, 3, weights)


def rank_with_a_new_optimizer(
    rank: int, world_size: int, folder: Path, memories: Sequence[Address]
) -> list[bool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(memories[rank]))
        trained = Trained()
        snapshots = ShardSnapshots(attempt_at(folder), 1e-6, trained.shards)
        before = snapshots.is_due()
        trained.step()
        return [before, snapshots.is_due()]


def test_no_snapshot_is_due_before_the_optimizer_has_a_state(
    attempt: Attempt, memories: list[Address]
) -> None:
    """To give it one, torch would make a step: another bias correction follows."""
    assert run_ranks(2, rank_with_a_new_optimizer, attempt.path, memories)[0] == [False, True]


def test_two_lost_neighbours_cost_the_snapshot_and_leave_no_state_behind(
    attempt: Attempt, memories: list[Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_memory, "_NOTES_SECONDS", 0.5)
    run_ranks(4, rank_trains, attempt.path, memories, ("a", "b", "c", "d"), None)
    save(memories, [0, 1])
    assert catalog.files(attempt.checkpoints) == []


def rank_loops(
    rank: int, world_size: int, folder: Path, memories: Sequence[Address], steps: int
) -> tuple[int, dict[int, list[Any]]]:
    """Train in a Loop; return the step from which it resumed, and the weights of each step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(memories[rank]))
        patch.setattr(Poll, "due", lambda *_: True)
        begin = ShardSnapshots.__init__  # in a run of a person's own there are none
        patch.setattr(ShardSnapshots, "__init__", lambda s, a, _, o: begin(s, a, 1e-6, o))
        trained, weights = Trained(), {}
        loop = Loop(directory=folder, **trained.shards)
        first = loop.steps
        for _ in loop.iterations(steps):
            trained.step()
            weights[loop.steps + 1] = trained.weights
            wait(loop._snapshots)
            vars(loop._snapshots).update(_due=0.0, _not_before=0.0)
            if loop.steps + 1 == steps:
                return first, weights  # as if it were killed here
            loop.step()
        return first, weights


def test_a_killed_loop_resumes_from_memory(tmp_path: Path, memories: list[Address]) -> None:
    first, other = run_ranks(2, rank_loops, tmp_path / "run", memories, 5)
    assert first[0] == other[0] == 0
    save(memories, range(2))
    resumed = run_ranks(2, rank_loops, tmp_path / "run", memories[2:], 7)
    assert [start for start, _ in resumed] == [4, 4]
    assert [weights[5] for _, weights in resumed] == [first[1][5], other[1][5]]


def test_without_room_the_run_says_so(attempt: Attempt, memories: list[Address]) -> None:
    said = run_ranks(2, rank_without_room, attempt.path, memories)
    assert "no snapshots in memory: the shards need" in said[0][0]


def rank_without_room(
    rank: int, world_size: int, folder: Path, memories: Sequence[Address]
) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, log.to(said.append):
        patch.setenv(VARIABLE, str(memories[rank]))
        patch.setattr("clusterddp.checkpoints.shard_snapshots.free_bytes", lambda: 1024)
        trained = Trained()
        snapshots = ShardSnapshots(attempt_at(folder), 1e-6, trained.shards)
        trained.step()
        take(trained, snapshots)
        assert not snapshots.is_due()
    return said


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aaab", [3, 3, 3, 0]),
        ("abc", [1, 2, 0]),
        ("aa", [0, 1]),
    ],
)
def test_the_next_node_keeps_a_copy(hosts: str, expected: list[int]) -> None:
    assert keepers(hosts) == expected
