"""A person's own function: which names are references, where it is found, how it is imported."""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterddp.errors import RequestError, TrainingError
from clusterddp.request import user_functions
from clusterddp.request.options import is_reference
from clusterddp.request.train_config import TrainConfig
from tests.hostile import CARRIED, REFUSED

LOUD = "raise SystemExit('this ran')\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory of a person, whose imports are forgotten afterwards."""
    folder = tmp_path / "tree"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    importlib.invalidate_caches()
    return path


@pytest.mark.parametrize("value", ["nets:build", "my.nets.small:Net", "_a._b:_c", "A1:B2"])
def test_a_reference_is_a_module_and_a_name_in_it(value: str) -> None:
    assert is_reference(value)
    assert TrainConfig(model=value, dataset=value).user_functions == (
        ("--model", value), ("--dataset", value),
    )  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [*CARRIED, *REFUSED, "nets:", ":build", "nets:build:x", "a..b:c", ".a:b",
     "a/b:c", "nets:build()", "nets:a.b", "1a:b", "nets:build\n", "né:b", "a b:c"],
)  # fmt: skip
def test_nothing_else_is_one(value: str) -> None:
    assert not is_reference(value)
    for fields in ({"model": value}, {"dataset": value}):
        with pytest.raises(RequestError, match="is not one of"):
            TrainConfig(**fields)


@pytest.mark.parametrize(
    ("file", "text", "reference"),
    [
        ("nets.py", "def build(): ...", "nets:build"),
        ("nets.py", "class Net: ...", "nets:Net"),
        ("nets.py", "build = lambda: 1", "nets:build"),
        ("nets.py", "from a import b as build", "nets:build"),
        ("nets.py", "try:\n    import build\nexcept ImportError:\n    build = None", "nets:build"),
        ("nets.py", "if True:\n    async def build(): ...", "nets:build"),
        ("nets.py", "from a import *", "nets:build"),
        ("nets.py", "def __getattr__(name): ...", "nets:build"),
        ("pkg/__init__.py", "def build(): ...", "pkg:build"),
        ("pkg/deep/nets.py", "def build(): ...", "pkg.deep.nets:build"),
    ],
)
def test_it_is_found_without_running_anything(
    tree: Path, file: str, text: str, reference: str
) -> None:
    path = write(tree / file, LOUD + text)
    if path.parent.name == "deep":
        write(tree / "pkg/__init__.py", LOUD)  # but not in deep, which is a namespace
    assert user_functions.locate("--model", reference, tree) == path
    assert reference.partition(":")[0] not in sys.modules


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nets:biuld", "defines no biuld"),
        ("nets:inner", "defines no inner"),
        ("nets:method", "defines no method"),
        ("nots:build", "there is no module nots in"),
        ("nets.py:build", "there is no module nets.py in"),
        ("nets.deep:build", "there is no module nets.deep in"),
        ("broken:build", "(broken.py, line 1)"),
        ("sys:exit", "there is no module sys"),
    ],
)
def test_what_is_not_there_is_refused(tree: Path, reference: str, words: str) -> None:
    write(tree / "nets.py", "def build():\n    inner = 1\nclass A:\n    def method(self): ...\n")
    write(tree / "broken.py", "def build(:")
    with pytest.raises(RequestError, match=words) as caught:
        user_functions.locate("--model", reference, tree)
    assert str(caught.value).startswith(f"--model {reference}: ")


def test_what_is_installed_is_found_too_but_the_folder_comes_first(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = write(tmp_path / "site/nets.py", "def build(): return 'installed'")
    monkeypatch.syspath_prepend(installed.parent)
    assert user_functions.locate("--model", "nets:build", tree) == installed
    (tree / "nets/logs").mkdir(parents=True)  # a directory that is no package hides nothing
    assert user_functions.locate("--model", "nets:build", tree) == installed
    own = write(tree / "nets.py", "def build(): return 'own'")
    assert user_functions.locate("--model", "nets:build", tree) == own
    assert user_functions.load("nets:build")() == "own"
    assert sys.path[0] == str(tree)


def test_of_two_folders_without_an_init_the_one_that_is_asked_for_counts(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run's copy of the code, and the tree that it was copied from, where one types."""
    write(tmp_path / "elsewhere/pkg/sets.py", "def other(): ...")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    path = write(tree / "pkg/sets.py", "def make(): ...")
    assert user_functions.locate("--dataset", "pkg.sets:make", tree) == path


def test_an_installed_command_finds_it_in_the_current_folder(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree / "own_nets.py", "def build(): return 7")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tree))])
    assert user_functions.load("own_nets:build")() == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero "),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' "),
        ("raise SystemExit(2)", "SystemExit: 2 "),
        ("raise ValueError('first\\nsecond')", "ValueError: first "),
        ("raise ValueError", "ValueError "),
    ],
)
def test_a_module_that_fails_is_told_in_a_line_and_its_traceback_is_in_the_log(
    tree: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    write(tree / "fails.py", f"def build(): ...\n{text}\n")
    with pytest.raises(TrainingError) as caught:
        user_functions.load("fails:build")
    line = str(caught.value)
    assert line.startswith(f"fails:build failed on {os.uname().nodename} in {tree}: ")
    assert words in line and "\n" not in line
    assert 'fails.py", line 2' in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seen"), [("", "is missing"), ("build = 3", "is int")])
def test_what_is_no_function_is_refused_with_the_file_that_was_read(
    tree: Path, text: str, seen: str
) -> None:
    path = write(tree / "holds.py", text)
    with pytest.raises(TrainingError, match=f"build {seen} in {path}"):
        user_functions.load("holds:build")
