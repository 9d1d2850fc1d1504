"""Every snippet of docs/python.md, run in the order in which a reader types them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
# As at a prompt: one namespace for all, in which functions have no file to import them from.
READER = """
import sys
from pathlib import Path
page, inside, block = Path(sys.argv[1]), False, []
for number, line in enumerate(page.read_text().splitlines(), 1):
    if line == "```" and inside:
        source = "\\n" * (number - 1 - len(block)) + "\\n".join(block)
        exec(compile(source, str(page), "exec"), globals())
        inside, block = False, []
        print("ran the block that ends at line", number, flush=True)
    elif inside:
        block.append(line)
    elif line == "```python":
        inside = True
assert not [name for name in sys.modules if name.startswith("clusterddp.cli")]
"""


@pytest.mark.slow
def test_the_snippets_of_the_python_page_run_as_they_stand(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").symlink_to(synthetic_dir)
    process = subprocess.run(
        [sys.executable, "-c", READER, str(PAGE)],
        cwd=tmp_path, capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    blocks = PAGE.read_text().count("```python")
    assert process.stdout.count("ran the block") == blocks >= 6
