"""The error that ends a task is read from what it has left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clusterddp.run.attempt import Attempt
from clusterddp.run.events import Failure
from clusterddp.run.outcome import Outcome, read_outcomes
from clusterddp.run.records import TaskError
from clusterddp.run.run_dir import RunDir
from clusterddp.status import end_codes
from clusterddp.worker.supervise import MAX_MESSAGE, parse_error_file, parse_traceback
from tests.hostile import CARRIED, REFUSED
from tests.waiting import PATIENCE

FRAMES = (
    'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    f()\n    ~^^\n'
)


@pytest.mark.parametrize(
    ("log", "type_", "message"),
    [
        (f"epoch 1\n{FRAMES}ValueError: boom\n", "ValueError", "boom"),
        (f"{FRAMES}ValueError: boom\nof two lines\nTypeError: no\n", "ValueError", "boom"),
        (f"{FRAMES}OSError: a:\nTried b, got:\n<urlopen>\nx", "OSError",
         "a:\nTried b, got:\n<urlopen>"),
        (f"{FRAMES}KeyError: 'a'\n\nDuring handling …:\n\n{FRAMES}OSError: b", "OSError", "b"),
        (f"{FRAMES}AssertionError\n", "AssertionError", ""),
        (f"{FRAMES}torch.OutOfMemoryError: CUDA: x\n", "torch.OutOfMemoryError", "CUDA: x"),
        (f"{FRAMES}Grün: \x1b[31mred\n", "Grün", "\\x1b[31mred"),
        ("".join(f"[rank3]: {line}\n" for line in f"{FRAMES}ValueError: b".splitlines()),
         "ValueError", "b"),
        ('  File "t.py", line 1\n    )\n    ^\nSyntaxError: no\n', "SyntaxError", "no"),
    ],
)  # fmt: skip
def test_the_last_traceback_names_the_exception(log: str, type_: str, message: str) -> None:
    assert parse_traceback(log) == TaskError(type_, message, of_command=True)


def test_an_error_of_this_package_in_a_users_script_keeps_its_code() -> None:
    words = f"two ranks {'x' * MAX_MESSAGE}. [CD0816]"
    errors = [parse_traceback(f"{FRAMES}{kind}: {words}\n") for kind in ("clusterddp.E", "E")]
    assert [error and error.code for error in errors] == ["CD0816", ""]


CALLED = "subprocess.CalledProcessError: Command '['/bin/python', 't.py']' returned 1."
CHILD = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\nt.py FAILED\n"
CLOSED = "RuntimeError: [gloo/pair.cc:534] Connection closed by peer [10.77.0.3]:1"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (f"{FRAMES}ValueError: boom\n{FRAMES}{CALLED}\n", "ValueError: boom"),
        (f"{FRAMES}ValueError: boom\n{FRAMES}{CHILD}", "ValueError: boom"),
        (f"{FRAMES}OSError: a\n[rank1]: Late\n{FRAMES}{CLOSED}\n{FRAMES}{CHILD}\n{FRAMES}{CALLED}",
         "OSError: a"),
        (f"{FRAMES}{CLOSED}\n{FRAMES}{CALLED}", CLOSED),
        (f"/bin/python: No module named no_pkg\n{FRAMES}{CALLED}",
         "ModuleNotFoundError: No module named no_pkg"),
        (f"  File 't.py', line 1\nSyntaxError: no\n{FRAMES}{CALLED}", "SyntaxError: no"),
        (f"{FRAMES}{CALLED}", CALLED),
        (f"{FRAMES}OSError: a\n\nDuring handling of the above exception, another exception "
         f"occurred:\n\n{FRAMES}{CALLED}", CALLED),
        (f"{FRAMES}OSError: handled\n{FRAMES}{CALLED}".replace("/bin/python", "ffmpeg"),
         CALLED.replace("/bin/python", "ffmpeg")),
    ],
)  # fmt: skip
def test_the_error_of_a_launchers_child_stands_for_the_launchers_own(log: str, reason: str) -> None:
    error = parse_traceback(log)
    assert error is not None
    assert f"{error.type}: {error.message}" == reason


@pytest.mark.parametrize(
    "log",
    [
        "", "ValueError: of no traceback\n", FRAMES, f"{FRAMES}*** what is this\n",
        "my Traceback (most recent call last):\nValueError: x\n",
    ],
)  # fmt: skip
def test_what_is_no_traceback_names_nothing(log: str) -> None:
    assert parse_traceback(log) is None


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        ("RuntimeError: [gloo/…/pair.cc:534] Connection closed by peer [10.77.0.3]:1", True),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1", True),
        ("RuntimeError: boom", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),  # a download's
        ("BrokenPipeError: [Errno 32] Broken pipe", False),
    ],
)
def test_the_loss_of_a_peer_is_told_from_an_error_of_its_own(words: str, lost: bool) -> None:
    error = parse_traceback(FRAMES + words)
    assert error is not None
    assert error.peer_lost is lost


@pytest.mark.parametrize(
    ("content", "type_", "message"),
    [
        ({"message": {"message": "ValueError: a\nb", "extraInfo": {}}}, "ValueError", "a\nb"),
        ({"message": "ValueError: a"}, "ValueError", "a"),
        ({"message": "all went wrong!"}, "", "all went wrong!"),
        ({"message": "E: " + "x" * 9999}, "E", "x" * MAX_MESSAGE),
    ],
)
def test_torchs_error_file_is_read(tmp_path: Path, content: Any, type_: str, message: str) -> None:
    path = tmp_path / "error-0.json"
    path.write_text(json.dumps(content))
    assert parse_error_file(path) == TaskError(type_, message, of_command=True)


@pytest.mark.parametrize(
    "content", ["", "{", "[" * 99999, "[]", "{}", '{"message": 3}', '{"message": {"message": " "}}']
)
def test_another_file_in_its_place_is_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "error-0.json"
    assert parse_error_file(path) is None
    path.write_text(content)
    assert parse_error_file(path) is None


def test_no_pipe_is_waited_for_no_link_followed_and_no_giant_read(tmp_path: Path) -> None:
    pipe, link, giant = tmp_path / "pipe", tmp_path / "link", tmp_path / "giant"
    os.mkfifo(pipe)
    (tmp_path / "real").write_text('{"message": "E: a"}')
    link.symlink_to("real")
    with giant.open("w") as file:
        file.write('{"message": "E: a"}' + " " * (1 << 21))
    assert [parse_error_file(path) for path in (pipe, link, giant, tmp_path)] == [None] * 4


@pytest.mark.parametrize("value", [value for value in CARRIED + REFUSED if "\0" not in value])
def test_every_message_is_carried_as_text(tmp_path: Path, value: str) -> None:
    path = tmp_path / "error-0.json"
    path.write_text(json.dumps({"message": f"E: {value}"}))
    error = parse_error_file(path)
    assert error is not None
    assert all(c.isprintable() or c == "\n" for c in error.type + error.message)


def outcome_of(tmp_path: Path, program: str, environ: dict[str, str] | None = None) -> Outcome:
    """How rank 0 of a command ended, whose log is a file as under srun."""
    run = RunDir(tmp_path / "run")
    run.make(run.logs, run.attempts, Attempt(run, 1).path, Attempt(run, 1).outcomes)
    argv = [sys.executable, "-m", "clusterddp", "exec", "--run-dir", str(run.path), "--attempt=1"]
    with run.rank_log(0).open("a") as log:
        log.write(f"{FRAMES}OfTheLastTime: x\n")
        log.flush()
        subprocess.run(
            [*argv, "--", sys.executable, "-c", program],
            stdout=log, stderr=log, check=False, env={**os.environ, **(environ or {})},
        )  # fmt: skip
    [outcome] = read_outcomes(Attempt(run, 1).outcomes)
    return outcome


def test_a_commands_exception_is_recorded(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, "raise ValueError('boom')")
    assert (outcome.exit_code, outcome.reason) == (1, "ValueError: boom")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit('no')", "exit code 1"),  # of this attempt there is no traceback
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import sys, traceback\ntry: 1/0\nexcept Exception: traceback.print_exc(); sys.exit(4)",
         "exit code 4"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("1/0", "ZeroDivisionError: division by zero"),
        ("raise RuntimeError('Error downloading a.gz:\\nTried b, got:\\n<urlopen error>\\nx')",
         "RuntimeError: Error downloading a.gz: Tried b, got: <urlopen error>"),
        ("import sys; print('x' * 999999, file=sys.stderr); raise OSError('late')",
         "OSError: late"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os; os.write(2, b'Process group watchdog thread terminated with exception: late')"
         "; os.abort()", "NCCL's watchdog: late"),
    ],
)  # fmt: skip
def test_only_an_exception_that_ended_the_command_counts(
    tmp_path: Path, program: str, reason: str
) -> None:
    assert outcome_of(tmp_path, program).reason == reason


RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise LookupError("as torch\\nrecords it")
try:
    main()
except LookupError:
    raise SystemExit(5)
"""


@pytest.mark.slow
def test_torchs_record_decorator_is_heard(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, RECORDED)
    assert (outcome.exit_code, outcome.reason) == (5, "LookupError: as torch")
    assert outcome.error is not None
    assert outcome.error.message == "as torch\nrecords it"


@pytest.mark.slow
def test_an_agents_own_error_file_is_left_to_it(tmp_path: Path) -> None:
    agents = tmp_path / "agents.json"
    outcome = outcome_of(tmp_path, RECORDED, {"TORCHELASTIC_ERROR_FILE": str(agents)})
    assert outcome.reason == "LookupError: as torch"
    assert agents.is_file()


@pytest.mark.parametrize("words", [["-m", "no_such_pkg"], ["-m", "no_such_pkg.train"]])
def test_a_module_that_python_does_not_find_is_the_error(words: list[str]) -> None:
    said = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert said.returncode == 1
    error = parse_traceback(said.stderr)
    assert error is not None
    assert error.type == "ModuleNotFoundError"
    assert "no_such_pkg" in error.message
    failure = Failure(0, "h01", f"{error.type}: {error.message}", "logs/rank-0.log", 1)
    assert end_codes.code_of_failure(failure) == "CD1217"
