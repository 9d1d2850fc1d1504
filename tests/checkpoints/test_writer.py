import errno
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clusterddp import log
from clusterddp.checkpoints import catalog, state
from clusterddp.checkpoints import writer as saver
from clusterddp.checkpoints.catalog import Best, checksum_of, name_of, read_best
from clusterddp.checkpoints.state import Position
from clusterddp.checkpoints.writer import Saver
from clusterddp.errors import CheckpointError
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.checkpoints.made_checkpoints import DAMAGE, make
from tests.forked import CONTEXT
from tests.hostile import CARRIED, REFUSED
from tests.training import ranks

PATIENCE = ranks.PATIENCE


def content_of(step: int, best: int | None = None, size: int = 64) -> dict[str, Any]:
    torch.manual_seed(step)
    model = nn.Linear(size, size)
    content = state.collect(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)},
        Position(step=step), world_size=1, random_states=[None],
        best=None if best is None else Best(best / 1000, best),
    )  # fmt: skip
    return dict(content)


class Place:
    """The ninth attempt of a run, what was said, and a saver in its directory."""

    def __init__(self, run: Path) -> None:
        self.attempt = Attempt(RunDir(run), 9)
        self.folder = self.attempt.checkpoints
        self.said: list[str] = []

    def saver(self, keep_last: int = 3) -> Saver:
        return Saver(self.attempt, keep_last)

    def of_attempt(self, number: int) -> Path:
        """The directory of another attempt, made."""
        folder = Attempt(self.attempt.run, number).checkpoints
        folder.mkdir(parents=True)
        return folder

    @property
    def steps(self) -> list[int]:
        return [catalog.step_of(path) for path in catalog.files(self.folder)]

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}

    def path(self, step: int) -> Path:
        return self.folder / name_of(step)

    def holds_only(self, *steps: int, best: bool = False) -> bool:
        """The checkpoints, each whole, their checksums, and no left-over of any kind."""
        for step in steps:
            state.load(self.path(step))
        pairs = {file.name for s in steps for file in (self.path(s), checksum_of(self.path(s)))}
        return self.names == pairs | ({"best.json"} if best else set())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "run")
    made.folder.mkdir(parents=True)
    with log.to(made.said.append):
        yield made


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing reaches the disk until the event is set."""
    event, fsync = threading.Event(), os.fsync

    def late(descriptor: int) -> None:
        assert event.wait(PATIENCE)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", late)
    yield event
    event.set()


def test_a_checkpoint_lies_beside_its_checksum(place: Place) -> None:
    writer = place.saver()
    assert writer.last_step is None and not writer.wait()
    writer.save(content_of(7))
    assert writer.wait()
    assert writer.last_step == 7
    assert place.holds_only(7)
    digest, name = checksum_of(place.path(7)).read_text().split()
    assert (digest, name) == (
        hashlib.sha256(place.path(7).read_bytes()).hexdigest(), "step-00000007.pt",
    )  # fmt: skip
    assert place.path(7).stat().st_mode & 0o077 == 0
    assert torch.equal(state.load(place.path(7))["model"]["weight"],
                       content_of(7)["model"]["weight"])  # fmt: skip
    assert place.said == []


def test_saving_returns_at_once_and_the_next_one_waits(
    place: Place, slow_disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four seconds pass once the second save waits for the first, which the disk holds up."""
    now, at_disk, waits = [0.0], threading.Event(), threading.Event()
    ours, fsync = threading.current_thread(), os.fsync

    def clock() -> float:
        read = now[0]
        if threading.current_thread() is ours:
            waits.set()
        return read

    def reached(descriptor: int) -> None:
        at_disk.set()
        fsync(descriptor)

    def go_on() -> None:
        assert waits.wait(PATIENCE)
        now[0] += 4.0
        slow_disk.set()

    monkeypatch.setattr(os, "fsync", reached)
    monkeypatch.setattr("time.perf_counter", clock)
    writer = place.saver()
    writer.save(content_of(1), copy_seconds=0.25)
    assert at_disk.wait(PATIENCE)
    assert place.steps == [] and writer.costs.blocked_seconds == 0
    threading.Thread(target=go_on).start()
    writer.save(content_of(2), copy_seconds=0.5)
    assert place.steps[-1:] == [1]
    assert writer.costs.blocked_seconds == 4
    assert writer.wait()
    costs = writer.costs
    assert (costs.saves, costs.failed, costs.copy_seconds) == (2, 0, 0.75)
    assert (costs.write_seconds, costs.longest_seconds) == (4, 4.25)
    assert costs.bytes == sum(place.path(step).stat().st_size for step in (1, 2))


def test_the_last_ones_and_the_best_are_kept(place: Place) -> None:
    writer = place.saver(keep_last=2)
    for step in (1, 2, 3, 4):
        writer.save(content_of(step, best=1))
    assert writer.wait() and place.holds_only(1, 3, 4, best=True)
    assert json.loads((place.folder / "best.json").read_text()) == {"step": 1, "accuracy": 0.001}
    writer.save(content_of(5, best=5))
    assert writer.wait() and place.holds_only(4, 5, best=True)
    for step in (6, 7, 8):
        writer.save(content_of(step, best=5))
    assert writer.wait() and place.holds_only(5, 7, 8, best=True)
    assert read_best(place.folder) == Best(0.005, 5)


def test_a_best_that_was_not_saved_is_not_named(place: Place) -> None:
    writer = place.saver(keep_last=1)
    writer.save(content_of(1, best=1))
    writer.save(content_of(3, best=2))
    assert writer.wait() and place.holds_only(1, 3, best=True)
    assert read_best(place.folder) == Best(0.001, 1)


def test_without_a_new_mark_the_old_and_the_new_best_are_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path, best: Best) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = place.saver(keep_last=1)
    writer.save(content_of(1, best=1))
    assert writer.wait()
    with monkeypatch.context() as patched:
        patched.setattr(catalog, "write_best", refused)
        for step in (2, 3):
            writer.save(content_of(step, best=2))
        assert writer.wait() and place.holds_only(1, 2, 3, best=True)
    [line] = place.said
    assert "best.json: No space left" in line
    writer.save(content_of(4, best=2))
    assert writer.wait() and place.holds_only(2, 4, best=True)


def test_what_a_crash_could_take_is_on_disk_before_anything_relies_on_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = place.saver(keep_last=1)
    writer.save(content_of(1))
    assert writer.wait()
    done: list[str] = []
    fsync, replace, unlink, stored = os.fsync, Path.replace, Path.unlink, catalog.stored_sha256

    def shown(name: str) -> str:
        """Without the random end of a temporary file."""
        return ".".join(name.split(".")[:-1]) if name.startswith(".") else name

    def synced(descriptor: int) -> None:
        done.append(f"sync {shown(Path(f'/proc/self/fd/{descriptor}').readlink().name)}")
        fsync(descriptor)

    def replaced(path: Path, target: Path) -> Path:
        done.append(f"rename {target.name}")
        return replace(path, target)

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        if not path.name.startswith("."):
            done.append(f"remove {path.name}")
        unlink(path, missing_ok)

    def verified(path: Path) -> str:
        done.append(f"verify {shown(path.name)}")
        return stored(path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    monkeypatch.setattr(catalog, "stored_sha256", verified)
    writer.save(content_of(2))
    assert writer.wait()
    assert done == [
        "sync .step-00000002.pt", "verify .step-00000002.pt", "sync .step-00000002.pt.sha256",
        "rename step-00000002.pt.sha256", "sync checkpoints", "rename step-00000002.pt",
        "sync checkpoints", "remove step-00000001.pt", "remove step-00000001.pt.sha256",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_not_counted_among_those_that_are_kept(place: Place, damage: str) -> None:
    writer = place.saver(keep_last=2)
    for step in (1, 2, 3):
        writer.save(content_of(step))
    assert writer.wait() and place.steps == [3, 2]
    DAMAGE[damage][0](place.path(3))
    writer.save(content_of(4))
    assert writer.wait() and place.steps == [4, 3, 2]
    for step in (5, 6):
        writer.save(content_of(step))
    assert writer.wait()
    assert [step for step in place.steps if step > 3] == [6, 5]


def test_nothing_is_removed_and_nothing_published_before_verification(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = place.saver(keep_last=1)
    writer.save(content_of(1))
    assert writer.wait()
    stored = catalog.stored_sha256

    def seen(path: Path) -> str:
        assert place.steps == [1]
        return "0" * 64

    monkeypatch.setattr(catalog, "stored_sha256", seen)
    writer.save(content_of(2))
    assert not writer.wait()
    assert place.holds_only(1)
    assert "the bytes read back differ from those written" in place.said[0]
    assert "the last valid one is from step 1" in place.said[0]
    monkeypatch.setattr(catalog, "stored_sha256", stored)
    writer.save(content_of(3))
    assert writer.wait() and place.holds_only(3)


def test_a_flipped_bit_on_the_way_to_the_disk_is_noticed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def flipping(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.name.startswith(".step-") and ".sha256" not in path.name:
            with path.open("r+b") as file:
                file.seek(1000)
                byte = file.read(1)[0]
                file.seek(1000)
                file.write(bytes([byte ^ 1]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flipping)
    writer = place.saver()
    writer.save(content_of(1))
    assert not writer.wait() and place.holds_only() and writer.costs.failed == 1


def test_a_failing_write_is_said_and_training_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = place.saver(keep_last=1)
    fsync, broken = os.fsync, [errno.ENOSPC, errno.EDQUOT, errno.EIO]

    def failing(descriptor: int) -> None:
        if broken:
            code = broken.pop(0)
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for step in (1, 2, 3):
        writer.save(content_of(step))
        assert not writer.wait() and place.holds_only()
    for line, reason in zip(
        place.said, ("No space left", "Disk quota exceeded", "Input/output error"), strict=True
    ):
        assert reason in line and "Training continues from memory" in line
        assert "there is no checkpoint here yet" in line
    writer.save(content_of(4))
    assert writer.wait() and place.holds_only(4)
    assert (writer.costs.saves, writer.costs.failed, writer.last_step) == (1, 3, 4)


@pytest.mark.parametrize("failing", range(8))
def test_whichever_step_of_a_save_fails_the_old_one_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The n-th of all fsyncs and renames of a save fails."""
    writer = place.saver(keep_last=1)
    writer.save(content_of(1))
    assert writer.wait()
    count = iter(range(100))

    def breaking(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            if next(count) == failing:
                raise OSError(errno.EIO, "Input/output error")
            return function(*arguments)

        return called

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", breaking(os.fsync))
        patched.setattr(Path, "replace", breaking(Path.replace))
        writer.save(content_of(2))
        whole = writer.wait()
    calls = next(count)
    assert (1 in place.steps) or whole
    assert catalog.newest_in(place.folder) is not None
    assert bool(place.said) == (failing < calls)
    assert not [name for name in place.names if name.startswith(".")]
    writer.save(content_of(3))
    assert writer.wait() and place.holds_only(3)


def test_a_file_that_may_not_grow_is_a_full_disk(place: Place) -> None:
    """RLIMIT_FSIZE gives EFBIG from write(2), as a full disk gives ENOSPC; needs no root."""
    writer = place.saver(keep_last=1)
    writer.save(content_of(1))
    assert writer.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        writer.save(content_of(2))
        assert not writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert place.holds_only(1) and "File too large" in place.said[0]
    writer.save(content_of(3))
    assert writer.wait() and place.holds_only(3)


def test_shards_go_with_a_checkpoint_that_cannot_be_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, shards = place.saver(), catalog.shards_of(place.path(1))
    shards.mkdir()
    (shards / "__0_0.distcp").touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: Path("/nowhere").stat())
        writer.save(content_of(1), shards=lambda: ({f"{shards.name}/__0_0.distcp": "0"}, ""))
        assert not writer.wait()
    assert place.holds_only()


def test_a_folder_that_is_gone_is_said_and_used_again_when_it_is_back(place: Place) -> None:
    writer = place.saver()
    shutil.rmtree(place.folder)
    writer.save(content_of(1))
    assert not writer.wait() and "No such file or directory" in place.said[0]
    place.folder.mkdir()
    writer.save(content_of(2))
    assert writer.wait() and place.holds_only(2)


@pytest.mark.parametrize("surfaces", ["save", "wait"])
def test_any_other_error_surfaces(
    place: Place, monkeypatch: pytest.MonkeyPatch, surfaces: str
) -> None:
    def broken(content: dict[str, Any]) -> bytes:
        raise ZeroDivisionError("a defect")

    writer = place.saver()
    monkeypatch.setattr(saver, "to_bytes", broken)
    writer.save(content_of(1))
    with pytest.raises(ZeroDivisionError, match="a defect"):
        if surfaces == "wait":
            writer.wait()
        else:
            writer.save(content_of(2))
    monkeypatch.undo()
    assert not writer.wait()  # it is raised once
    writer.save(content_of(3))
    assert writer.wait() and place.holds_only(3)


def test_a_superseded_attempt_publishes_nothing_and_says_so_once(place: Place) -> None:
    older = place.of_attempt(8)
    make(older, 1)
    writer = place.saver(keep_last=1)
    make(place.folder, 2)
    place.of_attempt(10)
    for step in (3, 4):
        writer.save(content_of(step))
        assert not writer.wait()
    assert place.names == {name_of(2), f"{name_of(2)}.sha256"}
    assert catalog.files(older)
    [line] = place.said
    assert "a later attempt of the run is training" in line
    assert (writer.costs.saves, writer.costs.failed, writer.last_step) == (0, 0, None)


def test_an_attempt_superseded_while_it_publishes_removes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, False, True])
    monkeypatch.setattr(Attempt, "is_superseded", property(lambda _: next(answers)))
    writer = place.saver(keep_last=1)
    for step in (1, 2):
        writer.save(content_of(step))
        assert writer.wait()
    assert place.holds_only(1, 2)


def test_earlier_attempts_are_emptied_once_this_one_has_saved(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.of_attempt(3).rmdir()
    folders = [place.of_attempt(number) for number in (1, 2)]
    for folder in folders:
        make(folder, 1)
        catalog.write_best(folder, Best(0.5, 1))
        (folder / "notes.txt").write_text("a person's own")
    writer = place.saver()
    with monkeypatch.context() as patched:
        patched.setattr(catalog, "stored_sha256", lambda _: "")
        writer.save(content_of(2))
        assert not writer.wait()
    assert all(catalog.files(folder) for folder in folders)
    writer.save(content_of(3))
    assert writer.wait()
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [
        ["notes.txt"],
        ["notes.txt"],
    ]


def test_what_cannot_be_removed_is_only_said(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(catalog, "remove", refused)
    writer = place.saver(keep_last=1)
    for step in (1, 2, 3):
        writer.save(content_of(step))
    assert writer.wait() and place.steps == [3, 2, 1]
    [line] = place.said
    assert "cannot delete the checkpoint" in line and "Permission denied" in line
    assert writer.costs.failed == 0


def test_the_one_from_which_the_attempt_started_is_not_written_again(place: Place) -> None:
    source = make(place.folder, 5)
    before = source.stat()
    writer = place.saver()
    assert writer.last_step == 5
    writer.save(content_of(5, best=5))
    assert writer.wait()
    assert source.stat().st_ino == before.st_ino and source.read_bytes()
    assert read_best(place.folder) == Best(0.005, 5)
    DAMAGE["flipped"][0](source)
    writer.save(content_of(5))
    assert writer.wait() and place.holds_only(5, best=True)


def test_left_overs_of_a_killed_start_are_removed_at_the_next(place: Place) -> None:
    make(place.folder, 1)
    for name in (".step-00000002.pt.x", "step-00000002.pt.sha256"):
        (place.folder / name).write_bytes(b"half")
    assert place.saver().last_step == 1
    assert place.names == {name_of(1), f"{name_of(1)}.sha256"}


def test_a_damaged_one_in_the_folder_is_named_at_the_start(place: Place) -> None:
    make(place.folder, 1)
    DAMAGE["torn"][0](make(place.folder, 2))
    assert place.saver().last_step == 1
    assert "skipping step-00000002.pt" in place.said[0]


@pytest.mark.parametrize("name", [name for name in CARRIED + REFUSED if name and "\0" not in name])
def test_hostile_folder_names(tmp_path: Path, name: str) -> None:
    place = Place(tmp_path / name)
    place.folder.mkdir(parents=True)
    writer = place.saver(keep_last=1)
    for step in (1, 2):
        writer.save(content_of(step, best=2, size=2))
    assert writer.wait() and place.holds_only(2, best=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.slow
def test_the_process_can_leave_while_a_write_hangs(tmp_path: Path) -> None:
    program = (
        "import os, sys, threading, time\n"
        "from pathlib import Path\n"
        "from tests.checkpoints.test_writer import Place, content_of\n"
        "hangs = threading.Event()\n"
        "os.fsync = lambda _: (hangs.set(), time.sleep(1000))\n"
        "place = Place(Path(sys.argv[1]))\n"
        "place.folder.mkdir(parents=True)\n"
        "writer = place.saver()\n"
        "writer.save(content_of(1))\n"
        "assert hangs.wait(60)\n"  # not while it is inside torch: cli/main.py is for that
        "print('left')\n"
    )
    got = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=Path(__file__).parents[2], check=False,
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (got.returncode, got.stdout) == (0, "left\n"), got.stderr


def _save_without_end(run: Path, first: int, announce: int) -> None:
    """Tells of every step that is verified, in a line each."""
    torch.set_num_threads(1)
    writer = Place(run).saver(keep_last=2)
    told = writer.last_step
    for step in range(first, first + 1_000_000):
        writer.save(content_of(step, best=step - (step - first) % 3, size=200))
        if writer.last_step != told:
            told = writer.last_step
            os.write(announce, f"{told}\n".encode())


def _child(run: Path, first: int, fifo: Path) -> None:
    _save_without_end(run, first, os.open(fifo, os.O_WRONLY))


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save_a_whole_one_is_left(place: Place, tmp_path: Path) -> None:
    fifo = tmp_path / "announced"
    os.mkfifo(fifo)
    chance = random.Random(0)
    announced = leftovers = 0
    for _ in range(20):
        process = CONTEXT.Process(target=_child, args=(place.attempt.run.path, announced + 3, fifo))
        process.start()
        with fifo.open() as lines:
            first = lines.readline()
            time.sleep(chance.uniform(0, 0.05))
            process.kill()
            process.join()
            told = [int(line) for line in [first, *lines] if line.endswith("\n")]
        assert told and process.exitcode == -9
        found = catalog.newest_in(place.folder)  # nothing looks damaged
        assert found and catalog.step_of(found) >= told[-1]
        assert state.load(found)["step"] == catalog.step_of(found)
        leftovers += any(name.startswith(".") for name in place.names)
        catalog.remove_leftovers(place.folder)
        assert place.holds_only(*place.steps, best=True)
        announced = catalog.step_of(found)
    assert leftovers, "no kill came in the middle of a save"


def test_a_folder_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.attempt.path.mkdir(parents=True)
    place.folder.write_text("")
    with pytest.raises(CheckpointError, match=r"cannot read the directory .*: Not a directory"):
        place.saver()
