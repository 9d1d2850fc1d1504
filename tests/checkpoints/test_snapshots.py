"""Snapshots in a node's memory: what is in them, when one is whole, and what is made of them."""

import io
import os
import signal
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from clusterddp import log, polling
from clusterddp.checkpoints import catalog, from_memory, snapshots, state
from clusterddp.checkpoints.snapshots import Snapshots
from clusterddp.checkpoints.state import Position
from clusterddp.checkpoints.writer import Saver
from clusterddp.run import attempt as attempts
from clusterddp.run import node_memory
from clusterddp.run.attempt import Attempt, attempt_at
from clusterddp.run.node_memory import VARIABLE, Address, owner_of
from clusterddp.run.run_dir import RunDir
from tests.forked import CONTEXT
from tests.training.ranks import run_ranks


class Trained:
    """A model that changes at each step, and its snapshots."""

    def __init__(self, attempt: Attempt, *, rank: int = 0, in_ddp: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
        self.model = self.model.to(memory_format=torch.channels_last)
        self.wrappers = [DistributedDataParallel(self.model)] if in_ddp else []
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.position, self.rank = Position(), rank
        self.states: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.snapshots = Snapshots(attempt, 1e-4)

    def step(self) -> None:
        torch.manual_seed(100 * self.rank + self.position.step)
        model = self.wrappers[0] if self.wrappers else self.model
        model(torch.randn(2, 1, 5, 5)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.position.step += 1

    def take(self) -> None:
        step = self.position.step

        def collect(random_states: list[Any], copy: Any) -> Any:
            return state.collect(
                self.states, self.position, world_size=len(random_states),
                random_states=random_states, copy=copy, noted=f"step {step}",
            )  # fmt: skip

        noise = {"now": torch.full((3,), self.rank)}
        self.snapshots.take(step, self.states, self.wrappers, {}, noise, collect)

    def take_first(self) -> None:
        """Prepare the memory, and take a snapshot."""
        self.take()
        assert self.snapshots._layout
        self.snapshots._layout._allocation.join(60)
        self.take()

    def content(self) -> dict[str, Any]:
        copied: dict[str, Any] = state.copied(
            {name: each.state_dict() for name, each in self.states.items()}
        )
        return copied


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = attempts.begin(RunDir(tmp_path / "run"))
    made.checkpoints.mkdir()
    return made


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Address:
    """Memory of a task whose parent is this process."""
    made = Address.create()
    monkeypatch.setenv(VARIABLE, str(made))
    return made


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for each in zip(one, other, strict=True):
            assert_equal(*each)
    else:
        assert one == other


def saved(attempt: Attempt, step: int) -> dict[str, Any]:
    path = attempt.checkpoints / catalog.name_of(step)
    catalog.read(path)  # its checksum is right
    assert zipfile.ZipFile(path).testzip() is None
    content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def test_a_snapshot_becomes_the_checkpoint_of_its_step(attempt: Attempt, own: Address) -> None:
    trained = Trained(attempt)
    for _ in range(3):
        trained.step()
    trained.take_first()
    expected = trained.content()
    trained.step()
    from_memory.save(own)
    content = saved(attempt, 3)
    assert_equal({name: content[name] for name in expected}, expected)
    assert (content["noted"], content["step"], content["world_size"]) == ("step 3", 3, 1)
    assert content["random_states"][0]["now"].tolist() == [0, 0, 0]
    assert content["model"]._metadata == trained.content()["model"]._metadata
    mapped = torch.load(attempt.checkpoints / catalog.name_of(3), weights_only=True, mmap=True)
    assert_equal(mapped["model"], expected["model"])
    [entry] = catalog.list_verified(attempt.run)
    assert (entry.step, entry.from_memory, entry.problem) == (3, True, "")
    assert [path.name for path in attempt.checkpoints.iterdir() if path.name[0] == "."] == []


def test_a_large_record_has_the_form_for_large_ones(
    attempt: Attempt, own: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_memory, "_ZIP64_FROM", 16)
    trained = Trained(attempt)
    trained.step()
    trained.take_first()
    from_memory.save(own)
    assert_equal(saved(attempt, 1)["model"], trained.content()["model"])


def test_the_newer_of_two_is_saved_and_none_where_a_checkpoint_is_as_new(
    attempt: Attempt, own: Address
) -> None:
    trained = Trained(attempt)
    trained.step()
    trained.take_first()
    for _ in range(4):
        trained.step()
        trained.snapshots._due = 0
        trained.take()
    from_memory.save(own)
    assert [catalog.step_of(path) for path in catalog.files(attempt.checkpoints)] == [5]
    before = (attempt.checkpoints / catalog.name_of(5)).stat().st_mtime_ns
    from_memory.save(own)
    assert (attempt.checkpoints / catalog.name_of(5)).stat().st_mtime_ns == before
    (attempt.checkpoints / catalog.name_of(5)).rename(
        attempt.checkpoints / catalog.name_of(6)
    )  # one of the ranks' own, which is newer
    from_memory.save(own)
    assert [catalog.step_of(path) for path in catalog.files(attempt.checkpoints)] == [6]


def test_of_a_superseded_attempt_none_is_saved(attempt: Attempt, own: Address) -> None:
    trained = Trained(attempt)
    trained.step()
    trained.take_first()
    attempts.begin(attempt.run)
    from_memory.save(own)
    assert catalog.files(attempt.checkpoints) == []


def test_a_full_disk_is_named_and_leaves_nothing(
    attempt: Attempt, own: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(attempt)
    trained.step()
    trained.take_first()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said: list[str] = []
    with log.to(said.append):
        from_memory.save(own)
    assert said and "was not saved: No space left on device" in said[0]
    assert [path.name for path in attempt.checkpoints.iterdir()] == []


def killed_while_it_copies(address: str, folder: Path) -> None:
    os.environ[VARIABLE] = address
    trained = Trained(attempt_at(folder))
    trained.step()
    trained.take_first()
    trained.step()
    copy, copied = torch.Tensor.copy_, []

    def copy_(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        copied.append(copy(self, *given, **named))
        if len(copied) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return self

    torch.Tensor.copy_ = copy_  # type: ignore
    trained.snapshots._due = 0
    trained.take()


def test_a_rank_that_is_killed_while_it_copies_leaves_the_snapshot_before(
    attempt: Attempt, own: Address
) -> None:
    process = CONTEXT.Process(target=killed_while_it_copies, args=(str(own), attempt.path))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    from_memory.save(own)
    before = Trained(attempt)
    before.step()
    assert_equal(saved(attempt, 1)["model"], before.content()["model"])


def take_as_rank(
    rank: int, world_size: int, addresses: list[str], folder: Path, hosts: list[str], slow: int
) -> bytes:
    """Take three snapshots, of which one rank does not copy the last; return the states."""
    os.environ[VARIABLE] = addresses[rank]
    os.environ["SLURMD_NODENAME"] = hosts[rank]
    trained = Trained(attempt_at(folder), rank=rank, in_ddp=True)
    trained.step()
    trained.take_first()
    seen = {}
    for step in (2, 3):
        trained.step()
        seen[step] = trained.content()
        trained.snapshots._due = 0
        if step == 3 and rank == slow:
            layout: Any = trained.snapshots._layout
            layout.copy = lambda *_: None
        trained.take()
    return state.to_bytes(seen)  # tensors would go through memory that ends with the rank


def loaded(data: bytes) -> dict[int, Any]:
    content: dict[int, Any] = torch.load(io.BytesIO(data), weights_only=False)
    return content


def test_the_ranks_of_a_node_share_the_copy_and_one_delayed_leaves_the_one_before(
    attempt: Attempt,
) -> None:
    addresses = [Address.create() for _ in range(3)]
    texts = [str(address) for address in addresses]
    [first, *_] = run_ranks(3, take_as_rank, texts, attempt.path, ["h1", "h1", "h1"], 2)
    halves = addresses[0].halves
    used = [os.fstat(address.halves[0]).st_blocks for address in addresses]
    assert all(used), "each rank has copied a part"
    from_memory.save(addresses[1])
    content = saved(attempt, 2)
    assert_equal(content["optimizer"], loaded(first)[2]["optimizer"])
    assert_equal(content["model"], loaded(first)[2]["model"])  # rank 0's statistics of BatchNorm
    assert [each["now"][0].item() for each in content["random_states"]] == [0, 1, 2]
    assert halves != addresses[1].halves


def test_another_node_has_the_whole_newer_one(attempt: Attempt) -> None:
    """Rank 1 is alone on its host, and rank 0, on the other, has not copied the third."""
    addresses = [Address.create() for _ in range(2)]
    texts = [str(address) for address in addresses]
    [first, _] = run_ranks(2, take_as_rank, texts, attempt.path, ["h1", "h2"], 0)
    from_memory.save(addresses[1])
    content = saved(attempt, 3)
    assert_equal(content["model"], loaded(first)[3]["model"])  # rank 0's statistics here too
    from_memory.save(addresses[0])
    assert [catalog.step_of(path) for path in catalog.files(attempt.checkpoints)] == [3]


def test_a_task_that_cannot_reach_the_others_says_so_unless_one_has_saved(attempt: Attempt) -> None:
    addresses = [Address.create() for _ in range(2)]
    run_ranks(2, take_as_rank, [*map(str, addresses)], attempt.path, ["h1", "h1"], -1)
    for half in addresses[0].halves:
        os.close(half)
    said: list[str] = []
    with log.to(said.append):
        from_memory.save(addresses[1])
    assert len(said) == 1 and "was not saved" in said[0]
    (attempt.checkpoints / catalog.name_of(9)).touch()
    with log.to(said.append):
        from_memory.save(addresses[1])
    assert len(said) == 1


def test_without_room_there_are_none_and_the_run_says_so(
    attempt: Attempt, own: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(attempt)
    trained.step()
    monkeypatch.setattr(snapshots, "free_bytes", lambda: 3 * (1 << 10))
    said: list[str] = []
    with log.to(said.append):
        trained.take()
    assert said and "no snapshots in memory: they need" in said[0]
    assert not trained.snapshots.is_due()
    from_memory.save(own)
    assert catalog.files(attempt.checkpoints) == []


def test_a_state_that_raises_costs_the_snapshots_and_not_the_training(
    attempt: Attempt, own: Address
) -> None:
    trained = Trained(attempt)
    trained.step()

    class Odd(nn.Identity):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            raise ValueError("not now")

    trained.states["odd"] = Odd()
    said: list[str] = []
    with log.to(said.append):
        trained.take_first()
    assert said == [
        "no snapshots in memory: ValueError: not now. A failed rank costs the steps since the last "
        "checkpoint"
    ]
    assert not trained.snapshots.is_due()
    from_memory.save(own)
    assert catalog.files(attempt.checkpoints) == []


def one_cannot(rank: int, world_size: int, addresses: list[str], folder: Path) -> list[str]:
    os.environ[VARIABLE] = addresses[rank]
    trained = Trained(attempt_at(folder), rank=rank, in_ddp=True)
    trained.step()
    trained.take()
    trained.snapshots._problem = "OSError: no memory" if rank else ""
    said: list[str] = []
    with log.to(said.append):
        trained.take()
    return said


def test_one_rank_without_memory_turns_them_off_for_all(attempt: Attempt) -> None:
    texts = [str(Address.create()) for _ in range(2)]
    [first, second] = run_ranks(2, one_cannot, texts, attempt.path)
    assert "no snapshots in memory: OSError: no memory" in first[0] and second == []


def different(rank: int, world_size: int, addresses: list[str], folder: Path) -> list[str]:
    os.environ[VARIABLE] = addresses[rank]
    trained = Trained(attempt_at(folder), rank=rank, in_ddp=True)
    trained.step()
    if rank:
        trained.optimizer.state.clear()
    said: list[str] = []
    with log.to(said.append):
        trained.take()
    return said


def test_ranks_with_other_states_take_none(attempt: Attempt) -> None:
    texts = [str(Address.create()) for _ in range(2)]
    [first, second] = run_ranks(2, different, texts, attempt.path)
    assert "the ranks have different parameters" in first[0] and second == []


def late(rank: int, world_size: int, addresses: list[str], folder: Path) -> tuple[int, int]:
    """Return the steps in this rank's halves, after rank 0's clock was behind and after it was not.

    A rank that took part by its own clock would wait for the others for good.
    """
    os.environ[VARIABLE] = addresses[rank]
    trained = Trained(attempt_at(folder), rank=rank, in_ddp=True)
    trained.step()
    trained.snapshots._first_due = 0.0 if rank else float("inf")
    seen = []
    for _ in range(2):
        trained.take_first()
        layout: Any = trained.snapshots._layout
        seen.append(node_memory.read_steps(layout._halves[0], layout._member)[1])
        trained.snapshots._first_due = 0.0
    return seen[0], seen[1]


def test_the_ranks_take_the_first_one_together(attempt: Attempt) -> None:
    texts = [str(Address.create()) for _ in range(2)]
    assert run_ranks(2, late, texts, attempt.path) == [(0, 2), (0, 2)]


def test_a_changed_model_is_laid_out_again(attempt: Attempt, own: Address) -> None:
    trained = Trained(attempt)
    trained.step()
    trained.take_first()
    added = nn.Linear(3, 3)
    trained.states["more"] = added
    trained.optimizer.add_param_group({"params": [*added.parameters()]})
    trained.step()
    trained.snapshots._due = 0
    trained.take()  # lays out
    trained.take_first()
    from_memory.save(own)
    assert_equal(saved(attempt, 2)["more"], added.state_dict())


@pytest.mark.parametrize("members", [1, 2, 3, 8])
def test_each_tensor_has_one_owner_and_the_owners_have_similar_parts(members: int) -> None:
    sizes = [64 * (1 + 7 * number % 5) for number in range(100)]
    offsets = [sum(sizes[:number]) for number in range(100)]
    total = sum(sizes)
    owners = [owner_of(o, s, total, members) for o, s in zip(offsets, sizes, strict=True)]
    assert owners == sorted(owners) and {*owners} == {*range(members)}
    parts = [sum(s for s, w in zip(sizes, owners, strict=True) if w == m) for m in range(members)]
    assert max(parts) - min(parts) <= 2 * max(sizes)


def test_another_process_under_the_same_number_is_not_taken_for_the_owner(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        address = Address(os.getpid(), (file.fileno(), file.fileno()), "0" * 8)
        with pytest.raises(FileNotFoundError):
            address.open()
    assert Address.here({VARIABLE: "1:2:3:zz"}) is None and Address.here({}) is None


def test_the_memory_has_no_name_and_is_gone_with_its_owner() -> None:
    argv = ["find", "/dev/shm", "-name", "*clusterddp*"]
    before = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    address = Address.create()
    node_memory.write_header(address.halves[0], Path("/run"), [address])
    assert before == subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    assert node_memory.read_members(address.halves[0]) == [address]
    assert node_memory.read_attempt(address.halves[0]) == Path("/run")


def hold_the_claim(attempt: Attempt, step: int) -> Callable[[], None]:
    claim = attempt.checkpoints / f".{catalog.name_of(step)}{attempts.FROM_MEMORY}"
    claim.touch()
    return claim.unlink


def test_one_task_writes_and_the_others_wait_for_it(
    attempt: Attempt, own: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(attempt)
    trained.step()
    trained.take_first()
    done = hold_the_claim(attempt, 1)
    looks = 0

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        assert catalog.files(attempt.checkpoints) == []
        if looks == 3:
            done()

    assert attempt.is_saving_memory
    monkeypatch.setattr(polling, "pause", pause)
    from_memory.save(own)
    assert looks == 3 and [*map(catalog.step_of, catalog.files(attempt.checkpoints))] == [1]
    assert not attempt.is_saving_memory


def test_a_disk_that_delays_the_look_does_not_make_a_claim_old(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_the_claim(attempt, 1)
    [claim] = attempt.checkpoints.iterdir()
    os.utime(claim, (1, 1))
    plain = tempfile.NamedTemporaryFile

    def late(**options: Any) -> Any:  # the writer's renewal waited as long
        os.utime(claim)
        return plain(**options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", late)
    assert attempt.is_saving_memory


def test_the_ranks_own_save_is_left_alone_however_long_the_disk_takes(
    attempt: Attempt, own: Address, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    trained = Trained(attempt)
    trained.step()
    trained.take_first()
    arrived, done, looks, plain = threading.Event(), threading.Event(), 0, os.fsync

    def fsync(descriptor: int) -> None:
        if threading.current_thread().name == "saver":
            arrived.set()
            done.wait(60)
        plain(descriptor)

    def pause(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            done.set()
            assert saver.wait()

    monkeypatch.setattr(os, "fsync", fsync)
    saver = Saver(attempt, 3)
    saver.save(state.collect(trained.states, trained.position, world_size=1, random_states=[None]))
    assert arrived.wait(60)
    [draft] = [p for p in attempt.checkpoints.glob(".step-*.pt.*") if p.suffix != ".ranks"]
    os.utime(draft, (1, 1))  # written long ago, and still on its way to the disk
    monkeypatch.setattr(polling, "pause", pause)
    from_memory.save(own)
    assert looks == 3 and "from the memory" not in capsys.readouterr().out
    assert {path.name for path in attempt.checkpoints.glob(".*")} == set()


def test_a_claim_of_a_dead_writer_is_taken_over(attempt: Attempt, own: Address) -> None:
    trained = Trained(attempt)
    trained.step()
    trained.take_first()
    hold_the_claim(attempt, 1)
    [claim] = attempt.checkpoints.iterdir()
    os.utime(claim, (1, 1))
    assert not attempt.is_saving_memory
    from_memory.save(own)
    assert [*map(catalog.step_of, catalog.files(attempt.checkpoints))] == [1]
