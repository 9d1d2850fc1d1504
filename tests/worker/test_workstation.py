import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from clusterddp import launch
from clusterddp.errors import RequestError, TrainingError
from clusterddp.processes.group import TaskGroup
from clusterddp.request.train_config import TrainConfig
from tests.waiting import has_gone, wait_for
from tests.worker import called


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_each_rank_knows_its_place_and_what_it_returns_comes_back_by_rank(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")
    found = launch(called.rank_and_sum, args=(10,), procs=2, start_method=method)
    assert found == [("0", 12), ("1", 12)]
    assert "RANK" not in os.environ


def test_a_function_that_nobody_could_import_is_forked() -> None:
    inner = {"RANK": 0}
    assert launch(lambda: {**inner, "RANK": os.environ["RANK"]}) == [{"RANK": "0"}]


def test_what_cannot_be_sent_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"cannot be sent to another process.*'fork'"):
        launch(lambda: 0, start_method="spawn")
    with pytest.raises(RequestError, match="cannot be sent"):
        launch(called.rank_and_sum, args=(lambda: 0,), start_method="forkserver")  # type: ignore[arg-type]

    def of_a_cell() -> None: ...

    main = sys.modules["__main__"]
    of_a_cell.__module__, of_a_cell.__qualname__ = "__main__", "of_a_cell"
    monkeypatch.setattr(main, "of_a_cell", of_a_cell, raising=False)
    monkeypatch.delattr(main, "__file__", raising=False)
    with pytest.raises(RequestError, match="it is defined in a notebook's cell"):
        launch(of_a_cell, start_method="spawn")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_rank_that_failed_first_is_named_with_its_traceback(method: str) -> None:
    with pytest.raises(TrainingError) as raised:
        launch(called.fails_second, procs=2, start_method=method)
    words = str(raised.value)
    assert words.startswith("rank 1 of 2 failed first:\nTraceback (most recent call last):\n")
    assert words.endswith("ValueError: boom")
    assert "called.py" in words and "workstation.py" not in words


def test_a_rank_that_is_ended_as_it_records_its_failure_hides_no_other(tmp_path: Path) -> None:
    half_written = tmp_path / "half written"

    def fails() -> None:
        if os.environ["RANK"] == "0":
            wait_for(half_written.exists, "the other rank")
            raise ValueError("boom")

        def write_half(path: Path, _: bytes) -> int:
            path.touch()
            half_written.touch()
            signal.pause()
            return 0

        Path.write_bytes = write_half  # type: ignore[assignment]
        raise ValueError("late")

    with pytest.raises(TrainingError, match=r"^rank 0 of 2 failed first:[^$]*boom\n\[CD0817\]$"):
        launch(fails, procs=2)


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (called.dies, (), "rank 1 of 2 failed first: killed by SIGKILL."),
        (called.leaves, (3,), r"SystemExit: 3"),
        (called.returns_a_lambda, (), r"first:\nthe result of rank \d cannot be pickled: "),
        (called.returns_what_cannot_be_read, (), "the result of rank 0 cannot be unpickled here: "),
    ],
)
def test_other_ends_of_a_rank_are_told_too(
    function: Any, args: tuple[object, ...], said: str
) -> None:
    with pytest.raises(TrainingError, match=said):
        launch(function, args=args, procs=2)
    assert launch(called.leaves, args=(0,), procs=2) == [None, None]


def test_wrong_requests_start_nothing(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="procs: 0"):
        launch(called.rank_and_sum, procs=0)
    with pytest.raises(RequestError, match="'exec' is not one of fork, spawn, forkserver"):
        launch(called.rank_and_sum, start_method="exec")
    with pytest.raises(RequestError, match="procs: '2' is not a number"):
        launch(called.rank_and_sum, procs="2")  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="target: 3 is neither a TrainConfig nor a function"):
        launch(3)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="run_dir"):
        launch(called.rank_and_sum, run_dir=tmp_path)  # type: ignore[call-overload]


def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    starter = os.getpid()

    def interrupts() -> None:
        rank = os.environ["RANK"]
        (tmp_path / rank).write_text(str(os.getpid()))
        wait_for((tmp_path / str(1 - int(rank))).exists, "the other rank")
        if rank == "1":
            os.kill(starter, signal.SIGINT)
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        launch(interrupts, procs=2)
    assert all(has_gone(int(path.read_text())) for path in tmp_path.iterdir())


@pytest.mark.parametrize("target", ["a function", "a training"])
def test_an_interrupt_while_the_ranks_start_leaves_none_of_them(
    target: str, synthetic_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread takes the signal that the main one blocks, as in a notebook."""
    pids: list[int] = []
    delivered, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    add = TaskGroup._add

    def interrupted(group: TaskGroup, process: Any, *rest: Any) -> int:
        pids.append(process.pid)
        if len(pids) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.read(delivered, 1)  # Python's own handler has run, in whichever thread
        return add(group, process, *rest)

    monkeypatch.setattr(TaskGroup, "_add", interrupted)
    leave = threading.Event()
    other = threading.Thread(target=leave.wait)
    other.start()
    before = signal.set_wakeup_fd(wakeup)
    try:
        with pytest.raises(KeyboardInterrupt):
            if target == "a function":
                launch(lambda: threading.Event().wait(), procs=2)
            else:
                config = TrainConfig(dataset="synthetic", data_dir=str(synthetic_dir), epochs=5000)
                launch(config, procs=2, run_dir=tmp_path / "run")
    finally:
        signal.set_wakeup_fd(before)
        leave.set()
        other.join()
        os.close(delivered)
        os.close(wakeup)
    assert len(pids) == 2
    assert all(has_gone(pid) for pid in pids)
