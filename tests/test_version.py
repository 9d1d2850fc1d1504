"""The version is written in one file; what shows it elsewhere is held to it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.version import __version__

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"\bclusterddp[ -](\d+\.\d+\.\d+)\b|\*\*Status:\*\* (\d+\.\d+\.\d+)")


@pytest.mark.parametrize("project", [".", "client"])
def test_a_project_has_the_version_of_the_package(project: str) -> None:
    pytest.importorskip("hatchling", reason="reads the metadata of a project")
    argv = [sys.executable, "-m", "hatchling", "metadata", "version"]
    said = subprocess.run(argv, cwd=ROOT / project, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == __version__


def test_pages_and_messages_show_this_version() -> None:
    """benchmarks/README.md is left out: a figure keeps the version that it was measured with."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "clusterddp").rglob("*.*"),
    ]
    texts = {page: page.read_text() for page in pages if page.suffix in (".md", ".py")}
    shown = {(str(page), *found) for page, text in texts.items() for found in SHOWN.findall(text)}
    assert len(shown) >= 6
    assert [each for each in shown if __version__ not in each] == []


def test_the_changelog_begins_with_this_version_and_its_day() -> None:
    first = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert re.fullmatch(re.escape(__version__) + r" - \d{4}-\d\d-\d\d", first)
