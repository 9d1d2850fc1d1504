"""Programs of all kinds are looked at, and go on as if nobody had looked."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from clusterddp import polling
from clusterddp.processes import stacks, table
from clusterddp.processes.stacks import Program, read_stacks
from clusterddp.processes.table import start_ticks
from clusterddp.version import arming_folder
from tests.data.made_sets import NOBODY
from tests.waiting import PATIENCE, dying_with_us, wait_for

Start = Callable[..., subprocess.Popen[str]]

# Each says that it is ready, waits for a line and ends by saying what it got.
WAITS = """\
import os, sys
{before}
def outer():
    inner()
def inner():
    os.write(1, b"ready\\n")
    print("got", sys.stdin.readline().strip())
outer()
"""
PYTHON = [sys.executable, "-c", WAITS.format(before="")]
COUNTS = "import signal\ncame = []\nsignal.signal(signal.SIGURG, lambda *_: print('signalled'))"
KINDS = {
    "a shell": ["bash", "-c", "trap 'echo signalled' URG; echo ready; read line; echo got $line"],
    "a compiled program": ["sed", "-u", "-e", "1!s/^/got /"],
    "Python": PYTHON,
    "Python that takes the signal itself": [sys.executable, "-c", WAITS.format(before=COUNTS)],
}
NATIVE = """\
import ctypes, os, signal
read, buffer = ctypes.CDLL(None).read, ctypes.create_string_buffer(9)
def stuck():
    os.write(1, b"ready\\n")
    read(0, buffer, 9)
stuck()
print("got on")
"""
ARMED = {"PYTHONPATH": arming_folder()}


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program that says when it is ready; at the end it is killed, if it still runs."""
    started = []

    def begin(argv: list[str], env: Mapping[str, str] = {}) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": "", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dying_with_us(),  # noqa: PLW1509 -- no threads
        )
        started.append(program)
        assert program.stdin
        assert program.stdout
        if argv[0] == "sed":  # it repeats what it is told
            program.stdin.write("ready\n")
            program.stdin.flush()
        assert program.stdout.readline() == "ready\n", program.communicate()[1]
        return program

    yield begin
    for program in started:
        with program:
            program.kill()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that is slow to answer, on a busy machine, is one that answers."""
    monkeypatch.setattr(polling, "STACKS_SECONDS", PATIENCE)
    monkeypatch.setattr(stacks, "_PY_SPY_SECONDS", PATIENCE)


@pytest.fixture(autouse=True)
def no_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH without py-spy, wherever it is installed."""
    found = shutil.which("py-spy")
    if found:
        kept = os.environ["PATH"].split(os.pathsep)
        folders = [entry for entry in kept if Path(entry) != Path(found).parent]
        monkeypatch.setenv("PATH", os.pathsep.join(folders))


@pytest.fixture
def py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes a stand-in for py-spy, which is in the shell's language."""

    def make(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "py-spy").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return make


def look_at(program: subprocess.Popen[str], *, workers: bool = False) -> list[Program]:
    ticks = start_ticks(program.pid)
    assert ticks is not None
    return read_stacks(program.pid, ticks, workers=workers)


def sleeps(program: subprocess.Popen[str]) -> bool:
    process = table.read_process(program.pid)
    return process is not None and process.state == "S"


def functions(program: Program) -> list[str]:
    """The functions of the main thread, the innermost first."""
    return [frame.function for frame in program.threads[0].frames]


def goes_on(program: subprocess.Popen[str]) -> None:
    out, err = program.communicate("on\n")
    assert (program.returncode, out, err) == (0, "got on\n", "")


@pytest.mark.parametrize("argv", KINDS.values(), ids=KINDS)
def test_a_program_without_a_handler_is_told_of_and_goes_on(start: Start, argv: list[str]) -> None:
    program = start(argv)
    wait_for(lambda: sleeps(program), "its reading of a line")
    before = table.status(program.pid)
    [found] = look_at(program)
    assert found.threads == ()
    wanted = "no Python in it (" if argv[0] != sys.executable else "it has no stack handler"
    assert wanted in found.note
    assert "sleeping" in found.note
    assert argv[0] != sys.executable or "; its stack cannot be read: no py-spy" in found.note
    after = table.status(program.pid)
    masks = ("SigCgt", "SigIgn", "SigBlk", "TracerPid")
    assert [after[name] for name in masks] == [before[name] for name in masks]
    goes_on(program)


def test_a_handler_tells_the_main_threads_stack_time_and_again(start: Start) -> None:
    program = start(PYTHON, ARMED)
    for _ in range(3):
        [found] = look_at(program)
        assert (found.how, functions(found)) == ("handler", ["inner", "outer", "<module>"])
        assert found.threads[0].frames[-1].line == 8
    goes_on(program)


def test_a_handler_answers_from_native_code(start: Start) -> None:
    program = start([sys.executable, "-c", NATIVE], ARMED)
    [found] = look_at(program)
    assert functions(found) == ["stuck", "<module>"]
    goes_on(program)


def test_a_program_in_a_shells_script_is_found(start: Start) -> None:
    script = '"$@" & wait $!'  # the shell stays above it
    program = start(
        ["bash", "-c", f"exec 3<&0; {script.replace('&', '<&3 &')}", "-", *PYTHON], ARMED
    )
    [found] = look_at(program)
    assert functions(found) == ["inner", "outer", "<module>"]
    assert found.pid != program.pid
    goes_on(program)


def test_what_an_armed_program_becomes_is_not_signalled(start: Start) -> None:
    code = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
    for argv in ([sys.executable, "-I", "-c", WAITS.format(before=COUNTS)], KINDS["a shell"]):
        program = start([sys.executable, "-c", code, *argv], ARMED)
        [found] = look_at(program)
        assert found.threads == ()
        goes_on(program)


def test_a_program_that_closed_all_its_files_is_not_asked(start: Start) -> None:
    closes = "import os; os.closerange(3, 100); log = open('/dev/null', 'w')"
    program = start([sys.executable, "-c", WAITS.format(before=closes)], ARMED)
    [found] = look_at(program)
    assert "it has no stack handler" in found.note
    goes_on(program)


def test_an_answer_is_read_once_its_writing_has_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [True, True, False]
    monkeypatch.setattr(stacks, "_is_writing", lambda _: answers.pop(0))
    [found] = look_at(start(PYTHON, ARMED))
    assert functions(found) == ["inner", "outer", "<module>"]
    assert answers == []


def test_a_program_that_ends_before_the_signal_is_told_of(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: int) -> None:
        raise ProcessLookupError

    program = start(PYTHON, ARMED)
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", gone)
        [found] = look_at(program)
    assert "; it is ending; " in found.note
    goes_on(program)


TAKES = {
    "handles": COUNTS,
    "handles each": """\
import signal
for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    if each < signal.SIGRTMIN:
        assert signal.signal(each, lambda *_: print('signalled')) is not None""",
    "on its loop": """\
import asyncio, signal
loop = asyncio.new_event_loop()
loop.add_signal_handler(signal.SIGURG, print, 'signalled')""",
    "waits for it": """\
import signal, threading
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
def waits():
    print('signalled', signal.sigwait({signal.SIGURG}), flush=True)
threading.Thread(target=waits, daemon=True).start()""",
}


@pytest.mark.parametrize("before", TAKES.values(), ids=TAKES)
def test_a_program_that_takes_the_signal_itself_keeps_it(start: Start, before: str) -> None:
    program = start([sys.executable, "-c", WAITS.format(before=before)], ARMED)
    [found] = look_at(program)
    assert "it has no stack handler" in found.note
    goes_on(program)


def test_a_program_that_is_born_ignoring_the_signal_goes_on_to(start: Start) -> None:
    program = start(["sh", "-c", "trap '' URG; exec \"$@\"", "sh", *PYTHON], ARMED)
    [found] = look_at(program)
    assert "it has no stack handler" in found.note
    goes_on(program)


def test_what_a_program_finds_of_the_arming_is_a_file_alone(start: Start) -> None:
    """Signals as they were, calls that refuse what they refused, and no import but built-in."""
    before = """\
import sys
assert not {'signal', 'enum', 'ctypes', 'fcntl'} & sys.modules.keys(), sys.modules.keys()
assert 'armed' not in ''.join(sys.path)
import signal
assert [signal.getsignal(n) for n in signal.valid_signals() if n in (10, 12, 15, signal.SIGURG)] \
    == [signal.SIG_DFL] * 4
old = signal.signal(signal.SIGTERM, print)
assert (old, signal.signal(signal.SIGTERM, old)) == (signal.SIG_DFL, print)
for wrong in ((), (None, print), ('a', print)):
    try:
        signal.signal(*wrong)
    except TypeError:
        continue
    raise SystemExit('not refused')"""
    program = start([sys.executable, "-c", WAITS.format(before=before)], ARMED)
    [found] = look_at(program)
    assert found.how == "handler"
    goes_on(program)


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_an_armed_program_whose_handler_has_gone_is_not_asked(start: Start, handler: str) -> None:
    before = f"import signal; signal.signal(signal.SIGURG, signal.{handler})"
    program = start([sys.executable, "-c", WAITS.format(before=before)], ARMED)
    [found] = look_at(program)
    assert "it has no stack handler" in found.note
    goes_on(program)


def test_a_stopped_program_stays_stopped_and_is_called_so(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "STACKS_SECONDS", 0.05)
    program = start(PYTHON, ARMED)
    program.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
    [found] = look_at(program)
    assert found.note.startswith("stopped (SIGSTOP)")
    assert "its stack handler does not answer" in found.note
    process = table.read_process(program.pid)
    assert process
    assert process.state == "T"
    program.send_signal(signal.SIGCONT)
    goes_on(program)


def test_a_later_process_of_the_number_is_not_taken_for_it(start: Start) -> None:
    program = start(PYTHON, ARMED)
    ticks = start_ticks(program.pid)
    assert ticks
    assert read_stacks(program.pid, ticks - 1) == []


def test_a_program_that_may_not_be_looked_at_is_not_said_to_have_no_python(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that has a right which the process that looks has not."""
    program = start(PYTHON, ARMED)

    def forbidden(_: Path) -> Path:
        raise PermissionError

    monkeypatch.setattr(Path, "readlink", forbidden)
    [found] = look_at(program)
    assert "not permitted to read it: " in found.note
    assert "no Python" not in found.note
    goes_on(program)


def test_another_users_process_is_left_alone(start: Start) -> None:
    if os.geteuid():
        pytest.skip("another user's process takes root")
    become = f"import os; os.setuid({NOBODY})"
    program = start([sys.executable, "-c", WAITS.format(before=become)], ARMED)
    [found] = look_at(program)
    assert f"belongs to user {NOBODY}" in found.note
    goes_on(program)


FORKS = """\
import multiprocessing, os, sys
def work():
    sys.stdin = os.fdopen(0)
    print("ready", flush=True)
    sys.stdin.readline()
def parent():
    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    worker.join()
parent()
print("got on")
"""


def test_workers_are_shown_only_where_they_are_asked_for(start: Start) -> None:
    program = start([sys.executable, "-c", FORKS], ARMED)
    [found] = look_at(program)
    assert "parent" in functions(found)
    own, worker = look_at(program, workers=True)
    assert own.pid == program.pid
    assert functions(worker)[0] == "work"
    goes_on(program)


AGENT = f"""\
import os, subprocess, sys
code = {WAITS.format(before="")!r}
for rank in (2, 3):
    environ = {{**os.environ, "RANK": str(rank), "TORCHELASTIC_RUN_ID": "x"}}
    started = subprocess.Popen([sys.executable, "-c", code], env=environ, stdin=0)
    if rank == 2:
        first = started
started.wait() or first.wait()
"""


def test_an_agents_ranks_are_shown_in_its_place(start: Start) -> None:
    program = start([sys.executable, "-c", AGENT], ARMED)
    assert program.stdout
    assert program.stdout.readline() == "ready\n"
    found = look_at(program)
    assert sorted(each.rank or 0 for each in found) == [2, 3]
    assert all(functions(each)[0] == "inner" for each in found)
    program.communicate("on\n")
    assert program.returncode == 0


def spied(program: subprocess.Popen[str]) -> str:
    """What py-spy 0.4 prints of a program with two threads (its StackTrace, as JSON)."""
    frame = {"module": None, "short_filename": None, "locals": None, "is_entry": True}
    return json.dumps(
        [
            {
                "pid": program.pid, "thread_id": 140, "thread_name": "reader",
                "os_thread_id": program.pid + 1, "active": False, "owns_gil": False,
                "frames": [{**frame, "name": "read", "filename": "/a/reader.py", "line": 7}],
                "process_info": None,
            },
            {
                "pid": program.pid, "thread_id": 141, "thread_name": "MainThread",
                "os_thread_id": program.pid, "active": True, "owns_gil": True,
                "frames": [{**frame, "name": "train", "filename": "/a/train.py", "line": 9}],
                "process_info": None,
            },
        ]
    )  # fmt: skip


def test_py_spy_comes_first_and_does_not_stop_the_program(
    start: Start, py_spy: Callable[[str], None], tmp_path: Path
) -> None:
    program = start(PYTHON, ARMED)
    (tmp_path / "answer").write_text(spied(program))
    py_spy(f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/answer')
    [found] = look_at(program)
    assert [(thread.name, thread.frames[0].function) for thread in found.threads] == [
        ("MainThread", "train"),
        ("reader", "read"),
    ]
    assert found.how == "py-spy"
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["dump", "--pid", str(program.pid), "--json", "--nonblocking"]
    goes_on(program)


# Its own words, of 0.4.
DENIED = "echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1"
SCOPES = {
    "1": "kernel.yama.ptrace_scope is 1, so a process may read only its own children. Needed: "
    "ptrace_scope 0, or CAP_SYS_PTRACE",
    "3": "kernel.yama.ptrace_scope is 3",
    "0": "CAP_SYS_PTRACE is missing, or the container's seccomp profile forbids it",
}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_right_that_py_spy_lacks_is_named(
    start: Start, py_spy: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    scope: str,
) -> None:  # fmt: skip
    (tmp_path / "scope").write_text(f"{scope}\n")
    monkeypatch.setattr(stacks, "_YAMA", tmp_path / "scope")
    monkeypatch.setattr(stacks, "_capabilities", lambda: 0)
    py_spy(DENIED)
    [found] = look_at(start(PYTHON))
    assert f"py-spy is not permitted to read it: {SCOPES[scope]}" in found.note
    [found] = look_at(start(PYTHON, ARMED))
    assert found.how == "handler"


@pytest.mark.parametrize("script", ["echo nonsense", "echo '[{}]'", "exit 3", "echo '[[1]]'"])
def test_a_py_spy_that_fails_keeps_no_other_way_from_being_tried(
    start: Start, py_spy: Callable[[str], None], script: str
) -> None:
    py_spy(script)
    [found] = look_at(start(PYTHON, ARMED))
    assert found.how == "handler"


def test_a_program_that_moves_under_py_spys_eyes_is_read_again(
    start: Start, py_spy: Callable[[str], None], tmp_path: Path
) -> None:
    program = start(PYTHON)
    (tmp_path / "answer").write_text(spied(program))
    tries = tmp_path / "tries"
    py_spy(f"echo x >> {tries}; [ $(wc -l < {tries}) = 3 ] && exec cat {tmp_path}/answer; exit 1")
    [found] = look_at(program)
    assert found.how == "py-spy"


def test_py_spy_is_not_taken_from_a_folder_that_somebody_stands_in(
    start: Start, py_spy: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    py_spy(f"touch {tmp_path}/asked")
    monkeypatch.setenv("PATH", os.environ["PATH"].replace(f"{tmp_path}/bin:", ".:", 1))
    monkeypatch.chdir(tmp_path / "bin")
    [found] = look_at(start(PYTHON))
    assert "no py-spy on its PATH" in found.note
    assert not (tmp_path / "asked").exists()


def test_an_interpreter_in_a_container_is_not_run_outside_of_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_namespace", str)
    [found] = look_at(start(PYTHON))
    assert "its Python's remote hook is in a container" in found.note


def test_an_interpreter_without_a_hook_says_which_has_one(start: Start) -> None:
    if hasattr(sys, "remote_exec"):
        pytest.skip("this interpreter has one")
    [found] = look_at(start(PYTHON))
    assert "its Python has no remote hook (3.14 has)" in found.note


def hooked(folder: Path) -> Path:
    """The script that a program is to run, in a directory of its own."""
    folder.mkdir()
    script = folder / "hook.py"
    script.write_text(stacks._HOOKED.format(folder=str(folder), most=5))
    return script


# Runs it as sys.remote_exec does: in the main thread, between two lines of the program.
RUNS = """\
import sys, threading
def runs():
    exec(compile(open(sys.argv[1]).read(), "<string>", "exec"), {})
side = threading.Thread(target=threading.Event().wait, daemon=True, name="side")
side.start()
runs()
"""


def test_a_program_writes_its_stacks_by_the_hooks_script(tmp_path: Path) -> None:
    script = hooked(tmp_path / "asked")
    (script.parent / "wanted").touch()
    subprocess.run([sys.executable, "-c", RUNS, script], check=True)
    threads = stacks._py_spys((script.parent / "stacks").read_text(), 0)
    assert [thread.name for thread in threads] == ["MainThread", "side"]
    assert [frame.function for frame in threads[0].frames] == ["runs", "<module>"]


def test_a_program_that_runs_the_script_too_late_removes_it(tmp_path: Path) -> None:
    script = hooked(tmp_path / "asked")
    subprocess.run([sys.executable, "-c", RUNS, script], check=True)
    assert not script.parent.exists()


@pytest.mark.parametrize("code", [NATIVE, WAITS.format(before="")], ids=["native", "Python"])
def test_python_3_14_is_read_by_python_itself(start: Start, code: str) -> None:
    python = shutil.which("python3.14")
    if python is None:
        pytest.skip("no python3.14 on PATH")
    program = start([python, "-c", code])
    [found] = look_at(program)
    assert found.how == "hook"
    assert functions(found)[-1] == "<module>"
    goes_on(program)


def test_this_process_is_armed_while_the_body_runs(start: Start) -> None:
    code = (
        "import sys\nfrom clusterddp.processes.stacks import armed\n"
        "with armed():\n    print('ready', flush=True); sys.stdin.readline()\n"
        "print('ready', flush=True); sys.stdin.readline()\nprint('got on')"
    )
    package = {"PYTHONPATH": str(Path(stacks.__file__).parents[2])}
    program = start([sys.executable, "-c", code], package)
    [found] = look_at(program)
    assert found.how == "handler"
    assert program.stdin
    assert program.stdout
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "ready\n"
    [found] = look_at(program)
    assert "it has no stack handler" in found.note
    goes_on(program)


SITES = {"none": (None, ""), "one": ("import sys; sys.mine = __file__", "mine")}


@pytest.mark.parametrize(("site", "attribute"), SITES.values(), ids=SITES)
def test_arming_hides_no_sitecustomize_and_leaves_no_folder_on_the_path(
    tmp_path: Path, site: str | None, attribute: str
) -> None:
    if site:
        (tmp_path / "sitecustomize.py").write_text(site)
    code = (
        "import json, sys\n"
        "print(json.dumps([sys.path, getattr(sys, 'mine', ''),"
        " getattr(sys.modules['sitecustomize'], '__file__', '')]))"
    )
    path = f"{arming_folder()}:{tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    entries, mine, module = json.loads(done.stdout)
    assert arming_folder() not in entries
    assert str(tmp_path) in entries
    own = str(tmp_path / "sitecustomize.py")
    assert mine == (own if attribute else "")
    if attribute:
        assert module == own


ENDS = """if True:
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    core, others = {min(os.sched_getaffinity(0))}, set(os.listdir("/proc/self/task"))
    groups = [dist.new_group([0]) for _ in range(20)]
    for thread in [int(name) for name in os.listdir("/proc/self/task") if name not in others]:
        os.sched_setaffinity(thread, core), os.setpriority(os.PRIO_PROCESS, thread, 19)
    os.sched_setaffinity(0, core)
    [dist.all_reduce(torch.ones(1), group=group) for group in groups]
"""


def test_an_armed_program_outlives_what_its_gloo_threads_hold() -> None:
    for _ in range(3):  # without the wait most end by SIGABRT, before Python 3.14
        subprocess.run([sys.executable, "-c", ENDS], env={**os.environ, **ARMED}, check=True)


def test_a_program_that_ends_meanwhile_is_told_of(start: Start) -> None:
    program = start(PYTHON, ARMED)
    process = table.read_process(program.pid)
    assert process
    program.communicate("on\n")
    gone = stacks._read_program(replace(process, state="S"))
    assert gone.threads == ()
    assert gone.note


PLACES = {
    "hrtimer_nanosleep": "sleeping in hrtimer_nanosleep",
    "poll_schedule_timeout.constprop.0": "sleeping in poll_schedule_timeout",
    "0": "sleeping",  # it may not be known
    "": "sleeping",
}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_program_waits_in_is_named(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "read_text", lambda *_: place)
    assert table.Process(7, "sh", "S", 1, 5, 0).doing == PLACES[place]


def test_a_process_in_a_container_is_known_by_its_number_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "status", lambda _: {"NSpid": "4711\t7"})
    assert table.Process(4711, "python", "S", 1, 5, 0).own_pid == 7


def test_a_programs_name_can_hold_anything(start: Start, tmp_path: Path) -> None:
    shell = tmp_path / "a) R 1 ("
    shell.symlink_to(shutil.which("bash") or "bash")
    program = start([str(shell), "-c", "echo ready; read line; echo got $line"])
    process = table.read_process(program.pid)
    assert process
    assert (process.name, process.parent) == ("a) R 1 (", os.getpid())
    goes_on(program)


def test_the_children_of_a_process_are_found_by_their_numbers(start: Start) -> None:
    program = start(["bash", "-c", "sleep 1000 & echo ready; read line; kill $!; echo got $line"])
    wait_for(lambda: "sleep" in look_at(program)[0].note, "the shell's child")
    [found] = look_at(program)
    assert "no Python in it (bash > sleep)" in found.note
    goes_on(program)
