"""docs/coming: what the pages print is what the commands print, and each line of ours is taken."""

import itertools
import re
from pathlib import Path

import pytest

from tests.cli.made_runs import Workplace, workplace  # noqa: F401 -- a fixture

PAGES = sorted((Path(__file__).parents[1] / "docs" / "coming").glob("*.md"))
BLOCKS = [
    (page.stem, block)
    for page in PAGES
    for block in re.findall(r"^```\w+\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
]
# Each sbatch file, with the block behind it: the line that import prints.
FILES = [
    pytest.param(block, following[1], id=page)
    for (page, block), following in itertools.pairwise(BLOCKS)
    if block.startswith("#!/bin/bash")
]


def test_each_way_has_a_page_and_a_line() -> None:
    linked = re.findall(r"\((\w[\w-]*)\.md\)", (PAGES[0].parent / "index.md").read_text())
    assert set(linked) == {page.stem for page in PAGES} - {"index"}
    assert {page for page, block in BLOCKS if block.startswith("clusterddp submit")} == set(linked)
    assert len(FILES) == 3


@pytest.mark.parametrize(("file", "line"), FILES)
def test_the_line_is_what_import_prints(file: str, line: str, workplace: Workplace) -> None:  # noqa: F811
    (workplace.folder / "job.sbatch").write_text(file)
    assert workplace.invoke("import", "job.sbatch").out == line
