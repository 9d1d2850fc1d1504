"""docs/start.md as a person types it; Slurm's commands are stand-ins.

Its submissions, and those of the other pages, are dry-run by test_docs_blocks."""

import re
import shlex
from pathlib import Path

import pytest

from clusterddp.data.synthetic import generate
from tests.cli.made_runs import Workplace, submitted, workplace
from tests.test_examples import typed

__all__ = ["workplace"]

DOCS = Path(__file__).parents[1] / "docs"
START = (DOCS / "start.md").read_text().replace(" \\\n    ", " ")  # a command is one line
SECTIONS = {
    text.partition("\n")[0]: re.findall(r"^(clusterddp .*)$", text, re.M)
    for text in START.split("\n## ")[1:]
}


def test_the_page_has_its_three_parts() -> None:
    here, cluster, own, _ = SECTIONS.values()
    assert [len(here), len(cluster), len(own)] == [5, 10, 4]


def test_no_block_both_sends_a_run_and_ends_it() -> None:
    """Each can be pasted whole."""
    blocks = re.findall(r"(?:^clusterddp .*\n)+", START, re.M)
    ending = [block for block in blocks if re.search(r" (stop|cancel|resume) ", block)]
    assert len(ending) == 2
    assert all(block.count("\n") == 1 for block in ending)


@pytest.mark.slow
def test_the_first_run_needs_no_slurm(tmp_path: Path) -> None:
    # Ten steps of four ranks on as many digits as these see; the page's run renders the full set.
    generate(str(tmp_path / "data"), train_images=2_560, test_images=200)
    submit, *others = SECTIONS["Without Slurm"]
    assert "test accuracy" in typed(tmp_path, submit.replace("--max-steps 200", "--max-steps 10"))
    status, logs, checkpoints, report = (typed(tmp_path, line) for line in others)
    assert "state       done" in status
    assert "step 10: test accuracy" in logs
    assert "verified" in checkpoints
    assert "4 ranks on 127.0.0.1 127.0.0.2" in report


@pytest.mark.slow
def test_the_script_of_the_page_runs_on_four_ranks(tmp_path: Path) -> None:
    [script] = re.findall(r"^```python\n(.*?)^```", START, re.M | re.S)
    (tmp_path / "train.py").write_text(script)
    check, rehearse, logs, _ = SECTIONS["Your own script"]
    assert typed(tmp_path, check).strip() == "clusterddp: no findings in 1 file"
    typed(tmp_path, rehearse)
    assert re.search(r"^loss 0\.\d+ on 4 ranks$", typed(tmp_path, logs), re.M)


def test_a_run_on_a_cluster_is_looked_at_and_ended_as_the_page_says(workplace: Workplace) -> None:
    for name in ("second", "third"):
        workplace.run(name, submitted("7"))
    workplace.command("squeue", "echo '7|PENDING|(Resources)'")
    workplace.command("scancel", "exit 0")
    lines = SECTIONS["On a cluster"]
    status, stop = lines[3], lines[7]
    assert "queued" in workplace.invoke(*shlex.split(status)[1:]).out
    assert workplace.invoke(*shlex.split(stop)[1:]).code == 0
    assert [call for call in workplace.calls if call.startswith("scancel")]
