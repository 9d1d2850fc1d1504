"""The one connection of a node's watchdogs to rank 0's store."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from unittest.mock import Mock

import pytest

from clusterddp.distributed.heartbeat import Exchange
from clusterddp.distributed.shared_store import SharedStore
from tests.distributed.test_heartbeat import DATA, beat
from tests.waiting import PATIENCE, wait_for

BEAT, LONG_BEAT = 0.2, 4.0
"""The short one is for a first process that does not answer; a busy one needs the other."""
FIRST = """
import sys
from clusterddp.distributed.shared_store import SharedStore

store = SharedStore(sys.argv[1], lambda: object(), 60, 0.2)
print("connected", flush=True)
sys.stdin.read()
"""


class Rank0:
    """Rank 0's store, and how often it was connected to and called."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.connections = self.calls = 0
        self.gone = False

    def connect(self) -> "Rank0":
        self.connections += 1
        return self

    def set(self, key: str, value: str) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._call()
        self.values |= {k: v.encode() for k, v in zip(keys, values, strict=True)}

    def check(self, keys: Sequence[str]) -> bool:
        self._call()
        return all(key in self.values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._call()
        return [self.values[key] for key in keys]

    def _call(self) -> None:
        self.calls += 1
        if self.gone:
            raise RuntimeError("Connection reset by peer")


@pytest.fixture
def rank_0() -> Rank0:
    return Rank0()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{os.getpid()} {request.node.name}"


@pytest.fixture
def first(name: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that is the first of the node."""
    pipes: Mapping[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FIRST, name], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "connected\n"
        yield process
        process.kill()


def test_the_watchdogs_of_a_node_have_one_connection_and_post_together(
    rank_0: Rank0, name: str
) -> None:
    stores = [SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT) for _ in range(9)]
    for rank, store in enumerate(stores[:8]):
        store.set(f"progress/{rank}", f"{rank}")
    stores[8].close()  # whoever leaves does not have its values wait
    wait_for(lambda: len(rank_0.values) == 8, "all values")
    assert (rank_0.connections, rank_0.calls) == (1, 2)
    keys = [f"progress/{rank}" for rank in range(8)]
    for store in stores[:8]:
        assert store.check(keys) and not store.check([*keys, "other"])
        assert store.multi_get(keys) == [b"%d" % rank for rank in range(8)]
    assert rank_0.connections == 1


def test_long_answers_arrive_whole(rank_0: Rank0, name: str) -> None:
    first, second = (SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT) for _ in range(2))
    keys = [f"progress/{rank}" for rank in range(1024)]
    rank_0.multi_set(keys, ["x" * 200] * len(keys))
    for _ in range(50):
        assert second.multi_get(keys) == first.multi_get(keys) == [b"x" * 200] * len(keys)
    assert rank_0.connections == 1


def test_who_leaves_sends_what_it_has_gathered_and_the_next_one_connects_anew(
    rank_0: Rank0, name: str
) -> None:
    first, second = (SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT) for _ in range(2))
    second.set("progress/1", "left")
    first.close()
    assert rank_0.values == {"progress/1": b"left"}
    assert second.check(["progress/1"])
    again = SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT)
    assert again.check(["progress/1"]) and rank_0.connections == 2


def test_a_forked_worker_does_not_keep_it_open(rank_0: Rank0, name: str) -> None:
    store = SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT)
    reader, writer = os.pipe()
    if not (worker := os.fork()):  # as one of a DataLoader
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    store.close()
    assert store._thread and not store._thread.is_alive()
    os.close(writer)
    os.waitpid(worker, 0)


def test_values_of_strangers_are_data(rank_0: Rank0, name: str) -> None:
    first, second = (SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT) for _ in range(2))
    rank_0.values["suspect"] = b'\xff"]\n'
    assert first.multi_get(["suspect"]) == [b'\xff"]\n']
    assert second.multi_get(["suspect"]) == ['\ufffd"]\n'.encode()]


def test_when_rank_0_is_gone_all_learn_why(rank_0: Rank0, name: str) -> None:
    _, second = (SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT) for _ in range(2))
    rank_0.gone = True
    with pytest.raises(RuntimeError, match="reset by peer"):
        second.check(["a"])
    second.set("a", "1")  # gathered
    wait_for(lambda: rank_0.calls == 2, "the attempt to send it")
    with pytest.raises(RuntimeError, match="reset by peer"):
        second.set("a", "2")


def test_a_rank_that_leaves_after_rank_0_leaves_no_thread_in_a_call(
    rank_0: Rank0, name: str
) -> None:
    store = SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT)
    exchange = Exchange(lambda: store, 0, LONG_BEAT, lambda _number, left: beat(1, DATA, left=left))
    rank_0.gone = True
    exchange.thread.start()
    wait_for(lambda: "reset by peer" in exchange.failure, "its failure")
    exchange.stop()
    wait_for(lambda: not (store._thread and store._thread.is_alive()), "the end of its thread")


def test_a_process_whose_first_one_is_killed_takes_its_place(
    rank_0: Rank0, name: str, first: "subprocess.Popen[str]"
) -> None:
    stores = [SharedStore(name, rank_0.connect, PATIENCE, LONG_BEAT) for _ in range(3)]
    assert rank_0.connections == 0
    first.kill()
    first.wait(PATIENCE)
    for rank, store in enumerate(stores):
        store.set(f"progress/{rank}", "1")
    wait_for(lambda: len(rank_0.values) == 3, "all values")
    assert rank_0.connections == 1


def test_without_a_route_to_rank_0_a_process_pauses_between_its_attempts(
    rank_0: Rank0, name: str, first: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    store = SharedStore(name, rank_0.connect, PATIENCE, BEAT)
    first.kill()
    first.wait(PATIENCE)
    monkeypatch.setattr(store, "_open", Mock(side_effect=[TimeoutError, rank_0]))
    monkeypatch.setattr(time, "sleep", pauses.append)
    store.set("a", "1")
    assert (pauses, rank_0.values) == ([BEAT], {"a": b"1"})


def test_a_process_whose_first_one_is_stopped_connects_alone(
    rank_0: Rank0, name: str, first: "subprocess.Popen[str]"
) -> None:
    store = SharedStore(name, rank_0.connect, PATIENCE, BEAT)
    first.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED)  # all its threads
    store.set("progress/1", "1")
    assert (rank_0.connections, rank_0.values) == (1, {"progress/1": b"1"})
    assert SharedStore(name, rank_0.connect, BEAT, BEAT).check(["progress/1"])


def test_a_store_that_does_not_answer_is_not_left_for_gone(name: str) -> None:
    """The call waits, as one of torch's does, and whoever comes next can connect."""
    answers = iter([TimeoutError(), None])

    def connect() -> Rank0:
        if error := next(answers):
            raise error
        return Rank0()

    with pytest.raises(TimeoutError):
        SharedStore(name, connect, PATIENCE, BEAT)
    assert not SharedStore(name, connect, PATIENCE, BEAT).check(["a"])
