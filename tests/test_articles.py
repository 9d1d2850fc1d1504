"""Runs every command of docs/articles.md, on synthetic digits as they stand there."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterddp.data.synthetic import generate
from clusterddp.files import read_json
from clusterddp.worker.workstation import free_port
from tests.waiting import dying_with_us

PAGE = Path(__file__).parents[1] / "docs" / "articles.md"
TEXT = PAGE.read_text().replace(" \\\n    ", " ")  # a command is one line
BLOCKS = [
    [line.strip() for line in block.strip().splitlines()]
    for block in re.findall(r"(?:^clusterddp .*\n)+", TEXT, re.MULTILINE)
]
ALONE = [[line] for block in BLOCKS if "--rank" not in block[0] for line in block]
TOGETHER = [block for block in BLOCKS if "--rank" in block[0]]
PATIENCE = 280
STEPS = 50
"""Of a training, in place of the page's 200."""


def run(lines: list[str], folder: Path, data: str) -> str:
    """Run the commands at the same time; returns what the first one printed."""
    port = str(free_port())
    running = []
    try:
        for line in lines:
            typed = line.replace("29500", port).replace("--dataset synthetic", data)
            words = shlex.split(typed.replace("--max-steps 200", f"--max-steps {STEPS}"))
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", *words],
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                    preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
                )
            )
        printed = [process.communicate(timeout=PATIENCE)[0] for process in running]
        assert [process.returncode for process in running] == [0] * len(lines), printed
        return printed[0]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The options of synthetic digits: as many as two ranks see in 50 steps of two epochs.

    That is one for each of 25 steps an epoch, 2 ranks and 64 images a rank; the set which the
    commands would render is larger, and the other tests' smaller.
    """
    folder = tmp_path_factory.mktemp("digits")
    generate(str(folder), train_images=3_200, test_images=500)
    return f"--dataset synthetic --data-dir {folder}"


def reports(folder: Path) -> list[dict[str, Any]]:
    found = [read_json(path) for path in sorted((folder / "jobs").glob("*/report.json"))]
    return [report for report in found if report]


def test_the_page_has_commands_of_every_article() -> None:
    sections = PAGE.read_text().split("\n## ")[1:-1]
    assert len(sections) == 5
    assert all("\nclusterddp " in section for section in sections)


@pytest.mark.slow
@pytest.mark.parametrize("lines", TOGETHER, ids=["ranks by hand"])
def test_ranks_started_by_hand_wait_for_each_other(
    lines: list[str], tmp_path: Path, data: str
) -> None:
    run(lines[::-1], tmp_path, data)  # the last one first
    [report] = reports(tmp_path)
    assert (report["world_size"], report["steps"]) == (2, STEPS)
    assert report["total_seconds"] > report["train_seconds"] > 0
    # The other commands know the run, although nobody submitted it.
    told = run(["clusterddp report by-hand"], tmp_path, data)
    assert "2 ranks on" in told and "started by hand" in told


# The others: cli/commands/test_compare.py, training/test_batch_size.py and test_profiling.py.
KEPT = ("--strategy dp", "--start-method spawn")


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            line, marks=[] if any(words in line for words in KEPT) else pytest.mark.release
        )
        for [line, *_] in ALONE
    ],
)
def test_what_an_article_teaches_works_as_the_page_says(
    line: str, tmp_path: Path, data: str, request: pytest.FixtureRequest
) -> None:
    if "keras" in line:
        request.getfixturevalue("keras_installed")
    printed = run([line], tmp_path, data)
    found = reports(tmp_path)
    if "--find-batch-size" in line:
        assert re.search(r"--batch-size \d+", printed)
        return
    asked = dict(zip(shlex.split(line), [*shlex.split(line)[1:], ""], strict=True))
    assert found and all(report["model"] == asked.get("--model", "convnet") for report in found)
    if "compare" in line:
        ran = [(report["strategy"], report["world_size"]) for report in found]
        assert {("single", 1), ("ddp", 2)} <= set(ran)
        if torch.cuda.device_count() < 2:
            assert "not run: needs 2 GPUs" in printed
        return
    [report] = found
    assert report["world_size"] == int(asked.get("--procs", "1"))
    assert report["strategy"] == asked.get("--strategy", "ddp")
    assert sum(map(sum, read_json_of(tmp_path)["confusion"])) == report["test_images"]
    if "--profile" in line:
        [trace] = tmp_path.glob("jobs/*/attempts/0001/profile/rank-0.trace.json*")
        assert str(trace.name) in printed


def read_json_of(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("jobs/*/evaluation.json")
    content = read_json(path)
    assert content
    return content
