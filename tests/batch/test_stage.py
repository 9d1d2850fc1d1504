"""The directory of the copies, and the one job that packs."""

import threading
from pathlib import Path
from typing import Any

import pytest

from clusterddp import polling
from clusterddp.batch import stage
from clusterddp.staging import environment, node
from clusterddp.staging.environment import Environment, StagingError

_FOUND = Environment({"env": "/shared/env"}, {"env": "/shared/env"}, ())


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Types of file systems by path; the others are ext4."""
    types: dict[str, str] = {}
    monkeypatch.setattr(stage, "file_system_type", lambda path, _: types.get(path, "ext4"))
    return types


def test_auto_takes_the_first_directory_that_fits(
    shared: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    environ = {"SLURM_TMPDIR": str(first), "TMPDIR": str(second)}
    first.mkdir()
    second.mkdir()
    assert stage.choose("auto", "d", 0, environ) == first
    shared[str(first)] = "lustre"
    assert stage.choose("auto", "d", 0, environ) == second
    assert stage.choose("auto", "d", 0, {}) == Path("/tmp")
    monkeypatch.setattr(node, "forbids_programs", lambda path: path == second)
    assert stage.choose("auto", "d", 0, environ) == Path("/tmp")
    monkeypatch.setattr(node, "free_bytes", lambda _: 1_000_000)
    with pytest.raises(
        StagingError,
        match=r"needs 5\.0 GB .*lustre, .*second is mounted noexec, /tmp has 1\.0 MB free",
    ):
        stage.choose("auto", "d", 5_000_000_000, environ)


def test_a_directory_that_nodes_share_is_refused(shared: dict[str, str], tmp_path: Path) -> None:
    assert stage.choose(str(tmp_path), "d", 0, {}) == tmp_path
    shared[str(tmp_path)] = "nfs4"
    with pytest.raises(StagingError, match="is on nfs4, which nodes share"):
        stage.choose(str(tmp_path), "d", 0, {})


def test_of_jobs_that_start_together_one_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, packs = tmp_path / "jobs" / "d.tar", []
    archive.parent.mkdir()
    waiting, await_other = threading.Semaphore(0), stage._await_other

    def pack(_: object, path: Path, __: object) -> bool:
        packs.append(path)
        assert all(waiting.acquire(timeout=30) for _ in range(3)), "the others do not wait"
        path.write_bytes(b"")
        return True

    def wait(*arguments: Any) -> None:
        waiting.release()
        await_other(*arguments)

    monkeypatch.setattr(environment, "pack", pack)
    monkeypatch.setattr(stage, "_await_other", wait)
    jobs = [
        threading.Thread(target=stage._make_archive, args=(_FOUND, archive, lambda: False))
        for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert packs == [archive]
    assert [each.name for each in archive.parent.iterdir()] == ["d.tar"]


def test_the_claim_of_a_dead_job_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "d.tar"
    (tmp_path / ".d.tar.claim").touch()
    monkeypatch.setattr(polling, "PACKING_SECONDS", 0.0)
    monkeypatch.setattr(environment, "pack", lambda *_: archive.touch() or True)
    asked = iter(range(20))  # about ten seconds
    assert stage._make_archive(_FOUND, archive, lambda: next(asked, None) is None)
    assert [each.name for each in tmp_path.iterdir()] == ["d.tar"]


def test_a_job_that_is_ending_does_not_wait(tmp_path: Path) -> None:
    (tmp_path / ".d.tar.claim").touch()
    assert not stage._make_archive(_FOUND, tmp_path / "d.tar", lambda: True)
