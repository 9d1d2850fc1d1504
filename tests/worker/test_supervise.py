import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempt import begin
from clusterddp.run.outcome import read_outcome, read_outcomes
from clusterddp.run.run_dir import RunDir
from tests.run.test_flight_recorder import dump, entry
from tests.waiting import wait_for

# A task's process: what it runs stands between the environment and the call.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from clusterddp.ranks.dist_env import DistEnv
from clusterddp.errors import TrainingError
from clusterddp.worker.supervise import supervise
{child}
code = supervise(Path(sys.argv[1]), DistEnv.from_environ({{}}), child)
assert "torch" not in sys.modules
sys.exit(code)
"""
PATIENCE = 90


class Task:
    def __init__(self, run_dir: Path, child: str, env: Mapping[str, str], **options: Any) -> None:
        self.run = RunDir(run_dir)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(child=child), str(run_dir)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **env}, start_new_session=True, **options,
        )  # fmt: skip
        self.stderr = ""

    def read_line(self, name: str = "stdout") -> str:
        stream = getattr(self.process, name)
        ready, _, _ = select.select([stream], [], [], PATIENCE)
        assert ready, "the task said nothing"
        line: str = stream.readline().strip()
        return line

    def end(self) -> int:
        _, self.stderr = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode

    def outcome(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run.outcomes / "rank-0.json").read_text())
        return content


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Any]:
    started = []

    def start(child: str, env: Mapping[str, str] | None = None, **options: Any) -> Task:
        started.append(Task(tmp_path / "run", child, env or {}, **options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.communicate()


def test_the_exit_code_is_returned_and_recorded(task: Any) -> None:
    started = task(
        "child = lambda: 3",
        {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2", "SLURMD_NODENAME": "h02"},
    )
    assert started.end() == 3
    outcome = started.outcome()
    assert outcome["ended"] >= outcome["started"] > 1e9
    assert {name: outcome[name] for name in ("exit_code", "signal", "error")} == {
        "exit_code": 3, "signal": None, "error": None,
    }  # fmt: skip
    assert (outcome["job_id"], outcome["restart"], outcome["host"]) == ("17", 2, "h02")
    assert outcome["pid"] != started.process.pid


@pytest.mark.parametrize(("restarts", "begins"), [("0", False), ("1", True)])
def test_a_start_again_within_the_job_begins_a_part_of_the_log(
    restarts: str, begins: bool, task: Any
) -> None:
    started = task(
        "import clusterddp.worker.supervise\n"
        "supervise = lambda *a: clusterddp.worker.supervise.supervise(*a, attempt=2)\n"
        "child = lambda: 0",
        {"TORCHELASTIC_RESTART_COUNT": restarts, "SLURM_JOB_ID": "13"},
    )
    assert started.end() == 0
    assert started.stderr.startswith("--- attempt 2, job 13, start 2 in it") == begins


def test_an_exception_is_recorded_and_printed_with_its_traceback(task: Any) -> None:
    started = task("def child():\n    raise ValueError('boom')")
    assert started.end() == 1
    assert started.outcome()["error"] == {
        "type": "ValueError", "message": "boom", "peer_lost": False,
    }  # fmt: skip
    assert "Traceback" in started.stderr and "ValueError: boom" in started.stderr


def test_an_expected_error_is_printed_as_one_message(task: Any) -> None:
    started = task(
        "class Lost(TrainingError):\n    peer_lost = True\n"
        "def child():\n    raise Lost('rank 1 has gone')"
    )
    assert started.end() == 1
    assert started.outcome()["error"] == {
        "type": "", "message": "rank 1 has gone", "peer_lost": True,
    }  # fmt: skip
    assert started.stderr == "clusterddp: rank 1 has gone\n"


WITH_ITS_OWN_LOG = (
    "import clusterddp.worker.supervise\n"
    "supervise = lambda *a: clusterddp.worker.supervise.supervise(*a, own_log=True)\n"
)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("Watchdog caught collective operation timeout: it ran", True),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_what_nccls_watchdog_says_as_it_ends_a_task_is_recorded(
    words: str, error: bool, task: Any
) -> None:
    line = f"Process group watchdog thread terminated with exception: [Rank 0] {words}"
    started = task(
        f"{WITH_ITS_OWN_LOG}def child():\n    os.write(2, {line.encode()!r})\n    os.abort()"
    )
    assert started.end() == 134
    assert started.outcome()["signal"] == "SIGABRT"
    assert started.outcome()["error"] == {
        "type": "NCCL's watchdog", "message": words, "peer_lost": error,
    }  # fmt: skip


def test_what_it_said_in_an_earlier_attempt_explains_no_abort(task: Any, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make(run.logs)
    run.rank_log(0).write_text("watchdog thread terminated with exception: late\n")
    started = task(f"{WITH_ITS_OWN_LOG}child = os.abort")
    assert started.end() == 134
    assert started.outcome()["error"] is None


def test_an_error_longer_than_the_pipe_holds_does_not_block(task: Any) -> None:
    started = task("def child():\n    raise ValueError('x' * 1_000_000)")
    assert started.end() == 1
    assert started.outcome()["error"]["message"].startswith("xxx")


def test_sys_exit_keeps_its_code(task: Any) -> None:
    assert task("child = lambda: sys.exit(3)").end() == 3


def test_what_is_left_in_the_buffers_is_printed(task: Any) -> None:
    started = task("def child():\n    print('last words', end='')\n    return 0")
    assert started.process.communicate(timeout=PATIENCE)[0] == "last words"


def test_a_killed_task_is_recorded_by_its_parent(task: Any) -> None:
    started = task("child = lambda: os.kill(os.getpid(), signal.SIGKILL)")
    assert started.end() == 137
    assert (started.outcome()["exit_code"], started.outcome()["signal"]) == (137, "SIGKILL")


def test_a_running_task_has_a_record_without_an_end(task: Any) -> None:
    started = task(
        "def child():\n    input()\n    print('ready', flush=True)\n    input()\n    return 0"
    )
    started.process.stdin.write("\n")
    started.process.stdin.flush()
    assert started.read_line() == "ready"
    # Written once the child is let go, so it may come a moment after the child's first line.
    wait_for((started.run.outcomes / "rank-0.json").exists, "its record")
    assert "ended" not in started.outcome()
    started.process.stdin.write("\n")
    assert started.end() == 0


def test_an_executed_command_is_recorded_by_its_exit_code(task: Any) -> None:
    started = task("child = lambda: os.execvp('sh', ['sh', '-c', 'exit 7'])")
    assert started.end() == 7
    assert started.outcome()["error"] is None


def test_an_executed_command_that_cannot_start_is_recorded_with_the_reason(task: Any) -> None:
    started = task("child = lambda: os.execvp('/nowhere/at-all', ['x'])")
    assert started.end() == 1
    assert started.outcome()["error"]["type"] == "FileNotFoundError"


def test_an_executed_command_starts_with_default_signals(task: Any) -> None:
    started = task("child = lambda: os.execvp('grep', ['grep', '^Sig[BI]', '/proc/self/status'])")
    output = started.process.communicate(timeout=PATIENCE)[0]
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in output.splitlines()}
    ours = sum(
        1 << (number - 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    )
    assert masks["SigBlk"] & ours == 0
    assert masks["SigIgn"] & ours == 0


def test_nohup_keeps_its_meaning(task: Any) -> None:
    started = task(
        "child = lambda: os.execvp('grep', ['grep', '^SigIgn', '/proc/self/status'])",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    output = started.process.communicate(timeout=PATIENCE)[0]
    assert int(output.split()[1], 16) & 1 << (signal.SIGHUP - 1)


COUNT_USR1 = """
def child():
    seen = []
    def note(*_):
        seen.append(1)
        os.write(1, b"got it\\n")
    signal.signal(signal.SIGUSR1, note)
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    print(len(seen), flush=True)
    return 0
"""


@pytest.mark.parametrize(
    ("env", "received"),
    [
        ({}, 1),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}, 0),
        ({"TORCHELASTIC_RUN_ID": "none"}, 0),
        ({"SLURM_JOB_ID": "1"}, 1),  # an salloc shell
    ],
)
def test_only_a_task_started_by_hand_gets_the_signals_of_its_parent(
    task: Any, env: dict[str, str], received: int
) -> None:
    started = task(COUNT_USR1, env)
    started.read_line()
    os.kill(started.process.pid, signal.SIGUSR1)
    if received:
        assert started.read_line() == "got it"
    started.process.stdin.write("\n")
    started.process.stdin.flush()
    assert started.read_line() == str(received)
    assert started.end() == 0


def pending(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(line.split()[1], 16) for line in status.splitlines() if "Pnd:" in line]
    return any(mask & 1 << (number - 1) for mask in masks)


def test_a_signal_that_only_the_parent_got_before_the_fork_is_not_lost(task: Any) -> None:
    started = task(
        "fork = os.fork\n"
        "def signalled_fork():\n    os.kill(os.getpid(), signal.SIGUSR1)\n    return fork()\n"
        "os.fork = signalled_fork\n"
        "def child():\n    return 0",
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"},
    )
    assert started.end() == 128 + signal.SIGUSR1
    assert started.outcome()["signal"] == "SIGUSR1"


WAIT = "def child():\n    print(os.getpid(), flush=True)\n    signal.pause()"


def test_a_parent_told_to_end_outlives_the_task_to_record_it(task: Any) -> None:
    started = task(WAIT, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"})
    started.read_line()
    os.killpg(started.process.pid, signal.SIGTERM)  # as Slurm: every process of the step
    assert started.end() == 143
    assert started.outcome()["signal"] == "SIGTERM"


TOLD_LATE = """
import threading
import clusterddp.worker.supervise as parent
parent.polling.SIGNAL_SECONDS = 60
def tell_late(pid, record):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.kill(os.getpid(), signal.SIGTERM)
def began(*about):
    threading.Thread(target=tell_late, args=about).start()
supervise = lambda *a: parent.supervise(*a, began=began, is_command=True)
child = lambda: 0
"""


def test_what_watched_the_task_ends_after_the_record_and_before_a_signal_can_end_the_parent(
    task: Any,
) -> None:
    started = task(
        "import json\n"
        "import clusterddp.worker.supervise as parent\n"
        "def ended():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    record = json.loads((Path(sys.argv[1]) / 'outcomes/rank-0.json').read_text())\n"
        "    print(record['exit_code'], flush=True)\n"
        "supervise = lambda *a: parent.supervise(*a, began=lambda *_: ended)\n"
        "child = lambda: 3",
        {"SLURM_STEP_ID": "0"},
    )
    assert started.read_line() == "3"
    assert started.end() == 3


def test_a_signal_that_a_command_got_ahead_of_its_parent_is_recorded(task: Any) -> None:
    started = task(TOLD_LATE, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"})
    assert started.end() == 0
    assert started.outcome()["received_signal"]["signal"] == "SIGTERM"


def test_a_parent_started_by_hand_passes_term_on(task: Any) -> None:
    started = task(WAIT)
    started.read_line()
    started.process.terminate()
    assert started.end() == 143


def test_a_stopped_task_is_named_by_its_parent_which_can_still_speak(task: Any) -> None:
    started = task(WAIT, {"SLURMD_NODENAME": "h02"})
    child = int(started.read_line())
    os.kill(child, signal.SIGSTOP)
    name = f"clusterddp: process {child}, rank 0 on h02, "
    assert started.read_line("stderr") == f"{name}is stopped (SIGSTOP); kill -CONT lets it continue"
    os.kill(child, signal.SIGCONT)
    assert started.read_line("stderr") == f"{name}continues after a stop"
    started.process.terminate()
    assert started.end() == 143
    assert started.outcome()["continued"] > started.outcome()["started"]


NATIVE = """
import ctypes
import clusterddp.worker.supervise as parent
def keep_pythons_lock():
    ctypes.PyDLL(None).read(0, bytes(1), 1)  # PyDLL, unlike CDLL, does not let go of it
def child():
    parent.gil_watch.beat(3.0)
    os.kill(os.getpid(), signal.SIGSTOP)
    parent.gil_watch.beat(0.0)
    sys.stdin.readline()
    parent.gil_watch.beat(1.0)
    keep_pythons_lock()
    return 0
"""


def looks_of_the_parent(pid: int) -> int:
    """Count how often its second thread, which waits for signs of life, has been woken."""
    (thread,) = (entry for entry in Path(f"/proc/{pid}/task").iterdir() if entry.name != str(pid))
    status = (thread / "status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_a_task_in_native_code_that_keeps_pythons_lock_prints_its_stack(task: Any) -> None:
    started = task(NATIVE)
    said = ""

    def read_until(text: str) -> None:
        nonlocal said
        while text not in said:
            assert select.select([started.process.stderr], [], [], PATIENCE)[0], said
            said += os.read(started.process.stderr.fileno(), 1 << 16).decode()

    # While it is stopped it owes no sign of life; when it continues, its threads run, and to read
    # their frames then can crash it.
    read_until("is stopped")
    looks = looks_of_the_parent(started.process.pid)
    wait_for(lambda: looks_of_the_parent(started.process.pid) > looks + 3, "four looks")
    os.kill(int(said.partition("process ")[2].partition(",")[0]), signal.SIGCONT)
    read_until("continues")
    started.process.stdin.write("\n")
    started.process.stdin.flush()
    read_until("in keep_pythons_lock")
    assert said.count("most recent call first") == 1
    assert started.end() == 0


NOTE = """
from clusterddp.training import stop
import clusterddp.worker.supervise
supervise = lambda *a: clusterddp.worker.supervise.supervise(*a, listen=stop.requested.listen)
def child():
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    print(stop.requested.reason, flush=True)
    return 75
"""


def test_a_signal_during_the_imports_is_noted(task: Any) -> None:
    started = task(NOTE)
    child = int(started.read_line())
    for _ in range(2):
        os.kill(child, signal.SIGTERM)
        wait_for(lambda: not pending(child, signal.SIGTERM), "the signal")
    started.process.stdin.write("\n")
    started.process.stdin.flush()
    assert started.read_line() == "SIGTERM"
    assert started.end() == 75
    assert started.outcome()["exit_code"] == 75


@pytest.mark.parametrize("env", [{"SLURM_STEP_ID": "0"}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_to_have_saved_and_left_is_no_failure_to_slurm_or_an_agent(
    task: Any, env: dict[str, str]
) -> None:
    started = task("child = lambda: 75", env)
    assert started.end() == 0
    assert started.outcome()["exit_code"] == 75


def test_ctrl_c_ends_the_task_with_130(task: Any) -> None:
    started = task(WAIT, {"SLURM_STEP_ID": "0"})  # so that one Ctrl-C stays one
    started.read_line()
    os.killpg(started.process.pid, signal.SIGINT)
    assert started.end() == 130
    assert "interrupted" in started.stderr


def test_a_second_ctrl_c_while_the_first_is_answered_ends_it_with_130_too(task: Any) -> None:
    started = task(
        "class Interrupting:\n"
        "    def write(self, text):\n        raise KeyboardInterrupt\n"
        "    def flush(self):\n        pass\n"
        "def child():\n    sys.stderr = Interrupting()\n    raise KeyboardInterrupt"
    )
    assert started.end() == 130
    assert started.outcome()["exit_code"] == 130


def test_a_killed_parent_leaves_no_orphan(task: Any) -> None:
    started = task(WAIT)
    child = os.pidfd_open(int(started.read_line()))
    try:
        started.process.kill()
        gone, _, _ = select.select([child], [], [], PATIENCE)
        assert gone, "the task has outlived its parent"
    finally:
        os.close(child)


def test_an_attempts_record_lies_with_the_attempt(task: Any, tmp_path: Path) -> None:
    made = begin(RunDir(tmp_path / "run"))
    started = task(
        "import clusterddp.worker.supervise\n"
        "supervise = lambda *a: clusterddp.worker.supervise.supervise(*a, attempt=1)\n"
        "child = lambda: 3"
    )
    assert started.end() == 3
    assert [(each.rank, each.exit_code) for each in read_outcomes(made.outcomes)] == [(0, 3)]
    assert not started.run.outcomes.exists()


@pytest.mark.parametrize("code", [0, 3])
def test_the_calls_in_a_failed_ranks_dump_are_recorded(
    task: Any, tmp_path: Path, code: int
) -> None:
    made = begin(RunDir(tmp_path / "run"))
    dump(made.nccl_trace(0), entry(4, "started"))
    started = task(
        "import clusterddp.worker.supervise\n"
        "supervise = lambda *a: clusterddp.worker.supervise.supervise(*a, attempt=1)\n"
        f"child = lambda: {code}"
    )
    assert started.end() == code
    known = read_outcome(made.outcomes, 0)
    assert known is not None
    assert [each.open for each in known.collectives] == ([4] if code else [])


def test_a_full_disk_under_the_log_does_not_keep_the_parent_from_its_record(
    task: Any, tmp_path: Path
) -> None:
    started = task(
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
        "def child():\n    os.kill(os.getpid(), signal.SIGSTOP)\n    return 5"
    )
    wait_for((started.run.outcomes / "rank-0.json").exists, "its record")
    child = started.outcome()["pid"]
    wait_for(lambda: " (stopped)" in Path(f"/proc/{child}/status").read_text(), "the stop")
    os.kill(child, signal.SIGCONT)
    assert started.end() == 5
    assert started.outcome()["exit_code"] == 5


def test_a_run_directory_that_cannot_be_written_costs_the_record_only(
    task: Any, tmp_path: Path
) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    started = task("child = lambda: 5")
    assert started.end() == 5
    assert "cannot record its outcome" in started.stderr
