"""The checkpoints of a run: listed, chosen, and carried over to a new attempt."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.checkpoints import catalog
from clusterddp.checkpoints.catalog import (
    Best,
    UnusableError,
    adopt,
    checksum_of,
    find,
    find_newest,
    find_resume_checkpoint,
    list_verified,
    name_of,
    read_best,
    remove_leftovers,
)
from clusterddp.errors import CheckpointError
from clusterddp.request.resources import Resources
from clusterddp.request.spec import JobSpec
from clusterddp.run.attempt import Attempt
from clusterddp.run.run_dir import RunDir
from tests.checkpoints.made_checkpoints import (
    DAMAGE,
    attempt,
    make,
    make_sharded,
    names_in,
    steps_in,
)
from tests.event_lines import add_event
from tests.hostile import CARRIED, REFUSED


def test_each_kind_of_damage_is_told_apart(run: RunDir, logged: list[str]) -> None:
    made = attempt(run, 1, 100)
    for number, (harm, _) in enumerate(DAMAGE.values()):
        harm(make(made.checkpoints, 101 + number))
    assert find_newest(run) == made.checkpoints / name_of(100)
    assert len(logged) == len(DAMAGE)


def test_a_run_without_checkpoints_has_no_newest(run: RunDir) -> None:
    assert find_newest(run) is None
    run.attempts.mkdir()
    assert find_newest(run) is None
    Attempt(run, 1).path.mkdir()
    assert find_newest(run) is None
    assert list_verified(run) == []


def test_the_latest_attempt_comes_first_and_earlier_ones_stand_in_for_it(
    run: RunDir, logged: list[str]
) -> None:
    attempt(run, 1, 100, 200)
    second = attempt(run, 2, 200, 250, start=200)
    assert find_newest(run) == second.checkpoints / name_of(250)
    for path in (second.checkpoints / name_of(250), second.checkpoints / name_of(200)):
        path.write_bytes(b"")
    assert find_newest(run) == Attempt(run, 1).checkpoints / name_of(200)
    assert len(logged) == 2


def test_what_an_orphan_wrote_after_its_successor_started_does_not_count(run: RunDir) -> None:
    first = attempt(run, 1, 100, 200)
    attempt(run, 2, start=100)  # has saved nothing itself yet
    assert find_newest(run) == first.checkpoints / name_of(100)
    make(first.checkpoints, 300)
    assert find_newest(run) == first.checkpoints / name_of(100)
    assert {entry.step: entry.problem for entry in list_verified(run)} == {
        300: "superseded: attempt 2 resumed from step 100",
        200: "superseded: attempt 2 resumed from step 100",
        100: "",
    }


def test_the_earliest_start_of_all_later_attempts_counts(run: RunDir) -> None:
    first = attempt(run, 1, 100, 200, 300)
    attempt(run, 2, start=300)
    attempt(run, 3, start=100)
    assert find_newest(run) == first.checkpoints / name_of(100)
    before = [
        each.path for each in catalog.iter_candidates(run, Attempt(run, 3)) if not each.superseded
    ]
    assert before[0] == first.checkpoints / name_of(300)
    attempt(run, 4, start=0)
    assert find_newest(run) is None


def test_an_attempt_that_never_started_supersedes_nothing(run: RunDir) -> None:
    first = attempt(run, 1, 100, 200)
    attempt(run, 2, start=None)
    Attempt(run, 3).path.mkdir()
    Attempt(run, 3).record.write_text('{"torn')
    assert find_newest(run) == first.checkpoints / name_of(200)


def test_looking_starts_anew_when_the_newest_is_replaced_meanwhile(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = attempt(run, 1, 100).checkpoints
    read = catalog.read

    def overtaken(path: Path) -> bytes:
        monkeypatch.setattr(catalog, "read", read)
        make(folder, 200)
        catalog.remove(folder / name_of(100))
        return read(path)

    monkeypatch.setattr(catalog, "read", overtaken)
    assert find_newest(run) == folder / name_of(200)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(run: RunDir) -> None:
    Attempt(run, 1).path.mkdir(parents=True)
    Attempt(run, 1).checkpoints.write_text("a file")
    for look in (lambda: find_newest(run), lambda: list_verified(run)):
        with pytest.raises(CheckpointError, match=r"cannot read the directory .*: Not a directory"):
            look()


NOTES = {
    "sign of life": ("alive", {"step": 130, "saved": 120}),
    "last word": ("end.json", {"cause": "stopped", "step": 130, "saved": 120}),
    "start": (
        "attempt.json",
        {"step": 120, "resumed_from": "attempts/0001/checkpoints/step-00000120.pt"},
    ),
}


@pytest.mark.parametrize("note", NOTES)
def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_by_itself(
    run: RunDir, note: str
) -> None:
    made = attempt(run, 1)
    name, content = NOTES[note]
    (made.path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        find_resume_checkpoint(run)
    assert f"the checkpoints of {run.name} are gone: it had saved step 120" in str(caught.value)
    assert f"clusterddp resume {run.cli_name} --from-scratch" in str(caught.value)
    shutil.rmtree(made.checkpoints)
    with pytest.raises(CheckpointError, match="are gone"):
        find_resume_checkpoint(run)


@pytest.mark.parametrize("submitted", [True, False])
def test_a_command_starts_again_as_a_new_run(run: RunDir, submitted: bool) -> None:
    spec = JobSpec("a", str(run.path), Resources(), command=("python", "train.py"))
    run.spec.write_text(spec.to_json())
    if submitted:
        run.script.touch()
    attempt(run, 1).renew_liveness(130, saved=120)
    remedy = "submit a new run" if submitted else f"remove {run.path}"
    with pytest.raises(CheckpointError, match=f"are gone.* at step 0, {re.escape(remedy)}\\.\\n"):
        find_resume_checkpoint(run)


def test_a_run_that_has_saved_nothing_yet_begins_at_step_0(run: RunDir) -> None:
    assert find_resume_checkpoint(run) is None
    made = attempt(run, 1)
    made.renew_liveness(130)
    assert find_resume_checkpoint(run) is None
    # The checkpoint of another run, from which it was to start.
    record = {"step": 120, "resumed_from": "/jobs/other/attempts/0001/checkpoints/step-00000120.pt"}
    made.record.write_text(json.dumps(record))
    assert find_resume_checkpoint(run) is None


def test_a_run_that_has_begun_anew_once_does_not_miss_what_was_before(run: RunDir) -> None:
    attempt(run, 1).renew_liveness(130, saved=120)
    attempt(run, 2, start=0)
    assert find_resume_checkpoint(run) is None


def test_damaged_checkpoints_alone_do_not_let_a_run_begin_anew(
    run: RunDir, logged: list[str]
) -> None:
    DAMAGE["torn"][0](make(attempt(run, 1).checkpoints, 120))
    wrong = rf"no checkpoint of {re.escape(run.name)} is valid.*--from-scratch"
    with pytest.raises(CheckpointError, match=wrong):
        find_resume_checkpoint(run)
    assert len(logged) == 1


def test_what_a_person_gives_up_does_not_count_until_the_next_resume(run: RunDir) -> None:
    first = attempt(run, 1, 120)
    add_event(run, "resume_requested", from_scratch=1)
    assert find_resume_checkpoint(run) is None
    [entry] = list_verified(run)
    assert entry.problem.startswith("given up") and not entry.is_next
    add_event(run, "resume_requested")  # the one before was refused by sbatch, say
    assert find_resume_checkpoint(run) == first.checkpoints / name_of(120)
    add_event(run, "resume_requested", from_scratch=1)
    second = attempt(run, 2, 40)
    assert find_resume_checkpoint(run) == second.checkpoints / name_of(40)


def test_a_link_that_a_person_names_is_followed_to_its_checkpoint(
    run: RunDir, tmp_path: Path
) -> None:
    path = attempt(run, 1, 5).checkpoints / name_of(5)
    (tmp_path / "latest.pt").symlink_to(path)
    assert find(str(tmp_path / "latest.pt")) == path


def test_resume_takes_a_run_its_links_an_attempt_a_folder_or_a_file(run: RunDir) -> None:
    second = attempt(run, 2, 5, start=3)
    attempt(run, 1, 3)
    run.current.symlink_to("attempts/0002")
    run.checkpoints.symlink_to("current/checkpoints")
    path = second.checkpoints / name_of(5)
    for named in (run.path, run.checkpoints, second.path, second.checkpoints, path):
        assert find(str(named)).samefile(path)
    assert find(str(run.checkpoints / path.name)).samefile(path)
    assert find(str(Attempt(run, 1).checkpoints)) == (Attempt(run, 1).checkpoints / name_of(3))
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        find(str(run.path.parent))
    with pytest.raises(CheckpointError, match="does not exist"):
        find(str(run.path / "nothing.pt"))


def test_all_are_listed_once_with_the_best_and_the_next(run: RunDir) -> None:
    first = attempt(run, 1, 100, 200, 300, best=200)
    second = Attempt(run, 2)
    second.path.mkdir()
    adopt(second, first.checkpoints / name_of(200), 2)
    second.record.write_text('{"step": 200}')
    make(second.checkpoints, 250)
    DAMAGE["flipped"][0](make(second.checkpoints, 260))
    entries = list_verified(run)
    assert [(entry.step, entry.attempt, entry.problem) for entry in entries] == [
        (300, 1, "superseded: attempt 2 resumed from step 200"),
        (260, 2, "SHA-256 differs"),
        (250, 2, ""),
        (200, 2, ""),
        (100, 2, ""),
    ]
    assert [entry.step for entry in entries if entry.is_best] == [200]
    [following] = [entry for entry in entries if entry.is_next]
    assert following.path == find_newest(run)
    assert following.bytes == following.path.stat().st_size
    assert following.modified == following.path.stat().st_mtime


@pytest.mark.parametrize("name", [name for name in CARRIED + REFUSED if name and "\0" not in name])
def test_hostile_folder_names(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path / name)
    first = attempt(run, 1, 1, 2, 3, best=1)
    (first.checkpoints / ".step-00000004.pt.x").write_bytes(b"")
    remove_leftovers(first.checkpoints)
    second = Attempt(run, 2)
    second.path.mkdir()
    source = find_newest(run)
    assert source == first.checkpoints / name_of(3)
    assert adopt(second, source, 2) == second.checkpoints / name_of(3)
    assert [entry.step for entry in list_verified(run)] == [3, 2, 1]
    assert find(str(run.path)) == second.checkpoints / name_of(3)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_new_attempt_gets_its_source_those_before_it_and_the_best(run: RunDir) -> None:
    first = attempt(run, 1, 100, 200, 300, 400, 500, best=200)
    third = attempt(run, 3, start=None)
    third.checkpoints.rmdir()
    source = find_newest(run)
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
        catalog.read(third.checkpoints / name_of(step))
    assert names_in(third.path) == ["checkpoints"]
    assert third.checkpoints.stat().st_mode & 0o777 == 0o700


def test_nothing_beyond_the_source_is_handed_on(run: RunDir, logged: list[str]) -> None:
    first = attempt(run, 1, 100, 200, 300, 400, best=400)
    (first.checkpoints / name_of(400)).write_bytes(b"")
    (first.checkpoints / name_of(200)).write_bytes(b"")
    second = Attempt(run, 2)
    second.path.mkdir()
    adopt(second, find_newest(run), 3)
    assert steps_in(second.checkpoints) == [300, 100]
    assert read_best(second.checkpoints) is None
    assert [line.split(":")[0] for line in logged] == [
        "skipping step-00000400.pt", "skipping step-00000200.pt",
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
    assert len(logged) == 1 and logged[0].startswith(f"skipping {name_of(200)}")


def test_what_is_handed_on_comes_from_all_earlier_attempts(run: RunDir) -> None:
    attempt(run, 1, 100, 200, 300)
    attempt(run, 2, 250, start=200)
    third = Attempt(run, 3)
    third.path.mkdir()
    adopt(third, find_newest(run), 5)
    assert steps_in(third.checkpoints) == [250, 200, 100]


def test_a_checkpoint_of_another_run_stays_there(run: RunDir, tmp_path: Path) -> None:
    source = attempt(RunDir(tmp_path / "other"), 1, 7).checkpoints / name_of(7)
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
    assert [(entry.step, entry.attempt) for entry in list_verified(run)] == [(200, 2), (100, 2)]


def test_the_list_of_a_sharded_checkpoint_is_one_of_sha256sums(run: RunDir) -> None:
    path = make_sharded(attempt(run, 1).checkpoints, 100)
    checked = subprocess.run(
        ["sha256sum", "--check", checksum_of(path).name],
        cwd=path.parent, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert checked.stdout.count(": OK") == 4
    [entry] = list_verified(run)
    names = ("__0_0.distcp", "__1_0.distcp", "trainer/fit-1/trainer.ckpt")
    size = sum(len(f"of {name}") for name in names)
    assert (entry.problem, entry.bytes) == ("", path.stat().st_size + size)


def test_shards_gone_meanwhile_are_no_error(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attempt(run, 1)
    paths = [make_sharded(first.checkpoints, step) for step in (100, 200)]

    def read(path: Path) -> bytes:
        files = [*listed(path), *([path.with_name("gone")] if path == paths[1] else [])]
        monkeypatch.setattr(catalog, "_shard_files", lambda _: files)
        return b""

    listed = catalog._shard_files
    monkeypatch.setattr(catalog, "read", read)
    assert [entry.step for entry in list_verified(run)] == [100]


SHARD = "step-00000200.shards/__1_0.distcp"


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda shard: shard.write_text("of rank 2"), "shard SHA-256 differs"),
        (lambda shard: shard.unlink(), "shard missing"),
        (lambda shard: shutil.rmtree(shard.parent), "shard missing"),
        (lambda shard: (shard.unlink(), os.mkfifo(shard)), "shard SHA-256 differs"),
        (lambda shard: (shard.rename(f"{shard}.mine"), shard.symlink_to(f"{shard}.mine")),
         "shard missing"),
    ],
    ids=["altered", "missing", "all missing", "a FIFO", "a link"],
)  # fmt: skip
def test_a_checkpoint_whose_shard_is_damaged_is_passed_over(
    run: RunDir, harm: Callable[[Path], object], problem: str
) -> None:
    first = attempt(run, 1)
    for step in (100, 200):
        make_sharded(first.checkpoints, step)
    assert find_newest(run) == first.checkpoints / name_of(200)  # and it is remembered as whole
    harm(first.checkpoints / SHARD)
    assert find_newest(run) == first.checkpoints / name_of(100)
    assert [entry.problem for entry in list_verified(run)] == [problem, ""]


@pytest.mark.parametrize(
    "name",
    [
        "../../../spec.json",
        "step-00000100.shards/../step-00000100.pt",
        "/etc/passwd",
        "step-00000100.pt",
        "",
    ],
)
def test_a_list_that_leads_elsewhere_is_no_list(run: RunDir, name: str) -> None:
    path = make(attempt(run, 1).checkpoints, 100)
    with checksum_of(path).open("a") as sums:
        sums.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(UnusableError, match=r"is damaged: its shard .*: missing"):
        catalog.read(path)
    assert catalog.read(path, shards=False)


def test_shards_go_with_their_checkpoint(run: RunDir) -> None:
    first, second = attempt(run, 1), Attempt(run, 2)
    for step in (100, 200, 300):
        make_sharded(first.checkpoints, step)
    second.path.mkdir()
    adopt(second, first.checkpoints / name_of(300), 2)
    assert [name for name in names_in(second.checkpoints) if name.endswith(".shards")] == [
        "step-00000200.shards", "step-00000300.shards",
    ]  # fmt: skip
    for name in ("__0_0.distcp", "trainer/fit-1/trainer.ckpt"):
        shard = f"step-00000300.shards/{name}"
        assert (second.checkpoints / shard).samefile(first.checkpoints / shard)
    catalog.remove(second.checkpoints / name_of(300))
    assert names_in(second.checkpoints) == [
        "step-00000200.pt", "step-00000200.pt.sha256", "step-00000200.shards",
    ]  # fmt: skip
    assert catalog.read(first.checkpoints / name_of(300))


def test_shards_that_a_killed_rank_has_left_are_removed(run: RunDir) -> None:
    first = attempt(run, 1)
    kept = make_sharded(first.checkpoints, 100)
    for name in (".step-00000200.shards", "step-00000200.shards", "mine.shards"):
        (first.checkpoints / name).mkdir()
        (first.checkpoints / name / "file").touch()
    remove_leftovers(first.checkpoints)
    assert names_in(first.checkpoints) == sorted(
        ["mine.shards", kept.name, f"{kept.name}.sha256", "step-00000100.shards"]
    )


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
    with pytest.raises(CheckpointError, match="was deleted since"):
        adopt(second, first.checkpoints / name_of(999), 2)
    (first.checkpoints / name_of(200)).write_bytes(b"")
    with pytest.raises(UnusableError):
        adopt(second, first.checkpoints / name_of(200), 2)
    assert list(second.path.iterdir()) == []


def test_torch_and_numpy_are_not_imported() -> None:
    program = (
        "import sys, clusterddp.checkpoints.catalog, clusterddp.cli.commands.checkpoints\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    got = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert got.stdout.strip() == "[]", got.stderr


def test_names_are_ordered_by_their_step_also_beyond_eight_digits(run: RunDir) -> None:
    made = attempt(run, 1, 9, 10, 99_999_999, 100_000_000)
    assert steps_in(made.checkpoints) == [100_000_000, 99_999_999, 10, 9]
    for other in ("step-1.pt", "step-00000001.pt.sha256", ".step-00000001.pt.x", "best.json"):
        assert catalog.step_of(Path(other)) == -1


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_one_is_named_with_its_reason_and_passed_over(
    run: RunDir, damage: str, logged: list[str]
) -> None:
    made = attempt(run, 1, 100, 200)
    path = made.checkpoints / name_of(200)
    harm, reason = DAMAGE[damage]
    harm(path)
    with pytest.raises(UnusableError) as caught:
        catalog.read(path)
    assert caught.value.reason.startswith(reason)
    assert str(path) in str(caught.value)
    assert find_newest(run) == made.checkpoints / name_of(100)
    assert logged == [f"skipping {path.name}: {caught.value}"]


def test_checksums_are_checked_by_sha256sum(run: RunDir) -> None:
    folder = attempt(run, 1, 1, 2).checkpoints
    got = subprocess.run(
        ["sha256sum", "-c", "--strict", *(f"{name_of(step)}.sha256" for step in (1, 2))],
        cwd=folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert got.returncode == 0, got.stderr


def test_what_a_killed_writer_left_is_removed_and_nothing_else(run: RunDir) -> None:
    folder = attempt(run, 1, 1, best=1).checkpoints
    kept = names_in(folder)
    for name in (
        ".step-00000002.pt.abc", ".step-00000002.pt.sha256.abc", ".best.json.x",
        "step-00000002.pt.sha256",
    ):  # fmt: skip
        (folder / name).write_bytes(b"half")
    (folder / "notes.sha256").write_text("a person's own")
    remove_leftovers(folder)
    assert names_in(folder) == sorted([*kept, "notes.sha256"])
    remove_leftovers(run.path / "none")
