"""The directory of the copies, and the one job that packs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterddp import files, polling
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


def test_a_dead_jobs_claim_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_draft_that_is_renamed_while_it_is_looked_at_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = tmp_path / ".d.tar.claim"
    claim.touch()
    monkeypatch.setattr(stage, "_drafts", lambda _: [tmp_path / "gone"])
    asked = iter([False])
    stage._await_other(tmp_path / "d.tar", claim, lambda: next(asked, True))


def test_an_archive_of_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "d.tar").touch()
    tmp_path.chmod(0o770)
    with pytest.raises(StagingError, match=r"only you can write.*--runs-dir"):
        stage._make_archive(_FOUND, tmp_path / "d.tar", lambda: False)


class Job:
    """An attempt on h01 and h02, of which h01 gets a copy, with a stand-in for srun."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run = SimpleNamespace(path=folder, bundle=folder / "none")
        log, record = folder / "staging.log", folder / "staging.json"
        self.attempt: Any = SimpleNamespace(run=run, staging_log=log, staging=record)
        self.status, self.is_over = 1, False
        monkeypatch.setattr(environment, "find", lambda *_: _FOUND)
        monkeypatch.setattr(stage, "_make_archive", lambda *_: True)
        monkeypatch.setattr(stage, "choose", lambda *_: folder)
        monkeypatch.setattr(stage, "started", self._started)

    @contextmanager
    def _started(self, *_: Any) -> Iterator[Any]:
        self.attempt.staging_log.write_text('{"host": "h01", "unpacked": true}\nkilled\n')
        yield lambda: self.status

    def stage(self, *nodes: str) -> stage.Staged | None:
        python, nothing = "/shared/env/bin/python", lambda: None
        is_over = lambda: self.is_over  # noqa: E731
        return stage.stage(self.attempt, python, "auto", nodes, ["own"], nothing, is_over)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def test_a_node_without_a_copy_has_failed_unless_the_job_is_ending(job: Job) -> None:
    staged = job.stage("h01", "h02")
    assert staged and [*staged.failed] == ["h02"]
    assert staged.variables["CLUSTERDDP_STAGED_FROM"] == "/shared/env"
    job.is_over = True
    assert job.stage("h01", "h02") is None


def test_an_srun_that_was_killed_says_nothing_about_the_nodes(job: Job) -> None:
    job.status = -9
    with pytest.raises(StagingError, match=r"srun has died \(Killed\)"):
        job.stage("h01", "h02")
    assert job.stage("h01")


def test_unknown_nodes_and_a_missing_srun_are_named_in_the_result(job: Job) -> None:
    with pytest.raises(StagingError, match="nodes are unknown"):
        job.stage()
    stage.record_failure(job.attempt, FileNotFoundError(2, "No such file or directory", "srun"))
    record = files.read_json(job.attempt.staging)
    assert record and record["code"] == "CD0322" and "'srun'" in str(record["error"])
