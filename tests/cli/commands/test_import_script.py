"""`clusterddp import`: the line on stdout, what it does not carry over on stderr."""

import json
from pathlib import Path

import pytest

from tests.cli.made_runs import Workplace, workplace

__all__ = ["workplace"]
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4 --gpus-per-node=4
#SBATCH --output=logs/%j.out
export MASTER_ADDR=$(hostname)
srun python train.py
"""


def test_the_line_stands_alone_on_stdout(workplace: Workplace) -> None:
    (workplace.folder / "job.sbatch").write_text(JOB)
    got = workplace.invoke("import", "job.sbatch")
    assert got.code == 0
    assert got.out == "clusterddp submit --nodes 2 --gpus-per-node 4 -- python train.py\n"
    assert got.err == (
        "clusterddp: line 3: #SBATCH --output=logs/%j.out: not carried over: logs are in the run's "
        "directory, logs/rank-R.log\n"
    )
    assert workplace.calls == [] and not any(workplace.root.iterdir())


def test_json_has_the_words_and_the_notes(workplace: Workplace) -> None:
    (workplace.folder / "job.sbatch").write_text(JOB.replace("--output=logs/%j.out", "-D /else"))
    said = json.loads(workplace.invoke("import", "--json", "job.sbatch").out)
    assert said["argv"][:4] == ["clusterddp", "submit", "--nodes", "2"]
    assert (said["directory"], said["notes"]) == ("/else", [])
    assert said["line"].startswith("cd /else &&\nclusterddp submit ")


def test_what_submit_would_refuse_is_said_beside_the_line(workplace: Workplace) -> None:
    (workplace.folder / "job.sbatch").write_text(JOB.replace("per-node=4 --g", "per-node=5 --g"))
    got = workplace.invoke("import", "job.sbatch")
    assert got.code == 0 and "--tasks-per-node 5" in got.out
    assert "submit refuses this line: --tasks-per-node 5 conflicts with" in got.err


def test_line_ends_that_sbatch_refuses_are_named(workplace: Workplace) -> None:
    (workplace.folder / "job.sbatch").write_bytes(JOB.replace("\n", "\r\n").encode())
    got = workplace.invoke("import", "job.sbatch")
    assert got.code == 0 and "\r" not in got.out
    assert "the file has DOS line endings, which sbatch rejects" in got.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"#!/bin/bash\nhostname\n", "job.sbatch starts no training"),
        (b"print(1)\n", "'job.sbatch' is neither an sbatch file"),
        (b"#!/usr/bin/env python\n", "'job.sbatch' is a Python file. Give the sbatch file"),
        (b"#!/bin/bash\n\xff\xfe\n", "'job.sbatch' is not UTF-8 text"),
        (b"#!/bin/bash\nsrun python a\0b\n", "'job.sbatch' contains NUL bytes"),
        (b"", "'job.sbatch' is neither an sbatch file"),
        (b"#!/bin/bash\n" + b"#" * (1 << 20), "is larger than 1,048,576 bytes"),
        (None, "FILE: there is no file 'job.sbatch'."),
    ],
)
def test_a_file_that_is_none_is_refused(
    workplace: Workplace, content: bytes | None, words: str
) -> None:
    if content is not None:
        (workplace.folder / "job.sbatch").write_bytes(content)
    got = workplace.invoke("import", "job.sbatch")
    assert (got.code, got.out) == (2, "")
    assert words in got.err


def test_a_folder_and_a_script_of_our_own_are_refused(workplace: Workplace) -> None:
    assert "Is a directory" in workplace.invoke("import", str(workplace.folder)).err
    script = workplace.invoke("submit", "--dry-run", "--run-name", "one", "--", "true").out
    (workplace.folder / "own.sbatch").write_text(script)
    got = workplace.invoke("import", "own.sbatch")
    assert got.code == 2 and "'own.sbatch' is already a script of clusterddp" in got.err


def test_what_moves_a_terminals_cursor_is_escaped(workplace: Workplace) -> None:
    (workplace.folder / "job.sbatch").write_text(JOB + "cp $'\x1b[2J' b\n#SBATCH --x=\x1b[2J\n")
    got = workplace.invoke("import", "job.sbatch")
    assert "\x1b" not in got.out + got.err and "\\x1b[2J" in got.out + got.err


def test_the_command_needs_no_torch(workplace: Workplace, tmp_path: Path) -> None:
    from tests.cli.test_imports import HEAVY, watched

    (tmp_path / "job.sbatch").write_text(JOB)
    loaded, started = watched(tmp_path, ["import", "job.sbatch"])
    assert not loaded & HEAVY and started == []
