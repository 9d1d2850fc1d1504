import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusterddp.processes.group import TaskGroup
from tests.waiting import has_gone

PATIENCE = 90
FOREVER = "import signal; signal.pause()"
# Says its process id once it is ready, so that a test can signal it or see it go.
READY = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def first_line(path: Path) -> str:
    """The first line that a task writes to its log."""
    pause = select.poll()
    for _ in range(PATIENCE * 100):
        if path.exists() and "\n" in path.read_text():
            return path.read_text().splitlines()[0]
        pause.poll(10)
    raise AssertionError(f"nothing was written to {path}")


def test_exit_codes_and_signals_come_back_in_order() -> None:
    with TaskGroup(kill_on_bad_exit=False) as group:
        for code in ("pass", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"):
            group.start(python(code), os.environ)
        assert group.wait() == [0, 3, -9]
        assert group.first_failed in (1, 2)


def test_the_first_failure_ends_the_others() -> None:
    with TaskGroup(kill_wait_seconds=PATIENCE) as group:
        group.start(python(FOREVER), os.environ)
        group.start(python("raise SystemExit(3)"), os.environ)
        assert group.wait() == [-signal.SIGTERM, 3]
        assert group.first_failed == 1


def test_a_task_that_does_not_heed_term_is_killed(tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY
    with TaskGroup(kill_wait_seconds=0.1) as group:
        group.start(python(stubborn), os.environ, tmp_path / "log")
        first_line(tmp_path / "log")
        group.start(python("raise SystemExit(1)"), os.environ)
        assert group.wait() == [-signal.SIGKILL, 1]


def test_leaving_the_group_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TaskGroup() as group:
        group.start(python(READY), os.environ, tmp_path / "log")
        pid = int(first_line(tmp_path / "log"))
        raise KeyboardInterrupt
    assert has_gone(pid)


def test_what_a_task_leaves_running_is_killed(tmp_path: Path) -> None:
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {READY!r}])"
    with TaskGroup() as group:
        group.start(python(parent), os.environ, tmp_path / "log", tee=True)
        assert group.wait() == [0]
    log = (tmp_path / "log").read_text()
    assert not log or has_gone(int(log.split()[0]))


def test_a_signal_reaches_every_process_of_a_task(tmp_path: Path) -> None:
    parent = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {READY!r}]))"
    with TaskGroup() as group:
        group.start(python(parent), os.environ, tmp_path / "log")
        pid = int(first_line(tmp_path / "log"))
        group.signal_all(signal.SIGUSR1)
        assert group.wait() == [-signal.SIGUSR1]
        assert has_gone(pid)


def test_tasks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from clusterddp.processes.group import TaskGroup\n"
        "group = TaskGroup()\n"
        f"group.start([sys.executable, '-c', {READY!r}], os.environ, Path(sys.argv[1]))\n"
        "group.wait()"
    )
    starter = subprocess.Popen([*python(program), str(tmp_path / "log")])
    pid = int(first_line(tmp_path / "log"))
    starter.kill()
    starter.wait()
    assert has_gone(pid)


def test_output_goes_to_the_log_and_with_tee_here_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    say = "import sys; print('out'); sys.stdout.flush(); print('err', file=sys.stderr)"
    (tmp_path / "log").write_text("earlier\n")
    with TaskGroup() as group:
        group.start(python(say), os.environ, tmp_path / "log", tee=True)
        group.start(python(say), os.environ, tmp_path / "other")
        group.wait()
    assert (tmp_path / "log").read_text() == "earlier\nout\nerr\n"
    assert (tmp_path / "other").read_text() == "out\nerr\n"
    assert capfd.readouterr().out == "out\nerr\n"


def test_a_task_gets_the_given_environment_and_no_input(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['NAME'], repr(sys.stdin.read()))"
    with TaskGroup() as group:
        group.start(python(program), {**os.environ, "NAME": "a 'b'"}, tmp_path / "log")
        assert group.wait() == [0]
    assert (tmp_path / "log").read_text() == "a 'b' ''\n"


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with TaskGroup() as group, pytest.raises(FileNotFoundError):
        group.start([str(tmp_path / "nothing")], os.environ, tmp_path / "log", tee=True)
