"""Paths that go up are found with the folders that they go up."""

import pytest

from clusterddp.scripts.python_file import PythonFile
from clusterddp.submission.outside import levels_up, upward_paths


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
