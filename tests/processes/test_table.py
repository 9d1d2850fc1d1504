"""Processes of this machine, as proc(5) shows them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterddp.processes import table
from clusterddp.processes.table import World, accepts_signal, find_world, watch_for_world
from tests.waiting import PATIENCE, wait_for


def test_a_process_hears_what_it_does_not_ignore_until_it_is_reaped() -> None:
    words = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(1); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout
        child.stdout.readline()
        assert accepts_signal(child.pid, signal.SIGTERM)
        assert not accepts_signal(child.pid, signal.SIGUSR1)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        assert accepts_signal(child.pid, signal.SIGTERM)
        assert not accepts_signal(child.pid, signal.SIGUSR1)
    finally:
        child.kill()
        child.communicate()
    assert not accepts_signal(child.pid, signal.SIGTERM)


OWN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h01", "MASTER_PORT": "2000"}
TASK = """
import subprocess, sys
children = [subprocess.Popen(["cat"], env=env) for env in eval(sys.argv[1])]
[child.wait() for child in children]
"""


@contextmanager
def task(
    *children: Mapping[str, str], own: Mapping[str, str] = OWN, shell: bool = False
) -> Iterator[int]:
    """A task whose children live until the test is through; with `shell` a shell starts it."""
    environs = [{"PATH": os.environ["PATH"], **own, **child} for child in children]
    argv = [sys.executable, "-c", TASK, repr(environs)]
    argv = ["bash", "-c", '"$@"; true', "bash", *argv] if shell else argv
    environ = {**os.environ, **own}
    with subprocess.Popen(
        argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: len(running(process.pid, b"cat")) == len(children), "the children")
        try:
            yield process.pid
        finally:
            assert process.stdin
            process.stdin.close()
            process.wait(PATIENCE)


def running(pid: int, program: bytes) -> list[int]:
    """The descendants that have become a program."""
    return [
        child.pid
        for child in table.descendants(pid)
        if Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(program)
    ]


def rank(number: int, size: int, port: str = "3000", **more: str) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(size), "MASTER_PORT": port, **more}


@pytest.mark.parametrize(
    ("children", "size"),
    [
        ([rank(0, 2), rank(1, 2)], 2),
        ([rank(0, 1)], 1),
        ([rank(0, 4, "2000", TORCHELASTIC_RUN_ID="x")] + [rank(n, 4, "1", TORCHELASTIC_RUN_ID="x")
         for n in range(4)], 4),
        ([{"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(n)} for n in range(2)], 2),
        ([{"PMI_SIZE": "1", "PMI_RANK": "0"}], 1),
        ([], 0),  # none at all
        ([{}], 0),  # a reader of data
        ([rank(1, 4, "2000")], 0),  # the task's own rank
        ([rank(2, 4), rank(3, 4)], 0),  # torchrun's of a world over all tasks
        ([rank(0, 2, "1"), rank(1, 2, "2")], 0),  # parts of two
        ([rank(0, 2), rank(0, 2)], 0),
        ([{"RANK": "x", "WORLD_SIZE": "many"}], 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shell", [False, True])
def test_a_world_is_the_children_s_own_where_all_its_ranks_are_below_the_task(
    children: list[dict[str, str]], size: int, shell: bool
) -> None:
    with task(*children, shell=shell) as pid:
        world = find_world(pid, OWN)
    assert (world.size if world else 0) == size
    if world:
        assert world.launcher[:3] == (sys.executable, "-c", TASK)


def test_children_that_inherit_their_tasks_world_form_none_of_their_own() -> None:
    alone = {**OWN, "RANK": "0", "WORLD_SIZE": "1"}
    with task({}, {}, own=alone) as pid:
        assert find_world(pid, alone) is None
        assert find_world(pid, OWN) is not None


def test_a_world_that_forms_later_is_found_once() -> None:
    found: list[World] = []
    with task(rank(0, 1)) as pid:
        watch_for_world(pid, OWN, found.append)
        wait_for(lambda: found, "the world")
        wait_for(lambda: not looking(), "the thread's end")
    assert [world.size for world in found] == [1]


def test_the_looking_ends_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[World] = []
    looks: Callable[[int, Mapping[str, str]], World | None] = find_world
    seen = threading.Event()

    def look(pid: int, own: Mapping[str, str]) -> World | None:
        seen.set()
        return looks(pid, own)

    monkeypatch.setattr(table, "find_world", look)
    with task({}) as pid:
        watch_for_world(pid, OWN, found.append)
        assert seen.wait(PATIENCE)
    wait_for(lambda: not looking(), "the thread's end")
    assert found == []


def test_the_looking_ends_where_another_process_has_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts, found = iter([100, 200]), list[World]()
    monkeypatch.setattr(table, "start_ticks", lambda _pid: next(starts))
    with task(rank(0, 1)) as pid:
        watch_for_world(pid, OWN, found.append)
        wait_for(lambda: not looking(), "the thread's end")
    assert found == []


def looking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "worlds"]


def test_a_process_that_has_gone_has_no_children() -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait(PATIENCE)
        assert find_world(gone.pid, OWN) is None
    assert find_world(gone.pid, OWN) is None
