"""The record of a node's ranks: real parents, each with a task that ends when it is told to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from clusterddp.files import read_json, write_record
from clusterddp.run.attempt import Attempt, begin
from clusterddp.run.outcome import RANKS, node_path, rank_path, read_outcomes, read_outcomes_of
from clusterddp.run.run_dir import RunDir
from clusterddp.worker.node_record import NodeRecord
from tests.waiting import PATIENCE, wait_for

PARENT = """
import os, sys
from pathlib import Path
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.worker import node_record
from clusterddp.worker.supervise import supervise

node_record.ANSWER_SECONDS = float(os.environ.get("ANSWER_SECONDS", 60))
env = DistEnv.from_environ(os.environ)
child = lambda: int(sys.stdin.readline() or 9)  # the end of our stdin, if we are killed
sys.exit(supervise(Path(sys.argv[1]), env, child, attempt=1))
"""
HOST = "g01"


class Node:
    """A node with parents of tasks."""

    def __init__(self, attempt: Attempt, open_until: ExitStack) -> None:
        self.attempt, self._open = attempt, open_until
        self.parents: list[subprocess.Popen[str]] = []

    def start(self, **variables: str) -> None:
        rank = str(len(self.parents))
        env = {
            **os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": HOST, "MASTER_PORT": "12345",
            "SLURMD_NODENAME": HOST, **variables,
        }  # fmt: skip
        argv = [sys.executable, "-c", PARENT, str(self.attempt.run.path)]
        parent = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, text=True)
        self._open.enter_context(parent)
        self._open.callback(parent.kill)
        self.parents.append(parent)

    def wait_recorded(self) -> None:
        count = len(self.parents)
        wait_for(lambda: len(read_outcomes(self.attempt.outcomes)) == count, "all records")

    def end(self, rank: int, code: int) -> None:
        stdin = self.parents[rank].stdin
        assert stdin
        stdin.write(f"{code}\n")
        stdin.close()

    @property
    def codes(self) -> list[int | None]:
        return [each.exit_code for each in read_outcomes(self.attempt.outcomes)]

    @property
    def files(self) -> list[str]:
        return sorted(path.name.split(".")[0] for path in self.attempt.outcomes.iterdir())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with ExitStack() as stack:
        yield Node(begin(RunDir(tmp_path / "run")), stack)


@pytest.mark.parametrize("codes", [(0, 0, 0, 0), (3, 0, 75, 4)])
def test_the_ranks_of_a_node_have_one_file(node: Node, codes: tuple[int, ...]) -> None:
    for _ in codes:
        node.start()
    node.wait_recorded()
    assert node.files == ["node-g01"]
    for rank, code in enumerate(codes):
        node.end(rank, code)
    for parent in node.parents:
        parent.wait(PATIENCE)
    assert node.codes == list(codes)
    assert {each.host for each in read_outcomes(node.attempt.outcomes)} == {HOST}


def test_without_the_leader_another_one_writes_and_no_end_is_lost(node: Node) -> None:
    node.start()
    node.wait_recorded()
    node.start()
    node.start()
    node.wait_recorded()
    node.parents[0].kill()
    node.parents[0].wait(PATIENCE)
    for rank in (1, 2):
        node.end(rank, 5)
        node.parents[rank].wait(PATIENCE)
    assert node.codes == [None, 5, 5]
    assert node.files == ["node-g01"]


def test_a_rank_whose_leader_does_not_answer_has_a_file_of_its_own(node: Node) -> None:
    node.start()
    node.wait_recorded()
    node.start(ANSWER_SECONDS="0.2")
    node.wait_recorded()
    node.parents[0].send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, node.parents[0].pid, os.WSTOPPED)  # all its threads
    node.end(1, 5)
    node.parents[1].wait(PATIENCE)
    assert node.codes == [None, 5]
    assert node.files == ["node-g01", "rank-1"]
    node.parents[0].send_signal(signal.SIGCONT)
    node.end(0, 0)
    node.parents[0].wait(PATIENCE)
    assert node.codes == [0, 5], "the older record of rank 1 in the node's file does not count"


def test_a_task_that_its_agent_starts_again_is_recorded_by_its_new_leader(node: Node) -> None:
    node.start()
    node.wait_recorded()
    node.end(0, 3)
    node.parents.pop().wait(PATIENCE)
    node.start()
    wait_for(lambda: node.codes == [None], "the new start")
    node.end(0, 0)
    node.parents[0].wait(PATIENCE)
    assert (node.codes, node.files) == ([0], ["node-g01"])


def test_the_newest_record_of_a_rank_counts_wherever_it_is(tmp_path: Path) -> None:
    """A container's parent outside began before the one inside, whose record it corrects."""
    fields = {
        "rank": 0, "local_rank": 0, "node_rank": 0, "host": HOST, "pid": 1, "job_id": "",
        "restart": 0, "step_id": "",
    }  # fmt: skip
    inside = {**fields, "started": 5.0, "written": 5.0}
    outside = {**fields, "started": 4.0, "written": 9.0, "ended": 9.0, "exit_code": 137}
    for first, second in ((inside, outside), (outside, inside)):
        write_record(node_path(tmp_path, HOST), {RANKS: [first]})
        write_record(rank_path(tmp_path, 0), second)
        assert [each.exit_code for each in read_outcomes(tmp_path)] == [137]
        assert [each.exit_code for each in read_outcomes_of(tmp_path, HOST)] == [137]
        assert read_outcomes_of(tmp_path, "g") == []


def _keep(path: Path, record: Mapping[str, object]) -> bool:
    written = NodeRecord(path, write_record)
    try:
        return written.keep(record)
    finally:
        written.close(failed=False)


def test_a_record_that_the_leader_cannot_write_is_not_kept(tmp_path: Path) -> None:
    assert _keep(tmp_path / "node.json", {"rank": 0})
    assert not _keep(tmp_path / "missing" / "node.json", {"rank": 0})


@pytest.mark.parametrize("text", ["a\nb", "\0", "ü" * 4000, '"]}'])
def test_what_a_record_says_is_data(text: str, tmp_path: Path) -> None:
    record = {"rank": 0, "error": {"message": text}}
    assert _keep(tmp_path / "node.json", record)
    assert read_json(tmp_path / "node.json") == {RANKS: [record]}
