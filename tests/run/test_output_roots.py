"""A run is found by its name or job id from any directory of the person's."""

from pathlib import Path

import pytest

from clusterddp.run.run_dir import RunDir, known_runs_dirs, remember_runs_dir
from tests.cli.made_runs import Workplace, ended, started, submitted, workplace

__all__ = ["workplace"]


@pytest.fixture(autouse=True)
def state(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for a user's state; Slurm has forgotten every job."""
    workplace.command("squeue", "exit 0")
    workplace.command("sacct", "exit 1")
    monkeypatch.setenv("XDG_STATE_HOME", str(workplace.folder / "state"))
    return workplace.folder / "state"


@pytest.fixture
def another(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to type in, other than the one of the submissions."""
    path = workplace.folder / "another"
    path.mkdir()
    remember_runs_dir(workplace.root)
    monkeypatch.chdir(path)
    return path


def test_a_submission_notes_its_folder_of_runs_once(workplace: Workplace, state: Path) -> None:
    workplace.command("sbatch", "/bin/cat >/dev/null; echo 7")
    for name in ("a", "b"):
        argv = ("submit", "--run-name", name, "--no-snapshot", "--", "/bin/true")
        assert workplace.invoke(*argv).code == 0
    assert (state / "clusterddp/output-roots").read_text() == f"{workplace.root}\n"
    workplace.command("sbatch", "/bin/cat >/dev/null; echo no >&2; exit 1")
    assert workplace.invoke("submit", "--run-name=c", "--runs-dir=x", "--", "true").code == 2
    assert known_runs_dirs() == [workplace.root]


@pytest.mark.usefixtures("another")
def test_a_run_elsewhere_is_not_ended_by_its_name_alone(workplace: Workplace) -> None:
    run = workplace.run("one", submitted("12"), started("12"))
    workplace.command("squeue", "echo '12|RUNNING|None'")
    workplace.command("scancel", "exit 0")
    refused = workplace.invoke("cancel", "one")
    assert (refused.code, refused.out) == (2, "")
    assert f"Cancel {run.path} (1 running)? There is no terminal" in refused.err
    assert "scancel 12" not in workplace.calls
    for words in (["one", "--yes"], ["12"], [str(run.path)]):
        assert workplace.invoke("cancel", *words).code == 0
        assert workplace.calls.pop() == "scancel 12"


@pytest.mark.parametrize("text", ["one", "41"])
def test_a_run_elsewhere_is_found(text: str, workplace: Workplace, another: Path) -> None:
    run = workplace.run("one", submitted("41"), ended("41", 0, cause="done"))
    shown = workplace.invoke("status", text)
    assert shown.code == 0
    assert f"clusterddp: {text} is {run.path}\n" in shown.err
    assert f"directory   {run.path}\n" in shown.out


@pytest.mark.parametrize("text", ["lr", "7"])
def test_a_sweep_elsewhere_is_found(text: str, workplace: Workplace, another: Path) -> None:
    workplace.sweep("lr", ("lr",), ("1",), ("2",))
    shown = workplace.invoke("runs", "lr")
    assert shown.code == 0
    assert "lr-1" in shown.out


def test_a_run_of_this_folder_comes_first(workplace: Workplace, another: Path) -> None:
    workplace.run("one", submitted("41"))
    own = RunDir(another / "jobs/one")
    own.make(own.logs)
    own.spec.write_bytes((workplace.root / "one/spec.json").read_bytes())
    shown = workplace.invoke("status", "one")
    assert "directory   jobs/one\n" in shown.out.replace(f"{another}/", "")
    assert " is " not in shown.err


def test_several_of_a_name_are_listed(workplace: Workplace, another: Path) -> None:
    workplace.run("one", submitted("41"))
    third = RunDir(workplace.folder / "third/one")
    third.make(third.logs)
    third.spec.write_bytes((workplace.root / "one/spec.json").read_bytes())
    remember_runs_dir(third.path.parent)
    shown = workplace.invoke("status", "one")
    assert shown.code == 2
    assert f"several elsewhere: {third.path}, {workplace.root}/one. Give the" in shown.err


def test_what_is_not_there_is_said_as_ever(workplace: Workplace, another: Path) -> None:
    remember_runs_dir(another / "removed")
    for text in ("nothing", "99", ".."):
        shown = workplace.invoke("status", text)
        assert shown.code == 2
        assert f"there is no run '{text}' in the directory 'jobs', which has no runs." in shown.err


def test_a_run_elsewhere_is_removed_by_its_directory_alone(
    workplace: Workplace, another: Path
) -> None:
    run = workplace.run("one", submitted("41"), ended("41", 0, cause="done"))
    sweep = workplace.sweep("lr", ("lr",), ("1",))
    for name in ("one", "lr", "41"):
        refused = workplace.invoke("rm", "--yes", name)
        assert refused.code == 2
        assert "To remove it, name this path" in refused.err
    assert run.path.is_dir() and sweep.trial(0).path.is_dir() and sweep.path.is_dir()
    assert workplace.invoke("rm", "--yes", str(run.path)).code == 0
    assert not run.path.exists()
