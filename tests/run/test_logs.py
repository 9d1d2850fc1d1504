"""What a log says of one attempt."""

import os
from pathlib import Path

import pytest

from clusterddp.run.attempt import (
    Attempt,
    read_attempt_log,
    write_attempt_dividers,
    write_restart_divider,
)
from clusterddp.run.rank_log import RankLog
from clusterddp.run.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.make(run.logs)
    return run


def add(run: RunDir, rank: int, text: str) -> None:
    with run.rank_log(rank).open("a") as file:
        file.write(text)


def test_each_attempt_has_its_own_part(run: RunDir) -> None:
    add(run, 0, "one\ntorn")
    add(run, 1, "its only one\n")
    write_attempt_dividers(Attempt(run, 2), "13")
    add(run, 0, "two\n--- no divider ---\n")
    add(run, 2, "began late\n")
    write_attempt_dividers(Attempt(run, 3), "")
    add(run, 0, "three")
    parts = [read_attempt_log(run.rank_log(0), number) for number in (1, 2, 3)]
    assert parts == ["one\ntorn\n", "two\n--- no divider ---\n", "three"]
    assert [read_attempt_log(run.rank_log(1), n) for n in (1, 3)] == ["its only one\n", ""]
    assert read_attempt_log(run.rank_log(2), 2) == "began late\n"
    assert read_attempt_log(run.rank_log(7), 2) == ""
    lines = run.rank_log(0).read_text().splitlines()
    assert lines[2].startswith("--- attempt 2, job 13, 20")
    assert lines[2].endswith(" ---")


def test_a_log_that_cannot_be_written_costs_nothing(run: RunDir) -> None:
    (run.logs / "folder.log").mkdir()
    os.mkfifo(run.logs / "pipe.log")
    (run.logs / "link.log").symlink_to("elsewhere")
    add(run, 0, "one\n")
    write_attempt_dividers(Attempt(run, 2), "13")
    assert read_attempt_log(run.rank_log(0), 2) == ""
    assert not (run.logs / "elsewhere").exists()
    write_attempt_dividers(Attempt(RunDir(run.path / "gone"), 2), "13")


def test_only_the_end_of_a_long_log_is_read(run: RunDir) -> None:
    add(run, 0, "one\n")
    write_attempt_dividers(Attempt(run, 2), "13")
    add(run, 0, "x\n" * (1 << 20) + "last words\n")
    part = read_attempt_log(run.rank_log(0), 2)
    assert len(part) == 1 << 20
    assert part.endswith("x\nlast words\n")


def test_a_start_within_the_job_is_a_part_of_its_own(
    run: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    write_restart_divider(2, "13", 1)
    line = capfd.readouterr().err
    assert line.startswith("--- attempt 2, job 13, start 2 in it, 20")
    add(run, 0, f"before\n{line}after\n")
    assert read_attempt_log(run.rank_log(0), 2) == "after\n"


def of_node(run: RunDir, node: int, text: str) -> None:
    with (run.logs / f"node-{node}.log").open("a") as file:
        file.write(text)


def test_a_rank_has_its_lines_of_its_nodes_log(run: RunDir) -> None:
    """As srun(1) writes it with --label: numbers are padded to the width of the last rank's."""
    of_node(run, 0, " 1: its\n 0: not 1: its\n10: not\n 1: \n")
    of_node(run, 1, "11: of the other node\n")
    write_attempt_dividers(Attempt(run, 2), "13")
    of_node(run, 0, " 1: second\n")
    assert read_attempt_log(run.rank_log(1), 1) == "its\n\n"
    assert read_attempt_log(run.rank_log(1), 2) == "second\n"
    assert read_attempt_log(run.rank_log(11), 1) == "of the other node\n"
    assert read_attempt_log(run.rank_log(2), 2) == ""
    add(run, 1, "1: of its own log\n")
    assert read_attempt_log(run.rank_log(1), 1) == "1: of its own log\n"


def test_a_rank_that_is_long_silent_has_its_lines(run: RunDir) -> None:
    of_node(run, 0, "1: early\n" + "0: " + "x" * 3_000_000 + "\n")
    assert RankLog(run.rank_log(1)).find()
    assert not RankLog(run.rank_log(2)).find()
