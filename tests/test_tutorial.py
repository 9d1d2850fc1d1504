"""docs/tutorial.md up to its submission; tests/on_slurm/test_tutorial.py follows its run."""

import re
import shlex
from pathlib import Path

from tests.cli.made_runs import Workplace, workplace

__all__ = ["workplace"]

PAGE = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
[SCRIPT] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
STEPS = {
    number: re.findall(r"^(?:\$ )?clusterddp (\w.*)$", text, re.M)
    for number, text in re.findall(r"^## (\d+)\. (.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}


def shown_after(line: str) -> str:
    """What the page shows after a command, to the end of its block or the next command."""
    return re.split(r"^(?:```|\$ )", PAGE.partition(f"$ clusterddp {line}\n")[2], flags=re.M)[0]


def test_the_commands_at_a_glance_are_those_of_the_steps() -> None:
    glance = re.findall(r"^clusterddp (.*)$", PAGE.partition("## 1.")[0], re.M)
    typed = [line for step in STEPS.values() for line in step]
    assert len(glance) == 6
    assert [line for line in glance if line not in typed] == []


def test_check_prints_what_the_page_shows(workplace: Workplace) -> None:
    (workplace.folder / "train.py").write_text(SCRIPT)
    [line] = STEPS["2"]
    got = workplace.invoke(*shlex.split(line))
    assert (got.code, got.out + got.err) == (0, shown_after(line))


def test_the_dry_run_prints_the_lines_that_the_page_shows(workplace: Workplace) -> None:
    (workplace.folder / "train.py").write_text(SCRIPT)
    workplace.command("python", "exit 0")
    [line] = STEPS["5"]
    got = workplace.invoke(*shlex.split(line))
    assert got.code == 0, got.err
    [script] = re.findall(r"^```bash\n(#!.*?)^```", PAGE, re.M | re.S)
    shown = re.findall(r"^#(?!SBATCH --job-name|SBATCH --comment| Run).*$", script, re.M)
    assert len(shown) == 5
    assert [each for each in shown if each not in got.out.splitlines()] == []
