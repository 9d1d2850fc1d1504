"""A COMMAND reads the copy of its code, and what else it reads is named."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from clusterddp.cli.main import cli
from clusterddp.run.run_dir import RunDir
from clusterddp.scripts.python_file import PythonFile
from clusterddp.submission.outside import levels_up, upward_paths
from tests.submission.test_snapshot import git, git_of_its_own, write  # noqa: F401 -- autouse

CLUSTERDDP = [sys.executable, "-m", "clusterddp"]
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
# What setuptools writes for `pip install -e`, in short.
FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING = {{"demo": {path!r}}}
class _EditableFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")
def install():
    sys.meta_path.append(_EditableFinder)
"""

Say = Callable[..., str]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the submission, with a package below src/."""
    path = tmp_path / "project"
    write(path, {"src/demo/__init__.py": "", "src/demo/where.py": "import demo\nprint(demo)\n"})
    monkeypatch.chdir(path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv"


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Submit to an sbatch that takes everything; returns what is said on stderr."""
    program = tmp_path / "bin/sbatch"
    write(tmp_path, {"bin/sbatch": "#!/bin/sh\ncat >/dev/null\necho 7\n"})
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    def typed(*command: str, options: tuple[str, ...] = ()) -> str:
        argv = ["submit", "--run-name=a", "--runs-dir", str(tmp_path / "jobs"), *options]
        result = CliRunner().invoke(cli, [*argv, "--", *command])
        assert result.exit_code == 0, result.output
        return result.stderr + result.stdout

    return typed


def rehearse(*argv: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLUSTERDDP, "submit", "--launcher=local", "--run-name=a", *argv],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def installed(kind: str, environment: Path, tree: Path) -> list[str]:
    """Install the package of the tree so that it is imported from there; options of the submit."""
    if kind == "PYTHONPATH":
        return ["--env", f"PYTHONPATH={tree / 'src'}", "--no-stacks"]
    site = environment / SITE
    if kind == "finder":
        write(site, {"__editable___demo_finder.py": FINDER.format(path=str(tree / "src/demo"))})
        line = "import __editable___demo_finder; __editable___demo_finder.install()"
    else:
        line = str(tree / "src")
    (site / "demo.pth").write_text(f"{line}\n")
    return []


@pytest.mark.parametrize(
    "kind",
    [
        "pth",
        pytest.param("finder", marks=pytest.mark.slow),
        pytest.param("PYTHONPATH", marks=[pytest.mark.slow, pytest.mark.release]),  # below: src
    ],
)
def test_tasks_import_the_copy_of_a_source_tree_that_is_installed_in_place(
    kind: str, tree: Path, environment: Path
) -> None:
    options = installed(kind, environment, tree)
    done = rehearse(*options, "--", str(environment / "bin/python"), "-c", "import demo.where")
    assert done.returncode == 0, done.stderr
    copy = tree / "jobs/a/code/src/demo/__init__.py"
    assert f"'demo' from '{copy}'" in (tree / "jobs/a/logs/rank-0.log").read_text()
    assert "current code of" not in done.stderr


@pytest.mark.parametrize("kind", ["pth", "pip", "PYTHONPATH"])
def test_a_source_tree_outside_of_the_copy_is_named(
    kind: str, tmp_path: Path, tree: Path, environment: Path, submit: Say,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    others = tmp_path / "my lib"
    others.mkdir()
    site = environment / SITE
    if kind == "pth":
        (site / "lib.pth").write_text(f"# a comment\n{others}\n{tree / 'src'}\n/not/there\n")
    elif kind == "pip":
        origin = {"dir_info": {"editable": True}, "url": others.as_uri()}
        write(site, {"lib-1.dist-info/direct_url.json": json.dumps(origin)})
    else:
        monkeypatch.setenv("PYTHONPATH", f"{others}:{tree / 'src'}:")
    said = submit(str(environment / "bin/python"), "-c", "pass")
    assert f"the tasks import the current code of '{others}'" in said
    assert said.count("[CD0320]") == 1


def test_nothing_is_named_where_all_is_in_the_copy(
    tree: Path, environment: Path, submit: Say
) -> None:
    installed("pth", environment, tree)
    write(environment / SITE, {"x-1.dist-info/direct_url.json": '{"url": "https://x", "vcs": 1}'})
    assert "warning" not in submit(str(environment / "bin/python"), "-m", "demo.where")


def test_a_package_below_src_that_nobody_has_installed_says_what_to_add(
    tree: Path, environment: Path, submit: Say
) -> None:
    python = str(environment / "bin/python")
    said = submit(python, "-m", "demo.where")
    assert "no module demo in" in said
    assert "Add --env PYTHONPATH=src, or install it: pip install -e ." in said
    shutil.rmtree(tree.parent / "jobs")
    assert "no module" not in submit(python, "-m", "demo.where", options=("--env=PYTHONPATH=src",))


@pytest.mark.slow
def test_what_is_to_be_added_for_a_package_below_src_works(tree: Path, environment: Path) -> None:
    python = str(environment / "bin/python")
    done = rehearse("--env=PYTHONPATH=src", "--", python, "-m", "demo.where")
    assert done.returncode == 0, done.stderr
    copy = tree / "jobs/a/code/src/demo/__init__.py"
    assert f"'demo' from '{copy}'" in (tree / "jobs/a/logs/rank-0.log").read_text()


def test_a_script_that_is_typed_in_full_is_not_the_copy(tree: Path, submit: Say) -> None:
    write(tree, {"train.py": "pass"})
    said = submit("python", f"{tree}/train.py")
    assert f"COMMAND runs {tree}/train.py itself, not its copy" in said


def test_a_folder_of_a_git_work_tree_finds_what_lies_beside_it(tmp_path: Path, tree: Path) -> None:
    folder = tree / "examples/mnist"
    write(tree, {"examples/common.py": "x", "data/images": "pixels", ".gitignore": "data/\n"})
    write(folder, {"train.sh": "cat ../../data/images; cd ..; cat common.py; echo y > written\n"})
    (folder / "MNIST/raw").mkdir(parents=True)  # no directory of code elsewhere
    git(tree, "init", "--quiet")
    done = rehearse("--", "sh", "train.sh", folder=folder)
    assert done.returncode == 0, done.stderr
    run = RunDir(folder / "jobs/a")
    assert (run.path / "logs/rank-0.log").read_text() == "pixelsx"
    assert f"workdir    {run.path}/code/examples/mnist: a copy of " in done.stdout
    assert (run.code / "examples/written").is_file()
    assert not (tree / "examples/written").exists()
    shown = subprocess.run(
        [*CLUSTERDDP, "status", "a"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert f"workdir     {run.path}/code/examples/mnist; relative output is there" in shown.stdout


def test_a_work_tree_that_is_too_large_is_said_and_the_folder_alone_copied(
    tmp_path: Path, tree: Path, submit: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, {"examples/train.py": "pass", **{f"large/{n}": "x" * 900_000 for n in range(3)}})
    git(tree, "init", "--quiet")
    monkeypatch.chdir(tree / "examples")
    said = submit("python", "train.py", options=("--snapshot-limit=1",))
    assert f"only {tree}/examples is copied, not its whole git work tree {tree}" in said
    run = RunDir(tmp_path / "jobs/a")
    assert [path.name for path in run.code.iterdir()] == ["train.py"]
    assert run.code_folder == run.code


def test_the_trials_of_a_sweep_start_in_the_same_folder_of_the_work_tree(
    tmp_path: Path, tree: Path, submit: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, {"examples/train.py": "pass"})
    git(tree, "init", "--quiet")
    monkeypatch.chdir(tree / "examples")
    submit("python", "train.py", "{lr}", options=("--sweep=lr=1,2",))
    trial = RunDir(tmp_path / "jobs/a-1")
    assert (trial.workdir / "train.py").samefile(tmp_path / "jobs/a/code/examples/train.py")
    assert trial.code_folder == trial.code / "examples"


@pytest.mark.parametrize("is_git", [False, True])
def test_relative_paths_that_leave_the_copy_are_named(
    is_git: bool, tmp_path: Path, tree: Path, submit: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nHERE = os.path.dirname(__file__)\nopen('../data/x')\nopen('../../y')\n"
    write(tree, {"examples/train.py": text})
    monkeypatch.chdir(tree / "examples")
    if is_git:
        git(tree, "init", "--quiet")
    said = submit("python", "train.py", "--out=../o", "../../p")
    inside, outside = ["'../data/x' (train.py, line 3)", "../o of COMMAND"], [
        "'../../y' (train.py, line 4)",
        "../../p of COMMAND",
    ]  # fmt: skip
    [named] = (json.loads((tmp_path / "jobs/a/code.json").read_text())["outside_paths"],)
    assert sorted(named) == sorted(outside if is_git else inside + outside)
    assert f"a relative path that leaves {tree if is_git else tree / 'examples'}" in said
    checked = CliRunner().invoke(cli, ["check", "train.py"])
    assert "'../../y' (train.py, line 4)" in checked.stderr
    assert ("'../data/x'" in checked.stderr) is not is_git


def test_the_verdict_names_a_path_that_leads_nowhere_in_the_copy(tree: Path) -> None:
    write(tree, {"train.py": "open('../data/x')\n"})
    assert rehearse("--", sys.executable, "train.py").returncode == 1
    shown = subprocess.run([*CLUSTERDDP, "status", "a"], capture_output=True, text=True, check=True)
    said = "leads outside the copy of the code in which the command ran: '../data/x' (train.py"
    assert said in shown.stdout
    assert f"{said}, line 1) [CD0320]" in (tree / "jobs/a/logs/job.log").read_text()


def test_outputs_that_are_links_to_a_persons_own_are_said_to_be_so(
    tmp_path: Path, tree: Path, submit: Say
) -> None:
    write(tree, {".gitignore": "outputs\ndata\n", "outputs/last.txt": "x", "data/x": "x"})
    git(tree, "init", "--quiet")
    said = submit("true")
    link = "outputs/ in the copy of your code: a link to "
    assert f"{link}{tree / 'outputs'}, because git ignores it" in said
    assert (
        "; relative output is there, except in data/, outputs/ (links to your directories)\n"
        in said
    )
    root = ["--runs-dir", str(tmp_path / "jobs")]
    shown = CliRunner().invoke(cli, ["status", *root, "a"])
    assert (
        "relative output is there, except in data/, outputs/ (links to your directories)"
        in shown.stdout
    )


def test_checkpoints_that_are_copied_are_named(tree: Path, submit: Say) -> None:
    write(
        tree,
        {
            "outputs/checkpoint-20/model.safetensors": "x",
            "out/ckpt.pt": "x",
            "weights/resnet.pth": "x",  # it came with the code
            "outputs/log.txt": "x",
        },
    )
    said = submit("true")
    assert f"copied with the code of {tree}: out/ckpt.pt, outputs/checkpoint-20/model." in said
    assert "resnet" not in said and "log.txt" not in said


@pytest.mark.parametrize(
    ("path", "levels"),
    [
        ("../data", 1),
        ("..", 1),
        ("../../a/b", 2),
        ("../a/../../b", 2),
        ("/../../Datasets", 2),
        ("...", 0),
        ("../ is above", 0),
        ("data/x", 0),
        ("/data", 0),
        ("", 0),
    ],
)
def test_a_path_goes_up_so_many_folders(path: str, levels: int) -> None:
    assert levels_up(path) == levels


@pytest.mark.parametrize(
    ("expression", "levels", "of_script"),
    [
        ("datasets.MNIST('../data', download=True)", 1, False),
        ("open(f'../data/{x}')", 1, False),
        ("load(os.path.join(os.path.dirname(__file__), '../../Datasets'))", 2, True),
        ("load(os.path.dirname(os.path.abspath(__file__)) + '/../data')", 1, True),
        ("join(dirname(dirname(__file__)), '..', 'data')", 2, True),
        ("sys.path.append(str(Path(__file__).resolve().parent.parent))", 1, True),
        ("Path(__file__).parents[2] / 'data'", 2, True),
    ],
)
def test_paths_of_a_script_are_named_with_where_they_start(
    expression: str, levels: int, of_script: bool
) -> None:
    [found] = upward_paths(PythonFile("a.py", f"import os\n{expression}\n"))
    assert (found.line, found.levels, found.of_script) == (2, levels, of_script)


def test_the_scripts_own_folder_and_other_text_are_no_path_that_goes_up() -> None:
    text = (
        '"""Reads ../data."""\nHERE = dirname(__file__)\nopen(join(HERE, "data"))\n'
        "Path(__file__).parent / 'x'\nprint(__file__, 'a ..')\n"
    )
    assert not [*upward_paths(PythonFile("a.py", text))]


@pytest.mark.parametrize("expression", ["name.replace('..', '.')", "'..' in name"])
def test_a_text_that_is_looked_for_is_no_path(expression: str) -> None:
    assert [*upward_paths(PythonFile("a.py", f"{expression}\n"))] == []
