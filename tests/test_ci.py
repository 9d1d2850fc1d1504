"""CI runs the tests as the README tells a stranger to, with nothing that only CI has."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_ci_runs_the_readme_s_test_command_with_no_mnist_at_hand() -> None:
    text = (ROOT / "README.md").read_text()
    [command] = re.findall(r"^\.venv/bin/(python -m pytest.*)$", text, re.MULTILINE)
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    first, second, third = [
        n for n, line in enumerate(lines) if line.startswith("step python -m pytest")
    ]
    assert lines[first] == f"step {command}"
    assert {"unset CLUSTERDDP_TEST_MNIST", "export CLUSTERDDP_REQUIRE_SLURM=1"} <= {*lines[:first]}
    others = lines[first].replace("'not slow'", "'slow and not alone and not release'")
    alone = 'step python -m pytest -m alone "${files[@]}"'
    assert (lines[second], lines[third]) == (others, alone)


def test_ci_runs_on_slurm_24_11_what_it_leaves_to_a_release_on_22_05() -> None:
    """Tests with the mark `release` that belong to these checks run nowhere else in CI."""
    text = (ROOT / ".ci" / "run").read_text()
    last_step = text.partition("step python -m tests.on_slurm.versions --release trixie")[2]
    assert {"preemption", "stacks"} <= {*re.findall(r"--check '?(\w+)", last_step)}
