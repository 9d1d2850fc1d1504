"""Tasks that multiprocessing starts are to the group what programs are."""

import gc
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clusterddp.errors import RequestError
from clusterddp.processes import hardware, start_methods
from clusterddp.processes.group import TaskGroup
from tests.processes.test_group import first_line
from tests.waiting import dying_with_us, has_gone
from tests.worker import called

METHODS = ("fork", "spawn", "forkserver")


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    start_methods.get_ready(request.param)
    return str(request.param)


def test_a_function_gets_what_a_program_gets(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    env = {**os.environ, "NAME": "a 'b'"}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    before = signal.signal(signal.SIGUSR1, print)
    try:
        with TaskGroup() as group:
            group.call(method, called.report, (), env, tmp_path / "log", tee=True)
            group.call(method, called.report, (), env, tmp_path / "other")
            assert group.wait() == [0, 0]
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        signal.signal(signal.SIGUSR1, before)
    expected = "a 'b' '' b'' True set() True\nto descriptor 2\né\n"
    assert (tmp_path / "log").read_text() == expected == (tmp_path / "other").read_text()
    assert capfd.readouterr().out == expected
    assert os.environ.get("NAME") is None


class Deleted:
    """Notes the process that collects it; garbage from the start, as only a collection can see."""

    def __init__(self, note: Path) -> None:
        self.note, self.itself = note, self

    def __del__(self) -> None:
        with self.note.open("a") as file:
            file.write(f"{os.getpid()}\n")


def test_a_forked_task_collects_no_garbage_of_its_parent(tmp_path: Path) -> None:
    start_methods.get_ready("fork")
    gc.collect()
    gc.disable()
    try:
        Deleted(tmp_path / "note")
        with TaskGroup() as group:
            group.call("fork", called.collects, (), os.environ)
            assert group.wait() == [0]
        assert not (tmp_path / "note").exists()
        gc.collect()
    finally:
        gc.enable()
    assert (tmp_path / "note").read_text() == f"{os.getpid()}\n"


def test_exit_codes_and_signals_come_back_in_order(method: str) -> None:
    with TaskGroup(kill_on_bad_exit=False) as group:
        for how in (0, 3, -9):
            group.call(method, called.ends, (how,), os.environ)
        assert group.wait() == [0, 3, -9]


def test_the_first_failure_ends_the_others(method: str, tmp_path: Path) -> None:
    with TaskGroup() as group:
        group.call(method, called.stays, (), os.environ, tmp_path / "log")
        pid = int(first_line(tmp_path / "log"))
        group.call(method, called.ends, (3,), os.environ)
        assert group.wait() == [-signal.SIGTERM, 3]
        assert group.first_failed == 1
    assert has_gone(pid)


def test_a_task_can_be_ended_before_it_has_begun_its_session(method: str) -> None:
    """The handler that this process has is none of the task's, not even before it has begun."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with TaskGroup() as group:
            group.call(method, called.stays, (), os.environ)
            group.terminate()
            assert group.wait() == [-signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_leaving_the_group_leaves_no_process(method: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TaskGroup() as group:
        group.call(method, called.stays, (), os.environ, tmp_path / "log")
        pid = int(first_line(tmp_path / "log"))
        raise KeyboardInterrupt
    assert has_gone(pid)


def test_what_a_function_leaves_running_is_killed(method: str, tmp_path: Path) -> None:
    with TaskGroup() as group:
        group.call(method, called.leaves_one_behind, (), os.environ, tmp_path / "log")
        assert group.wait() == [0]
    assert has_gone(int(first_line(tmp_path / "log")))


@pytest.mark.parametrize("method", METHODS)
def test_tasks_die_with_the_process_that_started_them(method: str, tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from clusterddp.processes import start_methods\n"
        "from clusterddp.processes.group import TaskGroup\n"
        "from tests.worker import called\n"
        f"start_methods.get_ready('{method}')\n"
        "group = TaskGroup()\n"
        f"group.call('{method}', called.stays, (), os.environ, Path(sys.argv[1]))\n"
        "group.wait()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        cwd=Path(__file__).parents[2], start_new_session=True,
        preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads here
    )  # fmt: skip
    pid = int(first_line(tmp_path / "log"))
    starter.kill()
    starter.wait()
    assert has_gone(pid)
    # Multiprocessing's own helpers too, the fork server and the tracker, wherever they are.
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _session(entry) == starter.pid:
            assert has_gone(int(entry.name))


def _session(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:
        return 0


def test_a_fork_server_that_runs_already_starts_tasks_as_well(tmp_path: Path) -> None:
    program = (
        "import multiprocessing, os, sys; from pathlib import Path\n"
        "multiprocessing.get_context('forkserver').Process(target=print).start()\n"
        "from clusterddp.processes import start_methods\n"
        "from clusterddp.processes.group import TaskGroup\n"
        "from tests.worker import called\n"
        "start_methods.get_ready('forkserver')\n"
        "with TaskGroup() as group:\n"
        "    group.call('forkserver', called.ends, (3,), os.environ)\n"
        "    sys.exit(group.wait() != [3])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], timeout=200,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_process_that_has_used_cuda_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", (driver,))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    start_methods.get_ready("fork")  # no GPU here, so it has not
    driver.touch()
    with pytest.raises(RequestError, match=r"Restart the .* kernel .* start_method='spawn'"):
        start_methods.get_ready("fork")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    start_methods.get_ready("fork")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # as a copy would find
    with pytest.raises(RequestError, match="has already used CUDA"):
        start_methods.get_ready("fork")
    start_methods.get_ready("spawn")
    monkeypatch.delattr(torch.cuda, "_is_in_bad_fork")
    start_methods.get_ready("fork")


def test_the_private_parts_are_where_they_were_seen() -> None:
    assert callable(torch.cuda._is_in_bad_fork), f"seen in torch 2.15, here {torch.__version__}"
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    assert hasattr(server, "_forkserver_alive_fd"), f"seen in Python 3.11, here {sys.version}"
