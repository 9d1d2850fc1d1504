import errno
import os
from pathlib import Path

import pytest

from clusterddp.checkpoints import files
from clusterddp.checkpoints.catalog import listing, newest
from clusterddp.checkpoints.files import Best, UnusableError, name_of, read_best
from clusterddp.checkpoints.inherit import adopt
from clusterddp.errors import CheckpointError
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.checkpoints.made_checkpoints import DAMAGE, attempt, names_in, steps_in


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "run"
    path.mkdir()
    return RunDir(path)


def test_a_new_attempt_gets_its_source_those_before_it_and_the_best(run: RunDir) -> None:
    first = attempt(run, 1, 100, 200, 300, 400, 500, best=200)
    third = attempt(run, 3, start=None)
    third.checkpoints.rmdir()
    source = newest(run)
    assert source
    got = adopt(third, source, 2)
    assert got == third.checkpoints / name_of(500)
    assert steps_in(third.checkpoints) == [500, 400, 200]
    assert read_best(third.checkpoints) == Best(0.9, 200)
    assert got.samefile(source)
    # Neither side can take them from the other.
    for path in first.checkpoints.iterdir():
        path.unlink()
    for step in (500, 400, 200):
        files.read(third.checkpoints / name_of(step))
    assert names_in(third.path) == ["checkpoints"]
    assert third.checkpoints.stat().st_mode & 0o777 == 0o700


def test_nothing_beyond_the_source_is_handed_on(run: RunDir, logged: list[str]) -> None:
    first = attempt(run, 1, 100, 200, 300, 400, best=400)
    (first.checkpoints / name_of(400)).write_bytes(b"")
    (first.checkpoints / name_of(200)).write_bytes(b"")
    second = Attempt(run, 2)
    second.path.mkdir()
    adopt(second, newest(run), 3)
    assert steps_in(second.checkpoints) == [300, 100]
    assert read_best(second.checkpoints) is None
    assert [line.split(":")[0] for line in logged] == [
        "passing over step-00000400.pt", "passing over step-00000200.pt",
    ]  # fmt: skip


def test_the_best_can_be_named_by_what_the_source_holds(run: RunDir) -> None:
    first = attempt(run, 1, 100, 200, 300, best=300)
    second = Attempt(run, 2)
    second.path.mkdir()
    adopt(second, first.checkpoints / name_of(200), 1, best=Best(0.5, 100))
    assert steps_in(second.checkpoints) == [200, 100]
    assert read_best(second.checkpoints) == Best(0.5, 100)
    third = Attempt(run, 3)
    third.path.mkdir()
    adopt(third, second.checkpoints / name_of(200), 1, best=Best(0.5, 50))  # long removed
    assert steps_in(third.checkpoints) == [200]
    assert read_best(third.checkpoints) is None


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_nothing_can_go_on_from_is_not_handed_on(
    run: RunDir, damage: str, logged: list[str]
) -> None:
    first = attempt(run, 1, 100, 200, 300)
    DAMAGE[damage][0](first.checkpoints / name_of(200))
    second = Attempt(run, 2)
    second.path.mkdir()
    adopt(second, first.checkpoints / name_of(300), 3)
    assert steps_in(second.checkpoints) == [300, 100]
    assert len(logged) == 1 and logged[0].startswith(f"passing over {name_of(200)}")


def test_what_is_handed_on_comes_from_all_earlier_attempts(run: RunDir) -> None:
    attempt(run, 1, 100, 200, 300)
    attempt(run, 2, 250, start=200)
    third = Attempt(run, 3)
    third.path.mkdir()
    adopt(third, newest(run), 5)
    assert steps_in(third.checkpoints) == [250, 200, 100]


def test_a_checkpoint_of_another_run_stays_there(run: RunDir, tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    source = attempt(other, 1, 7).checkpoints / name_of(7)
    for number, chosen in ((1, source), (2, None)):
        made = Attempt(run, number)
        made.path.mkdir(parents=True)
        assert adopt(made, chosen, 3) == chosen
        assert list(made.checkpoints.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP])
def test_where_there_are_no_hard_links_copies_are_made(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    first = attempt(run, 1, 100, 200, best=200)

    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    second = attempt(run, 2, start=200)
    second.checkpoints.rmdir()
    source = first.checkpoints / name_of(200)
    got = adopt(second, source, 2)
    assert got and not got.samefile(source)
    assert got.read_bytes() == source.read_bytes()
    assert got.stat().st_mtime == source.stat().st_mtime
    assert steps_in(second.checkpoints) == [200, 100]
    assert [(entry.step, entry.attempt) for entry in listing(run)] == [(200, 2), (100, 2)]


def test_a_folder_is_handed_on_whole_or_not_at_all(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attempt(run, 1, 100, 200)
    second = Attempt(run, 2)
    second.path.mkdir()
    link, count = os.link, iter(range(10))

    def full(source: Path, target: Path) -> None:
        if next(count) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        link(source, target)

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        adopt(second, first.checkpoints / name_of(200), 2)
    assert list(second.path.iterdir()) == []
    with pytest.raises(CheckpointError, match="has gone since"):
        adopt(second, first.checkpoints / name_of(999), 2)
    (first.checkpoints / name_of(200)).write_bytes(b"")
    with pytest.raises(UnusableError):
        adopt(second, first.checkpoints / name_of(200), 2)
    assert list(second.path.iterdir()) == []
