import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.checkpoints import files
from clusterddp.checkpoints.catalog import newest
from clusterddp.checkpoints.files import UnusableError, name_of, remove_leftovers
from clusterddp.run.run_dir import RunDir
from tests.checkpoints.made_checkpoints import DAMAGE, attempt, names_in, steps_in


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "run"
    path.mkdir()
    return RunDir(path)


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
        assert files.step_of(Path(other)) == -1


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_one_is_named_with_its_reason_and_passed_over(
    run: RunDir, damage: str, logged: list[str]
) -> None:
    made = attempt(run, 1, 100, 200)
    path = made.checkpoints / name_of(200)
    harm, reason = DAMAGE[damage]
    harm(path)
    with pytest.raises(UnusableError) as caught:
        files.read(path)
    assert caught.value.reason.startswith(reason)
    assert str(path) in str(caught.value)
    assert newest(run) == made.checkpoints / name_of(100)
    assert logged == [f"passing over {path.name}: {caught.value}"]


def test_checksums_are_checked_by_sha256sum(run: RunDir) -> None:
    folder = attempt(run, 1, 1, 2).checkpoints
    got = subprocess.run(
        ["sha256sum", "-c", "--strict", *(f"{name_of(step)}.sha256" for step in (1, 2))],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
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
